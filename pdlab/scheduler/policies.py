"""Who runs next: the policies, and what each promises about waiting.

A policy sees the requests that wait (or whose prompt is still being computed) and those that run, and answers in which
order to serve the first and to give up the second. It holds no queue; what it remembers of a request is a number.

    fcfs             arrival
    sjf              estimated seconds alone                            starves long requests under load
    sjf_aging        arrival + min(factor x seconds alone, patience)    every wait is bounded, see AgedShortestFirst
    least_remaining  estimated seconds left, now; preempts              starves long requests under load
    oracle           sjf_aging with the true output length: what better guesses of it would do
    priority         classes share the device by weight; preempts      no class starves
    deadline         most first tokens in time, see deadlines.py        every wait is bounded by patience
    article          shortest first within a time budget, as the article has it (article_policy.py)
"""

from __future__ import annotations

import heapq
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import overload

from pdlab.core.config import EngineConfig
from pdlab.core.errors import ConfigError
from pdlab.core.request import Request, Status
from pdlab.costs.interface import Estimator
from pdlab.scheduler.interface import Policy

MOST_PREEMPTIONS = 2  # a request that was preempted this often for others' sake is left to finish


class Lazily(Sequence[Request]):
    """A list that is made when it is first read: most steps never ask whom to give up."""

    def __init__(self, make: Callable[[], list[Request]]) -> None:
        self._make = make
        self._made: list[Request] | None = None

    def _list(self) -> list[Request]:
        if self._made is None:
            self._made = self._make()
        return self._made

    def __len__(self) -> int:
        return len(self._list())

    def __iter__(self) -> Iterator[Request]:
        return iter(self._list())

    @overload
    def __getitem__(self, index: int) -> Request: ...
    @overload
    def __getitem__(self, index: slice) -> list[Request]: ...
    def __getitem__(self, index: int | slice) -> Request | list[Request]:
        return self._list()[index]


class Remembered:
    """A number per request, asked for once and forgotten when the request has gone."""

    def __init__(self) -> None:
        self._known: dict[int, float] = {}

    def get(self, request: Request, ask: Callable[[Request], float]) -> float:
        value = self._known.get(request.request_id)
        if value is None:
            value = self._known[request.request_id] = ask(request)
        return value

    def forget_all_but(self, *groups: Sequence[Request]) -> None:
        """Drops what belongs to none of the groups, once there is more of it than is worth keeping."""
        if len(self._known) > 1024 + 2 * sum(map(len, groups)):
            there = {r.request_id for group in groups for r in group}
            self._known = {rid: value for rid, value in self._known.items() if rid in there}


class KeyedPolicy(Policy):
    """Serves by rising key and gives up by falling key; ties go by arrival, then number, so no two keys are equal."""

    @abstractmethod
    def key(self, request: Request, now: float, estimator: Estimator) -> float: ...

    def order(
        self, waiting: Sequence[Request], running: Sequence[Request], now: float, estimator: Estimator
    ) -> tuple[Sequence[Request], Sequence[Request]]:
        def full(r: Request) -> tuple[float, float, int]:
            return self.key(r, now, estimator), r.arrival_s, r.request_id

        return sorted(waiting, key=full), Lazily(lambda: sorted(running, key=full, reverse=True))


class FirstComeFirstServed(KeyedPolicy):
    """Serves in order of arrival; the last to arrive is the first to give up its memory.

    Promise: nobody who arrived later is served earlier, so a wait is bounded by the work of those already there.
    """

    name = "fcfs"

    def key(self, request: Request, now: float, estimator: Estimator) -> float:
        return request.arrival_s


class ShortestFirst(KeyedPolicy):
    """The article's idea, mended: least estimated seconds alone first; ties by arrival; nobody is too long to run.

    Promise: a good mean. Not a good worst case: under load a long request waits as long as shorter ones keep arriving.
    """

    name = "sjf"

    def __init__(self) -> None:
        self._seconds = Remembered()

    def key(self, request: Request, now: float, estimator: Estimator) -> float:
        return self._seconds.get(request, estimator.remaining)

    def order(
        self, waiting: Sequence[Request], running: Sequence[Request], now: float, estimator: Estimator
    ) -> tuple[Sequence[Request], Sequence[Request]]:
        self._seconds.forget_all_but(waiting, running)
        return super().order(waiting, running, now, estimator)


