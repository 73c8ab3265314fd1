"""Where weights come from: a source answers `take` with tensors on the device, in the model's dtype, or says what is wrong."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Protocol

import torch

from pdlab.core.errors import WeightsError
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
        # 32 bits that both name and seed change: the CPU generator ignores the upper half of a seed
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(f"{self.seed} {names[0]}".encode()))
        if columns:
            residual = any(part in names[0] for part in ("o_proj", "down_proj", "c_proj"))
            return out.normal_(0.0, columns[0] ** -0.5 * (self.residual_scale if residual else 1.0), generator=generator)
        if names[0].endswith("bias"):
            return out.normal_(0.0, 0.02, generator=generator)
        return out.normal_(1.0, 0.1, generator=generator)


class Checkpoint(Protocol):
    """Named tensors in files, as they were written (Hugging Face names and orientation)."""

    def names(self) -> set[str]: ...

    def read(self, name: str) -> torch.Tensor:
        """The tensor on the CPU in its stored dtype; never written to."""
        ...

    def where(self, name: str) -> str:
        """The file that holds it, or where it should be, for error messages."""
        ...


# tensors that checkpoints carry although they are not weights: masks and rotary frequencies of old exports
_NOT_WEIGHTS = (".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq")


class CheckedSource:
    """A checkpoint as a source: names, shapes, dtypes and values are checked, and nothing in it is left unused."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, device: torch.device | str, dtype: torch.dtype) -> None:
        self.checkpoint = checkpoint
        self.config = config
        self.device = torch.device(device)
        self.dtype = dtype
        self._names = checkpoint.names()
        self._taken: set[str] = set()

    def _find(self, name: str) -> str:
        """The stored name: as asked for, or without the `model.` or `transformer.` that a bare base model leaves out."""
        for candidate in (name, name.partition(".")[2]):
            if candidate in self._names:
                self._taken.add(candidate)
                return candidate
        raise WeightsError(
            f"{self.checkpoint.where(name)} has no tensor {name!r}",
            f"{self.config.name} needs it; {len(self._names)} tensors are there, the download may be incomplete",
        )

    def _read(self, name: str, shape: Shape) -> torch.Tensor:
        tensor = self.checkpoint.read(name)
        if tuple(tensor.shape) != shape:
            raise WeightsError(
                f"tensor {name!r} in {self.checkpoint.where(name)} has shape {list(tensor.shape)}",
                f"{self.config.name} needs {list(shape)}: config and weights belong to different models",
            )
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            raise WeightsError(
                f"tensor {name!r} in {self.checkpoint.where(name)} is {tensor.dtype}",
                "use weights in float32, float16 or bfloat16, not quantized ones",
            )
        return tensor

    def take(self, names: Sequence[str], shapes: Sequence[Shape], transpose: bool = False) -> torch.Tensor:
        stored = [self._find(name) for name in names]
        parts = [self._read(name, shape) for name, shape in zip(stored, shapes, strict=True)]
        if transpose:
            parts = [part.T for part in parts]
        out = torch.empty((sum(len(p) for p in parts), *parts[0].shape[1:]), dtype=self.dtype, device=self.device)
        row = 0
        for part in parts:
            out[row : row + len(part)].copy_(part)
            row += len(part)
        low, high = torch.aminmax(out)  # both are NaN if one element is
        if not (low.isfinite() and high.isfinite()):
            self._explain(stored, parts)
        return out

    def _explain(self, names: list[str], parts: list[torch.Tensor]) -> None:
        for name, part in zip(names, parts, strict=True):
            where = f"tensor {name!r} in {self.checkpoint.where(name)}"
            if bad := int((~part.isfinite()).sum()):
                raise WeightsError(
                    f"{where} holds NaN or infinity in {bad:,} of {part.numel():,} elements",
                    "every weight must be finite: the file is damaged, fetch it again",
                )
            if not part.to(self.dtype).isfinite().all():
                raise WeightsError(
                    f"{where} reaches {float(part.abs().max()):g}, more than {self.dtype} can hold",
                    "load this model in bfloat16 or float32",
                )

    def check_all_used(self) -> None:
        """Raises WeightsError for weights that this configuration would silently ignore."""
        ignored = {"lm_head.weight", "output.weight"} if self.config.tie_embeddings else set()
        left = sorted(n for n in self._names - self._taken - ignored if not n.endswith(_NOT_WEIGHTS))
        if left:
            raise WeightsError(
                f"{self.checkpoint.where(left[0])} holds {left[0]!r}, which {self.config.name}'s config has no place for",
                f"{len(left)} such tensors; the config (layers, biases, norms) must describe these weights",
            )
