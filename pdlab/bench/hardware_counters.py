"""Bytes that the memory really moved in a decode step, from the GPU's own counters, beside the bytes that were counted.

Nsight Compute runs the step and writes a table; this reads it. Where counters are not allowed (many clouds), ncu says so and
byte accounting has to do.

    ncu --clock-control none --profile-from-start off --nvtx --print-nvtx-rename kernel \\
        --metrics dram__bytes_read.sum,gpu__time_duration.sum --csv --page raw --log-file counters.csv \\
        python -m pdlab.bench.hardware_counters step --model random:llama-1b
    python -m pdlab.bench.hardware_counters read counters.csv --model random:llama-1b [--record]

Rows of decode_single_stream: `dram_read` bytes a step by operation, and `dram_read_ratio` to the bytes counted. Kernels are
launched one by one, with the caches emptied before each (ncu's way), so what a neighbour left in L2 is read again.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pdlab.core.errors import MeasurementError
from pdlab.costs.formulas import decode_shape, itemsize_of, step_bytes
from pdlab.models.catalogue import config_of

TOKENS = 640  # in the cache: the mean of an answer of 256 tokens to a prompt of 512
READ = "dram__bytes_read.sum"
_UNITS = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}


def step(model: str, tokens: int = TOKENS) -> None:
    """One decode step between cudaProfilerStart and Stop, its operations in NVTX ranges; what ncu is given to run."""
    import torch

    from pdlab.bench import _stages as stages
    from pdlab.bench._breakdown import run_steps, step_of
    from pdlab.hardware.probe import resolve_device
    from pdlab.models.loading import load

    machine = resolve_device("auto")
    loaded = load(model, device=machine.device, dtype=machine.dtype)
    plain = stages.ALL - {"graph", "dependent", "two_steps"}
    with step_of(loaded, plain, tokens, ranged=True) as (executor, plan):
        run_steps(executor, [plan(0), plan(1)], 1)
        if machine.is_gpu:
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStart()
        run_steps(executor, [plan(2)], 1)
        if machine.is_gpu:
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStop()


def read_table(lines: Iterable[str]) -> dict[str, float]:
    """Bytes read by operation, from ncu's CSV: its own messages, a header, a line of units, a line a kernel. Kernels are called
    operation/kernel; those outside of an operation by their own name."""
    rows = [line for line in lines if line.startswith('"')]
    table = list(csv.reader(rows))
    if len(table) < 3 or READ not in table[0] or "Kernel Name" not in table[0]:
        raise MeasurementError(f"the table has no column {READ!r}", "see the ncu command in pdlab.bench.hardware_counters")
    name, column = table[0].index("Kernel Name"), table[0].index(READ)
    unit = _UNITS.get(table[1][column])
    if unit is None:
        raise MeasurementError(f"the unit {table[1][column]!r} is not known", f"known: {', '.join(_UNITS)}")
    found: dict[str, float] = defaultdict(float)
    for row in table[2:]:
        found[row[name].partition("/")[0]] += float(row[column].replace(",", "")) * unit
    return dict(found)


def report(found: dict[str, float], model: str, recorder: Any, dtype: str, tokens: int = TOKENS) -> None:
    """Rows of the operations that were found, and of all of them together."""
    from pdlab.bench._breakdown import OPERATIONS

    config = config_of(model)
    counted = step_bytes(config, decode_shape(1, tokens), itemsize_of(dtype))
    seen = [op for op in OPERATIONS if op in found]
    if not seen:
        raise MeasurementError("no kernel carries an operation's name", "give ncu --nvtx --print-nvtx-rename kernel")
    settings = {"tool": "ncu", "caches": "emptied before each kernel"}
    for op in seen:
        params = {"model": config.name, "tokens": tokens, "dtype": dtype, "operation": op}
        recorder.add("dram_read", found[op], "bytes", params=params, settings=settings)
        recorder.add("dram_read_ratio", found[op] / getattr(counted, op), "ratio", params=params, settings=settings)
    whole = {"model": config.name, "tokens": tokens, "dtype": dtype, "operation": "all"}
    total = sum(found[op] for op in seen)
    recorder.add("dram_read_ratio", total / sum(getattr(counted, op) for op in seen), "ratio", params=whole, settings=settings)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pdlab.bench.hardware_counters", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("step", help="run one decode step, for ncu to look at")
    other = commands.add_parser("read", help="rows from the table that ncu wrote")
    other.add_argument("table", type=Path)
    other.add_argument("--record", action="store_true", help="append to the kept tables")
    for command in (one, other):
        command.add_argument("--model", default="random:llama-1b")
    given = parser.parse_args(arguments)
    if given.command == "step":
        step(given.model)
        return 0
    from pdlab.bench.records import Recorder
    from pdlab.hardware.probe import resolve_device

    machine = resolve_device("auto")
    with Recorder("decode_single_stream", machine.slug, record=given.record, command="ncu") as recorder:
        report(read_table(given.table.read_text().splitlines()), given.model, recorder, machine.dtype)
    for row in recorder.rows:
        print(f"{row.params['operation']:18} {row.metric:16} {row.median:,.4g} {row.unit}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