class AgedShortestFirst(ShortestFirst):
    """Shortest first, but who has waited long enough is overtaken by nobody who arrives later.

        key(r) = arrival(r) + headstart(r)      headstart(r) = min(factor · seconds_alone(r), patience)

    seconds_alone is estimated once, when r is first seen. Every headstart is >= 0, so whoever arrives after key(r) has a
    larger key than r: from key(r) on, nobody new gets before r. Promise:

        wait(r) <= headstart(r) + work(r)

    work(r) = seconds alone of what is left, at key(r), of those that then run and those that then wait with a smaller key;
    for a step that serves several takes no longer than serving them one after another. In steps: each step from key(r) on
    computes at least one token of that set until r is served. What a lack of memory makes compute again adds to it.
    `patience` bounds headstart whatever the estimates say, so a wrong estimator costs order, never the bound.
    """

    name = "sjf_aging"

    def __init__(self, factor: float, patience_s: float) -> None:
        super().__init__()
        self.factor, self.patience_s = factor, patience_s

    def seconds_alone(self, request: Request, estimator: Estimator) -> float:
        return estimator.remaining(request)

    def key(self, request: Request, now: float, estimator: Estimator) -> float:
        return self._seconds.get(
            request,
            lambda r: r.arrival_s + min(max(0.0, self.factor * self.seconds_alone(r, estimator)), self.patience_s),
        )


class OracleLengths(AgedShortestFirst):
    """AgedShortestFirst that knows the output length (max_tokens, which replayed and made-up requests always reach)."""

    name = "oracle"

    def seconds_alone(self, request: Request, estimator: Estimator) -> float:
        return estimator.remaining_if(request, max(1, request.params.max_tokens - len(request.output_token_ids)))


class LeastRemaining(KeyedPolicy):
    """Least estimated seconds left first; takes the place of one that has much more left.

    Estimates are asked anew after every 16 tokens. A victim computes its tokens again, so it is preempted only for one
    whose whole time and that repeat together are under half of what the victim has left, and at most MOST_PREEMPTIONS
    times. Promise: the best mean of all that know no more; like sjf, no bound on the longest wait.
    """

    name = "least_remaining"

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, float]] = {}  # number -> (tokens when asked, seconds)

    def key(self, request: Request, now: float, estimator: Estimator) -> float:
        done = request.num_computed + len(request.output_token_ids)
        known = self._known.get(request.request_id)
        if known is None or not known[0] <= done < known[0] + 16:
            known = self._known[request.request_id] = done, estimator.remaining(request)
        return known[1]

    def order(
        self, waiting: Sequence[Request], running: Sequence[Request], now: float, estimator: Estimator
    ) -> tuple[Sequence[Request], Sequence[Request]]:
        if len(self._known) > 1024 + 2 * (len(waiting) + len(running)):
            there = {r.request_id for r in waiting} | {r.request_id for r in running}
            self._known = {number: known for number, known in self._known.items() if number in there}
        return super().order(waiting, running, now, estimator)

    def preempts(self, candidate: Request, victim: Request, now: float, estimator: Estimator) -> bool:
        own, left = self.key(candidate, now, estimator), self.key(victim, now, estimator)
        if own >= 0.5 * left or victim.preemptions >= MOST_PREEMPTIONS:
            return False
        again = victim.num_computed if victim.num_computed < victim.prompt_len else victim.num_tokens
        return own + estimator.prefill_seconds(again) < 0.5 * left


