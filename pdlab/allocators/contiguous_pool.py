"""One allocation made at start, from which each request gets one extent that grows with it.

Room comes in whole quanta of `page_size` tokens. A request that outgrows its extent takes the free slots behind it where
there are enough; otherwise it moves to a larger extent, with `headroom` (a share of its length) to grow into, and its rows
are copied. A move needs room for the old and the new extent at once.
"""

from __future__ import annotations

from pdlab.allocators.extents import ExtentAllocator, Piece
from pdlab.core.errors import AllocatorError
from pdlab.core.plan import KVCopy


class ContiguousPool(ExtentAllocator):
    """Extents of one pool, by first or best fit.

    Promise: internal waste is at most headroom + (quantum - 1) / n of a request of n tokens; reserve() fails when no single
    free extent is large enough, so external waste is what compact() is for. Costs O(free extents) per extent made or
    moved, nothing per token between.
    """

    def __init__(self, capacity: int, *, quantum: int = 16, fit: str = "first", headroom: float = 0.0) -> None:
        super().__init__(capacity, quantum, fit)
        self.headroom = headroom
        self.moves = 0  # growths that had to copy

    def first_size(self, n_tokens: int, longest: int) -> int:
        size = n_tokens + int(n_tokens * self.headroom)
        return max(n_tokens, min(size, longest)) if longest else size

    def enlarge(self, rid: int, piece: Piece, n_tokens: int) -> bool:
        more = self.rounded(n_tokens) - piece.size
        if self._free.take_at(piece.start + piece.size, more):
            piece.size += more
            self._reserved += more
            return True
        size = self.rounded(n_tokens + int(n_tokens * self.headroom))
        start = self._free.take(size)
        if start is None and size > (size := self.rounded(n_tokens)):
            start = self._free.take(size)
        if start is None:
            return False
        self._move(piece, start, size)
        self.moves += 1
        return True

    def _move(self, piece: Piece, start: int, size: int) -> None:
        self._ops.append(KVCopy(piece.start, start, piece.size))
        self._reserved += size - piece.size
        self.release(piece.start, piece.size)
        piece.start, piece.size = start, size

    def fork(self, rid: int, new: int) -> bool:
        """An extent cannot be shared: the child gets a copy at once."""
        parent = self._piece(rid)
        if new in self._pieces:
            raise AllocatorError(f"request {new} already owns an extent", "fork into a request that is new")
        child = self._add(new, parent.held)
        if child is None:
            return False
        if parent.held:
            self._ops.append(KVCopy(parent.start, child.start, parent.held))
        child.held = parent.held
        self._held += parent.held
        return True

    def compact(self, budget: int, room: int = 0) -> list[KVCopy]:
        """Slides extents down over the gaps, each at most once: all of them, or for `room` the fewest slots that bring
        together enough free ones. What slides may overlap where it was (the copies themselves never overlap their source), so
        with steps in flight the highest extents go into the lowest holes that take them instead."""
        copies = [op for op in self._ops if isinstance(op, KVCopy)]
        self._ops = []
        room = self.rounded(room)
        still = self._submitted <= self._retired
        by_address = sorted(self._pieces.values(), key=lambda p: p.start)
        if room and (self._free.largest() >= room or self._free.total < room):
            return copies
        if still:
            neighbours, edge = self._cheapest(by_address, room) if room else (by_address, 0)
            return copies + self._slide(neighbours, edge, budget)
        for piece in reversed(by_address):
            hole = next((start for start, size in self._free.extents() if size >= piece.size), None)
            if piece.size <= budget and hole is not None and hole < piece.start:
                self._free.take_at(hole, piece.size)
                self._move(piece, hole, piece.size)
                budget -= piece.size
        copies += [op for op in self._ops if isinstance(op, KVCopy)]
        self._ops = []
        return copies

    def _cheapest(self, pieces: list[Piece], room: int) -> tuple[list[Piece], int]:
        """Neighbouring extents, least in sum, between gaps that together make `room`; and where the first gap begins."""
        starts = [p.start for p in pieces] + [self.capacity]
        ends = [0] + [p.start + p.size for p in pieces]
        first = gaps = cost = 0
        best = (self.capacity + 1, 0, 0)
        for last in range(len(starts)):  # gap `last` lies before piece `last`
            gaps += starts[last] - ends[last]
            while gaps - (starts[first] - ends[first]) >= room:
                gaps -= starts[first] - ends[first]
                cost -= pieces[first].size
                first += 1
            if gaps >= room:
                best = min(best, (cost, first, last))
            cost += pieces[last].size if last < len(pieces) else 0
        _, first, last = best
        return pieces[first:last], ends[first]

    def _slide(self, pieces: list[Piece], edge: int, budget: int) -> list[KVCopy]:
        """Moves each of these neighbours down to the end of the one before, the first to `edge`."""
        copies: list[KVCopy] = []
        for piece in pieces:
            gap = piece.start - edge
            if gap and piece.size <= budget:
                budget -= piece.size
                copies += (KVCopy(piece.start + at, edge + at, min(gap, piece.size - at)) for at in range(0, piece.size, gap))
                self._free.take_at(edge, gap)
                self._free.give(edge + piece.size, gap)
                piece.start = edge
            edge = piece.start + piece.size
        return copies
