"""How long an answer will be: quantiles by class of request, learned as requests end.

Output length is unknown when a request arrives, so a scheduler must guess. A class is `Request.kind`. Each class keeps
the lengths of its last requests; what is expected of one that has already produced g tokens is a quantile of the
lengths above g. `max_tokens` is deliberately not used: in a replayed trace it *is* the answer's length, and a policy
that looked at it would be an oracle without saying so.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from typing import Any

PRIOR_TOKENS = 128  # what is expected before any request of any class has ended


class _Window:
    """The last `size` lengths, kept sorted beside their order of arrival. Insertion costs O(size) memory moves."""

    def __init__(self, size: int) -> None:
        self.recent: deque[int] = deque(maxlen=size)
        self.ordered: list[int] = []

    def add(self, length: int) -> None:
        if len(self.recent) == self.recent.maxlen:
            oldest = self.recent[0]
            del self.ordered[bisect_right(self.ordered, oldest) - 1]
        self.recent.append(length)
        insort(self.ordered, length)

    def quantile_above(self, generated: int, q: float) -> float | None:
        """The q-quantile of the lengths above `generated`; None where there are none."""
        lo = bisect_right(self.ordered, generated)
        n = len(self.ordered) - lo
        return float(self.ordered[lo + min(n - 1, int(q * n))]) if n else None


class OutputLengths:
    """Expected remaining output tokens of a request, by its class."""

    def __init__(self, quantile: float = 0.5, window: int = 1024, least: int = 8) -> None:
        self.quantile, self.window, self.least = quantile, window, least
        self.version = 0  # changes when an answer may change by much, so that callers can cache keys
        self._by_kind: dict[str, _Window] = {}
        self._all = _Window(window)

    def add(self, kind: str, length: int) -> None:
        self._by_kind.setdefault(kind, _Window(self.window)).add(length)
        self._all.add(length)
        n = len(self._by_kind[kind].recent)
        if n & (n - 1) == 0 or n == self.window:
            self.version += 1

    def remaining(self, kind: str, generated: int) -> float:
        """Tokens still to come, at least 1. Longer than everything seen so far: as much again as was generated."""
        window = self._by_kind.get(kind)
        if window is None or len(window.recent) < self.least:
            window = self._all
        total = window.quantile_above(generated, self.quantile)
        if total is None:
            total = 2.0 * generated if window.recent else float(max(PRIOR_TOKENS, 2 * generated))
        return max(1.0, total - generated)

    def to_dict(self) -> dict[str, list[int]]:
        return {kind: list(w.recent) for kind, w in self._by_kind.items()}

    def update(self, saved: dict[str, Any]) -> None:
        """Adds what `to_dict` gave."""
        for kind, lengths in saved.items():
            for length in lengths:
                self.add(str(kind), int(length))
