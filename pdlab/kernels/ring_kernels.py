"""The fused operations of a decode step with one activation row on Hopper, each by a ring of weights (see ring_product).

    ring_norm_product      what norm_product computes (SwiGLU, or no activation)
    ring_norm_qkv_rope     what norm_qkv_rope computes
    ring_residual_product  what residual_product computes
    ring_project           what projection_sample.project computes

RMSNorm or none, no biases: what LLaMA-like models have. Bytes: the weights once. Bound: bandwidth.

Oracle: reference.ReferenceOps. Twins for the interpreter: the kernels named on the right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from pdlab.kernels.kv_view import KVView
from pdlab.kernels.norm_product import SWIGLU
from pdlab.kernels.ops import HeadWeights, LayerWeights, NormWeights, RopeTable, SamplingBatch
from pdlab.kernels.product_tiles import RingTile
from pdlab.kernels.projection_sample import EMPTY, LOGITS, RANDOM, Race, gumbel, noise_key, race_key, winner
from pdlab.kernels.ring_product import LINES, PAIRS, PANEL, SEGMENTS, WARPS, activation, fill, next_tile


@dataclass(frozen=True)
class Following:
    """The weights that the next product will read: a hint, nothing depends on it."""

    weight: torch.Tensor
    apart: int = 0  # elements between the two places where reading begins; 0: one place


# results of a tile's half: a row a warp
ROW = gl.constexpr(gl.SliceLayout(1, gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])))
_LOGITS, _RANDOM, _EMPTY = gl.constexpr(LOGITS), gl.constexpr(RANDOM), gl.constexpr(EMPTY)


@gluon.jit
def ring_norm_product_kernel(
    X, NORM_W, WD, NEXT, OUT, eps, tiles,
    WIDTH: gl.constexpr,  # outputs
    GATED: gl.constexpr,
    K: gl.constexpr, PANELS: gl.constexpr, STAGES: gl.constexpr,
    AHEAD: gl.constexpr, NEXT_SIZE: gl.constexpr, NEXT_APART: gl.constexpr, HINT: gl.constexpr,
):  # fmt: skip
    PARTNERS: gl.constexpr = -1 if GATED else 0
    ring, full, pieces = fill(WD, NEXT, tiles, WIDTH, K, PANELS, STAGES, PARTNERS, AHEAD, NEXT_SIZE, NEXT_APART, HINT, 2)
    ys, scale = activation(X, NORM_W, eps, WD, K, True)
    lanes = gl.arange(0, PAIRS, ROW)
    t = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        a, b = next_tile(
            ring, full, WD, NEXT, ys, scale, tile, t, pieces, tiles, WIDTH,
            K, PANELS, STAGES, PARTNERS, ROW, NEXT_SIZE, NEXT_APART,
        )  # fmt: skip
        t += 1  # noqa: SIM113 - a kernel has no enumerate
        if GATED:
            n = tile * PAIRS + lanes
            gl.store(OUT + n, (a / (1.0 + gl.exp(-a)) * b).to(OUT.dtype.element_ty), mask=n < WIDTH)
        else:
            n = tile * (2 * PAIRS) + lanes
            gl.store(OUT + n, a.to(OUT.dtype.element_ty), mask=n < WIDTH)
            gl.store(OUT + n + PAIRS, b.to(OUT.dtype.element_ty), mask=n + PAIRS < WIDTH)


@gluon.jit
def ring_residual_product_kernel(
    U, WD, NEXT, X, OUT, tiles,
    OUTPUTS: gl.constexpr,
    K: gl.constexpr, PANELS: gl.constexpr, STAGES: gl.constexpr,
    AHEAD: gl.constexpr, NEXT_SIZE: gl.constexpr, NEXT_APART: gl.constexpr, HINT: gl.constexpr,
):  # fmt: skip
    ring, full, pieces = fill(WD, NEXT, tiles, 0, K, PANELS, STAGES, 0, AHEAD, NEXT_SIZE, NEXT_APART, HINT, 1)
    ys, scale = activation(U, U, 0.0, WD, K, False)
    lanes = gl.arange(0, PAIRS, ROW)
    t = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        n = tile * (2 * PAIRS) + lanes
        xa = gl.load(X + n, mask=n < OUTPUTS, other=0.0)
        xb = gl.load(X + n + PAIRS, mask=n + PAIRS < OUTPUTS, other=0.0)
        a, b = next_tile(
            ring, full, WD, NEXT, ys, scale, tile, t, pieces, tiles, 0,
            K, PANELS, STAGES, 0, ROW, NEXT_SIZE, NEXT_APART,
        )  # fmt: skip
        t += 1  # noqa: SIM113 - a kernel has no enumerate
        gl.store(OUT + n, (a + xa.to(gl.float32)).to(OUT.dtype.element_ty), mask=n < OUTPUTS)
        gl.store(OUT + n + PAIRS, (b + xb.to(gl.float32)).to(OUT.dtype.element_ty), mask=n + PAIRS < OUTPUTS)


@gluon.jit
def ring_norm_qkv_rope_kernel(
    X, NORM_W, WD, NEXT, COS, SIN, POSITIONS, SLOTS, Q, KC, VC, eps, tiles,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, HALF: gl.constexpr, PAGE: gl.constexpr,
    K: gl.constexpr, PANELS: gl.constexpr, STAGES: gl.constexpr,
    AHEAD: gl.constexpr, NEXT_SIZE: gl.constexpr, NEXT_APART: gl.constexpr, HINT: gl.constexpr,
):  # fmt: skip
    ring, full, pieces = fill(WD, NEXT, tiles, 0, K, PANELS, STAGES, HALF, AHEAD, NEXT_SIZE, NEXT_APART, HINT, 2)
    # where the token is and goes was uploaded before the step began
    slot, position = gl.load(SLOTS), gl.load(POSITIONS)
    ys, scale = activation(X, NORM_W, eps, WD, K, True)
    lanes = gl.arange(0, PAIRS, ROW)
    t = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        pair = tile * PAIRS + lanes
        head, d = pair // HALF, pair % HALF
        turned = head < HEADS + KV_HEADS
        cos = gl.load(COS + position * HALF + d, mask=turned, other=1.0)
        sin = gl.load(SIN + position * HALF + d, mask=turned, other=0.0)
        a, b = next_tile(
            ring, full, WD, NEXT, ys, scale, tile, t, pieces, tiles, 0,
            K, PANELS, STAGES, HALF, ROW, NEXT_SIZE, NEXT_APART,
        )  # fmt: skip
        t += 1  # noqa: SIM113 - a kernel has no enumerate
        ra = (a * cos - b * sin).to(Q.dtype.element_ty)
        rb = (b * cos + a * sin).to(Q.dtype.element_ty)
        is_q = head < HEADS
        to = Q + head * (2 * HALF) + d
        gl.store(to, ra, mask=is_q)
        gl.store(to + HALF, rb, mask=is_q)
        kv_head = (head - HEADS) % KV_HEADS
        at = (slot // PAGE * (KV_HEADS * PAGE) + kv_head * PAGE + slot % PAGE) * (2 * HALF) + d
        is_k = turned & (head >= HEADS)
        is_v = (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS)
        gl.store(KC + at, ra, mask=is_k)
        gl.store(KC + at + HALF, rb, mask=is_k)
        gl.store(VC + at, ra, mask=is_v)
        gl.store(VC + at + HALF, rb, mask=is_v)


@gluon.jit
def _key(logit, token, temperature, key1, key2, VOCAB: gl.constexpr, WANT: gl.constexpr):
    """What a token enters the race with."""
    score = logit
    if WANT == _RANDOM:
        # below 1e-6 the noise is lost in rounding anyway, and the quotient must stay finite
        hot = logit / gl.maximum(temperature, 1e-6) + gumbel(token, key1, key2)
        score = gl.where(temperature > 0, hot, logit)
    return gl.where(token < VOCAB, race_key(score, token), _EMPTY)


@gluon.jit
def ring_project_kernel(
    X, NORM_W, WD, TEMPERATURE, SEED, POSITION, OUT, BEST, DONE, eps, tiles,
    VOCAB: gl.constexpr, WANT: gl.constexpr,
    K: gl.constexpr, PANELS: gl.constexpr, STAGES: gl.constexpr, HINT: gl.constexpr,
):  # fmt: skip
    ring, full, pieces = fill(WD, X, tiles, 0, K, PANELS, STAGES, 0, 0, 0, 0, HINT, 2)
    temperature = gl.load(TEMPERATURE)
    key1, key2 = noise_key(gl.load(SEED), gl.load(POSITION))
    ys, scale = activation(X, NORM_W, eps, WD, K, True)
    lanes = gl.arange(0, PAIRS, ROW)
    best = gl.full([PAIRS], _EMPTY, gl.int64, ROW)
    t = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        n = tile * (2 * PAIRS) + lanes
        a, b = next_tile(ring, full, WD, X, ys, scale, tile, t, pieces, tiles, 0, K, PANELS, STAGES, 0, ROW, 0, 0)
        t += 1  # noqa: SIM113 - a kernel has no enumerate
        if WANT == _LOGITS:
            gl.store(OUT + n, a, mask=n < VOCAB)
            gl.store(OUT + n + PAIRS, b, mask=n + PAIRS < VOCAB)
        else:
            best = gl.maximum(best, _key(a, n, temperature, key1, key2, VOCAB, WANT))
            best = gl.maximum(best, _key(b, n + PAIRS, temperature, key1, key2, VOCAB, WANT))
    if WANT != _LOGITS:
        gl.atomic_max(BEST, gl.max(best, 0), sem="relaxed")
        if gl.atomic_add(DONE, 1, sem="acq_rel", scope="gpu") == gl.num_programs(0) - 1:
            gl.store(OUT, winner(gl.atomic_xchg(BEST, _EMPTY)))  # and as it was, for the next launch
            gl.store(DONE, 0)


def _grid(weight: torch.Tensor) -> tuple[int, int]:
    """(programs, tiles)."""
    tiles = triton.cdiv(len(weight), 2 * PAIRS.value)
    return min(torch.cuda.get_device_properties(weight.device).multi_processor_count, tiles), tiles


def _descriptor(weight: torch.Tensor) -> TensorDescriptor:
    """W [N, K] as W' [16 N, K/16], in copies of four rows by a panel."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor.from_tensor(weight.view(len(weight) * SEGMENTS, -1), [LINES.value, PANEL.value], layout)


