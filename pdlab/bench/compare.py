"""Two devices side by side: the same measurement on each, their ratio, and how close each comes to its own roofline.

Measurements are the same when experiment, variant, metric, kind and every parameter are. Most are found on one device only
(another shape, another dtype): they come last in the rows, and the table for people leaves them out unless asked.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdlab.core.errors import MeasurementError
from pdlab.costs import tables
from pdlab.costs.tables import Row, params_json

if TYPE_CHECKING:
    import pandas as pd

_TIMES = ("ms", "us")
_RATES = ("tok/s", "req/s", "TB/s", "TFLOP/s")


def floor_share(row: Row, rows: Iterable[Row]) -> float | None:
    """The row as a share of its own floor, 0...1: floor / time, or rate / ceiling; None where no floor was recorded.

    The floor is the row `floor_<metric>` of the same parameters, of the same run and variant if there is one.
    """
    floors = [r for r in rows if r.metric == f"floor_{row.metric}" and r.params == row.params and r.unit == row.unit]
    floors.sort(key=lambda r: (r.run_id == row.run_id, r.variant == row.variant))
    if not floors or not row.median or not floors[-1].median:
        return None
    floor = floors[-1].median
    return floor / row.median if row.unit in _TIMES else row.median / floor if row.unit in _RATES else None


def compare_rows(a: str, b: str, experiment: str | None = None, extra: Path | None = None) -> list[dict[str, Any]]:
    """One dict for each measurement that either device has, those that both have first: experiment, variant, metric, unit,
    params, kind, a, b, ratio (b over a), a_roofline and b_roofline (shares of each one's own floor). None where a device has
    no such row.

    Raises MeasurementError for a device without any table, and for an experiment that neither has.
    """
    for device in (a, b):
        if device not in tables.devices(extra):
            known = ", ".join(tables.devices(extra)) or "none yet"
            raise MeasurementError(f"nothing was recorded on {device!r}", f"devices with measurements: {known}")
    names = sorted({*tables.experiments(a, extra), *tables.experiments(b, extra)})
    if experiment is not None and experiment not in names:
        raise MeasurementError(f"neither device has the experiment {experiment!r}", f"recorded: {', '.join(names)}")
    result = []
    for name in names if experiment is None else [experiment]:
        sides = [{r.key: r for r in tables.newest(tables.read(device, name, extra))} for device in (a, b)]
        for key in dict.fromkeys([*sides[0], *sides[1]]):
            pair = [side.get(key) for side in sides]
            row = pair[0] or pair[1]
            assert row is not None
            if row.metric.startswith("floor_"):
                continue
            left, right = (r.median if r else None for r in pair)
            shares = [floor_share(r, side.values()) if r else None for r, side in zip(pair, sides)]
            result.append(
                {
                    "experiment": name,
                    "variant": row.variant,
                    "metric": row.metric,
                    "unit": row.unit,
                    "params": row.params,
                    "kind": row.kind,
                    "a": left,
                    "b": right,
                    "ratio": right / left if left and right is not None else None,
                    "a_roofline": shares[0],
                    "b_roofline": shares[1],
                }
            )
    return sorted(result, key=lambda row: not _shared(row))  # stable: each half stays in the order of the tables


def _shared(row: dict[str, Any]) -> bool:
    return row["a"] is not None and row["b"] is not None


def compare(a: str, b: str, experiment: str | None = None, extra: Path | None = None) -> pd.DataFrame:
    """compare_rows as a DataFrame; `params` as compact JSON."""
    import pandas as pd

    rows = [row | {"params": params_json(row["params"])} for row in compare_rows(a, b, experiment, extra)]
    columns = [
        "experiment", "variant", "metric", "unit", "params", "kind", "a", "b", "ratio", "a_roofline", "b_roofline",
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=columns)


def side_by_side(rows: Iterable[dict[str, Any]], a: str, b: str) -> pd.DataFrame:
    """The rows that both devices have as a table to be read in a notebook: text, and an en dash where no floor was recorded."""
    import pandas as pd

    lines = []
    for r in filter(_shared, rows):
        shares = ["–" if r[side] is None else f"{100 * r[side]:.0f} %" for side in ("a_roofline", "b_roofline")]
        settings = ", ".join(f"{name} {value}" for name, value in sorted(r["params"].items()))
        what = f"{r['experiment']}: {r['variant']}, {r['metric']}" + ("" if r["kind"] == "measured" else f" ({r['kind']})")
        numbers = [f"{r[side]:.4g}" if r[side] is not None else "–" for side in ("a", "b", "ratio")]
        lines.append([what, settings, *numbers[:2], r["unit"], numbers[2], *shares])
    columns = ["measurement", "settings", a, f"{b} ", "unit", "ratio", f"{a}, of its roofline", f"{b}, of its roofline "]
    return pd.DataFrame(lines, columns=columns)


def render(rows: list[dict[str, Any]], a: str, b: str, *, everything: bool = False) -> str:
    """A table for people of the rows that both devices have, or with `everything` of all; shares of the roofline in percent.

    What is left out is counted below it, and where nothing is in common that is said instead of an empty table.
    """
    shared = [row for row in rows if _shared(row)]
    shown = rows if everything else shared
    lines = _table(shown, a, b) if shown else [f"{a} and {b} have no measurement in common"]
    if shared:
        lines.append(f"ratio: {b} over {a}; in brackets the share of each device's own roofline")
    for device, side in ((a, "a"), (b, "b")):
        alone = [row for row in rows if row[side] is not None and not _shared(row)]
        if alone:
            names = ", ".join(sorted({row["experiment"] for row in alone}))
            lines.append(f"on {device} alone: {len(alone):,} of {names}")
    if not shared:
        lines.append("a measurement counts as the same where variant, metric and every parameter are, the dtype among them;")
        lines.append("to have some in common run the same `pdlab bench NAME --record` on both")
    if len(shown) < len(rows):
        lines.append("--all shows these too")
    return "\n".join(lines)


def _table(rows: list[dict[str, Any]], a: str, b: str) -> list[str]:
    """A line a row below a line of headings, columns aligned; an en dash where a device has no such row."""

    def number(value: float | None) -> str:
        return "–" if value is None else f"{value:.4g}"

    def side(value: float | None, share: float | None) -> str:
        return number(value) + (f" ({100 * share:.0f} %)" if share is not None else "")

    head = ("measurement", a, b, "ratio", "unit")
    body = [
        (
            " ".join([r["experiment"], r["variant"], r["metric"], *(f"{k}={v}" for k, v in sorted(r["params"].items()))])
            + ("" if r["kind"] == "measured" else f" [{r['kind']}]"),
            side(r["a"], r["a_roofline"]),
            side(r["b"], r["b_roofline"]),
            number(r["ratio"]),
            r["unit"],
        )
        for r in rows
    ]
    widths = [max(len(line[i]) for line in [head, *body]) for i in range(len(head))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(line, widths)).rstrip() for line in [head, *body]]
