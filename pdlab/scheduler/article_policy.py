"""The article's scheduler, as described, flaws included: the baseline that `sjf` mends.

A heap of (estimated time, request); a batch is popped while its times fit a time budget. What is wrong with it, each shown
by a test: two equal times make the heap compare the requests themselves, which is a TypeError; shorter requests that keep
arriving starve a long one; one whose time is over the whole budget is never popped, and hides what is behind it; a batch's
time is not the sum of its requests' times.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

from pdlab.core.errors import PolicyError
from pdlab.core.request import Request, Status
from pdlab.costs.interface import Estimator
from pdlab.scheduler.interface import Policy
from pdlab.scheduler.policies import Lazily, Remembered


class Article(Policy):
    """Shortest estimated time first, filling `budget_s` seconds at every call.

    `break_ties` puts the request's number between time and request, the least change that lets it be measured at all; the
    other flaws stay. Promise: none.
    """

    name = "article"

    def __init__(self, budget_s: float, break_ties: bool = False) -> None:
        self.budget_s, self.break_ties = budget_s, break_ties
        self._seconds = Remembered()

    def order(
        self, waiting: Sequence[Request], running: Sequence[Request], now: float, estimator: Estimator
    ) -> tuple[Sequence[Request], Sequence[Request]]:
        self._seconds.forget_all_but(waiting, running)
        begun = [r for r in waiting if r.status is Status.RUNNING]
        heap: list[Any] = []
        try:
            for r in waiting:
                if r.status is not Status.RUNNING:
                    seconds = self._seconds.get(r, estimator.remaining)
                    heapq.heappush(heap, (seconds, r.request_id, r) if self.break_ties else (seconds, r))
            batch = self._next_batch(heap)
        except TypeError as e:
            raise PolicyError(
                f"the article's scheduler compared two requests of equal estimated time ({e})",
                'policy="sjf" breaks ties by arrival; policy="article_no_ties" changes nothing else',
            ) from e
        return begun + batch, Lazily(lambda: sorted(running, key=lambda r: (r.arrival_s, r.request_id), reverse=True))

    def _next_batch(self, heap: list[Any]) -> list[Request]:
        batch: list[Request] = []
        left = self.budget_s
        while heap and left > 0:
            entry = heapq.heappop(heap)
            if entry[0] > left:
                break
            batch.append(entry[-1])
            left -= entry[0]
        return batch
