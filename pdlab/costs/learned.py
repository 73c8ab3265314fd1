"""An estimator that starts as a roofline and fits itself to this machine, step by step.

A step's seconds are a sum over features that are themselves seconds of an ideal device, so every weight is "how many
times slower than ideal" and 1 is the guess before any data:

    w     one pass over the weights at the read bandwidth: the floor of any step, launches included
    t_i   rows of the matrix products between two knots, at the matrix rate; the guess is the slope of max(w, rows), which
          is 0 under the ridge and 1 above it, so the roofline's corner can move and round off where the device rounds it
    kv    K and V that the decodes read          pairs   (query, key) pairs of prefill attention, at the matrix rate
    head  output projection of the rows that sample       ctx  K and V that prefill chunks read back
    calls, rows  10 us for every prefill chunk, 1 us for every decode      1 ms  for what costs the same in any step: guess 0

Two sets of weights, for steps of decodes alone (CUDA graphs) and steps with prefill. Each is a recursive Bayesian least
squares on relative errors: prior mean the roofline, prior spread a factor, a little process noise so that it follows a
device that warms up, and Huber's clip so that one compilation or one collected garbage teaches nothing.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from itertools import pairwise
from operator import mul
from typing import TYPE_CHECKING, Any

import numpy as np

from pdlab.core.plan import PlanShape
from pdlab.core.request import Request
from pdlab.core.trace import TraceRow
from pdlab.costs.estimator import RooflineEstimator
from pdlab.models.config import ModelConfig

if TYPE_CHECKING:
    from pdlab.costs.roofline import Ceilings

KNOTS = (0, 16, 32, 64, 128, 256, 512, 1024, 2048)  # rows; the last segment is open
NOISE = 0.02  # relative spread of one step's time around its mean
DRIFT = 1e-7  # variance added to every weight at every observation
CLIP = 0.10  # relative surprise beyond which an observation counts less, or three times the usual one, once WARM were seen
WARM = 64
THIN_AFTER = 2048
MEMORY = 256  # observations over which the error that error() reports is averaged


class _Regime:
    """One weighted least squares; `weights` are dimensionless, `predict` is their product with the features."""

    def __init__(self, prior: list[float], spread: list[float]) -> None:
        self.weights = list(prior)
        self.covariance = np.diag(np.square(spread))
        self.seen = 0
        self.error = 0.0  # mean relative error of predictions made before each observation, over about MEMORY of them

    def predict(self, x: list[float]) -> float:
        return sum(map(mul, self.weights, x))

    def learn(self, x: list[float], seconds: float) -> None:
        predicted = max(self.predict(x), x[0] * 1e-3)
        self.seen += 1
        self.error += (abs(predicted / seconds - 1) - self.error) / min(self.seen, MEMORY)
        if self.seen > THIN_AFTER and self.seen % 4:
            return  # well known by now: three in four only count towards the error, which spares the host
        # relative to the prediction, not to the time seen: else steps that noise made short would count more than long ones
        surprise = seconds / predicted - 1
        u = np.array(x) / predicted
        gain = self.covariance @ u
        gain /= NOISE**2 + float(u @ gain)
        self.covariance -= np.outer(gain, u @ self.covariance)
        self.covariance.flat[:: len(x) + 1] += DRIFT
        clip = max(CLIP, 3 * self.error)
        if self.seen > WARM and abs(surprise) > clip:
            surprise *= clip / abs(surprise)
        self.weights = (np.array(self.weights) + gain * surprise).tolist()

    def state(self) -> dict[str, Any]:
        covariance = self.covariance.round(12).tolist()
        return {"weights": list(self.weights), "covariance": covariance, "seen": self.seen, "error": self.error}

    def restore(self, state: dict[str, Any]) -> None:
        weights, covariance = [float(w) for w in state["weights"]], np.array(state["covariance"], float)
        n = len(self.weights)
        if (
            len(weights) != n
            or covariance.shape != (n, n)
            or not (np.isfinite(weights).all() and np.isfinite(covariance).all())
        ):
            raise ValueError(f"{len(weights)} weights where {n} finite ones are expected")
        self.weights, self.covariance = weights, covariance
        self.seen, self.error = int(state["seen"]), float(state["error"])


class LearnedEstimator(RooflineEstimator):
    """Prices a step by features fitted to the steps it has seen; `error()` says how well it has done lately."""

    name = "learned"

    def __init__(self, model: ModelConfig, ceilings: Ceilings, itemsize: int, chunk: int = 2048) -> None:
        super().__init__(model, ceilings, itemsize, chunk)
        self._scale()
        corner = [max(self._weights_s, self._row_s * k) for k in (*KNOTS, 2 * KNOTS[-1])]
        ends = (*KNOTS[1:], 2 * KNOTS[-1])
        slopes = [(b - a) / (self._row_s * (hi - lo)) for a, b, lo, hi in zip(corner, corner[1:], KNOTS, ends)]
        prior = [1.0, *slopes, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0]
        spread = [2.0, *[2.0] * len(slopes), 1.0, 2.0, 2.0, 1.0, 30.0, 30.0, 10.0]
        self._decodes, self._mixed = _Regime(prior, spread), _Regime(prior, spread)
        self.host_s = 0.0  # host work of a step, as seen lately
        self._host_seen, self._last_end = 0, 0.0
        self._priced_at = 0

    def _scale(self) -> None:
        """Ideal seconds of one pass over the weights, one row, one cached token, one pair, one sampled row."""
        from pdlab.costs import formulas

        model, rate, bandwidth = self.model, self.ceilings.matmul_flops_per_s, self.ceilings.read_bytes_per_s
        row = formulas.step_flops(model, PlanShape(decode_count=1))
        self._weights_s = formulas.weights_read_bytes(model, self.itemsize) / bandwidth
        self._row_s = (row.total - row.attention) / rate
        self._kv_s = model.kv_bytes_per_token(self.itemsize) / bandwidth
        self._pair_s = 4 * model.q_size * model.num_layers / rate
        self._head_s = 2 * model.hidden_size * model.vocab_size / rate

    def _features(self, s: PlanShape) -> list[float]:
        chunk_tokens, context, pairs = 0, 0, 0
        for n, c in s.prefill:
            chunk_tokens += n
            context += c
            pairs += n * c + n * (n + 1) // 2
        rows = chunk_tokens + s.decode_count + s.pad_tokens
        x = [self._weights_s]
        for lo, hi in pairwise(KNOTS):
            x.append(self._row_s * (min(rows, hi) - lo) if rows > lo else 0.0)
        x.append(self._row_s * (rows - KNOTS[-1]) if rows > KNOTS[-1] else 0.0)
        x += (self._kv_s * s.decode_kv_tokens, self._pair_s * pairs, self._head_s * s.sampled, self._kv_s * context)
        x += (1e-5 * len(s.prefill), 1e-6 * s.decode_count, 1e-3)
        return x

    def step_seconds(self, shape: PlanShape) -> float:
        if not shape.new_tokens:
            return 0.0
        x = self._features(shape)
        seconds = (self._mixed if shape.prefill else self._decodes).predict(x)
        return max(seconds, 0.3 * self._weights_s)  # an extrapolation may not be faster than any memory there is

    def remaining_if(self, request: Request, more: float) -> float:
        if self.seen > 1.1 * self._priced_at + 16:  # much was learned since the remembered prices were made
            self._priced_at = self.seen
            self.forget_prices()
        return super().remaining_if(request, more)

    def observe(self, row: TraceRow, shape: PlanShape | None = None) -> None:
        """Learns from one step. Without a shape, the row's prefill tokens are taken for one chunk."""
        if shape is None:
            prefill = ((row.prefill_tokens, row.prefill_context),) if row.prefill_tokens else ()
            sampled = row.decode_count + len(prefill)
            shape = PlanShape(prefill, row.decode_count, row.kv_tokens, row.pad_tokens, sampled)
        # with nothing in flight at submission, all between two steps is the host's; else only what it says of itself
        alone = row.t_submit >= self._last_end
        self._learn_host(row.t_start - self._last_end if alone and self._last_end > 0 else row.host_s)
        self._last_end = row.t_end
        self.learn(shape, row.t_end - row.t_start)

    def _learn_host(self, seconds: float) -> None:
        """A running mean that a pause between two requests, which looks like slow host work, moves by little."""
        self._host_seen += 1
        most = 2 * self.host_s if self._host_seen > 16 else math.inf
        self.host_s += (min(seconds, most) - self.host_s) / min(self._host_seen, MEMORY)

    def learn(self, shape: PlanShape, seconds: float) -> None:
        """Learns that a step of this shape took `seconds` on the device. Times that are not positive are ignored."""
        if seconds > 0 and np.isfinite(seconds) and shape.new_tokens:
            (self._mixed if shape.prefill else self._decodes).learn(self._features(shape), seconds)

    def error(self) -> dict[str, float]:
        """Mean relative error, in percent, of the latest predictions before each step: decode, mixed; NaN with no data."""
        return {
            name: 100 * regime.error if regime.seen else float("nan")
            for name, regime in (("decode", self._decodes), ("mixed", self._mixed))
        }

    @property
    def seen(self) -> int:
        """Steps it has learned from."""
        return self._decodes.seen + self._mixed.seen

    def state(self) -> dict[str, Any]:
        regimes = {"decode": self._decodes.state(), "mixed": self._mixed.state()}
        ceilings = dataclasses.asdict(self.ceilings)  # the weights are in units of these
        return {**super().state(), "itemsize": self.itemsize, "host_s": self.host_s, "ceilings": ceilings, "regimes": regimes}

    def restore(self, state: dict[str, Any]) -> None:
        from pdlab.costs.roofline import Ceilings

        if (state["model"], state["itemsize"]) != (self.model.name, self.itemsize):
            raise ValueError(f"it was saved for {state['model']} with elements of {state['itemsize']} bytes")
        decodes, mixed = copy.copy(self._decodes), copy.copy(self._mixed)
        decodes.restore(state["regimes"]["decode"])
        mixed.restore(state["regimes"]["mixed"])
        ceilings, host_s = Ceilings(**state["ceilings"]), float(state["host_s"])
        self._decodes, self._mixed, self.ceilings, self.host_s = decodes, mixed, ceilings, host_s
        self._scale()
        self.forget_prices()
        super().restore(state)
