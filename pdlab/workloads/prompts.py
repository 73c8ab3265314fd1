"""Prompts without a download: English from the standard library, and token ids made up from a seed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import overload

import numpy as np

from pdlab.core.errors import WorkloadError
from pdlab.engine.simulated import synthetic_tokens
from pdlab.workloads.workload import Item


@lru_cache(maxsize=1)
def library_text() -> str:
    """All of `pydoc_data.topics` in alphabetical order of topic: about 465,000 characters of English prose and grammar."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name].strip() for name in sorted(topics))


def passage(rng: np.random.Generator, characters: int) -> str:
    """A passage of about `characters` characters that begins at a word, from a random place of `library_text`."""
    text = library_text()
    if not 1 <= characters <= len(text) // 2:
        raise WorkloadError(f"characters={characters}", f"use 1 to {len(text) // 2}")
    start = text.index(" ", int(rng.integers(0, len(text) - characters - 200))) + 1
    return text[start : start + characters].rstrip()


def text_prompts(n: int, seed: int = 0, characters: tuple[int, int] = (80, 2000)) -> list[str]:
    """n passages whose lengths are spread evenly on a logarithmic scale between the two given."""
    lo, hi = characters
    if not 1 <= lo <= hi:
        raise WorkloadError(f"characters={characters}", "use (least, most) with 1 <= least <= most")
    rng = np.random.default_rng(seed)
    return [passage(rng, round(float(np.exp(rng.uniform(np.log(lo), np.log(hi)))))) for _ in range(n)]


class MadeUpPrompt(Sequence[int]):
    """Token ids that are computed when they are read, so a million waiting prompts need no memory.

    Token p of a piece with content id c is a hash of (c, p): prompts whose first pieces have equal ids share that prefix.
    """

    __slots__ = ("_ends", "_ids", "_len", "_vocab")

    def __init__(self, pieces: Sequence[tuple[int, int]], vocab_size: int) -> None:
        self._ids = np.array([content for content, _ in pieces], np.int64)
        self._ends = np.cumsum([tokens for _, tokens in pieces], dtype=np.int64)
        self._len = int(self._ends[-1]) if len(pieces) else 0
        self._vocab = vocab_size

    def __len__(self) -> int:
        return self._len

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            lo, hi, step = index.indices(self._len)
            return self.array(lo, max(lo, hi))[::step].tolist() if step > 0 else self.array(0, self._len)[index].tolist()
        at = index + self._len if index < 0 else index
        if not 0 <= at < self._len:
            raise IndexError(f"token {index} of {self._len}")
        return int(self.array(at, at + 1)[0])

    def array(self, lo: int, hi: int) -> np.ndarray:
        """i64[hi - lo]: tokens [lo, hi)."""
        position = np.arange(lo, hi, dtype=np.int64)
        piece = np.searchsorted(self._ends, position, side="right")
        start = np.concatenate(([0], self._ends[:-1]))
        return synthetic_tokens(self._ids[piece], position - start[piece], self._vocab)


def prompt_of(item: Item, number: int, vocab_size: int, seed: int = 0) -> str | Sequence[int]:
    """What item `number` of a workload says: its own prompt, or made-up tokens that begin with its shared pieces."""
    if item.prompt is not None:
        return item.prompt
    own = item.prompt_tokens - sum(tokens for _, tokens in item.pieces)
    # content ids of shared pieces are >= 0; those of one item alone are negative and differ by item and seed
    pieces = (*item.pieces, (-1 - number - (seed << 40), own)) if own else item.pieces
    return MadeUpPrompt(pieces, vocab_size)
