"""What a step costs the host, learned: planning and committing it, and handing it to the device.

A decode step in a CUDA graph is handed over at once. A step with prompts is launched kernel by kernel, some hundreds of
them, which takes a slow host longer than a fast device takes to run a short one: then launching is what the step takes. How
long launching takes hardly depends on what is in the step; it wanders, so what is kept is the middle of the latest. Planning
and committing add up between steps, so there it is the mean (3 to 13 % above the middle under load on an H200's host), of which
nothing counts for more than MOST middles: a host that had nothing to do says nothing of planning.
"""

from __future__ import annotations

import math
from typing import Any

from pdlab.core.plan import PlanShape

GAIN, FIRST = 0.02, 0.5  # how far an observation moves the middle, relative to it: later, and at the beginning
MOST = 3  # middles


class _Middle:
    """A running median: each observation moves it by a small step towards itself, by however much it is off; and the mean
    beside it."""

    def __init__(self, value: float) -> None:
        self.value, self.mean, self.seen = value, value, 0

    def learn(self, seconds: float) -> None:
        self.seen += 1
        if self.seen == 1:
            self.value = self.mean = seconds
            return
        step = max(GAIN, FIRST / self.seen) * max(self.value, 1e-6)
        self.value += max(-step, min(step, seconds - self.value))
        self.mean += max(GAIN / 4, 1 / self.seen) * (min(seconds, MOST * self.value) - self.mean)


class HostTimes:
    """Seconds by a step's shape: planning and committing grow with its decodes, launching depends on whether it holds prompts.
    Before any data: `between_s`, and no time for launching."""

    ROWS = 32  # decodes up to which planning and committing are told apart, then twice as many, and so on

    def __init__(self, between_s: float = 3e-4) -> None:
        self.between_s = between_s
        self._between: dict[tuple[bool, int], _Middle] = {}
        self._launch = {mixed: _Middle(0.0) for mixed in (False, True)}

    def _group(self, shape: PlanShape) -> tuple[bool, int]:
        return bool(shape.prefill), max(0, math.ceil(math.log2(max(1, shape.decode_count) / self.ROWS)))

    def between(self, shape: PlanShape) -> float:
        """Planning and committing: of the nearest group of its kind that was seen."""
        mixed, size = self._group(shape)
        seen = [(abs(s - size), s) for m, s in self._between if m is mixed]
        return self._between[mixed, min(seen)[1]].mean if seen else self.between_s

    def launch(self, shape: PlanShape) -> float:
        """From the beginning of handing the step over until the device has all of it."""
        return self._launch[bool(shape.prefill)].value

    def learn_between(self, shape: PlanShape, seconds: float) -> None:
        if seconds > 0:
            self._between.setdefault(self._group(shape), _Middle(self.between_s)).learn(seconds)

    def learn_launch(self, shape: PlanShape, seconds: float) -> None:
        if seconds > 0:
            self._launch[bool(shape.prefill)].learn(seconds)

    def state(self) -> dict[str, Any]:
        between = [[mixed, size, m.value, m.seen, m.mean] for (mixed, size), m in sorted(self._between.items())]
        return {"between": between, "launch": [[mixed, m.value, m.seen] for mixed, m in self._launch.items()]}

    def restore(self, state: dict[str, Any]) -> None:
        """ValueError, KeyError or TypeError, with nothing changed, where the state does not fit."""
        between = {(bool(mixed), int(size)): _middle(*middle) for mixed, size, *middle in state["between"]}
        launch = {bool(mixed): _middle(value, seen) for mixed, value, seen in state["launch"]}
        if launch.keys() != self._launch.keys():
            raise ValueError("launch times of steps with prompts and without are expected")
        self._between, self._launch = between, launch


def _middle(value: Any, seen: Any, mean: Any = None) -> _Middle:
    m = _Middle(float(value))
    m.seen = int(seen)
    m.mean = m.value if mean is None else float(mean)  # older ones had none
    if not (math.isfinite(m.value) and math.isfinite(m.mean)):
        raise ValueError(f"{value} is no time")
    return m
