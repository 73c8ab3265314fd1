"""The engine on a virtual clock, with runs of identical decode steps taken at once.

When nothing that waits can join, no prompt is in progress and nothing arrives before a known time, the next steps differ
only in that every context grows by a token. Such a run is one plan with `repeat` = k: planned, priced and committed once,
with the tokens, times, memory and trace rows that k plans would have given.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Protocol, runtime_checkable

from pdlab.core.plan import Plan
from pdlab.core.request import Request, TokenEvent
from pdlab.core.trace import TraceRow
from pdlab.engine.engine import Engine, Flight
from pdlab.engine.interface import StepResult
from pdlab.engine.simulated import SimulatedExecutor

LONGEST_RUN = 256


@runtime_checkable
class RunCounter(Protocol):
    """A trace that keeps totals instead of rows: it is told that the last row happened so many times more."""

    def repeat_last(self, times: int) -> None: ...


class CoalescingEngine(Engine):
    """An Engine over a SimulatedExecutor. `quiet_until` is set by the caller: no request is added before that time."""

    executor: SimulatedExecutor
    quiet_until: float = 0.0

    def turn(self) -> list[TokenEvent]:
        if not self._quiet():
            return super().turn()
        if self.in_flight:
            return self.commit_oldest()  # with nothing in flight the next call can begin a run
        started = time.perf_counter()
        now = self.clock.now()
        events = self.expire(now)
        plan = self.scheduler.plan(now)
        self.stuck = plan is None and bool(self.live)
        if plan is None:
            return events
        k = self._run_length(plan)
        flight = self.submit(replace(plan, repeat=k), started)
        if k > 1:
            return events + self._commit_run(flight, k)
        self.in_flight.append(flight)
        return events + (self.commit_oldest() if self.config.steps_in_flight == 1 else [])

    def _quiet(self) -> bool:
        """Whether, until `quiet_until` or until one of them ends, the same requests go on decoding."""
        s = self.scheduler
        if self.quiet_until <= self.clock.now() or s.prefilling or not s.running:
            return False
        return not s.waiting or getattr(s.batching, "holds_batch", False) or not (s.rows or s.policy_preempts)

    def _run_length(self, plan: Plan) -> int:
        """Steps until the first of these requests ends, memory is short, or the quiet time is over."""
        running = list(self.scheduler.running.values())
        if plan.shape.decode_count != len(running):
            return 1
        k = LONGEST_RUN
        for r in running:
            live = self.live[r.request_id]
            if live.text is not None or live.streamed or live.end_tokens or r.params.logprobs is not None:
                return 1
            k = min(k, live.limit - len(r.output_token_ids))
        until = min(self.quiet_until, self.next_timeout or math.inf)
        # whoever arrives while a step runs joins after those already submitted
        k = min(k, self.executor.steps_until(plan.shape, until, k) + self.config.steps_in_flight - 1)
        while k > 1 and not all(self.allocator.reserve(r.request_id, r.num_tokens + k - 1) for r in running):
            k //= 2  # what was reserved is used later
        return k

    def _commit_run(self, flight: Flight, k: int) -> list[TokenEvent]:
        result = flight.handle.result()
        started = time.perf_counter()
        requests = self.scheduler.commit(flight.plan)
        self.scheduler.skip_steps(k - 1)
        starts, ends = self.executor.run_times(flight.plan.shape, result, k)
        events: list[TokenEvent] = []
        lens = flight.plan.context_lens.tolist()
        for request, end, column in zip(requests, lens, result.tokens.T.tolist(), strict=True):
            self._grow(request, end, column[:-1], ends[:-1])
            event = self.accept(self.live[request.request_id], column[-1], ends[-1])
            if event is not None:
                events.append(event)
        self._record_run(flight, result, starts, ends, time.perf_counter() - started)
        return events

    def _grow(self, request: Request, end: int, tokens: list[int], times: list[float]) -> None:
        """What committing all but the last step of a run changes; `end`: tokens in the cache after the first."""
        n = len(tokens)
        request.output_token_ids += tokens
        request.token_times += times
        rows = self.scheduler.rows
        rows.scheduled[request.row] += n
        rows.sampled[request.row] += n
        rows.room[request.row] = max(rows.room[request.row], end + n)
        first = end - request.prompt_len  # what the run wrote begins with the token sampled before it
        self.allocator.written(request.request_id, request.output_token_ids[first : first + n], end)

    def _record_run(self, flight: Flight, result: StepResult, starts: list[float], ends: list[float], commit_s: float) -> None:
        """One trace row a step. The estimator sees the first only: the others differ by a few cached tokens."""
        k = len(ends)
        self.record(replace(flight, plan_s=flight.plan_s / k), replace(result, t_end=ends[0]), commit_s / k)
        if isinstance(self.trace, RunCounter):
            self.trace.repeat_last(k - 1)
            return
        first, between = vars(self.trace[-1]), self.executor.between(flight.plan.shape)
        for i in range(1, k):
            later = {
                "step": first["step"] + i,
                "kv_tokens": first["kv_tokens"] + i * first["decode_count"],
                "t_submit": starts[i] if self.config.steps_in_flight == 2 else starts[i] - between,
                "t_start": starts[i],
                "t_end": ends[i],
            }
            self.trace.append(TraceRow(**{**first, **later}))
