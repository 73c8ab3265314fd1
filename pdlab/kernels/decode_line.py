"""How decode attention's work lies on one line and is cut among programs, and how a program walks its stretch: device code.

All (request, KV head) segments, in tiles of BLOCK_N positions, follow one another on a line; program p has the tiles from
`mine` to `stop`. A piece is what a program has of one segment. One program works on a piece while the tiles that it will need
next, of this piece or the one after, are on their way, so there are two walkers: `task_of` says what is computed with, and
`advance` what is copied next. flash_decode.share_out is the same cut in plain Triton, which the interpreter can test.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _pick(values, index, lanes):
    return gl.sum(gl.where(lanes == index, values, 0), 0)


@gluon.jit
def share_out(tiles_of, ours, programs, KV_HEADS: gl.constexpr):
    """As flash_decode.share_out."""
    total = gl.sum(tiles_of, 0) * KV_HEADS
    longest = gl.maximum(gl.max(tiles_of, 0), 1)
    segments = gl.maximum(gl.sum(ours.to(gl.int32), 0) * KV_HEADS, 1)
    pieces = programs // segments
    piece = (longest + pieces - 1) // gl.maximum(pieces, 1)
    piece = gl.where(pieces == 0, longest, piece)
    share = gl.where(pieces == 0, (segments + programs - 1) // programs * longest, piece)
    even = gl.maximum((total + programs - 1) // programs, 1)
    uneven = share * 8 > even * 9
    return gl.where(uneven, 1, piece), gl.where(uneven, even, share)


@gluon.jit
def place_of(t, limit, request, table, PAGED: gl.constexpr, PAGE: gl.constexpr):
    """Page (from the table) or slot (from the base) of positions; of those past `limit`, the last before it."""
    TABLE, BASE, table_stride = table
    t = gl.minimum(t, gl.maximum(limit - 1, 0))
    if PAGED:
        return gl.load(TABLE + request * table_stride + t // PAGE)
    else:
        return gl.load(BASE + request) + t


@gluon.jit
def offset_of(place, t, PAGED: gl.constexpr, PAGE: gl.constexpr, PAGE_STRIDE: gl.constexpr, ROW_STRIDE: gl.constexpr):
    """int64 offset, in elements, of position t's row within one KV head."""
    if PAGED:
        return place.to(gl.int64) * PAGE_STRIDE + (t % PAGE) * ROW_STRIDE
    elif PAGE == 1:
        return place * PAGE_STRIDE
    else:
        return place // PAGE * PAGE_STRIDE + place % PAGE * ROW_STRIDE


@gluon.jit
def tiles_in(length, piece, BLOCK_N: gl.constexpr, EARLY: gl.constexpr):
    """Positions that the ring may read of requests with `length` tokens, their tiles, the slots that these take on the line."""
    limit = length
    if EARLY:  # the newest token's K and V are written by the kernel before
        limit = gl.maximum(length - 1, 0)
    tiles = gl.maximum((limit + BLOCK_N - 1) // BLOCK_N, 1)
    return limit, tiles, (tiles + piece - 1) // piece * piece


@gluon.jit
def piece_of(tile, stop, line, KV_HEADS: gl.constexpr, BLOCK_N: gl.constexpr, EARLY: gl.constexpr):
    """The piece of a segment that begins at `tile` of the line: request, head, first tile, slots, tiles, the segment's tiles,
    cached tokens, positions that the ring may read."""
    lanes, ends, lens, piece = line
    request = gl.sum((ends <= tile).to(gl.int32), 0)
    length = _pick(lens, request, lanes)
    limit, held, slots = tiles_in(length, piece, BLOCK_N, EARLY)
    into = tile - (_pick(ends, request, lanes) - slots * KV_HEADS)
    first = into % slots
    take = gl.minimum(slots - first, stop - tile)
    return request, into // slots, first, take, gl.minimum(take, held - first), held, length, limit


@gluon.jit
def advance(walk, stop, line, KV_HEADS: gl.constexpr, BLOCK_N: gl.constexpr, EARLY: gl.constexpr):
    """The next tile to copy: where on the line its piece ends, the piece's tiles from here, position, request, head, limit."""
    tile, left, at, request, head, limit = walk
    left -= 1
    at += BLOCK_N
    if left <= 0:
        if tile < stop:
            request, head, first, take, left, _held, _length, limit = piece_of(tile, stop, line, KV_HEADS, BLOCK_N, EARLY)
            at = first * BLOCK_N
            tile += take
        else:
            limit = 0  # nothing is left to copy: the ring is filled with zeros
    return tile, left, at, request, head, limit


@gluon.jit
def line_of(
    LENS, CU_Q, batch, few, least, KV_HEADS: gl.constexpr, BLOCK_N: gl.constexpr, BATCH_PAD: gl.constexpr, EARLY: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """All segments in one line, cut among the programs: each warp holds it all, a request or more a lane.

    Where that would leave a program fewer than `least` tiles, only `few` programs share the work.
    """
    lanes = gl.arange(0, BATCH_PAD, gl.BlockedLayout([BATCH_PAD // 32], [32], [WARPS], [0]))
    real = lanes < batch
    q_first = gl.load(CU_Q + lanes, mask=real, other=0)
    ours = gl.load(CU_Q + lanes + 1, mask=real, other=0) - q_first == 1  # longer ones are the prefill kernel's
    lens = gl.load(LENS + lanes, mask=real, other=0)
    _limits, tiles, _slots = tiles_in(lens, 1, BLOCK_N, EARLY)
    tiles = gl.where(ours, tiles, 0)
    programs = gl.num_programs(0)
    programs = gl.where(gl.sum(tiles, 0) * KV_HEADS < least * programs, gl.minimum(few, programs), programs)
    piece, share = share_out(tiles, ours, programs, KV_HEADS)
    slots = (tiles + piece - 1) // piece * piece
    mine = gl.program_id(0) * share
    stop = gl.minimum(mine + share, gl.sum(slots, 0) * KV_HEADS)
    return (lanes, gl.associative_scan(slots, 0, _add) * KV_HEADS, lens, piece), q_first, (mine, stop, share)


@gluon.jit
def task_of(
    tile, stop, line, q_first, batch, table, KV_HEADS: gl.constexpr, BLOCK_N: gl.constexpr, EARLY: gl.constexpr,
    PAGED: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """A piece as the computing side needs it: piece_of's numbers, the query's row, the newest token's page or slot."""
    request, head, first, take, count, held, length, limit = piece_of(tile, stop, line, KV_HEADS, BLOCK_N, EARLY)
    request = gl.minimum(request, batch - 1)
    newest = place_of(limit, length, request, table, PAGED, PAGE)
    return request, head, first, take, count, held, length, limit, _pick(q_first, request, line[0]), newest
