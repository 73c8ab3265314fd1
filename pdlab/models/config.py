"""The shape of a model, in one frozen record that formulas, executors and loaders share. No torch here."""

from __future__ import annotations

import math
from dataclasses import dataclass

MOST = (1 << 31) - 1  # of any size: kernels count in 32 bits


def _check(name: str, value: object, ok: bool, right: str) -> None:
    if not ok:
        raise ValueError(f"{name} is {value!r}; {right}")


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0 and math.isfinite(value)


def _whole(value: object, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= MOST


@dataclass(frozen=True)
class RopeScaling:
    """llama3 frequency scaling (Llama 3.1 release notes; `rope_scaling` of type llama3 in config.json)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def __post_init__(self) -> None:
        _check(
            "original_max_position", self.original_max_position, _whole(self.original_max_position), "use a number of tokens"
        )
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            _check(name, getattr(self, name), _positive(getattr(self, name)), "use a finite number above 0")
        _check("high_freq_factor", self.high_freq_factor, self.high_freq_factor > self.low_freq_factor, "use more than the low")


@dataclass(frozen=True)
class ModelConfig:
    """Sizes in elements. `family` is "llama" (RMSNorm, rotary, SwiGLU) or "gpt2" (LayerNorm, learned positions, GELU).

    ValueError for sizes that no model has; whoever reads them from a file says which file.
    """

    name: str
    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    max_context: int
    norm_eps: float = 1e-5
    tie_embeddings: bool = True
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head of q and k before the rotary embedding (Qwen3)
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        for name in (
            "vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "ffn_size", "max_context"
        ):  # fmt: skip
            _check(name, getattr(self, name), _whole(getattr(self, name)), "use a whole number, 1 or more")
        _check("norm_eps", self.norm_eps, _positive(self.norm_eps), "use a finite number above 0")
        _check("rope_theta", self.rope_theta, _positive(self.rope_theta), "use a finite number above 0")
        known = [t for t in (self.bos_token_id, self.pad_token_id, *self.eos_token_ids) if t is not None]
        _check("special tokens", known, all(_whole(t, -1) for t in known), "use token ids")
        _check("num_heads", self.num_heads, self.num_heads % self.num_kv_heads == 0, f"use a multiple of {self.num_kv_heads}")
        if self.family == "gpt2":
            _check("hidden_size", self.hidden_size, self.hidden_size == self.q_size, f"use heads x head size, {self.q_size}")
        else:
            _check("head_dim", self.head_dim, self.head_dim % 2 == 0, "use an even size: rotary embedding turns pairs")

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """K and V of one token over all layers: 2 · layers · KV heads · head_dim · itemsize."""
        return 2 * self.num_layers * self.kv_size * itemsize
