"""The operations of a model by fused kernels: one launch each for decode batches, cuBLAS with fused neighbours for prompts.

Up to MAX_ROWS new tokens a product reads its weights in the time that bandwidth allows, so what surrounds it (norm, rotary
embedding, cache write, activation, residual) rides along in its kernel. Beyond, products belong to cuBLAS and its tensor
core pipelines, and what surrounds them takes one pass a row. One row on Hopper has kernels of its own: see ring_product.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from pdlab.kernels.dispatched_ops import DispatchedOps
from pdlab.kernels.filtered_sample import RESIDENT, Meeting, filtered_sample
from pdlab.kernels.kv_view import KVView
from pdlab.kernels.norm_product import GELU, NOTHING, SWIGLU, norm_product
from pdlab.kernels.norm_qkv_rope import norm_qkv_rope
from pdlab.kernels.ops import HeadWeights, LayerWeights, NormWeights, RopeTable, SampleResult, SamplingBatch
from pdlab.kernels.product_tiles import MAX_ROWS, ProductTile, RingTile, product_rule, product_tile, ring_rule, ring_tile
from pdlab.kernels.products import Workspace
from pdlab.kernels.projection_sample import GREEDY, LOGITS, MAX_SAMPLED, RANDOM, Race, project
from pdlab.kernels.reference_sampling import sample_from_logits
from pdlab.kernels.residual_product import residual_product
from pdlab.kernels.row_kernels import norm_rows, rope_rows, silu_product

if TYPE_CHECKING:
    from pdlab.kernels.decode_stack import DecodeStack, StackTile
    from pdlab.kernels.ring_kernels import Following


class FusedOps(DispatchedOps):
    """Holds the workspaces of its kernels, so steps must not overlap on two streams."""

    fused = True  # who else works beside these operations may use kernels too

    def __init__(
        self, *args: Any, pdl: bool = True, ring: bool = True, prefetch: bool = False, measured: bool = True,
        hints: bool = True, persistent: bool | None = None,
    ) -> None:  # fmt: skip
        """The techniques one by one, each where the device has it; to change one later set the attribute before the first step.

        `pdl`: programmatic dependent launch. `ring`: single rows by a ring of weights in shared memory. `prefetch`: rings ask
        for weights of the next product, into L2. `measured`: tiles from the device's table, else by the rule. `hints`: weights
        that the copy engine brings leave L2 first. `persistent`: all layers of a step with one row as one kernel; None: where
        the device's table says that this is faster.
        """
        super().__init__(*args)
        self.pdl, self.ring = pdl and self.tuning.capability >= (9, 0), ring and self.tuning.capability == (9, 0)
        self.prefetch, self.measured, self.hints = prefetch, measured, hints
        self.persistent = persistent if self.tuning.capability == (9, 0) else False
        self.stack_tile: StackTile | None = None  # set before the first step: whatever the table says
        self.stacks: dict[int, tuple[list[LayerWeights], DecodeStack | None]] = {}  # by the list of layers, which is kept alive
        self.workspace, self.race = Workspace(self.device), Race(self.device)
        self.meeting = Meeting(self.device, RESIDENT * self.tuning.multiprocessors if self.device.type == "cuda" else 0)
        self.meeting.pdl &= self.pdl
        self._tiles: dict[tuple[str, int, int, int], ProductTile] = {}
        self.ring_tiles: dict[
            tuple[str, int, int], RingTile | None
        ] = {}  # by operation, outputs and k, as they are first asked for

    def tile(self, op: str, weight: torch.Tensor, batch: int) -> ProductTile:
        key = (op, *weight.shape, batch)
        if key not in self._tiles:
            # the table is of 16 bits: what it has for 64 rows takes twice a multiprocessor's memory with 32
            choose = product_tile if self.measured and weight.element_size() == 2 else product_rule
            tile = choose(self.tuning, op, weight.shape[0], weight.shape[1], batch)
            self._tiles[key] = replace(tile, pdl=tile.pdl and self.pdl, hint=tile.hint and self.hints)
        return self._tiles[key]

    def ring_tile(
        self, op: str, weight: torch.Tensor, tokens: int, bias: torch.Tensor | None, norm: NormWeights | None = None
    ) -> RingTile | None:
        """How a ring of weights does this product; None where it does not: one row, 16 bits, no biases."""
        k = weight.shape[1]
        if tokens != 1 or not self.ring or bias is not None or weight.element_size() != 2 or k % 128:
            return None
        if norm is not None and norm.bias is not None:
            return None
        key = (op, weight.shape[0], k)
        if key not in self.ring_tiles:
            tile = ring_tile(self.tuning, *key) if self.measured else ring_rule(k)
            self.ring_tiles[key] = tile and replace(tile, pdl=self.pdl, hint=tile.hint and self.hints)
        return self.ring_tiles[key]

    @property
    def rings(self) -> Any:
        """The kernels of Hopper alone, imported where they run."""
        from pdlab.kernels import ring_kernels

        return ring_kernels

    def _following(self, weight: torch.Tensor | None, *, gated: bool = False) -> Following | None:
        """`gated`: its tiles read gates and values side by side."""
        if weight is None or not self.prefetch:
            return None
        return self.rings.Following(weight, weight.numel() // 2 if gated else 0)

    def _normed(self, x: torch.Tensor, norm: NormWeights, tile: ProductTile) -> tuple[torch.Tensor, bool]:
        """x as the product's kernel wants it, and whether it is normed already: several rows are."""
        return (x, False) if len(x) == 1 else (norm_rows(x, norm, pdl=tile.pdl), True)

    def prepare(self, layers: list[LayerWeights]) -> None:
        """Called before the cache takes the memory that is left: weights are laid out as the persistent kernel wants them."""
        if self._stack_tile(layers, 1) is not None:
            from pdlab.kernels.decode_stack import stack_fits, stack_weights

            if stack_fits(layers, self.model.head_dim):
                stack_weights(layers)

    def _stack_tile(self, layers: list[LayerWeights], kv: int) -> StackTile | None:
        """How the persistent kernel is cut for these layers; None where it is not wanted, or not known to be faster."""
        if self.persistent is False:
            return None
        from pdlab.kernels.decode_stack import StackTile, measured_tile

        found = measured_tile(self.tuning, layers, kv) if self.measured else None
        tile = self.stack_tile or found or (StackTile() if self.persistent else None)
        return tile and replace(tile, hint=tile.hint and self.hints, pdl=tile.pdl and self.pdl)

    def decode_bounds(self, layers: list[LayerWeights], rows: int) -> tuple[int, ...]:
        """Cached tokens up to which decode steps of so many rows run other kernels than with longer caches, ascending."""
        if rows > 1 or self.persistent is not None or not self.measured or self.stack_tile is not None:
            return ()
        from pdlab.kernels.decode_stack import recorded_bounds

        return recorded_bounds(self.tuning, layers)

    def layer_stack(
        self, x: torch.Tensor, layers: list[LayerWeights], rope: RopeTable | None, view: KVView
    ) -> torch.Tensor | None:
        """All layers by the persistent kernel, `view` over all of them; None where it does not fit, or is not wanted."""
        if self.persistent is False or rope is None or not len(x) == len(view.seq_lens) == view.max_q == 1:
            return None
        if (tile := self._stack_tile(layers, view.max_kv)) is None:
            return None
        if id(layers) not in self.stacks:
            from pdlab.kernels.decode_stack import stack_of

            self.stacks[id(layers)] = layers, stack_of(layers, self.model.head_dim, tile)
        stack = self.stacks[id(layers)][1]
        alike = x.dtype == view.k.dtype == layers[0].qkv.dtype and view.k.is_contiguous() and view.v.is_contiguous()
        return stack(x.contiguous(), rope, view) if stack is not None and alike else None

    def norm_qkv_rope(self, x: torch.Tensor, w: LayerWeights, rope: RopeTable | None, view: KVView) -> torch.Tensor:
        if len(x) > MAX_ROWS:
            return rope_rows(F.linear(norm_rows(x, w.attn_norm), w.qkv, w.qkv_bias), w, rope, view)
        ring = self.ring_tile("norm_qkv_rope", w.qkv, len(x), w.qkv_bias, w.attn_norm)
        if ring is not None and w.q_norm is not None:
            packed = self.rings.ring_norm_product(x, w.attn_norm, w.qkv, NOTHING, ring, self._following(w.out))
            return rope_rows(packed, w, rope, view, pdl=ring.pdl)
        if ring is not None and rope is not None and view.k.shape[3] % 8 == 0:
            return self.rings.ring_norm_qkv_rope(x, w, rope, view, ring, self._following(w.out))
        tile = self.tile("norm_qkv_rope", w.qkv, len(x))
        x, normed = self._normed(x, w.attn_norm, tile)
        if w.q_norm is not None:  # needs a whole head at once
            packed = norm_product(x, w.attn_norm, w.qkv, w.qkv_bias, NOTHING, tile, self.workspace, normed=normed)
            return rope_rows(packed, w, rope, view, pdl=tile.pdl)
        return norm_qkv_rope(x, w, rope, view, tile, self.workspace, normed=normed)

    def out_residual(self, attn: torch.Tensor, x: torch.Tensor, w: LayerWeights) -> torch.Tensor:
        following = self._following(w.up, gated=w.up.shape[0] != w.down.shape[1])
        return self._residual("out_residual", attn.reshape(len(x), -1), x, w.out, w.out_bias, following)

    def down_residual(self, u: torch.Tensor, x: torch.Tensor, w: LayerWeights) -> torch.Tensor:
        return self._residual("down_residual", u, x, w.down, w.down_bias, self._following(w.following))

    def _residual(
        self, op: str, u: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
        following: Following | None,
    ) -> torch.Tensor:  # fmt: skip
        if len(x) > MAX_ROWS:
            out = torch.addmm(x, u, weight.T)
            return out if bias is None else out.add_(bias)
        if (ring := self.ring_tile(op, weight, len(x), bias)) is not None:
            return self.rings.ring_residual_product(u, weight, x, ring, following)
        return residual_product(u, weight, bias, x, self.tile(op, weight, len(x)), self.workspace)

    def norm_mlp_up(self, x: torch.Tensor, w: LayerWeights) -> torch.Tensor:
        activation = GELU if w.up.shape[0] == w.down.shape[1] else SWIGLU
        if len(x) > MAX_ROWS:
            up = F.linear(norm_rows(x, w.mlp_norm), w.up, w.up_bias)
            return F.gelu(up, approximate="tanh") if activation == GELU else silu_product(up)
        ring = self.ring_tile("norm_mlp_up", w.up, len(x), w.up_bias, w.mlp_norm)
        if ring is not None and activation == SWIGLU:
            return self.rings.ring_norm_product(x, w.mlp_norm, w.up, activation, ring, self._following(w.down))
        tile = self.tile("norm_mlp_up", w.up, len(x))
        x, normed = self._normed(x, w.mlp_norm, tile)
        return norm_product(x, w.mlp_norm, w.up, w.up_bias, activation, tile, self.workspace, normed=normed)

    def projection_sample(self, x: torch.Tensor, head: HeadWeights, sampling: SamplingBatch) -> SampleResult:
        if not len(x):  # a step may be a prompt's chunk alone, after which nobody samples
            return super().projection_sample(x, head, sampling)
        x = x.contiguous()
        if sampling.any_filter or sampling.seen is not None or sampling.num_logprobs >= 0:
            logits = self._project(x, head, LOGITS, sampling)
            if sampling.seen is not None or sampling.num_logprobs >= 0:
                return sample_from_logits(logits, sampling)
            return SampleResult(filtered_sample(logits, sampling, self.meeting))
        return SampleResult(self._project(x, head, RANDOM if sampling.any_random else GREEDY, sampling))

    def _project(self, x: torch.Tensor, head: HeadWeights, want: int, sampling: SamplingBatch) -> torch.Tensor:
        ring = self.ring_tile("projection_sample", head.proj, len(x), None, head.norm)
        if ring is not None:
            return self.rings.ring_project(x, head, want, sampling, ring, self.race)
        parts = []
        for i in range(0, len(x), MAX_SAMPLED):
            rows = slice(i, i + MAX_SAMPLED)
            part = x[rows]
            tile = self.tile("projection_sample", head.proj, len(part))
            part, normed = self._normed(part, head.norm, tile)
            here = replace(
                sampling, temperature=sampling.temperature[rows], seed=sampling.seed[rows], position=sampling.position[rows]
            )
            parts.append(project(part, head, want, here, tile, self.race, normed=normed))
        return parts[0] if len(parts) == 1 else torch.cat(parts)
