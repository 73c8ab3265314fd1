"""Prefill attention of short prompts on Hopper: every warpgroup for itself, K and V of a prompt fetched once.

Up to some 512 tokens a prompt is over before a pair of warpgroups that take turns is in step: at 256 tokens and head size 128
the bytes alone (q, k, v, o once: 537 MB for 16384 tokens of 32 heads, 126 us at 4.26 TB/s of copying) take longer than the
products (60 us), so what counts is that copies never pause. Here

    an item     is a whole prompt and one head (or all heads of a group) where its K and V fit the ring, else a few blocks
    a task      is 64 query rows of it; tasks are counted across items, and consumer w of C takes every C-th from w on
    queries     of the next tasks lie in a ring of PLACES x C tiles, which a warp of its own keeps full: a task is over sooner
                than its queries come from memory, so they are asked for two tasks ahead and more
    a consumer  walks its own keys from the newest to the oldest, none that the causal mask hides, and gives a tile's place back
                after its own last use; nobody waits for anybody

Two or more consumers at different places of the same prompt hide each other's latency, as the turns do in flash_prefill_turns.

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
from pdlab.kernels.hopper_tiles import ROWS, make_barriers, mend_values
from pdlab.kernels.prefill_schedule import NUMBERS, TABLES, make_board, post_items, take_item, tiles_seen


@gluon.jit
def _load_tiles(
    descriptors, shared, barriers, work, HEAD: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, PAGE: gl.constexpr, KV_HEADS: gl.constexpr,
):  # fmt: skip
    _qd, kd, vd = descriptors
    _qs, ks, vs = shared
    _q_full, _q_empty, k_full, k_empty, v_full, v_empty, _edge, _mending, board = barriers
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
            mbarrier.wait(k_empty.index(stage), parity)
            tiles.bring_tile(kd, k_full, ks, stage, key, length, table, head, base, HEAD, BLOCK_N, PAGE, KV_HEADS)
            mbarrier.wait(v_empty.index(stage), parity)
            tiles.bring_tile(vd, v_full, vs, stage, key, length, table, head, base, HEAD, BLOCK_N, PAGE, KV_HEADS)
            count += 1
        turn += 1
        _row, rows, base, newest, length, request, unit, is_item = take_item(board, turn, 1)


@gluon.jit
def _load_queries(inputs, shared, barriers, work, HEAD: gl.constexpr, PLACES: gl.constexpr):
    """The queries of all tasks of this block's items, in order. PLACES: of all consumers together."""
    qd, _kd, _vd = inputs
    qs, _ks, _vs = shared
    q_full, q_empty, _k_full, _k_empty, _v_full, _v_empty, _edge, _mending, board = barriers
    _TABLE, _table_stride, share, _group = work
    turn = 0
    task = 0
    row, rows, _base, _newest, _length, _request, unit, is_item = take_item(board, turn, 1)
    while is_item:
        blocks = (rows + ROWS - 1) // ROWS
        for r in range(blocks * share):
            place = task % PLACES
            mbarrier.wait(q_empty.index(place), (task // PLACES & 1) ^ 1)
            tiles.bring_queries(
                qd, q_full, qs, place, row + (blocks - 1 - r // share) * ROWS, unit * share + r % share, HEAD, 1
            )
            task += 1
        turn += 1
        row, rows, _base, _newest, _length, _request, unit, is_item = take_item(board, turn, 1)


@gluon.jit
def _skip(barriers, begun, count, STAGES: gl.constexpr):
    """Gives back the places of `count` tiles, newer than any key this consumer's rows see."""
    _q_full, _q_empty, k_full, k_empty, v_full, v_empty, _edge, _mending, _board = barriers
    for i in range(begun, begun + count):
        mbarrier.wait(k_full.index(i % STAGES), i // STAGES & 1)
        mbarrier.arrive(k_empty.index(i % STAGES), count=1)
        mbarrier.wait(v_full.index(i % STAGES), i // STAGES & 1)
        mbarrier.arrive(v_empty.index(i % STAGES), count=1)


@gluon.jit
def _older_keys(
    q, ks, vs, barriers, acc, p, m, total, count, at_first, kept, clear, newest, scale, SCORES: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, POLYNOMIAL: gl.constexpr,
):  # fmt: skip
    """Tiles of keys at_first ... 0: scores of the next while the output takes in the one before (whose p is given).

    The places of tiles below `kept` are not given back yet.
    """
    _q_full, _q_empty, k_full, k_empty, v_full, v_empty, edge, _mending, _board = barriers
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
    held = False  # the output begins with the first product
    for at in range(at_first, -1, -1):
        before = count
        count += 1
        mbarrier.wait(k_full.index(count % STAGES), count // STAGES & 1)
        s = warpgroup_mma(q, ks.index(count % STAGES).permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(before % STAGES), before // STAGES & 1)
        o = warpgroup_mma(p, vs.index(before % STAGES), acc, use_acc=held, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
        mbarrier.arrive(k_empty.index(count % STAGES), count=1, pred=at >= kept)
        if at >= clear:
            s = tiles.mask(s, at * BLOCK_N, newest, gl.SliceLayout(0, SCORES))
        exps, m, total, rescale = tiles.softmax(s, m, total, scale, gl.SliceLayout(1, SCORES), POLYNOMIAL)
        # Nobody ever arrives, and this never waits; but a wait on a barrier ends a basic block, and without one the assembler
        # moves the next line's wait before the exponentials, which then no longer run under the product.
        mbarrier.wait(edge, 1)
        acc = warpgroup_mma_wait(0, deps=[o])
        mbarrier.arrive(v_empty.index(before % STAGES), count=1, pred=at + 1 >= kept)
        acc = acc * gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, acc.type.layout)), 1)
        p = gl.convert_layout(exps.to(p.dtype), p.type.layout)
        held = True
    return acc, p, total, count, held


@gluon.jit
def _consumer(
    output, inputs, shared, barriers, work, scale, W: gl.constexpr, HEAD: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, CONSUMERS: gl.constexpr, CAUSAL: gl.constexpr, POLYNOMIAL: gl.constexpr, PAGE: gl.constexpr,
    PLACES: gl.constexpr,
):  # fmt: skip
    _qd, kd, vd = inputs
    qs, ks, vs = shared
    ks = tiles.as_tiles(ks, kd, STAGES, BLOCK_N, HEAD, PAGE)
    vs = tiles.as_tiles(vs, vd, STAGES, BLOCK_N, HEAD, PAGE)
    q_full, q_empty, k_full, k_empty, v_full, v_empty, _edge, mending, board = barriers
    _TABLE, _table_stride, share, _group = work
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HEAD, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUTPUT, k_width=2)
    PER_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
    lanes = gl.arange(0, ROWS, PER_ROW)
    turn = 0
    begun = 0  # tiles of keys of the items before this one
    before = 0  # tasks of the items before this one
    task = W  # this consumer's next, of all items' tasks
    mends = 0
    row, rows, _base, newest_key, length, _request, unit, is_item = take_item(board, turn, 4)
    while is_item:
        turn += 1
        row_, rows_, _base, newest_key_, length_, _request, unit_, is_another = take_item(board, turn, 4)
        blocks = (rows + ROWS - 1) // ROWS
        tasks = blocks * share
        most = tiles_seen(blocks - 1, rows, newest_key, length, ROWS, BLOCK_N, CAUSAL)
        if most * BLOCK_N > length:
            mend_values(vs, v_full, mending, begun, mends, length - (most - 1) * BLOCK_N, W, HEAD, BLOCK_N, STAGES)
            mends += 1
        own = tiles_seen(blocks - 1 - (task - before) // share, rows, newest_key, length, ROWS, BLOCK_N, CAUSAL)
        _skip(barriers, begun, most - gl.where(task - before < tasks, own, 0), STAGES)
        for r in range(task - before, tasks, CONSUMERS):
            b = blocks - 1 - r // share
            place = task % PLACES
            q = qs.index(place)
            seen = tiles_seen(b, rows, newest_key, length, ROWS, BLOCK_N, CAUSAL)
            later = r + CONSUMERS  # this consumer's next task of the item reads the older `kept` tiles again
            kept = tiles_seen(blocks - 1 - later // share, rows, newest_key, length, ROWS, BLOCK_N, CAUSAL)
            kept = gl.where(later < tasks, kept, 0)
            newest = lanes * 0 + newest_key
            clear = length // BLOCK_N
            if CAUSAL:
                newest = gl.minimum(newest + b * ROWS + lanes, length - 1)
                clear = (newest_key + b * ROWS + 1) // BLOCK_N
            count = begun + most - seen
            mbarrier.wait(q_full.index(place), task // PLACES & 1)
            mbarrier.wait(k_full.index(count % STAGES), count // STAGES & 1)
            s = warpgroup_mma(q, ks.index(count % STAGES).permute((1, 0)), zeros, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            mbarrier.arrive(k_empty.index(count % STAGES), count=1, pred=seen - 1 >= kept)
            if seen - 1 >= clear:
                s = tiles.mask(s, (seen - 1) * BLOCK_N, newest, gl.SliceLayout(0, SCORES))
            m = gl.full([ROWS], float("-inf"), gl.float32, PER_ROW)
            exps, m, total, _ = tiles.softmax(s, m, None, scale, PER_ROW, POLYNOMIAL)
            p = gl.convert_layout(exps.to(qs.dtype), OPERAND)
            tma.store_wait(0)  # the output before this one has left the place of its queries: others may come
            mbarrier.arrive(q_empty.index((task + PLACES - CONSUMERS) % PLACES), count=1, pred=task >= CONSUMERS)
            acc = gl.zeros([ROWS, HEAD], gl.float32, OUTPUT)
            acc, p, total, count, held = _older_keys(
                q, ks, vs, barriers, acc, p, m, total, count, seen - 2, kept, clear, newest, scale, SCORES, BLOCK_N, STAGES,
                POLYNOMIAL,
            )  # fmt: skip
            mbarrier.wait(v_full.index(count % STAGES), count // STAGES & 1)
            o = warpgroup_mma(p, vs.index(count % STAGES), acc, use_acc=held, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[o])
            mbarrier.arrive(v_empty.index(count % STAGES), count=1, pred=kept == 0)
            tiles.write_out(
                acc, total, q, qs, place, output, row + b * ROWS, unit * share + r % share, rows - b * ROWS, HEAD, 1
            )
            task += CONSUMERS
        begun += most
        before += tasks
        row, rows, newest_key, length, unit, is_item = row_, rows_, newest_key_, length_, unit_, is_another
    tma.store_wait(0)


@gluon.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=TABLES)
def flash_prefill_tasks_kernel(
    qd, kd, vd, od, OUT, CU_Q, LENS, BASE, TABLE, COUNTER, table_stride, scale, batch, item_rows, min_q, in_order, units, share,
    group, units_at_once, out_stride_8, HEAD: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr, CAUSAL: gl.constexpr, TURNS: gl.constexpr, POLYNOMIAL: gl.constexpr,
    PAGE: gl.constexpr, KV_HEADS: gl.constexpr, PACK: gl.constexpr, PLACES: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    gl.static_assert(OVERLAP == 0, "these consumers take a tile's steps one after the other")
    gl.static_assert(TURNS == 0, "these consumers take no turns")
    gl.static_assert(PACK == 1, "a task's rows are of one head")
    ALL: gl.constexpr = PLACES * CONSUMERS
    qs = tiles.room_for_queries(qd, ALL, HEAD, 1)
    ks = tiles.room_for_tiles(kd, STAGES, BLOCK_N, HEAD, PAGE)
    vs = tiles.room_for_tiles(vd, STAGES, BLOCK_N, HEAD, PAGE)
    mending = (make_barriers(1, 1).index(0), make_barriers(1, CONSUMERS - 1).index(0))
    board = make_board(CONSUMERS + 2)
    barriers = (
        make_barriers(ALL, 1), make_barriers(ALL, 1), make_barriers(STAGES, 1), make_barriers(STAGES, CONSUMERS),
        make_barriers(STAGES, 1), make_barriers(STAGES, CONSUMERS), make_barriers(1, 1).index(0), mending, board,
    )  # fmt: skip
    fence_async_shared()
    inputs = (qd, kd, vd)
    shared = (qs, ks, vs)
    work = (TABLE, table_stride, share, group)
    output = (OUT, od, out_stride_8)
    requests = (CU_Q, LENS, BASE, batch, item_rows, min_q, in_order)
    heads = (units, units_at_once)
    # constants stay constants only where they are written in the call itself
    # fmt: off
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_consumer, (output, inputs, shared, barriers, work, scale, 0, HEAD, BLOCK_N, STAGES, 2, CAUSAL, POLYNOMIAL, PAGE,
                         ALL)),
            (_consumer, (output, inputs, shared, barriers, work, scale, 1, HEAD, BLOCK_N, STAGES, 2, CAUSAL, POLYNOMIAL, PAGE,
                         ALL)),
            (_load_tiles, (inputs, shared, barriers, work, HEAD, 64, BLOCK_N, STAGES, CAUSAL, PAGE, KV_HEADS)),
            (_load_queries, (inputs, shared, barriers, work, HEAD, ALL)),
            (post_items, (board, requests, COUNTER, heads, CAUSAL)),
        ], [4, 1, 1, 1], [232, 48, 48, 48])
    else:
        gl.warp_specialize([
            (_consumer, (output, inputs, shared, barriers, work, scale, 0, HEAD, BLOCK_N, STAGES, 3, CAUSAL, POLYNOMIAL, PAGE,
                         ALL)),
            (_consumer, (output, inputs, shared, barriers, work, scale, 1, HEAD, BLOCK_N, STAGES, 3, CAUSAL, POLYNOMIAL, PAGE,
                         ALL)),
            (_consumer, (output, inputs, shared, barriers, work, scale, 2, HEAD, BLOCK_N, STAGES, 3, CAUSAL, POLYNOMIAL, PAGE,
                         ALL)),
            (_load_tiles, (inputs, shared, barriers, work, HEAD, 64, BLOCK_N, STAGES, CAUSAL, PAGE, KV_HEADS)),
            (_load_queries, (inputs, shared, barriers, work, HEAD, ALL)),
            (post_items, (board, requests, COUNTER, heads, CAUSAL)),
        ], [4, 4, 1, 1, 1], [160, 160, 32, 32, 32])
    # fmt: on
