"""Decode attention for one query a request: a ring of asynchronous copies, each warp its own keys. Head sizes 64 and 128.

What flash_decode computes, from compute capability 8.0 on, arranged so that memory never waits:

    ring      tiles of K and V in shared memory, copied past the registers; a tile is refilled as soon as it has been used,
              across the borders between requests, so STAGES - 1 tiles are always on their way
    warps     each takes the softmax of its own 16 keys of a tile, so nothing crosses warps until a piece of work ends
    products  S^T = K Q^T and O^T = V^T P^T: keys, then channels, are the rows, and a group's query heads the 8 columns
    early     under programmatic dependent launch the ring fills while the kernel before still runs: all keys but the newest are
              older than it, and the newest joins at the end, by plain arithmetic

Bytes and floor: as flash_decode, whose workspace, sharing of the work and combination by the last to finish this kernel has.
Oracle: reference.ReferenceOps.attention. Twin for the interpreter: flash_decode.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from pdlab.kernels.decode_line import advance, line_of, offset_of, place_of, task_of
from pdlab.kernels.flash_decode import LOG2E, Workspace

if TYPE_CHECKING:
    from pdlab.kernels.kv_view import KVView
    from pdlab.kernels.tuning import DecodeRing

KEYS = gl.constexpr(16)  # of a warp in a tile: the rows of one matrix instruction
MAX_GROUP = 8  # query heads that share a KV head: the columns of one matrix instruction

barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # the older name is Triton 3.6's


@gluon.constexpr_function
def tile_layout(head):
    """[warps, keys, head] in shared memory: 16-byte pieces of a row swapped so that 8 rows' pieces lie in different banks."""
    return gl.SwizzledSharedLayout(vec=8, per_phase=1, max_phase=8, order=[2, 1, 0])


