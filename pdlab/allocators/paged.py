"""Pages from one free list, shared by reference count, copied on write, found again by the tokens they hold.

    pages = floor(capacity / page_size)        slot = page * page_size + position % page_size

A page is in exactly one state:

    free      on the free list; its rows mean nothing
    owned     in the page list of `refs` requests
    retired   given up by its last owner, perhaps still read by a step in flight
    cached    given up and retired, but full and findable by prefix: free for whoever needs it, oldest first

Writing. An owner may write positions below its `room`. A forked child starts with `room` at what it shares, so its first
reserve() beyond that copies the shared last page, unless everybody else has given it up. The parent goes on writing in
place: its new rows lie beyond what the child can see. So a page has at most one writer.

Prefixes. A full page of known tokens has a key (see prefix.py). Pages are cached last page first: the head of a chain,
which more prompts share, is evicted after its tail.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np

from pdlab.allocators.interface import CACHED, FREE, RETIRED, SHARED, Allocator, AllocatorStats
from pdlab.allocators.prefix import PrefixIndex, chain_key
from pdlab.core.errors import AllocatorError, CapacityError
from pdlab.core.plan import KVCopy, KVOp


class FreePages(Protocol):
    """Free pages as this scheme uses them; a list will do."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[int]: ...
    def append(self, page: int, /) -> None: ...
    def pop(self) -> int: ...


class _Owner:
    """What one request owns. Its first `named` pages are full of known tokens, whose key is `digest`; `tail` are the known
    tokens after those. `named` -1: what it holds is not to be shared."""

    __slots__ = ("digest", "held", "named", "pages", "room", "row", "tail")

    def __init__(self, row: int) -> None:
        self.row = row
        self.pages: list[int] = []
        self.room = 0  # positions below this may be written
        self.held = 0  # positions below this are written
        self.named = 0
        self.digest = b""
        self.tail: list[int] = []


