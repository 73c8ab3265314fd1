"""Objectives as deadlines: when the first token and each later one are due, and the policy that serves by them.

    due(first token) = arrival + ttft objective        due(token n) = due(first) + n · per-token objective

A request meets its objectives if its first token is not late and its tokens come, in the mean, at least as fast as
promised. Goodput counts the requests that do.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from pdlab.core.plan import PlanShape
from pdlab.core.request import Request
from pdlab.costs.interface import Estimator
from pdlab.scheduler.interface import Policy
from pdlab.scheduler.policies import Lazily

LATE_PART = 1 / 8  # the share of a step's budget that late prompts may fill while there is little of them
MOST_GAP = 3  # per-token objectives between two tokens while a burst of prompts is served


def first_token_due(request: Request, ttft_s: float) -> float:
    """The request's own objective, else the default `ttft_s`."""
    own = request.ttft_deadline_s
    return request.arrival_s + (ttft_s if own is None else own)


def next_token_due(request: Request, ttft_s: float, per_token_s: float) -> float:
    """When the next token must be out for the stream to be on schedule."""
    own = request.per_token_deadline_s
    return first_token_due(request, ttft_s) + len(request.output_token_ids) * (per_token_s if own is None else own)


def objectives_met(
    ttft_s: float | None, per_token_s: float | None, ttft_objective_s: float, per_token_objective_s: float
) -> bool:
    """Whether an ended request counts towards goodput: `per_token_s` is its mean time between tokens, None for a single
    token; a request without a first token never counts."""
    if ttft_s is None or math.isnan(ttft_s) or ttft_s > ttft_objective_s:
        return False
    return per_token_s is None or math.isnan(per_token_s) or per_token_s <= per_token_objective_s


