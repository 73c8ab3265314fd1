"""Who computes what in the warp-specialized prefill kernels: a list of items, made on the device, longest first.

An item is `query_tiles` consecutive tiles of query rows of one request, and `share` query heads that read the same KV head.
Where the request's K and V fit the kernel's ring of tiles, an item takes all its query tiles and the heads of its group, so
that K and V are fetched once for all of them; elsewhere it takes one tile of one head. Entries are the same for every head.
Nothing is read on the host, so a captured graph follows lengths that change.

Blocks stay resident. Each starts with the item of its own number and takes further ones from a counter as it goes: whoever is
done early takes more. A warp of its own draws them ahead and posts them on a board in shared memory, where loading warps and
consumers read them, so that nobody waits for the counter or for global memory between two items.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from pdlab.kernels.addressing import padded_batch, pick
from pdlab.kernels.flash_prefill import tile_of_rank

if TYPE_CHECKING:
    from pdlab.kernels.kv_view import KVView

ENTRY = 8  # int32 of an entry: first query row, rows, first K row, newest key of the first row, keys, request


@triton.jit(do_not_specialize=["batch"])
def schedule_kernel(
    SCHEDULE,
    BASE,
    LENS,
    CU_Q,
    batch,
    ITEM_ROWS: tl.constexpr,
    BATCH_PAD: tl.constexpr,
    MIN_Q: tl.constexpr,
    CAUSAL: tl.constexpr,
    BY_REQUEST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Entry 0 holds the number of entries and how many items were handed out late; entry 1 + r is the r-th longest.

    BY_REQUEST: longest first within a request only, so that what reads the same K and V runs at the same time.
    """
    rank = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    lanes_b = tl.arange(0, BATCH_PAD)
    real = lanes_b < batch
    q_first = tl.load(CU_Q + lanes_b, mask=real, other=0)
    q_count = tl.load(CU_Q + lanes_b + 1, mask=real, other=0) - q_first
    lens = tl.load(LENS + lanes_b, mask=real, other=0)
    items_of = tl.where(q_count >= MIN_Q, (q_count + ITEM_ROWS - 1) // ITEM_ROWS, 0)
    total = tl.sum(items_of, 0)
    if rank == 0:
        tl.store(SCHEDULE, total)
        tl.store(SCHEDULE + 1, 0)
    if rank < total:
        if BY_REQUEST:
            until = tl.cumsum(items_of, 0)
            request = tl.sum((until <= rank).to(tl.int32), 0)
            index = pick(until, request, lanes_b) - 1 - rank
        else:
            done = lens // ITEM_ROWS
            if CAUSAL:
                done = tl.maximum(lens - q_count, 0) // ITEM_ROWS
            request, index = tile_of_rank(rank, items_of, done, lanes_b, BATCH_PAD)
        length, queries = pick(lens, request, lanes_b), pick(q_count, request, lanes_b)
        first = index * ITEM_ROWS
        newest = length - 1
        if CAUSAL:
            newest = length - queries + first
        entry = SCHEDULE + 8 + rank * 8
        tl.store(entry, pick(q_first, request, lanes_b) + first)
        tl.store(entry + 1, tl.minimum(queries - first, ITEM_ROWS))
        tl.store(entry + 2, tl.load(BASE + request).to(tl.int32))
        tl.store(entry + 3, newest)
        tl.store(entry + 4, length)
        tl.store(entry + 5, request)


@gluon.jit
def item_of(item, total, units, units_at_once):
    """(offset of the entry in the schedule, unit of heads): a few units at a time, longest items of those first.

    The K and V of those few stay in L2 while every item that reads them runs.
    """
    part = item // (total * units_at_once)
    into = item - part * total * units_at_once
    here = gl.minimum(units_at_once, units - part * units_at_once)
    return 8 + into // here * 8, part * units_at_once + into % here


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
def post_items(board, SCHEDULE, units, units_at_once):
    """The dispatching warp: this block's items, one after the other, each as soon as its place on the board is free.

    The first is the block's own number; the others come from the counter. After the last comes one that is no item. Of all
    warps this one alone reads what the schedule's kernel writes, so it alone waits for that kernel's end.
    """
    items, posted, taken = board
    LAYOUT: gl.constexpr = gl.BlockedLayout([8], [32], [1], [0])
    lanes = gl.arange(0, 8, LAYOUT)
    once = gl.full([1], 0, gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
    gl.inline_asm_elementwise("griddepcontrol.wait; mov.b32 $0, $1;", "=r,r", [once], dtype=gl.int32, is_pure=False, pack=1)
    total = gl.load(SCHEDULE)
    item = gl.program_id(0)
    turn = 0
    more = True
    while more:
        more = item < total * units
        entry, unit = item_of(gl.minimum(item, gl.maximum(total * units - 1, 0)), gl.maximum(total, 1), units, units_at_once)
        fields = gl.load(SCHEDULE + entry + lanes)  # the last two of an entry are free
        fields = gl.where(lanes == 6, unit, gl.where(lanes == 7, more.to(gl.int32), fields))
        mbarrier.wait(taken.index(turn % 2), (turn // 2 & 1) ^ 1)
        items.index(turn % 2).store(fields)
        mbarrier.arrive(posted.index(turn % 2), count=1)
        item = gl.atomic_add(SCHEDULE + 1, 1, sem="relaxed") + gl.num_programs(0)
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


def make_schedule(
    view: KVView, tokens: int, item_rows: int, *, causal: bool, min_q: int, by_request: bool
) -> tuple[torch.Tensor, int]:
    """(i32 schedule on the device, upper bound of its entries) for items of `item_rows` query rows.

    The kernel that reads it is to be launched next, with launch_pdl: it starts beside this one.
    """
    batch = view.seq_lens.shape[0]
    most = triton.cdiv(tokens, item_rows) + min(batch, tokens)
    schedule = torch.empty((most + 1) * ENTRY, dtype=torch.int32, device=view.k.device)
    schedule_kernel[(most,)](
        schedule, view.base, view.seq_lens, view.cu_q, batch, ITEM_ROWS=item_rows, BATCH_PAD=padded_batch(batch),
        MIN_Q=min_q, CAUSAL=causal, BY_REQUEST=by_request, PDL=True, num_warps=1,
    )  # fmt: skip
    return schedule, most
