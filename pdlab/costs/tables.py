"""Reading measurement tables: CSV in, records out. Plain Python, so that any room may read them without pandas.

One table is one experiment of one device: `measurements/<device>/<experiment>.csv`. The shipped file and the user's own
under home_dir() are read one after the other, so a user's row replaces a shipped one of the same key. Writing is the
concern of bench.records.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdlab.core.errors import MeasurementError
from pdlab.core.paths import data_dir, home_dir

COLUMNS = (
    "run_id", "time_utc", "experiment", "variant", "params", "metric", "unit",
    "median", "p10", "p90", "n", "kind", "status", "provenance_id",
)  # fmt: skip
KINDS = ("measured", "simulated", "predicted")
UNITS = ("ms", "us", "tok/s", "req/s", "TB/s", "TFLOP/s", "bytes", "ratio", "percent", "count")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")


@dataclass(frozen=True)
class Row:
    """One measured quantity. `median`, `p10`, `p90` are in `unit`; NaN in a skipped row. `params` are what it depends on."""

    run_id: str
    time_utc: str
    experiment: str
    variant: str
    metric: str
    unit: str
    median: float
    p10: float
    p90: float
    n: int
    kind: str = "measured"
    status: str = "ok"
    provenance_id: str = ""
    params: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        """What makes two rows measurements of the same thing; of those, the newest ok one counts."""
        return (self.experiment, self.variant, params_json(self.params), self.metric, self.kind)

    def cells(self) -> list[str]:
        """The row as its CSV cells, in the order of COLUMNS; whole numbers whole, others with six significant digits."""
        numbers = [_cell(x) for x in (self.median, self.p10, self.p90)]
        head = [self.run_id, self.time_utc, self.experiment, self.variant, params_json(self.params), self.metric, self.unit]
        return [*head, *numbers, str(self.n), self.kind, self.status, self.provenance_id]


def _cell(x: float) -> str:
    if math.isnan(x):
        return ""
    return str(int(x)) if x == int(x) and abs(x) < 1e15 else f"{x:.6g}"


def params_json(params: dict[str, Any]) -> str:
    """Compact JSON with sorted keys; only strings, numbers, booleans and None are parameters."""
    for name, value in params.items():
        if not isinstance(name, str) or not isinstance(value, str | int | float | bool | None):
            raise MeasurementError(f"params[{name!r}]={value!r} cannot be written", "use strings, numbers and booleans")
    try:
        return json.dumps(params, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise MeasurementError(f"params {params!r} hold a number that JSON has not ({error})", "use finite numbers") from error


def validate(row: Row, where: str = "the row") -> Row:
    """The row itself, or a MeasurementError naming the first value that breaks the format."""

    def check(ok: bool, name: str, value: object, right: str) -> None:
        if not ok:
            raise MeasurementError(f"{where}: {name}={value!r} breaks the measurement format", right)

    for name in ("run_id", "time_utc", "experiment", "variant", "metric"):
        value = getattr(row, name)
        check(isinstance(value, str) and bool(value.strip()), name, value, "use a name that is not empty")
    check(_TIME.fullmatch(row.time_utc) is not None, "time_utc", row.time_utc, "use UTC as 2026-01-31T23:59:59Z")
    check(_NAME.fullmatch(row.experiment) is not None, "experiment", row.experiment, "use letters, digits, _, . and -")
    check(row.kind in KINDS, "kind", row.kind, f"use one of: {', '.join(KINDS)}")
    check(row.unit in UNITS, "unit", row.unit, f"use one of: {', '.join(UNITS)}")
    known = row.status in ("ok", "throttled") or (row.status.startswith("skipped:") and bool(row.status[8:].strip()))
    check(known, "status", row.status, "use ok, throttled or skipped:REASON")
    check(isinstance(row.n, int) and row.n >= 0, "n", row.n, "use how many samples there were")
    if not row.status.startswith("skipped:"):
        for name in ("median", "p10", "p90"):
            check(math.isfinite(getattr(row, name)), name, getattr(row, name), "use a finite number")
        check(row.p10 <= row.median <= row.p90, "p10, median, p90", (row.p10, row.median, row.p90), "quantiles rise")
    try:
        params_json(row.params)
    except MeasurementError as error:
        raise MeasurementError(f"{where}: {error.message}", error.hint) from error
    return row


def _number(cell: str) -> float:
    """A number as tables hold it; Python's own reading would also take 1_000."""
    if "_" in cell:
        raise ValueError(f"{cell!r} is no number")
    return float(cell) if cell else math.nan


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("params names a key twice")
    return found


