"""What a step will take and what a request has left, in seconds.

`RooflineEstimator` needs no data: counted FLOPs and bytes over measured or published ceilings. `LearnedEstimator`
(costs.learned) starts there and fits itself to the machine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdlab.core.config import EngineConfig
from pdlab.core.errors import ConfigError, MeasurementError
from pdlab.core.plan import PlanShape
from pdlab.core.request import Request
from pdlab.core.trace import TraceRow
from pdlab.costs.formulas import step_bytes, step_flops
from pdlab.costs.interface import Estimator
from pdlab.costs.lengths import OutputLengths
from pdlab.models.config import ModelConfig

if TYPE_CHECKING:
    from pdlab.costs.roofline import Ceilings

_BUCKET = 64  # tokens: prefill prices are remembered by length rounded up to this


class RooflineEstimator(Estimator):
    """Prices a step by its roofline: a lower bound on real time, right about which of two steps is longer."""

    name = "roofline"

    def __init__(self, model: ModelConfig, ceilings: Ceilings, itemsize: int, chunk: int = 2048) -> None:
        self.model, self.ceilings, self.itemsize, self.chunk = model, ceilings, itemsize, chunk
        self.lengths = OutputLengths()
        self._prices: dict[int, float] = {}
        self._decode: tuple[float, float] | None = None

    def step_seconds(self, shape: PlanShape) -> float:
        # roofline.step_time(...).seconds without the rest of it: this is asked in every step that the host plans
        flops, moved = step_flops(self.model, shape).total, step_bytes(self.model, shape, self.itemsize).total
        return max(flops / self.ceilings.matmul_flops_per_s, moved / self.ceilings.read_bytes_per_s)

    def lasting_seconds(self, shape: PlanShape) -> float:
        """What such a step takes at any time: `step_seconds` may follow what the steps just before took."""
        return self.step_seconds(shape)

    def prefill_seconds(self, tokens: int) -> float:
        """Seconds to prefill `tokens` alone from nothing, rounded up to a multiple of 64 tokens; remembered."""
        bucket = -(-tokens // _BUCKET)
        if bucket <= 0:
            return 0.0
        if bucket not in self._prices:
            total, done, n = 0.0, 0, bucket * _BUCKET
            while done < n:
                new = min(self.chunk, n - done)
                total += self.lasting_seconds(PlanShape(prefill=((new, done),), sampled=int(done + new == n)))
                done += new
            self._prices[bucket] = total
        return self._prices[bucket]

    def decode_seconds(self, tokens: float, context: float) -> float:
        """Seconds for `tokens` decode steps of one request alone that starts with `context` tokens cached."""
        if self._decode is None:
            near = self.lasting_seconds(PlanShape(decode_count=1, decode_kv_tokens=1, sampled=1))
            far = self.lasting_seconds(PlanShape(decode_count=1, decode_kv_tokens=4097, sampled=1))
            self._decode = near, (far - near) / 4096
        base, slope = self._decode
        return tokens * (base + slope * (context + tokens / 2))

    def forget_prices(self) -> None:
        """Prices remembered by prefill_seconds and decode_seconds are asked for again."""
        self._prices.clear()
        self._decode = None

    def remaining(self, request: Request) -> float:
        return self.remaining_if(request, self.lengths.remaining(request.kind, len(request.output_token_ids)))

    def remaining_if(self, request: Request, more: float) -> float:
        seconds = 0.0
        if request.num_computed < request.prompt_len or not request.output_token_ids:
            seconds = max(0.0, self.prefill_seconds(request.num_tokens) - self.prefill_seconds(request.num_computed))
        return seconds + self.decode_seconds(more, request.num_tokens)

    def observe(self, row: TraceRow, shape: PlanShape | None = None, launch_s: float = 0.0) -> None:
        return None

    def finished(self, request: Request) -> None:
        if request.output_token_ids:
            self.lengths.add(request.kind, len(request.output_token_ids))

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.state(), sort_keys=True, indent=1) + "\n", encoding="utf-8")

    def load(self, path: Path) -> None:
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
            self.restore(state)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            raise MeasurementError(f"{path} is not a saved {self.name} estimator ({e})", "save() writes one") from e

    def state(self) -> dict[str, Any]:
        """What save() writes."""
        return {"estimator": self.name, "model": self.model.name, "lengths": self.lengths.to_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        """Takes what state() gave; ValueError, KeyError or TypeError, with nothing changed, where it does not fit."""
        if state["estimator"] != self.name:
            raise ValueError(f"it holds a {state['estimator']} estimator")
        lengths = {str(kind): [int(n) for n in seen] for kind, seen in state["lengths"].items()}
        self.lengths.update(lengths)


def make_estimator(
    config: EngineConfig, model_config: ModelConfig, ceilings: Ceilings, itemsize: int, *, padded: bool = False
) -> Estimator:
    """The estimator that `config.estimator` names. `padded`: steps with prompts run in graphs, see costs.learned."""
    if config.estimator == "roofline":
        return RooflineEstimator(model_config, ceilings, itemsize, config.max_batch_tokens)
    if config.estimator == "learned":
        from pdlab.costs.learned import LearnedEstimator

        return LearnedEstimator(model_config, ceilings, itemsize, config.max_batch_tokens, padded=padded)
    raise ConfigError(f"estimator={config.estimator!r} is not built", "choose roofline or learned")
