"""What came of a load test, as rows: throughput, goodput, quantiles, fairness, waits against their bound, and step prices."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from pdlab.core.config import EngineConfig
from pdlab.core.plan import PlanShape
from pdlab.core.trace import TraceRow
from pdlab.costs.interface import Estimator
from pdlab.costs.learned import LearnedEstimator
from pdlab.hardware.timing import Timings, summarize
from pdlab.workloads.replay import Ended, Outcome

if TYPE_CHECKING:
    from pdlab.bench.records import Recorder
    from pdlab.bench.suites import Context

QUANTILES = (50, 90, 99)


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
    record: Recorder,
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
            record.add(metric, timings, variant=variant, kind=kind, settings=settings, params={**params, **more})

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
    """Prices steps by an estimator that goes on learning, as every engine's does, and keeps them. Afterwards each of `judged`,
    of which those named in `learning` are told of a step once they have priced it, is held against every step: what they say
    depends on nothing but the steps before, so it is what they would have said then, and the engine does not wait for it."""

    def __init__(self, asked: LearnedEstimator, judged: dict[str, Estimator], learning: tuple[str, ...] = ()) -> None:
        self.asked, self.judged, self.learning = asked, judged, learning
        self.steps: list[tuple[TraceRow, PlanShape, float]] = []

    @classmethod
    def of(cls, known: LearnedEstimator, roofline: Estimator) -> Judge:
        """`ours`: what is known now, `ours_learning`: the same, going on with every step, and the roofline with no data."""
        judged = {"ours": copy.deepcopy(known), "ours_learning": copy.deepcopy(known), "roofline": roofline}
        return cls(copy.deepcopy(known), judged, ("ours_learning",))

    def step_seconds(self, shape: PlanShape) -> float:
        return self.asked.step_seconds(shape)

    def prefill_seconds(self, tokens: int) -> float:
        return self.asked.prefill_seconds(tokens)

    def remaining(self, request: Any) -> float:
        return self.asked.remaining(request)

    def remaining_if(self, request: Any, more: float) -> float:
        return self.asked.remaining_if(request, more)

    def observe(self, row: TraceRow, shape: PlanShape | None = None, launch_s: float = 0.0) -> None:
        if shape is not None:
            self.steps.append((row, shape, launch_s))
        self.asked.observe(row, shape, launch_s)

    def finished(self, request: Any) -> None:
        self.asked.finished(request)

    def errors(self) -> dict[str, list[tuple[bool, float]]]:
        """By estimator, of every step: whether it held prompts, and the relative error of its price. To be asked once."""
        found: dict[str, list[tuple[bool, float]]] = {name: [] for name in self.judged}
        for row, shape, launch_s in self.steps:
            seconds = row.t_end - row.t_start
            for name, e in self.judged.items():
                if seconds > 0:
                    found[name].append((bool(shape.prefill), abs(e.step_seconds(shape) / seconds - 1)))
                if name in self.learning:
                    e.observe(row, shape, launch_s)
        return found

    def save(self, path: Any) -> None:
        self.asked.save(path)

    def load(self, path: Any) -> None:
        self.asked.load(path)


def record_prices(
    ctx: Context, judge: Judge, *, record: Recorder | None = None, kind: str = "measured",
    settings: dict[str, Any] | None = None, **params: Any,
) -> None:  # fmt: skip
    """Rows of estimator_error: the mean absolute percentage error of each estimator, over all steps and by what they hold."""
    for variant, errors in judge.errors().items():
        for metric, chosen in (
            ("mape", [e for _, e in errors]),
            ("mape_decode", [e for prefill, e in errors if not prefill]),
            ("mape_mixed", [e for prefill, e in errors if prefill]),
        ):
            if not chosen:
                continue
            mean, spread = 100 * sum(chosen) / len(chosen), summarize([100 * e for e in chosen], "percent")
            told = {"median": spread.median, "p90": spread.p90, **(settings or {})}
            (record or ctx.record).add(
                metric, mean, "percent", variant=variant, kind=kind, n=len(chosen), settings=told, experiment="estimator_error",
                params=params,
            )  # fmt: skip
            ctx.say(f"  {variant}, load {params.get('load')}: {metric} {mean:.2f} % over {len(chosen)} steps")


def quantities_of(outcome: Outcome) -> dict[tuple[str, int], float]:
    """Requests/s, and seconds of every quantile, by (quantity, quantile)."""
    found = {("throughput", 50): outcome.throughput}
    for quantity in ("ttft", "per_token", "end_to_end"):
        for q in QUANTILES:
            found[quantity, q] = quantile_of(quantity, q, outcome)
    return found


def record_differences(
    ctx: Context, real: dict[tuple[str, int], float], simulated: Outcome, *, variant: str, record: Recorder | None = None,
    kind: str = "measured", settings: dict[str, Any] | None = None, **params: Any,
) -> None:  # fmt: skip
    """Rows of simulator_error: 100 · (simulated - real) / real of throughput and of every quantile; `real`: quantities_of()."""
    to, n = record or ctx.record, simulated.ended
    same: dict[str, Any] = {"variant": variant, "kind": kind, "n": n, "settings": settings, "experiment": "simulator_error"}
    for (quantity, q), ours in quantities_of(simulated).items():
        if (quantity, q) not in real:
            continue
        truth = real[quantity, q]
        error = 100 * (ours - truth) / truth
        to.add("error", error, "percent", params={**params, "quantity": quantity, "quantile": q}, **same)
        ctx.say(
            f"  {variant}, load {params.get('load')}, {quantity} P{q}: {ours:.4g} simulated, {truth:.4g} real, {error:+.1f} %"
        )
    to.add("speed", simulated.speed, "ratio", params=params, **same)
