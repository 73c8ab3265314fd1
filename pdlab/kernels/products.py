"""Products of weight rows with the few activation rows of a decode step: the core that the fused kernels share.

    P[r, b] = sum_k W[r, k] * y[b, k],      y = x * g  (RMSNorm; 1/rms is applied to P afterwards), or LayerNorm(x), or x

Bytes: W once, rows * K * itemsize; x is small and stays in L2. Bound: bandwidth. The weights are the tall operand whatever the
batch, so a program streams its ROWS rows of W and keeps [ROWS, BM] results.

One activation row (BM = 1): multiply-adds on the plain cores; more: matrix products with the batch as the narrow side. What a
program asks for before it waits for the kernel launched before it (tiles of W: with one row AHEAD into registers, then FETCH
into L2) streams in under that kernel's tail. What that kernel wrote is read after the wait; nothing is written before it.

RMSNorm's 1/rms scales a whole row, so it needs no pass of its own: sum x^2 is gathered beside the product. LayerNorm centres x
first (subtracting mean * sum(W) from the product would cancel badly), in a pass over x that stays in the cache.

SPLIT programs share the K range of one tile of rows; the last of them to finish adds the parts, always in the same order.
Callers give rows of their own choosing (rotary partners, a gate beside its value), all within W.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from pdlab.kernels.ops import NormWeights
    from pdlab.kernels.product_tiles import ProductTile

PLAIN, RMS, LAYER, SCALED = 0, 1, 2, 3  # what happens to x on the way in; SCALED: see Scaled
APART = -1  # PARTNERS of a tile whose odd rows lie far from its even ones, at `apart`; 0: rows as stored, > 0: within heads
_APART = tl.constexpr(APART)
_RMS, _LAYER, _SCALED = tl.constexpr(RMS), tl.constexpr(LAYER), tl.constexpr(SCALED)


@triton.jit
def _weights(W, rows, k, K: tl.constexpr, EVEN: tl.constexpr):
    at = W + rows.to(tl.int64)[:, None] * K + k[None, :]
    # read once a step, and a step reads many times what the cache holds
    if EVEN:
        w = tl.load(at, eviction_policy="evict_first")
    else:
        w = tl.load(at, mask=(k < K)[None, :], other=0.0, eviction_policy="evict_first")
    return w


@triton.jit
def _into_l2(W, rows, first, K: tl.constexpr, COUNT: tl.constexpr):
    """Asks for COUNT elements of each row from `first` on without waiting for them; a line is 64 of them."""
    at = first + tl.arange(0, COUNT // 64) * 64
    lines = W + rows.to(tl.int64)[:, None] * K + tl.minimum(at, K - 1)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [lines.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _following_into_l2(NEXT, program, NEXT_EACH: tl.constexpr, NEXT_SIZE: tl.constexpr, NEXT_APART: tl.constexpr):
    """Asks for this program's NEXT_EACH elements of the weights that the next product reads, NEXT_SIZE in all.

    NEXT_APART: programs take turns at the beginning and at this distance from it (gates and values lie half a matrix apart).
    """
    lines = tl.arange(0, NEXT_EACH // 64) * 64
    if NEXT_APART:
        first = program % 2 * NEXT_APART + program // 2 * NEXT_EACH
    else:
        first = program * NEXT_EACH
    at = NEXT + tl.minimum(first.to(tl.int64) + lines, NEXT_SIZE - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _activations(X, m, k, batch, K: tl.constexpr, EVEN: tl.constexpr):
    """x[b, k], [BM, BK]; rows from `batch` on are zero."""
    keep = (m < batch)[:, None]
    if not EVEN:
        keep = keep & (k < K)[None, :]
    return tl.load(X + m[:, None] * K + k[None, :], mask=keep, other=0.0)


@triton.jit
def _layer_statistics(X, m, batch, K: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    """Mean and 1/deviation of each row, in two passes so that nothing cancels."""
    total = tl.zeros((BM,), tl.float32)
    for first in tl.range(0, K, BK):
        total += tl.sum(_activations(X, m, first + tl.arange(0, BK), batch, K, K % BK == 0).to(tl.float32), 1)
    mean = total / K
    squares = tl.zeros((BM,), tl.float32)
    for first in tl.range(0, K, BK):
        k = first + tl.arange(0, BK)
        away = _activations(X, m, k, batch, K, K % BK == 0).to(tl.float32) - mean[:, None]
        squares += tl.sum(tl.where((k < K)[None, :], away * away, 0.0), 1)
    return mean, squares / K


@triton.jit
def _norm_weights(NORM_W, k, K: tl.constexpr, EVEN: tl.constexpr):
    if EVEN:
        g = tl.load(NORM_W + k)
    else:
        g = tl.load(NORM_W + k, mask=k < K, other=0.0)
    return g.to(tl.float32)


@triton.jit
def _one_row(
    X, NORM_W, NORM_B, W, NEXT, rows, program, first, eps,
    K: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, AHEAD: tl.constexpr,
    FETCH: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
    NEXT_EACH: tl.constexpr, NEXT_SIZE: tl.constexpr, NEXT_APART: tl.constexpr,
):  # fmt: skip
    lanes = tl.arange(0, BK)
    w0 = _weights(W, rows, first + lanes, K, EVEN)
    if AHEAD >= 2:
        w1 = _weights(W, rows, first + BK + lanes, K, EVEN)
    if NORM:
        g0 = _norm_weights(NORM_W, first + lanes, K, EVEN)
    if PDL:
        if FETCH:
            _into_l2(W, rows, first + AHEAD * BK, K, FETCH * BK)
        if NEXT_EACH:
            _following_into_l2(NEXT, program, NEXT_EACH, NEXT_SIZE, NEXT_APART)
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if NORM == _LAYER:
        mean, variance = _layer_statistics(X, tl.arange(0, 1), 1, K, 1, BK)
        mean, scale = tl.sum(mean, 0), tl.rsqrt(tl.sum(variance, 0) + eps)
    acc = tl.zeros((ROWS, BK), tl.float32)
    squares = tl.zeros((BK,), tl.float32)
    for i in tl.static_range(0, SPAN // BK):
        k = first + i * BK + lanes
        if i == 0:
            w = w0
        elif i < AHEAD:
            w = w1
        else:
            w = _weights(W, rows, k, K, EVEN)
        if EVEN:
            y = tl.load(X + k).to(tl.float32)
        else:
            y = tl.load(X + k, mask=k < K, other=0.0).to(tl.float32)
        if NORM == _RMS:
            squares += y * y
        if NORM == _LAYER:
            y = (y - mean) * scale
        if NORM:
            if i == 0:
                y *= g0
            else:
                y *= _norm_weights(NORM_W, k, K, EVEN)
        if NORM == _LAYER:
            y += _norm_weights(NORM_B, k, K, EVEN)
        acc += w.to(tl.float32) * y[None, :]
    return tl.sum(acc, 1)[:, None], tl.sum(squares[None, :], 1)


@triton.jit
def _many_rows(
    X, NORM_W, NORM_B, W, NEXT, rows, program, first, batch, eps,
    K: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
    FETCH: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr, STAGES: tl.constexpr,
    NEXT_EACH: tl.constexpr, NEXT_SIZE: tl.constexpr, NEXT_APART: tl.constexpr,
):  # fmt: skip
    m = tl.arange(0, BM)
    if PDL:
        if FETCH:
            _into_l2(W, rows, first, K, FETCH * BK)
        if NEXT_EACH:
            _following_into_l2(NEXT, program, NEXT_EACH, NEXT_SIZE, NEXT_APART)
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if NORM == _LAYER:
        mean, variance = _layer_statistics(X, m, batch, K, BM, BK)
        scale = tl.rsqrt(variance + eps)
    acc = tl.zeros((ROWS, BM), tl.float32)
    squares = tl.zeros((BM,), tl.float32)
    for start in tl.range(first, first + SPAN, BK, num_stages=STAGES):
        k = start + tl.arange(0, BK)
        w = _weights(W, rows, k, K, EVEN)
        x = _activations(X, m, k, batch, K, EVEN)
        if NORM and NORM != _SCALED:
            y = x.to(tl.float32)
            if NORM == _RMS:
                squares += tl.sum(y * y, 1)
            else:
                y = (y - mean[:, None]) * scale[:, None]
            y *= _norm_weights(NORM_W, k, K, EVEN)[None, :]
            if NORM == _LAYER:
                y += _norm_weights(NORM_B, k, K, EVEN)[None, :]
            x = y.to(w.dtype)
        acc = tl.dot(w, x.T, acc, input_precision="ieee")
    return acc, squares


@triton.jit
def _many_rows_by_tma(
    XD, WD, W, NEXT, rows, tile, program, first, apart,
    K: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, FETCH: tl.constexpr,
    PDL: tl.constexpr, STAGES: tl.constexpr, PARTNERS: tl.constexpr,
    NEXT_EACH: tl.constexpr, NEXT_SIZE: tl.constexpr, NEXT_APART: tl.constexpr,
):  # fmt: skip
    """The same products of PLAIN x with whole tiles fetched by the copy engine of Hopper, in the order of `rows`."""
    if PDL:
        if FETCH:
            _into_l2(W, rows, first, K, FETCH * BK)
        if NEXT_EACH:
            _following_into_l2(NEXT, program, NEXT_EACH, NEXT_SIZE, NEXT_APART)
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if PARTNERS == _APART:
        a = tl.zeros((ROWS // 2, BM), tl.float32)
        b = tl.zeros((ROWS // 2, BM), tl.float32)
        for k in tl.range(first, first + SPAN, BK, num_stages=STAGES):
            x = XD.load([0, k]).T
            a = tl.dot(WD.load([tile * (ROWS // 2), k]), x, a)
            b = tl.dot(WD.load([apart + tile * (ROWS // 2), k]), x, b)
        acc = tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (ROWS, BM))
    else:
        acc = tl.zeros((ROWS, BM), tl.float32)
        for k in tl.range(first, first + SPAN, BK, num_stages=STAGES):
            acc = tl.dot(WD.load([tile * ROWS, k]), XD.load([0, k]).T, acc)
        if PARTNERS > 0:  # halves of heads, whose rows alternate for the caller
            acc = tl.permute(tl.reshape(acc, (ROWS // (2 * PARTNERS), 2, PARTNERS, BM)), (0, 2, 1, 3))
            acc = tl.reshape(acc, (ROWS, BM))
    return acc


@triton.jit
def products(
    X, NORM_W, NORM_B, W, XD, WD, NEXT, PART, COUNT, rows, tile, batch, eps, apart,
    K: tl.constexpr, ROWS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, AHEAD: tl.constexpr,
    FETCH: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
    PARTNERS: tl.constexpr, NEXT_EACH: tl.constexpr, NEXT_SIZE: tl.constexpr, NEXT_APART: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """(P float32 [ROWS, BM], whether this program holds the whole of it). Program (tile, part) of a grid [tiles, SPLIT]."""
    SPAN: tl.constexpr = ((K + BK - 1) // BK + SPLIT - 1) // SPLIT * BK
    EVEN: tl.constexpr = SPAN * SPLIT == K
    part = tl.program_id(1)
    program = part * tl.num_programs(0) + tile
    if BM == 1:
        acc, squares = _one_row(
            X, NORM_W, NORM_B, W, NEXT, rows, program, part * SPAN, eps,
            K, SPAN, ROWS, BK, EVEN, AHEAD, FETCH, NORM, PDL, NEXT_EACH, NEXT_SIZE, NEXT_APART,
        )  # fmt: skip
    elif TMA:
        acc = _many_rows_by_tma(
            XD, WD, W, NEXT, rows, tile, program, part * SPAN, apart,
            K, SPAN, ROWS, BM, BK, FETCH, PDL, STAGES, PARTNERS, NEXT_EACH, NEXT_SIZE, NEXT_APART,
        )  # fmt: skip
        squares = tl.zeros((BM,), tl.float32)
    else:
        acc, squares = _many_rows(
            X, NORM_W, NORM_B, W, NEXT, rows, program, part * SPAN, batch, eps,
            K, SPAN, ROWS, BM, BK, EVEN, FETCH, NORM, PDL, STAGES, NEXT_EACH, NEXT_SIZE, NEXT_APART,
        )  # fmt: skip
    whole = part == SPLIT - 1
    if SPLIT > 1:
        r, m = tl.arange(0, ROWS), tl.arange(0, BM)
        mine = PART + (tile * SPLIT).to(tl.int64) * ((ROWS + 1) * BM)  # a part: ROWS rows of products, one of squares
        at = r[:, None] * BM + m[None, :]
        tl.store(mine + part * ((ROWS + 1) * BM) + at, acc)
        tl.store(mine + part * ((ROWS + 1) * BM) + ROWS * BM + m, squares)
        tl.debug_barrier()  # every thread's stores come before the release below
        whole = tl.atomic_add(COUNT + tile, 1, sem="acq_rel", scope="gpu") == SPLIT - 1
        if whole:
            acc = tl.zeros((ROWS, BM), tl.float32)
            squares = tl.zeros((BM,), tl.float32)
            for i in range(tl.num_programs(1)):  # .cg: written by other SMs during this launch
                acc += tl.load(mine + i * ((ROWS + 1) * BM) + at, cache_modifier=".cg")
                squares += tl.load(mine + i * ((ROWS + 1) * BM) + ROWS * BM + m, cache_modifier=".cg")
            tl.store(COUNT + tile, 0)  # for the next launch
    if NORM == _SCALED:
        squares = summed(NORM_W, SUMS, BM)
    if NORM and NORM != _LAYER:
        acc *= tl.rsqrt(squares / K + eps)[None, :]
    return acc, whole


@triton.jit
def summed(SUMS_OF, COUNT: tl.constexpr, BM: tl.constexpr):
    """[BM]: the sum of COUNT parts [COUNT, BM], always in the same order."""
    PADDED: tl.constexpr = triton.next_power_of_2(COUNT)
    i, m = tl.arange(0, PADDED), tl.arange(0, BM)
    return tl.sum(tl.load(SUMS_OF + i[:, None] * BM + m[None, :], mask=(i < COUNT)[:, None], other=0.0), 0)


@triton.jit
def pairs(acc, PAIRS: tl.constexpr, BM: tl.constexpr):
    """Rows 2i and 2i + 1 of [2 * PAIRS, BM] as two blocks [PAIRS, BM]."""
    return tl.split(tl.permute(tl.reshape(acc, (PAIRS, 2, BM)), (0, 2, 1)))


class Workspace:
    """Memory where the programs that share a tile meet: parts float32, counters int32, zero between launches.

    Kept between launches, so that a captured graph finds it where it was; what was outgrown is kept for older graphs.
    Launches that share a workspace must not run at the same time.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.part = torch.empty(0, dtype=torch.float32, device=device)
        self.count = torch.zeros(1, dtype=torch.int32, device=device)
        self._outgrown: list[torch.Tensor] = []

    def fit(self, tiles: int, tile: ProductTile, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(parts, counters) for a launch of `tiles` tiles."""
        if tile.split == 1:
            return self.part, self.count
        return self.room(tiles * tile.split * (tile.rows + 1) * columns, tiles)

    def room(self, floats: int, counters: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(parts, counters) of at least these sizes."""
        if self.part.numel() < floats:
            self._outgrown.append(self.part)
            self.part = torch.empty(floats, dtype=torch.float32, device=self.device)
        if self.count.numel() < counters:
            self._outgrown.append(self.count)
            self.count = torch.zeros(counters, dtype=torch.int32, device=self.device)
        return self.part, self.count


@dataclass(frozen=True)
class Scaled:
    """What stands for x behind an RMSNorm when the kernel that made x has gone half the way: 1/rms is applied to the product.

    It costs that kernel some bytes and saves a launch, since a norm needs all of a row and a tile has a part of it.
    """

    y: torch.Tensor  # [T, K]: x * the norm's weights
    sums: torch.Tensor  # f32[parts, columns]: sums of squares of x, in parts


@dataclass(frozen=True)
class Following:
    """The weights that the next product will read: a hint, nothing depends on it."""

    weight: torch.Tensor
    apart: int = 0  # elements between the two places where reading begins; 0: one place

    def each(self, programs: int, kilobytes: int) -> int:
        """Elements that each program asks for, a power of two of lines, of `kilobytes` in all."""
        lines = min(kilobytes << 10, self.weight.numel() * self.weight.element_size()) // (128 * programs)
        return 0 if lines < 1 else 64 << (lines.bit_length() - 1)


def normed(
    x: torch.Tensor, norm: NormWeights, done: Scaled | bool
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor], int, int]:
    """(x, the norm's tensors, NORM, SUMS) for a kernel; `done`: x has been through the norm (True), or half the way."""
    if isinstance(done, Scaled):
        return done.y, (done.sums, done.sums), SCALED, len(done.sums)
    bias = norm.weight if norm.bias is None else norm.bias
    return x, (norm.weight, bias), PLAIN if done else RMS if norm.bias is None else LAYER, 0


