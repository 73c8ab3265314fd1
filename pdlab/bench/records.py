"""Writing measurements: rows with provenance, appended so that neither a crash nor a neighbour can break a table.

    <root>/<device>/<experiment>.csv      rows, see costs.tables
    <root>/<device>/provenance.json       {provenance_id: what the numbers were measured with}

The root is runs/measurements by default; `record=True` means data/measurements in a checkout, and the user's own folder
under home_dir() for an installed package. A file is rewritten whole beside itself and moved into place under a lock on its
folder, so a reader sees the old table or the new one, never half a line.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdlab.core.errors import MeasurementError
from pdlab.core.paths import checkout_dir, data_dir, home_dir
from pdlab.costs.tables import COLUMNS, KINDS, UNITS, Row, check_name, devices, experiments, newest, params_json, read, validate
from pdlab.hardware import nvml
from pdlab.hardware.timing import Timings

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "COLUMNS", "KINDS", "UNITS", "Recorder", "Row", "commit_id", "devices", "experiments", "frame", "latest", "name_command",
    "provenance_of", "read_rows", "snapshot", "target_root", "write_rows",
]  # fmt: skip

_STATE_SECONDS = 5.0  # clocks and temperature are read again for rows that are further apart than this


def utc_now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _git(root: Path, *args: str) -> str:
    command = ["git", "-C", str(root), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()


def commit_id() -> str:
    """The checkout's commit, "+changes" after it where tracked files differ; else PDLAB_COMMIT; else "unknown"."""
    root = checkout_dir()
    if root is not None and (root / ".git").exists():
        try:
            head, changes = (_git(root, *args) for args in (("rev-parse", "HEAD"), ("status", "--porcelain", "-uno", "pdlab")))
            return head + ("+changes" if changes else "")
        except (OSError, subprocess.SubprocessError):
            pass
    return os.environ.get("PDLAB_COMMIT") or "unknown"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _torch_version() -> str | None:
    torch = sys.modules.get("torch")  # carries the CUDA build in its name, which the package metadata may not
    return str(torch.__version__) if torch is not None else _version("torch")


_named: str | None = None


def name_command(words: str | None) -> None:
    """What provenance calls this process from now on where a Recorder is not told; None: what the command line says."""
    global _named
    _named = words


def _command() -> str:
    """The pdlab command line; a kernel's or another program's arguments say nothing about a measurement: there "python"."""
    if _named is not None:
        return _named
    program = Path(sys.argv[0])
    ours = program.stem == "pdlab" or (program.name == "__main__.py" and program.parent.name == "pdlab")
    return " ".join(["pdlab", *sys.argv[1:]]) if ours else "python"


def snapshot(seed: int = 0, command: str | None = None, gpu_index: int | None = None) -> dict[str, Any]:
    """One provenance record of this machine, now; with the state of a GPU where its number is given."""
    return {
        **(nvml.UNKNOWN if gpu_index is None else nvml.clocks(gpu_index)),
        "torch": _torch_version(),
        "triton": _version("triton"),
        "python": platform.python_version(),
        "commit": commit_id(),
        "seed": seed,
        "time_utc": utc_now(),
        "command": _command() if command is None else command,
    }


