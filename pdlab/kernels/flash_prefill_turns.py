"""Prefill attention of long prompts on Hopper: warpgroups that take turns at the tensor cores, fed by the copy engine.

What flash_prefill computes, with the roles of a block given to different warps:

    dispatching one warp hands out items, see prefill_schedule
    loading     one warp keeps a ring of K and V tiles full, another brings queries, an item of them ahead
    consumers   two or three warpgroups of 64 query rows each; softmax and both products, the running output in registers

A consumer starts the product S = Q K^T of the next keys before it starts P V of the last, so the tensor cores work while it
takes exponentials; and consumers take turns at starting products (a ring of barriers), so one's exponentials run under
another's products. It runs on from one query tile to the next in the same way: the next one's first scores are computed
beside the last P V of this one. Keys are walked from the newest to the oldest: the masked tiles come first, and the loop over
the rest has no mask. A consumer's rows are 64 tokens of one head or, packed, 64 / PACK tokens of PACK heads of a group: the
causal diagonal then crosses fewer keys of a tile.

What runs under what in a consumer (HopperTile.overlap):

    0   P V of the last tile under all exponentials of this one; then the output is scaled and p converted
    1   P V under half of the exponentials, the scaling and the conversion under the other half

FLOPs and bytes: as flash_prefill. Hopper only (compute capability 9.0), compiled there and nowhere else.
Oracle: reference.ReferenceOps.attention. Twin for the interpreter: flash_prefill.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from pdlab.kernels import hopper_tiles as tiles
from pdlab.kernels.hopper_tiles import ROWS
from pdlab.kernels.prefill_schedule import NUMBERS, TABLES, make_board, post_items, take_item, tiles_seen


@gluon.jit
def _load_tiles(
    descriptors, shared, barriers, work, HEAD: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, PAGE: gl.constexpr, KV_HEADS: gl.constexpr, CONSUMERS: gl.constexpr,
):  # fmt: skip
    _qd, kd, vd = descriptors
    _qs, ks, vs = shared
    _q_full, _q_empty, k_full, v_full, _edge, _mending, board = barriers
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
            key = (needed - 1 - j) * BLOCK_N
            if count >= STAGES:
                tiles.wait_for_empty(stage, CONSUMERS)
            tiles.bring_tile(kd, k_full, ks, stage, key, length, table, head, base, HEAD, BLOCK_N, PAGE, KV_HEADS)
            if STAGES <= 3 and count >= STAGES:
                tiles.wait_for_empty(STAGES + stage, CONSUMERS)
            tiles.bring_tile(vd, v_full, vs, stage, key, length, table, head, base, HEAD, BLOCK_N, PAGE, KV_HEADS)
            count += 1
        turn += 1
        _row, rows, base, newest, length, request, unit, is_item = take_item(board, turn, 1)


@gluon.jit
def _load_queries(descriptors, shared, barriers, HEAD: gl.constexpr, CONSUMERS: gl.constexpr, PACK: gl.constexpr):
    qd, _kd, _vd = descriptors
    qs, _ks, _vs = shared
    q_full, q_empty, _k_full, _v_full, _edge, _mending, board = barriers
    turn = 0
    row, _rows, _base, _newest, _length, _request, unit, is_item = take_item(board, turn, 1)
    while is_item:
        for w in gl.static_range(CONSUMERS):
            place = turn % 2 * CONSUMERS + w
            mbarrier.wait(q_empty.index(place), (turn // 2 & 1) ^ 1)
            tiles.bring_queries(qd, q_full, qs, place, row + w * (ROWS // PACK), unit, HEAD, PACK)
        turn += 1
        row, _rows, _base, _newest, _length, _request, unit, is_item = take_item(board, turn, 1)


@gluon.jit
def unseen_tiles(
    W: gl.constexpr, rows, newest, length, CONSUMERS: gl.constexpr, TOKENS: gl.constexpr, BLOCK_N: gl.constexpr,
    CAUSAL: gl.constexpr,
):  # fmt: skip
    """Tiles of an item, its newest, that no row of consumer W sees: none or one, and none of fewer than three consumers'."""
    if CAUSAL and CONSUMERS == 3 and BLOCK_N >= 2 * TOKENS:
        all_seen = tiles_seen(0, rows, newest, length, CONSUMERS * TOKENS, BLOCK_N, CAUSAL)
        return all_seen - tiles_seen(W, rows, newest, length, TOKENS, BLOCK_N, CAUSAL)
    else:
        return rows * 0


