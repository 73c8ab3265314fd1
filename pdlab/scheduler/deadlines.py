"""Objectives as deadlines: when the first token and each later one are due, and the policy that serves by them.

    due(first token) = arrival + ttft objective        due(token n) = due(first) + n · per-token objective

A request meets its objectives if its first token is not late and its tokens come, in the mean, at least as fast as
promised. Goodput counts the requests that do.
"""

from __future__ import annotations

import math

from pdlab.core.request import Request
from pdlab.costs.interface import Estimator
from pdlab.scheduler.policies import KeyedPolicy


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


class EarliestDeadline(KeyedPolicy):
    """Earliest deadline first among those that can still meet it; the others queue as if due `patience` after arrival.

    Under overload plain earliest-deadline serves only requests that are already late; here a late one makes room for one
    that can still be in time, but after `patience` nobody who arrives later passes it (the argument is that of
    AgedShortestFirst with headstart <= max(objective, patience)). Gives up first whose stream is furthest ahead.
    """

    name = "deadline"

    def __init__(self, ttft_s: float, per_token_s: float, patience_s: float) -> None:
        self.ttft_s, self.per_token_s, self.patience_s = ttft_s, per_token_s, patience_s

    def key(self, request: Request, now: float, estimator: Estimator) -> float:
        due = next_token_due(request, self.ttft_s, self.per_token_s)
        if due < now:
            hopeless = True
        else:
            hopeless = not request.output_token_ids and now + estimator.remaining_if(request, 0) > due
        return max(due, request.arrival_s + self.patience_s) if hopeless else due
