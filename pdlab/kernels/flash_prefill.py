"""Prefill attention: many queries a request over its cache, causal or full, variable lengths packed in one launch.

    S = scale * Q K^T,   O = softmax(S + mask) V,   one tile of S at a time with a running maximum and denominator

FLOPs: 4 * pairs * head_dim a query head, pairs = n (c + (n + 1) / 2) for n queries after c cached tokens. Bytes: q, k, v, o
once. Bound: compute from about a thousand tokens on; below that, bandwidth. At 16384 tokens, 32 heads of 128, causal: 2.2
TFLOP, 3.0 ms at 730 TFLOP/s.

A tile's rows are (token, head of the group) pairs, token-major: one tile of K and V serves the whole group, and the causal
diagonal crosses BLOCK_M / group tokens of a tile instead of BLOCK_M. Tiles are handed out longest first, a few KV heads at a
time so that their K and V stay in L2 while every tile that needs them runs.

Oracle: reference.ReferenceOps.attention. Twin for the interpreter: this kernel itself (fp16, fp32).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pdlab.kernels.addressing import offsets_of, padded_batch, padded_head, pages_of, pick

if TYPE_CHECKING:
    from pdlab.kernels.kv_view import KVView
    from pdlab.kernels.tuning import PrefillTile

LOG2E = 1.4426950408889634


@triton.jit
def tile_of_rank(rank, tiles_of, done_of, lanes_b, BATCH_PAD: tl.constexpr):
    """(request, tile) of the rank-th largest piece of work.

    Request b has tiles 0...tiles_of[b]-1, and tile m costs done_of[b] + m + 1 in units of a tile's rows. The largest cost c
    with more than `rank` tiles of cost >= c is found by halving: log2(longest) steps, nothing sorted, nothing from the host.
    """
    if BATCH_PAD == 1:
        return rank * 0, tl.sum(tiles_of, 0) - 1 - rank
    else:
        top = tl.where(tiles_of > 0, done_of + tiles_of, 0)
        low = rank * 0 + 1  # more than `rank` tiles cost at least this
        high = tl.max(top, 0) + 1  # at most `rank` tiles do
        while high - low > 1:
            middle = (low + high) // 2
            count = tl.sum(tl.minimum(tl.maximum(top - middle + 1, 0), tiles_of), 0)
            low = tl.where(count > rank, middle, low)
            high = tl.where(count > rank, high, middle)
        dearer = tl.sum(tl.minimum(tl.maximum(top - low, 0), tiles_of), 0)
        of_this_cost = (done_of < low) & (low <= top)
        request = tl.sum((tl.cumsum(of_this_cost.to(tl.int32), 0) <= rank - dearer).to(tl.int32), 0)
        return request, low - 1 - pick(done_of, request, lanes_b)


@triton.jit
def _step(
    m,
    denominator,
    acc,
    q,
    K,
    V,
    TABLE,
    BASE,
    start,
    newest,
    newest_key,
    request,
    scale_log2,
    table_stride,
    page_stride,
    row_stride,
    HEAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    PAGED: tl.constexpr,
    PAGE: tl.constexpr,
):
    """One tile of keys. `newest`: the last key each row may see; only MASKED tiles hold keys that some row may not."""
    lanes_n = tl.arange(0, BLOCK_N)
    lanes_d = tl.arange(0, HEAD_PAD)
    if PAGED and PAGE % BLOCK_N == 0:  # the tile lies in one page: one look-up, and addresses that the compiler sees through
        page = tl.load(TABLE + request * table_stride + start // PAGE).to(tl.int64)
        rows = start % PAGE + lanes_n
        if MASKED:
            rows = tl.minimum(rows, newest_key - start + start % PAGE)
        here = page * page_stride + rows * row_stride
    else:
        t = start + lanes_n
        if MASKED:
            t = tl.minimum(t, newest_key)
        here = offsets_of(pages_of(t, request, TABLE, BASE, table_stride, PAGED, PAGE), t, page_stride, row_stride, PAGED, PAGE)
    offsets = here[:, None] + lanes_d[None, :]
    if HEAD == HEAD_PAD:
        k = tl.load(K + offsets)
    else:
        k = tl.load(K + offsets, mask=(lanes_d < HEAD)[None, :], other=0.0)
    scores = tl.dot(q, k.T, input_precision="ieee")
    if MASKED:
        scores = tl.where((start + lanes_n)[None, :] <= newest[:, None], scores, float("-inf"))
    m_new = tl.maximum(m, tl.max(scores, 1) * scale_log2)
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row without a key so far: -inf - -inf is NaN
    p = tl.exp2(scores * scale_log2 - m_safe[:, None])
    rescale = tl.exp2(m - m_safe)
    denominator = denominator * rescale + tl.sum(p, 1)
    if HEAD == HEAD_PAD:
        v = tl.load(V + offsets)
    else:
        v = tl.load(V + offsets, mask=(lanes_d < HEAD)[None, :], other=0.0)
    acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    return m_new, denominator, acc


@triton.jit(do_not_specialize=["batch", "heads_at_once", "table_stride"])
def flash_prefill_kernel(
    Q,
    K,
    V,
    OUT,
    TABLE,
    BASE,
    LENS,
    CU_Q,
    scale_log2,
    batch,
    heads_at_once,
    table_stride,
    page_stride,
    head_stride,
    row_stride,
    q_token_stride,
    q_head_stride,
    o_token_stride,
    o_head_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BATCH_PAD: tl.constexpr,
    MIN_Q: tl.constexpr,
    CAUSAL: tl.constexpr,
    PAGED: tl.constexpr,
    PAGE: tl.constexpr,
    STAGES: tl.constexpr,
):
    pid = tl.program_id(0)
    lanes_b = tl.arange(0, BATCH_PAD)
    real = lanes_b < batch
    q_first = tl.load(CU_Q + lanes_b, mask=real, other=0)
    q_count = tl.load(CU_Q + lanes_b + 1, mask=real, other=0) - q_first
    lens = tl.load(LENS + lanes_b, mask=real, other=0)
    tiles_of = tl.where(q_count >= MIN_Q, (q_count * GROUP + BLOCK_M - 1) // BLOCK_M, 0)  # shorter: the decode kernel's
    total = tl.sum(tiles_of, 0)
    if pid >= total * KV_HEADS:  # the grid is an upper bound
        return
    part = pid // (total * heads_at_once)
    into = pid - part * total * heads_at_once
    heads_here = tl.minimum(heads_at_once, KV_HEADS - part * heads_at_once)
    head = part * heads_at_once + into % heads_here
    if CAUSAL:
        done = tl.maximum(lens - q_count, 0) * GROUP // BLOCK_M
    else:
        done = lens * GROUP // BLOCK_M
    request, tile = tile_of_rank(into // heads_here, tiles_of, done, lanes_b, BATCH_PAD)
    length = pick(lens, request, lanes_b)
    queries = pick(q_count, request, lanes_b)
    token = pick(q_first, request, lanes_b).to(tl.int64)

    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    lanes_d = tl.arange(0, HEAD_PAD)
    keep = (rows < queries * GROUP)[:, None] & (lanes_d < HEAD)[None, :]
    q_at = (token + rows // GROUP) * q_token_stride + (head * GROUP + rows % GROUP) * q_head_stride
    q = tl.load(Q + q_at[:, None] + lanes_d[None, :], mask=keep, other=0.0)
    K += head.to(tl.int64) * head_stride
    V += head.to(tl.int64) * head_stride

    newest_key = tl.maximum(length - 1, 0)
    if CAUSAL:
        newest = tl.minimum(length - queries + rows // GROUP, length - 1)
        clear = tl.minimum(length - queries + tile * BLOCK_M // GROUP + 1, length)  # keys that every row may see
        last = tl.minimum(length - queries + (tile * BLOCK_M + BLOCK_M - 1) // GROUP + 1, length)
    else:
        newest = tl.full((BLOCK_M,), 0, tl.int32) + length - 1
        clear = length
        last = length
    clear = tl.maximum(clear, 0) // BLOCK_N * BLOCK_N
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    denominator = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, HEAD_PAD), tl.float32)
    for start in tl.range(0, clear, BLOCK_N, num_stages=STAGES):
        m, denominator, acc = _step(
            m, denominator, acc, q, K, V, TABLE, BASE, start, newest, newest_key, request, scale_log2,
            table_stride, page_stride, row_stride, HEAD, HEAD_PAD, BLOCK_N, False, PAGED, PAGE,
        )  # fmt: skip
    for start in tl.range(clear, last, BLOCK_N, num_stages=1):  # the diagonal and the ragged end
        m, denominator, acc = _step(
            m, denominator, acc, q, K, V, TABLE, BASE, start, newest, newest_key, request, scale_log2,
            table_stride, page_stride, row_stride, HEAD, HEAD_PAD, BLOCK_N, True, PAGED, PAGE,
        )  # fmt: skip
    acc = acc / tl.where(denominator == 0.0, 1.0, denominator)[:, None]
    o_at = (token + rows // GROUP) * o_token_stride + (head * GROUP + rows % GROUP) * o_head_stride
    tl.store(OUT + o_at[:, None] + lanes_d[None, :], acc.to(OUT.dtype.element_ty), mask=keep)


def flash_prefill(
    q: torch.Tensor,
    view: KVView,
    tile: PrefillTile,
    *,
    causal: bool = True,
    min_q: int = 1,
    scale: float | None = None,
    l2_bytes: int = 32 << 20,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of every request with at least `min_q` new tokens over its cache; rows of other requests are left alone.

    q [T, N, D] with contiguous D; view.k and view.v [pages, K, page_size, D] of one layer, equal strides; a request's queries
    are its last positions, so a cached prefix of any length may come before them. `causal=False` lets each query see the whole
    cache. Returns `out` [T, N, D], made with torch.empty when absent. A request with an empty cache gets zeros.
    """
    tokens, heads, head_dim = q.shape
    kv_heads = view.k.shape[1]
    group = heads // kv_heads
    batch = view.seq_lens.shape[0]
    if out is None:
        out = torch.empty((tokens, heads, head_dim), dtype=q.dtype, device=q.device)
    held = sum(kv for _, kv in view.host_lens) or batch * view.max_kv
    heads_at_once = max(1, min(kv_heads, l2_bytes // max(1, 2 * held * head_dim * q.element_size())))
    # every request may waste part of one tile; those without enough queries have none
    tiles = triton.cdiv(tokens * group, tile.block_m) + min(batch, tokens)
    flash_prefill_kernel[(tiles * kv_heads,)](
        q, view.k, view.v, out, view.block_table, view.base, view.seq_lens, view.cu_q,
        (head_dim**-0.5 if scale is None else scale) * LOG2E, batch, heads_at_once, view.block_table.stride(0),
        view.k.stride(0), view.k.stride(1), view.k.stride(2), q.stride(0), q.stride(1), out.stride(0), out.stride(1),
        KV_HEADS=kv_heads, GROUP=group, HEAD=head_dim, HEAD_PAD=padded_head(head_dim), BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n, BATCH_PAD=padded_batch(batch), MIN_Q=min_q, CAUSAL=causal,
        PAGED=view.kind == "paged", PAGE=view.page_size, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return out
