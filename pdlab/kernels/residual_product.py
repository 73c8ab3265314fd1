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

from pdlab.kernels.ops import NormWeights
from pdlab.kernels.product_tiles import ProductTile, columns_of
from pdlab.kernels.products import PLAIN, Following, Scaled, Workspace, constants, descriptors, products


@triton.jit(do_not_specialize=["batch"])
def residual_product_kernel(
    U, W, UD, WD, BIAS, X, OUT, NORM_W, Y, SUMS_OF, NEXT, PART, COUNT, batch,
    OUTPUTS: tl.constexpr,
    BIASED: tl.constexpr,
    SCALES: tl.constexpr,  # also gives Y = x' times the next norm's weights, and each tile's sums of squares of x'
    K: tl.constexpr, ROWS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, AHEAD: tl.constexpr,
    FETCH: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
    NEXT_EACH: tl.constexpr, NEXT_SIZE: tl.constexpr, NEXT_APART: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    lanes = tile * ROWS + tl.arange(0, ROWS)
    rows = tl.minimum(lanes, OUTPUTS - 1)
    acc, whole = products(
        U, U, U, W, UD, WD, NEXT, PART, COUNT, rows, tile, batch, 0.0, 0,
        K, ROWS, BM, BK, SPLIT, AHEAD, FETCH, NORM, PDL, STAGES, TMA, 0, NEXT_EACH, NEXT_SIZE, NEXT_APART, SUMS,
    )  # fmt: skip
    if whole:
        m = tl.arange(0, BM)
        at = m[None, :] * OUTPUTS + rows[:, None]
        keep = (lanes < OUTPUTS)[:, None] & (m < batch)[None, :]
        if BIASED:
            acc += tl.load(BIAS + rows).to(tl.float32)[:, None]
        acc += tl.load(X + at, mask=keep, other=0.0).to(tl.float32)
        out = acc.to(OUT.dtype.element_ty)
        tl.store(OUT + at, out, mask=keep)
        if SCALES:
            x = tl.where(keep, out.to(tl.float32), 0.0)
            g = tl.load(NORM_W + rows).to(tl.float32)
            tl.store(Y + at, (x * g[:, None]).to(Y.dtype.element_ty), mask=keep)
            tl.store(SUMS_OF + tile * BM + m, tl.sum(x * x, 0))


def residual_product(
    u: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor, tile: ProductTile, workspace: Workspace,
    *, following: Following | None = None, norm: NormWeights | None = None,
) -> tuple[torch.Tensor, Scaled | None]:  # fmt: skip
    """x [T, H] + u [T, K] @ weight [H, K]^T + bias, in a new tensor; all contiguous. `following`: what is read next.

    With the RMSNorm `norm` also what stands for the result behind it.
    """
    tokens, k = u.shape
    outputs = weight.shape[0]
    columns = columns_of(tokens)
    tiles = triton.cdiv(outputs, tile.rows)
    part, count = workspace.fit(tiles, tile, columns)
    out = torch.empty_like(x)
    scaled = None
    if norm is not None:
        scaled = Scaled(torch.empty_like(x), torch.empty((tiles, columns), dtype=torch.float32, device=x.device))
    y, sums = (x, x) if scaled is None else (scaled.y, scaled.sums)
    residual_product_kernel[(tiles, tile.split)](
        u, weight, *descriptors(u, weight, tile, columns), x if bias is None else bias, x, out,
        x if norm is None else norm.weight, y, sums,
        weight if following is None else following.weight, part, count, tokens,
        OUTPUTS=outputs, BIASED=bias is not None, SCALES=norm is not None,
        **constants(tile, columns, k, PLAIN, tiles * tile.split, following),
    )  # fmt: skip
    return out, scaled
