"""Decode attention: few queries a request against a long cache, split evenly over a fixed number of programs.

    s_t = scale * q . k_t,   o = sum_t exp(s_t - m) v_t / sum_t exp(s_t - m),   m = max_t s_t

Bytes: K and V once, 2 * kv_heads * head_dim * itemsize a cached token (4 KB for 8 heads of 128 in bf16); q, o and the
partial results are small. Bound: bandwidth. At 32 x 4096 tokens, 8 KV heads of 128: 537 MB, 116 us at 4.63 TB/s.

The query heads of a group share their K and V, so they are the rows of one matrix product. All (request, KV head) segments,
cut into tiles of BLOCK_N tokens, form one line; program p of P takes an equal stretch of it (`share_out`), so a request of 128k
tokens beside thirty-one of 4k costs what its bytes cost. A segment that several programs share is combined by the last of them
to finish (its counter says so), without a second launch. All sizes that change from step to step are read on the device: the
grid is fixed, and a captured CUDA graph stays valid. flash_decode_ring does the same faster for single queries and the usual
head sizes; this one takes any.

Oracle: reference.ReferenceOps.attention. Twin for the interpreter: this kernel itself (fp16, fp32).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pdlab.kernels.addressing import offsets_of, padded_batch, padded_head, pages_of, pick

if TYPE_CHECKING:
    from pdlab.kernels.kv_view import KVView
    from pdlab.kernels.tuning import DecodeTile

LOG2E = 1.4426950408889634


@triton.jit
def share_out(tiles_of, ours, programs, KV_HEADS: tl.constexpr):
    """How the line of tiles is cut: (piece, share). A segment's place on the line is its tiles rounded up to whole pieces, and
    program p has the line from p * share on.

    Where lengths are alike, each program has one piece of one segment, or several whole segments: none has to finish two parts.
    That may leave an eighth of the time unused; where it would leave more, stretches begin and end anywhere (pieces are tiles).
    """
    total = tl.sum(tiles_of, 0) * KV_HEADS
    longest = tl.maximum(tl.max(tiles_of, 0), 1)
    segments = tl.maximum(tl.sum(ours.to(tl.int32), 0) * KV_HEADS, 1)
    pieces = programs // segments  # of one segment
    piece = (longest + pieces - 1) // tl.maximum(pieces, 1)
    piece = tl.where(pieces == 0, longest, piece)
    share = tl.where(pieces == 0, (segments + programs - 1) // programs * longest, piece)
    even = tl.maximum((total + programs - 1) // programs, 1)
    uneven = share * 8 > even * 9
    return tl.where(uneven, 1, piece), tl.where(uneven, even, share)


@triton.jit
def _attend(
    q,
    K,
    V,
    TABLE,
    BASE,
    scale_log2,
    request,
    first,
    last,
    length,
    queries,
    table_stride,
    page_stride,
    row_stride,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MAX_Q: tl.constexpr,
    PAGED: tl.constexpr,
    PAGE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Online softmax of ROWS query rows over positions [first, last): running maximum, denominator, weighted sum of V."""
    lanes_d = tl.arange(0, HEAD_PAD)
    in_head = lanes_d < HEAD
    newest = length - queries + tl.arange(0, ROWS) // GROUP  # the last position each row may see
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    denominator = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, HEAD_PAD), tl.float32)
    newest_key = tl.maximum(length - 1, 0)
    t = tl.minimum(first + tl.arange(0, BLOCK_N), newest_key)
    pages = pages_of(t, request, TABLE, BASE, table_stride, PAGED, PAGE)
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        t = start + tl.arange(0, BLOCK_N)
        here = offsets_of(pages, tl.minimum(t, newest_key), page_stride, row_stride, PAGED, PAGE)
        offsets = here[:, None] + lanes_d[None, :]
        # The next tile's pages are fetched a whole iteration before they are needed: K and V loads never wait for them.
        pages = pages_of(tl.minimum(t + BLOCK_N, newest_key), request, TABLE, BASE, table_stride, PAGED, PAGE)
        if HEAD == HEAD_PAD:
            k = tl.load(K + offsets)
        else:
            k = tl.load(K + offsets, mask=in_head[None, :], other=0.0)
        scores = tl.dot(q, k.T, input_precision="ieee")
        if MAX_Q == 1:
            scores = tl.where((t < length)[None, :], scores, float("-inf"))
        else:
            scores = tl.where(t[None, :] <= newest[:, None], scores, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, 1) * scale_log2)
        # A row that has seen no key yet has m_new = -inf, and -inf - -inf is NaN: subtract 0 there instead.
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(scores * scale_log2 - m_safe[:, None])
        rescale = tl.exp2(m - m_safe)
        denominator = denominator * rescale + tl.sum(p, 1)
        if HEAD == HEAD_PAD:
            v = tl.load(V + offsets)
        else:
            v = tl.load(V + offsets, mask=in_head[None, :], other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
        m = m_new
    return m, denominator, acc


@triton.jit
def _combine(
    PART_O,
    PART_LSE,
    OUT,
    slot_first,
    program_first,
    count,
    queries,
    out_offset,
    out_token_stride,
    out_head_stride,
    GROUP: tl.constexpr,
    ROWS_PAD: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    PARTS: tl.constexpr,
    MAX_Q: tl.constexpr,
):
    """Merges `count` partial results of one segment, PARTS at a time, and writes the segment's output."""
    rows = tl.arange(0, ROWS_PAD)
    lanes_d = tl.arange(0, HEAD_PAD)
    parts = tl.arange(0, PARTS)
    held = rows < MAX_Q * GROUP
    m = tl.full((ROWS_PAD,), float("-inf"), tl.float32)
    denominator = tl.zeros((ROWS_PAD,), tl.float32)
    acc = tl.zeros((ROWS_PAD, HEAD_PAD), tl.float32)
    for i in range(0, count, PARTS):
        index = i + parts
        slot = tl.where(index == 0, slot_first, 2 * (program_first + index))
        there = (index < count)[:, None] & held[None, :]
        at = slot[:, None] * (MAX_Q * GROUP) + rows[None, :]
        # .cg: written by other SMs during this launch, so read from L2
        lse = tl.load(PART_LSE + at, mask=there, other=float("-inf"), cache_modifier=".cg")
        part = tl.load(
            PART_O + at[:, :, None] * HEAD_PAD + lanes_d[None, None, :], mask=there[:, :, None], other=0.0, cache_modifier=".cg"
        )
        m_new = tl.maximum(m, tl.max(lse, 0))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        weight = tl.exp2(lse - m_safe[None, :])
        rescale = tl.exp2(m - m_safe)
        denominator = denominator * rescale + tl.sum(weight, 0)
        acc = acc * rescale[:, None] + tl.sum(part * weight[:, :, None], 0)
        m = m_new
    acc = acc / tl.where(denominator == 0.0, 1.0, denominator)[:, None]
    out = out_offset + (rows // GROUP) * out_token_stride + (rows % GROUP) * out_head_stride
    keep = (rows < queries * GROUP)[:, None] & (lanes_d < HEAD)[None, :]
    tl.store(OUT + out[:, None] + lanes_d[None, :], acc.to(OUT.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["batch", "table_stride"])
def flash_decode_kernel(
    Q,
    K,
    V,
    OUT,
    TABLE,
    BASE,
    LENS,
    CU_Q,
    PART_O,
    PART_LSE,
    COUNTERS,
    scale_log2,
    batch,
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
    ROWS: tl.constexpr,  # query rows of the matrix product: MAX_Q * GROUP padded to a power of two, at least 16
    ROWS_PAD: tl.constexpr,  # the same for the combination, which has no least size
    HEAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BATCH_PAD: tl.constexpr,
    MAX_Q: tl.constexpr,
    PAGED: tl.constexpr,
    PAGE: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,  # launched as a programmatic dependent of the kernel before it (from capability 9.0 on)
):
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    lanes_b = tl.arange(0, BATCH_PAD)
    real = lanes_b < batch
    q_first = tl.load(CU_Q + lanes_b, mask=real, other=0)
    q_count = tl.load(CU_Q + lanes_b + 1, mask=real, other=0) - q_first
    lens = tl.load(LENS + lanes_b, mask=real, other=0)
    ours = (q_count > 0) & (q_count <= MAX_Q)  # longer ones are the prefill kernel's
    tiles_of = tl.where(ours, tl.maximum((lens + BLOCK_N - 1) // BLOCK_N, 1), 0)
    piece, share = share_out(tiles_of, ours, programs, KV_HEADS)
    slots_of = (tiles_of + piece - 1) // piece * piece
    ends = tl.cumsum(slots_of, 0) * KV_HEADS
    mine = pid * share
    stop = tl.minimum(mine + share, tl.sum(slots_of, 0) * KV_HEADS)

    if PDL:  # lengths and tables are older than the kernel before this one; q, the newest K and V and the workspace are not
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    rows = tl.arange(0, ROWS)
    lanes_d = tl.arange(0, HEAD_PAD)
    tile = mine
    while tile < stop:
        request = tl.sum((ends <= tile).to(tl.int32), 0)
        length = pick(lens, request, lanes_b)
        tiles = tl.maximum((length + BLOCK_N - 1) // BLOCK_N, 1)
        slots = (tiles + piece - 1) // piece * piece
        queries = pick(q_count, request, lanes_b)
        token = pick(q_first, request, lanes_b).to(tl.int64)
        into = tile - (pick(ends, request, lanes_b) - slots * KV_HEADS)
        head = into // slots
        first = into % slots
        count = tl.minimum(stop - tile, tiles - first)

        row_ok = rows < queries * GROUP
        q_at = (token + rows // GROUP) * q_token_stride + (head * GROUP + rows % GROUP) * q_head_stride
        q = tl.load(Q + q_at[:, None] + lanes_d[None, :], mask=row_ok[:, None] & (lanes_d < HEAD)[None, :], other=0.0)
        head_at = head.to(tl.int64) * head_stride
        m, denominator, acc = _attend(
            q, K + head_at, V + head_at, TABLE, BASE, scale_log2, request,
            first * BLOCK_N, tl.minimum((first + count) * BLOCK_N, length), length, queries,
            table_stride, page_stride, row_stride,
            GROUP, ROWS, HEAD, HEAD_PAD, BLOCK_N, MAX_Q, PAGED, PAGE, STAGES,
        )  # fmt: skip
        acc = acc / tl.where(denominator == 0.0, 1.0, denominator)[:, None]
        out_offset = token * o_token_stride + head * GROUP * o_head_stride
        if count == tiles:
            out = out_offset + (rows // GROUP) * o_token_stride + (rows % GROUP) * o_head_stride
            keep = row_ok[:, None] & (lanes_d < HEAD)[None, :]
            tl.store(OUT + out[:, None] + lanes_d[None, :], acc.to(OUT.dtype.element_ty), mask=keep)
        else:
            # A program's stretch cuts at most two segments: the one it starts in and the one it ends in.
            slot = 2 * pid + (tile > mine).to(tl.int32)
            at = slot * (MAX_Q * GROUP) + rows
            held = rows < MAX_Q * GROUP
            lse = tl.where(denominator == 0.0, float("-inf"), m + tl.log2(denominator))
            tl.store(PART_LSE + at, lse, mask=held)
            tl.store(PART_O + at[:, None] * HEAD_PAD + lanes_d[None, :], acc, mask=held[:, None])
            start = tile - first
            p_first = start // share
            parts = (start + tiles - 1) // share - p_first + 1
            counter = COUNTERS + request * KV_HEADS + head
            tl.debug_barrier()  # every thread's stores come before the release below
            if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == parts - 1:
                tl.store(counter, 0)  # for the next launch
                slot_first = 2 * p_first + (start > p_first * share).to(tl.int32)
                _combine(
                    PART_O, PART_LSE, OUT, slot_first, p_first, parts, queries, out_offset, o_token_stride, o_head_stride,
                    GROUP, ROWS_PAD, HEAD, HEAD_PAD, PARTS, MAX_Q,
                )  # fmt: skip
        tile = tl.minimum(tile - first + slots, stop)


@dataclass
class Workspace:
    """Partial results and counters; kept between launches so that a captured graph finds them where they were.

    Launches that share a workspace must not run at the same time (streams side by side need one each).
    """

    part_o: torch.Tensor  # f32[2 * programs * rows * head_pad]
    part_lse: torch.Tensor  # f32[2 * programs * rows]
    counters: torch.Tensor  # i32[batch * kv_heads]; zero between launches

    @classmethod
    def create(cls, device: torch.device | str, *, programs: int, rows: int, head_dim: int, segments: int) -> Workspace:
        slots = 2 * programs * rows
        return cls(
            torch.empty(slots * padded_head(head_dim), dtype=torch.float32, device=device),
            torch.empty(slots, dtype=torch.float32, device=device),
            torch.zeros(segments, dtype=torch.int32, device=device),
        )

    def fits(self, *, programs: int, rows: int, head_dim: int, segments: int) -> bool:
        slots = 2 * programs * rows
        return (
            self.part_lse.numel() >= slots
            and self.part_o.numel() >= slots * padded_head(head_dim)
            and self.counters.numel() >= segments
        )


def flash_decode(
    q: torch.Tensor,
    view: KVView,
    workspace: Workspace,
    tile: DecodeTile,
    programs: int,
    *,
    max_q: int = 1,
    scale: float | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of every request with 1...max_q new tokens over its cache; rows of other requests are left alone.

    q [T, N, D] with contiguous D (a view of packed qkv is fine); view.k and view.v [pages, K, page_size, D] of one layer, equal
    strides; the new tokens' own K and V are already written. Returns `out` [T, N, D], made with torch.empty when absent.
    A request whose cache is empty gets zeros. `workspace` must fit `programs`, max_q * N/K rows and batch * K segments.

    With `tile.pdl` the kernel reads lengths and tables before the kernel launched just before it has ended, so that one must
    not be what writes them.
    """
    tokens, heads, head_dim = q.shape
    kv_heads = view.k.shape[1]
    group = heads // kv_heads
    batch = view.seq_lens.shape[0]
    rows = max_q * group
    if out is None:
        out = torch.empty((tokens, heads, head_dim), dtype=q.dtype, device=q.device)
    head_pad = padded_head(head_dim)
    rows_pad = triton.next_power_of_2(rows)
    parts = max(1, min(32, 2048 * tile.warps // (rows_pad * head_pad)))
    flash_decode_kernel[(programs,)](
        q, view.k, view.v, out, view.block_table, view.base, view.seq_lens, view.cu_q,
        workspace.part_o, workspace.part_lse, workspace.counters,
        (head_dim**-0.5 if scale is None else scale) * LOG2E, batch, view.block_table.stride(0),
        view.k.stride(0), view.k.stride(1), view.k.stride(2), q.stride(0), q.stride(1), out.stride(0), out.stride(1),
        KV_HEADS=kv_heads, GROUP=group, ROWS=max(16, rows_pad), ROWS_PAD=rows_pad, HEAD=head_dim, HEAD_PAD=head_pad,
        BLOCK_N=tile.block_n, BATCH_PAD=padded_batch(batch), MAX_Q=max_q, PAGED=view.kind == "paged",
        PAGE=view.page_size, PARTS=parts, STAGES=tile.stages, PDL=tile.pdl, num_warps=tile.warps,
        **({"launch_pdl": True} if tile.pdl else {}),
    )  # fmt: skip
    return out
