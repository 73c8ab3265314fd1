"""index.html of a batch: the ledger of claims, the machine, each notebook; `python -m pdlab.runner.report DIR` writes it
again from the results that are there.
"""

from __future__ import annotations

import html
import json
import math
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pdlab import __version__
from pdlab.bench.records import snapshot
from pdlab.core.errors import NotebookError, PdlabError
from pdlab.runner.batch import load_results, replace_text
from pdlab.runner.notebook import versions
from pdlab.runner.pages import page
from pdlab.runner.process import EXIT_CODES

REPORT_CSS = """
.tally span { margin-right: .8rem; } .path { white-space: nowrap; }
@media (max-width: 40rem) { .stack thead { display: none; }
  .stack tr { display: block; padding: .5rem 0; border-bottom: 1px solid var(--line); }
  .stack td { display: block; border: 0; padding: .1rem 0; text-align: left; white-space: normal; }
  .stack td[data-label]:not(:empty)::before { content: attr(data-label) ": "; color: var(--soft); } }
"""
VERDICT_CLASS = {"reproduced": "good", "partly": "warn", "not_reproduced": "bad", "impossible": "bad", "not_measured": "soft"}
REFERENCE = "nvidia-h200"  # the device whose records the ledger judges when nothing else is asked for


def write(out: Path, machine: dict[str, Any], rows: list[dict[str, Any]]) -> Path:
    """The report of these result rows. Its parts are independent: one that cannot be made says why in its place."""
    parts = [
        ("The claims", ledger),
        ("The machine", lambda: machine_table(machine)),
        ("The notebooks", lambda: notebooks(rows)),
        ("Two devices side by side", lambda: comparison(machine.get("slug"))),
    ]
    body = f"<h1>pdlab report</h1><p class='soft'>Written {time.strftime('%Y-%m-%d %H:%M')} by pdlab {__version__}.</p>"
    sections = {}
    for title, make in parts:
        try:
            sections[title] = make()
        except (PdlabError, ImportError) as error:
            sections[title] = f"<p class='bad'>{html.escape(str(error))}</p>"
    anchors = {title: title.split()[1] for title, content in sections.items() if content}
    tally = Counter(row["status"] for row in rows)
    body += "<p>" + " · ".join(f"<a href='#{anchor}'>{title}</a>" for title, anchor in anchors.items()) + "</p>"
    body += f"<p>Notebooks: {', '.join(f'{n} {status}' for status, n in tally.items()) or 'none'}</p>"
    body += "".join(f"<section id='{anchor}'><h2>{title}</h2>{sections[title]}</section>" for title, anchor in anchors.items())
    replace_text(out / "index.html", page("pdlab report", body, REPORT_CSS))
    if "provenance" not in machine:  # else this report is written anew, perhaps on another machine
        machine["provenance"] = snapshot(gpu_index=None if str(machine.get("device", "cpu")).startswith("cpu") else 0)
    replace_text(out / "machine.json", json.dumps(machine, indent=1) + "\n")
    return out / "index.html"


def cells(labels: list[str], values: list[str], numbers: tuple[int, ...] = ()) -> str:
    """One table row; the labels are shown beside the values where a phone stacks them."""
    return "".join(
        f"<td data-label='{html.escape(label)}'{' class=number' if i in numbers else ''}>{value}</td>"
        for i, (label, value) in enumerate(zip(labels, values, strict=True))
    )


def grid(labels: list[str], rows: list[str], numbers: tuple[int, ...] = ()) -> str:
    head = "".join(f"<th{' class=number' if i in numbers else ''}>{html.escape(label)}</th>" for i, label in enumerate(labels))
    return f"<div class=scroll><table class=stack><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"


def badge(text: str, kind: str) -> str:
    return f"<span class='badge {kind}'>{html.escape(text.replace('_', ' '))}</span>"


def ledger() -> str:
    """Every claim of the article with our figure and verdict, judged on the reference device's records."""
    from pdlab import claims

    verdicts = claims.judge(REFERENCE)
    tally = Counter(v.verdict for v in verdicts)
    counts = "".join(f"<span>{n} {badge(v, VERDICT_CLASS.get(v, ''))}</span>" for v, n in tally.items())
    labels = ["id", "claim", "article", "ours", "verdict"]
    lines = []
    for v in verdicts:
        name, verdict = html.escape(v.id), badge(v.verdict, VERDICT_CLASS.get(v.verdict, ""))
        reason = f"{verdict}<br><span class=soft>{html.escape(v.reason)}</span>"
        ours = "–"
        if v.ours:
            of_what = ", ".join(filter(None, (v.what, v.ours["kind"])))
            ours = f"{html.escape(claims.said(v.ours))}<br><span class=soft>{html.escape(of_what)}</span>"
        values = [f"<b>{name}</b>", html.escape(v.claim), html.escape(v.article), ours, reason]
        lines.append(f"<tr id='claim-{name}'>{cells(labels, values)}</tr>")
    return f"<p class=tally>{counts}</p><p class=soft>Judged on the records of {REFERENCE}.</p>" + grid(labels, lines)


def machine_table(machine: dict[str, Any]) -> str:
    gib = f"{machine['memory_bytes'] / 2**30:.0f} GiB" if machine.get("memory_bytes") else "unknown"
    facts = {
        "device": machine.get("name"),
        "memory": gib,
        "capability": ".".join(map(str, machine["capability"])) if machine.get("capability") else None,
        "dtype": machine.get("dtype"),
        "profile": machine.get("profile"),
        "note": machine.get("problem"),
        "versions": " · ".join(f"{name} {version}" for name, version in versions().items()),
    }
    rows = [f"<tr><th>{name}</th><td>{html.escape(str(value))}</td></tr>" for name, value in facts.items() if value]
    return f"<div class=scroll><table>{''.join(rows)}</table></div>"


