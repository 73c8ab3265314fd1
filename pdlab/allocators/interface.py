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

# owners in layout() that are not requests
FREE, RETIRED, CACHED, SHARED = -1, -2, -3, -4


def promised_length(n_tokens: int, longest: int, promised: int | None, max_len: int) -> int:
    """Tokens that a scheme which reserves ahead makes room for: the request's longest possible length, or, where a service
    promises every request `promised` tokens of output whatever it will need, at least its first tokens and those."""
    ahead = longest if promised is None or not longest else max(longest, min(n_tokens + promised, max_len))
    return max(n_tokens, ahead)


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
        return self.waste_internal_with(0)

    def waste_internal_with(self, arriving: int) -> float:
        """With `arriving` tokens more, which steps that were submitted are writing and `written` has not heard of yet."""
        return max(0, self.reserved - self.held - arriving) / self.reserved if self.reserved else 0.0

    @property
    def waste_external(self) -> float:
        return (self.free - self.largest_free) / self.free if self.free else 0.0


class Allocator(ABC):
    """Contract 1. Methods raise AllocatorError on a misuse (unknown request, double free), never on being full."""

    kind: str  # "paged": attention follows a page table; "extent": base + position
    page_size: int  # tokens a page; 1 for extents
    capacity: int  # slots
    granule: int  # tokens by which a request's room grows
    refusals: int = 0  # reserve() calls that were refused so far
    refused_in_pieces: int = 0  # of those, with as much memory free as was wanted, but in too small pieces

    @abstractmethod
    def reserve(self, rid: int, n_tokens: int, longest: int = 0) -> bool:
        """Makes sure request `rid` (new or known) owns room for its first `n_tokens` positions.

        `longest`, read at the request's first reserve(): the most tokens it could ever hold (prompt + max_tokens), 0 for
        unknown. Schemes that reserve ahead, or treat long requests differently, go by it.
        False, with nothing changed, when there is no room. Never shrinks. Room shared with another request that this one
        is about to write (positions from its current `held` up to n_tokens) is copied first: see `take_ops`.
        """

    def admit(self, rid: int, n_tokens: int, longest: int = 0, spare: int = 0) -> bool:
        """Takes in a request (new, or with an adopted prefix) that is about to compute the first `n_tokens` positions, some
        in each of the steps to come. False, with nothing changed, unless there is room for them all beside `spare` slots.

        A scheme that grows at no cost gives nothing yet: each part is reserved when it is computed, and until then the caller
        keeps what is missing as `spare` for those who come after. The others reserve the whole at once.
        """
        return self.reserve(rid, n_tokens, longest)

    @abstractmethod
    def room(self, rid: int) -> int:
        """Positions below this may be written without another reserve()."""

    @abstractmethod
    def slots(self, rid: int, lo: int, hi: int) -> np.ndarray:
        """i64[hi - lo]: the slots of positions [lo, hi), which must be reserved."""

    @abstractmethod
    def written(self, rid: int, tokens: Sequence[int], start: int = 0) -> None:
        """Says that KV of positions [start, start + len(tokens)) is, or with the steps submitted so far will be, in the
        slots, and which token ids they are (-1: not known yet; say it again later). Positions said before are skipped.
        Full pages of known tokens become findable by `match_prefix`, so after a failed step call `drop_prefixes`."""

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
    def compact(self, budget: int, room: int = 0) -> list[KVCopy]:
        """Moves at most `budget` slots to make free room contiguous; the copies must run before the next step's model.

        `room`: stop as soon as a request could be given so many slots in one piece (0: bring together all there are).

        Called between steps. Copies that `take_ops` still held come first in the list and are cleared there, so that the
        order in which they must act is the order of the list. Slots handed out earlier are stale afterwards: callers
        ask `slots` and `page_table` again.
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

    @abstractmethod
    def layout(self) -> list[tuple[int, int, int, int]]:
        """(first slot, slots, owner, held) of every piece, in order of address, the whole capacity covered. `owner` is a
        request, or FREE, RETIRED, CACHED, SHARED (by several requests). For pictures and checks; O(pieces)."""

    def page_table(self, rid: int) -> np.ndarray:
        """i32[pages]: page numbers in order of position (paged schemes). A view that grows in place: copy what you keep."""
        return np.zeros(0, np.int32)

    def base(self, rid: int) -> int:
        """First slot of the request's extent (extent schemes)."""
        return 0

    def take_ops(self) -> tuple[KVOp, ...]:
        """Operations that the next plan must carry (own pieces made or freed, copy on write, growth by move); clears them.

        The executor runs them in order before the step's model."""
        return ()

    def drop_prefixes(self) -> None:
        """Forgets all that `match_prefix` could find (a step failed, so what the cache holds is not to be trusted)."""
        return None

    # One call a step for a whole batch. Same meaning as the calls above, which the defaults make in turn; a scheme
    # overrides them where a batch is cheaper than its parts. This is the step loop's way: see each allocator's cost.

    def reserve_many(self, rids: Sequence[int], n_tokens: Sequence[int]) -> int:
        """`reserve(rids[i], n_tokens[i])` in order; how many succeeded before the first that was refused."""
        for i, (rid, n) in enumerate(zip(rids, n_tokens, strict=True)):
            if not self.reserve(rid, n):
                return i
        return len(rids)

    def slots_many(self, rids: Sequence[int], lo: Sequence[int], hi: Sequence[int]) -> np.ndarray:
        """i64[sum(hi - lo)]: `slots(rids[i], lo[i], hi[i])`, concatenated."""
        parts = [self.slots(rid, a, b) for rid, a, b in zip(rids, lo, hi, strict=True)]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def page_tables(self, rids: Sequence[int]) -> np.ndarray:
        """i32[len(rids), P]: each request's page table, unused entries 0; P is the longest's (0 for extent schemes)."""
        tables = [self.page_table(rid) for rid in rids]
        out = np.zeros((len(rids), max(map(len, tables), default=0)), np.int32)
        for row, table in zip(out, tables, strict=True):
            row[: len(table)] = table
        return out

    def bases(self, rids: Sequence[int]) -> np.ndarray:
        """i64[len(rids)]: each request's `base`."""
        return np.fromiter((self.base(rid) for rid in rids), np.int64, len(rids))

    def appended(self, rids: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> None:
        """`written(rids[i], [tokens[i]], positions[i])` for each: what committing a step's decodes says."""
        for rid, token, position in zip(rids, tokens, positions, strict=True):
            self.written(rid, (token,), position)
