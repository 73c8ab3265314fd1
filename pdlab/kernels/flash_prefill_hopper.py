"""Prefill attention on Hopper: warp-specialized, K and V brought by the tensor memory accelerator. Head sizes 64, 128.

What flash_prefill computes, with the roles of a block given to different warps:

    loading     one warp keeps a ring of K and V tiles full, another brings queries, a tile of them ahead
    consumers   two or three warpgroups of 64 query rows each; softmax and both products, the running output in registers

A consumer starts the product S = Q K^T of the next keys before it starts P V of the last, so the tensor cores work while it
takes exponentials; and consumers take turns at starting products (a ring of barriers), so one's exponentials run under
another's products. It runs on from one query tile to the next in the same way: the next one's first scores are computed
beside the last P V of this one. Keys are walked from the newest to the oldest: the masked tiles come first, and the loop over
the rest has no mask. Short prompts are flash_prefill_tasks' business.

FLOPs and bytes: as flash_prefill. Hopper only (compute capability 9.0), compiled there and nowhere else.
Oracle: reference.ReferenceOps.attention. Twin for the interpreter: flash_prefill.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import triton
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

from pdlab.kernels import hopper_tiles as tiles
from pdlab.kernels.flash_prefill import LOG2E
from pdlab.kernels.hopper_tiles import ROWS
from pdlab.kernels.prefill_schedule import make_board, make_schedule, post_items, take_item, tiles_seen

if TYPE_CHECKING:
    from pdlab.kernels.kv_view import KVView
    from pdlab.kernels.tuning import HopperTile


@gluon.jit
def load_tiles(
    descriptors, shared, barriers, work, HEAD: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, ONCE: gl.constexpr, PAGE: gl.constexpr, KV_HEADS: gl.constexpr,
):  # fmt: skip
    _qd, kd, vd = descriptors
    _qs, ks, vs = shared
    _q_full, _q_empty, k_full, k_empty, v_full, v_empty, _turns, _mending, board = barriers
    TABLE, table_stride, share, group = work
    count = 0
    turn = 0
    _row, rows, base, newest, length, request, unit, is_item = take_item(board, turn, 1)
    while is_item:
        table = TABLE + request * table_stride
        head = unit * share // group  # of K and V
        needed = tiles_seen((rows + BLOCK_M - 1) // BLOCK_M - 1, rows, newest, length, BLOCK_M, BLOCK_N, CAUSAL)
        for j in range(needed):
            stage = count % STAGES
            parity = (count // STAGES & 1) ^ 1
            key = (needed - 1 - j) * BLOCK_N
            if ONCE:  # the places of K and V are given back together
                mbarrier.wait(v_empty.index(stage), parity)
            else:
                mbarrier.wait(k_empty.index(stage), parity)
            tiles.bring_tile(kd, k_full, ks, stage, key, length, table, head, base, HEAD, BLOCK_N, PAGE, KV_HEADS)
            if not ONCE:
                mbarrier.wait(v_empty.index(stage), parity)
            tiles.bring_tile(vd, v_full, vs, stage, key, length, table, head, base, HEAD, BLOCK_N, PAGE, KV_HEADS)
            count += 1
        turn += 1
        _row, rows, base, newest, length, request, unit, is_item = take_item(board, turn, 1)


@gluon.jit
def _load_queries(descriptors, shared, barriers, HEAD: gl.constexpr, CONSUMERS: gl.constexpr):
    qd, _kd, _vd = descriptors
    qs, _ks, _vs = shared
    q_full, q_empty, _k_full, _k_empty, _v_full, _v_empty, _turns, _mending, board = barriers
    turn = 0
    row, _rows, _base, _newest, _length, _request, head, is_item = take_item(board, turn, 1)
    while is_item:
        for w in gl.static_range(CONSUMERS):
            place = turn % 2 * CONSUMERS + w
            mbarrier.wait(q_empty.index(place), (turn // 2 & 1) ^ 1)
            mbarrier.expect(q_full.index(place), qd.block_type.nbytes)
            tma.async_copy_global_to_shared(qd, [row + w * ROWS, head * HEAD], q_full.index(place), qs.index(place))
        turn += 1
        row, _rows, _base, _newest, _length, _request, head, is_item = take_item(board, turn, 1)


@gluon.jit
def mend_values(
    vs, v_full, mending, count, mends, first, W: gl.constexpr, HEAD: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr
):
    """The first consumer zeroes the V rows past the request's end for all of them."""
    mended, noticed = mending
    if W == 0:
        mbarrier.wait(v_full.index(count % STAGES), count // STAGES & 1)
        tiles.zero_rows_from(vs.index(count % STAGES), first, HEAD, BLOCK_N)
        mbarrier.wait(noticed, (mends & 1) ^ 1)  # nobody is still waiting for the mending before this one
        mbarrier.arrive(mended, count=1)
    else:
        mbarrier.wait(mended, mends & 1)
        mbarrier.arrive(noticed, count=1)


@gluon.jit
def older_keys(
    q, ks, vs, barriers, acc, p, m, total, count, step, at_first, kept, clear, newest, scale, SCORES: gl.constexpr,
    W: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, TURNS: gl.constexpr,
    ONCE: gl.constexpr, POLYNOMIAL: gl.constexpr,
):  # fmt: skip
    """Tiles of keys at_first ... 0: scores of the next while the output takes in the one before (whose p is given)."""
    _q_full, _q_empty, k_full, k_empty, v_full, v_empty, turns, _mending, _board = barriers
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
    held = False  # the output begins with the first product
    for at in range(at_first, -1, -1):
        before = count
        count += 1
        step += 1
        mbarrier.wait(k_full.index(count % STAGES), count // STAGES & 1)
        if TURNS:
            mbarrier.wait(turns.index(W), (step & 1) ^ (1 if W == 0 else 0))
        s = warpgroup_mma(q, ks.index(count % STAGES).permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(before % STAGES), before // STAGES & 1)
        o = warpgroup_mma(p, vs.index(before % STAGES), acc, use_acc=held, is_async=True)
        if TURNS:
            mbarrier.arrive(turns.index((W + 1) % CONSUMERS), count=1)
        s = warpgroup_mma_wait(1, deps=[s])
        if not ONCE:
            mbarrier.arrive(k_empty.index(count % STAGES), count=1, pred=at >= kept)
        if at >= clear:
            s = tiles.mask(s, at * BLOCK_N, newest, gl.SliceLayout(0, SCORES))
        exps, m, total, rescale = tiles.softmax(s, m, total, scale, gl.SliceLayout(1, SCORES), POLYNOMIAL)
        # Long there; but a wait on a barrier ends a basic block, and without one the assembler moves the next line's wait
        # before the exponentials, which then no longer run under the product.
        mbarrier.wait(v_full.index(before % STAGES), before // STAGES & 1)
        acc = warpgroup_mma_wait(0, deps=[o])
        mbarrier.arrive(v_empty.index(before % STAGES), count=1, pred=at + 1 >= kept)
        acc = acc * gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, acc.type.layout)), 1)
        p = gl.convert_layout(exps.to(p.dtype), p.type.layout)
        held = True
    return acc, p, total, count, step, held


@gluon.jit
def _consumer(
    output, inputs, shared, barriers, scale, W: gl.constexpr, HEAD: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, CONSUMERS: gl.constexpr, CAUSAL: gl.constexpr, TURNS: gl.constexpr, ONCE: gl.constexpr,
    POLYNOMIAL: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    qs, ks, vs = shared
    ks = tiles.as_tiles(ks, inputs[1], STAGES, BLOCK_N, HEAD, PAGE)
    vs = tiles.as_tiles(vs, inputs[2], STAGES, BLOCK_N, HEAD, PAGE)
    q_full, q_empty, k_full, k_empty, v_full, v_empty, turns, mending, board = barriers
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HEAD, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUTPUT, k_width=2)
    PER_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
    acc = gl.zeros([ROWS, HEAD], gl.float32, OUTPUT)
    lanes = gl.arange(0, ROWS, PER_ROW)
    count = 0  # tiles of keys before this one
    step = 0  # products of scores before this one, whose parity tells whose turn it is
    mends = 0
    turn = 0  # items before this one; their queries lie in two places in turn
    row, rows, _base, newest_key, length, _request, head, is_item = take_item(board, turn, 4)
    mbarrier.wait(q_full.index(W), 0, pred=is_item)
    mbarrier.wait(k_full.index(0), 0, pred=is_item)
    if TURNS:
        mbarrier.wait(turns.index(W), 1 if W == 0 else 0, pred=is_item)
    s = warpgroup_mma(qs.index(W), ks.index(0).permute((1, 0)), zeros, use_acc=False, is_async=True)
    if TURNS:
        mbarrier.arrive(turns.index((W + 1) % CONSUMERS), count=1, pred=is_item)
    s = warpgroup_mma_wait(0, deps=[s])
    while is_item:
        q = qs.index(turn % 2 * CONSUMERS + W)
        turn += 1
        row_, rows_, _base, newest_key_, length_, _request, head_, is_another = take_item(board, turn, 4)
        place = turn % 2 * CONSUMERS + W  # of the next item's queries
        seen = tiles_seen(0, rows, newest_key, length, CONSUMERS * 64, BLOCK_N, CAUSAL)
        if seen * BLOCK_N > length:
            mend_values(vs, v_full, mending, count, mends, length - (seen - 1) * BLOCK_N, W, HEAD, BLOCK_N, STAGES)
            mends += 1
        newest = lanes * 0 + newest_key
        clear = length // BLOCK_N
        if CAUSAL:
            newest = gl.minimum(newest + W * ROWS + lanes, length - 1)
            clear = (newest_key + 1) // BLOCK_N
        if not ONCE:
            mbarrier.arrive(k_empty.index(count % STAGES), count=1)
        if seen - 1 >= clear:
            s = tiles.mask(s, (seen - 1) * BLOCK_N, newest, gl.SliceLayout(0, SCORES))
        m = gl.full([ROWS], float("-inf"), gl.float32, PER_ROW)
        exps, m, total, _ = tiles.softmax(s, m, None, scale, PER_ROW, POLYNOMIAL)
        p = gl.convert_layout(exps.to(qs.dtype), OPERAND)
        tma.store_wait(0)  # the output before this one has left the place of its queries, where the next ones go
        mbarrier.arrive(q_empty.index(place), count=1, pred=turn > 1)
        acc, p, total, count, step, held = older_keys(
            q, ks, vs, barriers, acc, p, m, total, count, step, seen - 2, 0, clear, newest, scale, SCORES, W, BLOCK_N, STAGES,
            CONSUMERS, TURNS, ONCE, POLYNOMIAL,
        )  # fmt: skip
        # the first scores of the next item beside the last values of this one
        step += 1
        mbarrier.wait(q_full.index(place), turn // 2 & 1, pred=is_another)
        mbarrier.wait(k_full.index((count + 1) % STAGES), (count + 1) // STAGES & 1, pred=is_another)
        if TURNS:
            mbarrier.wait(turns.index(W), (step & 1) ^ (1 if W == 0 else 0))
        s = warpgroup_mma(qs.index(place), ks.index((count + 1) % STAGES).permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(count % STAGES), count // STAGES & 1)
        o = warpgroup_mma(p, vs.index(count % STAGES), acc, use_acc=held, is_async=True)
        if TURNS:
            mbarrier.arrive(turns.index((W + 1) % CONSUMERS), count=1)
        s, acc = warpgroup_mma_wait(0, deps=[s, o])
        mbarrier.arrive(v_empty.index(count % STAGES), count=1)
        tiles.write_out(acc, total, q, output, row + W * ROWS, head, rows - W * ROWS, HEAD)
        count += 1
        row, rows, newest_key, length, head, is_item = row_, rows_, newest_key_, length_, head_, is_another
    tma.store_wait(0)


@gluon.jit
def make_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit(do_not_specialize=["table_stride", "units", "share", "group", "units_at_once"])
def flash_prefill_hopper_kernel(
    qd, kd, vd, od, OUT, SCHEDULE, TABLE, table_stride, scale, units, share, group, units_at_once,
    OUT_STRIDE: gl.constexpr, HEAD: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
    CAUSAL: gl.constexpr, TURNS: gl.constexpr, ONCE: gl.constexpr, POLYNOMIAL: gl.constexpr, PAGE: gl.constexpr,
    KV_HEADS: gl.constexpr,
):  # fmt: skip
    qs = gl.allocate_shared_memory(qd.dtype, [2 * CONSUMERS, ROWS, HEAD], qd.layout)
    ks = tiles.room_for_tiles(kd, STAGES, BLOCK_N, HEAD, PAGE)
    vs = tiles.room_for_tiles(vd, STAGES, BLOCK_N, HEAD, PAGE)
    mending = (make_barriers(1, 1).index(0), make_barriers(1, CONSUMERS - 1).index(0))
    board = make_board(CONSUMERS + 2)
    barriers = (
        make_barriers(2 * CONSUMERS, 1), make_barriers(2 * CONSUMERS, 1), make_barriers(STAGES, 1),
        make_barriers(STAGES, CONSUMERS), make_barriers(STAGES, 1), make_barriers(STAGES, CONSUMERS),
        make_barriers(CONSUMERS, 1), mending, board,
    )  # fmt: skip
    fence_async_shared()
    inputs = (qd, kd, vd)
    shared = (qs, ks, vs)
    work = (TABLE, table_stride, share, group)
    output = (OUT, od, OUT_STRIDE)
    M: gl.constexpr = CONSUMERS * 64
    # constants stay constants only where they are written in the call itself
    # fmt: off
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_consumer, (output, inputs, shared, barriers, scale, 0, HEAD, BLOCK_N, STAGES, 2, CAUSAL, TURNS, ONCE, POLYNOMIAL,
                         PAGE)),
            (_consumer, (output, inputs, shared, barriers, scale, 1, HEAD, BLOCK_N, STAGES, 2, CAUSAL, TURNS, ONCE, POLYNOMIAL,
                         PAGE)),
            (load_tiles, (inputs, shared, barriers, work, HEAD, M, BLOCK_N, STAGES, CAUSAL, ONCE, PAGE, KV_HEADS)),
            (_load_queries, (inputs, shared, barriers, HEAD, 2)),
            (post_items, (board, SCHEDULE, units, units_at_once)),
        ], [4, 1, 1, 1], [232, 40, 40, 40])
    else:
        gl.warp_specialize([
            (_consumer, (output, inputs, shared, barriers, scale, 0, HEAD, BLOCK_N, STAGES, 3, CAUSAL, TURNS, ONCE, POLYNOMIAL,
                         PAGE)),
            (_consumer, (output, inputs, shared, barriers, scale, 1, HEAD, BLOCK_N, STAGES, 3, CAUSAL, TURNS, ONCE, POLYNOMIAL,
                         PAGE)),
            (_consumer, (output, inputs, shared, barriers, scale, 2, HEAD, BLOCK_N, STAGES, 3, CAUSAL, TURNS, ONCE, POLYNOMIAL,
                         PAGE)),
            (load_tiles, (inputs, shared, barriers, work, HEAD, M, BLOCK_N, STAGES, CAUSAL, ONCE, PAGE, KV_HEADS)),
            (_load_queries, (inputs, shared, barriers, HEAD, 3)),
            (post_items, (board, SCHEDULE, units, units_at_once)),
        ], [4, 4, 1, 1, 1], [160, 160, 24, 24, 24])
    # fmt: on


def fits(q: torch.Tensor, view: KVView) -> bool:
    """Whether these kernels can do it: a head size and a dtype they have, the heads of q side by side, rows at 16 bytes.

    Extents of single-token slots, or pages that a tile of keys divides or is divided by (8, 16, 32, 64 or a multiple of 128).
    """
    size = view.page_size
    return (
        (size == 1 if view.kind == "extent" else size >= 8 and (128 % size == 0 or size % 128 == 0))
        and q.shape[2] in (64, 128)
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.stride(1) == q.shape[2]
        and q.stride(0) % 8 == 0
        and view.k.is_contiguous()
        and view.v.is_contiguous()
    )


def _descriptors(q: torch.Tensor, view: KVView, out: torch.Tensor, block_n: int) -> list[TensorDescriptor]:
    """What the copy engine needs to know of q, K, V and out: two-dimensional shapes and the box that one copy takes."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    tokens, heads, head_dim = q.shape
    rows = [x.as_strided((tokens, heads * head_dim), (x.stride(0), 1)) for x in (q, out)]
    if view.kind == "paged":
        box = [min(view.page_size, block_n), 64]
        caches = [x.view(-1, head_dim) for x in (view.k, view.v)]
    else:
        box = [block_n, head_dim]
        caches = [x.view(x.shape[0], -1) for x in (view.k, view.v)]
    shapes = ((rows[0], [64, head_dim]), (caches[0], box), (caches[1], box), (rows[1], [64, head_dim]))
    return [TensorDescriptor.from_tensor(tensor, block, layout) for tensor, block in shapes]


def _item_of(
    tile: HopperTile, view: KVView, heads: int, group: int, head_dim: int, blocks_at_once: int
) -> tuple[HopperTile, int, int]:
    """The tile to use, and the blocks of 64 query rows and the heads of an item.

    Items of more blocks than consumers need their K and V to stay in the ring; where the longest cache is longer (a chunk after
    a prefix), pairs of consumers walk it in turns. Heads share an item only where that leaves one for each of the
    `blocks_at_once` blocks of the grid.
    """
    if tile.blocks and triton.cdiv(view.max_kv, tile.block_n) <= tile.stages:
        share = math.gcd(tile.share, group)
        return tile, tile.blocks, share if view.seq_lens.shape[0] * heads >= share * blocks_at_once else 1
    if tile.blocks > tile.consumers:
        tile = replace(tile, consumers=2, block_n=128, stages=256 // head_dim, turns=True, blocks=0)
    return tile, tile.consumers, 1


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
    """As flash_prefill, for views that `fits` accepts and heads of `out` side by side.

    A request with queries must have a cache, its own tokens at least.

    With `tile.blocks` the kernel of flash_prefill_tasks runs, see _item_of.
    """
    tokens, heads, head_dim = q.shape
    kv_heads = view.k.shape[1]
    group, batch = heads // kv_heads, view.seq_lens.shape[0]
    if out is None:
        out = torch.empty((tokens, heads, head_dim), dtype=q.dtype, device=q.device)
    multiprocessors = torch.cuda.get_device_properties(q.device).multi_processor_count
    tile, blocks, share = _item_of(tile, view, heads, group, head_dim, multiprocessors)
    kernel = flash_prefill_hopper_kernel
    if tile.blocks:
        from pdlab.kernels.flash_prefill_tasks import flash_prefill_tasks_kernel

        kernel = flash_prefill_tasks_kernel
    by_request = bool(tile.blocks) or view.max_q <= tile.by_request
    schedule, most = make_schedule(view, tokens, 64 * blocks, causal=causal, min_q=min_q, by_request=by_request)
    units = heads // share
    held = sum(kv for _, kv in view.host_lens) or batch * view.max_kv
    at_once = units if by_request else group * max(1, min(kv_heads, l2_bytes // (2 * held * head_dim * q.element_size())))
    programs = min(multiprocessors, most * units)
    paged = view.kind == "paged"
    kernel[(programs,)](
        *_descriptors(q, view, out, tile.block_n), out, schedule, view.block_table, view.block_table.stride(0),
        (head_dim**-0.5 if scale is None else scale) * LOG2E, units, share, group, at_once,
        OUT_STRIDE=out.stride(0), HEAD=head_dim, BLOCK_N=tile.block_n, STAGES=tile.stages, CONSUMERS=tile.consumers,
        CAUSAL=causal, TURNS=tile.turns and not tile.blocks, ONCE=tile.once and not tile.blocks, POLYNOMIAL=tile.polynomial,
        PAGE=view.page_size if paged else 0, KV_HEADS=kv_heads if paged else 0, num_warps=4, launch_pdl=True,
    )  # fmt: skip
    return out
