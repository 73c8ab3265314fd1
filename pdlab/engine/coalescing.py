"""The engine on a virtual clock, with runs of identical decode steps taken at once.

When nothing waits, no prompt is in progress and nothing arrives before a known time, the next steps differ only in that
every context grows by a token. Such a run is one plan with `repeat` = k: planned, priced and committed once, with the same
tokens, times, memory and trace rows as k plans would have given.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Protocol, runtime_checkable

import numpy as np

from pdlab.core.plan import PlanShape
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

    def step(self) -> list[TokenEvent]:
        now = self.clock.now()
        if self.quiet_until <= now or self.in_flight or self.scheduler.waiting or self.scheduler.prefilling or not self.live:
            return super().step()
        running = list(self.scheduler.running.values())
        k = self._run_length(running, now)
        return self._run(running, k) if k > 1 else super().step()

    def _run_length(self, running: list[Request], now: float) -> int:
        """Steps until the first of these ends, memory is short, or the quiet time is over; 1 where none may be skipped."""
        k = LONGEST_RUN
        for r in running:
            live = self.live[r.request_id]
            if live.text is not None or live.streamed or live.end_tokens or r.params.logprobs is not None:
                return 1
            k = min(k, live.limit - len(r.output_token_ids))
        until = min(self.quiet_until, self.next_timeout or math.inf)
        kv = sum(r.num_tokens for r in running)
        k = min(k, self.executor.steps_until(PlanShape((), len(running), kv, 0, len(running)), until, k))
        while k > 1 and not all(self.allocator.reserve(r.request_id, r.num_tokens + k - 1) for r in running):
            k //= 2  # what was reserved is used later; a run that memory cuts short stays a run of fewer steps
        return k

    def _run(self, running: list[Request], k: int) -> list[TokenEvent]:
        started = time.perf_counter()
        plan = self.scheduler.plan(self.clock.now())
        assert plan is not None
        if plan.shape.decode_count != len(running):  # a decode waits for memory: an ordinary step after all
            k = 1
        flight = self.submit(replace(plan, repeat=k), started)
        result = flight.handle.result()
        started = time.perf_counter()
        requests = self.scheduler.commit(plan)
        tokens = result.tokens.reshape(k, -1)
        times = np.linspace(result.t_start, result.t_end, k + 1)[1:].tolist()
        events: list[TokenEvent] = []
        for request, column in zip(requests, tokens.T.tolist(), strict=True):
            self._grow(request, column[:-1], times[:-1])
            event = self.accept(self.live[request.request_id], column[-1], times[-1])
            if event is not None:
                events.append(event)
        self._record_run(flight, result, [result.t_start, *times], time.perf_counter() - started)
        return events

    def _grow(self, request: Request, tokens: list[int], times: list[float]) -> None:
        """What committing all but the last step of a run changes."""
        n = len(tokens)
        if not n:
            return
        end = request.num_computed
        request.output_token_ids += tokens
        request.token_times += times
        request.num_computed += n
        request.num_scheduled += n
        request.num_sampled += n
        rows = self.scheduler.rows
        rows.scheduled[request.row] += n
        rows.sampled[request.row] += n
        rows.room[request.row] = max(rows.room[request.row], request.num_computed)
        self.allocator.written(request.request_id, request.tokens(end, end + n), end)

    def _record_run(self, flight: Flight, result: StepResult, edges: list[float], commit_s: float) -> None:
        """One trace row a step. The estimator sees the first only: the others differ by a few cached tokens."""
        k = len(edges) - 1
        self.record(replace(flight, plan_s=flight.plan_s / k), replace(result, t_end=edges[1]), commit_s / k)
        if isinstance(self.trace, RunCounter):
            self.trace.repeat_last(k - 1)
            return
        first = vars(self.trace[-1])
        for i in range(1, k):
            kv = first["kv_tokens"] + i * first["decode_count"]
            row = {**first, "kv_tokens": kv, "t_submit": edges[i], "t_start": edges[i], "t_end": edges[i + 1]}
            self.trace.append(TraceRow(**row))
