"""Norm, packed QKV product, rotary embedding and the write into the KV cache, in one pass over the weights.

    [q, k, v] = norm(x) W^T + b
    q, k      = (a cos - b sin, b cos + a sin)   for the partners a = q[d], b = q[d + D/2], at the token's position
    cache[slot] = k, v                           q [T, N, D] is returned

Bytes: the weights once, (N + 2K) D H itemsize; x, q, k and v are T rows beside thousands. Bound: bandwidth. LLaMA 8B in bf16:
50.3 MB, 10.9 us at 4.63 TB/s. A tile of rows holds rotary partners side by side, so no product leaves the registers unrotated.

Oracle: reference.ReferenceOps.norm_qkv_rope. Twin for the interpreter: this kernel itself (fp16, fp32).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pdlab.kernels.kv_view import KVView
from pdlab.kernels.ops import LayerWeights, RopeTable
from pdlab.kernels.product_tiles import ProductTile, columns_of
from pdlab.kernels.products import LAYER, PLAIN, RMS, Workspace, constants, pairs, products


@triton.jit(do_not_specialize=["batch"])
def norm_qkv_rope_kernel(
    X, NORM_W, NORM_B, W, BIAS, COS, SIN, POSITIONS, SLOTS, Q, KC, VC, PART, COUNT, eps, batch,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,  # half of a head: the distance of rotary partners
    PAGE: tl.constexpr,
    ROPE: tl.constexpr,
    BIASED: tl.constexpr,
    K: tl.constexpr, ROWS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, AHEAD: tl.constexpr,
    FETCH: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    last = (HEADS + 2 * KV_HEADS) * HALF - 1
    lanes = tl.arange(0, ROWS)
    of_lane = tl.minimum(tile * (ROWS // 2) + lanes // 2, last)
    rows = of_lane // HALF * (2 * HALF) + lanes % 2 * HALF + of_lane % HALF

    pair = tile * (ROWS // 2) + tl.arange(0, ROWS // 2)
    m = tl.arange(0, BM)
    real = m < batch
    head, d = pair // HALF, pair % HALF
    # where tokens are and go was uploaded before the step began, so this need not wait for the kernel before
    slot = tl.load(SLOTS + m, mask=real, other=0)
    if ROPE:
        position = tl.load(POSITIONS + m, mask=real, other=0)
        turned = (pair <= last) & (head < HEADS + KV_HEADS)
        angle = position[None, :] * HALF + d[:, None]
        cos = tl.load(COS + angle, mask=turned[:, None], other=1.0)
        sin = tl.load(SIN + angle, mask=turned[:, None], other=0.0)

    acc, whole = products(
        X, NORM_W, NORM_B, W, X, W, PART, COUNT, rows, tile, batch, eps,
        K, ROWS, BM, BK, SPLIT, AHEAD, FETCH, NORM, PDL, STAGES, TMA,
    )  # fmt: skip
    if whole:
        if BIASED:
            acc += tl.load(BIAS + rows).to(tl.float32)[:, None]
        a, b = pairs(acc, ROWS // 2, BM)
        if ROPE:
            a, b = a * cos - b * sin, b * cos + a * sin
        keep = (pair <= last)[:, None] & real[None, :]
        is_q, is_k = (head < HEADS)[:, None], (head < HEADS + KV_HEADS)[:, None]
        to = Q + (m.to(tl.int64)[None, :] * HEADS + head[:, None]) * (2 * HALF) + d[:, None]
        tl.store(to, a.to(Q.dtype.element_ty), mask=keep & is_q)
        tl.store(to + HALF, b.to(Q.dtype.element_ty), mask=keep & is_q)
        kv_head = (head - HEADS) % KV_HEADS
        row = (slot // PAGE)[None, :] * (KV_HEADS * PAGE) + kv_head[:, None] * PAGE + (slot % PAGE)[None, :]
        at = row * (2 * HALF) + d[:, None]
        tl.store(KC + at, a.to(KC.dtype.element_ty), mask=keep & is_k & (is_q == 0))
        tl.store(KC + at + HALF, b.to(KC.dtype.element_ty), mask=keep & is_k & (is_q == 0))
        tl.store(VC + at, a.to(VC.dtype.element_ty), mask=keep & (is_k == 0))
        tl.store(VC + at + HALF, b.to(VC.dtype.element_ty), mask=keep & (is_k == 0))


def norm_qkv_rope(
    x: torch.Tensor, w: LayerWeights, rope: RopeTable | None, view: KVView, tile: ProductTile, workspace: Workspace,
    *, normed: bool = False,
) -> torch.Tensor:  # fmt: skip
    """q [T, N, D] of x [T, H] (contiguous); writes view.k and view.v [pages, K, page_size, D] (contiguous) at view.slots.

    Head sizes are even. `normed`: x has been through the norm already. No q/k norm: that needs a whole head in one program.
    """
    kv_heads, page, dim = view.k.shape[1:]
    heads = w.qkv.shape[0] // dim - 2 * kv_heads
    tokens, k = x.shape
    columns = columns_of(tokens)
    if tile.tma:
        from pdlab.kernels import staged_product as staged

        whole_heads = not tile.rows % dim and not heads % (tile.rows // dim) and not kv_heads % (tile.rows // dim)
        if normed and rope is not None and whole_heads and staged.fits(x, w.qkv, w.qkv_bias, tile):
            return staged.staged_qkv_rope(x, w, rope, view, tile, workspace)
        tile = staged.plain_tile("norm_qkv_rope", x, w.qkv, tile)
    tiles = triton.cdiv((heads + 2 * kv_heads) * dim, tile.rows)
    part, count = workspace.fit(tiles, tile, columns)
    norm = w.attn_norm
    kind = PLAIN if normed else RMS if norm.bias is None else LAYER
    q = torch.empty((tokens, heads, dim), dtype=x.dtype, device=x.device)
    cos, sin = (rope.cos, rope.sin) if rope is not None else (x, x)
    norm_qkv_rope_kernel[(tiles, tile.split)](
        x, norm.weight, norm.weight if norm.bias is None else norm.bias, w.qkv, x if w.qkv_bias is None else w.qkv_bias,
        cos, sin, view.positions, view.slots, q, view.k, view.v, part, count, norm.eps, tokens,
        HEADS=heads, KV_HEADS=kv_heads, HALF=dim // 2, PAGE=page, ROPE=rope is not None, BIASED=w.qkv_bias is not None,
        **constants(tile, columns, k, kind),
    )  # fmt: skip
    return q
