"""What the serving suites share: one model under load, on the real engine and on the simulator calibrated by it.

A `Session` loads the model, measures the engine's capacity (requests a second when all arrive at once), and lets the
learning estimator see a few loads. Then the same workload runs on either engine.
"""

from __future__ import annotations

import concurrent.futures
import math
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pdlab.bench.memory_runs import real_engine
from pdlab.core.config import EngineConfig
from pdlab.core.plan import PlanShape
from pdlab.core.trace import TraceRow
from pdlab.costs.formulas import itemsize_of, kv_bytes, weights_bytes
from pdlab.costs.interface import Estimator
from pdlab.costs.learned import LearnedEstimator
from pdlab.costs.roofline import Ceilings, ceilings_for
from pdlab.engine.coalescing import CoalescingEngine
from pdlab.engine.simulated import SimulatedExecutor
from pdlab.hardware.timing import Timings, summarize
from pdlab.models.catalogue import config_of
from pdlab.workloads import generators
from pdlab.workloads.replay import Ended, Outcome, replay
from pdlab.workloads.workload import Workload

if TYPE_CHECKING:
    from pdlab.bench.suites import Context

LONG_SHARE = 0.005
QUANTILES = (50, 90, 99)


@dataclass(frozen=True)
class Scale:
    """The model of a machine and the workload in its size: `shrink` divides the conversation's lengths."""

    model: str
    long_tokens: int
    shrink: int
    config: EngineConfig


def scale_of(ctx: Context) -> Scale:
    """qwen3-8b where it fits, else llama-1b; a tiny model and lengths a sixteenth on a CPU."""
    base = EngineConfig(
        device=ctx.device, dtype=ctx.dtype, estimator="learned", max_batch_tokens=2048, max_batch_requests=256, patience_s=30.0
    )
    if not ctx.machine.is_gpu:
        small = base.with_(max_batch_tokens=128, max_batch_requests=16, kv_capacity_tokens=16384)
        return Scale("llama-tiny", 2048, 16, small)
    for model in ("qwen3-8b", "llama-1b"):
        config, size = config_of(model), itemsize_of(ctx.dtype)
        if weights_bytes(config, size) + kv_bytes(config, 200_000, size) < 0.8 * ctx.machine.memory_bytes:
            return Scale(model, 32_768, 1, base)
    return Scale("llama-1b", 8192, 4, base)


