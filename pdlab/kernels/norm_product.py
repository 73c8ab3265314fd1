"""Norm, product and activation in one pass over the weights: the up projection of the MLP, and any product behind a norm.

    [g, u] = norm(x) W^T + b,   silu(g) * u        (SwiGLU: a tile of rows holds each gate beside its value)
    u      = norm(x) W^T + b,   tanh-GELU(u)       (GPT-2)
    p      = norm(x) W^T + b                       (no activation)

Bytes: the weights once, 2 F H itemsize (F H for GELU): the largest product of a layer. Bound: bandwidth. LLaMA 8B in bf16:
235 MB, 50.7 us at 4.63 TB/s.

Oracle: reference.ReferenceOps.norm_mlp_up. Twin for the interpreter: this kernel itself (fp16, fp32).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pdlab.kernels.ops import NormWeights
from pdlab.kernels.product_tiles import ProductTile, columns_of
from pdlab.kernels.products import LAYER, PLAIN, RMS, Workspace, constants, pairs, products

NOTHING, GELU, SWIGLU = 0, 1, 2  # what happens to the products on the way out
_GELU, _SWIGLU = tl.constexpr(GELU), tl.constexpr(SWIGLU)


@triton.jit
def gelu_tanh(u):
    """u/2 (1 + tanh(s)) = u * sigmoid(2 s) with s = sqrt(2/pi) (u + 0.044715 u^3)."""
    return u * tl.sigmoid(1.5957691216057308 * (u + 0.044715 * u * u * u))


@triton.jit(do_not_specialize=["batch"])
def norm_product_kernel(
    X, NORM_W, NORM_B, W, BIAS, OUT, PART, COUNT, eps, batch,
    WIDTH: tl.constexpr,  # outputs a row
    ACTIVATION: tl.constexpr,
    BIASED: tl.constexpr,
    K: tl.constexpr, ROWS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, AHEAD: tl.constexpr,
    FETCH: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    EACH: tl.constexpr = 2 if ACTIVATION == _SWIGLU else 1  # weight rows an output
    lanes = tl.arange(0, ROWS)
    rows = tl.minimum(tile * (ROWS // EACH) + lanes // EACH, WIDTH - 1) + lanes % EACH * WIDTH
    acc, whole = products(
        X, NORM_W, NORM_B, W, X, W, PART, COUNT, rows, tile, batch, eps,
        K, ROWS, BM, BK, SPLIT, AHEAD, FETCH, NORM, PDL, STAGES, TMA,
    )  # fmt: skip
    if whole:
        if BIASED:
            acc += tl.load(BIAS + rows).to(tl.float32)[:, None]
        if ACTIVATION == _SWIGLU:
            gate, value = pairs(acc, ROWS // 2, BM)
            out = gate * tl.sigmoid(gate) * value
        elif ACTIVATION == _GELU:
            out = gelu_tanh(acc)
        else:
            out = acc
        n = tile * (ROWS // EACH) + tl.arange(0, ROWS // EACH)
        m = tl.arange(0, BM)
        keep = (n < WIDTH)[:, None] & (m < batch)[None, :]
        tl.store(OUT + m[None, :] * WIDTH + n[:, None], out.to(OUT.dtype.element_ty), mask=keep)


def norm_product(
    x: torch.Tensor, norm: NormWeights, weight: torch.Tensor, bias: torch.Tensor | None, activation: int,
    tile: ProductTile, workspace: Workspace, *, normed: bool = False,
) -> torch.Tensor:  # fmt: skip
    """[T, width] of x [T, K] and weight [rows, K], contiguous; width is half the rows for SWIGLU (gates first, then values).

    `normed`: x has been through the norm already.
    """
    tokens, k = x.shape
    columns = columns_of(tokens)
    if tile.tma:
        from pdlab.kernels import staged_product as staged

        if normed and activation != GELU and staged.fits(x, weight, bias, tile):
            return staged.staged_norm_product(x, weight, activation == SWIGLU, tile, workspace)
        tile = staged.plain_tile("norm_mlp_up", x, weight, tile)
    width = weight.shape[0] // 2 if activation == SWIGLU else weight.shape[0]
    tiles = triton.cdiv(weight.shape[0], tile.rows)
    part, count = workspace.fit(tiles, tile, columns)
    kind = PLAIN if normed else RMS if norm.bias is None else LAYER
    out = torch.empty((tokens, width), dtype=x.dtype, device=x.device)
    norm_product_kernel[(tiles, tile.split)](
        x, norm.weight, norm.weight if norm.bias is None else norm.bias, weight, x if bias is None else bias, out,
        part, count, norm.eps, tokens, WIDTH=width, ACTIVATION=activation, BIASED=bias is not None,
        **constants(tile, columns, k, kind),
    )  # fmt: skip
    return out
