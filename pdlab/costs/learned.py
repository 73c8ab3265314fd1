"""An estimator that starts as a roofline and fits itself to this machine, step by step.

A step's seconds are a sum over features that are themselves seconds of an ideal device, so every weight is "how many
times slower than ideal" and 1 is the guess before any data:

    w     one pass over the weights at the read bandwidth: the floor of any step, launches included
    t_i   rows of the matrix products between two knots, at the matrix rate; the guess is the slope of max(w, rows), which
          is 0 under the ridge and 1 above it, so the roofline's corner can move and round off where the device rounds it
    kv    K and V that the decodes read          pairs   (query, key) pairs of prefill attention, at the matrix rate
    head  output projection of the rows that sample       ctx  K and V that prefill chunks read back
    calls, rows  10 us for every prefill chunk, 1 us for every decode      1 ms  for what costs the same in any step: guess 0

Two sets of weights (regression.py), for steps of decodes alone and steps with prefill. Kernels are chosen and padded by the
number of rows, so a step's time jumps where a sum of features is smooth: each group of row counts has an offset of its own.
Where steps run in CUDA graphs (`padded`), a group's bound is what its steps are filled up to: rows that fill up take as long
as any others, so the bound is the number of rows. A step with prompts takes no less than launching it takes the host
(host_times.py), and one that had to wait for its own launches says nothing of the device.

What a shape does not say (how lengths lie on the line that decode attention cuts among programs: 4 to 5 % of a step) hardly
changes from one step to the next. So the price of the step that comes next follows by how much the latest of its kind were off
(RECENT); a lasting price, of a prompt that waits or of a simulated step, does not.
"""

from __future__ import annotations

import copy
import dataclasses
from bisect import bisect_left
from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from pdlab.core.plan import PlanShape
from pdlab.core.request import Request
from pdlab.core.trace import TraceRow
from pdlab.costs.estimator import RooflineEstimator
from pdlab.costs.host_times import HostTimes
from pdlab.costs.refit import fit
from pdlab.costs.regression import Regression
from pdlab.models.config import ModelConfig

if TYPE_CHECKING:
    from pdlab.costs.roofline import Ceilings

KNOTS = (0, 16, 32, 64, 128, 256, 512, 1024, 2048)  # rows; the last segment is open
GROUPS = (1, 2, 4, *range(8, 257, 8), *range(288, 1025, 32))  # rows up to which kernels see the same batch; the last is open
MIXED_GROUPS = (16, 32, 64, *range(128, 2049, 128))  # the same of steps with prompts
RECENT = {False: 0.5, True: 0.1}  # how far the next price moves towards a step's own error: decodes alone, with prompts
MOST_RECENT = 0.15  # the most of an error that counts there
LAUNCH_SLACK = 1.5e-3  # a step that ends within so many seconds of its last launch is taken to have waited for it


