"""notebooks/manifest.json and the last measured run: `python -m pdlab.runner.manifest runs/latest` records one.

The run's times and memory become rows of the experiment `notebooks`, with the provenance of the machine that ran it (which
need not be the one that records), and the manifest's numbers are those rows' (a test compares the two). Titles, goals, claims
and hardware in the manifest are written by hand.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

from pdlab.core.errors import NotebookError, PdlabError
from pdlab.core.paths import checkout_dir, data_dir
from pdlab.runner.batch import load_results, replace_text

EXPERIMENT = "notebooks"


def measured(stem: str, root: Path | None = None) -> dict[str, dict[str, Any]]:
    """profile → {seconds, memory_bytes, device} of the newest shipped record of a notebook; empty where there is none."""
    newest: dict[tuple[str, str], tuple[str, float, str]] = {}
    for path in sorted((root or data_dir() / "measurements").glob(f"*/{EXPERIMENT}.csv")):
        with path.open(newline="", encoding="utf-8") as stream:
            for row in csv.DictReader(stream):
                params = json.loads(row["params"])
                if params["notebook"] == stem and row["status"] == "ok":
                    key = (params["profile"], row["metric"])
                    newest[key] = max(newest.get(key, ("", 0.0, "")), (row["time_utc"], float(row["median"]), path.parent.name))
    found: dict[str, dict[str, Any]] = {}
    for (profile, metric), (_, value, device) in newest.items():
        numbers = {"seconds": round(value / 1e3)} if metric == "time" else {"memory_bytes": int(value)}
        found.setdefault(profile, {"device": device}).update(numbers)
    return found


def record(out: Path, root: Path) -> list[str]:
    """Appends the runs of `out` that ended well to data/ and writes the manifest anew; returns the notebooks' names."""
    from pdlab.bench.records import Recorder

    try:
        machine = json.loads((out / "machine.json").read_text(encoding="utf-8"))
        device = machine["slug"]
    except (OSError, ValueError, KeyError):
        raise NotebookError(f"{str(out)!r} holds no finished batch", "run one first: make run") from None
    path = root / "notebooks" / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    entries = {Path(entry["file"]).stem: entry for entry in manifest["notebooks"]}
    done = [row for row in load_results(out).values() if row["status"] == "ok" and Path(row["notebook"]).stem in entries]
    with Recorder(
        EXPERIMENT, device, record=True, command=f"pdlab run --profile {done[0]['profile'] if done else 'auto'}"
    ) as rows:
        for row in done:
            of = {"notebook": Path(row["notebook"]).stem, "profile": row["profile"]}
            rows.add("time", 1e3 * row["seconds"], "ms", params=of)
            rows.add("peak_memory", float(row["peak_memory_bytes"] or 0), "bytes", params=of)
        for state in rows.provenance.values():
            state.update(machine.get("provenance") or {}, command=rows.command)
    for stem, entry in entries.items():
        found = measured(stem, root / "data" / "measurements")
        for name in ("seconds", "memory_bytes"):
            entry[name] = {profile: numbers[name] for profile, numbers in sorted(found.items())}
        entry["measured_on"] = {profile: numbers["device"] for profile, numbers in sorted(found.items())}
    replace_text(path, json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")
    return [Path(row["notebook"]).stem for row in done]


def main(arguments: list[str]) -> int:
    root = checkout_dir()
    try:
        if root is None:
            raise NotebookError("there is no checkout here", "record runs in a clone of the repository")
        print("recorded", ", ".join(record(Path(arguments[0] if arguments else "runs/latest"), root)) or "nothing")
    except PdlabError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
