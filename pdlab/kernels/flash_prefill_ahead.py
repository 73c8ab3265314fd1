"""A consumer of flash_prefill_turns that has the scores of the next tile of keys computed while it works at those of this one.

    step i      starts S(i+1) = Q K^T and the output's part of tile i-1, both at once; then the softmax of tile i, whose scores
                the step before has started. The products are awaited in the middle of it.

So no softmax begins with a wait for scores: they are a whole step old. It takes two tiles of scores in registers: head size 64
with 128 keys a tile and two consumers, or tiles of 64 keys. Steps come in pairs, since what one has in one half of its
registers the next has in the other. At an item's last tile the next scores are those of the next item's newest keys.

Only rings in which K is given back together with V (hopper_tiles.give_back_keys).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from pdlab.kernels import hopper_tiles as tiles
from pdlab.kernels.hopper_tiles import ROWS
from pdlab.kernels.prefill_schedule import take_item, tiles_seen


@gluon.jit
def _step(
    qs, ks, vs, barriers, acc, p, m, total, s, count, at, item, scale, SCORES: gl.constexpr, W: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, TURNS: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """The tile of keys whose scores are `s`, the count-th: at_th of its item from the oldest. `FIRST`: the item's newest.

    `p` is of the tile before. Returns the output with that tile, p, maxima, sums, and the scores of the tile after.
    """
    q_full, _q_empty, k_full, v_full, _edge, _mending, _board = barriers
    here, place, turn, is_another, held, clear, newest = item
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
    before, after = count - 1, count + 1
    mbarrier.wait(q_full.index(place), turn // 2 & 1, pred=(at == 0) & is_another)
    mbarrier.wait(k_full.index(after % STAGES), after // STAGES & 1, pred=(at > 0) | is_another)
    if TURNS:
        tiles.wait_for_turn(W)
    q = qs.index(gl.where(at == 0, place, here))
    s_after = warpgroup_mma(q, ks.index(after % STAGES).permute((1, 0)), zeros, use_acc=False, is_async=True)
    if not FIRST:
        mbarrier.wait(v_full.index(before % STAGES), before // STAGES & 1)
        acc = warpgroup_mma(p, vs.index(before % STAGES), acc, use_acc=held, is_async=True)
    if TURNS:
        tiles.pass_turn((W + 1) % CONSUMERS)
    if at >= clear:
        s = tiles.mask(s, at * BLOCK_N, newest, gl.SliceLayout(0, SCORES))
    m, rescale, part = tiles.softmax_apart(s, m, scale, SCORES)
    if FIRST:
        s_after = warpgroup_mma_wait(0, deps=[s_after])
    else:
        s_after, acc = warpgroup_mma_wait(0, deps=[s_after, acc])
        tiles.give_back_values(before, STAGES, CONSUMERS)
        acc = acc * gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, acc.type.layout)), 1)
    exps, total = tiles.softmax_together(part, total, rescale, scale, SCORES)
    p = gl.convert_layout(exps.to(p.dtype), p.type.layout)
    return acc, p, m, total, s_after


@gluon.jit
def consumer_ahead(
    output, inputs, shared, barriers, scale, W: gl.constexpr, HEAD: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, CONSUMERS: gl.constexpr, CAUSAL: gl.constexpr, TURNS: gl.constexpr, PAGE: gl.constexpr,
    PACK: gl.constexpr,
):  # fmt: skip
    """As flash_prefill_turns' consumer; every consumer walks all of an item's tiles."""
    gl.static_assert(STAGES >= 4, "K is given back with V")
    gl.static_assert(TURNS <= 1, "products are started together")
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
    p = gl.zeros([ROWS, BLOCK_N], qs.dtype, OPERAND)
    TOKENS: gl.constexpr = ROWS // PACK
    lanes = gl.arange(0, ROWS, PER_ROW) % TOKENS
    count = 0  # tiles of keys before this one
    mends = 0
    turn = 0  # items before this one; their queries lie in two places in turn
    row, rows, _base, newest_key, length, _request, head, is_item = take_item(board, turn, 4)
    if TURNS and W == CONSUMERS - 1:
        tiles.pass_turn(0)
    mbarrier.wait(q_full.index(W), 0, pred=is_item)
    mbarrier.wait(k_full.index(0), 0, pred=is_item)
    if TURNS:
        tiles.wait_for_turn(W)
    s = warpgroup_mma(qs.index(W), ks.index(0).permute((1, 0)), zeros, use_acc=False, is_async=True)
    if TURNS:
        tiles.pass_turn((W + 1) % CONSUMERS)
    s = warpgroup_mma_wait(0, deps=[s])
    while is_item:
        here = turn % 2 * CONSUMERS + W
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
        tma.store_wait(0)  # the output before this one has left the place of its queries, where the next ones go
        mbarrier.arrive(q_empty.index(place), count=1, pred=turn > 1)
        m = gl.full([ROWS], float("-inf"), gl.float32, PER_ROW)
        total = tiles.no_sums(zeros)
        acc, p, m, total, s = _step(
            qs, ks, vs, barriers, acc, p, m, total, s, count, seen - 1, (here, place, turn, is_another, False, clear, newest),
            scale, SCORES, W, BLOCK_N, STAGES, CONSUMERS, TURNS, True,
        )  # fmt: skip
        count += 1
        held = False  # the output begins with the first product
        if seen % 2 == 0:
            acc, p, m, total, s = _step(
                qs, ks, vs, barriers, acc, p, m, total, s, count, seen - 2,
                (here, place, turn, is_another, False, clear, newest), scale, SCORES, W, BLOCK_N, STAGES, CONSUMERS, TURNS,
                False,
            )  # fmt: skip
            count += 1
            held = True
        for at in range((seen - 1) // 2 * 2 - 1, 0, -2):
            acc, p, m, total, s = _step(
                qs, ks, vs, barriers, acc, p, m, total, s, count, at, (here, place, turn, is_another, held, clear, newest),
                scale, SCORES, W, BLOCK_N, STAGES, CONSUMERS, TURNS, False,
            )  # fmt: skip
            acc, p, m, total, s = _step(
                qs, ks, vs, barriers, acc, p, m, total, s, count + 1, at - 1,
                (here, place, turn, is_another, True, clear, newest), scale, SCORES, W, BLOCK_N, STAGES, CONSUMERS, TURNS,
                False,
            )  # fmt: skip
            count += 2
            held = True
        last = count - 1
        mbarrier.wait(v_full.index(last % STAGES), last // STAGES & 1)
        acc = warpgroup_mma(p, vs.index(last % STAGES), acc, use_acc=held, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        tiles.give_back_values(last, STAGES, CONSUMERS)
        tiles.write_out(acc, total, qs.index(here), boxes, here, output, row + W * TOKENS, head, rows - W * TOKENS, HEAD, PACK)
        row, rows, newest_key, length, head, is_item = row_, rows_, newest_key_, length_, head_, is_another
    tma.store_wait(0)
