"""What every KV-cache allocator promises.

A *slot* is room for one token's K and V in every layer. An allocator hands out slots of a memory of `capacity` slots as
plain integers; it never sees a tensor, so the same code drives a GPU, a CPU and the simulator.

Steps in flight: the engine submits step s and commits it later. `free` may be called while steps that read the freed
slots are still running, so what is freed is *retired*, and handed out again only after `retire(step)` was called with
the newest step submitted before the free.

Waste, in symbols, for requests r with `held(r)` tokens written and `reserved(r)` slots reserved, pieces shared by several
requests counted once, F free slots, and the next request needing n slots:

    internal = (sum reserved - sum held) / sum reserved            reserved, holding no token
    external = (F - largest amount of F usable by one request) / F free, but in pieces a request cannot use
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pdlab.core.plan import KVCopy, KVOp


@dataclass(frozen=True)
class AllocatorStats:
    """Slots throughout; waste as shares 0...1."""

    capacity: int
    reserved: int  # slots owned by live requests, shared ones once
    held: int  # of those, slots that hold a token
    cached: int  # slots owned by nobody but kept for prefix reuse; evictable, so they count as free
    free: int  # slots that a reserve() could be given, cached ones included, retired ones not
    retired: int  # freed, waiting for steps in flight
    largest_free: int  # slots the largest single request could be given now
    pages_used: int  # pages (or extents) owned by live requests
    live: int  # requests

    @property
    def waste_internal(self) -> float:
        return (self.reserved - self.held) / self.reserved if self.reserved else 0.0

    @property
    def waste_external(self) -> float:
        return (self.free - self.largest_free) / self.free if self.free else 0.0


class Allocator(ABC):
    """Contract 1. Methods raise AllocatorError on a misuse (unknown request, double free), never on being full."""

    kind: str  # "paged": attention follows a page table; "extent": base + position
    page_size: int  # tokens a page; 1 for extents
    capacity: int  # slots

    @abstractmethod
    def reserve(self, rid: int, n_tokens: int) -> bool:
        """Makes sure request `rid` (new or known) owns room for its first `n_tokens` positions.

        False, with nothing changed, when there is no room. Never shrinks. Room shared with another request that this one
        is about to write (positions from its current `held` up to n_tokens) is copied first: see `take_ops`.
        """

    @abstractmethod
    def slots(self, rid: int, lo: int, hi: int) -> np.ndarray:
        """i64[hi - lo]: the slots of positions [lo, hi), which must be reserved."""

    @abstractmethod
    def written(self, rid: int, tokens: Sequence[int]) -> None:
        """Says that KV of positions [0, len(tokens)) is, or with the steps submitted so far will be, in the slots, and
        which token ids they are. Full pages of known tokens become findable by `match_prefix`."""

    @abstractmethod
    def free(self, rid: int) -> None:
        """Gives up everything `rid` owns; reusable once the steps in flight have retired."""

    @abstractmethod
    def fork(self, rid: int, new: int) -> bool:
        """Lets `new` share what `rid` has written, copied when either writes. False when there is no room."""

    @abstractmethod
    def match_prefix(self, tokens: Sequence[int]) -> int:
        """How many leading tokens could be taken from memory by `adopt_prefix`; 0 where the scheme shares nothing.

        At most len(tokens) - 1, since the last token must be computed to have logits.
        """

    @abstractmethod
    def adopt_prefix(self, rid: int, tokens: Sequence[int]) -> int:
        """Gives the new request `rid` the pages that `match_prefix` found and returns how many tokens they hold."""

    @abstractmethod
    def compact(self, budget: int) -> list[KVCopy]:
        """Moves at most `budget` slots to make free room contiguous; the copies must run before the next step's model.

        Slots handed out earlier are stale afterwards: callers ask `slots` and `page_table` again.
        """

    @abstractmethod
    def stats(self) -> AllocatorStats: ...

    @abstractmethod
    def check(self) -> None:
        """Raises AllocatorError if a slot is owned twice, leaked, free and owned, or a count is wrong. O(capacity)."""

    @abstractmethod
    def submitted(self, step: int) -> None:
        """The engine is about to submit `step`; frees from now on may be read by it."""

    @abstractmethod
    def retire(self, step: int) -> None:
        """Every step up to and including `step` has ended: what was freed before step + 1 was submitted may be reused."""

    @abstractmethod
    def live(self) -> set[int]:
        """Request ids that own something."""

    def page_table(self, rid: int) -> np.ndarray:
        """i32[pages]: page numbers in order of position (paged schemes)."""
        return np.zeros(0, np.int32)

    def base(self, rid: int) -> int:
        """First slot of the request's extent (extent schemes)."""
        return 0

    def take_ops(self) -> tuple[KVOp, ...]:
        """Operations that the next plan must carry (own pieces made or freed, copy on write, growth by move); clears them."""
        return ()
