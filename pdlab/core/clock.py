"""Time as the engine sees it: real seconds, or virtual ones that a cost model advances."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since the clock was made. `kind` is written into every trace row."""

    kind: str

    def now(self) -> float: ...

    def sleep_until(self, t: float) -> None:
        """Returns once `now() >= t` (at once if it is already)."""
        ...


class RealClock:
    kind = "real"

    def __init__(self) -> None:
        self._origin = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._origin

    def sleep_until(self, t: float) -> None:
        delay = t - self.now()
        if delay > 0:
            time.sleep(delay)


class VirtualClock:
    """Advances only when told to; never runs backwards."""

    kind = "virtual"

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def sleep_until(self, t: float) -> None:
        self._now = max(self._now, t)

    def advance(self, seconds: float) -> None:
        if not seconds >= 0:
            raise ValueError(f"a clock cannot advance by {seconds} s")
        self._now += seconds
