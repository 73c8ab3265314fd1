"""One step while it is being composed: the verbs a batching spends the budget with, and the Plan they add up to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pdlab.core.plan import IN_FLIGHT, Plan, PlanShape
from pdlab.core.request import Request, Status

if TYPE_CHECKING:
    from pdlab.scheduler.scheduler import Scheduler

_NO_ROWS = np.zeros(0, np.int64)


class Draft:
    """`left` counts down from `budget`. What was put in may be taken out again: its request may be preempted for another."""

    def __init__(self, scheduler: Scheduler, now: float, budget: int) -> None:
        self.scheduler, self.now, self.budget, self.left = scheduler, now, budget, budget
        self.decode_rows = _NO_ROWS
        self.chunks: dict[int, tuple[Request, int, int]] = {}  # request id -> (request, first position, past the last)
        self.pad_tokens = 0
        self.preempted = 0
        self.closed = False  # somebody was refused admission: nobody behind may be admitted in this step
        self._order: tuple[Sequence[Request], Sequence[Request]] | None = None

    # --- verbs

    @property
    def decodes(self) -> int:
        return len(self.decode_rows)

    @property
    def empty(self) -> bool:
        return not self.chunks and not len(self.decode_rows)

    @property
    def running(self) -> int:
        return len(self.scheduler.running)

    def decode_all(self) -> None:
        """One token for every request past its prompt, save those whose last token is already on its way and those that
        wait for memory which steps in flight still read."""
        s, rows = self.scheduler, self.scheduler.rows
        decoding, _ = s.decoding()
        unfinished = rows.sampled[decoding] < rows.limit[decoding]
        active = decoding if unfinished.all() else decoding[unfinished]
        short = active[rows.scheduled[active] >= rows.room[active]]
        without = s.requests_in(short[s.grow_all(short) :])
        refused = {r.row for r in without if r.status is Status.RUNNING and not s.grow(r, self)}
        if refused or self.preempted:
            active = np.array([row for row in active.tolist() if rows.request[row] and row not in refused], np.int64)
        self.decode_rows = active
        self.left -= len(active)

    def candidates(self) -> Iterator[Request]:
        """Whose prompt may be computed next, in the policy's order: requests whose prompt is in progress, and waiting
        ones unless this step had to preempt, since there is no room to give then."""
        s = self.scheduler
        admissible = bool(s.waiting) and bool(s.rows or s.policy_preempts) and not self.preempted
        begun = dict(s.prefilling)
        asks = admissible or len(begun) > 1 or (begun and s.policy_limits)
        ordered = self.order()[0] if asks else begun.values()
        for request in ordered:
            if request.status is Status.RUNNING if request.request_id in begun else admissible:
                yield request

    def to_compute(self, request: Request) -> int:
        """Tokens of `request` still to compute: all it has, less what is computed or would be found as a prefix."""
        running = request.status is Status.RUNNING
        return request.num_tokens - (request.num_scheduled if running else self.scheduler.cached_prefix(request))

    def admit(self, request: Request) -> bool:
        """Gives a waiting request a row, and memory for all its tokens or the word that there is. False when there is no
        room, even after what the policy would give up for it; then nobody else is admitted either, so that the request
        that is next is not overtaken for ever."""
        s = self.scheduler
        if request.status is Status.RUNNING:
            return True
        while not self.closed and not s.admit(request, self.now):
            coming = bool(s.rows) and s.room_is_coming(request.num_tokens)
            victim = next((v for v in self.victims() if s.policy.preempts(request, v, self.now, s.estimator)), None)
            if coming or victim is None:
                self.closed = True
            else:
                self.preempt(victim)
        return not self.closed

    def chunk(self, request: Request) -> int:
        """Tokens of its prompt that the policy grants `request` of what is left."""
        return self.scheduler.policy.chunk(request, self.left, self.budget - self.decodes - self.left)

    def prefill(self, request: Request, tokens: int) -> None:
        """The next `tokens` tokens of what `request` has not computed (fewer if it has fewer, or memory is short; none if
        tokens <= 0)."""
        lo = request.num_scheduled
        hi = min(lo + tokens, request.num_tokens)
        if hi > lo and (hi := self.scheduler.grow_prompt(request, hi, self)) > lo:
            self.chunks[request.request_id] = request, lo, hi
            self.left -= hi - lo

    def pad(self, tokens: int) -> None:
        """Rows of zeros that the step computes and throws away."""
        self.pad_tokens += tokens
        self.left -= tokens

    # --- making room

    def order(self) -> tuple[Sequence[Request], Sequence[Request]]:
        """The policy's answer, asked for at most once a step."""
        if self._order is None:
            s = self.scheduler
            prompts, running = [*s.prefilling.values(), *s.waiting.values()], list(s.running.values())
            self._order = s.policy.order(prompts, running, self.now, s.estimator)
        return self._order

    def victims(self) -> Iterator[Request]:
        """Running requests, first to give up first."""
        return (v for v in self.order()[1] if v.status is Status.RUNNING)

    def preempt(self, request: Request) -> None:
        row = request.row
        self.scheduler.preempt(request)
        self.preempted += 1
        if (chunk := self.chunks.pop(request.request_id, None)) is not None:
            self.left += chunk[2] - chunk[1]
        kept = self.decode_rows[self.decode_rows != row]
        self.left += len(self.decode_rows) - len(kept)
        self.decode_rows = kept

    # --- the plan

    def freeze(self, step: int) -> tuple[Plan, list[Request]]:
        """The plan and its requests, which from here on count as scheduled."""
        s, rows = self.scheduler, self.scheduler.rows
        chunks = list(self.chunks.values())
        requests = s.requests_in(self.decode_rows)
        decode_lens = rows.scheduled[self.decode_rows] + 1
        shape = PlanShape(
            prefill=tuple((hi - lo, lo) for _, lo, hi in chunks),
            decode_count=len(requests),
            decode_kv_tokens=int(decode_lens.sum()),
            pad_tokens=self.pad_tokens,
            sampled=len(requests) + sum(hi == r.num_tokens for r, _, hi in chunks),
            decode_longest=int(decode_lens.max(initial=0)),
        )
        starts, lens, token_ids, positions = self._tokens(chunks, decode_lens)
        sample_rows, sampled = self._sampling_rows(chunks)
        sampling = rows.sampling(sampled)
        all_rows = self.decode_rows if not chunks else np.append(self.decode_rows, [r.row for r, _, _ in chunks])
        page_table, base, slots = s.addresses(all_rows, starts, positions)
        seen = tuple(
            (i, np.array(r.tokens(0, r.num_tokens), np.int64))
            for i, (r, _, _) in enumerate(chunks, start=len(requests))
            if s.needs_seen(r)
        )
        self._advance(chunks, sampled)
        requests += [r for r, _, _ in chunks]
        plan = Plan(
            step=step,
            request_ids=rows.id[all_rows],
            rows=all_rows.astype(np.int32),
            q_start=starts.astype(np.int32),
            context_lens=lens.astype(np.int32),
            token_ids=token_ids,
            positions=positions.astype(np.int32),
            slots=slots,
            kv_kind=s.allocator.kind,
            page_table=page_table,
            base=base,
            sample_rows=sample_rows,
            sampling=sampling,
            shape=shape,
            kv_ops=s.compactor.take_ops(),
            seen=seen,
            pad_tokens=self.pad_tokens,
            predicted_s=s.estimator.step_seconds(shape),
        )
        return plan, requests

    def _tokens(
        self, chunks: list[tuple[Request, int, int]], decode_lens: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(q_start, context_lens, token_ids, positions). A decode's token is the one its row sampled last, which the
        device holds; so decodes need nothing from the host."""
        d = len(decode_lens)
        if not chunks:
            return np.arange(d + 1), decode_lens, np.full(d, IN_FLIGHT, np.int64), decode_lens - 1
        starts = np.append(np.arange(d + 1), d + np.cumsum([hi - lo for _, lo, hi in chunks]))
        lens = np.append(decode_lens, [hi for _, _, hi in chunks])
        token_ids = np.full(starts[-1], IN_FLIGHT, np.int64)
        positions = np.empty(starts[-1], np.int64)
        positions[:d] = decode_lens - 1
        for i, (request, lo, hi) in enumerate(chunks, start=d):
            token_ids[starts[i] : starts[i + 1]] = request.tokens(lo, hi)
            positions[starts[i] : starts[i + 1]] = np.arange(lo, hi)
        return starts, lens, token_ids, positions

    def _sampling_rows(self, chunks: list[tuple[Request, int, int]]) -> tuple[np.ndarray, np.ndarray]:
        """(indices into the batch, persistent rows) of the requests that sample: decodes and prompts that are complete."""
        d = len(self.decode_rows)
        ends = [(d + i, r.row) for i, (r, _, hi) in enumerate(chunks) if hi == r.num_tokens]
        if not ends:
            return np.arange(d, dtype=np.int32), self.decode_rows
        index, row = zip(*ends, strict=True)
        return np.append(np.arange(d), index).astype(np.int32), np.append(self.decode_rows, row)

    def _advance(self, chunks: list[tuple[Request, int, int]], sampled: np.ndarray) -> None:
        rows = self.scheduler.rows
        rows.scheduled[self.decode_rows] += 1
        rows.sampled[sampled] += 1
        for request, _, hi in chunks:
            request.num_scheduled = rows.scheduled[request.row] = hi
            if hi == request.num_tokens:
                self.scheduler.prompt_done(request)
