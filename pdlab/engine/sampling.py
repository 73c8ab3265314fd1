"""Seeds on the host, sampling parameters on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pdlab.core.config import SamplingParams
from pdlab.core.plan import Plan, SamplingArrays
from pdlab.kernels.ops import SamplingBatch

if TYPE_CHECKING:
    import torch

_MASK = (1 << 63) - 1


def request_seed(params: SamplingParams, engine_seed: int, number: int) -> int:
    """The request's own seed, or one mixed (splitmix64) from the engine's seed and the request's number; 63 bits."""
    if params.seed is not None:
        return params.seed & _MASK
    z = (engine_seed * 0x9E3779B97F4A7C15 + (number + 1) * 0xBF58476D1CE4E5B9) & ((1 << 64) - 1)
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & ((1 << 64) - 1)
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & ((1 << 64) - 1)
    return (z ^ (z >> 31)) & _MASK


def sampling_batch(arrays: SamplingArrays, on_device: dict[str, torch.Tensor], seen: torch.Tensor | None) -> SamplingBatch:
    """The step's parameters; which stages are needed at all is read from the host's arrays, so nothing waits."""
    return SamplingBatch(
        **on_device,
        seen=seen,
        any_random=bool((arrays.temperature > 0).any()),
        any_filter=bool(((arrays.top_k > 0) | (arrays.top_p < 1) | (arrays.min_p > 0)).any()),
        num_logprobs=int(arrays.logprobs.max(initial=-1)),
    )


class SeenTokens:
    """Which tokens each row's prompt and output hold, as one mask [rows, vocabulary]; made when the first penalty needs it."""

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        self.rows, self.vocab_size, self.device = rows, vocab_size, device
        self.mask: torch.Tensor | None = None

    def admit(self, plan: Plan) -> None:
        """Starts the rows of newly admitted requests that have a penalty."""
        import torch

        for index, tokens in plan.seen:
            if self.mask is None:
                self.mask = torch.zeros((self.rows, self.vocab_size), dtype=torch.bool, device=self.device)
            row = self.mask[int(plan.rows[index])]
            row.zero_()
            row[torch.from_numpy(tokens).to(self.device, non_blocking=True)] = True

    def of(self, plan: Plan, sampled_rows: torch.Tensor) -> torch.Tensor | None:
        """bool[S, V] for the rows that sample, or None where no penalty acts."""
        if self.mask is None or not bool((plan.sampling.repetition_penalty != np.float32(1)).any()):
            return None
        return self.mask[sampled_rows]

    def add(self, sampled_rows: torch.Tensor, tokens: torch.Tensor) -> None:
        if self.mask is not None:
            self.mask[sampled_rows, tokens] = True

    def clear(self) -> None:
        self.mask = None
