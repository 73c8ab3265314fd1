"""The traditional scheme: each request gets a piece of memory of its own, once, for the longest it could become.

The piece is asked of the device when the request is admitted (KVAllocate) and given back when it ends (KVFree). Slots are
virtual addresses within the same budget that the other schemes have, found by first fit as a device's allocator would.
"""

from __future__ import annotations

from pdlab.allocators.extents import ExtentAllocator, Piece
from pdlab.allocators.interface import promised_length
from pdlab.core.errors import AllocatorError
from pdlab.core.plan import KVAllocate, KVCopy, KVFree


class PerRequest(ExtentAllocator):
    """One piece a request, of its longest possible length (max_len where the caller does not know it).

    Promise: a request that was admitted never lacks room. Internal waste is everything it does not come to write; external
    waste is what first fit leaves between pieces of different lengths, and nothing can be moved. Costs one device
    allocation and one free a request.
    """

    def __init__(self, capacity: int, *, max_len: int, quantum: int = 16, promised: int | None = None) -> None:
        super().__init__(capacity, quantum, "first")
        self.max_len, self.promised = max_len, promised

    def first_size(self, n_tokens: int, longest: int) -> int:
        return promised_length(n_tokens, longest or self.max_len, self.promised, self.max_len)

    def enlarge(self, rid: int, piece: Piece, n_tokens: int) -> bool:
        raise AllocatorError(
            f"request {rid} wants {n_tokens} positions of the {piece.size} it was admitted with",
            "pass its longest possible length at its first reserve()",
        )

    def made(self, rid: int, piece: Piece) -> None:
        self._ops.append(KVAllocate(rid, piece.start, piece.size))

    def gone(self, rid: int, piece: Piece) -> None:
        self._ops.append(KVFree(rid, piece.start))

    def fork(self, rid: int, new: int) -> bool:
        """The child gets a piece as large as its parent's, and a copy."""
        parent = self._piece(rid)
        if new in self._pieces:
            raise AllocatorError(f"request {new} already owns a piece", "fork into a request that is new")
        child = self._add(new, parent.size)
        if child is None:
            return False
        if parent.held:
            self._ops.append(KVCopy(parent.start, child.start, parent.held))
        child.held = parent.held
        self._held += parent.held
        return True

    def compact(self, budget: int, room: int = 0) -> list[KVCopy]:
        """Nothing can be moved: every piece is its own allocation. Pending operations stay where they are."""
        return []
