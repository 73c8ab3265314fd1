"""Steps that were recorded under load, kept to fit and judge estimators on any CPU.

`data/estimators/<device>/<model>-<dtype>-steps.csv.gz`: its first line is `# ` and a JSON object, then come a header and one
row a step. The object: `provenance` of the recording, `model`, `dtype`, `padded` (steps with prompts ran in graphs),
`objectives` in seconds, `lengths` (output lengths that training had shown, see costs.lengths), and `runs`, each with `run` (its
number), `workload`, `policy`, `use` ("training" or "held-out") and, of a held-out one, `load`, `rate` (requests/s), `requests`
and `seed`, from which its arrivals are made again. Columns:

    run        number of the run
    gap_us     from the end of the step before in the run to this one's submission; 0 for the first
    wait_us    from its submission to its beginning on the device
    device_us  its time on the device
    launch_us  handing it to the device                  host_us   planning and committing it
    prefill    its chunks, as `new+cached` joined by spaces
    decodes, kv_tokens, pad_tokens, sampled, longest     as in core.plan.PlanShape; older files end before `longest`
"""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdlab.core.errors import MeasurementError
from pdlab.core.paths import find_data
from pdlab.core.plan import PlanShape
from pdlab.core.trace import TraceRow
from pdlab.costs import tables
from pdlab.costs.interface import Estimator

COLUMNS = (
    "run", "gap_us", "wait_us", "device_us", "launch_us", "host_us", "prefill", "decodes", "kv_tokens", "pad_tokens", "sampled",
    "longest",
)  # fmt: skip


@dataclass(frozen=True)
class Step:
    """What an estimator is told of one step. Seconds; the row's clock begins with the run."""

    row: TraceRow
    shape: PlanShape
    launch_s: float


@dataclass
class RecordedSteps:
    """The steps of each run, in the order in which they ran, and what the file says of itself."""

    about: dict[str, Any]
    runs: dict[int, list[Step]] = field(default_factory=dict)

    def of(self, use: str) -> list[dict[str, Any]]:
        """The runs that were "training" or "held-out", as the file describes them."""
        return [run for run in self.about["runs"] if run["use"] == use]

    def teach(self, estimator: Estimator, runs: Iterable[int]) -> None:
        """Shows an estimator the steps of these runs, as the engine did."""
        for number in runs:
            for step in self.runs[number]:
                estimator.observe(step.row, step.shape, step.launch_s)


def steps_file(device: str, model: str, dtype: str) -> str:
    """Path relative to the data folder."""
    return f"estimators/{tables.check_name(device, 'device')}/{tables.check_name(model, 'model')}-{dtype}-steps.csv.gz"


def find(device: str, model: str, dtype: str) -> RecordedSteps | None:
    """What was recorded of a model on a device, or None."""
    path = find_data(steps_file(device, model, dtype))
    return None if path is None else read(path)


def write(path: Path, about: dict[str, Any], runs: dict[int, list[tuple[TraceRow, PlanShape, float]]]) -> None:
    """Writes the file; the same steps give the same bytes."""
    text = io.StringIO()
    text.write("# " + json.dumps(about, sort_keys=True, separators=(",", ":")) + "\n")
    table = csv.writer(text, lineterminator="\n")
    table.writerow(COLUMNS)
    for number, steps in runs.items():
        before = None
        for row, s, launch_s in steps:
            seconds = (
                0.0 if before is None else row.t_submit - before, row.t_start - row.t_submit, row.t_end - row.t_start, launch_s,
                row.host_s,
            )  # fmt: skip
            chunks = " ".join(f"{new}+{cached}" for new, cached in s.prefill)
            us = [round(1e6 * x) for x in seconds]
            decodes = s.decode_count, s.decode_kv_tokens, s.pad_tokens, s.sampled, s.decode_longest
            table.writerow([number, *us, chunks, *decodes])
            before = row.t_end
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.getvalue().encode("utf-8"), mtime=0))


def read(path: Path) -> RecordedSteps:
    """Reads the file; MeasurementError, with the line, where it is not what `write` writes."""
    number = 2
    try:
        lines = gzip.decompress(path.read_bytes()).decode("utf-8").splitlines()
        recorded = RecordedSteps(json.loads(lines[0].removeprefix("# ")))
        columns = tuple(lines[1].split(","))
        if columns not in (COLUMNS, COLUMNS[:-1]):
            raise ValueError(f"its columns are {lines[1]}")
        now: dict[int, float] = {}
        for fields in csv.reader(lines[2:]):
            number += 1
            if len(fields) != len(columns):
                raise ValueError(f"it has {len(fields)} fields")
            run, gap, wait, device, launch, host = map(int, fields[:6])
            chunks = tuple((int(new), int(cached)) for new, cached in (c.split("+") for c in fields[6].split()))
            shape = PlanShape(chunks, *map(int, fields[7:]))
            submitted = now.get(run, 0.0) + 1e-6 * gap
            started = submitted + 1e-6 * wait
            now[run] = started + 1e-6 * device
            steps = recorded.runs.setdefault(run, [])
            steps.append(Step(_row(len(steps), shape, (submitted, started, now[run]), 1e-6 * host), shape, 1e-6 * launch))
        if sorted(recorded.runs) != sorted(run["run"] for run in recorded.about["runs"]):
            raise ValueError("its first line tells of other runs than it holds")
    except (OSError, EOFError, ValueError, KeyError, TypeError, IndexError) as e:
        raise MeasurementError(f"{path}, line {number}: no recorded steps ({e})", "get the file again") from e
    return recorded


def _row(step: int, s: PlanShape, times: tuple[float, float, float], host_s: float) -> TraceRow:
    return TraceRow(
        step, "real", *times, s.prefill_tokens, s.prefill_context, s.decode_count, s.decode_kv_tokens, s.pad_tokens, 0, 0, 0, 0,
        0.0, 0.0, host_s, 0.0,
    )  # fmt: skip
