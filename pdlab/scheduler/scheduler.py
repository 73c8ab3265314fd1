"""The planner: which requests run, with how many tokens, in which memory.

    waiting --admit--> prefilling --prompt done--> decoding --remove--> (gone)
       ^                    |                         |
       +------ preempt -----+-------------------------+      memory given back, everything computed again

A step is composed by the batching, in the policy's order, within what the allocator grants. Up to two steps may be in
flight: planning never needs a token that the device has not delivered yet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from pdlab.allocators.compaction import Compactor
from pdlab.allocators.interface import Allocator
from pdlab.core.config import EngineConfig
from pdlab.core.plan import Plan
from pdlab.core.request import Request, Status
from pdlab.costs.interface import Estimator
from pdlab.scheduler.batching import Batching
from pdlab.scheduler.draft import Draft
from pdlab.scheduler.interface import Policy
from pdlab.scheduler.rows import Rows


class Scheduler:
    """Owns the queues and the rows; asks policy, batching, allocator and estimator.

    `max_len`: tokens of prompt + output that one request may have; every one of them fits the memory alone, so whoever is
    admitted can always be finished by preempting the others.
    """

    def __init__(
        self, config: EngineConfig, allocator: Allocator, policy: Policy, batching: Batching, estimator: Estimator, max_len: int
    ) -> None:
        self.config, self.max_len = config, max_len
        self.allocator, self.policy, self.batching, self.estimator = allocator, policy, batching, estimator
        self.compactor = Compactor(config, allocator)
        self.policy_preempts = type(policy).preempts is not Policy.preempts
        self.policy_limits = type(policy).chunk is not Policy.chunk
        # a request runs only if its decode always has a place in the budget
        pages = -(-max_len // allocator.page_size) + 1 if allocator.kind == "paged" else 0
        self.rows = Rows(min(config.max_batch_requests, config.max_batch_tokens), pages)
        self.waiting: dict[int, Request] = {}
        self.running: dict[int, Request] = {}
        self.prefilling: dict[int, Request] = {}
        self.preempted_last = 0  # requests that the last plan preempted
        self._decoding: tuple[np.ndarray, list[Request]] | None = None  # None: to be gathered again
        self._fresh: set[int] = set()  # admitted and not yet in a plan: the executor has not seen their tokens
        self._submitted: deque[tuple[list[Request], int]] = deque()  # of each step in flight: requests, `_departures` then
        self._departures = 0  # how often a request gave its row back
        self._moved = 0  # slots that compaction had moved when `rows` last took down where memory is
        self.unreserved = 0  # slots that admitted prompts have still to be given, a part with each chunk
        self._promised = 0  # slots to come back from steps in flight that somebody already waits for
        self._step = -1

    # --- from outside

    def add(self, request: Request) -> None:
        self.waiting[request.request_id] = request

    def remove(self, request: Request) -> None:
        """The request ended, wherever it was; its memory is reusable once the steps in flight have ended."""
        if request.status is Status.RUNNING:
            self._leave(request)
        else:
            self.waiting.pop(request.request_id, None)
        request.status = Status.FINISHED
        self.compactor.ended()

    def plan(self, now: float) -> Plan | None:
        """The next step, or None when nothing can run now. At most one step may be in flight."""
        draft = Draft(self, now, self.config.max_batch_tokens)
        self._promised = 0
        self.compactor.before_plan()
        self.batching.compose(draft)
        self.preempted_last = draft.preempted
        if draft.empty:
            return None
        self._step += 1
        plan, requests = draft.freeze(self._step)
        self._fresh.difference_update(draft.chunks)
        self.allocator.submitted(self._step)
        self._submitted.append((requests, self._departures))
        return plan

    def commit(self, plan: Plan) -> list[Request]:
        """The oldest step in flight ended well: its KV is there. Returns its requests in the plan's order; those that
        ended or were preempted meanwhile are among them. Call it before the step's new tokens are appended."""
        requests, departures = self._submitted.popleft()
        self.allocator.retire(plan.step)
        decodes = plan.shape.decode_count
        written = plan.positions[:decodes].tolist()
        if not self.config.prefix_reuse and departures == self._departures:
            # the usual step: nobody left, and nobody will ask which tokens they were
            self.allocator.appended(plan.request_ids[:decodes].tolist(), [-1] * decodes, written)
        else:
            there = [(r, at) for r, at in zip(requests, written, strict=False) if r.status is Status.RUNNING]
            tokens = [r.output_token_ids[at - r.prompt_len] for r, at in there]
            self.allocator.appended([r.request_id for r, _ in there], tokens, [at for _, at in there])
        for request, (new, start) in zip(requests[decodes:], plan.shape.prefill, strict=True):
            if request.status is Status.RUNNING:
                request.num_computed = start + new
                tokens = request.tokens(start, start + new) if self.config.prefix_reuse else [-1] * new
                self.allocator.written(request.request_id, tokens, start)
        return requests

    def skip_steps(self, count: int) -> None:
        """The last plan stood for `count` more like it: the next one's number follows them."""
        self._step += count

    def restart(self, requests: Iterable[Request]) -> list[Request]:
        """A step failed, or was interrupted anywhere, and the executor forgot everything: each of `requests`, all that have
        not ended, waits and is computed again. Returns the requests of the oldest step in flight, the one that failed."""
        failed = self._submitted.popleft()[0] if self._submitted else []
        self._submitted.clear()
        self.allocator.retire(self._step)
        for rid in self.allocator.live():
            self.allocator.free(rid)
        self.allocator.drop_prefixes()
        self.rows.clear(len(self.rows.request))
        for queue in (self.waiting, self.running, self.prefilling, self._fresh):
            queue.clear()
        self._decoding = None
        self.unreserved = 0
        for request in requests:
            request.preemptions += request.status is Status.RUNNING
            request.status, request.row = Status.WAITING, -1
            request.num_computed = request.num_scheduled = 0
            request.num_sampled = len(request.output_token_ids)
            self.waiting[request.request_id] = request
        return failed

    # --- what drafts ask

    def decoding(self) -> tuple[np.ndarray, list[Request]]:
        """(rows, requests) past their prompt, first admitted first; the very same array until one joins or leaves."""
        if self._decoding is None:
            decoding = [r for r in self.running.values() if r.request_id not in self.prefilling]
            self._decoding = np.array([r.row for r in decoding], np.int64), decoding
        return self._decoding

    def requests_in(self, rows: np.ndarray) -> list[Request]:
        """The requests of these rows, in their order; a list of the caller's own."""
        if self._decoding is not None and self._decoding[0] is rows:
            return self._decoding[1].copy()
        return [r for row in rows.tolist() if (r := self.rows.request[row]) is not None]

    def addresses(
        self, rows: np.ndarray, starts: np.ndarray, positions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(page_table i32[B, P], base i64[B], slots i64[T]) of the step's requests and their new tokens."""
        if self._moved != self.compactor.moved:
            self._moved = self.compactor.moved
            for request in self.running.values():
                self.rows.locate(request, self.allocator)
        table, base = self.rows.addresses(rows)
        owner = np.arange(len(rows)) if len(positions) == len(rows) else np.repeat(np.arange(len(rows)), np.diff(starts))
        if self.allocator.kind != "paged":
            return table, base, base[owner] + positions
        size = self.allocator.page_size
        page = positions // size
        slots = table.ravel().take(owner * table.shape[1] + page).astype(np.int64) * size + (positions - page * size)
        return table, base, slots

    def cached_prefix(self, request: Request) -> int:
        if not self.config.prefix_reuse:
            return 0
        return self.allocator.match_prefix(request.tokens(0, request.num_tokens))

    def needs_seen(self, request: Request) -> bool:
        """Whether the executor must be told which tokens the request has, for its penalty."""
        return request.request_id in self._fresh and request.params.repetition_penalty != 1.0

    def prompt_done(self, request: Request) -> None:
        del self.prefilling[request.request_id]
        self._decoding = None

    # --- memory

    def admit(self, request: Request, now: float) -> bool:
        """A row, and the word that there is memory for every token the request has; False, with nothing changed, where
        there is none.

        What prompts in progress have still to reserve counts as taken. One page is left for each request that runs, so that
        an admission is not paid for by a preemption in the very next page."""
        rid, n = request.request_id, request.num_tokens
        spare = self.allocator.stats().free - self.unreserved - len(self.running) * self.allocator.granule
        if not self.rows or spare <= 0:
            return False
        cached = self.cached_prefix(request)
        if spare < n - cached:
            return False
        if cached:
            cached = self.allocator.adopt_prefix(rid, request.tokens(0, n))
        limit = self.output_limit(request)
        longest = request.prompt_len + limit
        while not self.allocator.admit(rid, n, longest, self.unreserved):
            if self.compactor.refused(n):
                continue
            if cached:
                self.allocator.free(rid)
            return False
        del self.waiting[rid]
        request.num_computed = request.num_scheduled = cached
        request.cached_prompt_tokens = min(cached, request.prompt_len)
        if request.first_scheduled_s is None:
            request.first_scheduled_s = now
        self.rows.take(request, limit)
        self.rows.locate(request, self.allocator)
        self.running[rid] = self.prefilling[rid] = request
        self.unreserved += self._lacks(request)
        self._fresh.add(rid)
        return True

    def output_limit(self, request: Request) -> int:
        """Output tokens after which the request ends whatever it says."""
        return min(request.params.max_tokens, self.max_len - request.prompt_len)

    def grow_all(self, rows: np.ndarray) -> int:
        """Room for one more token each, in order, while memory lasts; how many got it."""
        if not len(rows):
            return 0
        ids, lens = self.rows.id[rows].tolist(), self.rows.scheduled[rows] + 1
        if granted := self.allocator.reserve_many(ids, lens.tolist()):
            self.rows.locate_all(rows[:granted], ids[:granted], lens[:granted], self.allocator)
        return granted

    def grow(self, request: Request, draft: Draft) -> bool:
        """Room for one more token, by preempting others if need be. False: not in this step; it then either waits for
        memory that the steps in flight still read, or was preempted itself."""
        rid, n = request.request_id, int(self.rows.scheduled[request.row]) + 1
        while not self.allocator.reserve(rid, n):
            if self.compactor.refused(n):
                continue
            if self.room_is_coming(self.allocator.granule):
                return False
            draft.preempt(next(draft.victims(), request))
            if request.status is not Status.RUNNING:
                return False
        self.rows.locate(request, self.allocator)
        return True

    def grow_prompt(self, request: Request, end: int, draft: Draft) -> int:
        """Room for the next tokens of its prompt, up to `end`, or up to what there is where decodes took what it was to have;
        then nobody is admitted in this step. Returns up to where; num_scheduled when it has to wait, or was preempted."""
        rid, start, room, lacked = request.request_id, request.num_scheduled, self.rows.room[request.row], self._lacks(request)
        if end <= room:
            return end
        upto = end
        while not self.allocator.reserve(rid, upto):
            draft.closed = True
            if start < (left := int(room) + self.allocator.stats().free) < upto:
                upto = left
                continue
            if self.room_is_coming(self.allocator.granule):
                return start
            victim = next(draft.victims(), request)
            if victim is request and len(self.running) > len(self.prefilling):
                return start  # it would be the first to go, so it waits for a decode to end instead
            draft.preempt(victim)
            if request.status is not Status.RUNNING:
                return start
            upto = end
        self.rows.locate(request, self.allocator)
        self.unreserved += self._lacks(request) - lacked
        return upto

    def _lacks(self, request: Request) -> int:
        """Slots that the tokens which it has still need."""
        granule = self.allocator.granule
        return max(0, -(-request.num_tokens // granule) * granule - int(self.rows.room[request.row]))

    def room_is_coming(self, slots: int) -> bool:
        """Whether the steps in flight will give back `slots` slots that nobody waits for; whoever asks now waits for them."""
        if self.allocator.stats().retired - self._promised < slots:
            return False
        self._promised += slots
        return True

    def preempt(self, request: Request) -> None:
        """Back to waiting; its tokens stay, their KV is computed again (or found again as a prefix)."""
        self._leave(request)
        request.status = Status.WAITING
        request.num_computed = request.num_scheduled = 0
        request.preemptions += 1
        self.waiting[request.request_id] = request

    def _leave(self, request: Request) -> None:
        rid = request.request_id
        if self.prefilling.pop(rid, None) is not None:
            self.unreserved -= self._lacks(request)
        self.allocator.free(rid)
        self.rows.release(request)
        self._departures += 1
        del self.running[rid]
        self._fresh.discard(rid)
        self._decoding = None