def target_root(record: bool = False) -> Path:
    """Where new rows go: runs/measurements, or with `record` the tables that are kept."""
    if record:
        return (data_dir() if checkout_dir() is not None else home_dir()) / "measurements"
    return (checkout_dir() or Path.cwd()) / "runs" / "measurements"


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds an exclusive lock on a folder; other processes that write there wait. No lock file is left behind."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # not a POSIX system: concurrent writers are not supported there
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _replace(path: Path, text: str) -> None:
    """Writes beside `path` and moves into place, so that it is never half-written."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _csv_text(rows: Iterable[list[str]]) -> str:
    import csv
    import io

    out = io.StringIO(newline="")
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


def _read_provenance(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it is not a JSON object")
        return found
    except ValueError as error:
        raise MeasurementError(f"{path} is not a provenance file ({error})", "restore it from git, or delete it") from error


def write_rows(root: Path, device: str, rows: Iterable[Row], provenance: dict[str, dict[str, Any]]) -> list[Path]:
    """Appends validated rows to their experiments' tables and merges the provenance. Returns the files written.

    Every row's provenance_id must be in `provenance` or already in the file. Nothing is written if anything is wrong.
    """
    folder = root / check_name(device, "device")
    by_experiment: dict[str, list[Row]] = {}
    for row in rows:
        by_experiment.setdefault(validate(row).experiment, []).append(row)
    try:
        return _append(folder, by_experiment, provenance) if by_experiment else []
    except OSError as error:
        raise MeasurementError(f"{folder} cannot be written: {error}", "name another folder with --out DIR") from error


def _append(folder: Path, by_experiment: dict[str, list[Row]], provenance: dict[str, dict[str, Any]]) -> list[Path]:
    with _locked(folder):
        known = _read_provenance(folder / "provenance.json") | provenance
        missing = {r.provenance_id for rs in by_experiment.values() for r in rs} - set(known)
        if missing:
            raise MeasurementError(f"no provenance for {sorted(missing)[0]!r}", "give write_rows() the record of every id")
        texts = {}
        for experiment, new in by_experiment.items():
            path = folder / f"{experiment}.csv"
            old = path.read_text(encoding="utf-8") if path.is_file() else _csv_text([list(COLUMNS)])
            if not old.startswith(",".join(COLUMNS) + "\n"):
                raise MeasurementError(f"{path} does not start with the measurement header", "restore it, or move it away")
            # a last line without its end was cut off by a crash of some other writer: keep it apart from the new rows
            texts[path] = old + ("" if old.endswith("\n") else "\n") + _csv_text([r.cells() for r in new])
        _replace(folder / "provenance.json", json.dumps(known, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
        for path, text in texts.items():
            _replace(path, text)
    return sorted(texts)


def frame(rows: Iterable[Row]) -> pd.DataFrame:
    """Rows as a DataFrame: the table's columns, then one column a parameter (`param_n` where a name is taken)."""
    try:
        import pandas as pd
    except ImportError as error:
        raise MeasurementError(f"tables as DataFrames need pandas ({error})", "pip install 'pandas>=2.2'") from error
    records = []
    for row in rows:
        record = {name: getattr(row, name) for name in COLUMNS}
        record["params"] = params_json(row.params)
        record |= {f"param_{k}" if k in COLUMNS else k: v for k, v in row.params.items()}
        records.append(record)
    return pd.DataFrame(records) if records else pd.DataFrame(columns=list(COLUMNS))


def read_rows(device: str, experiment: str, extra: Path | None = None) -> pd.DataFrame:
    """Every row of an experiment on a device, shipped ones first, then the user's own, then those under `extra`."""
    return frame(read(device, experiment, extra))


def latest(
    device: str,
    experiment: str,
    *,
    metric: str | None = None,
    variant: str | None = None,
    kind: str | None = None,
    extra: Path | None = None,
    **params: Any,
) -> pd.DataFrame:
    """The rows that count: of each key the newest with status ok, filtered by metric, variant, kind and parameters."""
    rows = newest(read(device, experiment, extra))
    keep = [
        r
        for r in rows
        if (metric is None or r.metric == metric)
        and (variant is None or r.variant == variant)
        and (kind is None or r.kind == kind)
        and all(k in r.params and r.params[k] == v for k, v in params.items())
    ]
    return frame(keep)


def provenance_of(device: str, provenance_id: str, extra: Path | None = None) -> dict[str, Any] | None:
    """What a row was measured with, or None."""
    from pdlab.costs.tables import roots

    for root in reversed(roots(extra)):
        found = _read_provenance(root / check_name(device, "device") / "provenance.json")
        if provenance_id in found:
            return found[provenance_id]
    return None


