"""A workload: requests with arrival times, in the order in which they arrive."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from numbers import Integral, Real

from pdlab.core.config import SamplingParams
from pdlab.core.errors import WorkloadError

_NUMBER, _WHOLE = (int, float, Real), (int, Integral)  # the last of each also knows NumPy's, and takes longer


def _is_number(x: object) -> bool:
    return isinstance(x, _NUMBER)


def _is_whole(x: object) -> bool:
    return isinstance(x, _WHOLE) and not isinstance(x, bool)


def _fit(pieces: object, prompt_tokens: int) -> bool:
    """Whether these are pieces of a prompt of so many tokens."""
    try:
        return sum(n for _, n in pieces) <= prompt_tokens and all(  # type: ignore[attr-defined]
            _is_whole(content) and _is_whole(n) and n >= 1
            for content, n in pieces  # type: ignore[attr-defined]
        )
    except (TypeError, ValueError):  # no pairs of numbers
        return False


@dataclass(frozen=True, slots=True)
class Item:
    """One request to come.

    `prompt` is text or token ids; None means "any `prompt_tokens` tokens", which `prompts.prompt_of` makes up from a
    seed. `max_tokens` counts unless `params` says otherwise. `kind` is the class whose output lengths an estimator learns.
    """

    arrival_s: float
    prompt: str | list[int] | None = None
    prompt_tokens: int = 0
    max_tokens: int = 64
    params: SamplingParams | None = None
    priority: int = 0
    kind: str = ""
    ttft_deadline_s: float | None = None
    per_token_deadline_s: float | None = None
    pieces: tuple[tuple[int, int], ...] = ()  # made-up prompts begin with these (content id, tokens); equal ids, equal tokens

    def __post_init__(self) -> None:
        """What the engine's door checks of a request (its prompt, parameters, priority, deadlines) is left to it."""
        if not (_is_number(self.arrival_s) and 0 <= self.arrival_s < math.inf):
            raise WorkloadError(f"an item arrives at {self.arrival_s!r} s", "use a finite time, 0 or later")
        if not _is_whole(self.prompt_tokens) or (self.prompt is None and self.prompt_tokens < 1):
            what = "an item has no prompt and" if self.prompt is None else "an item has"
            raise WorkloadError(f"{what} prompt_tokens={self.prompt_tokens!r}", "give a prompt, or a whole number from 1 on")
        if self.pieces and not _fit(self.pieces, self.prompt_tokens):
            what = f"pieces={self.pieces} in a prompt of {self.prompt_tokens}"
            raise WorkloadError(what, "make them fit: (content id, tokens) each, whole numbers, from 1 token on")

    def sampling(self) -> SamplingParams:
        """`params`, or greedy sampling of exactly `max_tokens` tokens (a made-up prompt has no end of its own)."""
        return self.params or _greedy(self.max_tokens, self.prompt is None)


@lru_cache(maxsize=4096)
def _greedy(max_tokens: int, ignore_eos: bool) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos)


@dataclass(frozen=True)
class Workload:
    """Items sorted by arrival, and how they came about: `name` goes into measurement tables, `seed` reproduces them."""

    name: str
    items: tuple[Item, ...]
    seed: int | None = None
    clients: int | None = None  # closed loop: that many clients; each sends the next item when its last one has ended

    def __init__(self, name: str, items: Iterable[Item], seed: int | None = None, clients: int | None = None) -> None:
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "items", tuple(sorted(items, key=lambda i: i.arrival_s)))
        object.__setattr__(self, "seed", seed)
        object.__setattr__(self, "clients", clients)
        if clients is not None and clients < 1:
            raise WorkloadError(f"clients={clients}", "use 1 or more, or None for an open loop")

    def __iter__(self) -> Iterator[Item]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)

    @property
    def duration_s(self) -> float:
        """The last arrival."""
        return self.items[-1].arrival_s if self.items else 0.0

    @property
    def requests_per_s(self) -> float:
        return len(self.items) / self.duration_s if self.duration_s > 0 else math.inf

    def scaled(self, factor: float) -> Workload:
        """The same requests, arriving `factor` times as fast."""
        if not (math.isfinite(factor) and factor > 0):
            raise WorkloadError(f"factor={factor}", "use a finite factor above 0")
        items = (replace(i, arrival_s=i.arrival_s / factor) for i in self.items)
        return Workload(self.name, items, self.seed, self.clients)

    def head(self, n: int) -> Workload:
        """The first n items."""
        return Workload(self.name, self.items[:n], self.seed, self.clients)
