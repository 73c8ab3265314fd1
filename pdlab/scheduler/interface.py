"""Who runs next (Policy). How many tokens each gets is batching's concern, see scheduler.batching."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from pdlab.core.request import Request
from pdlab.costs.interface import Estimator


class Policy(ABC):
    """Contract 6, first half. A policy holds no queue: it orders what it is shown, so it can be swapped and tested alone."""

    name: str

    @abstractmethod
    def order(
        self, waiting: Sequence[Request], running: Sequence[Request], now: float, estimator: Estimator
    ) -> tuple[Sequence[Request], Sequence[Request]]:
        """(order, victims).

        `waiting` also holds the running requests whose prompt is not yet computed (status RUNNING): what the decodes
        leave of a step's token budget is handed out in `order`, so a short prompt may pass a long one between chunks.
        `order`: those requests, most urgent first; one left out gets no prompt tokens in this step.
        `victims`: the running requests in the order in which they would be preempted when memory runs out, first to go
        first. A policy that preempts for urgency names in `order` whom to admit and lists first in `victims` whom it
        would give up for it (see `preempts`).
        """

    def chunk(self, request: Request, left: int, used: int) -> int:
        """How many prompt tokens `request` may have in this step, of `left` that the budget still holds; `used` went to
        prompts before it. A policy that gives less keeps the step short for those who may arrive during it."""
        return left

    def preempts(self, candidate: Request, victim: Request, now: float, estimator: Estimator) -> bool:
        """Whether `victim` should give up its place to the waiting `candidate` even though it could go on."""
        return False