@gluon.constexpr_function
def row_layout(head, rows, warps):
    """[head, rows]: rows over warps, channels over lanes, a head's two halves in one thread's registers."""
    registers = [[1 << i, 0] for i in range((head // 64).bit_length() - 1)]
    registers += [[0, warps << i] for i in range((rows // warps).bit_length() - 1)] if rows > warps else []
    lanes = [[(head // 64) << i, 0] for i in range(5)]
    over = [[0, (1 << i) if (1 << i) < rows else 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout([*registers, [head // 2, 0]], lanes, over, [], [head, rows])


@gluon.jit
def _copy(
    walk, place, to, cache, at_copy, PAGED: gl.constexpr, PAGE: gl.constexpr, PAGE_STRIDE: gl.constexpr,
    ROW_STRIDE: gl.constexpr,
):  # fmt: skip
    """Starts copying one tile, [warps, runs, rows of a run, head]: the rows of a run lie side by side in memory."""
    _tile, _left, at, _request, head, limit = walk
    ks, vs = to
    K, V, head_stride = cache
    run, row, d = at_copy
    STEP: gl.constexpr = ROW_STRIDE if PAGED else PAGE_STRIDE
    first = offset_of(place, at + run, PAGED, PAGE, PAGE_STRIDE, ROW_STRIDE) + head * head_stride
    first = gl.expand_dims(gl.expand_dims(first, 2), 3)
    row = gl.expand_dims(gl.expand_dims(row, 0), 0)
    inside = gl.expand_dims(row * STEP, 3) + gl.expand_dims(gl.expand_dims(gl.expand_dims(d, 0), 0), 0)
    mask = gl.expand_dims(gl.expand_dims(at + run, 2) + row < limit, 3)
    shape: gl.constexpr = [run.shape[0], run.shape[1], row.shape[2], d.shape[0]]
    async_copy.async_copy_global_to_shared(ks.reshape(shape), (K + first) + inside, mask=mask)
    async_copy.async_copy_global_to_shared(vs.reshape(shape), (V + first) + inside, mask=mask)
    async_copy.commit_group()


@gluon.constexpr_function
def copy_layout(head, warps, run):
    """[warps, runs, rows of a run, head]: 16 bytes a thread, each warp its own keys."""
    rows = 256 // head  # that a warp copies with one instruction
    inside = min(run, rows)
    return gl.BlockedLayout([1, 1, 1, 8], [1, rows // inside, inside, head // 8], [warps, 1, 1, 1], [3, 2, 1, 0])


@gluon.constexpr_function
def product_layout(warps):
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[warps, 1, 1], instr_shape=[1, 16, 8])


@gluon.jit
def _lanes(HEAD: gl.constexpr, WARPS: gl.constexpr, RUN: gl.constexpr):
    """What a thread copies of a tile: first position of each run, row in the run, channel."""
    COPY: gl.constexpr = copy_layout(HEAD, WARPS, RUN)
    RUNS: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, COPY))
    warp = gl.expand_dims(gl.arange(0, WARPS, gl.SliceLayout(1, RUNS)), 1)
    run = warp * KEYS + gl.expand_dims(gl.arange(0, KEYS // RUN, gl.SliceLayout(0, RUNS)) * RUN, 0)
    row = gl.arange(0, RUN, gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(3, COPY))))
    return run, row, gl.arange(0, HEAD, gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(0, COPY))))


@gluon.jit
def _attend(
    q, at, count, limit, scale_log2, walk, place, stage, stop, line, ring, cache, table, at_copy,
    KV_HEADS: gl.constexpr, COLUMNS: gl.constexpr, HEAD: gl.constexpr, WARPS: gl.constexpr, STAGES: gl.constexpr,
    PAGED: gl.constexpr, PAGE: gl.constexpr, PAGE_STRIDE: gl.constexpr, ROW_STRIDE: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Online softmax of `count` tiles from position `at`: each warp's maximum, denominator and weighted sum of its own keys."""
    MMA: gl.constexpr = product_layout(WARPS)
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    OF_WARP: gl.constexpr = gl.SliceLayout(2, MMA)
    ks, vs = ring
    warp = gl.expand_dims(gl.arange(0, WARPS, gl.SliceLayout(1, OF_WARP)), 1)
    keys = warp * KEYS + gl.expand_dims(gl.arange(0, KEYS, gl.SliceLayout(0, OF_WARP)), 0)
    zeros = gl.zeros([WARPS, KEYS, COLUMNS], gl.float32, MMA)
    m = gl.full([WARPS, COLUMNS], float("-inf"), gl.float32, gl.SliceLayout(1, MMA))
    denominator = gl.full([WARPS, COLUMNS], 0.0, gl.float32, gl.SliceLayout(1, MMA))
    acc = gl.zeros([WARPS, HEAD, COLUMNS], gl.float32, MMA)
    for _ in range(count):
        async_copy.wait_group(STAGES - 1)
        s = mma_v2(ks.index(stage).load(A), q, zeros)
        s = gl.where(gl.expand_dims(at + keys < limit, 2), s, float("-inf"))
        m_new = gl.maximum(m, gl.max(s, 1) * scale_log2)
        # a column that has seen no key yet has m_new = -inf, and -inf - -inf is NaN: subtract 0 there instead
        safe = gl.where(m_new == float("-inf"), 0.0, m_new)
        p = gl.exp2(s * scale_log2 - gl.expand_dims(safe, 1))
        rescale = gl.exp2(m - safe)
        denominator = denominator * rescale + gl.sum(p, 1)
        v = vs.index(stage).permute((0, 2, 1)).load(A)
        acc = mma_v2(v, gl.convert_layout(p.to(v.dtype), B), acc * gl.expand_dims(rescale, 1))
        m = m_new
        to = (ks.index(stage), vs.index(stage))
        _copy(walk, place, to, cache, at_copy, PAGED, PAGE, PAGE_STRIDE, ROW_STRIDE)
        # the next copy's pages are looked up a whole tile before they are needed
        walk = advance(walk, stop, line, KV_HEADS, WARPS * KEYS, EARLY)
        place = place_of(walk[2] + at_copy[0], walk[5], walk[3], table, PAGED, PAGE)
        at += WARPS * KEYS
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
    return m, denominator, acc, walk, place, stage


@gluon.jit
def _merge(m, denominator, acc, COLUMNS: gl.constexpr, HEAD: gl.constexpr, WARPS: gl.constexpr):
    """The warps' results as one: logarithm of the denominator, output; as row_layout has them."""
    ALL: gl.constexpr = gl.BlockedLayout([WARPS, HEAD // 64, 1], [1, 32, 1], [1, 1, WARPS], [1, 2, 0])
    ROWS: gl.constexpr = row_layout(HEAD, COLUMNS, WARPS)
    empty = denominator == 0.0
    lse = gl.convert_layout(gl.where(empty, float("-inf"), m + gl.log2(denominator)), gl.SliceLayout(1, ALL))
    top = gl.max(lse, 0)
    safe = gl.where(top == float("-inf"), 0.0, top)
    weight = gl.exp2(lse - gl.expand_dims(safe, 0))
    total = gl.sum(weight, 0)
    weight = gl.expand_dims(weight / gl.expand_dims(gl.where(total == 0.0, 1.0, total), 0), 1)
    acc = acc / gl.expand_dims(gl.where(empty, 1.0, denominator), 1)
    # one half of the head after the other: the exchange between warps takes half the shared memory
    halves = gl.permute(gl.reshape(acc, [WARPS, 2, HEAD // 2, COLUMNS]), (0, 2, 3, 1))
    low, high = gl.split(halves)
    low = gl.sum(gl.convert_layout(low, ALL) * weight, 0)
    high = gl.sum(gl.convert_layout(high, ALL) * weight, 0)
    out = gl.convert_layout(gl.reshape(gl.permute(gl.join(low, high), (2, 0, 1)), [HEAD, COLUMNS]), ROWS)
    return gl.convert_layout(safe + gl.log2(total), gl.SliceLayout(0, ROWS)), out


@gluon.jit
def _newest(q_at, k_at, v_at, q_head_stride, there, GROUP: gl.constexpr, COLUMNS: gl.constexpr, HEAD: gl.constexpr,
            WARPS: gl.constexpr):  # fmt: skip
    """The group's queries, and the newest key and value; zeros where they are not this program's to add."""
    ROWS: gl.constexpr = row_layout(HEAD, COLUMNS, WARPS)
    d = gl.arange(0, HEAD, gl.SliceLayout(1, ROWS))
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, ROWS))
    at = gl.expand_dims(column * q_head_stride, 0) + gl.expand_dims(d, 1)
    q = gl.load(q_at + at, mask=gl.expand_dims(column < GROUP, 0) & there, other=0.0)
    k = gl.load(k_at + d, mask=(d < HEAD) & there, other=0.0)
    return q, k, gl.load(v_at + d, mask=(d < HEAD) & there, other=0.0)


@gluon.jit
def _add_newest(lse, out, newest, there, scale_log2):
    q, k, v = newest
    score = gl.sum(q.to(gl.float32) * gl.expand_dims(k.to(gl.float32), 1), 0) * scale_log2
    score = gl.where(there, score, float("-inf"))
    top = gl.maximum(lse, score)
    top = gl.where(top == float("-inf"), 0.0, top)
    old, new = gl.exp2(lse - top), gl.exp2(score - top)
    total = old + new
    share = gl.expand_dims(1.0 / gl.where(total == 0.0, 1.0, total), 0)
    out = (out * gl.expand_dims(old, 0) + gl.expand_dims(v.to(gl.float32), 1) * gl.expand_dims(new, 0)) * share
    return top + gl.log2(total), out


@gluon.jit
def _combine(
    parts, out_at, o_head_stride, slot_first, program_first, count, GROUP: gl.constexpr, HEAD: gl.constexpr, WARPS: gl.constexpr
):
    """Merges `count` partial results of one segment. A thread holds all parts of its few numbers: nothing crosses threads."""
    PART_O, PART_LSE, _COUNTERS = parts
    LANES: gl.constexpr = 32 if HEAD >= 128 else HEAD // 4
    ROWS: gl.constexpr = 1 if GROUP == 1 else 2 if GROUP == 2 else 4 if GROUP <= 4 else 8
    PARTS: gl.constexpr = 16 if ROWS <= 4 else 8  # at a time
    ALL: gl.constexpr = gl.BlockedLayout([PARTS, 1, 4], [1, 32 // LANES, LANES], [1, WARPS, 1], [2, 1, 0])
    OF_ROW: gl.constexpr = gl.SliceLayout(2, ALL)
    ONE: gl.constexpr = gl.SliceLayout(0, ALL)
    row = gl.arange(0, ROWS, gl.SliceLayout(0, OF_ROW))
    part = gl.arange(0, PARTS, gl.SliceLayout(1, OF_ROW))
    d = gl.arange(0, HEAD, gl.SliceLayout(0, ONE))
    m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(0, OF_ROW))
    denominator = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(0, OF_ROW))
    acc = gl.zeros([ROWS, HEAD], gl.float32, ONE)
    for i in range(0, count, PARTS):
        index = i + part
        slot = gl.where(index == 0, slot_first, 2 * (program_first + index))
        there = gl.expand_dims(index < count, 1) & gl.expand_dims(row < GROUP, 0)
        at = gl.expand_dims(slot, 1) * GROUP + gl.expand_dims(row, 0)
        # .cg: written by other SMs during this launch, so read from L2
        lse = gl.load(PART_LSE + at, mask=there, other=float("-inf"), cache_modifier=".cg")
        at = gl.expand_dims(at, 2) * HEAD + gl.expand_dims(gl.expand_dims(d, 0), 0)
        values = gl.load(PART_O + at, mask=gl.expand_dims(there, 2), other=0.0, cache_modifier=".cg")
        m_new = gl.maximum(m, gl.max(lse, 0))
        safe = gl.where(m_new == float("-inf"), 0.0, m_new)
        weight = gl.exp2(lse - gl.expand_dims(safe, 0))
        rescale = gl.exp2(m - safe)
        denominator = denominator * rescale + gl.sum(weight, 0)
        rescale = gl.convert_layout(rescale, gl.SliceLayout(1, ONE))
        acc = acc * gl.expand_dims(rescale, 1) + gl.sum(values * gl.expand_dims(weight, 2), 0)
        m = m_new
    denominator = gl.convert_layout(gl.where(denominator == 0.0, 1.0, denominator), gl.SliceLayout(1, ONE))
    acc = acc / gl.expand_dims(denominator, 1)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, ONE))
    at = gl.expand_dims(row * o_head_stride, 1) + gl.expand_dims(d, 0)
    gl.store(out_at + at, acc.to(out_at.dtype.element_ty), mask=gl.expand_dims(row < GROUP, 1))


@gluon.jit
def _finish(
    lse, out, out_at, o_head_stride, parts, segment, tile, first, count, held, mine, share,
    GROUP: gl.constexpr, COLUMNS: gl.constexpr, HEAD: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Writes a whole segment's output; of a part, the partial result, and the last part to arrive combines them all."""
    PART_O, PART_LSE, COUNTERS = parts
    ROWS: gl.constexpr = row_layout(HEAD, COLUMNS, WARPS)
    d = gl.expand_dims(gl.arange(0, HEAD, gl.SliceLayout(1, ROWS)), 1)
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, ROWS))
    ours = column < GROUP
    if count == held:
        at = gl.expand_dims(column * o_head_stride, 0) + d
        gl.store(out_at + at, out.to(out_at.dtype.element_ty), mask=gl.expand_dims(ours, 0))
    else:
        row = (2 * gl.program_id(0) + (tile > mine).to(gl.int32)) * GROUP + column  # a stretch cuts at most two segments
        gl.store(PART_LSE + row, lse, mask=ours)
        gl.store(PART_O + gl.expand_dims(row, 0) * HEAD + d, out, mask=gl.expand_dims(ours, 0))
        p_first = (tile - first) // share
        all_parts = (tile - first + held - 1) // share - p_first + 1
        barrier()  # every thread's stores come before the release below
        if gl.atomic_add(COUNTERS + segment, 1, sem="acq_rel", scope="gpu") == all_parts - 1:
            gl.store(COUNTERS + segment, 0)  # for the next launch
            slot_first = 2 * p_first + (tile - first > p_first * share).to(gl.int32)
            _combine(parts, out_at, o_head_stride, slot_first, p_first, all_parts, GROUP, HEAD, WARPS)


@gluon.jit
def _prefetch(NEXT, pieces, WARPS: gl.constexpr):
    """Asks for what the next kernel reads, 2 KB a thread, to be brought into the L2 cache while this one waits."""
    lane = gl.arange(0, WARPS * 32, gl.BlockedLayout([1], [32], [WARPS], [0]))
    for first in range(gl.program_id(0), pieces, gl.num_programs(0) * WARPS * 32):
        piece = first + lane * gl.num_programs(0)
        gl.inline_asm_elementwise(
            "{ .reg .pred p; setp.lt.s32 p, $2, $3; @p cp.async.bulk.prefetch.L2.global [$1], 2048; mov.u32 $0, 0; }",
            "=r,l,r,r", [NEXT + piece.to(gl.int64) * 2048, piece, lane * 0 + pieces], dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@gluon.jit
def _query(q_at, q_head_stride, GROUP: gl.constexpr, COLUMNS: gl.constexpr, HEAD: gl.constexpr, WARPS: gl.constexpr):
    """The group's queries as the second operand of K Q^T, the same for each warp: [warps, head, columns]."""
    B: gl.constexpr = gl.DotOperandLayout(1, product_layout(WARPS), 2)
    column = gl.expand_dims(gl.expand_dims(gl.arange(0, COLUMNS, gl.SliceLayout(0, gl.SliceLayout(0, B))), 0), 0)
    d = gl.expand_dims(gl.expand_dims(gl.arange(0, HEAD, gl.SliceLayout(0, gl.SliceLayout(2, B))), 0), 2)
    warp = gl.expand_dims(gl.expand_dims(gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, B))), 1), 2)
    return gl.load(q_at + column * q_head_stride + d + warp * 0, mask=(column < GROUP) & (warp < WARPS), other=0.0)


@gluon.jit(do_not_specialize=["batch", "few", "least", "table_stride", "pieces"])
def flash_decode_ring_kernel(
    Q, K, V, OUT, TABLE, BASE, LENS, CU_Q, PART_O, PART_LSE, COUNTERS, NEXT, scale_log2, batch, few, least,
    table_stride, head_stride, q_token_stride, q_head_stride, o_token_stride, o_head_stride, pieces,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD: gl.constexpr,
    COLUMNS: gl.constexpr, BATCH_PAD: gl.constexpr,  # a group's query heads, padded; a power of two, at least 32
    PAGED: gl.constexpr, PAGE: gl.constexpr, PAGE_STRIDE: gl.constexpr, ROW_STRIDE: gl.constexpr,
    RUN: gl.constexpr, STAGES: gl.constexpr,  # keys of a warp's 16 that are known to lie side by side; tiles in the ring
    PREFETCH: gl.constexpr, WARPS: gl.constexpr,
    PDL: gl.constexpr,  # launched as a programmatic dependent of the kernel before it (from 9.0 on)
):  # fmt: skip
    BLOCK_N: gl.constexpr = WARPS * KEYS
    dtype: gl.constexpr = K.dtype.element_ty
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()  # at once: the next kernel waits for this one's end before it reads its results
    ks = gl.allocate_shared_memory(dtype, [STAGES, WARPS, KEYS, HEAD], tile_layout(HEAD))
    vs = gl.allocate_shared_memory(dtype, [STAGES, WARPS, KEYS, HEAD], tile_layout(HEAD))
    table, cache, parts = (TABLE, BASE, table_stride), (K, V, head_stride), (PART_O, PART_LSE, COUNTERS)
    line, q_first, cut = line_of(LENS, CU_Q, batch, few, least, KV_HEADS, BLOCK_N, BATCH_PAD, PDL, WARPS)
    mine, stop, share = cut
    at_copy = _lanes(HEAD, WARPS, RUN)
    walks, places = ((mine, 0, 0, 0, 0, 0),), (0,)
    for i in gl.static_range(STAGES + 1):  # the pages of all tiles are asked for before the first is waited for
        walk = advance(walks[i], stop, line, KV_HEADS, BLOCK_N, PDL)
        walks += (walk,)  # type: ignore[assignment]
        places += (place_of(walk[2] + at_copy[0], walk[5], walk[3], table, PAGED, PAGE),)  # type: ignore[assignment]
    for i in gl.static_range(STAGES):
        _copy(walks[i + 1], places[i + 1], (ks.index(i), vs.index(i)), cache, at_copy, PAGED, PAGE, PAGE_STRIDE, ROW_STRIDE)
    walk, place, stage, tile = walks[STAGES + 1], places[STAGES + 1], 0, mine
    task = task_of(tile, stop, line, q_first, batch, table, KV_HEADS, BLOCK_N, PDL, PAGED, PAGE)
    if PREFETCH:
        _prefetch(NEXT, pieces, WARPS)
    if PDL:
        tl.extra.cuda.gdc_wait()
    while tile < stop:
        request, head, first, take, count, held, length, limit, token, new_place = task
        q_at = Q + token.to(gl.int64) * q_token_stride + head * GROUP * q_head_stride
        q = _query(q_at, q_head_stride, GROUP, COLUMNS, HEAD, WARPS)
        if PDL:
            new_at = offset_of(new_place, limit, PAGED, PAGE, PAGE_STRIDE, ROW_STRIDE) + head * head_stride
            there = (first + count == held) & (limit < length)
            # asked for now, waited for when all the older keys have been gone through
            newest = _newest(q_at, K + new_at, V + new_at, q_head_stride, there, GROUP, COLUMNS, HEAD, WARPS)
        m, denominator, acc, walk, place, stage = _attend(
            q, first * BLOCK_N, count, limit, scale_log2, walk, place, stage, stop, line, (ks, vs), cache, table, at_copy,
            KV_HEADS, COLUMNS, HEAD, WARPS, STAGES, PAGED, PAGE, PAGE_STRIDE, ROW_STRIDE, PDL,
        )  # fmt: skip
        lse, out = _merge(m, denominator, acc, COLUMNS, HEAD, WARPS)
        if PDL:
            lse, out = _add_newest(lse, out, newest, there, scale_log2)
        out_at = OUT + token.to(gl.int64) * o_token_stride + head * GROUP * o_head_stride
        _finish(lse, out, out_at, o_head_stride, parts, request * KV_HEADS + head, tile, first, count, held, mine, share,
                GROUP, COLUMNS, HEAD, WARPS)  # fmt: skip
        tile += take
        if tile < stop:
            task = task_of(tile, stop, line, q_first, batch, table, KV_HEADS, BLOCK_N, PDL, PAGED, PAGE)


def run_of(page: int, paged: bool) -> int:
    """How many of 16 keys from a multiple of 16 on lie side by side, whatever the table or the base says."""
    return min(16, page & -page) if paged else 16 if page == 1 else 1


def registers_of(tile: DecodeRing) -> int:
    """Most registers a thread that let all of the tile's blocks be resident together."""
    return min(224, 65536 // (32 * tile.warps * tile.blocks_per_sm) // 8 * 8)


def fits(q: torch.Tensor, view: KVView) -> bool:
    """Whether this kernel can do it, where every request has one query: a head size, a dtype and a group that it has."""
    return (
        q.is_cuda
        and q.shape[2] in (64, 128)
        and q.dtype == view.k.dtype
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.shape[1] // view.k.shape[1] <= MAX_GROUP
        and q.stride(2) == view.k.stride(3) == 1
    )


def flash_decode_ring(
    q: torch.Tensor,
    view: KVView,
    workspace: Workspace,
    tile: DecodeRing,
    programs: int,
    *,
    scale: float | None = None,
    out: torch.Tensor | None = None,
    prefetch: torch.Tensor | None = None,
) -> torch.Tensor:
    """As flash_decode with max_q = 1, for what `fits` accepts. `programs`: tile.blocks_per_sm a multiprocessor. With `tile.pdl`
    all but each request's newest K and V, too, are read before the kernel launched just before has ended: it may write the
    newest and the queries, nothing else of what is read here. `prefetch` (contiguous): what the next kernel will read; it is
    brought into the L2 cache on the side (from capability 9.0 on)."""
    tokens, heads, head_dim = q.shape
    kv_heads, batch, paged = view.k.shape[1], view.seq_lens.shape[0], view.kind == "paged"
    if out is None:
        out = torch.empty((tokens, heads, head_dim), dtype=q.dtype, device=q.device)
    pieces = 0 if prefetch is None else prefetch.numel() * prefetch.element_size() // 2048
    flash_decode_ring_kernel[(programs,)](
        q, view.k, view.v, out, view.block_table, view.base, view.seq_lens, view.cu_q,
        workspace.part_o, workspace.part_lse, workspace.counters,
        workspace.counters if prefetch is None else prefetch.view(-1).view(torch.uint8),
        (head_dim**-0.5 if scale is None else scale) * LOG2E, batch, programs // tile.blocks_per_sm, tile.least,
        view.block_table.stride(0), view.k.stride(1), q.stride(0), q.stride(1), out.stride(0), out.stride(1), pieces,
        KV_HEADS=kv_heads, GROUP=heads // kv_heads, COLUMNS=MAX_GROUP, HEAD=head_dim,
        BATCH_PAD=max(32, triton.next_power_of_2(batch)) if batch <= 32 or batch > 256 else 256,
        PAGED=paged, PAGE=view.page_size, PAGE_STRIDE=view.k.stride(0), ROW_STRIDE=view.k.stride(2),
        RUN=run_of(view.page_size, paged), STAGES=tile.stages, PREFETCH=pieces > 0 and tile.pdl, PDL=tile.pdl, WARPS=tile.warps,
        num_warps=tile.warps, maxnreg=registers_of(tile), **({"launch_pdl": True} if tile.pdl else {}),
    )  # fmt: skip
    return out
