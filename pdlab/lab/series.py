"""The series and its ledger as tables for notebooks, drawn from notebooks/manifest.json and data/claims.csv."""

from __future__ import annotations

import json
import re
from typing import Any

from pdlab.core.paths import checkout_dir


def entries() -> list[dict[str, Any]]:
    """The notebooks of the manifest, in order; empty where there is no checkout."""
    root = checkout_dir()
    path = root / "notebooks" / "manifest.json" if root else None
    return json.loads(path.read_text(encoding="utf-8"))["notebooks"] if path and path.is_file() else []


def _time(entry: dict[str, Any]) -> str:
    seconds, where = entry.get("seconds", {}), entry.get("measured_on", {})
    return "; ".join(f"{profile} {s:.0f} s ({where.get(profile, 'not said where')})" for profile, s in seconds.items()) or "–"


def executed(file: str) -> list[str]:
    """Markdown links, from a notebook's folder, to the pages that are kept of a notebook's runs, one a device."""
    root = checkout_dir()
    pages = sorted((root / "docs" / "executed").glob(f"*/{file.removesuffix('.ipynb')}.html")) if root else []
    return [f"[{page.parent.name}](../docs/executed/{page.parent.name}/{page.name})" for page in pages]


def contents() -> Any:
    """Markdown: number, title with its link, goal, claims, time measured, hardware; beside the title the kept pages."""
    from IPython.display import Markdown

    lines = ["| | notebook | what you will see | claims | time | needs |", "|---|---|---|---|---|---|"]
    for e in entries():
        link, pages = f"[{e['title']}]({e['file']})", executed(e["file"])
        link += f" (executed: {', '.join(pages)})" if pages else ""
        lines.append(
            f"| {e['file'][:2]} | {link} | {e['goal']} | {', '.join(e['claims']) or '–'} | {_time(e)} | {e['hardware']} |"
        )
    return Markdown("\n".join(lines) if len(lines) > 2 else "The contents are in the checkout's `notebooks/manifest.json`.")


def since(device: str) -> str:
    """The day of a device's newest measurement, for headings: " (2026-11-29)"; empty where nothing was recorded."""
    from pdlab.costs import tables

    paths = [path for root in tables.roots() for path in sorted((root / device).glob("*.csv"))]
    lines = (line for path in paths for line in path.read_text(encoding="utf-8").splitlines())  # not parsed: only the day
    days = [found[1] for line in lines if (found := re.match(r"[^,]*,(\d{4}-\d\d-\d\d)T", line))]
    return f" ({max(days)})" if days else ""


def ledger(device: str) -> Any:
    """Markdown: every claim, what the article says, and the verdict from what is recorded for `device`."""
    from IPython.display import Markdown

    from pdlab.claims import judge

    lines = [f"| | claim | the article | verdict from {device}'s records{since(device)} |", "|---|---|---|---|"]
    for v in judge(device):
        lines.append("| " + " | ".join(map(literal, (v.id, v.claim, v.article, v.verdict.replace("_", " ")))) + " |")
    return Markdown("\n".join(lines))


def literal(text: str) -> str:
    """`text` for a cell of a Markdown table, where a name such as __restrict__ is no emphasis."""
    return re.sub(r"([|_*])", r"\\\1", text)
