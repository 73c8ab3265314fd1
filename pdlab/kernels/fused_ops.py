"""The operations of a model by fused kernels: one launch each for decode batches, cuBLAS with fused neighbours for prompts.

Up to MAX_ROWS new tokens a product reads its weights in the time that bandwidth allows, so what surrounds it (norm, rotary
embedding, cache write, activation, residual) rides along in its kernel. Beyond, products belong to cuBLAS and its tensor
core pipelines, and what surrounds them takes one pass a row.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from pdlab.kernels.dispatched_ops import DispatchedOps
from pdlab.kernels.filtered_sample import filtered_sample
from pdlab.kernels.kv_view import KVView
from pdlab.kernels.norm_product import GELU, NOTHING, SWIGLU, norm_product
from pdlab.kernels.norm_qkv_rope import norm_qkv_rope
from pdlab.kernels.ops import HeadWeights, LayerWeights, NormWeights, RopeTable, SampleResult, SamplingBatch
from pdlab.kernels.product_tiles import MAX_ROWS, ProductTile, RingTile, product_rule, product_tile, ring_tile, rows_ring_tile
from pdlab.kernels.products import Following, Scaled, Workspace
from pdlab.kernels.projection_sample import GREEDY, LOGITS, MAX_SAMPLED, RANDOM, Race, project
from pdlab.kernels.reference_sampling import sample_from_logits
from pdlab.kernels.residual_product import residual_product
from pdlab.kernels.row_kernels import norm_rows, rope_rows, silu_product


class FusedOps(DispatchedOps):
    """Holds the workspaces of its kernels, so steps must not overlap on two streams."""

    fused = True  # who else works beside these operations may use kernels too

    def __init__(
        self,
        *args: Any,
        pdl: bool = True,
        ring: bool = True,
        prefetch: bool = True,
        scale: bool = True,
        measured: bool = True,
    ) -> None:
        """The techniques one by one, each where the device has it; to change one later set the attribute before the first step.

        `pdl`: programmatic dependent launch. `ring`: single rows by a ring of weights in shared memory. `prefetch`: weights of
        the next product asked into L2, with `pdl` only. `scale`: several rows leave the kernel that makes them half-way through
        the norm that follows. `measured`: tiles from the device's table, else by the rule.
        """
        super().__init__(*args)
        self.pdl, self.ring = pdl and self.tuning.capability >= (9, 0), ring and self.tuning.capability == (9, 0)
        self.prefetch, self.scale, self.measured = prefetch, scale, measured
        self.ring_rows = self.ring
        self.workspace, self.race = Workspace(self.device), Race(self.device)
        self._scaled: tuple[torch.Tensor, NormWeights, Scaled] | None = None  # the last x that was made, and what stands for it
        self._tiles: dict[tuple[str, int, int, int], ProductTile] = {}

    def tile(self, op: str, weight: torch.Tensor, batch: int) -> ProductTile:
        key = (op, *weight.shape, batch)
        if key not in self._tiles:
            choose = product_tile if self.measured else product_rule
            tile = choose(self.tuning, op, weight.shape[0], weight.shape[1], batch)
            self._tiles[key] = replace(tile, pdl=tile.pdl and self.pdl)
        return self._tiles[key]

    def ring_tile(self, op: str, weight: torch.Tensor, tokens: int, bias: torch.Tensor | None) -> RingTile | None:
        """How a ring of weights does this product, or None where it does not: one row, 16 bits, no bias."""
        outputs, k = weight.shape
        if tokens != 1 or not self.ring or bias is not None or weight.element_size() != 2 or k % 128:
            return None
        tile = ring_tile(self.tuning if self.measured else None, op, outputs, k)
        return tile and replace(tile, pdl=self.pdl)

    def rows_ring(self, op: str, weight: torch.Tensor, tokens: int, *biases: torch.Tensor | None) -> RingTile | None:
        """The same for 2 to MAX_ROWS rows."""
        outputs, k = weight.shape
        fits = self.ring and self.ring_rows and 1 < tokens <= MAX_ROWS and weight.element_size() == 2 and k % 64 == 0
        if not fits or any(b is not None for b in biases):
            return None
        tile = rows_ring_tile(self.tuning if self.measured else None, op, outputs, k, tokens)
        return tile and replace(tile, pdl=self.pdl)

    @property
    def rows(self) -> Any:
        from pdlab.kernels import ring_rows

        return ring_rows

    @property
    def rings(self) -> Any:
        """The kernels of Hopper alone, imported where they run."""
        from pdlab.kernels import ring_kernels

        return ring_kernels

    def _following(self, weight: torch.Tensor | None, *, gated: bool = False) -> Following | None:
        """`gated`: its tiles read gates and values side by side."""
        if weight is None or not self.prefetch:
            return None
        return Following(weight, weight.numel() // 2 if gated else 0)

    def _behind(self, x: torch.Tensor, norm: NormWeights) -> tuple[torch.Tensor, Scaled | None]:
        """x as a ring wants it: half-way through the norm, or behind it."""
        if self._scaled is not None and self._scaled[0] is x and self._scaled[1] is norm:
            return x, self._scaled[2]
        return norm_rows(x, norm, pdl=self.pdl), None

    def _normed(self, x: torch.Tensor, norm: NormWeights, tile: ProductTile) -> tuple[torch.Tensor, Scaled | bool]:
        """x as the product's kernel wants it, and whether it has been through the norm already, or half the way."""
        if self._scaled is not None and self._scaled[0] is x and self._scaled[1] is norm:
            return x, self._scaled[2]
        return (x, False) if tile.norm_inside else (norm_rows(x, norm, pdl=tile.pdl), True)

    def norm_qkv_rope(self, x: torch.Tensor, w: LayerWeights, rope: RopeTable | None, view: KVView) -> torch.Tensor:
        if len(x) > MAX_ROWS:
            return rope_rows(F.linear(norm_rows(x, w.attn_norm), w.qkv, w.qkv_bias), w, rope, view)
        ring = None if w.attn_norm.bias is not None else self.ring_tile("norm_qkv_rope", w.qkv, len(x), w.qkv_bias)
        if ring is not None and w.q_norm is not None:
            packed = self.rings.ring_norm_product(x, w.attn_norm, w.qkv, NOTHING, ring, self._following(w.out))
            return rope_rows(packed, w, rope, view, pdl=ring.pdl)
        if ring is not None and rope is not None and view.k.shape[3] % 8 == 0:
            return self.rings.ring_norm_qkv_rope(x, w, rope, view, ring, self._following(w.out))
        rows = self.rows_ring("norm_qkv_rope", w.qkv, len(x), w.qkv_bias, w.attn_norm.bias)
        if rows is not None and rope is not None and w.q_norm is None and view.k.shape[3] in (64, 128):
            y, half = self._behind(x, w.attn_norm)
            more = {"done": half, "following": self._following(w.out)}
            return self.rows.ring_rows_qkv_rope(y, w, rope, view, rows, self.workspace, **more)
        tile = self.tile("norm_qkv_rope", w.qkv, len(x))
        x, done = self._normed(x, w.attn_norm, tile)
        if w.q_norm is not None:  # needs a whole head at once
            packed = norm_product(x, w.attn_norm, w.qkv, w.qkv_bias, NOTHING, tile, self.workspace, done=done)
            return rope_rows(packed, w, rope, view, pdl=tile.pdl)
        return norm_qkv_rope(x, w, rope, view, tile, self.workspace, done=done, following=self._following(w.out))

    def out_residual(self, attn: torch.Tensor, x: torch.Tensor, w: LayerWeights) -> torch.Tensor:
        following = self._following(w.up, gated=w.up.shape[0] != w.down.shape[1])
        return self._residual("out_residual", attn.reshape(len(x), -1), x, w.out, w.out_bias, following, w.mlp_norm)

    def down_residual(self, u: torch.Tensor, x: torch.Tensor, w: LayerWeights) -> torch.Tensor:
        return self._residual("down_residual", u, x, w.down, w.down_bias, self._following(w.following), w.following_norm)

    def _residual(
        self, op: str, u: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
        following: Following | None, norm: NormWeights | None,
    ) -> torch.Tensor:  # fmt: skip
        if len(x) > MAX_ROWS:
            out = torch.addmm(x, u, weight.T)
            return out if bias is None else out.add_(bias)
        if (ring := self.ring_tile(op, weight, len(x), bias)) is not None:
            return self.rings.ring_residual_product(u, weight, x, ring, following)
        scales = norm if self.scale and len(x) > 1 and norm is not None and norm.bias is None else None
        rows = self.rows_ring(op, weight, len(x), bias)
        if rows is not None:
            made = self.rows.ring_rows_residual(u, weight, x, rows, self.workspace, norm=scales, following=following)
            self._scaled = None if made[1] is None or norm is None else (made[0], norm, made[1])
            return made[0]
        tile = self.tile(op, weight, len(x))
        out, scaled = residual_product(u, weight, bias, x, tile, self.workspace, following=following, norm=scales)
        self._scaled = None if scaled is None or norm is None else (out, norm, scaled)
        return out

    def norm_mlp_up(self, x: torch.Tensor, w: LayerWeights) -> torch.Tensor:
        activation = GELU if w.up.shape[0] == w.down.shape[1] else SWIGLU
        if len(x) > MAX_ROWS:
            up = F.linear(norm_rows(x, w.mlp_norm), w.up, w.up_bias)
            return F.gelu(up, approximate="tanh") if activation == GELU else silu_product(up)
        ring = None if w.mlp_norm.bias is not None else self.ring_tile("norm_mlp_up", w.up, len(x), w.up_bias)
        if ring is not None and activation == SWIGLU:
            return self.rings.ring_norm_product(x, w.mlp_norm, w.up, activation, ring, self._following(w.down))
        rows = self.rows_ring("norm_mlp_up", w.up, len(x), w.up_bias, w.mlp_norm.bias)
        if rows is not None and activation == SWIGLU:
            y, half = self._behind(x, w.mlp_norm)
            more = {"done": half, "following": self._following(w.down)}
            return self.rows.ring_rows_up(y, w.mlp_norm.eps, w.up, rows, self.workspace, **more)
        tile = self.tile("norm_mlp_up", w.up, len(x))
        x, done = self._normed(x, w.mlp_norm, tile)
        return norm_product(
            x, w.mlp_norm, w.up, w.up_bias, activation, tile, self.workspace, done=done, following=self._following(w.down)
        )

    def projection_sample(self, x: torch.Tensor, head: HeadWeights, sampling: SamplingBatch) -> SampleResult:
        if not len(x):  # a step may be a prompt's chunk alone, after which nobody samples
            return super().projection_sample(x, head, sampling)
        x = x.contiguous()
        if sampling.any_filter or sampling.seen is not None or sampling.num_logprobs >= 0:
            logits = self._project(x, head, LOGITS, sampling)
            if sampling.seen is not None or sampling.num_logprobs >= 0:
                return sample_from_logits(logits, sampling)
            return SampleResult(filtered_sample(logits, sampling))
        return SampleResult(self._project(x, head, RANDOM if sampling.any_random else GREEDY, sampling))

    def _project(self, x: torch.Tensor, head: HeadWeights, want: int, sampling: SamplingBatch) -> torch.Tensor:
        ring = None if head.norm.bias is not None else self.ring_tile("projection_sample", head.proj, len(x), None)
        if ring is not None:
            return self.rings.ring_project(x, head, want, sampling, ring, self.race)
        parts = []
        for i in range(0, len(x), MAX_SAMPLED):
            rows = slice(i, i + MAX_SAMPLED)
            part = x[rows]
            tile = self.tile("projection_sample", head.proj, len(part))
            part, done = self._normed(part, head.norm, tile)
            here = replace(
                sampling, temperature=sampling.temperature[rows], seed=sampling.seed[rows], position=sampling.position[rows]
            )
            parts.append(project(part, head, want, here, tile, self.race, done=done))
        return parts[0] if len(parts) == 1 else torch.cat(parts)