@gluon.jit
def skip_tile(barriers, count, W: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, TURNS: gl.constexpr):
    """Gives back the place of a tile that this consumer's rows do not see, and lets its turn pass."""
    _q_full, _q_empty, k_full, v_full, _edge, _mending, _board = barriers
    mbarrier.wait(k_full.index(count % STAGES), count // STAGES & 1)
    mbarrier.wait(v_full.index(count % STAGES), count // STAGES & 1)
    tiles.give_back_keys(count, STAGES, CONSUMERS)
    tiles.give_back_values(count, STAGES, CONSUMERS)
    if TURNS:
        tiles.wait_for_turn(W)
        tiles.pass_turn((W + 1) % CONSUMERS)


@gluon.jit
def _older_keys(
    q, ks, vs, barriers, acc, p, m, total, count, at_first, clear, newest, scale, SCORES: gl.constexpr, W: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, TURNS: gl.constexpr,
    POLYNOMIAL: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Tiles of keys at_first ... 0: scores of the next while the output takes in the one before (whose p is given)."""
    _q_full, _q_empty, k_full, v_full, edge, _mending, _board = barriers
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
    held = False  # the output begins with the first product
    for at in range(at_first, -1, -1):
        before = count
        count += 1
        mbarrier.wait(k_full.index(count % STAGES), count // STAGES & 1)
        if TURNS:
            tiles.wait_for_turn(W)
        s = warpgroup_mma(q, ks.index(count % STAGES).permute((1, 0)), zeros, use_acc=False, is_async=True)
        if TURNS == 2:
            tiles.pass_turn((W + 1) % CONSUMERS)
        mbarrier.wait(v_full.index(before % STAGES), before // STAGES & 1)
        o = warpgroup_mma(p, vs.index(before % STAGES), acc, use_acc=held, is_async=True)
        if TURNS == 1:
            tiles.pass_turn((W + 1) % CONSUMERS)
        s = warpgroup_mma_wait(1, deps=[s])
        tiles.give_back_keys(count, STAGES, CONSUMERS)
        if at >= clear:
            s = tiles.mask(s, at * BLOCK_N, newest, gl.SliceLayout(0, SCORES))
        if OVERLAP == 0:
            exps, m, total, rescale = tiles.softmax(s, m, total, scale, gl.SliceLayout(1, SCORES), POLYNOMIAL)
            # Nobody ever arrives, and this never waits; but a wait on a barrier ends a basic block, and without one the
            # assembler moves the next line's wait before the exponentials, which then no longer run under the product.
            mbarrier.wait(edge, 1)
            acc = warpgroup_mma_wait(0, deps=[o])
            tiles.give_back_values(before, STAGES, CONSUMERS)
        else:
            m, rescale, part = tiles.softmax_apart(s, m, scale, SCORES)
            acc = warpgroup_mma_wait(0, deps=[o])
            tiles.give_back_values(before, STAGES, CONSUMERS)
            exps, total = tiles.softmax_together(part, total, rescale, scale, SCORES)
        acc = acc * gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, acc.type.layout)), 1)
        p = gl.convert_layout(exps.to(p.dtype), p.type.layout)
        held = True
    return acc, p, total, count, held


@gluon.jit
def _consumer(
    output, inputs, shared, barriers, scale, W: gl.constexpr, HEAD: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, CONSUMERS: gl.constexpr, CAUSAL: gl.constexpr, TURNS: gl.constexpr,
    POLYNOMIAL: gl.constexpr, PAGE: gl.constexpr, PACK: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    boxes, ks, vs = shared
    qs = tiles.as_queries(boxes, inputs[0], 2 * CONSUMERS, HEAD, PACK)
    ks = tiles.as_tiles(ks, inputs[1], STAGES, BLOCK_N, HEAD, PAGE)
    vs = tiles.as_tiles(vs, inputs[2], STAGES, BLOCK_N, HEAD, PAGE)
    q_full, q_empty, k_full, v_full, _edge, mending, board = barriers
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HEAD, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUTPUT, k_width=2)
    PER_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
    acc = gl.zeros([ROWS, HEAD], gl.float32, OUTPUT)
    TOKENS: gl.constexpr = ROWS // PACK
    lanes = gl.arange(0, ROWS, PER_ROW) % TOKENS
    count = 0  # tiles of keys before this one
    mends = 0
    turn = 0  # items before this one; their queries lie in two places in turn
    row, rows, _base, newest_key, length, _request, head, is_item = take_item(board, turn, 4)
    if TURNS and W == CONSUMERS - 1:
        tiles.pass_turn(0)
    skip = unseen_tiles(W, rows, newest_key, length, CONSUMERS, TOKENS, BLOCK_N, CAUSAL)
    mbarrier.wait(q_full.index(W), 0, pred=is_item)
    mbarrier.wait(k_full.index(skip), 0, pred=is_item)
    if TURNS:
        tiles.wait_for_turn(W)
    s = warpgroup_mma(qs.index(W), ks.index(skip).permute((1, 0)), zeros, use_acc=False, is_async=True)
    if TURNS:
        tiles.pass_turn((W + 1) % CONSUMERS)
    s = warpgroup_mma_wait(0, deps=[s])
    while is_item:
        here = turn % 2 * CONSUMERS + W
        q = qs.index(here)
        turn += 1
        row_, rows_, _base, newest_key_, length_, _request, head_, is_another = take_item(board, turn, 4)
        place = turn % 2 * CONSUMERS + W  # of the next item's queries
        seen = tiles_seen(0, rows, newest_key, length, CONSUMERS * TOKENS, BLOCK_N, CAUSAL)
        if seen * BLOCK_N > length:
            tiles.mend_values(vs, v_full, mending, count, mends, length - (seen - 1) * BLOCK_N, W, HEAD, BLOCK_N, STAGES)
            mends += 1
        newest = lanes * 0 + newest_key
        clear = length // BLOCK_N
        if CAUSAL:
            newest = gl.minimum(newest + W * TOKENS + lanes, length - 1)
            clear = (newest_key + 1) // BLOCK_N
        count += skip
        seen -= skip
        tiles.give_back_keys(count, STAGES, CONSUMERS)
        if seen - 1 >= clear:
            s = tiles.mask(s, (seen - 1) * BLOCK_N, newest, gl.SliceLayout(0, SCORES))
        m = gl.full([ROWS], float("-inf"), gl.float32, PER_ROW)
        exps, m, total, _ = tiles.softmax(s, m, None, scale, PER_ROW, POLYNOMIAL)
        p = gl.convert_layout(exps.to(qs.dtype), OPERAND)
        tma.store_wait(0)  # the output before this one has left the place of its queries, where the next ones go
        mbarrier.arrive(q_empty.index(place), count=1, pred=turn > 1)
        if skip > 0:
            skip_tile(barriers, count - 1, W, STAGES, CONSUMERS, TURNS)
        skip = unseen_tiles(W, rows_, newest_key_, length_, CONSUMERS, TOKENS, BLOCK_N, CAUSAL)  # from here on the next item's
        acc, p, total, count, held = _older_keys(
            q, ks, vs, barriers, acc, p, m, total, count, seen - 2, clear, newest, scale, SCORES, W, BLOCK_N, STAGES, CONSUMERS,
            TURNS, POLYNOMIAL, OVERLAP,
        )  # fmt: skip
        # the first scores of the next item beside the last values of this one
        mbarrier.wait(q_full.index(place), turn // 2 & 1, pred=is_another)
        first = count + 1 + skip
        mbarrier.wait(k_full.index(first % STAGES), first // STAGES & 1, pred=is_another)
        if TURNS:
            tiles.wait_for_turn(W)
        s = warpgroup_mma(qs.index(place), ks.index(first % STAGES).permute((1, 0)), zeros, use_acc=False, is_async=True)
        if TURNS == 2:
            tiles.pass_turn((W + 1) % CONSUMERS)
        mbarrier.wait(v_full.index(count % STAGES), count // STAGES & 1)
        o = warpgroup_mma(p, vs.index(count % STAGES), acc, use_acc=held, is_async=True)
        if TURNS == 1:
            tiles.pass_turn((W + 1) % CONSUMERS)
        s, acc = warpgroup_mma_wait(0, deps=[s, o])
        tiles.give_back_values(count, STAGES, CONSUMERS)
        tiles.write_out(acc, total, q, boxes, here, output, row + W * TOKENS, head, rows - W * TOKENS, HEAD, PACK)
        count += 1
        row, rows, newest_key, length, head, is_item = row_, rows_, newest_key_, length_, head_, is_another
    tma.store_wait(0)


@gluon.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=TABLES)
def flash_prefill_turns_kernel(
    qd, kd, vd, od, OUT, CU_Q, LENS, BASE, TABLE, COUNTER, table_stride, scale, batch, item_rows, min_q, in_order, units, share,
    group, units_at_once, out_stride_8, HEAD: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr, CAUSAL: gl.constexpr, TURNS: gl.constexpr, POLYNOMIAL: gl.constexpr,
    PAGE: gl.constexpr, KV_HEADS: gl.constexpr, PACK: gl.constexpr, PLACES: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    gl.static_assert(OVERLAP == 0 or POLYNOMIAL == 0, "one or the other")
    gl.static_assert(PLACES == 2, "an item's queries and the next one's")
    gl.static_assert(
        CONSUMERS == 2 or STAGES >= 3, "who skips a tile waits for one further on while others read the one before"
    )
    qs = tiles.room_for_queries(qd, 2 * CONSUMERS, HEAD, PACK)
    ks = tiles.room_for_tiles(kd, STAGES, BLOCK_N, HEAD, PAGE)
    vs = tiles.room_for_tiles(vd, STAGES, BLOCK_N, HEAD, PAGE)
    mending = (tiles.make_barriers(1, 1).index(0), tiles.make_barriers(1, CONSUMERS - 1).index(0))
    board = make_board(CONSUMERS + 2)
    of_queries = (tiles.make_barriers(2 * CONSUMERS, 1), tiles.make_barriers(2 * CONSUMERS, 1))
    of_tiles = (tiles.make_barriers(STAGES, 1), tiles.make_barriers(STAGES, 1))
    if OVERLAP == 0:
        edge = tiles.make_barriers(1, 1).index(0)
    else:
        edge = mending[0]  # a barrier of its own, at which nobody waits, would be set up in memory that is given to others
    barriers = (of_queries[0], of_queries[1], of_tiles[0], of_tiles[1], edge, mending, board)
    fence_async_shared()
    inputs = (qd, kd, vd)
    shared = (qs, ks, vs)
    work = (TABLE, table_stride, share, group)
    output = (OUT, od, out_stride_8)
    requests = (CU_Q, LENS, BASE, batch, item_rows, min_q, in_order)
    heads = (units, units_at_once)
    M: gl.constexpr = CONSUMERS * 64 // PACK
    # constants stay constants only where they are written in the call itself
    # fmt: off
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_consumer, (output, inputs, shared, barriers, scale, 0, HEAD, BLOCK_N, STAGES, 2, CAUSAL, TURNS, POLYNOMIAL,
                         PAGE, PACK, OVERLAP)),
            (_consumer, (output, inputs, shared, barriers, scale, 1, HEAD, BLOCK_N, STAGES, 2, CAUSAL, TURNS, POLYNOMIAL,
                         PAGE, PACK, OVERLAP)),
            (_load_tiles, (inputs, shared, barriers, work, HEAD, M, BLOCK_N, STAGES, CAUSAL, PAGE, KV_HEADS, 2)),
            (_load_queries, (inputs, shared, barriers, HEAD, 2, PACK)),
            (post_items, (board, requests, COUNTER, heads, CAUSAL)),
        ], [4, 1, 1, 1], [232, 48, 48, 48])
    else:
        gl.warp_specialize([
            (_consumer, (output, inputs, shared, barriers, scale, 0, HEAD, BLOCK_N, STAGES, 3, CAUSAL, TURNS, POLYNOMIAL,
                         PAGE, PACK, OVERLAP)),
            (_consumer, (output, inputs, shared, barriers, scale, 1, HEAD, BLOCK_N, STAGES, 3, CAUSAL, TURNS, POLYNOMIAL,
                         PAGE, PACK, OVERLAP)),
            (_consumer, (output, inputs, shared, barriers, scale, 2, HEAD, BLOCK_N, STAGES, 3, CAUSAL, TURNS, POLYNOMIAL,
                         PAGE, PACK, OVERLAP)),
            (_load_tiles, (inputs, shared, barriers, work, HEAD, M, BLOCK_N, STAGES, CAUSAL, PAGE, KV_HEADS, 3)),
            (_load_queries, (inputs, shared, barriers, HEAD, 3, PACK)),
            (post_items, (board, requests, COUNTER, heads, CAUSAL)),
        ], [4, 4, 1, 1, 1], [160, 160, 32, 32, 32])
    # fmt: on
