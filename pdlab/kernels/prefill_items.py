"""Which item of a prefill step is the r-th: found on the device, by the warp that hands items out, with no list made before.

An item is `item_rows` consecutive query rows of one request; requests with fewer than `min_q` queries have none (they are the
decode kernel's). Two orders:

    in order     request by request, the longest items of a request first: 32 requests at a time, so any batch will do
    by length    the longest of all requests first, for up to 32 requests: an item's cost is the keys it sees, in items' rows,
                 and the largest cost c with more than r items of cost >= c is found by halving

Nothing is read on the host, so a captured graph follows lengths that change.

Twin for the interpreter: this text with triton.language in Gluon's place (`lanes` is the only tensor made by a caller).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def items_of(CU_Q, first, lanes, batch, item_rows, min_q):
    """How many items each of the requests first + lanes has; 0 past the batch."""
    request = first + lanes
    real = request < batch
    queries = gl.load(CU_Q + request + 1, mask=real, other=0) - gl.load(CU_Q + request, mask=real, other=0)
    return gl.where(queries >= min_q, (queries + item_rows - 1) // item_rows, 0)


@gluon.jit
def count_items(CU_Q, lanes, batch, item_rows, min_q):
    """Items of all requests together."""
    total = batch * 0
    for first in range(0, batch, 32):
        total += gl.sum(items_of(CU_Q, first, lanes, batch, item_rows, min_q), 0)
    return total


@gluon.jit
def rank_and_unit(number, total, units, units_at_once):
    """(rank among the `total` items of a unit, unit of heads) of the number-th item of all: `units_at_once` units at a time,
    every item of those, their items of a rank side by side; what is left of the units last."""
    part = number // (total * units_at_once)
    into = number - part * total * units_at_once
    here = gl.minimum(units_at_once, units - part * units_at_once)
    return into // here, part * units_at_once + into % here


@gluon.jit
def item_in_order(rank, CU_Q, lanes, batch, item_rows, min_q):
    """(request, item of it) of the rank-th item, request by request. `rank` must be less than there are."""
    first = rank * 0
    before = rank * 0
    items = items_of(CU_Q, first, lanes, batch, item_rows, min_q)
    here = gl.sum(items, 0)
    while before + here <= rank:
        before += here
        first += 32
        items = items_of(CU_Q, first, lanes, batch, item_rows, min_q)
        here = gl.sum(items, 0)
    until = before + gl.associative_scan(items, 0, _add)
    at = gl.sum((until <= rank).to(gl.int32), 0)
    return first + at, gl.sum(gl.where(lanes == at, until, 0), 0) - 1 - rank


@gluon.jit
def item_by_length(rank, items, done, lanes):
    """(request, item of it) of the rank-th longest. Item m of a request costs done + m + 1, in units of an item's rows."""
    top = gl.where(items > 0, done + items, 0)
    low = rank * 0 + 1  # more than `rank` items cost at least this
    high = gl.max(top, 0) + 1  # at most `rank` items do
    while high - low > 1:
        middle = (low + high) // 2
        count = gl.sum(gl.minimum(gl.maximum(top - middle + 1, 0), items), 0)
        low = gl.where(count > rank, middle, low)
        high = gl.where(count > rank, high, middle)
    dearer = gl.sum(gl.minimum(gl.maximum(top - low, 0), items), 0)
    of_this_cost = ((done < low) & (low <= top)).to(gl.int32)
    request = gl.sum((gl.associative_scan(of_this_cost, 0, _add) <= rank - dearer).to(gl.int32), 0)
    return request, low - 1 - gl.sum(gl.where(lanes == request, done, 0), 0)


@gluon.jit
def rows_done(CU_Q, LENS, lanes, batch, item_rows, CAUSAL: gl.constexpr):
    """What an item's first row finds in the cache, in units of an item's rows, for the first 32 requests."""
    real = lanes < batch
    lens = gl.load(LENS + lanes, mask=real, other=0)
    if CAUSAL:
        queries = gl.load(CU_Q + lanes + 1, mask=real, other=0) - gl.load(CU_Q + lanes, mask=real, other=0)
        lens = gl.maximum(lens - queries, 0)
    return lens // item_rows


@gluon.jit
def entry_of(request, index, CU_Q, LENS, BASE, item_rows, CAUSAL: gl.constexpr):
    """(first query row, rows, first K row, newest key of the first row, keys) of an item."""
    begin = gl.load(CU_Q + request)
    queries = gl.load(CU_Q + request + 1) - begin
    length = gl.load(LENS + request)
    base = gl.load(BASE + request).to(gl.int32)
    first = index * item_rows
    newest = length - 1
    if CAUSAL:
        newest = length - queries + first
    return begin + first, gl.minimum(queries - first, item_rows), base, newest, length
