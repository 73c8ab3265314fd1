"""Products of weight rows with the few activation rows of a decode step: the core that the fused kernels share.

    P[r, b] = sum_k W[r, k] * y[b, k],      y = x * g  (RMSNorm; 1/rms is applied to P afterwards), or LayerNorm(x), or x

Bytes: W once, rows * K * itemsize; x is small and stays in L2. Bound: bandwidth. The weights are the tall operand whatever the
batch, so a program streams its ROWS rows of W and keeps [ROWS, BM] results.

One activation row (BM = 1): multiply-adds on the plain cores; more: matrix products with the batch as the narrow side. What a
program asks for before it waits for the kernel launched before it (tiles of W: with one row AHEAD into registers, then FETCH
into L2) streams in under that kernel's tail. What that kernel wrote is read after the wait; nothing is written before it.

With one row RMSNorm's 1/rms scales the product, so it needs no pass of its own: sum x^2 is gathered beside it. LayerNorm
centres x first (subtracting mean * sum(W) from the product would cancel badly), in a pass over x that stays in the cache.
Several rows come normed: each program would norm all of x again, and sums across lanes in every turn of the loop cost more than
the launch of a kernel that norms x once, whose time the weights asked for before the wait fill.

SPLIT programs share the K range of one tile of rows; the last of them to finish adds the parts, always in the same order.
Callers give rows of their own choosing (rotary partners, a gate beside its value), all within W.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from pdlab.kernels.product_tiles import ProductTile

PLAIN, RMS, LAYER = 0, 1, 2  # what happens to x on the way in
_RMS, _LAYER = tl.constexpr(RMS), tl.constexpr(LAYER)


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
    X, NORM_W, NORM_B, W, rows, first, eps,
    K: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, AHEAD: tl.constexpr,
    FETCH: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
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
def begin(W, rows, first, K: tl.constexpr, COUNT: tl.constexpr, PDL: tl.constexpr):
    """Asks for the first COUNT elements of each row from `first` on, into L2, then waits for the kernel launched before."""
    if PDL:
        if COUNT:
            _into_l2(W, rows, first, K, COUNT)
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def _many_rows(
    X, W, XD, WD, rows, tile, first, batch,
    K: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
    STAGES: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    acc = tl.zeros((ROWS, BM), tl.float32)
    if TMA:
        for k in tl.range(first, first + SPAN, BK, num_stages=STAGES):
            acc = tl.dot(WD.load([tile * ROWS, k]), XD.load([0, k]).T, acc)
    else:
        m = tl.arange(0, BM)
        for start in tl.range(first, first + SPAN, BK, num_stages=STAGES):
            k = start + tl.arange(0, BK)
            w = _weights(W, rows, k, K, EVEN)
            x = _activations(X, m, k, batch, K, EVEN)
            acc = tl.dot(w, x.T, acc, input_precision="ieee")
    return acc


@triton.jit
def products(
    X, NORM_W, NORM_B, W, XD, WD, PART, COUNT, rows, tile, batch, eps,
    K: tl.constexpr, ROWS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, AHEAD: tl.constexpr,
    FETCH: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
    BEGUN: tl.constexpr = False,
):  # fmt: skip
    """(P float32 [ROWS, BM], whether this program holds the whole of it). Program (tile, part) of a grid [tiles, SPLIT].

    BEGUN: the caller, of several rows, has called `begin` itself. With TMA, `rows` are those of the tile in order, and XD and
    WD describe x and W to the copy engine (else anything).
    """
    SPAN: tl.constexpr = ((K + BK - 1) // BK + SPLIT - 1) // SPLIT * BK
    EVEN: tl.constexpr = SPAN * SPLIT == K
    part = tl.program_id(1)
    if BM == 1:
        acc, squares = _one_row(X, NORM_W, NORM_B, W, rows, part * SPAN, eps, K, SPAN, ROWS, BK, EVEN, AHEAD, FETCH, NORM, PDL)
    else:
        tl.static_assert(NORM == 0, "several rows come normed")
        if not BEGUN:
            begin(W, rows, part * SPAN, K, FETCH * BK, PDL)
        acc = _many_rows(X, W, XD, WD, rows, tile, part * SPAN, batch, K, SPAN, ROWS, BM, BK, EVEN, STAGES, TMA)
        squares = tl.zeros((BM,), tl.float32)
    whole = part == SPLIT - 1
    if SPLIT > 1:
        r, m = tl.arange(0, ROWS), tl.arange(0, BM)
        mine = PART + (tile * SPLIT).to(tl.int64) * ((ROWS + 1) * BM)  # a part: ROWS rows of products, one of squares
        at = r[:, None] * BM + m[None, :]
        tl.store(mine + part * ((ROWS + 1) * BM) + at, acc)
        if NORM == _RMS:
            tl.store(mine + part * ((ROWS + 1) * BM) + ROWS * BM + m, squares)
        tl.debug_barrier()  # every thread's stores come before the release below
        whole = tl.atomic_add(COUNT + tile, 1, sem="acq_rel", scope="gpu") == SPLIT - 1
        if whole:
            acc = tl.zeros((ROWS, BM), tl.float32)
            squares = tl.zeros((BM,), tl.float32)
            for i in tl.static_range(SPLIT):  # unrolled, so that one latency covers all; .cg: written by other SMs meanwhile
                acc += tl.load(mine + i * ((ROWS + 1) * BM) + at, cache_modifier=".cg")
                if NORM == _RMS:
                    squares += tl.load(mine + i * ((ROWS + 1) * BM) + ROWS * BM + m, cache_modifier=".cg")
            tl.store(COUNT + tile, 0)  # for the next launch
    if NORM == _RMS:
        acc *= tl.rsqrt(squares / K + eps)[None, :]
    return acc, whole


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
        self._arrivals: dict[int, torch.Tensor] = {}
        self._outgrown: list[torch.Tensor] = []

    def fit(self, tiles: int, tile: ProductTile, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(parts, counters) for a launch of `tiles` tiles."""
        floats = tiles * tile.split * (tile.rows + 1) * columns if tile.split > 1 else 0
        if self.part.numel() < floats:
            self._outgrown.append(self.part)
            self.part = torch.empty(floats, dtype=torch.float32, device=self.device)
        if tile.split > 1 and self.count.numel() < tiles:
            self._outgrown.append(self.count)
            self.count = torch.zeros(tiles, dtype=torch.int32, device=self.device)
        return self.part, self.count

    def arrivals(self, tiles: int, split: int) -> torch.Tensor:
        """A counter a tile that is a multiple of `split` between launches, not zero: all its launches add as much."""
        if split not in self._arrivals or self._arrivals[split].numel() < tiles:
            self._outgrown += [self._arrivals[split]] if split in self._arrivals else []
            self._arrivals[split] = torch.zeros(max(256, tiles), dtype=torch.int32, device=self.device)
        return self._arrivals[split]


def descriptors(x: torch.Tensor, weight: torch.Tensor, tile: ProductTile, columns: int) -> tuple[Any, Any]:
    """What the copy engine needs to fetch tiles of x [T, K] and weight [rows, K]; plain tensors where it is not used."""
    if not tile.tma:
        return x, weight
    from triton.tools.tensor_descriptor import TensorDescriptor

    k = weight.shape[1]
    return (
        TensorDescriptor(x, list(x.shape), [k, 1], [columns, tile.k]),
        TensorDescriptor(weight, list(weight.shape), [k, 1], [tile.rows, tile.k]),
    )


def constants(tile: ProductTile, columns: int, k: int, norm: int) -> dict[str, object]:
    """The compile-time arguments that every caller of `products` passes on, and the launch's own."""
    return {
        "K": k, "ROWS": tile.rows, "BM": columns, "BK": tile.k, "SPLIT": tile.split, "AHEAD": tile.ahead, "FETCH": tile.fetch,
        "NORM": norm, "PDL": tile.pdl, "STAGES": tile.stages, "TMA": tile.tma, "num_warps": tile.warps,
        **({"launch_pdl": True} if tile.pdl else {}),
    }  # fmt: skip
