"""The operations a model is made of, and the tensors they take.

A model calls nothing else, so a fused kernel replaces one operation and changes no model. `reference.ReferenceOps` is
the plain-PyTorch version of each: slow, readable, and the oracle for every other.

Sizes: T new tokens in the step, S rows that sample, H hidden, N query heads, K KV heads, D head size, F FFN, V vocabulary.
Linear weights are stored [out, in], as in torch.nn.Linear.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from pdlab.kernels.kv_view import KVView


@dataclass
class NormWeights:
    """`bias` None: RMSNorm; otherwise LayerNorm."""

    weight: torch.Tensor  # [H]
    bias: torch.Tensor | None
    eps: float


@dataclass
class LayerWeights:
    """One layer, packed once by `prepare_weights`. Absent biases and norms are None."""

    attn_norm: NormWeights
    qkv: torch.Tensor  # [(N + 2K) D, H]: q rows, then k rows, then v rows
    qkv_bias: torch.Tensor | None  # [(N + 2K) D]
    q_norm: NormWeights | None  # weight [D]; before the rotary embedding
    k_norm: NormWeights | None
    out: torch.Tensor  # [H, N D]
    out_bias: torch.Tensor | None
    mlp_norm: NormWeights
    up: torch.Tensor  # SwiGLU: [2F, H], gate rows then up rows; GELU: [F, H]
    up_bias: torch.Tensor | None
    down: torch.Tensor  # [H, F]
    down_bias: torch.Tensor | None
    following: torch.Tensor | None = None  # the weights read after `down`: the next layer's qkv, or the output projection


@dataclass
class HeadWeights:
    """Final norm and output projection."""

    norm: NormWeights
    proj: torch.Tensor  # [V, H]; the embedding itself where tied


@dataclass
class RopeTable:
    """cos and sin by position, float32 [positions, D / 2]; rotate-half convention (pairs d, d + D/2)."""

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass
class SamplingBatch:
    """core.plan.SamplingArrays on the device, plus the seen-token mask where a penalty needs it.

    The host knows which stages are needed (`any_*`), so an all-greedy batch pays for none of them.
    """

    temperature: torch.Tensor  # f32[S]
    top_k: torch.Tensor  # i32[S]
    top_p: torch.Tensor  # f32[S]
    min_p: torch.Tensor  # f32[S]
    repetition_penalty: torch.Tensor  # f32[S]
    seed: torch.Tensor  # i64[S]
    position: torch.Tensor  # i64[S]
    seen: torch.Tensor | None  # bool[S, V]
    any_random: bool
    any_filter: bool  # top-k, top-p or min-p somewhere
    num_logprobs: int  # -1: none asked for; otherwise the largest count asked for


@dataclass
class SampleResult:
    """`tokens` i64[S]; log-probabilities of the model's own distribution where asked for, else None."""

    tokens: torch.Tensor
    logprob: torch.Tensor | None = None  # f32[S]
    top_ids: torch.Tensor | None = None  # i64[S, n]
    top_logprobs: torch.Tensor | None = None  # f32[S, n]


class ModelOps(Protocol):
    """Contract 5. `x` is the residual stream [T, H]; new tensors are returned, inputs are left alone except the KV cache."""

    def norm_qkv_rope(self, x: torch.Tensor, w: LayerWeights, rope: RopeTable | None, view: KVView) -> torch.Tensor:
        """Norm, packed projection, q/k norm, rotary embedding; writes K and V of the new tokens at view.slots of the
        layer's cache (view.k, view.v: [pages, K, page_size, D]) and returns q [T, N, D]."""
        ...

    def attention(self, q: torch.Tensor, view: KVView) -> torch.Tensor:
        """Causal attention of each request's new tokens over its cache, scale 1/sqrt(D); [T, N, D] -> [T, N, D]."""
        ...

    def out_residual(self, attn: torch.Tensor, x: torch.Tensor, w: LayerWeights) -> torch.Tensor:
        """x + attn [T, N·D] @ out^T + bias."""
        ...

    def norm_mlp_up(self, x: torch.Tensor, w: LayerWeights) -> torch.Tensor:
        """silu(gate) · up for SwiGLU, tanh-GELU(up) otherwise, of the normed x; [T, F]."""
        ...

    def down_residual(self, u: torch.Tensor, x: torch.Tensor, w: LayerWeights) -> torch.Tensor:
        """x + u @ down^T + bias."""
        ...

    def projection_sample(self, x: torch.Tensor, head: HeadWeights, sampling: SamplingBatch) -> SampleResult:
        """Final norm, output projection and sampling of x [S, H]."""
        ...
