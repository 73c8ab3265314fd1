"""What scheduling costs the host: planning a step of many decodes and committing it, the allocator aside.

The real scheduler plans for a device that is imitated, so nothing but the host's work is timed. What the allocator is asked is
timed beside it and taken off. The estimator prices each plan, as it does in service.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from pdlab.bench.serving import serving_config
from pdlab.core.config import SamplingParams
from pdlab.costs.learned import LearnedEstimator
from pdlab.costs.roofline import sheet_ceilings
from pdlab.engine.engine import Engine
from pdlab.engine.simulated import SimulatedExecutor
from pdlab.hardware.timing import Timings, summarize
from pdlab.models.catalogue import config_of

if TYPE_CHECKING:
    from pdlab.allocators.interface import Allocator
    from pdlab.bench.suites import Context

NAME = "scheduling_host"
HELP = "what planning and committing a step of 512 decodes takes this machine's host, the allocator aside"

POLICIES = ("fcfs", "deadline", "sjf_aging")
RUNNING, STEPS = 512, 400
DEVICE, MODEL = "nvidia-h200", "qwen3-8b"
ASKED = (
    "reserve", "reserve_many", "admit", "room", "page_table", "page_tables", "base", "bases", "appended", "written",
    "submitted", "retire", "free",
)  # fmt: skip


class Stopwatch:
    """Seconds spent in the calls it watches; a call within a call counts once."""

    def __init__(self) -> None:
        self.seconds, self._inside = 0.0, False

    def watch(self, owner: Any, name: str) -> None:
        call: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return call(*args, **kwargs)
            self._inside, started = True, time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - started
                self._inside = False

        setattr(owner, name, timed)


def _crowd(policy: str) -> Engine:
    """An engine whose requests have all had their prompts computed and go on decoding."""
    model = config_of(MODEL)
    config = serving_config(
        executor="simulated",
        simulated_device=DEVICE,
        policy=policy,
        max_batch_requests=RUNNING,
        kv_capacity_tokens=RUNNING * 1280,
    )
    estimator = LearnedEstimator(model, sheet_ceilings(DEVICE), 2, config.max_batch_tokens)
    executor = SimulatedExecutor(model, lambda shape: 0.02, RUNNING * 1280)
    engine = Engine(config, model, executor, estimator)
    rng = np.random.default_rng(0)
    for tokens in rng.integers(20, 200, RUNNING).tolist():
        engine.add([1] * tokens, SamplingParams(max_tokens=1000, ignore_eos=True))
    while len(engine.scheduler.running) < RUNNING or engine.scheduler.prefilling:
        engine.step()
    return engine


def scheduling_us(policy: str = "fcfs", steps: int = STEPS) -> Timings:
    """Microseconds a step, at RUNNING running requests: median, p10 and p90."""
    engine = _crowd(policy)
    allocator: Allocator = engine.allocator
    asked, scheduling = Stopwatch(), Stopwatch()
    for name in ASKED:
        asked.watch(allocator, name)
    for name in ("plan", "commit"):
        scheduling.watch(engine.scheduler, name)
    samples = []
    for _ in range(steps):
        before = scheduling.seconds, asked.seconds
        engine.step()
        samples.append(1e6 * (scheduling.seconds - before[0] - (asked.seconds - before[1])))
    engine.close()
    return summarize(samples, "us")


def record(ctx: Context) -> None:
    """Rows of each policy; measured, whatever device the rest of a suite speaks of."""
    for policy in POLICIES:
        us = scheduling_us(policy)
        ctx.record.add("scheduling", us, variant=policy, experiment=NAME, running=RUNNING, model=MODEL)
        ctx.say(f"  {policy}: scheduling {RUNNING} running requests takes {us.median:.0f} us a step")


def run(ctx: Context) -> None:
    record(ctx)