class LearnedEstimator(RooflineEstimator):
    """Prices a step by features fitted to the steps it has seen; `error()` says how well it has done lately."""

    name = "learned"

    def __init__(
        self, model: ModelConfig, ceilings: Ceilings, itemsize: int, chunk: int = 2048, *, padded: bool = False
    ) -> None:
        super().__init__(model, ceilings, itemsize, chunk)
        self.padded = padded
        self.kept: list[tuple[PlanShape, float]] | None = None  # a list: what is learned from is kept there, for `refit`
        self._scale()
        untaught = self.untaught()
        self._decodes, self._mixed = untaught[False], untaught[True]
        self._recent = {False: 0.0, True: 0.0}  # relative errors of the latest lasting prices
        self.host = HostTimes()
        self._last_end = 0.0
        self._priced_at = 0

    def untaught(self) -> dict[bool, Regression]:
        """The guesses before any data, and the room around them: of decodes alone (False) and of steps with prompts (True)."""
        corner = [max(self._weights_s, self._row_s * k) for k in (*KNOTS, 2 * KNOTS[-1])]
        ends = (*KNOTS[1:], 2 * KNOTS[-1])
        slopes = [(b - a) / (self._row_s * (hi - lo)) for a, b, lo, hi in zip(corner, corner[1:], KNOTS, ends)]
        prior = [1.0, *slopes, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0]
        # how far each weight may be from its guess: little, where a few dozen steps could mistake one cause for another
        decodes = [1.0, *[0.3] * len(slopes), 0.3, 1.0, 0.3, 0.3, 1.0, 3.0, 0.5]
        mixed = [1.0, *[0.5] * len(slopes), 0.5, 0.3, 0.5, 2.0, 10.0, 10.0, 2.0]
        return {
            False: Regression(prior, decodes, len(GROUPS) + 1, 0.5),
            True: Regression(prior, mixed, len(MIXED_GROUPS) + 1, 0.3),
        }

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
        if self.padded:
            groups = MIXED_GROUPS if s.prefill else GROUPS
            rows = groups[bisect_left(groups, rows)] if rows <= groups[-1] else rows
        x = [self._weights_s]
        for lo, hi in pairwise(KNOTS):
            x.append(self._row_s * (min(rows, hi) - lo) if rows > lo else 0.0)
        x.append(self._row_s * (rows - KNOTS[-1]) if rows > KNOTS[-1] else 0.0)
        x += (self._kv_s * s.decode_kv_tokens, self._pair_s * pairs, self._head_s * s.sampled, self._kv_s * context)
        x += (1e-5 * len(s.prefill), 1e-6 * s.decode_count, 1e-3)
        return x

    def _device(self, s: PlanShape) -> tuple[Regression, int]:
        """Which weights and which group a step belongs to."""
        if s.prefill:
            return self._mixed, bisect_left(MIXED_GROUPS, s.new_tokens)
        return self._decodes, bisect_left(GROUPS, s.decode_count + s.pad_tokens)

    def device_seconds(self, shape: PlanShape) -> float:
        """What the device needs when it never waits for a launch."""
        if not shape.new_tokens:
            return 0.0
        regression, group = self._device(shape)
        seconds = regression.predict(self._features(shape), group)
        return max(seconds, 0.3 * self._weights_s)  # an extrapolation may not be faster than any memory there is

    def step_seconds(self, shape: PlanShape) -> float:
        return self._no_less_than_launches(shape, self.device_seconds(shape) * (1 + self._recent[bool(shape.prefill)]))

    def lasting_seconds(self, shape: PlanShape) -> float:
        return self._no_less_than_launches(shape, self.device_seconds(shape))

    def _no_less_than_launches(self, shape: PlanShape, device: float) -> float:
        return max(device, self.host.launch(shape)) if shape.prefill else device

    def remaining_if(self, request: Request, more: float) -> float:
        if self.seen > 1.1 * self._priced_at + 16:  # much was learned since the remembered prices were made
            self._priced_at = self.seen
            self.forget_prices()
        return super().remaining_if(request, more)

    def observe(self, row: TraceRow, shape: PlanShape | None = None, launch_s: float = 0.0) -> None:
        """Learns from one step. Without a shape, the row's prefill tokens are taken for one chunk."""
        if shape is None:
            prefill = ((row.prefill_tokens, row.prefill_context),) if row.prefill_tokens else ()
            sampled = row.decode_count + len(prefill)
            shape = PlanShape(prefill, row.decode_count, row.kv_tokens, row.pad_tokens, sampled)
        # with nothing in flight at submission, all between two steps is the host's; else only what it says of itself
        alone = row.t_submit >= self._last_end > 0
        self.host.learn_between(shape, row.t_start - self._last_end if alone else row.host_s)
        self.host.learn_launch(shape, launch_s)
        self._last_end = row.t_end
        if not (shape.prefill and launch_s > 0 and row.t_end <= row.t_submit + launch_s + LAUNCH_SLACK):
            self.learn(shape, row.t_end - row.t_start)

    def learn(self, shape: PlanShape, seconds: float) -> None:
        """Learns that a step of this shape took `seconds` on the device. Times that are not positive are ignored."""
        if seconds > 0 and np.isfinite(seconds) and shape.new_tokens:
            if self.kept is not None:
                self.kept.append((shape, seconds))
            regression, group = self._device(shape)
            surprise = regression.learn(self._features(shape), seconds, group)
            if surprise is not None:
                kind = bool(shape.prefill)
                error = max(-MOST_RECENT, min(MOST_RECENT, surprise))
                self._recent[kind] += RECENT[kind] * (error - self._recent[kind])

    def spare_the_host(self) -> None:
        """Learns from one step in four once it knows much: for a simulator, whose device has no news for its policies."""
        self._decodes.thin = self._mixed.thin = True

    def refit(self, samples: Iterable[tuple[PlanShape, float]]) -> None:
        """Forgets what was learned of the device, and fits to these steps and seconds at once (costs.refit)."""
        rows: dict[bool, list[np.ndarray]] = {False: [], True: []}
        for shape, seconds in samples:
            if seconds > 0 and np.isfinite(seconds) and shape.new_tokens:
                rows[bool(shape.prefill)].append(self._row(shape) / seconds)
        fitted = self.untaught()
        for mixed, regression in fitted.items():
            if rows[mixed]:
                fit(regression, np.array(rows[mixed]))
        self._decodes, self._mixed, self._recent = fitted[False], fitted[True], dict.fromkeys(fitted, 0.0)
        self.forget_prices()

    def _row(self, shape: PlanShape) -> np.ndarray:
        """The features of a step, and its group's offset among those of all groups."""
        regression, group = self._device(shape)
        x = self._features(shape)
        row = np.zeros(len(x) + len(regression.offsets))
        row[: len(x)], row[len(x) + group] = x, x[0]
        return row

    def error(self) -> dict[str, float]:
        """Mean relative error, in percent, of the latest lasting prices before each step: decode, mixed; NaN with no data."""
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
        host = self.host.state()
        own = {"itemsize": self.itemsize, "padded": self.padded, "host": host, "ceilings": ceilings, "regimes": regimes}
        return {**super().state(), **own}

    def restore(self, state: dict[str, Any]) -> None:
        from pdlab.costs.roofline import Ceilings

        if (state["model"], state["itemsize"]) != (self.model.name, self.itemsize):
            raise ValueError(f"it was saved for {state['model']} with elements of {state['itemsize']} bytes")
        decodes, mixed, host = copy.copy(self._decodes), copy.copy(self._mixed), HostTimes()
        decodes.restore(state["regimes"]["decode"])
        mixed.restore(state["regimes"]["mixed"])
        host.restore(state["host"])
        ceilings = Ceilings(**state["ceilings"])
        rates = (ceilings.read_bytes_per_s, ceilings.copy_bytes_per_s, ceilings.matmul_flops_per_s)
        if not all(np.isfinite(rate) and rate > 0 for rate in rates):
            raise ValueError(f"its ceilings are {rates}")
        super().restore(state)  # the last that may refuse
        self._decodes, self._mixed, self.ceilings, self.host = decodes, mixed, ceilings, host
        self.padded = bool(state.get("padded", False))  # older ones were learned of steps with prompts that were not
        self._recent = {False: 0.0, True: 0.0}
        self._scale()
        self.forget_prices()
