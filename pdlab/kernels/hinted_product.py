"""A matrix-vector product whose weight loads carry a hint for the caches. An experiment, not a part of the engine.

    y[r] = sum_k W[r, k] x[k]

Bytes: W once, rows * K * itemsize. Bound: bandwidth. A hint says which lines the L2 should give up first (evict_first), last
(evict_last) or in its usual order, or that the L1 is not worth filling (.cg). None changes a result.

Oracle: the product in float64. Twin for the interpreter: this kernel itself (fp16, fp32), which ignores hints.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# name -> (eviction_policy, cache_modifier) of tl.load
HINTS = {"none": ("", ""), "evict_first": ("evict_first", ""), "evict_last": ("evict_last", ""), "no_l1": ("", ".cg")}


@triton.jit
def hinted_product_kernel(
    W, X, Y, rows, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EVICT: tl.constexpr, CACHE: tl.constexpr
):
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lanes = tl.arange(0, BLOCK)
    line = W + tl.minimum(r, rows - 1).to(tl.int64)[:, None] * COLUMNS
    acc = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in tl.static_range(0, COLUMNS, BLOCK):
        k = start + lanes
        w = tl.load(line + k[None, :], mask=(k < COLUMNS)[None, :], other=0.0, eviction_policy=EVICT, cache_modifier=CACHE)
        x = tl.load(X + k, mask=k < COLUMNS, other=0.0)
        acc += w.to(tl.float32) * x.to(tl.float32)[None, :]
    tl.store(Y + r, tl.sum(acc, 1).to(Y.dtype.element_ty), mask=r < rows)


def hinted_product(
    w: torch.Tensor, x: torch.Tensor, hint: str, *, rows: int = 4, block: int = 1024, warps: int = 8
) -> torch.Tensor:
    """y [rows] of contiguous w [rows, K] and x [K]; `hint` is a name of HINTS, `rows` what a program takes."""
    y = torch.empty(len(w), dtype=w.dtype, device=w.device)
    evict, cache = HINTS[hint]
    hinted_product_kernel[(triton.cdiv(len(w), rows),)](
        w, x, y, len(w), COLUMNS=w.shape[1], ROWS=rows, BLOCK=block, EVICT=evict, CACHE=cache, num_warps=warps
    )
    return y
