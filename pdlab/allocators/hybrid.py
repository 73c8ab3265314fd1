"""Small requests in a pool, large ones in pages, over one memory and one page table.

The pool grows from the low end: a small request is given, when it comes, one run of neighbouring pages for the
longest it could become, and never asks again. Pages grow from the high end, one at a time. The split between the two is
where they meet, so it moves with the load and moves no token. A run that cannot be found, or is outgrown, goes on in
single pages: both are rows of the same page table, so a request passes from the pool to pages without a copy.

The threshold. A pooled request that reserves M tokens, starts with p and ends with n wastes, over the n - p steps of its
life, about M - (p + n) / 2 a step. From the requests that ended last, the rule takes the largest threshold for which the pool
would have wasted at most `waste` of all the memory that was reserved. Until enough have ended, everything is paged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from pdlab.allocators.extents import FreeExtents
from pdlab.allocators.interface import promised_length
from pdlab.allocators.paged import Paged
from pdlab.allocators.pages import FreeList


class ThresholdRule:
    """Learns, from the last `window` requests that ended, which requests the pool may take. See the module's docstring."""

    def __init__(self, waste: float, *, window: int = 256, every: int = 32) -> None:
        self.waste = waste
        self.every = every
        self.threshold = 0
        self._ended: deque[tuple[int, int, int]] = deque(maxlen=window)  # (longest, first, last) in tokens
        self._new = 0

    def ended(self, longest: int, first: int, last: int) -> None:
        self._ended.append((longest, first, last))
        self._new += 1
        if self._new >= self.every:
            self._new = 0
            self.threshold = self.choose()

    def choose(self) -> int:
        longest, first, last = np.array(sorted(self._ended), float).reshape(-1, 3).T
        steps = last - first + 1
        mean_held = (first + last) / 2
        wasted = np.cumsum(steps * (longest - mean_held))  # with every request up to this one pooled
        reserved = wasted + (steps * mean_held).sum()
        last_of_its_length = np.append(longest[1:] != longest[:-1], True)
        fits = np.flatnonzero((wasted <= self.waste * reserved) & last_of_its_length)
        return int(longest[fits[-1]]) if len(fits) else 0


class Hybrid(Paged):
    """Runs of pages for small requests, single pages for the rest.

    Promise: like Paged, reserve() fails only when no page is free or evictable; a pooled request never fails again. The
    pool's internal waste is kept by the learned threshold to a share of the memory in use; with a fixed threshold it is what
    requests up to that length leave unwritten. Costs O(free runs) per pooled request, O(pages touched) otherwise.
    """

    def __init__(
        self,
        capacity: int,
        page_size: int,
        *,
        threshold: int | None = None,
        waste: float = 0.02,
        max_len: int = 0,
        promised: int | None = None,
        fit: str = "first",
        prefix_reuse: bool = False,
    ) -> None:
        self.fit = fit
        self.fixed_threshold = threshold
        self.max_len, self.promised = max_len, promised
        self.rule = ThresholdRule(waste)
        self.pooled = 0  # requests that were given a run so far
        self._promised: dict[int, tuple[int, int]] = {}  # request -> (longest, tokens it came with)
        self._runs: dict[int, range] = {}  # request -> its run of pages
        super().__init__(capacity, page_size, prefix_reuse=prefix_reuse)

    @property
    def threshold(self) -> int:
        """Requests that cannot exceed so many tokens go to the pool."""
        return self.rule.threshold if self.fixed_threshold is None else self.fixed_threshold

    def free_list(self, pages: Iterable[int]) -> FreeList:
        return FreeExtents.of(pages, self.fit)

    def reserve(self, rid: int, n_tokens: int, longest: int = 0) -> bool:
        if longest and rid not in self._promised:
            ahead = promised_length(n_tokens, longest, self.promised, self.max_len)
            if ahead <= self.threshold:
                self._take_run(rid, ahead)
            if super().reserve(rid, n_tokens):
                self._promised[rid] = ahead, n_tokens
                return True
            return False
        return super().reserve(rid, n_tokens)

    def admit(self, rid: int, n_tokens: int, longest: int = 0, spare: int = 0) -> bool:
        """A request for the pool gets its run at once, where that leaves `spare` slots; the others grow like Paged's."""
        if not super().admit(rid, n_tokens, longest, spare):
            return False
        if longest:
            ahead = promised_length(n_tokens, longest, self.promised, self.max_len)
            if ahead <= self.threshold:
                self._take_run(rid, ahead, spare)
            self._promised[rid] = ahead, n_tokens
        return True

    def _take_run(self, rid: int, n_tokens: int, spare: int = 0) -> None:
        owner = self._owners.get(rid)
        have = 0 if owner is None else len(owner.pages)
        if owner is not None and owner.room < have * self.page_size:  # a forked child copies its last page first
            return
        need = -(-n_tokens // self.page_size) - have
        free = self.pages.free
        assert isinstance(free, FreeExtents)
        if not 1 <= need <= self.pages.available() - -(-spare // self.page_size) or (start := free.take(need)) is None:
            return
        owner = owner or self._add_owner(rid)
        self.pooled += 1
        run = self._runs[rid] = range(start, start + need)
        for page in run:
            self.pages.own(page)
        self._append_pages(owner, list(run))
        owner.room = len(owner.pages) * self.page_size

    def free(self, rid: int) -> None:
        held = self._owner(rid).held
        super().free(rid)
        self._runs.pop(rid, None)
        if (promise := self._promised.pop(rid, None)) is not None:
            longest, first = promise
            self.rule.ended(longest, min(first, held), held)

    def moves(self, most: int) -> dict[int, int]:
        """The lowest single pages, each to the highest free one, so that the pool's runs find room again."""
        pooled = {page for run in self._runs.values() for page in run}
        single = [page for page in self.pages.used() if page not in pooled]
        pairs = zip(single[:most], sorted(self.pages.free, reverse=True), strict=False)
        return {old: new for old, new in pairs if new > old}

    def split(self) -> tuple[int, int]:
        """(pages that runs own, pages that are owned singly): where the split stands now."""
        pooled = sum(len(run) for run in self._runs.values())
        return pooled, self.pages.owned - pooled
