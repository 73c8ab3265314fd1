"""Free room as extents in order of address, and what the two schemes that give each request one extent share.

A request's extent is [start, start + size): position t lies at slot start + t. A move copies all `size` rows: steps in flight
may have written any of them.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from pdlab.allocators.interface import FREE, RETIRED, Allocator, AllocatorStats
from pdlab.core.errors import AllocatorError, CapacityError
from pdlab.core.plan import KVOp


class FreeExtents:
    """Free units of [0, size), merged where they touch. Costs O(number of extents), which never exceeds the used ones + 1.

    `fit` "first": the lowest extent that is large enough; "best": the smallest one. append() and pop() treat single units
    as a stack would, except that pop() gives the highest one.
    """

    def __init__(self, size: int, fit: str = "first") -> None:
        self.fit = fit
        self.total = size
        self._starts = [0] if size else []
        self._sizes = [size] if size else []

    @classmethod
    def of(cls, units: Iterable[int], fit: str) -> FreeExtents:
        """Exactly these units are free."""
        free = cls(0, fit)
        for unit in sorted(units):
            free.append(unit)
        return free

    def __len__(self) -> int:
        return self.total

    def __iter__(self) -> Iterator[int]:
        for start, size in self.extents():
            yield from range(start, start + size)

    def extents(self) -> list[tuple[int, int]]:
        return list(zip(self._starts, self._sizes, strict=True))

    def largest(self) -> int:
        return max(self._sizes, default=0)

    def take(self, n: int) -> int | None:
        """Start of n units that are now taken; None when no extent is large enough."""
        if self.fit == "first":
            where = next((i for i, size in enumerate(self._sizes) if size >= n), None)
        else:
            where = min((i for i, size in enumerate(self._sizes) if size >= n), key=self._sizes.__getitem__, default=None)
        return None if where is None else self._cut(where, n)

    def _cut(self, i: int, n: int) -> int:
        start = self._starts[i]
        self.total -= n
        if self._sizes[i] == n:
            del self._starts[i], self._sizes[i]
        else:
            self._starts[i] += n
            self._sizes[i] -= n
        return start

    def take_at(self, start: int, n: int) -> bool:
        """Takes [start, start + n) if an extent begins at `start` and is large enough."""
        i = bisect_left(self._starts, start)
        if i == len(self._starts) or self._starts[i] != start or self._sizes[i] < n:
            return False
        self._cut(i, n)
        return True

    def give(self, start: int, n: int) -> None:
        """[start, start + n) is free again."""
        i = bisect_left(self._starts, start)
        after = i < len(self._starts) and self._starts[i] == start + n
        before = i > 0 and self._starts[i - 1] + self._sizes[i - 1] == start
        self.total += n
        if before:
            self._sizes[i - 1] += n
            if after:
                self._sizes[i - 1] += self._sizes[i]
                del self._starts[i], self._sizes[i]
        elif after:
            self._starts[i], self._sizes[i] = start, self._sizes[i] + n
        else:
            self._starts.insert(i, start)
            self._sizes.insert(i, n)

    def pop(self) -> int:
        self.total -= 1
        self._sizes[-1] -= 1
        unit = self._starts[-1] + self._sizes[-1]
        if not self._sizes[-1]:
            self._starts.pop()
            self._sizes.pop()
        return unit

    def append(self, unit: int) -> None:
        self.give(unit, 1)


class Piece:
    """One request's extent, in slots."""

    __slots__ = ("held", "size", "start")

    def __init__(self, start: int, size: int) -> None:
        self.start = start
        self.size = size
        self.held = 0


