"""Prefill attention on Hopper: warp-specialized, K and V brought by the tensor memory accelerator. Extents, head sizes 64, 128.

What flash_prefill computes, with the roles of a block given to different warps:

    producer    one warp; keeps a ring of K and V tiles full, and the next tile's queries, ahead of everybody
    consumers   two or three warpgroups of 64 query rows each; softmax and both products, the running output in registers

A consumer starts the product S = Q K^T of the next keys before it starts P V of the last, so the tensor cores work while it
takes exponentials; and consumers take turns at starting products (a ring of barriers), so one's exponentials run under
another's products. Keys are walked from the newest to the oldest: the masked tiles come first, and the loop over the rest
has no mask. Blocks stay: each takes every P-th tile of a list that `schedule` makes on the device, longest first.

FLOPs and bytes: as flash_prefill. Hopper only (compute capability 9.0), compiled there and nowhere else.
Oracle: reference.ReferenceOps.attention. Twin for the interpreter: flash_prefill.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from pdlab.kernels.addressing import padded_batch, pick
from pdlab.kernels.flash_prefill import LOG2E, tile_of_rank

if TYPE_CHECKING:
    from pdlab.kernels.kv_view import KVView
    from pdlab.kernels.tuning import HopperTile

ENTRY = 8  # int32 of one schedule entry: first query row, rows, first K row, tiles of keys, clear ones, newest key, keys
ROWS = gl.constexpr(64)  # query rows of a consumer


@triton.jit(do_not_specialize=["batch"])
def schedule_kernel(
    SCHEDULE,
    BASE,
    LENS,
    CU_Q,
    batch,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BATCH_PAD: tl.constexpr,
    MIN_Q: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Entry 0 holds the number of tiles, entry 1 + r the r-th longest tile, the same for every head."""
    rank = tl.program_id(0)
    lanes_b = tl.arange(0, BATCH_PAD)
    real = lanes_b < batch
    q_first = tl.load(CU_Q + lanes_b, mask=real, other=0)
    q_count = tl.load(CU_Q + lanes_b + 1, mask=real, other=0) - q_first
    lens = tl.load(LENS + lanes_b, mask=real, other=0)
    tiles_of = tl.where(q_count >= MIN_Q, (q_count + BLOCK_M - 1) // BLOCK_M, 0)
    total = tl.sum(tiles_of, 0)
    if rank == 0:
        tl.store(SCHEDULE, total)
    if rank < total:
        done = lens // BLOCK_M
        if CAUSAL:
            done = tl.maximum(lens - q_count, 0) // BLOCK_M
        request, tile = tile_of_rank(rank, tiles_of, done, lanes_b, BATCH_PAD)
        length, queries = pick(lens, request, lanes_b), pick(q_count, request, lanes_b)
        first = tile * BLOCK_M
        rows = tl.minimum(queries - first, BLOCK_M)
        newest, seen, clear = length - 1, length, length
        if CAUSAL:
            newest = length - queries + first  # the newest key that the first row sees
            seen = newest + rows  # keys that the last row sees
            clear = newest + 1
        entry = SCHEDULE + 8 + rank * 8
        tl.store(entry, pick(q_first, request, lanes_b) + first)
        tl.store(entry + 1, rows)
        tl.store(entry + 2, tl.load(BASE + request).to(tl.int32))
        tl.store(entry + 3, (seen + BLOCK_N - 1) // BLOCK_N)
        tl.store(entry + 4, clear // BLOCK_N)
        tl.store(entry + 5, newest)
        tl.store(entry + 6, length)


@gluon.jit
def _item(SCHEDULE, item, total, heads, heads_at_once):
    """(address of the schedule entry, query head) of one item: a few heads at a time, longest tiles of those first."""
    part = item // (total * heads_at_once)
    into = item - part * total * heads_at_once
    here = gl.minimum(heads_at_once, heads - part * heads_at_once)
    return SCHEDULE + 8 + into // here * 8, part * heads_at_once + into % here


@gluon.jit
def _producer(
    descriptors,
    shared,
    barriers,
    work,
    HEAD: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
):
    qd, kd, vd = descriptors
    qs, ks, vs = shared
    q_full, q_empty, k_full, k_empty, v_full, v_empty, _turns, _mended, _noticed = barriers
    SCHEDULE, heads, group, heads_at_once = work
    total = gl.load(SCHEDULE)
    count = 0
    for turn in range(gl.cdiv(total * heads - gl.program_id(0), gl.num_programs(0))):
        item = gl.program_id(0) + turn * gl.num_programs(0)
        entry, head = _item(SCHEDULE, item, total, heads, heads_at_once)
        row, base, tiles = gl.load(entry), gl.load(entry + 2), gl.load(entry + 3)
        column = head // group * HEAD
        for w in gl.static_range(CONSUMERS):
            mbarrier.wait(q_empty.index(w), (turn & 1) ^ 1)
            mbarrier.expect(q_full.index(w), qd.block_type.nbytes)
            tma.async_copy_global_to_shared(qd, [row + w * ROWS, head * HEAD], q_full.index(w), qs.index(w))
        for j in range(tiles):
            stage = count % STAGES
            parity = (count // STAGES & 1) ^ 1
            at = base + (tiles - 1 - j) * BLOCK_N
            mbarrier.wait(k_empty.index(stage), parity)
            mbarrier.expect(k_full.index(stage), kd.block_type.nbytes)
            tma.async_copy_global_to_shared(kd, [at, column], k_full.index(stage), ks.index(stage))
            mbarrier.wait(v_empty.index(stage), parity)
            mbarrier.expect(v_full.index(stage), vd.block_type.nbytes)
            tma.async_copy_global_to_shared(vd, [at, column], v_full.index(stage), vs.index(stage))
            count += 1


@gluon.jit
def _mask(s, at, newest, COLUMNS: gl.constexpr):
    keys = at + gl.arange(0, s.shape[1], COLUMNS)
    return gl.where(gl.expand_dims(keys, 0) <= gl.expand_dims(newest, 1), s, float("-inf"))


@gluon.jit
def _softmax(s, m, total, scale):
    """p, the new maximum and denominator of 64 rows, and what earlier sums shrink by."""
    m_new = gl.maximum(m, gl.max(s, 1) * scale)
    safe = gl.where(m_new == float("-inf"), 0.0, m_new)  # no key so far: -inf - -inf is NaN
    p = gl.exp2(s * scale - gl.expand_dims(safe, 1))
    rescale = gl.exp2(m - safe)
    return p, m_new, total * rescale + gl.sum(p, 1), rescale


@gluon.jit
def _zero_rows_from(tile, first, HEAD: gl.constexpr, BLOCK_N: gl.constexpr):
    """Rows of a V tile past the request's end hold anything, also NaN, and 0 * NaN would reach the output."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD, HEAD // 8], [4, 1], [1, 0])
    rows = gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout))
    values = tile.load(layout)
    tile.store(gl.where(gl.expand_dims(rows < first, 1), values, 0.0).to(values.dtype))
    fence_async_shared()


@gluon.jit
def _consumer(
    output, shared, barriers, work, scale, W: gl.constexpr, HEAD: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr, CAUSAL: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    OUT, out_token_stride, out_head_stride = output
    qs, ks, vs = shared
    q_full, q_empty, k_full, k_empty, v_full, v_empty, turns, mended, noticed = barriers
    SCHEDULE, heads, _group, heads_at_once = work
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HEAD, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUTPUT, k_width=2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SCORES)
    PER_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    OUT_PER_ROW: gl.constexpr = gl.SliceLayout(1, OUTPUT)
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD, HEAD // 8], [4, 1], [1, 0])
    dtype: gl.constexpr = qs.dtype
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
    q = qs.index(W)
    lanes = gl.arange(0, ROWS, PER_ROW)
    total_tiles = gl.load(SCHEDULE)
    count = 0
    mends = 0
    for turn in range(gl.cdiv(total_tiles * heads - gl.program_id(0), gl.num_programs(0))):
        item = gl.program_id(0) + turn * gl.num_programs(0)
        entry, head = _item(SCHEDULE, item, total_tiles, heads, heads_at_once)
        row, rows, tiles = gl.load(entry), gl.load(entry + 1), gl.load(entry + 3)
        clear, newest_key, length = gl.load(entry + 4), gl.load(entry + 5), gl.load(entry + 6)
        newest = lanes * 0 + newest_key
        if CAUSAL:
            newest = gl.minimum(newest + W * ROWS + lanes, length - 1)
        if tiles * BLOCK_N > length:  # the first consumer mends V for all of them
            if W == 0:
                mbarrier.wait(v_full.index(count % STAGES), count // STAGES & 1)
                _zero_rows_from(vs.index(count % STAGES), length - (tiles - 1) * BLOCK_N, HEAD, BLOCK_N)
                mbarrier.wait(noticed, (mends & 1) ^ 1)  # nobody is still waiting for the mending before this one
                mbarrier.arrive(mended, count=1)
            else:
                mbarrier.wait(mended, mends & 1)
                mbarrier.arrive(noticed, count=1)
            mends += 1
        m = gl.full([ROWS], float("-inf"), gl.float32, PER_ROW)
        total = gl.full([ROWS], 0.0, gl.float32, PER_ROW)
        acc = gl.zeros([ROWS, HEAD], gl.float32, OUTPUT)

        mbarrier.wait(q_full.index(W), turn & 1)
        mbarrier.wait(k_full.index(count % STAGES), count // STAGES & 1)
        if TURNS:
            mbarrier.wait(turns.index(W), (count & 1) ^ (1 if W == 0 else 0))
        s = warpgroup_mma(q, ks.index(count % STAGES).permute((1, 0)), zeros, use_acc=False, is_async=True)
        if TURNS:
            mbarrier.arrive(turns.index((W + 1) % CONSUMERS), count=1)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_empty.index(count % STAGES), count=1)
        s = _mask(s, (tiles - 1) * BLOCK_N, newest, COLUMNS)
        p, m, total, rescale = _softmax(s, m, total, scale)
        pb = gl.convert_layout(p.to(dtype), OPERAND)
        # scores of key tile `count` while the output takes in tile count - 1
        for at in range(tiles - 2, -1, -1):
            before = count
            count += 1
            mbarrier.wait(k_full.index(count % STAGES), count // STAGES & 1)
            if TURNS:
                mbarrier.wait(turns.index(W), (count & 1) ^ (1 if W == 0 else 0))
            s = warpgroup_mma(q, ks.index(count % STAGES).permute((1, 0)), zeros, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(before % STAGES), before // STAGES & 1)
            o = warpgroup_mma(pb, vs.index(before % STAGES), acc, is_async=True)
            if TURNS:
                mbarrier.arrive(turns.index((W + 1) % CONSUMERS), count=1)
            s = warpgroup_mma_wait(1, deps=[s])
            mbarrier.arrive(k_empty.index(count % STAGES), count=1)
            if at >= clear:
                s = _mask(s, at * BLOCK_N, newest, COLUMNS)
            p, m, total, rescale = _softmax(s, m, total, scale)
            acc = warpgroup_mma_wait(0, deps=[o])
            mbarrier.arrive(v_empty.index(before % STAGES), count=1)
            acc = acc * gl.expand_dims(gl.convert_layout(rescale, OUT_PER_ROW), 1)
            pb = gl.convert_layout(p.to(dtype), OPERAND)
        mbarrier.arrive(q_empty.index(W), count=1)
        mbarrier.wait(v_full.index(count % STAGES), count // STAGES & 1)
        o = warpgroup_mma(pb, vs.index(count % STAGES), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[o])
        mbarrier.arrive(v_empty.index(count % STAGES), count=1)
        count += 1
        total = gl.where(total == 0.0, 1.0, total)
        acc = acc / gl.expand_dims(gl.convert_layout(total, OUT_PER_ROW), 1)
        out = gl.convert_layout(acc.to(dtype), STORE)
        line = W * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, STORE))
        at = (row + line).to(gl.int64) * out_token_stride + head * out_head_stride
        lanes_d = gl.arange(0, HEAD, gl.SliceLayout(0, STORE))
        gl.store(OUT + gl.expand_dims(at, 1) + gl.expand_dims(lanes_d, 0), out, mask=gl.expand_dims(line < rows, 1))


@gluon.jit(do_not_specialize=["heads_at_once"])
def flash_prefill_hopper_kernel(
    qd, kd, vd, OUT, SCHEDULE, scale, heads, group, heads_at_once, out_token_stride, out_head_stride,
    HEAD: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, CAUSAL: gl.constexpr,
    TURNS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    qs = gl.allocate_shared_memory(qd.dtype, [CONSUMERS, ROWS, HEAD], qd.layout)
    ks = gl.allocate_shared_memory(qd.dtype, [STAGES, BLOCK_N, HEAD], kd.layout)
    vs = gl.allocate_shared_memory(qd.dtype, [STAGES, BLOCK_N, HEAD], vd.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], bar)
    q_empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], bar)
    turns = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], bar)
    mended = gl.allocate_shared_memory(gl.int64, [1], bar)
    noticed = gl.allocate_shared_memory(gl.int64, [1], bar)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    mbarrier.init(mended, count=1)
    mbarrier.init(noticed, count=CONSUMERS - 1)
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
        mbarrier.init(turns.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)
    fence_async_shared()
    descriptors = (qd, kd, vd)
    shared = (qs, ks, vs)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty, turns, mended, noticed)
    work = (SCHEDULE, heads, group, heads_at_once)
    output = (OUT, out_token_stride, out_head_stride)
    # constants stay constants only where they are written in the call itself
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consumer, (output, shared, barriers, work, scale, 0, HEAD, BLOCK_N, STAGES, CONSUMERS, CAUSAL, TURNS)),
                (_consumer, (output, shared, barriers, work, scale, 1, HEAD, BLOCK_N, STAGES, CONSUMERS, CAUSAL, TURNS)),
                (_producer, (descriptors, shared, barriers, work, HEAD, BLOCK_N, STAGES, CONSUMERS)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (output, shared, barriers, work, scale, 0, HEAD, BLOCK_N, STAGES, CONSUMERS, CAUSAL, TURNS)),
                (_consumer, (output, shared, barriers, work, scale, 1, HEAD, BLOCK_N, STAGES, CONSUMERS, CAUSAL, TURNS)),
                (_consumer, (output, shared, barriers, work, scale, 2, HEAD, BLOCK_N, STAGES, CONSUMERS, CAUSAL, TURNS)),
                (_producer, (descriptors, shared, barriers, work, HEAD, BLOCK_N, STAGES, CONSUMERS)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )


def fits(q: torch.Tensor, view: KVView) -> bool:
    """Whether this kernel can do it: extents, a head size and a dtype it has, the heads of q side by side."""
    return (
        view.kind == "extent"
        and view.page_size == 1
        and q.shape[2] in (64, 128)
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.stride(1) == q.shape[2]
        and q.stride(0) % 8 == 0  # the copy engine wants rows at multiples of 16 bytes
        and view.k.is_contiguous()
    )


def flash_prefill_hopper(
    q: torch.Tensor,
    view: KVView,
    tile: HopperTile,
    *,
    causal: bool = True,
    min_q: int = 1,
    scale: float | None = None,
    l2_bytes: int = 32 << 20,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """As flash_prefill, for views that `fits` accepts; a request with queries must have a cache, its own tokens at least."""
    tokens, heads, head_dim = q.shape
    kv_heads, slots = view.k.shape[1], view.k.shape[0]
    group, batch = heads // kv_heads, view.seq_lens.shape[0]
    if out is None:
        out = torch.empty((tokens, heads, head_dim), dtype=q.dtype, device=q.device)
    block_m = tile.consumers * 64
    tiles = triton.cdiv(tokens, block_m) + min(batch, tokens)
    schedule = torch.empty((tiles + 1) * ENTRY, dtype=torch.int32, device=q.device)
    schedule_kernel[(tiles,)](
        schedule, view.base, view.seq_lens, view.cu_q, batch,
        BLOCK_M=block_m, BLOCK_N=tile.block_n, BATCH_PAD=padded_batch(batch), MIN_Q=min_q, CAUSAL=causal, num_warps=1,
    )  # fmt: skip
    held = sum(kv for _, kv in view.host_lens) or batch * view.max_kv
    heads_at_once = group * max(1, min(kv_heads, l2_bytes // max(1, 2 * held * head_dim * q.element_size())))
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    flat = (q.as_strided((tokens, heads * head_dim), (q.stride(0), 1)), *(c.view(slots, -1) for c in (view.k, view.v)))
    boxes = (64, tile.block_n, tile.block_n)
    descriptors = (TensorDescriptor.from_tensor(t, [rows, head_dim], layout) for t, rows in zip(flat, boxes))
    programs = min(torch.cuda.get_device_properties(q.device).multi_processor_count, tiles * heads)
    flash_prefill_hopper_kernel[(programs,)](
        *descriptors, out, schedule, (head_dim**-0.5 if scale is None else scale) * LOG2E, heads, group, heads_at_once,
        out.stride(0), out.stride(1), HEAD=head_dim, BLOCK_N=tile.block_n, STAGES=tile.stages, CONSUMERS=tile.consumers,
        CAUSAL=causal, TURNS=tile.turns, REGISTERS=240 if tile.consumers == 2 else 160, num_warps=4,
    )  # fmt: skip
    return out
