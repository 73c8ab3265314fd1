"""Keeps pages of a run as docs/executed/<device>/<notebook>.html: `python docs/executed_copies.py runs/latest 00 01`.

The stored notebooks have no outputs; these copies show what a run looks like on a device that the reader may not have. Links
into the run's own report lead to a neighbouring copy, or to the notebook, instead.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "docs" / "executed"
MAX_BYTES = 2_000_000
HERE = re.compile(r"(?<![\w.:/-])/(?:home|root|tmp|usr|opt|mnt|var|work|content|Users)/[^\s\"'<]*")  # a machine's own paths


def machine_paths(page: str) -> set[str]:
    return set(HERE.findall(re.sub(r"base64,[A-Za-z0-9+/=]+", "", page)))


def copied(page: str, stem: str, neighbours: set[str]) -> str:
    """The page with links that lead somewhere from docs/executed/<device>/."""

    def link(match: re.Match[str]) -> str:
        other = match[1]
        lead = "#" if other == stem else f"{other}.html" if other in neighbours else f"../../../notebooks/{other}.ipynb"
        return f'href="{lead}"'

    page = re.sub(r'href="index\.html#(\w+)"', link, page)
    return page.replace('<a href="index.html">Report</a>', '<a href="../../../README.md">pdlab</a>')


def keep(run: Path, wanted: list[str]) -> list[Path]:
    device = json.loads((run / "machine.json").read_text(encoding="utf-8"))["slug"]
    rows = [row for row in json.loads((run / "results.json").read_text(encoding="utf-8")) if row["status"] == "ok"]
    pages = {Path(row["notebook"]).stem: run / Path(row["output"]).with_suffix(".html") for row in rows}
    chosen = {stem: page for stem, page in pages.items() if not wanted or stem[:2] in wanted}
    folder = KEPT / device
    folder.mkdir(parents=True, exist_ok=True)
    neighbours, written = {*chosen, *(p.stem for p in folder.glob("*.html"))}, []
    for stem, page in chosen.items():
        text = copied(page.read_text(encoding="utf-8"), stem, neighbours)
        if found := machine_paths(text):
            raise SystemExit(f"{page} shows paths of the machine it ran on: {', '.join(sorted(found))}")
        if len(text.encode()) >= MAX_BYTES:
            raise SystemExit(f"{page} has {len(text.encode()):,} bytes, {MAX_BYTES:,} are too many")
        written.append(folder / f"{stem}.html")
        written[-1].write_text(text, encoding="utf-8")
    return written


if __name__ == "__main__":
    for path in keep(Path(sys.argv[1]), sys.argv[2:]):
        print("kept", path.relative_to(ROOT))