def parse_row(cells: list[str], where: str) -> Row:
    """One CSV record as a validated Row; `where` names file and line in errors."""
    if len(cells) != len(COLUMNS):
        raise MeasurementError(f"{where}: {len(cells)} cells instead of {len(COLUMNS)}", f"columns: {','.join(COLUMNS)}")
    c = dict(zip(COLUMNS, cells))
    try:
        params = json.loads(c.pop("params"), object_pairs_hook=_object)
        if not isinstance(params, dict):
            raise ValueError("params is not a JSON object")
        numbers = {name: _number(c.pop(name)) for name in ("median", "p10", "p90")}
        n = int(c.pop("n").replace("_", "?"))
    except ValueError as error:
        raise MeasurementError(f"{where}: {error}", "params is JSON, median, p10 and p90 are numbers, n is whole") from error
    return validate(Row(**c, **numbers, n=n, params=params), where)  # type: ignore[arg-type]


def read_file(path: Path) -> list[Row]:
    """Every row of one table, in order. A broken header or line raises MeasurementError with the file and line."""
    try:
        with path.open(newline="", encoding="utf-8") as f:
            reader = csv.reader(f, strict=True)
            header = next(reader, None)
            if header is None or tuple(header) != COLUMNS:
                raise MeasurementError(f"{path} does not start with the measurement header", f"expected: {','.join(COLUMNS)}")
            rows = []
            for cells in filter(None, reader):
                rows.append(row := parse_row(cells, where := f"{path}, line {reader.line_num}"))
                if row.experiment != path.stem:
                    raise MeasurementError(f"{where}: it is a row of {row.experiment!r}", f"move it to {row.experiment}.csv")
            return rows
    except (csv.Error, UnicodeDecodeError, OSError) as error:
        raise MeasurementError(f"{path} is not a readable CSV table ({error})", "restore it from git, or delete it") from error


def check_name(name: str, what: str) -> str:
    """A device slug or experiment name that may become a path."""
    if not _NAME.fullmatch(name) or ".." in name:
        raise MeasurementError(f"{what} {name!r} is not a name", "use letters, digits, _, . and -")
    return name


def roots(extra: Path | None = None) -> list[Path]:
    """Folders of measurements, the last one winning: shipped, the user's own, then `extra`."""
    found = [data_dir() / "measurements", home_dir() / "measurements"]
    return found if extra is None else [*found, extra]


def read(device: str, experiment: str, extra: Path | None = None) -> list[Row]:
    """All rows of an experiment on a device, oldest folder first; empty where there are none."""
    check_name(device, "device")
    check_name(experiment, "experiment")
    rows: list[Row] = []
    for root in roots(extra):
        path = root / device / f"{experiment}.csv"
        if path.exists():
            rows += read_file(path)
    return rows


def newest(rows: Iterable[Row]) -> list[Row]:
    """Of every key the last ok row. Files are append-only, so the last is the newest."""
    last: dict[tuple[str, str, str, str, str], Row] = {}
    for row in rows:
        if row.ok:
            last.pop(row.key, None)  # so that the order of the result is the order of measuring
            last[row.key] = row
    return list(last.values())


def devices(extra: Path | None = None) -> list[str]:
    """Slugs of the devices that have any table."""
    return sorted({p.parent.name for root in roots(extra) if root.is_dir() for p in root.glob("*/*.csv")})


def experiments(device: str, extra: Path | None = None) -> list[str]:
    """Names of the experiments recorded for a device."""
    check_name(device, "device")
    return sorted({p.stem for root in roots(extra) if (root / device).is_dir() for p in (root / device).glob("*.csv")})
