"""Where a decode step's time goes: the time of each operation's kernels beside the time its bytes need.

The operations are run inside named ranges, so that a profiler sees which kernels belong to which: torch.profiler here, Nsight
Systems and Nsight Compute outside (NVTX ranges of the same names). Kernels are timed launched one by one and without
dependent launch: under it a kernel's time would include waiting for the one before.

    kernel_time        us a step of the kernels of one operation (params: operation)
    floor_kernel_time  us: the operation's fewest bytes / read bandwidth of the same run
    step_time          us of the whole step in a CUDA graph, as the engine runs it: where the table says so, as one kernel
    hbm_share          percent of that step in which the memory must be busy: all bytes / read bandwidth / step time
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pdlab.bench import _stages as stages
from pdlab.bench.records import target_root
from pdlab.core.plan import Plan
from pdlab.costs.formulas import decode_shape, itemsize_of, step_bytes
from pdlab.hardware.timing import summarize

if TYPE_CHECKING:
    from pdlab.bench.suites import Context
    from pdlab.models.loading import Loaded

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own lines about itself, on standard error

OPERATIONS = ("norm_qkv_rope", "attention", "out_residual", "norm_mlp_up", "down_residual", "projection_sample")
STEPS = 5  # profiled


@contextmanager
def named(name: str) -> Iterator[None]:
    """A range that torch.profiler records and, on a GPU, NVTX shows to Nsight's tools."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.nvtx.range_push(name)
    try:
        with torch.profiler.record_function(name):
            yield
    finally:
        if on_gpu:
            torch.cuda.nvtx.range_pop()


class RangedOps:
    """Model operations, each inside a range of its name; anything else is the wrapped operations' own."""

    def __init__(self, ops: Any) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._ops, name)
        if name not in OPERATIONS:
            return found

        def call(*arguments: Any) -> Any:
            with named(name):
                return found(*arguments)

        return call


@contextmanager
def step_of(loaded: Loaded, switches: stages.Switches, tokens: int, batch: int = 1, *, ranged: bool = False) -> Iterator[Any]:
    """(executor, plans): decode steps of `batch` requests over `tokens` random cached tokens, through the executor."""
    from pdlab.bench.prefill_vs_decode import Step, make_plan

    with stages.make_llm(loaded, switches, length=tokens + 1, batch=batch) as llm:
        executor: Any = llm.engine.executor
        if ranged and llm.model is not None:
            llm.model.ops = RangedOps(llm.model.ops)
        executor.k.normal_()
        executor.v.normal_()
        rng, vocab = np.random.default_rng(0), loaded.config.vocab_size
        step = Step("decode", batch, tokens)
        yield executor, lambda number: make_plan(step, number, vocab, executor.capacity(), rng)


def run_steps(executor: Any, plans: list[Plan], in_flight: int) -> list[float]:
    """Seconds between the ends of successive steps, `in_flight` of them under way; raises a step's own error."""
    handles, ends = [], []
    for plan in plans:
        handles.append(executor.submit(plan))
        if len(handles) >= in_flight:
            ends.append(handles.pop(0).result())
    ends += [handle.result() for handle in handles]
    for result in ends:
        if result.error is not None:
            raise result.error
    return [b.t_end - a.t_end for a, b in pairwise(ends)]


def profile(loaded: Loaded, switches: stages.Switches, tokens: int, trace: Path | None = None) -> dict[str, float]:
    """Microseconds a step of each operation's kernels (on a CPU: of the operation itself); `trace` gets a Chrome trace.

    Operation by operation, so the persistent kernel, which is all of them, is left out."""
    from torch.profiler import ProfilerActivity

    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if loaded.model.device.type == "cuda" else [])
    one_by_one = switches - {"graph", "dependent", "persistent", "two_steps"}
    with step_of(loaded, one_by_one, tokens, ranged=True) as (executor, plan):
        plans = [plan(i) for i in range(2 + STEPS)]
        run_steps(executor, plans[:2], 1)
        with torch.profiler.profile(activities=kinds, acc_events=True) as profiler:
            run_steps(executor, plans[2:], 1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        found = attribute(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])
        if trace is not None:
            trace.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, trace)
    return {name: us / STEPS for name, us in found.items()}


def attribute(events: list[dict[str, Any]]) -> dict[str, float]:
    """Microseconds of each operation by a Chrome trace's events: of the kernels launched inside its ranges, wherever the trace
    has kernels, else of the ranges themselves.

    torch's own totals count kernels that PyTorch launched; those that go to the driver directly are found by the correlation
    number that a kernel and its launch have in common.
    """
    ranges = sorted(
        (e["ts"], e["ts"] + e["dur"], e["tid"], e["name"])
        for e in events
        if e.get("cat") == "user_annotation" and e["name"] in OPERATIONS
    )
    found: dict[str, float] = defaultdict(float)
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not kernels:
        for begin, end, _, name in ranges:
            found[name] += end - begin
        return dict(found)
    launches = {
        e["args"]["correlation"]: e
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    begins = [begin for begin, *_ in ranges]
    for kernel in kernels:
        launch = launches.get(kernel.get("args", {}).get("correlation"))
        if launch is None:
            continue
        # operations do not nest: the range that began last is the one
        place = bisect_right(begins, launch["ts"]) - 1
        if place >= 0 and launch["ts"] <= ranges[place][1] and launch["tid"] == ranges[place][2]:
            found[ranges[place][3]] += kernel["dur"]
    return dict(found)


def record(ctx: Context, loaded: Loaded, tokens: int, read: float) -> None:
    """Rows for the plain and for the fused operations."""
    config = loaded.config
    shares = step_bytes(config, decode_shape(1, tokens), itemsize_of(ctx.dtype))
    params = {"model": config.name, "tokens": tokens, "dtype": ctx.dtype}
    where = target_root() if ctx.record.roots[-1] == target_root(True) else ctx.record.roots[-1]  # never among kept tables
    trace = where.parent / "traces" / f"decode-{config.name}.json"
    for switches in (stages.ALL, frozenset({"graph"} if ctx.machine.is_gpu else ())):
        name = stages.name_of(switches)
        found = profile(loaded, switches, tokens, trace if name == "ours" else None)
        with step_of(loaded, switches, tokens) as (executor, plan):
            gaps = run_steps(executor, [plan(i) for i in range(40 if ctx.full else 6)], 2)[2:]
        step = summarize([1e6 * gap for gap in gaps], "us")
        for op, us in found.items():
            ctx.record.add("kernel_time", us, "us", variant=name, params=params | {"operation": op}, n=STEPS)
        ctx.record.add("step_time", step, variant=name, params=params)
        share = step.rate(100 * shares.total / read * 1e6, "percent")
        ctx.record.add("hbm_share", share, variant=name, params=params)
        ctx.say(f"  {config.name} {name}: step {step.median:.0f} us, memory must be busy {share.median:.0f} % of it")
    for op in OPERATIONS:
        floor = getattr(shares, op) / read * 1e6
        ctx.record.add("floor_kernel_time", floor, "us", kind="predicted", params=params | {"operation": op})
    if trace.is_file():
        ctx.say(f"  trace for ui.perfetto.dev: {trace}")
