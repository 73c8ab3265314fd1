"""Residual stream plus a product: the output projection of attention, and the down projection of the MLP.

    x' = x + u W^T + b

Bytes: the weights once, H K itemsize. Bound: bandwidth. LLaMA 8B down in bf16: 117 MB, 25.4 us at 4.63 TB/s. H is the smallest
number of rows a layer has, so with several activation rows programs share a row's elements (see products).

Oracles: reference.ReferenceOps.out_residual and down_residual. Twin for the interpreter: this kernel itself (fp16, fp32).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pdlab.kernels.product_tiles import ProductTile, columns_of
from pdlab.kernels.products import PLAIN, Workspace, begin, constants, products


@triton.jit(do_not_specialize=["batch"])
def residual_product_kernel(
    U, W, BIAS, X, OUT, PART, COUNT, batch,
    OUTPUTS: tl.constexpr,
    BIASED: tl.constexpr,
    K: tl.constexpr, ROWS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, AHEAD: tl.constexpr,
    FETCH: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    lanes = tile * ROWS + tl.arange(0, ROWS)
    rows = tl.minimum(lanes, OUTPUTS - 1)
    m = tl.arange(0, BM)
    at = m[None, :] * OUTPUTS + rows[:, None]
    keep = (lanes < OUTPUTS)[:, None] & (m < batch)[None, :]
    if BM > 1:
        SPAN: tl.constexpr = ((K + BK - 1) // BK + SPLIT - 1) // SPLIT * BK
        begin(W, rows, tl.program_id(1) * SPAN, K, FETCH * BK, PDL)
        x = tl.load(X + at, mask=keep, other=0.0)  # before the product, which takes longer than it to come
    acc, whole = products(
        U, U, U, W, U, W, PART, COUNT, rows, tile, batch, 0.0,
        K, ROWS, BM, BK, SPLIT, AHEAD, FETCH, NORM, PDL, STAGES, TMA, BM > 1,
    )  # fmt: skip
    if whole:
        if BIASED:
            acc += tl.load(BIAS + rows).to(tl.float32)[:, None]
        if BM == 1:
            x = tl.load(X + at, mask=keep, other=0.0)
        acc += x.to(tl.float32)
        tl.store(OUT + at, acc.to(OUT.dtype.element_ty), mask=keep)


def residual_product(
    u: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor, tile: ProductTile, workspace: Workspace
) -> torch.Tensor:
    """x [T, H] + u [T, K] @ weight [H, K]^T + bias, in a new tensor; all contiguous."""
    tokens, k = u.shape
    outputs = weight.shape[0]
    columns = columns_of(tokens)
    if tile.tma:
        from pdlab.kernels import staged_product as staged

        if staged.fits(u, weight, bias, tile):
            return staged.staged_residual_product(u, weight, x, tile, workspace)
        tile = staged.plain_tile("down_residual", u, weight, tile)
    tiles = triton.cdiv(outputs, tile.rows)
    part, count = workspace.fit(tiles, tile, columns)
    out = torch.empty_like(x)
    residual_product_kernel[(tiles, tile.split)](
        u, weight, x if bias is None else bias, x, out, part, count, tokens, OUTPUTS=outputs, BIASED=bias is not None,
        **constants(tile, columns, k, PLAIN),
    )  # fmt: skip
    return out