class ExtentAllocator(Allocator):
    """One extent a request. Subclasses say how much room a new request gets and what happens when it wants more."""

    kind = "extent"
    page_size = 1

    def __init__(self, capacity: int, quantum: int, fit: str) -> None:
        self.quantum = self.granule = quantum
        self.capacity = capacity // quantum * quantum
        if self.capacity < 1:
            raise CapacityError(f"{capacity} slots hold no extent of {quantum} tokens", "give the KV cache more memory")
        self._free = FreeExtents(self.capacity, fit)
        self._pieces: dict[int, Piece] = {}
        self._limbo: deque[tuple[int, int, int]] = deque()  # (newest step submitted before the free, start, size)
        self._submitted = self._retired = -1
        self._reserved = self._held = self._waiting = 0  # sums over _pieces and _limbo
        self._ops: list[KVOp] = []

    @abstractmethod
    def first_size(self, n_tokens: int, longest: int) -> int:
        """Slots that a new request gets."""

    @abstractmethod
    def enlarge(self, rid: int, piece: Piece, n_tokens: int) -> bool:
        """Makes room for n_tokens > piece.size; False, with nothing changed, when there is none."""

    def made(self, rid: int, piece: Piece) -> None:
        """A piece came to be."""

    def gone(self, rid: int, piece: Piece) -> None:
        """A piece was given up."""

    def rounded(self, n: int) -> int:
        return -(-n // self.quantum) * self.quantum

    def reserve(self, rid: int, n_tokens: int, longest: int = 0) -> bool:
        piece = self._pieces.get(rid)
        if piece is None:
            size = self.first_size(n_tokens, longest)
            return self._add(rid, size) is not None or self.refuse(size)
        if n_tokens > piece.size and not self.enlarge(rid, piece, n_tokens):
            return self.refuse(n_tokens)
        return True

    def refuse(self, n_tokens: int) -> bool:
        """Counts a refusal; the answer to give is False."""
        self.refusals += 1
        self.refused_in_pieces += self.rounded(max(n_tokens, 1)) <= self._free.total
        return False

    def _add(self, rid: int, size: int) -> Piece | None:
        size = self.rounded(max(size, 1))
        if (start := self._free.take(size)) is None:
            return None
        piece = self._pieces[rid] = Piece(start, size)
        self._reserved += size
        self.made(rid, piece)
        return piece

    def free(self, rid: int) -> None:
        piece = self._piece(rid)
        del self._pieces[rid]
        self._reserved -= piece.size
        self._held -= piece.held
        self.gone(rid, piece)
        self.release(piece.start, piece.size)

    def release(self, start: int, size: int) -> None:
        """Free at once if no step is in flight, else when the newest of them has ended."""
        if self._submitted <= self._retired:
            self._free.give(start, size)
        else:
            self._limbo.append((self._submitted, start, size))
            self._waiting += size

    def submitted(self, step: int) -> None:
        self._submitted = step

    def retire(self, step: int) -> None:
        self._retired = max(self._retired, step)
        while self._limbo and self._limbo[0][0] <= self._retired:
            _, start, size = self._limbo.popleft()
            self._waiting -= size
            self._free.give(start, size)

    def room(self, rid: int) -> int:
        return self._piece(rid).size

    def slots(self, rid: int, lo: int, hi: int) -> np.ndarray:
        piece = self._piece(rid)
        if not 0 <= lo <= hi <= piece.size:
            raise AllocatorError(f"request {rid} has no room at positions [{lo}, {hi})", "reserve it first")
        return np.arange(piece.start + lo, piece.start + hi)

    def slots_many(self, rids: Sequence[int], lo: Sequence[int], hi: Sequence[int]) -> np.ndarray:
        if all(b - a == 1 for a, b in zip(lo, hi, strict=True)):
            pieces = [self._piece(rid) for rid in rids]
            if all(0 <= a < piece.size for a, piece in zip(lo, pieces, strict=True)):
                return np.array([piece.start + a for a, piece in zip(lo, pieces, strict=True)], np.int64)
        return super().slots_many(rids, lo, hi)

    def base(self, rid: int) -> int:
        return self._piece(rid).start

    def _piece(self, rid: int) -> Piece:
        if (piece := self._pieces.get(rid)) is None:
            raise AllocatorError(f"request {rid} owns nothing here", "reserve or fork first; free it once")
        return piece

    def written(self, rid: int, tokens: Sequence[int], start: int = 0) -> None:
        piece, end = self._piece(rid), start + len(tokens)
        if end <= piece.held:
            return
        if end > piece.size or start > piece.held:
            raise AllocatorError(
                f"request {rid} cannot have written positions [{start}, {end})",
                f"it holds {piece.held} and has room for {piece.size}; write in order, after reserve()",
            )
        self._held += end - piece.held
        piece.held = end

    def appended(self, rids: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> None:
        for rid, position in zip(rids, positions, strict=True):
            piece = self._pieces.get(rid)
            if piece is None or position != piece.held or position >= piece.size:
                self.written(rid, (-1,), position)
            else:
                piece.held = position + 1
                self._held += 1

    def match_prefix(self, tokens: Sequence[int]) -> int:
        return 0

    def adopt_prefix(self, rid: int, tokens: Sequence[int]) -> int:
        return 0

    def take_ops(self) -> tuple[KVOp, ...]:
        if not self._ops:
            return ()
        ops, self._ops = tuple(self._ops), []
        return ops

    def live(self) -> set[int]:
        return set(self._pieces)

    def stats(self) -> AllocatorStats:
        return AllocatorStats(
            capacity=self.capacity,
            reserved=self._reserved,
            held=self._held,
            cached=0,
            free=self._free.total,
            retired=self._waiting,
            largest_free=self._free.largest(),
            pages_used=len(self._pieces),
            live=len(self._pieces),
        )

    def layout(self) -> list[tuple[int, int, int, int]]:
        used = [(p.start, p.size, rid, p.held) for rid, p in self._pieces.items()]
        limbo = [(start, size, RETIRED, 0) for _, start, size in self._limbo]
        return sorted(used + limbo + [(start, size, FREE, 0) for start, size in self._free.extents()])

    def check(self) -> None:
        parts = [(p.start, p.size) for p in self._pieces.values()] + [(a, n) for _, a, n in self._limbo]
        free, end = self._free.extents(), 0
        for start, size in sorted(parts + free):
            if start != end or size < 1:
                raise AllocatorError(f"broken invariant: slots {end} to {start} leaked or owned twice", _BUG)
            end = start + size
        touching = any(a + n == b for (a, n), (b, _) in pairwise(free))
        sums = (sum(p.size for p in self._pieces.values()), sum(p.held for p in self._pieces.values()))
        if end != self.capacity or touching or self._free.total != sum(n for _, n in free):
            raise AllocatorError("broken invariant: free extents are lost or not merged", _BUG)
        if sums != (self._reserved, self._held) or self._waiting != sum(n for _, _, n in self._limbo):
            raise AllocatorError("broken invariant: reserved, held or retired is miscounted", _BUG)
        if any(p.held > p.size for p in self._pieces.values()):
            raise AllocatorError("broken invariant: a request holds more than it has room for", _BUG)


_BUG = "this is a bug in the allocator, not in its use"
