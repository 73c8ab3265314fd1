"""The allocators alone: a long soak of random operations, and what one token costs the host.

lost, leaked    requests whose memory changed under them, slots that nobody owns at the end; both must be 0
operation       us a random operation (reserve, append, fork, free, preempt, compact, a step)
token           us a token of a request's life: admitted, appended to, its addresses asked for, freed; with `batch`
                requests decoding at once, and the page tables of all of them copied into every plan
output_token    the same microseconds over the tokens of the answers alone
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from pdlab.allocators import make_allocator
from pdlab.allocators.interface import Allocator
from pdlab.core.config import ALLOCATORS, EngineConfig
from pdlab.core.plan import KVCopy
from pdlab.hardware.timing import summarize

if TYPE_CHECKING:
    from pdlab.bench.suites import Context

NAME = "kv_operations"
HELP = "a million random operations on each allocator, none lost or leaked; microseconds a token on the host"

CAPACITY, LONGEST = 4096, 400


class Soak:
    """Random operations on one allocator beside a memory of marks: every slot of a live request holds that request's mark."""

    def __init__(self, allocator: Allocator, seed: int) -> None:
        self.allocator, self.rng = allocator, np.random.default_rng(seed)
        self.marks = np.full(allocator.capacity, -1, np.int64)
        self.live: dict[int, int] = {}  # request -> tokens written
        self.longest: dict[int, int] = {}
        self.mark_of: dict[int, np.ndarray] = {}
        self.next = self.step = 0
        self.lost = 0

    def run(self, operations: int, budget_s: float, check_every: int = 5000) -> tuple[int, float]:
        """(operations done, processor seconds they took), not counting the checks."""
        done, seconds, started = 0, 0.0, time.perf_counter()
        while done < operations and time.perf_counter() - started < budget_s:
            kinds = self.rng.choice(6, check_every, p=(0.16, 0.61, 0.02, 0.12, 0.02, 0.07)).tolist()
            sizes = self.rng.integers(1, 120, check_every).tolist()
            at = time.process_time()
            for kind, size in zip(kinds, sizes, strict=True):
                self.one(kind, size)
            seconds += time.process_time() - at
            done += check_every
            self.check()
        return done, seconds

    def one(self, kind: int, size: int) -> None:
        a = self.allocator
        rids = list(self.live)
        some = rids[size % len(rids)] if rids else None
        if kind == 5:
            a.submitted(self.step)
            a.retire(self.step - 1)
            self.step += 1
        elif kind == 4:
            self._copy(a.compact(64))
        elif kind == 0 or some is None:
            if a.reserve(self.next, size, min(LONGEST, 2 * size)):
                self.live[self.next], self.mark_of[self.next] = 0, np.zeros(0, np.int64)
                self.longest[self.next] = min(LONGEST, 2 * size)
                self._write(self.next, size)
            self.next += 1
        elif kind == 1:
            n = min(self.live[some] + 1 + size % 3, self.longest[some])
            if n > self.live[some] and a.reserve(some, n):
                self._write(some, n)
        elif kind == 2 and a.fork(some, self.next):
            self.live[self.next] = self.live[some]
            self.mark_of[self.next], self.longest[self.next] = self.mark_of[some], self.longest[some]
            self.next += 1
        elif kind == 3:
            a.free(some)
            del self.live[some], self.mark_of[some]

    def _write(self, rid: int, n: int) -> None:
        """The request's next tokens up to n, each marked by a number that nothing else has."""
        self._copy([op for op in self.allocator.take_ops() if isinstance(op, KVCopy)])
        lo = self.live[rid]
        fresh = (rid << 16) + np.arange(lo, n)
        self.marks[self.allocator.slots(rid, lo, n)] = fresh
        self.mark_of[rid] = np.concatenate([self.mark_of[rid], fresh])
        self.live[rid] = n
        self.allocator.written(rid, range(lo, n), lo)

    def _copy(self, copies: list[KVCopy]) -> None:
        for op in copies:
            self.marks[op.dst : op.dst + op.tokens] = self.marks[op.src : op.src + op.tokens]

    def check(self) -> None:
        """Raises AllocatorError on a broken invariant; counts requests that no longer read what they wrote."""
        self.allocator.check()
        self._copy([op for op in self.allocator.take_ops() if isinstance(op, KVCopy)])
        for rid, n in self.live.items():
            self.lost += not np.array_equal(self.marks[self.allocator.slots(rid, 0, n)], self.mark_of[rid])

    def end(self) -> int:
        """Frees everything; slots that are then not free."""
        for rid in self.live:
            self.allocator.free(rid)
        self.allocator.retire(self.step)
        return self.allocator.capacity - self.allocator.stats().free


def token_us(allocator: Allocator, batch: int, prompt: int, answer: int) -> float:
    """Processor microseconds a token (prompt and answer) of `batch` requests that live at the same time."""
    rids, tokens = list(range(batch)), list(range(prompt))
    sampled = [7] * batch
    started = time.process_time()
    for rid in rids:
        allocator.adopt_prefix(rid, tokens)
        assert allocator.reserve(rid, prompt, prompt + answer), "the memory is too small for this batch"
        allocator.slots(rid, 0, prompt)
        allocator.written(rid, tokens)
    before = [prompt] * batch
    for step in range(answer):
        after = [n + 1 for n in before]
        allocator.reserve_many(rids, after)
        allocator.slots_many(rids, before, after)
        allocator.page_tables(rids)
        allocator.submitted(step)
        allocator.take_ops()
        allocator.stats()
        allocator.retire(step)
        allocator.appended(rids, sampled, before)
        before = after
    for rid in rids:
        allocator.free(rid)
    return (time.process_time() - started) / (batch * (prompt + answer)) * 1e6


def run(ctx: Context) -> None:
    operations = 1_000_000 if ctx.full else 50_000
    batch, prompt, answer = (400, 512, 128) if ctx.full else (100, 128, 32)
    for kind in ALLOCATORS:
        base = EngineConfig(kv_allocator=kind, page_size=16)
        soak = Soak(make_allocator(base, CAPACITY, max_len=LONGEST), ctx.seed)
        done, seconds = soak.run(operations, max(1.0, ctx.left() / 4))
        params: dict[str, Any] = {"operations": done}
        shared: dict[str, Any] = {"variant": kind, "params": params, "settings": {"kv_tokens": CAPACITY}}
        ctx.record.add("lost", soak.lost, "count", **shared)
        ctx.record.add("leaked", soak.end(), "count", **shared)
        ctx.record.add("operation", seconds / done * 1e6, "us", n=done, **shared)
        for reuse in (False, True) if kind in ("paged", "hybrid") else (False,):
            config = base.with_(prefix_reuse=reuse, hybrid_threshold=4096)
            times = [
                token_us(make_allocator(config, 2 * batch * (prompt + answer), max_len=2048), batch, prompt, answer)
                for _ in range(3)
            ]
            params = {"batch": batch, "prompt": prompt, "answer": answer, "prefix_reuse": reuse}
            ctx.record.add("token", summarize(times, "us"), variant=kind, params=params)
            per_output = [t * (prompt + answer) / answer for t in times]
            ctx.record.add("output_token", summarize(per_output, "us"), variant=kind, params=params)
            ctx.say(f"  {kind:<16} {done:,} operations, {soak.lost} lost; {sorted(times)[1]:.2f} us a token, reuse={reuse}")
