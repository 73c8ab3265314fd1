"""Where weights come from: a source answers `take` with tensors on the device, in the model's dtype, or says what is wrong."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Protocol

import torch

from pdlab.models.config import ModelConfig

Shape = tuple[int, ...]


class WeightSource(Protocol):
    def take(self, names: Sequence[str], shapes: Sequence[Shape], transpose: bool = False) -> torch.Tensor:
        """The tensors of these Hugging Face names and shapes, checked, one below the other (packed along dimension 0).

        `transpose`: they are stored [in, out]; each is turned to [out, in] first.
        """
        ...


class RandomSource:
    """Seeded random weights, drawn on the device in the final dtype: an 8B shape never exists in float32.

    Each packed tensor has a generator of its own, keyed by its name and the seed, so the same model comes out whatever
    the order of calls (one device type; CPU and GPU draw different numbers). Linear weights have variance 1/in, those
    that write into the residual stream also 1/(2 layers), so logits have a standard deviation near 1.
    """

    def __init__(self, config: ModelConfig, device: torch.device | str, dtype: torch.dtype, seed: int) -> None:
        self.device = torch.device(device)
        self.dtype = dtype
        self.seed = seed
        self.residual_scale = (2 * config.num_layers) ** -0.5

    def take(self, names: Sequence[str], shapes: Sequence[Shape], transpose: bool = False) -> torch.Tensor:
        rows = sum(s[-1] if transpose else s[0] for s in shapes)
        columns = (shapes[0][0] if transpose else shapes[0][-1],) if len(shapes[0]) == 2 else ()
        out = torch.empty((rows, *columns), dtype=self.dtype, device=self.device)
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(names[0].encode()) + (self.seed << 32) % (1 << 62))
        if columns:
            residual = any(part in names[0] for part in ("o_proj", "down_proj", "c_proj"))
            return out.normal_(0.0, columns[0] ** -0.5 * (self.residual_scale if residual else 1.0), generator=generator)
        if names[0].endswith("bias"):
            return out.normal_(0.0, 0.02, generator=generator)
        return out.normal_(1.0, 0.1, generator=generator)
