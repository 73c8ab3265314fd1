"""A memory that an allocator under test drives, and a Hypothesis machine that plays engine.

`mem[slot]` is the token whose K and V lie there. A step is submitted as the engine would: room reserved, pending operations
applied in order, new tokens written. "Attention" is a check that every position of every scheduled request still reads its
own token. Nothing that a step in flight reads may change until it has retired.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdlab.allocators.interface import Allocator
from pdlab.core.plan import KVAllocate, KVCopy, KVFree, KVOp


class Memory:
    """Slots on a pretended device; pieces of their own only where the allocator makes them."""

    def __init__(self, capacity: int) -> None:
        self.mem = np.full(capacity, -1, np.int64)
        self.pieces: dict[int, tuple[int, int]] = {}  # base -> (request, tokens)
        self.reads: dict[int, set[int]] = {}  # step in flight -> slots it reads

    def run(self, ops: tuple[KVOp, ...]) -> None:
        for op in ops:
            if isinstance(op, KVAllocate):
                for base, (_, tokens) in self.pieces.items():
                    assert op.base + op.tokens <= base or base + tokens <= op.base, "two pieces overlap"
                self.pieces[op.base] = (op.request_id, op.tokens)
            elif isinstance(op, KVFree):
                assert self.pieces.pop(op.base)[0] == op.request_id
            else:
                self.copy(op)

    def copy(self, op: KVCopy) -> None:
        assert op.tokens > 0
        assert abs(op.src - op.dst) >= op.tokens, "a copy overlaps its own source"
        assert min(op.src, op.dst) >= 0
        assert max(op.src, op.dst) + op.tokens <= len(self.mem)
        self.may_change(set(range(op.dst, op.dst + op.tokens)))
        self.mem[op.dst : op.dst + op.tokens] = self.mem[op.src : op.src + op.tokens]

    def write(self, slots: np.ndarray, tokens: list[int]) -> None:
        self.may_change(set(slots.tolist()))
        self.mem[slots] = tokens

    def may_change(self, slots: set[int]) -> None:
        assert not any(read & slots for read in self.reads.values()), "a slot was reused while a step in flight may read it"


class Sequence:
    """A request as the model knows it: its tokens (prompt, then made up) and how many are computed."""

    def __init__(self, prompt: list[int], longest: int) -> None:
        self.tokens = list(prompt)
        self.longest = longest
        self.computed = 0


class EngineMachine(RuleBasedStateMachine):
    """Random engine behaviour against one allocator. Subclasses set `make`; tokens are 0 and 1 so that prefixes coincide."""

    make: Callable[[], Allocator]
    longest = 40

    def __init__(self) -> None:
        super().__init__()
        self.allocator = type(self).make()
        self.memory = Memory(self.allocator.capacity)
        self.running: dict[int, Sequence] = {}
        self.waiting: list[Sequence] = []
        self.carry: list[KVCopy] = []  # compaction's copies, which the next step runs first
        self.next_rid = 0
        self.step = self.retired = -1

    # --- what the world does

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=24), extra=st.integers(1, 16), twin=st.booleans())
    def arrive(self, prompt: list[int], extra: int, twin: bool) -> None:
        if twin and self.running:  # the start of somebody else's tokens, so that prefixes are found
            other = list(self.running.values())[len(prompt) % len(self.running)].tokens
            prompt = (other + prompt)[: self.longest - extra]
        self.waiting.append(Sequence(prompt, len(prompt) + extra))

    @precondition(lambda self: self.waiting)
    @rule(at_once=st.booleans(), spare=st.integers(0, 20))
    def admit(self, at_once: bool, spare: int) -> None:
        sequence = self.waiting[0]
        rid, self.next_rid = self.next_rid, self.next_rid + 1
        before = self.allocator.stats()
        found = self.allocator.match_prefix(sequence.tokens)
        assert found == self.allocator.adopt_prefix(rid, sequence.tokens) < max(1, len(sequence.tokens))
        sequence.computed = found
        n, longest = len(sequence.tokens), sequence.longest
        if not (self.allocator.reserve(rid, n, longest) if at_once else self.allocator.admit(rid, n, longest, spare)):
            if found:
                self.allocator.free(rid)
            assert rid not in self.allocator.live()
            after = self.allocator.stats()
            assert (after.reserved, after.held) == (before.reserved, before.held), "a refused request left something behind"
            return
        self.waiting.pop(0)
        self.running[rid] = sequence
        if not at_once and self.allocator.kind == "paged":
            size = self.allocator.page_size
            lacking = max(0, -(-n // size) * size - self.allocator.room(rid))
            assert lacking + spare <= self.allocator.stats().free, "admitted into room that is somebody else's"

    @precondition(lambda self: self.running and self.step - self.retired < 2)
    @rule(data=st.data())
    def run_step(self, data: st.DataObject) -> None:
        """Some requests compute up to a chunk of what they lack; one that lacks nothing gains a token first."""
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.running)), unique=True, min_size=1, max_size=4))
        work: list[tuple[int, int, int]] = []
        for rid in chosen:
            sequence = self.running[rid]
            if sequence.computed == len(sequence.tokens):
                if len(sequence.tokens) == sequence.longest:
                    continue
                sequence.tokens.append(data.draw(st.integers(0, 1)))
            hi = min(len(sequence.tokens), sequence.computed + data.draw(st.integers(1, 16)))
            if hi <= self.allocator.room(rid) or self.allocator.reserve(rid, hi):
                work.append((rid, sequence.computed, hi))
        rids, lo, hi_ = (list(column) for column in zip(*work, strict=True)) if work else ([], [], [])
        slots = self.allocator.slots_many(rids, lo, hi_)
        self.memory.run((*self.carry, *self.allocator.take_ops()))
        self.carry = []
        new = [self.running[rid].tokens[a:b] for rid, a, b in work]
        self.memory.write(slots, [token for tokens in new for token in tokens])
        assert len(set(slots.tolist())) == len(slots)
        self.step += 1
        self.memory.reads[self.step] = set()
        self.allocator.submitted(self.step)
        for rid, _, hi in work:
            self.attend(rid, hi)
        if all(b - a == 1 for _, a, b in work):
            self.allocator.appended(rids, [tokens[0] for tokens in new], lo)
        for (rid, a, _), tokens in zip(work, new, strict=True):
            self.allocator.written(rid, tokens, a)
            self.running[rid].computed = a + len(tokens)

    def attend(self, rid: int, length: int) -> None:
        slots, sequence = self.allocator.slots(rid, 0, length), self.running[rid]
        assert self.memory.mem[slots].tolist() == sequence.tokens[:length], f"request {rid} reads another's tokens"
        self.memory.reads[self.step] |= set(slots.tolist())
        if self.allocator.kind == "paged":
            table, t = self.allocator.page_tables([rid])[0].astype(np.int64), np.arange(length)
            size = self.allocator.page_size
            assert (table[t // size] * size + t % size == slots).all()
        else:
            assert (self.allocator.base(rid) + np.arange(length) == slots).all()
        for base, (owner, tokens) in self.memory.pieces.items():
            assert owner == rid or not ((slots >= base) & (slots < base + tokens)).any()

    @precondition(lambda self: self.step > self.retired)
    @rule()
    def retire(self) -> None:
        self.retired += 1
        self.allocator.retire(self.retired)
        del self.memory.reads[self.retired]

    def give_up(self, rid: int) -> Sequence:
        self.allocator.free(rid)
        return self.running.pop(rid)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish_or_abort(self, data: st.DataObject) -> None:
        self.give_up(data.draw(st.sampled_from(sorted(self.running))))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.waiting.insert(0, self.give_up(data.draw(st.sampled_from(sorted(self.running)))))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.running)))
        new, self.next_rid = self.next_rid, self.next_rid + 1
        if not self.allocator.fork(rid, new):
            assert new not in self.allocator.live()
            return
        parent = self.running[rid]
        child = self.running[new] = Sequence(parent.tokens, parent.longest)
        child.computed = parent.computed

    @rule(budget=st.integers(1, 64), room=st.sampled_from([0, 5, 20, 40]))
    def compact(self, budget: int, room: int) -> None:
        copies = self.allocator.compact(budget, room)
        self.carry += copies

    @rule()
    def drop_prefixes(self) -> None:
        self.allocator.drop_prefixes()
        assert self.allocator.stats().cached == 0

    # --- what must always hold

    @invariant()
    def the_books_balance(self) -> None:
        self.allocator.check()
        stats = self.allocator.stats()
        assert self.allocator.live() == set(self.running)
        assert stats.reserved + stats.free + stats.retired == stats.capacity
        assert 0 <= stats.held <= stats.reserved
        assert 0 <= stats.largest_free <= stats.free
        assert stats.live == len(self.running)

    def teardown(self) -> None:
        """Everybody leaves: nothing may stay behind."""
        for rid in list(self.running):
            self.give_up(rid)
        self.allocator.retire(self.step)
        self.allocator.check()
        stats = self.allocator.stats()
        assert (stats.free, stats.largest_free, stats.reserved, stats.retired) == (stats.capacity, stats.capacity, 0, 0)
        self.memory.run(self.allocator.take_ops())
        assert not self.memory.pieces, "a piece was never given back"
