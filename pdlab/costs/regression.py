"""Least squares that learn one observation at a time: what the estimators' weights are made of."""

from __future__ import annotations

from operator import mul
from typing import Any

import numpy as np

NOISE = 0.02  # relative spread of one step's time around its mean
DRIFT = 1e-7  # variance added to every weight at every observation
CLIP = 0.10  # relative surprise beyond which an observation counts less, or three times the usual one, once WARM were seen
WARM = 64
THIN_AFTER = 2048
MEMORY = 256  # observations over which the error is averaged
STRANGE, INSIST = 5.0, 6  # times longer than predicted is no step (it compiled a kernel), unless so many in a row say so


class Regression:
    """Seconds as a sum of features in seconds, by recursive Bayesian least squares on relative errors.

        seconds = weights · x + offsets[group]

    Prior mean `prior`, prior spread `spread`; every group has an offset of its own, in units of x[0], which begins at 0 and
    is as free as `offset_spread` says. A little process noise lets it follow a device that warms up; Huber's clip and the
    refusal of what is STRANGE keep one compilation or one collected garbage from teaching anything.
    """

    def __init__(self, prior: list[float], spread: list[float], groups: int = 0, offset_spread: float = 0.3) -> None:
        self.weights = list(prior)
        self.offsets = [0.0] * groups
        self.covariance = np.diag(np.square([*spread, *[offset_spread] * groups]))
        self.seen = 0
        self.error = 0.0  # mean relative error of predictions made before each observation, over about MEMORY of them
        self.thin = False  # three in four only count towards the error once THIN_AFTER were seen: a third of the time
        self._strange = 0  # observations in a row that were refused

    def predict(self, x: list[float], group: int = -1) -> float:
        seconds = sum(map(mul, self.weights, x))
        return seconds + self.offsets[group] * x[0] if group >= 0 else seconds

    def learn(self, x: list[float], seconds: float, group: int = -1) -> float | None:
        """By how much of the prediction the observation was longer, None if it was refused."""
        predicted = max(self.predict(x, group), x[0] * 1e-3)
        if seconds > STRANGE * predicted and self._strange < INSIST:
            self._strange += 1
            return None
        self._strange = 0 if seconds <= STRANGE * predicted else self._strange
        self.seen += 1
        self.error += (abs(predicted / seconds - 1) - self.error) / min(self.seen, MEMORY)
        surprise = seconds / predicted - 1
        if self.thin and self.seen > THIN_AFTER and self.seen % 4:
            return surprise
        # relative to the prediction, not to the time seen: else steps that noise made short would count more than long ones
        n = len(x)
        u = np.zeros(len(self.covariance))
        u[:n] = x
        if group >= 0:
            u[n + group] = x[0]
        u /= predicted
        spread = self.covariance @ u
        gain = spread / (NOISE**2 + float(u @ spread))
        self.covariance -= np.multiply.outer(gain, spread)
        np.einsum("ii->i", self.covariance)[:] += DRIFT  # the diagonal, as a view
        clip = max(CLIP, 3 * self.error)
        gain *= max(-clip, min(clip, surprise)) if self.seen > WARM else surprise
        self.weights = (np.array(self.weights) + gain[:n]).tolist()
        if self.offsets:
            self.offsets = (np.array(self.offsets) + gain[n:]).tolist()
        return surprise

    def state(self) -> dict[str, Any]:
        """What restore() takes. Of the covariance the variances only: how weights depend on each other is learned again."""
        variance = np.diag(self.covariance).round(12).tolist()
        return {
            "weights": list(self.weights), "offsets": list(self.offsets), "variance": variance, "seen": self.seen,
            "error": self.error,
        }  # fmt: skip

    def restore(self, state: dict[str, Any]) -> None:
        """ValueError, KeyError or TypeError, with nothing changed, where the state does not fit."""
        weights, offsets = ([float(w) for w in state[name]] for name in ("weights", "offsets"))
        variance = np.array(state["variance"], float)
        n, groups = len(self.weights), len(self.offsets)
        fits = (len(weights), len(offsets), variance.shape) == (n, groups, (n + groups,))
        if not fits or not np.isfinite([*weights, *offsets, *variance]).all():
            raise ValueError(
                f"{len(weights)} weights and {len(offsets)} offsets where {n} and {groups} finite ones are expected"
            )
        self.weights, self.offsets, self.covariance = weights, offsets, np.diag(variance)
        self.seen, self.error = int(state["seen"]), float(state["error"])