def _constants(tile: RingTile, k: int) -> dict[str, Any]:
    launch = {"num_warps": WARPS, **({"launch_pdl": True} if tile.pdl else {})}
    return {"K": k, "PANELS": tile.panels, "STAGES": tile.stages, "HINT": tile.hint, **launch}


def _next(tile: RingTile, following: Following | None) -> dict[str, Any]:
    if following is None:
        return {"AHEAD": 0, "NEXT_SIZE": 0, "NEXT_APART": 0}
    return {"AHEAD": tile.ahead, "NEXT_SIZE": following.weight.numel(), "NEXT_APART": following.apart}


def ring_norm_product(
    x: torch.Tensor,
    norm: NormWeights,
    weight: torch.Tensor,
    activation: int,
    tile: RingTile,
    following: Following | None = None,
) -> torch.Tensor:
    """[1, width] of x [1, K] and weight [rows, K], contiguous: SWIGLU of gates and values, or the products as they are."""
    gated = activation == SWIGLU
    width = len(weight) // 2 if gated else len(weight)
    programs, tiles = _grid(weight)
    out = torch.empty((1, width), dtype=x.dtype, device=x.device)
    ring_norm_product_kernel[(programs,)](
        x, norm.weight, _descriptor(weight), weight if following is None else following.weight, out, norm.eps, tiles,
        WIDTH=width, GATED=gated, **_constants(tile, x.shape[1]), **_next(tile, following),
    )  # fmt: skip
    return out