class EarliestDeadline(Policy):
    """As many first tokens in time as can be; who cannot be in time waits for room, but not longer than `patience`.

    Three groups, served one after another:

    1. who has waited `patience`, in order of arrival;
    2. a set of requests that can all be in time, earliest deadline first: the waiting ones are taken by deadline, and when
       the work taken no longer fits before the next deadline, the longest of them is left out (Moore 1968: no other choice
       leaves fewer late). Work is prefill seconds in steps of the usual budget, decodes and all;
    3. those left out and those already late, shortest first: they use what the second group leaves of a step, up to a
       share of its budget, so that whoever arrives meanwhile finds a short step. The share is an eighth while they are few
       and grows with their work, to the whole budget when that is half of `patience`: they never pile up.

    When the second group holds more than a step's prompts, a step is given to prompts alone (`holds_decodes`), so long as
    every stream stays on its schedule (see next_token_due) and no gap between two tokens exceeds MOST_GAP objectives.

    Promise: nobody who arrives later than arrival(r) + patience is served before r, so the bound of AgedShortestFirst holds
    with headstart = patience. Gives up first whose stream is furthest ahead of its own schedule.
    """

    name = "deadline"

    def __init__(self, ttft_s: float, per_token_s: float, patience_s: float, step_tokens: int) -> None:
        self.ttft_s, self.per_token_s, self.patience_s, self.step_tokens = ttft_s, per_token_s, patience_s, step_tokens
        self._late: set[int] = set()
        self._late_tokens = 1  # of a step, for all of them together
        self._times: tuple[float, float, float] = math.nan, 0.0, 0.0  # when step_times was asked, and its answer
        self._ordered_at, self._held_at = math.nan, math.nan  # when order and holds_decodes were last asked, and said yes

    def step_times(self, running: Sequence[Request], now: float, estimator: Estimator) -> tuple[float, float]:
        """Seconds of a full step of prompts alone, and of one that also decodes; both worked out once a step."""
        if self._times[0] != now:
            context = [r.num_tokens for r in running if r.output_token_ids]
            decodes = len(context)
            left = max(1, self.step_tokens - decodes)
            mixed = estimator.step_seconds(PlanShape(((left, 0),), decodes, sum(context), 0, decodes + 1))
            alone = estimator.prefill_seconds(self.step_tokens)
            self._times = now, alone, max(mixed, 1e-9) * self.step_tokens / left
        return self._times[1:]

    def order(
        self, waiting: Sequence[Request], running: Sequence[Request], now: float, estimator: Estimator
    ) -> tuple[Sequence[Request], Sequence[Request]]:
        self._ordered_at = now
        alone, mixed = self.step_times(running, now, estimator)
        stretch = max(1.0, mixed / max(alone, 1e-9))
        aged: list[Request] = []
        late: list[tuple[float, float, int, Request]] = []
        hopeful: list[tuple[float, float, int, Request, float]] = []
        for r in waiting:
            due = next_token_due(r, self.ttft_s, self.per_token_s)
            seconds = stretch * estimator.remaining_if(r, 0)
            if now >= r.arrival_s + self.patience_s:
                aged.append(r)
            elif now + seconds > due:
                late.append((seconds, r.arrival_s, r.request_id, r))
            else:
                hopeful.append((due, r.arrival_s, r.request_id, r, seconds))
        hopeful.sort()
        dropped = self._dropped(hopeful, now)
        in_time = [r for _, _, number, r, _ in hopeful if number not in dropped]
        late += [(seconds, arrival, number, r) for _, arrival, number, r, seconds in hopeful if number in dropped]
        aged.sort(key=lambda r: (r.arrival_s, r.request_id))
        self._late = {number for _, _, number, _ in late}
        share = min(1.0, max(LATE_PART, sum(seconds for seconds, *_ in late) / (0.5 * self.patience_s)))
        self._late_tokens = max(1, int(share * self.step_tokens))
        order = aged + in_time + [r for _, _, _, r in sorted(late)]
        return order, Lazily(lambda: sorted(running, key=self._ahead, reverse=True))

    @staticmethod
    def _dropped(hopeful: list[tuple[float, float, int, Request, float]], now: float) -> set[int]:
        """Numbers of those to leave out so that the others are in time, by Moore's rule; `hopeful` is sorted by deadline."""
        taken: list[tuple[float, int]] = []  # heap: the longest on top
        dropped: set[int] = set()
        done = now
        for due, _, number, _, seconds in hopeful:
            heapq.heappush(taken, (-seconds, number))
            done += seconds
            if done > due:
                longest, left_out = heapq.heappop(taken)
                done += longest
                dropped.add(left_out)
        return dropped

    def holds_decodes(self, prompts: Sequence[Request], running: Sequence[Request], now: float, estimator: Estimator) -> bool:
        held = self._may_hold(prompts, running, now, estimator)
        self._held_at = now if held else math.nan
        return held

    def _may_hold(self, prompts: Sequence[Request], running: Sequence[Request], now: float, estimator: Estimator) -> bool:
        urgent = 0
        for r in prompts:  # the cheap question first: most steps end here
            if now + estimator.remaining_if(r, 0) <= next_token_due(r, self.ttft_s, self.per_token_s):
                urgent += r.num_tokens - r.num_computed
        streams = [r for r in running if r.last_token_s is not None]
        if urgent <= self.step_tokens - len(streams):
            return False
        alone, mixed = self.step_times(running, now, estimator)
        next_token = now + alone / 2 + mixed
        for r in streams:
            own = self.per_token_s if r.per_token_deadline_s is None else r.per_token_deadline_s
            last = now if r.last_token_s is None else r.last_token_s
            if next_token > min(next_token_due(r, self.ttft_s, self.per_token_s), last + MOST_GAP * own):
                return False
        return True

    def chunk(self, request: Request, left: int, used: int) -> int:
        if request.request_id in self._late:
            return max(0, min(left, self._late_tokens - used))
        # prompts alone are as quick in short steps, and whose prompt is complete need not wait for the others'
        held = self._held_at == self._ordered_at
        return max(0, min(left, max(1, self.step_tokens // 2) - used)) if held else left

    def _ahead(self, request: Request) -> tuple[float, int]:
        return next_token_due(request, self.ttft_s, self.per_token_s), request.request_id
