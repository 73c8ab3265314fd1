"""Plays a workload into an engine and keeps what a reader wants of it: totals, quantiles, waits, in bounded memory.

The engine may run a model in real time or imitate one on a virtual clock; this loop cannot tell. `LLM.serve` keeps every
request and step as a table row; this keeps histograms, so a million requests need no more memory than a thousand.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pdlab.core.config import EngineConfig
from pdlab.core.errors import InvalidRequest
from pdlab.core.request import FinishReason, Request
from pdlab.core.trace import TraceRow
from pdlab.engine.coalescing import CoalescingEngine
from pdlab.engine.engine import Engine
from pdlab.scheduler.deadlines import objectives_met
from pdlab.workloads.prompts import prompt_of
from pdlab.workloads.workload import Item, Workload


class Histogram:
    """Quantiles of positive numbers to within 0.25 %: counts in bins that grow by 0.5 %."""

    _STEP = math.log(1.005)

    def __init__(self) -> None:
        self.bins: dict[int, int] = {}
        self.n = 0
        self.total = 0.0
        self.largest = 0.0

    def add(self, value: float) -> None:
        index = round(math.log(max(value, 1e-9)) / self._STEP)
        self.bins[index] = self.bins.get(index, 0) + 1
        self.n += 1
        self.total += value
        self.largest = max(self.largest, value)

    def quantile(self, q: float) -> float:
        """The smallest value with at least q of all at or below it; NaN when empty."""
        seen = 0
        for index in sorted(self.bins):
            seen += self.bins[index]
            if seen >= q * self.n:
                return min(math.exp(index * self._STEP), self.largest)
        return math.nan

    @property
    def mean(self) -> float:
        return self.total / self.n if self.n else math.nan


class Ended(NamedTuple):
    """One request that ended, seconds on the engine's clock; None where a phase did not happen."""

    request_id: int
    kind: str
    priority: int
    prompt_tokens: int
    output_tokens: int
    arrival_s: float
    admitted_s: float | None
    first_token_s: float | None
    finish_s: float
    reason: str
    preemptions: int


@dataclass
class Outcome:
    """What came of a workload. Seconds; `wait` is from arrival to the first time a request was scheduled."""

    name: str
    ttft_objective_s: float
    per_token_objective_s: float
    ttft: Histogram = field(default_factory=Histogram)
    per_token: Histogram = field(default_factory=Histogram)  # a request's mean time between its tokens
    end_to_end: Histogram = field(default_factory=Histogram)
    wait: Histogram = field(default_factory=Histogram)
    longest_wait_by_kind: dict[str, float] = field(default_factory=dict)
    good: int = 0  # requests that met their objectives
    reasons: dict[str, int] = field(default_factory=dict)
    output_tokens: int = 0
    prompt_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    pad_tokens: int = 0
    step_tokens: int = 0
    started_s: float = 0.0
    ended_s: float = 0.0
    host_s: float = 0.0  # real seconds of planning and committing, summed
    wall_s: float = 0.0  # real seconds that the replay took
    requests: list[Ended] | None = None
    trace: list[TraceRow] | None = None

    @property
    def ended(self) -> int:
        return sum(self.reasons.values())

    @property
    def complete(self) -> int:
        return self.reasons.get("stop", 0) + self.reasons.get("length", 0)

    @property
    def seconds(self) -> float:
        """From the first arrival to the last end, on the engine's clock."""
        return self.ended_s - self.started_s

    @property
    def goodput(self) -> float:
        """Requests a second that met their objectives."""
        return self.good / self.seconds if self.seconds > 0 else 0.0

    @property
    def throughput(self) -> float:
        """Requests a second that ran to their end."""
        return self.complete / self.seconds if self.seconds > 0 else 0.0

    @property
    def speed(self) -> float:
        """Simulated seconds a real second."""
        return self.seconds / self.wall_s if self.wall_s > 0 else math.inf

    def add(self, request: Request, item: Item) -> None:
        """Counts a request that ended."""
        reason = request.finish_reason.value if request.finish_reason else "error"
        self.reasons[reason] = self.reasons.get(reason, 0) + 1
        self.preemptions += request.preemptions
        self.output_tokens += (n := len(request.output_token_ids))
        self.prompt_tokens += request.prompt_len
        finish = request.finish_s if request.finish_s is not None else request.arrival_s
        self.ended_s = max(self.ended_s, finish)
        waited = (finish if request.first_scheduled_s is None else request.first_scheduled_s) - request.arrival_s
        self.wait.add(waited)
        self.longest_wait_by_kind[item.kind] = max(waited, self.longest_wait_by_kind.get(item.kind, 0.0))
        ttft = per_token = None
        if request.first_token_s is not None and request.last_token_s is not None:
            self.ttft.add(ttft := request.first_token_s - request.arrival_s)
            if n > 1:
                self.per_token.add(per_token := (request.last_token_s - request.first_token_s) / (n - 1))
        if reason in ("stop", "length"):
            self.end_to_end.add(finish - request.arrival_s)
            self.good += objectives_met(
                ttft,
                per_token,
                self.ttft_objective_s if item.ttft_deadline_s is None else item.ttft_deadline_s,
                self.per_token_objective_s if item.per_token_deadline_s is None else item.per_token_deadline_s,
            )
        if self.requests is not None:
            self.requests.append(
                Ended(
                    request.request_id, item.kind, item.priority, request.prompt_len, n, request.arrival_s,
                    request.first_scheduled_s, request.first_token_s, finish, reason, request.preemptions,
                )
            )  # fmt: skip