def descriptors(x: torch.Tensor, weight: torch.Tensor, tile: ProductTile, columns: int, apart: bool = False) -> tuple[Any, Any]:
    """What the copy engine needs to fetch tiles of x [T, K] and weight [rows, K]; plain tensors where it is not used."""
    if not tile.tma:
        return x, weight
    from triton.tools.tensor_descriptor import TensorDescriptor

    k = weight.shape[1]
    rows = tile.rows // 2 if apart else tile.rows
    return (
        TensorDescriptor(x, list(x.shape), [k, 1], [columns, tile.k]),
        TensorDescriptor(weight, list(weight.shape), [k, 1], [rows, tile.k]),
    )


def constants(
    tile: ProductTile, columns: int, k: int, norm: int, programs: int = 1, following: Following | None = None, sums: int = 0
) -> dict[str, object]:
    """The compile-time arguments that every caller of `products` passes on, and the launch's own."""
    each = following.each(programs, tile.following) if following is not None and tile.pdl else 0
    return {
        "SUMS": sums, "NEXT_EACH": each, "NEXT_SIZE": following.weight.numel() if each and following is not None else 0,
        "NEXT_APART": following.apart if each and following is not None else 0,
        "K": k, "ROWS": tile.rows, "BM": columns, "BK": tile.k, "SPLIT": tile.split, "AHEAD": tile.ahead, "FETCH": tile.fetch,
        "NORM": norm, "PDL": tile.pdl, "STAGES": tile.stages, "TMA": tile.tma, "num_warps": tile.warps,
        **({"launch_pdl": True} if tile.pdl else {}),
    }  # fmt: skip
