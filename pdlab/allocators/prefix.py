"""Which page holds which tokens: full pages, found by a digest of everything up to their end.

The key of a page is a 128-bit BLAKE2b digest of its parent's key and its own token ids, so equal keys mean equal prefixes
(a false match would take about 2^64 pages) and a page can be found again after its parent was evicted and recomputed.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b


def chain_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Key of the page with these tokens after the page with key `parent` (b"" for the first page)."""
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


class PrefixIndex:
    """key <-> page, one to one. A page whose tokens another page already stands for stays nameless."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    def __contains__(self, page: int) -> bool:
        return page in self._key_of

    def add(self, key: bytes, page: int) -> None:
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def forget(self, page: int) -> None:
        if (key := self._key_of.pop(page, None)) is not None:
            del self._page_of[key]

    def move(self, old: int, new: int) -> None:
        """The page's content now lies in another page."""
        if (key := self._key_of.pop(old, None)) is not None:
            self._key_of[new] = key
            self._page_of[key] = new

    def clear(self) -> None:
        self._page_of.clear()
        self._key_of.clear()

    def match(self, tokens: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """(page, key) of each leading full page that memory holds; the last token is always left to compute."""
        key, size = b"", self.page_size
        for lo in range(0, len(tokens) - size, size) if self._page_of else ():
            key = chain_key(key, tokens[lo : lo + size])
            if (page := self._page_of.get(key)) is None:
                return
            yield page, key

    def consistent(self) -> bool:
        return {key: page for page, key in self._key_of.items()} == self._page_of

    def pages(self) -> list[int]:
        return list(self._key_of)