class WeightedPriority(Policy):
    """Classes by `Request.priority` share the device as ratio^priority; within a class, first come first served.

    Each class counts the estimated seconds it was given; the class that has had least for its weight is next (start-time
    fair queueing: one that was away resumes at the least count of those present, without credit for its absence). It
    takes the place of a lower class that has had more for its weight, at most MOST_PREEMPTIONS times the same request.

    Promise: while it waits, a class of weight w gets at least w / (sum of weights waiting) of what is admitted, give or
    take one request, so no class starves.
    """

    name = "priority"

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio
        self._seconds = Remembered()
        self._given: dict[int, float] = {}  # class -> seconds given / weight
        self._unserved: list[Request] = []  # waited last time and had not been scheduled

    def weight(self, priority: int) -> float:
        return self.ratio ** max(-64, min(64, priority))

    def _share(self, request: Request, estimator: Estimator) -> float:
        return self._seconds.get(request, estimator.remaining) / self.weight(request.priority)

    def _count(self, waiting: Sequence[Request], running: Sequence[Request], estimator: Estimator) -> None:
        """Charges to each class what was admitted since last time, ended already or not."""
        for r in self._unserved:
            if r.first_scheduled_s is not None:
                self._given[r.priority] = self._given.get(r.priority, 0.0) + self._share(r, estimator)
        self._unserved = [r for r in waiting if r.first_scheduled_s is None]
        self._seconds.forget_all_but(waiting, running)
        present = {r.priority for r in waiting} | {r.priority for r in running}
        floor = min((self._given[p] for p in present if p in self._given), default=0.0)
        for p in present:
            self._given[p] = max(self._given.get(p, floor), floor)

    def order(
        self, waiting: Sequence[Request], running: Sequence[Request], now: float, estimator: Estimator
    ) -> tuple[Sequence[Request], Sequence[Request]]:
        self._count(waiting, running, estimator)
        queues: dict[int, list[Request]] = {}
        for r in sorted(waiting, key=lambda r: (r.status is not Status.RUNNING, r.arrival_s, r.request_id), reverse=True):
            queues.setdefault(r.priority, []).append(r)
        heap = [(self._given[p], -p) for p in queues]
        heapq.heapify(heap)
        out: list[Request] = []
        while heap:
            given, minus = heap[0]
            request = queues[-minus].pop()
            out.append(request)
            if request.first_scheduled_s is None:
                given += self._share(request, estimator)
            if queues[-minus]:
                heapq.heapreplace(heap, (given, minus))
            else:
                heapq.heappop(heap)
        return out, Lazily(lambda: sorted(running, key=lambda r: (r.priority, -r.arrival_s, -r.request_id)))

    def preempts(self, candidate: Request, victim: Request, now: float, estimator: Estimator) -> bool:
        if candidate.priority <= victim.priority or victim.preemptions >= MOST_PREEMPTIONS:
            return False
        return self._given.get(candidate.priority, 0.0) <= self._given.get(victim.priority, 0.0)


def make_policy(config: EngineConfig) -> Policy:
    """The policy that `config.policy` names, with the fields of `config` that set it."""
    from pdlab.scheduler.article_policy import Article
    from pdlab.scheduler.deadlines import EarliestDeadline

    makers: dict[str, Callable[[], Policy]] = {
        "fcfs": FirstComeFirstServed,
        "sjf": ShortestFirst,
        "sjf_aging": lambda: AgedShortestFirst(config.aging_factor, config.patience_s),
        "oracle": lambda: OracleLengths(config.aging_factor, config.patience_s),
        "least_remaining": LeastRemaining,
        "priority": lambda: WeightedPriority(config.priority_ratio),
        "deadline": lambda: EarliestDeadline(
            config.ttft_objective_s, config.per_token_objective_s, config.patience_s, config.max_batch_tokens
        ),
        "article": lambda: Article(config.article_budget_s),
        "article_no_ties": lambda: Article(config.article_budget_s, break_ties=True),
    }
    if config.policy not in makers:
        raise ConfigError(f"policy={config.policy!r} is not built", f"choose one of: {', '.join(makers)}")
    return makers[config.policy]()