def ring_residual_product(
    u: torch.Tensor, weight: torch.Tensor, x: torch.Tensor, tile: RingTile, following: Following | None = None
) -> torch.Tensor:
    """x [1, H] + u [1, K] @ weight [H, K]^T, in a new tensor; all contiguous."""
    programs, tiles = _grid(weight)
    out = torch.empty_like(x)
    ring_residual_product_kernel[(programs,)](
        u, _descriptor(weight), weight if following is None else following.weight, x, out, tiles,
        OUTPUTS=len(weight), **_constants(tile, u.shape[1]), **_next(tile, following),
    )  # fmt: skip
    return out


def ring_norm_qkv_rope(
    x: torch.Tensor, w: LayerWeights, rope: RopeTable, view: KVView, tile: RingTile, following: Following | None = None
) -> torch.Tensor:
    """q [1, N, D] of x [1, H]; writes view.k and view.v (contiguous) at view.slots. Half a head is a multiple of 4."""
    kv_heads, page, dim = view.k.shape[1:]
    heads = w.qkv.shape[0] // dim - 2 * kv_heads
    programs, tiles = _grid(w.qkv)
    q = torch.empty((1, heads, dim), dtype=x.dtype, device=x.device)
    ring_norm_qkv_rope_kernel[(programs,)](
        x, w.attn_norm.weight, _descriptor(w.qkv), w.qkv if following is None else following.weight, rope.cos, rope.sin,
        view.positions, view.slots, q, view.k, view.v, w.attn_norm.eps, tiles,
        HEADS=heads, KV_HEADS=kv_heads, HALF=dim // 2, PAGE=page,
        **_constants(tile, x.shape[1]), **_next(tile, following),
    )  # fmt: skip
    return q


def ring_project(
    x: torch.Tensor, head: HeadWeights, want: int, sampling: SamplingBatch, tile: RingTile, race: Race
) -> torch.Tensor:
    """The token i64[1] (GREEDY, RANDOM) or float32 logits [1, V] (LOGITS) of x [1, H]; -1 where a logit is NaN or infinite."""
    vocab, k = head.proj.shape
    programs, tiles = _grid(head.proj)
    shape, dtype = ((1, vocab), torch.float32) if want == LOGITS else ((1,), torch.int64)
    out = torch.empty(shape, dtype=dtype, device=x.device)
    ring_project_kernel[(programs,)](
        x, head.norm.weight, _descriptor(head.proj), sampling.temperature, sampling.seed, sampling.position,
        out, race.best, race.done, head.norm.eps, tiles, VOCAB=vocab, WANT=want, **_constants(tile, k),
    )  # fmt: skip
    return out
