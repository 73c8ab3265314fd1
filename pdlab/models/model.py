"""One model: packed weights and the order in which it calls the operations of kernels.ops.

Both families run the same loop; they differ in what their weights hold (biases, norms) and in how positions enter: as a
rotary table, or as an embedding added at the bottom.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from pdlab.kernels.kv_view import KVView
from pdlab.kernels.ops import HeadWeights, LayerWeights, ModelOps, RopeTable, SampleResult, SamplingBatch
from pdlab.kernels.reference import ReferenceOps, project_logits
from pdlab.models.config import ModelConfig


@dataclass
class Weights:
    """Everything a model reads, packed as the operations want it."""

    embed: torch.Tensor  # [V, H]
    positions: torch.Tensor | None  # [max_context, H], GPT-2 style
    layers: list[LayerWeights]
    head: HeadWeights


def rope_table(config: ModelConfig, device: torch.device | str) -> RopeTable:
    """cos and sin of every position. Angles are computed in float64: float32 is off by 5e-4 rad at position 8192."""
    dim = config.head_dim
    freq = config.rope_theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if (s := config.rope_scaling) is not None:
        # full turns within the original context: many stay as trained, few are slowed by `factor`, blended between
        turns = s.original_max_position * freq / (2 * math.pi)
        keep = ((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)).clamp(0.0, 1.0)
        freq = freq * (keep + (1.0 - keep) / s.factor)
    angle = torch.arange(config.max_context, dtype=torch.float64)[:, None] * freq
    return RopeTable(angle.cos().float().to(device), angle.sin().float().to(device))


class Model:
    """A model ready to run. `ops` may be replaced (fused kernels) without touching anything else."""

    def __init__(self, config: ModelConfig, weights: Weights, ops: ModelOps | None = None) -> None:
        self.config = config
        self.weights = weights
        self.layers = weights.layers
        self.head = weights.head
        for w, following in zip(self.layers, [*(w.qkv for w in self.layers[1:]), self.head.proj], strict=True):
            w.following = following
        self.ops: ModelOps = ops or ReferenceOps()
        self.device = weights.embed.device
        self.dtype = weights.embed.dtype
        self.rope = rope_table(config, self.device) if weights.positions is None else None

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, view: KVView) -> torch.Tensor:
        """Residual stream [T, H] after the last layer of T new tokens; their K and V are written to the cache."""
        x = self.weights.embed[token_ids]
        if self.weights.positions is not None:
            x = x + self.weights.positions[positions]
        return self.through_layers(x, view)

    def through_layers(self, x: torch.Tensor, view: KVView) -> torch.Tensor:
        """The same from the embedded tokens x [T, H]."""
        stack = getattr(self.ops, "layer_stack", None)  # operations that may know better than one after the other
        if stack is not None and (done := stack(x, self.layers, self.rope, view)) is not None:
            return done
        for i, w in enumerate(self.layers):
            layer = view.layer(i)
            q = self.ops.norm_qkv_rope(x, w, self.rope, layer)
            x = self.ops.out_residual(self.ops.attention(q, layer), x, w)
            x = self.ops.down_residual(self.ops.norm_mlp_up(x, w), x, w)
        return x

    def sample(self, x: torch.Tensor, sampling: SamplingBatch) -> SampleResult:
        """Next tokens for the rows x [S, H] of forward's result; a row with non-finite logits gives token -1."""
        return self.ops.projection_sample(x, self.head, sampling)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Float32 logits [S, V], by the plain operations."""
        return project_logits(x, self.head)

    def new_kv(self, pages: int, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V memory for all layers, each [layers, pages, kv_heads, page_size, head_dim], zeroed."""
        c = self.config
        shape = (c.num_layers, pages, c.num_kv_heads, page_size, c.head_dim)
        return tuple(torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(2))  # type: ignore[return-value]

    def weight_bytes(self) -> int:
        """Bytes of all weights, a tied embedding counted once."""
        return sum(t.numel() * t.element_size() for t in self.tensors())

    def tensors(self) -> list[torch.Tensor]:
        """Every distinct weight tensor."""
        found: dict[int, torch.Tensor] = {}
        ahead: list[object] = [self.weights]  # no function that calls itself: its cell would keep all weights till a collection
        while ahead:
            item = ahead.pop()
            if isinstance(item, torch.Tensor):
                found[item.data_ptr()] = item
            elif isinstance(item, list):
                ahead.extend(item)
            elif hasattr(item, "__dataclass_fields__"):
                ahead.extend(vars(item).values())
        return list(found.values())
