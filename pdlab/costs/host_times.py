"""What a step costs the host, learned: planning and committing it, and handing it to the device.

A decode step in a CUDA graph is handed over at once. A step with prompts is launched kernel by kernel, some hundreds of
them, which takes a slow host longer than a fast device takes to run a short one: then launching is what the step takes.
"""

from __future__ import annotations

import copy
from typing import Any

from pdlab.core.plan import PlanShape
from pdlab.costs.regression import Regression

MOST_NEWS = 4.0  # times the usual: what a pause between two requests, which looks like slow host work, counts at most


class HostTimes:
    """Seconds by a step's shape. Each is a sum over: a step, a decode, a prompt token, a prompt chunk; steps of decodes alone
    and steps with prompts have weights of their own. Before any data: `between_s`, and no time for launching."""

    def __init__(self, between_s: float = 3e-4) -> None:
        prior, spread = [between_s / 1e-3, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]
        self._between = {mixed: Regression(prior, spread) for mixed in (False, True)}
        self._launch = {mixed: Regression([1e-3, 0.0, 0.0, 0.0], [20.0, 1.0, 1.0, 1.0]) for mixed in (False, True)}

    @staticmethod
    def _features(s: PlanShape) -> list[float]:
        return [1e-3, 1e-5 * s.decode_count, 1e-6 * s.prefill_tokens, 1e-4 * len(s.prefill)]

    def between(self, shape: PlanShape) -> float:
        """Planning and committing."""
        return max(0.0, self._between[bool(shape.prefill)].predict(self._features(shape)))

    def launch(self, shape: PlanShape) -> float:
        """From the beginning of handing the step over until the device has all of it."""
        return max(0.0, self._launch[bool(shape.prefill)].predict(self._features(shape)))

    def learn_between(self, shape: PlanShape, seconds: float) -> None:
        regression = self._between[bool(shape.prefill)]
        usual = regression.predict(self._features(shape))
        if seconds > 0:
            most = MOST_NEWS * max(usual, 1e-5) if regression.seen > 16 else seconds
            regression.learn(self._features(shape), min(seconds, most))

    def learn_launch(self, shape: PlanShape, seconds: float) -> None:
        if seconds > 0:
            self._launch[bool(shape.prefill)].learn(self._features(shape), seconds)

    def state(self) -> dict[str, Any]:
        return {
            f"{name}_{'mixed' if mixed else 'decode'}": regression.state()
            for name, kinds in (("between", self._between), ("launch", self._launch))
            for mixed, regression in kinds.items()
        }

    def restore(self, state: dict[str, Any]) -> None:
        """ValueError, KeyError or TypeError, with nothing changed, where the state does not fit."""
        between, launch = copy.deepcopy(self._between), copy.deepcopy(self._launch)
        for name, kinds in (("between", between), ("launch", launch)):
            for mixed, regression in kinds.items():
                regression.restore(state[f"{name}_{'mixed' if mixed else 'decode'}"])
        self._between, self._launch = between, launch