class _Totals:
    """Takes the place of the engine's list of trace rows and counts them into an outcome."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome

    def append(self, row: TraceRow) -> None:
        self.last = row
        self.repeat_last(1)

    def repeat_last(self, times: int) -> None:
        o, row = self.outcome, self.last
        o.steps += times
        o.pad_tokens += times * row.pad_tokens
        o.step_tokens += times * (row.prefill_tokens + row.decode_count + row.pad_tokens)
        o.host_s += times * row.host_s


def replay(
    engine: Engine, workload: Workload | Iterable[Item], *, keep: bool = False, seed: int = 0, until_s: float | None = None
) -> Outcome:
    """Runs the workload to its end, or until `until_s` on the engine's clock, when what is left ends as aborted.

    `keep` also keeps each request and each trace row. Requests that the engine refuses count as errors.
    """
    config: EngineConfig = engine.config
    name = workload.name if isinstance(workload, Workload) else "stream"
    outcome = Outcome(name, config.ttft_objective_s, config.per_token_objective_s)
    totals = _Totals(outcome)
    wall = time.perf_counter()
    rows_before, engine.trace = engine.trace, [] if keep else totals  # type: ignore[assignment]
    if keep:
        outcome.requests = []
    try:
        _Loop(engine, workload, outcome, seed).run(until_s)
    finally:
        if keep:
            outcome.trace = list(engine.trace)
            for row in engine.trace:
                totals.append(row)
        engine.trace = rows_before
    outcome.wall_s = time.perf_counter() - wall
    return outcome


class _Loop:
    def __init__(self, engine: Engine, workload: Workload | Iterable[Item], outcome: Outcome, seed: int) -> None:
        self.engine, self.outcome, self.seed = engine, outcome, seed
        self.coming: Iterator[Item] = iter(workload)
        self.clients = workload.clients if isinstance(workload, Workload) else None
        self.next = next(self.coming, None)
        self.live: dict[int, tuple[Request, Item]] = {}
        self.number = 0
        self.start = engine.clock.now()

    def run(self, until_s: float | None) -> None:
        engine, clock = self.engine, self.engine.clock
        self.outcome.started_s = self.start + (self.next.arrival_s if self.next else 0.0)
        self.outcome.ended_s = self.outcome.started_s
        while self.next is not None or not engine.idle:
            now = clock.now()
            if until_s is not None and now >= until_s:
                self._stop()
                return
            self._admit(now)
            if engine.idle or engine.stuck:
                wake = [t for t in (self._next_arrival(), engine.next_timeout) if t is not None]
                if not wake:
                    self._ended(engine.give_up())
                    continue
                if min(wake) > now:
                    clock.sleep_until(min(wake) if until_s is None else min(*wake, until_s))
                    engine.stuck = False
                    continue
            if isinstance(engine, CoalescingEngine):
                engine.quiet_until = min(self._quiet_until(), math.inf if until_s is None else until_s)
            self._ended(engine.step())

    def _quiet_until(self) -> float:
        """No request comes before this time. In a closed loop the next one comes when one ends, which ends a run anyway."""
        due = self._next_arrival()
        return math.inf if due is None else due

    def _next_arrival(self) -> float | None:
        if self.next is None or (self.clients is not None and len(self.live) >= self.clients):
            return None
        return self.start + self.next.arrival_s

    def _admit(self, now: float) -> None:
        while (due := self._next_arrival()) is not None and due <= now and self.next is not None:
            item, self.next = self.next, next(self.coming, None)
            prompt = prompt_of(item, self.number, self.engine.model.vocab_size, self.seed)
            if len(self.live) < 4096 and len(prompt) < self.engine.max_len:  # lists are quicker; a long queue stays unmade
                prompt = prompt[:]
            self.number += 1
            try:
                if isinstance(prompt, str):
                    raise InvalidRequest("this item's prompt is text and the replay has no tokenizer", "use LLM.serve")
                request = self.engine.add(
                    prompt,
                    item.sampling(),
                    arrival_s=now if self.clients is not None else due,
                    priority=item.priority,
                    ttft_deadline_s=item.ttft_deadline_s,
                    per_token_deadline_s=item.per_token_deadline_s,
                    kind=item.kind,
                )
            except InvalidRequest:
                self.outcome.reasons["error"] = self.outcome.reasons.get("error", 0) + 1
                continue
            self.live[request.request_id] = request, item

    def _ended(self, events: Iterable[Any]) -> None:
        for event in events:
            if event.finish_reason is not None and event.request_id in self.live:
                self.outcome.add(*self.live.pop(event.request_id))

    def _stop(self) -> None:
        self.next = None
        while not self.engine.idle:
            for request_id in list(self.live):
                self._ended(self.engine.abort(request_id))
            self.engine.step()
        assert all(r.finish_reason is FinishReason.ABORTED for r, _ in self.live.values())


def simulate(
    model_name: str,
    config: EngineConfig,
    workload: Workload | Iterable[Item],
    *,
    keep: bool = False,
    until_s: float | None = None,
) -> Outcome:
    """Replays a workload on a virtual clock: the real engine, scheduler and allocators, an imitated device.

    `config.simulated_device` is imitated as well as is known (costs.calibration). No weights, no torch.
    """
    engine = simulated_engine(model_name, config)
    try:
        return replay(engine, workload, keep=keep, seed=config.seed, until_s=until_s)
    finally:
        engine.close()


def simulated_engine(model_name: str, config: EngineConfig) -> CoalescingEngine:
    """An engine over an imitated device, for `replay`."""
    from pdlab.costs.estimator import make_estimator
    from pdlab.costs.formulas import itemsize_of
    from pdlab.costs.roofline import ceilings_for
    from pdlab.engine.simulated import make_simulated, simulated_dtype
    from pdlab.models.catalogue import config_of

    config = config.with_(executor="simulated")
    model, dtype = config_of(model_name), simulated_dtype(config)
    executor = make_simulated(config, model)
    estimator = make_estimator(config, model, ceilings_for(config.simulated_device, dtype), itemsize_of(dtype))
    return CoalescingEngine(config, model, executor, estimator)
