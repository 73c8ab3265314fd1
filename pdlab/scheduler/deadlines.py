"""Objectives as deadlines: when the first token and each later one are due, and the policy that serves by them.

    due(first token) = arrival + ttft objective        due(token n) = due(first) + n · per-token objective

A request meets its objectives if its first token is not late and its tokens come, in the mean, at least as fast as
promised. Goodput counts the requests that do.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence

from pdlab.core.plan import PlanShape
from pdlab.core.request import Request, Status
from pdlab.costs.interface import Estimator
from pdlab.scheduler.interface import Policy
from pdlab.scheduler.policies import Lazily, Remembered

LEAST_CHUNK = 256  # tokens: less of a large prompt at a time costs more than it gives
LARGE_STEP = (
    1.5  # full steps of ordinary prompts: what a step with a large one may take; far in, its tokens cost several times as much
)


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

    Four groups, served one after another:

    1. who has waited `patience`, in order of arrival;
    2. a set of requests that can all be in time, earliest deadline first: the waiting ones are taken by deadline, and when
       the work taken no longer fits before the next deadline, the longest of them is left out (Moore 1968: no other choice
       leaves fewer late). Work is prefill seconds in steps of the usual budget, decodes and all;
    3. those left out and those already late, shortest first: what the second group leaves of a step is theirs, for the
       sooner they are done the fewer follow them;
    4. the large ones, which could not be in time if they were alone. They get steps in which nobody else's prompt is
       computed, and no more of one than keeps it about as short as a full step of ordinary prompts (LARGE_STEP), for
       whoever arrives meanwhile waits for its end. Less at a time would cost more in all: every step has its own price.

    Promise: nobody who arrives later than arrival(r) + patience is served before r, so the bound of AgedShortestFirst holds
    with headstart = patience. Gives up first whose stream is furthest ahead of its own schedule.
    """

    name = "deadline"

    def __init__(self, ttft_s: float, per_token_s: float, patience_s: float, step_tokens: int) -> None:
        self.ttft_s, self.per_token_s, self.patience_s, self.step_tokens = ttft_s, per_token_s, patience_s, step_tokens
        self._seconds = Remembered()
        self._large: set[int] = set()
        self._price: Callable[[PlanShape], float] = lambda shape: 0.0
        self._decodes = PlanShape()  # those of the step that is being planned
        self._large_step_s = 0.0

    def order(
        self, waiting: Sequence[Request], running: Sequence[Request], now: float, estimator: Estimator
    ) -> tuple[Sequence[Request], Sequence[Request]]:
        stretch = self._prepare(running, estimator)
        self._seconds.forget_all_but(waiting, running)
        aged: list[Request] = []
        late: list[tuple[float, float, int, Request]] = []
        large: list[Request] = []
        hopeful: list[tuple[float, float, int, Request, float]] = []
        for r in waiting:
            due = next_token_due(r, self.ttft_s, self.per_token_s)
            seconds = stretch * self._prompt_seconds(r, estimator)
            if now >= r.arrival_s + self.patience_s:
                aged.append(r)
            elif now + seconds <= due:
                hopeful.append((due, r.arrival_s, r.request_id, r, seconds))
            elif r.arrival_s + estimator.prefill_seconds(r.num_tokens) > due:
                large.append(r)
            else:
                late.append((seconds, r.arrival_s, r.request_id, r))
        hopeful.sort()
        dropped = self._dropped(hopeful, now)
        in_time = [r for _, _, number, r, _ in hopeful if number not in dropped]
        late += [(seconds, arrival, number, r) for _, arrival, number, r, seconds in hopeful if number in dropped]
        for group in (aged, large):
            group.sort(key=lambda r: (r.arrival_s, r.request_id))
        self._large = {r.request_id for r in large}
        order = aged + in_time + [r for _, _, _, r in sorted(late)] + large
        return order, Lazily(lambda: sorted(running, key=self._ahead, reverse=True))

    def _prepare(self, running: Sequence[Request], estimator: Estimator) -> float:
        """How much slower prompts are computed beside the decodes than alone; takes down what `chunk` will ask."""
        some = [r.num_tokens for r in running[:: max(1, len(running) // 32)] if r.output_token_ids]
        context = sum(some) * len(running) // max(1, len(some))
        left = max(1, self.step_tokens - len(running))
        self._price, self._decodes = estimator.step_seconds, PlanShape((), len(running), context, 0, len(running))
        full = self._step_seconds(left, 0)
        self._large_step_s = LARGE_STEP * full
        alone = estimator.prefill_seconds(self.step_tokens)
        return max(1.0, full * self.step_tokens / left / max(alone, 1e-9))

    def _step_seconds(self, tokens: int, context: int) -> float:
        """Of a step that computes `tokens` of one prompt beside the decodes."""
        d = self._decodes
        return self._price(PlanShape(((tokens, context),), d.decode_count, d.decode_kv_tokens, 0, d.decode_count + 1))

    def _prompt_seconds(self, request: Request, estimator: Estimator) -> float:
        """Seconds alone to the request's next token; asked once while it waits."""
        if request.status is Status.RUNNING:
            return estimator.remaining_if(request, 0)
        return self._seconds.get(request, lambda r: estimator.remaining_if(r, 0))

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

    def chunk(self, request: Request, left: int, used: int) -> int:
        if request.request_id not in self._large:
            return left
        if used:
            return 0
        context = request.num_scheduled
        most = min(left, request.num_tokens - context)
        least = min(most, LEAST_CHUNK)
        # a step's time is close to linear in a chunk's tokens
        low, high = self._step_seconds(least, context), self._step_seconds(most, context)
        if high <= self._large_step_s:
            return most
        return least if low >= self._large_step_s else least + int((most - least) * (self._large_step_s - low) / (high - low))

    def _ahead(self, request: Request) -> tuple[float, int]:
        return next_token_due(request, self.ttft_s, self.per_token_s), request.request_id