def mixed_load(scale: Scale, n: int, rate: float, seed: int) -> Workload:
    """Conversation-sized requests, exactly one in 200 with a very long prompt, one in five of the upper class."""
    w = generators.chat_with_long(n, rate=rate, long_share=LONG_SHARE, long_tokens=scale.long_tokens, seed=seed)

    def sized(i: int, item: Any) -> Any:
        if item.kind == "long":
            return replace(item, priority=0, max_tokens=max(1, item.max_tokens // scale.shrink))
        p, o = max(1, item.prompt_tokens // scale.shrink), max(1, item.max_tokens // scale.shrink)
        return replace(item, prompt_tokens=p, max_tokens=o, priority=int(i % 5 == 0))

    return Workload(w.name, (sized(i, item) for i, item in enumerate(w)), seed)


def with_objectives(config: EngineConfig, estimator: Estimator) -> EngineConfig:
    """Objectives in the device's own measure: a first token within 5.5 full steps of prompts alone, later ones within two."""
    step = estimator.prefill_seconds(config.max_batch_tokens)
    return config.with_(ttft_objective_s=round(5.5 * step, 4), per_token_objective_s=round(2 * step, 4))


class Session:
    """A loaded model, its measured capacity, and what its estimator has learned. `say` reports progress."""

    def __init__(self, ctx: Context, scale: Scale | None = None) -> None:
        from pdlab.models.loading import load

        self.ctx, self.scale = ctx, scale or scale_of(ctx)
        self.loaded = load(f"random:{self.scale.model}", device=ctx.device, dtype=ctx.dtype, seed=ctx.seed)
        self.model = self.loaded.config
        self.ceilings = ceilings_for(ctx.machine.slug, ctx.dtype)
        self.itemsize = itemsize_of(ctx.dtype)
        self.estimator = LearnedEstimator(self.model, self.ceilings, self.itemsize, self.scale.config.max_batch_tokens)
        self.config = self.scale.config
        self.capacity = math.nan  # requests/s, first come first served
        self.slots = 0

    def real(self, config: EngineConfig, workload: Workload, estimator: Estimator | None = None) -> Outcome:
        """The workload on the real engine; `estimator` (default: the session's, which goes on learning) prices its steps."""
        with real_engine(self.loaded, config) as engine:
            engine.estimator = engine.scheduler.estimator = estimator or self.estimator
            self.slots = engine.executor.capacity()
            outcome = replay(engine, workload, keep=True, seed=self.ctx.seed)
        self.ctx.say(
            f"  {config.policy}, {config.batching}: {len(workload)} requests in {outcome.seconds:.1f} s, "
            f"P99 to first token {1e3 * outcome.ttft.quantile(0.99):.0f} ms"
        )
        return outcome

    def measure_capacity(self, n: int) -> float:
        """Requests a second that leave when n of the mixed load arrive at once; a short burst before it warms up."""
        for count in (max(8, n // 8), n):
            burst = mixed_load(self.scale, count, 1e6, self.ctx.seed + 100)
            outcome = self.real(self.config, burst)
        self.capacity = outcome.throughput
        self.config = with_objectives(self.config, self.estimator)
        return self.capacity

    def train(self, loads: Iterable[float], n: int) -> None:
        """Lets the estimator see n requests at each load, with a seed that no measurement uses."""
        for load in loads:
            self.real(self.config, mixed_load(self.scale, n, load * self.capacity, self.ctx.seed + 200))

    def requests_for(self, seconds: float, load: float) -> int:
        """How many requests arrive in so many seconds; at least one long one's worth of chats."""
        return max(40, round(seconds * load * self.capacity))


@dataclass(frozen=True)
class Imitation:
    """All that a simulator process needs: picklable."""

    scale: Scale
    state: dict[str, Any]  # of a LearnedEstimator
    ceilings: Ceilings
    slots: int
    host_s: float
    dtype: str

    @classmethod
    def of(cls, session: Session) -> Imitation:
        e = session.estimator
        scale = replace(session.scale, config=session.config)
        return cls(scale, e.state(), session.ceilings, session.slots, e.host_s, session.ctx.dtype)

    def estimator(self) -> LearnedEstimator:
        """A copy of what the session's estimator had learned."""
        e = LearnedEstimator(
            config_of(self.scale.model), self.ceilings, itemsize_of(self.dtype), self.scale.config.max_batch_tokens
        )
        e.restore(self.state)
        return e

    def engine(self, config: EngineConfig) -> CoalescingEngine:
        cost, prices = self.estimator(), self.estimator()
        model, slots = cost.model, self.slots
        executor = SimulatedExecutor(
            model, cost.step_seconds, slots, steps_in_flight=config.steps_in_flight, host_s=self.host_s, calibration="recorded"
        )
        return CoalescingEngine(config.with_(executor="simulated"), model, executor, prices)

    def run(self, config: EngineConfig, workload: Workload, until_s: float | None = None) -> Outcome:
        engine = self.engine(config)
        try:
            outcome = replay(engine, workload, keep=True, seed=workload.seed or 0, until_s=until_s)
        finally:
            engine.close()
        outcome.trace = None  # large, and nobody asks
        return outcome

    def capacity(self, n: int, seed: int) -> float:
        return self.run(self.scale.config, mixed_load(self.scale, n, 1e6, seed)).throughput


@contextmanager
def workers(parallel: bool) -> Iterator[Callable[..., concurrent.futures.Future[Any]]]:
    """`submit(function, *args)` over fresh processes (never forks: the parent may hold a CUDA context), or right here."""
    if not parallel:

        def here(function: Callable[..., Any], *args: Any) -> concurrent.futures.Future[Any]:
            future: concurrent.futures.Future[Any] = concurrent.futures.Future()
            future.set_result(function(*args))
            return future

        yield here
        return
    count = max(1, (os.cpu_count() or 2) - 1)
    pool = concurrent.futures.ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"))
    try:
        yield pool.submit
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


# ---- what came of it


def seconds_alone(estimator: LearnedEstimator, r: Ended) -> float:
    return estimator.prefill_seconds(r.prompt_tokens) + estimator.decode_seconds(r.output_tokens, r.prompt_tokens)


def waits_over_bound(outcome: Outcome, estimator: LearnedEstimator, patience_s: float) -> int:
    """How many requests waited longer than patience + the seconds alone of whoever ran, or waited before them, by then.

    That is the bound of policies.AgedShortestFirst with the largest headstart there is.
    """
    requests = outcome.requests or []
    over = 0
    for r in requests:
        wait = (r.finish_s if r.admitted_s is None else r.admitted_s) - r.arrival_s
        if wait <= patience_s:
            continue
        key = r.arrival_s + patience_s
        there = (o for o in requests if o is not r and o.arrival_s <= key and o.finish_s > key)
        over += wait > patience_s + sum(seconds_alone(estimator, o) for o in there)
    return over


def fairness(outcome: Outcome, estimator: LearnedEstimator) -> float:
    """Jain's index of the slowdowns (end to end over seconds alone): 1 when all are slowed down alike, 1/n at worst."""
    x = [(r.finish_s - r.arrival_s) / max(1e-9, seconds_alone(estimator, r)) for r in outcome.requests or []]
    return sum(x) ** 2 / (len(x) * sum(v * v for v in x)) if x and any(x) else 1.0


def quantile_of(quantity: str, q: int, outcome: Outcome) -> float:
    """Seconds: the q-th percentile of `ttft`, `per_token` or `end_to_end`."""
    return getattr(outcome, quantity).quantile(q / 100)


def record_outcomes(
    ctx: Context,
    outcomes: list[Outcome],
    estimator: LearnedEstimator,
    config: EngineConfig,
    *,
    variant: str,
    kind: str,
    settings: dict[str, Any],
    **params: Any,
) -> None:
    """The rows of one variant at one load; several outcomes are seeds, whose spread becomes p10 and p90."""

    def over(value: Callable[[Outcome], float], scale: float, unit: str) -> Timings | None:
        values = [scale * v for v in map(value, outcomes) if math.isfinite(v)]
        return summarize(values, unit) if values else None

    settings = {**settings, "policy": config.policy, "batching": config.batching, "patience_s": config.patience_s}
    settings |= {"ttft_objective_s": config.ttft_objective_s, "per_token_objective_s": config.per_token_objective_s}

    def add(metric: str, timings: Timings | None, **more: Any) -> None:
        if timings is not None:
            ctx.record.add(metric, timings, variant=variant, kind=kind, settings=settings, params={**params, **more})

    add("goodput", over(lambda o: o.goodput, 1, "req/s"))
    add("throughput", over(lambda o: o.throughput, 1, "req/s"))
    for metric in ("ttft", "per_token", "end_to_end"):
        for q in QUANTILES:
            add(metric, over(partial(quantile_of, metric, q), 1e3, "ms"), quantile=q)
    add("longest_wait", over(lambda o: o.wait.largest, 1e3, "ms"))
    add("waits_over_bound", over(lambda o: waits_over_bound(o, estimator, config.patience_s), 1, "count"))
    add("unfinished", over(lambda o: o.ended - o.complete, 1, "count"))
    add("fairness", over(lambda o: fairness(o, estimator), 1, "ratio"))


class Judge(Estimator):
    """Prices steps by `learned`, which learns no more, and keeps the relative error of several estimators on every step."""

    def __init__(self, learned: LearnedEstimator, others: dict[str, Estimator]) -> None:
        self.learned, self.estimators = learned, {"ours": learned, **others}
        self.errors: dict[str, list[tuple[bool, float]]] = {name: [] for name in self.estimators}

    def step_seconds(self, shape: PlanShape) -> float:
        return self.learned.step_seconds(shape)

    def prefill_seconds(self, tokens: int) -> float:
        return self.learned.prefill_seconds(tokens)

    def remaining(self, request: Any) -> float:
        return self.learned.remaining(request)

    def remaining_if(self, request: Any, more: float) -> float:
        return self.learned.remaining_if(request, more)

    def observe(self, row: TraceRow, shape: PlanShape | None = None) -> None:
        seconds = row.t_end - row.t_start
        if shape is not None and seconds > 0:
            for name, e in self.estimators.items():
                self.errors[name].append((bool(shape.prefill), abs(e.step_seconds(shape) / seconds - 1)))

    def save(self, path: Any) -> None:
        self.learned.save(path)

    def load(self, path: Any) -> None:
        self.learned.load(path)
