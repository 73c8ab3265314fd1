"""Variants timed in turns, of which a rival may fail in any."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from pdlab.hardware.timing import Timings, alternate

# What rivals say no with: SDPA where no kernel fits, CUDA and running out of memory (RuntimeError, as NotImplementedError is),
# FlashAttention's and FlashInfer's checks of shapes (AssertionError, ValueError), an interface of another version (TypeError)
REFUSALS = (AssertionError, RuntimeError, ValueError, TypeError)


def reason(error: Exception) -> str:
    """On one line, for a row that has no number."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def each_or_refused(
    names: Iterable[str], make: Callable[[str], Any], refused: Callable[[str, Exception], None]
) -> dict[str, Any]:
    """make(name) by name; `refused` hears of what fails, and may raise."""
    made = {}
    for name in names:
        try:
            made[name] = make(name)
        except REFUSALS as error:
            refused(name, error)
    return made


def in_turns(
    timers: dict[str, Callable[[], Timings]], rounds: int, pause_s: float, refused: Callable[[str, Exception], None]
) -> dict[str, Timings]:
    """As `alternate`, each round begun one further on, with a pause before each turn. `refused` as of each_or_refused: who
    fails once gets no further turn, and no time."""
    taken: dict[str, list[Timings]] = {name: [] for name in timers}

    def turn(name: str) -> None:
        if name in taken:
            time.sleep(pause_s)
            taken[name].append(timers[name]())

    def out(name: str, error: Exception) -> None:
        del taken[name]
        refused(name, error)

    for r in range(rounds):
        names = [*timers]
        each_or_refused(names[r % max(1, len(names)) :] + names[: r % max(1, len(names))], turn, out)
    return alternate({name: iter(several).__next__ for name, several in taken.items()}, rounds)
