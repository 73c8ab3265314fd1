"""Pages from one free list, shared by reference count, copied on write, found again by the tokens they hold.

    pages = floor(capacity / page_size)        slot = page * page_size + position % page_size

Writing. An owner may write positions below its `room`. A forked child starts with `room` at what it shares, so its first
reserve() beyond that copies the shared last page, unless everybody else has given it up. The parent goes on writing in
place: its new rows lie beyond what the child can see. So a page has at most one writer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from pdlab.allocators.interface import FREE, RETIRED, Allocator, AllocatorStats
from pdlab.allocators.pages import FreeList, Pages, require
from pdlab.allocators.prefix import chain_key
from pdlab.core.errors import AllocatorError, CapacityError
from pdlab.core.plan import KVCopy, KVOp


class _Owner:
    """What one request owns. Its first `named` pages are full of known tokens, whose key is `digest`; `tail` are the known
    tokens after those. `named` -1: what it holds is not to be shared."""

    __slots__ = ("digest", "held", "named", "pages", "room", "row", "tail")

    def __init__(self, row: int) -> None:
        self.row = row  # of the tables
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
        self.page_size = self.granule = page_size
        self.num_pages = capacity // page_size
        if self.num_pages < 1:
            raise CapacityError(
                f"{capacity} slots hold no page of {page_size} tokens",
                "give the KV cache more memory or use a smaller page_size",
            )
        self.capacity = self.num_pages * page_size
        self.prefix_reuse = prefix_reuse
        self.pages = Pages(self.num_pages, page_size, self.free_list(range(self.num_pages)))
        self._owners: dict[int, _Owner] = {}
        self._ops: list[KVOp] = []
        self._tables = np.zeros((16, 16), np.int32)  # one row a request; unused entries 0
        self._rows = list(range(15, -1, -1))  # unused rows of _tables

    def free_list(self, pages: Iterable[int]) -> FreeList:
        """What holds free pages: a stack, low pages on top."""
        return sorted(pages, reverse=True)

    def submitted(self, step: int) -> None:
        self.pages.submitted = step

    def retire(self, step: int) -> None:
        self.pages.retire(step)

    # --- room

    def reserve(self, rid: int, n_tokens: int, longest: int = 0) -> bool:
        owner = self._owners.get(rid)
        if owner is not None and n_tokens <= owner.room:
            return True
        return self._grow(rid, owner, n_tokens)

    def admit(self, rid: int, n_tokens: int, longest: int = 0, spare: int = 0) -> bool:
        owner = self._owners.get(rid)
        need = -(-n_tokens // self.page_size) - (0 if owner is None else len(owner.pages))
        if need + -(-spare // self.page_size) > self.pages.available():
            self.refusals += 1
            return False
        if owner is None:
            self._add_owner(rid)
        return True

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
        if max(need, 0) + copy > self.pages.available():
            self.refusals += 1
            return False
        if owner is None:
            owner = self._add_owner(rid)
        if behind:
            self._make_last_page_writable(owner, copy)
        if need > 0:
            self._append_pages(owner, [self.pages.take() for _ in range(need)])
        owner.room = len(owner.pages) * self.page_size
        return True

    def _may_take_over(self, owner: _Owner) -> bool:
        """Whether the last page can be written in place: nobody else owns it, and no step in flight reads rows beyond ours."""
        page, rows = owner.pages[-1], owner.held - (len(owner.pages) - 1) * self.page_size
        return self.pages.refs[page] == 1 and (self.pages.fill[page] == rows or not self.pages.in_flight)

    def _make_last_page_writable(self, owner: _Owner, copy: bool) -> None:
        old, index = owner.pages[-1], len(owner.pages) - 1
        if not copy:  # what others wrote beyond our tokens will be overwritten, so the page loses its name
            self.pages.prefixes.forget(old)
            return
        new, rows = self.pages.take(), owner.held - index * self.page_size
        self._ops.append(KVCopy(old * self.page_size, new * self.page_size, rows))
        owner.pages[index] = self._tables[owner.row, index] = new
        self.pages.write(new, rows)
        self.pages.drop(old)

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
            self.pages.drop(page)

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

    def room(self, rid: int) -> int:
        return self._owner(rid).room

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
                self.pages.write(owner.pages[i], min(size, end - i * size))
            owner.held = end
        if self.prefix_reuse:
            self._name_pages(owner, tokens, start)

    def appended(self, rids: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> None:
        owners, size, fill, reuse = self._owners, self.page_size, self.pages.fill, self.prefix_reuse
        for rid, token, position in zip(rids, tokens, positions, strict=True):
            owner, row = owners.get(rid), position % size
            ends_page = reuse and row + 1 == size
            if owner is None or position != owner.held or position >= owner.room or ends_page:
                self.written(rid, (token,), position)
                continue
            page = owner.pages[position // size]
            if row >= fill[page]:
                fill[page] = row + 1
                self.pages.held += 1
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
                self.pages.prefixes.add(owner.digest, owner.pages[owner.named])
                tail.clear()
                owner.named += 1

    def match_prefix(self, tokens: Sequence[int]) -> int:
        return self.page_size * sum(1 for _ in self.pages.prefixes.match(tokens))

    def adopt_prefix(self, rid: int, tokens: Sequence[int]) -> int:
        if rid in self._owners:
            raise AllocatorError(f"request {rid} already owns pages", "adopt a prefix before the first reserve()")
        found = list(self.pages.prefixes.match(tokens))
        if not found:
            return 0
        owner = self._add_owner(rid)
        self._share(owner, [page for page, _ in found])
        owner.named, owner.digest = len(found), found[-1][1]
        owner.room = owner.held = len(found) * self.page_size
        return owner.held

    def _share(self, owner: _Owner, pages: list[int]) -> None:
        for page in pages:
            self.pages.share(page)
        self._append_pages(owner, pages)

    def drop_prefixes(self) -> None:
        self.pages.drop_prefixes()
        for owner in self._owners.values():
            owner.named = -1

    def fork(self, rid: int, new: int) -> bool:
        """Needs no room now: the child's share of the last page is copied when it first reserves beyond it."""
        parent = self._owner(rid)
        if new in self._owners:
            raise AllocatorError(f"request {new} already owns pages", "fork into a request that is new")
        child = self._add_owner(new)
        self._share(child, parent.pages[: -(-parent.held // self.page_size)])
        child.room = child.held = parent.held
        child.named, child.digest, child.tail = parent.named, parent.digest, list(parent.tail)
        return True

    # --- moving

    def take_ops(self) -> tuple[KVOp, ...]:
        if not self._ops:
            return ()
        ops, self._ops = tuple(self._ops), []
        return ops

    def moves(self, most: int) -> dict[int, int]:
        """The highest pages in use, each to the lowest free one left, as long as that is lower; at most `most` of them."""
        pairs = zip(self.pages.used()[::-1][:most], sorted(self.pages.free), strict=False)
        return {old: new for old, new in pairs if new < old}

    def compact(self, budget: int, room: int = 0) -> list[KVCopy]:
        """Any free page serves any request, so this never makes room; it lets the memory's end be given back."""
        size = self.page_size
        copies = [op for op in self._ops if isinstance(op, KVCopy)]
        self._ops = []
        if not (moves := self.moves(budget // size)):
            return copies
        taken = set(moves.values())
        self.pages.move(moves, self.free_list(p for p in self.pages.free if p not in taken))
        for owner in self._owners.values():
            owner.pages = [moves.get(p, p) for p in owner.pages]
            self._tables[owner.row, : len(owner.pages)] = owner.pages
        return copies + [KVCopy(old * size, new * size, size) for old, new in moves.items()]

    # --- accounts

    def live(self) -> set[int]:
        return set(self._owners)

    def stats(self) -> AllocatorStats:
        size, pages = self.page_size, self.pages
        free = pages.available() * size
        return AllocatorStats(
            capacity=self.capacity,
            reserved=pages.owned * size,
            held=pages.held,
            cached=len(pages.cached) * size,
            free=free,
            retired=pages.waiting() * size,
            largest_free=free,
            pages_used=pages.owned,
            live=len(self._owners),
        )

    def layout(self) -> list[tuple[int, int, int, int]]:
        size, fill = self.page_size, self.pages.fill
        who = self.pages.owner_of((rid, owner.pages) for rid, owner in self._owners.items())
        return [(p * size, size, w, 0 if w in (FREE, RETIRED) else fill[p]) for p, w in enumerate(who)]

    def check(self) -> None:
        size = self.page_size
        self.pages.check(owner.pages for owner in self._owners.values())
        for rid, owner in self._owners.items():
            n = len(owner.pages)
            require(len(set(owner.pages)) == n, f"request {rid} owns a page twice")
            require(owner.held <= owner.room <= n * size, f"request {rid}: held, room and pages disagree")
            table = self._tables[owner.row]
            require(table[:n].tolist() == owner.pages and not table[n:].any(), f"the page table of request {rid} is stale")
            rows = (self.pages.fill[page] - min(size, owner.held - i * size) for i, page in enumerate(owner.pages))
            require(all(more >= 0 for more in rows), f"request {rid} holds rows that its pages do not")
        require(len({o.row for o in self._owners.values()} | set(self._rows)) == len(self._tables), "table rows are leaked")
