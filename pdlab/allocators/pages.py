"""The pages of a memory and the state each is in.

    free      on the free list; its rows mean nothing
    owned     in the page list of `refs` requests
    retired   given up by its last owner, perhaps still read by a step in flight
    cached    given up and retired, but full and findable by prefix: free for whoever needs it, oldest first

A page is in exactly one of them. Pages are cached in the order in which they are dropped; owners drop their last page first,
so the head of a chain, which more prompts share, is evicted after its tail.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import Protocol

from pdlab.allocators.interface import CACHED, FREE, RETIRED, SHARED
from pdlab.allocators.prefix import PrefixIndex
from pdlab.core.errors import AllocatorError


class FreeList(Protocol):
    """Free pages, as this module uses them; a list will do."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[int]: ...
    def append(self, page: int, /) -> None: ...
    def pop(self) -> int: ...


class Pages:
    """Numbers 0...count - 1. `refs`: owners of each page; `fill`: its leading rows that hold a token."""

    def __init__(self, count: int, size: int, free: FreeList) -> None:
        self.count, self.size, self.free = count, size, free
        self.refs = [0] * count
        self.fill = [0] * count
        self.cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.prefixes = PrefixIndex(size)
        self.owned = 0  # pages with refs > 0
        self.held = 0  # sum of fill over owned pages
        self.submitted = self.retired = -1
        self._limbo: deque[tuple[int, int]] = deque()  # (newest step submitted before the release, page), by step
        self._tag: dict[int, int] = {}  # retired page -> the step that must end; an entry of _limbo that differs is stale

    def available(self) -> int:
        return len(self.free) + len(self.cached)

    def waiting(self) -> int:
        """Pages that steps in flight may still read."""
        return len(self._tag)

    @property
    def in_flight(self) -> bool:
        return self.submitted > self.retired

    def take(self) -> int:
        """A page for a new owner: a free one, else the least recently used cached one."""
        if self.free:
            page = self.free.pop()
        else:
            page, _ = self.cached.popitem(last=False)
            self.prefixes.forget(page)
        self.own(page)
        return page

    def own(self, page: int) -> None:
        """A page that was just taken off the free list has its first owner."""
        self.refs[page] = 1
        self.fill[page] = 0
        self.owned += 1

    def share(self, page: int) -> None:
        """One more owner for a page that is owned, retired or cached."""
        if not self.refs[page]:
            if self._tag.pop(page, None) is None:
                del self.cached[page]
            self.owned += 1
            self.held += self.fill[page]
        self.refs[page] += 1

    def drop(self, page: int) -> None:
        """One owner less. The last one's page is reusable once the steps in flight have ended."""
        self.refs[page] -= 1
        if not self.refs[page]:
            self.owned -= 1
            self.held -= self.fill[page]
            self._release(page)

    def _release(self, page: int) -> None:
        if self.in_flight:
            self._tag[page] = self.submitted
            self._limbo.append((self.submitted, page))
        else:
            self._reuse(page)

    def _reuse(self, page: int) -> None:
        if page in self.prefixes:
            self.cached[page] = None
        else:
            self.free.append(page)

    def retire(self, step: int) -> None:
        self.retired = max(self.retired, step)
        while self._limbo and self._limbo[0][0] <= self.retired:
            tag, page = self._limbo.popleft()
            if self._tag.get(page) == tag:
                del self._tag[page]
                self._reuse(page)

    def write(self, page: int, rows: int) -> None:
        """The first `rows` rows of an owned page hold tokens."""
        more = rows - self.fill[page]
        if more > 0:
            self.fill[page] = rows
            self.held += more

    def drop_prefixes(self) -> None:
        for page in self.cached:
            self.free.append(page)
        self.cached.clear()
        self.prefixes.clear()

    def used(self) -> list[int]:
        """Owned and cached pages, lowest first."""
        return [p for p, n in enumerate(self.refs) if n or p in self.cached]

    def move(self, moves: dict[int, int], free: FreeList) -> None:
        """Content goes from each key to its value, a free page; `free` is the free list without those."""
        self.free = free
        for old, new in moves.items():
            self.refs[new], self.refs[old] = self.refs[old], 0
            self.fill[new] = self.fill[old]
            self.prefixes.move(old, new)
            self._release(old)
        self.cached = OrderedDict((moves.get(p, p), None) for p in self.cached)

    def owner_of(self, owners: Iterable[tuple[int, list[int]]]) -> list[int]:
        """Of each page: the request in `owners` (request, its pages), or FREE, RETIRED, CACHED, SHARED."""
        who = [FREE] * self.count
        for page in self.cached:
            who[page] = CACHED
        for page in self._tag:
            who[page] = RETIRED
        for rid, pages in owners:
            for page in pages:
                who[page] = rid if self.refs[page] == 1 else SHARED
        return who

    def check(self, owners: Iterable[list[int]]) -> None:
        """`owners`: the page list of each request."""
        refs = [0] * self.count
        for pages in owners:
            for page in pages:
                refs[page] += 1
        require(refs == self.refs, "reference counts differ from the page lists")
        owned = [p for p, n in enumerate(refs) if n]
        states = [*self.free, *self.cached, *self._tag, *owned]
        require(sorted(states) == list(range(self.count)), "a page is leaked, or in two states")
        require(len(owned) == self.owned, "owned pages are miscounted")
        require(sum(self.fill[p] for p in owned) == self.held, "held tokens are miscounted")
        require(self.prefixes.consistent(), "prefix index and page keys differ")
        require(all(self.fill[p] == self.size for p in self.prefixes.pages()), "a named page is not full")
        require(all(p in self.prefixes for p in self.cached), "a cached page has no key")
        require(not set(self.free) & set(self.prefixes.pages()), "a free page has a key")


def require(ok: bool, what: str) -> None:
    if not ok:
        raise AllocatorError(f"broken invariant: {what}", "this is a bug in the allocator, not in its use")