def notebooks(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "<p>No notebook was run.</p>"
    labels, lines, seen = ["notebook", "status", "time", "memory", "what happened"], [], set()
    for row in rows:
        stem = Path(row["notebook"]).stem
        name = html.escape(stem)
        if row["output"]:
            base = quote(row["output"].removesuffix(".ipynb"))
            name = f"<a href='{base}.html'>{name}</a> <a class=soft href='{base}.ipynb'>ipynb</a>"
        settings = html.escape(" ".join(f"{k}={v}" for k, v in row["params"].items()))
        kind = "bad" if EXIT_CODES[row["status"]] else "warn" if row["status"] == "skipped" else "good"
        memory = f"{row['peak_memory_bytes'] / 2**20:,.0f} MiB" if row["peak_memory_bytes"] else "–"
        values = [
            f"{name}<br><span class='soft mono'>{settings}</span>",
            badge(row["status"], kind),
            f"{row['seconds']:.1f} s",
            memory,
            f"<span class=bad>{html.escape(row['error'])}</span>" if row["error"] else "",
        ]
        anchor = "" if stem in seen else f" id='{html.escape(stem, quote=True)}'"
        seen.add(stem)
        lines.append(f"<tr{anchor}>{cells(labels, values, (2, 3))}</tr>")
    total = f"{len(rows)} run{'s' * (len(rows) != 1)}, {sum(row['seconds'] for row in rows):.0f} s in all"
    table = " · <a href='results.csv'>as a table</a> · <a href='results.json'>as JSON</a>"
    return grid(labels, lines, (2, 3)) + f"<p class=soft>{total}{table}</p>"


def comparison(slug: str | None) -> str:
    """This machine beside the reference device, where both have measurements of the same things."""
    from pdlab.bench import compare
    from pdlab.bench.records import devices

    if not slug or slug == REFERENCE or not {slug, REFERENCE} <= set(devices()):
        return ""
    rows = [row for row in compare.compare_rows(REFERENCE, slug) if row["ratio"] is not None]
    labels = ["measurement", REFERENCE, slug, "ratio"]
    lines = []
    for row in rows:
        settings = " ".join(f"{name}={value}" for name, value in sorted(row["params"].items()))
        what = (
            f"{row['experiment']} {row['metric']} ({row['variant']})<br><span class='soft mono'>{html.escape(settings)}</span>"
        )
        sides = [f"{row[s]:.4g} {row['unit']}{_share(row[f'{s}_roofline'])}" for s in ("a", "b")]
        values = [what, *sides, f"{row['ratio']:.3g}"]
        lines.append(f"<tr>{cells(labels, values, (1, 2, 3))}</tr>")
    if not lines:
        return ""
    note = (
        "<p class=soft>In brackets: the share of each device's own roofline. Dots: ratio of the two, on a logarithmic axis.</p>"
    )
    return ratio_figure(rows, slug) + note + grid(labels, lines, (1, 2, 3))


def _share(share: float | None) -> str:
    return "" if share is None else f" ({100 * share:.0f} %)"


def ratio_figure(rows: list[dict[str, Any]], slug: str) -> str:
    """One dot a measurement on a logarithmic axis, drawn as SVG in the page's own colours."""
    positive = [row for row in rows if row["ratio"] > 0][:40]
    if not positive:
        return ""
    logs = [math.log10(row["ratio"]) for row in positive]
    low, high = min(math.floor(min(logs)), 0), max(math.ceil(max(logs)), 0)
    span, top = max(high - low, 1), 20 * len(positive)

    def x(value: float) -> float:
        return 260 + 420 * (value - low) / span

    ticks = "".join(
        f"<line x1='{x(t):.0f}' x2='{x(t):.0f}' y1='0' y2='{top}' style='stroke: var(--line)'/>"
        f"<text x='{x(t):.0f}' y='{top + 16}' text-anchor='middle'>{10.0**t:g}×</text>"
        for t in range(low, high + 1)
    )
    dots = "".join(
        f"<text x='250' y='{y + 4}' text-anchor='end'>{html.escape((row['experiment'] + ' ' + row['metric'])[:36])}</text>"
        f"<circle cx='{x(value):.1f}' cy='{y}' r='4' style='fill: var(--link)'/>"
        for y, row, value in zip(range(10, top, 20), positive, logs, strict=True)
    )
    title = f"{slug} over {REFERENCE}, measurement by measurement"
    return (
        f"<svg viewBox='0 0 700 {top + 24}' role='img' aria-label='{title}' font-size='12' style='fill: var(--fg)'>"
        f"<title>{title}</title>{ticks}{dots}</svg>"
    )


def main(arguments: list[str]) -> int:
    out = Path(arguments[0] if arguments else "runs/latest")
    rows = list(load_results(out).values())
    try:
        if not rows:
            raise NotebookError(f"{str(out)!r} holds no results of a batch", "run one first: make run")
        machine = json.loads((out / "machine.json").read_text(encoding="utf-8")) if (out / "machine.json").is_file() else {}
        print(os.path.relpath(write(out, machine, rows)))
    except PdlabError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