class Paged(Allocator):
    """Fixed pages from one free list; a page is owned by reference count.

    Promise: reserve() fails only when no page is free or evictable, so external waste is zero by construction; internal
    waste is at most page_size - 1 tokens a request beyond what it asked for. Costs O(pages touched) per call; stats()
    is O(1); a one-token reserve that needs no page is one comparison.
    """

    kind = "paged"

    def __init__(self, capacity: int, page_size: int, *, prefix_reuse: bool = False) -> None:
        self.page_size = page_size
        self.num_pages = capacity // page_size
        if self.num_pages < 1:
            raise CapacityError(
                f"{capacity} slots hold no page of {page_size} tokens",
                "give the KV cache more memory or use a smaller page_size",
            )
        self.capacity = self.num_pages * page_size
        self.prefix_reuse = prefix_reuse
        self._owners: dict[int, _Owner] = {}
        self._refs = [0] * self.num_pages
        self._fill = [0] * self.num_pages  # leading rows of a page that hold a token
        self._free = self._free_list(range(self.num_pages))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._prefixes = PrefixIndex(page_size)
        self._limbo: deque[tuple[int, int]] = deque()  # (newest step submitted before the free, page), in order of step
        self._tag: dict[int, int] = {}  # retired page -> the step that must end; an entry of _limbo that differs is stale
        self._submitted = self._retired = -1
        self._owned = 0  # pages with refs > 0
        self._held = 0  # sum of fill over owned pages
        self._ops: list[KVOp] = []
        self._tables = np.zeros((16, 16), np.int32)  # one row a request; unused entries 0
        self._rows = list(range(15, -1, -1))  # unused rows of _tables

    def _free_list(self, pages: Iterable[int]) -> FreePages:
        """What holds the free pages: a stack, low pages on top."""
        return sorted(pages, reverse=True)

    # --- room

    def reserve(self, rid: int, n_tokens: int, longest: int = 0) -> bool:
        owner = self._owners.get(rid)
        if owner is not None and n_tokens <= owner.room:
            return True
        return self._grow(rid, owner, n_tokens)

    def reserve_many(self, rids: Sequence[int], n_tokens: Sequence[int]) -> int:
        owners = self._owners
        for i, rid in enumerate(rids):
            owner = owners.get(rid)
            n = n_tokens[i]
            if (owner is None or n > owner.room) and not self._grow(rid, owner, int(n)):
                return i
        return len(rids)

    def _grow(self, rid: int, owner: _Owner | None, n_tokens: int) -> bool:
        have = 0 if owner is None else len(owner.pages)
        need = -(-n_tokens // self.page_size) - have
        # a child that has not written yet stands in the middle of its last page: that one is copied or taken over
        behind = owner is not None and owner.room < have * self.page_size
        copy = behind and owner is not None and not self._may_take_over(owner)
        if max(need, 0) + copy > len(self._free) + len(self._cached):
            self.refusals += 1
            return False
        if owner is None:
            owner = self._add_owner(rid)
        if behind:
            self._make_last_page_writable(owner, copy)
        if need > 0:
            self._append_pages(owner, [self._take() for _ in range(need)])
        owner.room = len(owner.pages) * self.page_size
        return True

    def _may_take_over(self, owner: _Owner) -> bool:
        """Whether the last page can be written in place: nobody else owns it, and no step in flight reads rows beyond ours."""
        page, rows = owner.pages[-1], owner.held - (len(owner.pages) - 1) * self.page_size
        return self._refs[page] == 1 and (self._fill[page] == rows or self._submitted <= self._retired)

    def _make_last_page_writable(self, owner: _Owner, copy: bool) -> None:
        old, index = owner.pages[-1], len(owner.pages) - 1
        if not copy:  # what others wrote beyond our tokens will be overwritten, so the page loses its name
            self._prefixes.forget(old)
            return
        new, rows = self._take(), owner.held - index * self.page_size
        self._ops.append(KVCopy(old * self.page_size, new * self.page_size, rows))
        owner.pages[index] = self._tables[owner.row, index] = new
        self._fill[new] = rows
        self._held += rows
        self._drop(old)

    def _take(self) -> int:
        """A page for a new owner: a free one, else the least recently used cached one."""
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._cached.popitem(last=False)
            self._prefixes.forget(page)
        self._refs[page] = 1
        self._fill[page] = 0
        self._owned += 1
        return page

    def _add_owner(self, rid: int) -> _Owner:
        if not self._rows:
            rows = len(self._tables)
            self._tables = np.concatenate([self._tables, np.zeros_like(self._tables)])
            self._rows = list(range(2 * rows - 1, rows - 1, -1))
        owner = self._owners[rid] = _Owner(self._rows.pop())
        return owner

    def _append_pages(self, owner: _Owner, pages: list[int]) -> None:
        lo = len(owner.pages)
        hi = lo + len(pages)
        if hi > (width := self._tables.shape[1]):
            wider = np.zeros((len(self._tables), max(hi, 2 * width)), np.int32)
            wider[:, :width] = self._tables
            self._tables = wider
        self._tables[owner.row, lo:hi] = pages
        owner.pages += pages

    def free(self, rid: int) -> None:
        owner = self._owner(rid)
        del self._owners[rid]
        self._tables[owner.row, : len(owner.pages)] = 0
        self._rows.append(owner.row)
        for page in reversed(owner.pages):
            self._drop(page)

    def _drop(self, page: int) -> None:
        self._refs[page] -= 1
        if not self._refs[page]:
            self._owned -= 1
            self._held -= self._fill[page]
            self._release(page)

    def _release(self, page: int) -> None:
        """A page without owner: free at once if no step is in flight, else when the newest of them has ended."""
        if self._submitted <= self._retired:
            self._reuse(page)
        else:
            self._tag[page] = self._submitted
            self._limbo.append((self._submitted, page))

    def _reuse(self, page: int) -> None:
        if page in self._prefixes:
            self._cached[page] = None
        else:
            self._free.append(page)

    def submitted(self, step: int) -> None:
        self._submitted = step

    def retire(self, step: int) -> None:
        self._retired = max(self._retired, step)
        limbo = self._limbo
        while limbo and limbo[0][0] <= self._retired:
            tag, page = limbo.popleft()
            if self._tag.get(page) == tag:
                del self._tag[page]
                self._reuse(page)

    # --- where tokens are

    def slots(self, rid: int, lo: int, hi: int) -> np.ndarray:
        owner, size = self._owner(rid), self.page_size
        if not 0 <= lo <= hi <= len(owner.pages) * size:
            raise AllocatorError(f"request {rid} has no room at positions [{lo}, {hi})", "reserve it first")
        first = lo // size
        pages = self._tables[owner.row, first : -(-hi // size)].astype(np.int64)
        return (pages[:, None] * size + np.arange(size)).ravel()[lo - first * size : hi - first * size]

    def slots_many(self, rids: Sequence[int], lo: Sequence[int], hi: Sequence[int]) -> np.ndarray:
        owners, size = self._owners, self.page_size
        singles: list[int] = []
        parts: list[np.ndarray] = []
        for rid, a, b in zip(rids, lo, hi, strict=True):
            if b - a == 1 and rid in owners and 0 <= a < len(pages := owners[rid].pages) * size:
                singles.append(pages[a // size] * size + a % size)
            else:
                if singles:
                    parts.append(np.array(singles, np.int64))
                    singles = []
                parts.append(self.slots(rid, a, b))
        parts.append(np.array(singles, np.int64))
        return np.concatenate(parts)

    def page_table(self, rid: int) -> np.ndarray:
        owner = self._owner(rid)
        view = self._tables[owner.row, : len(owner.pages)]
        view.flags.writeable = False
        return view

    def page_tables(self, rids: Sequence[int]) -> np.ndarray:
        owners = [self._owner(rid) for rid in rids]
        width = max((len(o.pages) for o in owners), default=0)
        return self._tables[:, :width].take([o.row for o in owners], axis=0)

    def _owner(self, rid: int) -> _Owner:
        if (owner := self._owners.get(rid)) is None:
            raise AllocatorError(f"request {rid} owns nothing here", "reserve, fork or adopt a prefix first; free it once")
        return owner

    # --- what tokens are

    def written(self, rid: int, tokens: Sequence[int], start: int = 0) -> None:
        owner, size, end = self._owner(rid), self.page_size, start + len(tokens)
        if end > owner.held:
            if end > owner.room or start > owner.held:
                raise AllocatorError(
                    f"request {rid} cannot have written positions [{start}, {end})",
                    f"it holds {owner.held} and has room for {owner.room}; write in order, after reserve()",
                )
            for i in range(owner.held // size, -(-end // size)):
                page = owner.pages[i]
                more = min(size, end - i * size) - self._fill[page]
                if more > 0:
                    self._fill[page] += more
                    self._held += more
            owner.held = end
        if self.prefix_reuse:
            self._name_pages(owner, tokens, start)

    def appended(self, rids: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> None:
        owners, size, fill, reuse = self._owners, self.page_size, self._fill, self.prefix_reuse
        for rid, token, position in zip(rids, tokens, positions, strict=True):
            owner, row = owners.get(rid), position % size
            ends_page = reuse and row + 1 == size
            if owner is None or position != owner.held or position >= owner.room or ends_page:
                self.written(rid, (token,), position)
                continue
            page = owner.pages[position // size]
            if row >= fill[page]:
                fill[page] = row + 1
                self._held += 1
            owner.held = position + 1
            if reuse and token >= 0 and len(owner.tail) == row and owner.named * size + row == position:
                owner.tail.append(token)

    def _name_pages(self, owner: _Owner, tokens: Sequence[int], start: int) -> None:
        """Takes in the tokens after those already known, and gives each page that they fill its key."""
        size, tail = self.page_size, owner.tail
        known = owner.named * size + len(tail)
        if owner.named < 0 or start > known:
            return
        for token in tokens[known - start :]:
            if token < 0:
                return
            tail.append(int(token))
            if len(tail) == size:
                owner.digest = chain_key(owner.digest, tail)
                self._prefixes.add(owner.digest, owner.pages[owner.named])
                tail.clear()
                owner.named += 1

    def match_prefix(self, tokens: Sequence[int]) -> int:
        return self.page_size * sum(1 for _ in self._prefixes.match(tokens))

    def adopt_prefix(self, rid: int, tokens: Sequence[int]) -> int:
        if rid in self._owners:
            raise AllocatorError(f"request {rid} already owns pages", "adopt a prefix before the first reserve()")
        found = list(self._prefixes.match(tokens))
        if not found:
            return 0
        owner = self._add_owner(rid)
        pages = [page for page, _ in found]
        for page in pages:
            if not self._refs[page]:
                if self._tag.pop(page, None) is None:
                    del self._cached[page]
                self._owned += 1
                self._held += self._fill[page]
            self._refs[page] += 1
        self._append_pages(owner, pages)
        owner.named, owner.digest = len(pages), found[-1][1]
        owner.room = owner.held = len(pages) * self.page_size
        return owner.held

    def drop_prefixes(self) -> None:
        for page in self._cached:
            self._free.append(page)
        self._cached.clear()
        self._prefixes.clear()
        for owner in self._owners.values():
            owner.named = -1

    def fork(self, rid: int, new: int) -> bool:
        """Needs no room now: the child's share of the last page is copied when it first reserves beyond it."""
        parent = self._owner(rid)
        if new in self._owners:
            raise AllocatorError(f"request {new} already owns pages", "fork into a request that is new")
        child = self._add_owner(new)
        pages = parent.pages[: -(-parent.held // self.page_size)]
        for page in pages:
            self._refs[page] += 1
        self._append_pages(child, pages)
        child.room = child.held = parent.held
        child.named, child.digest, child.tail = parent.named, parent.digest, list(parent.tail)
        return True

    # --- moving

    def take_ops(self) -> tuple[KVOp, ...]:
        if not self._ops:
            return ()
        ops, self._ops = tuple(self._ops), []
        return ops

    def _moves(self, most: int) -> dict[int, int]:
        """The highest pages in use, each to the lowest free one left, as long as that is lower; at most `most` of them."""
        used = sorted((p for p in range(self.num_pages) if self._refs[p] or p in self._cached), reverse=True)
        pairs = zip(used[:most], sorted(self._free), strict=False)
        return {old: new for old, new in pairs if new < old}

    def compact(self, budget: int) -> list[KVCopy]:
        """Any free page serves any request, so this never makes room; it lets the memory's end be given back."""
        size = self.page_size
        copies = [op for op in self._ops if isinstance(op, KVCopy)]
        self._ops = []
        moves = self._moves(budget // size)
        if not moves:
            return copies
        taken = set(moves.values())
        self._free = self._free_list(p for p in self._free if p not in taken)
        for old, new in moves.items():
            copies.append(KVCopy(old * size, new * size, size))
            self._refs[new], self._refs[old] = self._refs[old], 0
            self._fill[new] = self._fill[old]
            self._prefixes.move(old, new)
            self._release(old)
        self._cached = OrderedDict((moves.get(p, p), None) for p in self._cached)
        for owner in self._owners.values():
            owner.pages = [moves.get(p, p) for p in owner.pages]
            self._tables[owner.row, : len(owner.pages)] = owner.pages
        return copies

    # --- accounts

    def live(self) -> set[int]:
        return set(self._owners)

    def stats(self) -> AllocatorStats:
        size = self.page_size
        free = (len(self._free) + len(self._cached)) * size
        return AllocatorStats(
            capacity=self.capacity,
            reserved=self._owned * size,
            held=self._held,
            cached=len(self._cached) * size,
            free=free,
            retired=len(self._tag) * size,
            largest_free=free,
            pages_used=self._owned,
            live=len(self._owners),
        )

    def layout(self) -> list[tuple[int, int, int, int]]:
        owner_of = [FREE] * self.num_pages
        for page in self._cached:
            owner_of[page] = CACHED
        for page in self._tag:
            owner_of[page] = RETIRED
        for rid, owner in self._owners.items():
            for page in owner.pages:
                owner_of[page] = rid if self._refs[page] == 1 else SHARED
        size = self.page_size
        held = [0 if who in (FREE, RETIRED) else self._fill[p] for p, who in enumerate(owner_of)]
        return [(p * size, size, who, held[p]) for p, who in enumerate(owner_of)]

    def check(self) -> None:
        refs = [0] * self.num_pages
        for rid, owner in self._owners.items():
            for page in owner.pages:
                refs[page] += 1
            _require(len(set(owner.pages)) == len(owner.pages), f"request {rid} owns a page twice")
            _require(
                owner.held <= owner.room <= len(owner.pages) * self.page_size, f"request {rid}: held, room, pages disagree"
            )
            row = self._tables[owner.row]
            _require(row[: len(owner.pages)].tolist() == owner.pages and not row[len(owner.pages) :].any(), f"table of {rid}")
            for i, page in enumerate(owner.pages):
                _require(self._fill[page] >= min(self.page_size, owner.held - i * self.page_size), f"page {page} lost rows")
        _require(refs == self._refs, "reference counts differ from the page lists")
        states = [*self._free, *self._cached, *self._tag, *(p for p, n in enumerate(refs) if n)]
        _require(sorted(states) == list(range(self.num_pages)), "a page is leaked, or in two states")
        owned = [p for p, n in enumerate(refs) if n]
        _require(len(owned) == self._owned and sum(self._fill[p] for p in owned) == self._held, "owned or held is miscounted")
        _require(self._prefixes.consistent(), "prefix index and page keys differ")
        _require(all(self._fill[p] == self.page_size for p in self._prefixes.pages()), "a named page is not full")
        _require(all(p in self._prefixes for p in self._cached), "a cached page has no key")
        _require(len({o.row for o in self._owners.values()} | set(self._rows)) == len(self._tables), "table rows are leaked")


def _require(ok: bool, what: str) -> None:
    if not ok:
        raise AllocatorError(f"broken invariant: {what}", "this is a bug in the allocator, not in its use")