class Recorder:
    """Collects the rows of one run on one device and writes them at the end, also when the run is cut short.

    with Recorder("ceilings", machine.slug) as record:
        record.add("copy", timings.rate(bytes / 1e9, "TB/s"))      # bytes / 1e9 a millisecond is TB a second
        record.skip("matmul", "TFLOP/s", "out of memory", dtype="float32", n=65536)
    """

    def __init__(
        self,
        experiment: str,
        device: str,
        *,
        record: bool = False,
        out: Path | None = None,
        seed: int = 0,
        command: str | None = None,
        gpu_index: int = 0,
    ) -> None:
        self.experiment, self.device = check_name(experiment, "experiment"), check_name(device, "device")
        self.roots = ([target_root(True)] if record else []) + ([out] if out is not None else [])
        self.roots = self.roots or [target_root(False)]
        self.seed, self.command = seed, command
        self.gpu_index = None if device.startswith("cpu") else gpu_index
        self.run_id = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{uuid.uuid4().hex[:6]}"
        self.rows: list[Row] = []
        self.provenance: dict[str, dict[str, Any]] = {}
        self.files: list[Path] = []
        self.beside: list[Recorder] = []  # of the same run, for other devices that it simulated
        self._written = 0
        self._state: dict[str, Any] = {}
        self._state_at = 0.0
        self._ids: dict[str, str] = {}  # settings as JSON -> provenance id, for the present state

    def _provenance_id(self, settings: dict[str, Any] | None) -> str:
        """The record of the machine's state, read again when it is older than a few seconds, with these settings."""
        if not self._state or time.monotonic() - self._state_at > _STATE_SECONDS:
            fresh = snapshot(self.seed, self.command, self.gpu_index)
            fresh["commit"] = self._state.get("commit", fresh["commit"])
            self._state, self._state_at, self._ids = fresh, time.monotonic(), {}
        key = json.dumps(settings, sort_keys=True, default=str)
        if key not in self._ids:
            self._ids[key] = f"{self.run_id}-{len(self.provenance)}"
            self.provenance[self._ids[key]] = self._state | ({"settings": settings} if settings else {})
        return self._ids[key]

    def add(
        self,
        metric: str,
        value: Timings | float,
        unit: str | None = None,
        *,
        variant: str = "ours",
        kind: str = "measured",
        status: str | None = None,
        experiment: str | None = None,
        settings: dict[str, Any] | None = None,
        n: int = 1,
        params: dict[str, Any] | None = None,
        **more: Any,
    ) -> Row:
        """One row. `value` is Timings, or a single number with its `unit`. Parameters as `params` or as keywords.

        `settings` are the variant's own (tile sizes, flags): they go to provenance, so that rows of rivals share `params`.
        """
        if isinstance(value, Timings):
            timings = value
        else:
            timings = Timings(float(value), float(value), float(value), n, unit or "")
        row = Row(
            run_id=self.run_id,
            time_utc=utc_now(),
            experiment=experiment or self.experiment,
            variant=variant,
            metric=metric,
            unit=unit or timings.unit,
            median=timings.median,
            p10=timings.p10,
            p90=timings.p90,
            n=timings.n,
            kind=kind,
            status=status or timings.status,
            provenance_id=self._provenance_id(settings),
            params=_clean(params, more),
        )
        self.rows.append(validate(row))
        return row

    def skip(
        self, metric: str, unit: str, reason: str, *, variant: str = "ours", params: dict[str, Any] | None = None, **more: Any
    ) -> Row:
        """A row that says why there is no number."""
        nan = float("nan")
        status = "skipped:" + " ".join(reason.split())
        row = Row(
            self.run_id, utc_now(), self.experiment, variant, metric, unit, nan, nan, nan, 0,
            "measured", status, self._provenance_id(None), _clean(params, more),
        )  # fmt: skip
        self.rows.append(validate(row))
        return row

    def flush(self) -> list[Path]:
        """Writes what has been added since the last flush; returns the tables written so far."""
        new = self.rows[self._written :]
        for root in self.roots:
            self.files += [p for p in write_rows(root, self.device, new, self.provenance) if p not in self.files]
        self._written = len(self.rows)
        return self.files

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()


def _clean(params: dict[str, Any] | None, more: dict[str, Any]) -> dict[str, Any]:
    """Parameters of a row: models by their catalogue name without `random:`, NumPy numbers as plain ones."""
    merged = {k: v.item() if hasattr(v, "item") else v for k, v in ((params or {}) | more).items()}
    if isinstance(merged.get("model"), str):
        merged["model"] = merged["model"].removeprefix("random:")
    return merged
