"""Who computes what in the warp-specialized prefill kernels: items, handed out on a board in shared memory.

An item is some consecutive tiles of query rows of one request, and a unit of query heads that read the same KV head. Where the
request's K and V fit the kernel's ring of tiles, an item takes several tiles and the heads of its group, so that K and V are
fetched once for all of them; elsewhere it takes one tile of one head, or one tile whose rows are the heads of a group.

Blocks stay resident. Each starts with the item of its own number and takes further ones from a counter as it goes: whoever is
done early takes more. A warp of its own draws them ahead, finds out what they are (prefill_items) and posts them on a board in
shared memory, where loading warps and consumers read them, so that nobody waits for the counter or for global memory between
two items. Each item is followed by exactly one draw, so whoever draws the last number puts the counter back to zero.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from pdlab.kernels.prefill_items import count_items, entry_of, item_by_length, item_in_order, items_of, rank_and_unit, rows_done

# Arguments of both kernels that must not make kernels of their own: numbers, whatever they are, and tables wherever they begin
NUMBERS = [
    "table_stride",
    "batch",
    "item_rows",
    "min_q",
    "in_order",
    "units",
    "share",
    "group",
    "units_at_once",
    "out_stride_8",
]
TABLES = ["CU_Q", "LENS", "BASE", "TABLE", "COUNTER"]


@gluon.jit
def tiles_seen(block, rows, newest, length, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """Tiles of keys that block `block` (of BLOCK_M rows) of an item needs; 0 for a negative block."""
    keys = length
    if CAUSAL:
        keys = newest + gl.minimum(rows, (block + 1) * BLOCK_M)
    return gl.where(block >= 0, (keys + BLOCK_N - 1) // BLOCK_N, 0)


@gluon.jit
def make_board(READERS: gl.constexpr):
    """Two places for an item, each with a barrier for `posted` and one for `taken` by all readers."""
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    board = gl.allocate_shared_memory(gl.int32, [2, 8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    posted = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    taken = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    for i in gl.static_range(2):
        mbarrier.init(posted.index(i), count=1)
        mbarrier.init(taken.index(i), count=READERS)
    return board, posted, taken


@gluon.jit
def begin_dependents_and_wait():
    """Dependent launch: the next kernel's blocks may come in as this one's end, and what ran before must be over from here on.

    Of all warps only the dispatching one calls this: the others start with what it posts.
    """
    once = gl.full([1], 0, gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; griddepcontrol.wait; mov.b32 $0, $1;", "=r,r", [once], dtype=gl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@gluon.jit
def post_items(board, requests, COUNTER, heads_of_work, CAUSAL: gl.constexpr):
    """The dispatching warp: this block's items, one after the other, each as soon as its place on the board is free.

    The first is the block's own number; the others come from the counter. After the last comes one that is no item. A few units
    of heads at a time run, all items of those: their K and V stay in L2 while every item that reads them runs.
    """
    items, posted, taken = board
    CU_Q, LENS, BASE, batch, item_rows, min_q, in_order = requests
    units, units_at_once = heads_of_work
    at = gl.arange(0, 8, gl.BlockedLayout([8], [32], [1], [0]))
    lanes = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    begin_dependents_and_wait()
    total = count_items(CU_Q, lanes, batch, item_rows, min_q)
    counts = items_of(CU_Q, 0, lanes, batch, item_rows, min_q)
    done = rows_done(CU_Q, LENS, lanes, batch, item_rows, CAUSAL)
    item = gl.program_id(0)
    turn = 0
    more = True
    while more:
        more = item < total * units
        fields = at * 0
        if more:
            rank, unit = rank_and_unit(item, total, units, units_at_once)
            if in_order:
                request, index = item_in_order(rank, CU_Q, lanes, batch, item_rows, min_q)
            else:
                request, index = item_by_length(rank, counts, done, lanes)
            row, rows, base, newest, length = entry_of(request, index, CU_Q, LENS, BASE, item_rows, CAUSAL)
            fields = gl.where(at == 0, row, gl.where(at == 1, rows, gl.where(at == 2, base, newest)))
            fields = gl.where(at == 4, length, gl.where(at == 5, request, fields))
            fields = gl.where(at == 6, unit, gl.where(at == 7, 1, fields))
        mbarrier.wait(taken.index(turn % 2), (turn // 2 & 1) ^ 1)
        items.index(turn % 2).store(fields)
        mbarrier.arrive(posted.index(turn % 2), count=1)
        if more:
            numbers = gl.atomic_add(COUNTER + lanes * 0, lanes * 0 + 1, mask=lanes == 0, sem="relaxed")
            drawn = gl.sum(gl.where(lanes == 0, numbers, 0), 0)
            if drawn == total * units - 1:
                gl.store(COUNTER, 0)
            item = drawn + gl.num_programs(0)
        turn += 1


@gluon.jit
def _field(fields, lanes, K: gl.constexpr):
    return gl.sum(gl.where(lanes == K, fields, 0), 0)


@gluon.jit
def take_item(board, turn, WARPS: gl.constexpr):
    """(first query row, rows, first K row, newest key of the first row, keys, request, unit of heads, whether it is one).

    Every reader takes every item, in order.
    """
    items, posted, taken = board
    LAYOUT: gl.constexpr = gl.BlockedLayout([8], [32], [WARPS], [0])  # all of it in every thread
    lanes = gl.arange(0, 8, LAYOUT)
    mbarrier.wait(posted.index(turn % 2), turn // 2 & 1)
    x = items.index(turn % 2).load(LAYOUT)
    mbarrier.arrive(taken.index(turn % 2), count=1)
    return (
        _field(x, lanes, 0), _field(x, lanes, 1), _field(x, lanes, 2), _field(x, lanes, 3), _field(x, lanes, 4),
        _field(x, lanes, 5), _field(x, lanes, 6), _field(x, lanes, 7) > 0,
    )  # fmt: skip
