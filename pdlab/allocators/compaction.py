"""When to compact, and how much at a time.

Triggers, each a field of EngineConfig: every `compact_every` requests that ended; more than `compact_threshold` of the free
memory out of reach of any one request; an allocation that failed. A compaction that was begun goes on before each plan,
`compact_budget` slots at a time, until nothing moves any more, so that no step waits for more copies than that.
"""

from __future__ import annotations

from pdlab.allocators.interface import Allocator
from pdlab.core.config import EngineConfig
from pdlab.core.plan import KVOp


class Compactor:
    """Drives `allocator.compact` and hands its copies to the next plan. `runs` and `moved` (slots) say what it did."""

    def __init__(self, config: EngineConfig, allocator: Allocator) -> None:
        self.config, self.allocator = config, allocator
        self.runs = self.moved = 0
        self._ended = 0
        self._going = False
        self._ops: list[KVOp] = []

    def ended(self) -> None:
        """A request ended."""
        self._ended += 1

    def before_plan(self) -> None:
        """Between two steps: begins or continues a compaction where a trigger says so."""
        c = self.config
        by_count = c.compact_every is not None and self._ended >= c.compact_every
        by_waste = c.compact_threshold is not None and self.allocator.stats().waste_external > c.compact_threshold
        if by_count:
            self._ended = 0
        if by_count or by_waste or self._going:
            self._going = self._compact()

    def refused(self, n_tokens: int) -> bool:
        """An allocation of `n_tokens` failed while a plan is made, before any address was handed out. True: try again."""
        if not self.config.compact_on_refusal:
            return False
        stats = self.allocator.stats()
        return stats.largest_free < n_tokens <= stats.free and self._compact(n_tokens)

    def _compact(self, room: int = 0) -> bool:
        self._ops += self.allocator.take_ops()  # what was asked for before acts before
        copies = self.allocator.compact(self.config.compact_budget, room)
        self._ops += copies
        moved = sum(op.tokens for op in copies)
        self.runs += moved > 0
        self.moved += moved
        return moved > 0

    def take_ops(self) -> tuple[KVOp, ...]:
        """What the next plan must carry: compaction's copies, then whatever the allocator holds; clears both."""
        ops, self._ops = self._ops, []
        return (*ops, *self.allocator.take_ops())
