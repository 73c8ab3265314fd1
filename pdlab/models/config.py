"""The shape of a model, in one frozen record that formulas, executors and loaders share. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RopeScaling:
    """llama3 frequency scaling (Llama 3.1 release notes; `rope_scaling` of type llama3 in config.json)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True)
class ModelConfig:
    """Sizes in elements. `family` is "llama" (RMSNorm, rotary, SwiGLU) or "gpt2" (LayerNorm, learned positions, GELU)."""

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

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """K and V of one token over all layers: 2 · layers · KV heads · head_dim · itemsize."""
        return 2 * self.num_layers * self.kv_size * itemsize

    def to_dict(self) -> dict[str, Any]:
        from dataclasses import asdict

        return asdict(self)
