"""Device code that the warp-specialized prefill kernels share: copies of K and V tiles, masks, softmax, the way out.

Layouts: a consumer is one warpgroup with 64 query rows; scores, p and the output lie in the registers of the matrix
instruction's result, p becomes the next product's left operand without leaving them.

The exponential. A tile of 64 x n scores takes 64 n of them, 16 a clock and multiprocessor; the two products take n * head / 16
clocks of the tensor cores. At head size 64 both are equal, so some of the exponentials may go to the other arithmetic units:
2^x = 2^round(x) * p(x - round(x)) with a cubic p, relative error 7.5e-5, far below a bfloat16 p's 2^-9.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

ROWS = gl.constexpr(64)  # query rows of a consumer


@gluon.jit
def make_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def bring_tile(
    descriptor, full, places, stage, key, length, table, kv_head, base, HEAD: gl.constexpr, BLOCK_N: gl.constexpr,
    PAGE: gl.constexpr, KV_HEADS: gl.constexpr,
):  # fmt: skip
    """Asks for BLOCK_N rows of K or V from position `key` on; `full` tells when they are there.

    PAGE 0: extents, one box of rows. Else page by page (or the part of a page), 64 columns at a time: that is how the swizzled
    tile lies in shared memory, so pages land where one box would have put them. Past the end the last page is read again.
    """
    mbarrier.expect(full.index(stage), BLOCK_N * HEAD * 2)
    if PAGE == 0:
        tma.async_copy_global_to_shared(descriptor, [base + key, kv_head * HEAD], full.index(stage), places.index(stage))
    else:
        BOX: gl.constexpr = min(PAGE, BLOCK_N)
        BOXES: gl.constexpr = BLOCK_N // BOX
        PANELS: gl.constexpr = HEAD // 64
        for i in gl.static_range(BOXES):
            at = key + i * BOX
            page = gl.load(table + gl.minimum(at, length - 1) // PAGE)
            row = (page * KV_HEADS + kv_head) * PAGE + at % PAGE
            for panel in gl.static_range(PANELS):
                place = places.index((stage * PANELS + panel) * BOXES + i)
                tma.async_copy_global_to_shared(descriptor, [row, panel * 64], full.index(stage), place)


@gluon.jit
def room_for_tiles(descriptor, STAGES: gl.constexpr, BLOCK_N: gl.constexpr, HEAD: gl.constexpr, PAGE: gl.constexpr):
    """Shared memory of a ring of K or V tiles, cut into the boxes that the copies fill."""
    if PAGE == 0:
        return gl.allocate_shared_memory(descriptor.dtype, [STAGES, BLOCK_N, HEAD], descriptor.layout)
    else:
        BOX: gl.constexpr = min(PAGE, BLOCK_N)
        boxes: gl.constexpr = STAGES * (HEAD // 64) * (BLOCK_N // BOX)
        return gl.allocate_shared_memory(descriptor.dtype, [boxes, BOX, 64], descriptor.layout)


@gluon.jit
def as_tiles(places, descriptor, STAGES: gl.constexpr, BLOCK_N: gl.constexpr, HEAD: gl.constexpr, PAGE: gl.constexpr):
    """The same memory as the products see it: [STAGES, BLOCK_N, HEAD]."""
    if PAGE == 0:
        return places
    else:
        return places._reinterpret(descriptor.dtype, [STAGES, BLOCK_N, HEAD], descriptor.layout)


@gluon.jit
def room_for_queries(descriptor, PLACES: gl.constexpr, HEAD: gl.constexpr, PACK: gl.constexpr):
    """Shared memory of `PLACES` tiles of 64 query rows; for packed heads cut into the boxes that the copies fill."""
    if PACK == 1:
        return gl.allocate_shared_memory(descriptor.dtype, [PLACES, ROWS, HEAD], descriptor.layout)
    else:
        boxes: gl.constexpr = PLACES * (HEAD // 64) * PACK
        return gl.allocate_shared_memory(descriptor.dtype, [boxes, ROWS // PACK, 64], descriptor.layout)


@gluon.jit
def as_queries(places, descriptor, PLACES: gl.constexpr, HEAD: gl.constexpr, PACK: gl.constexpr):
    """The same memory as the products see it: [PLACES, 64, HEAD]."""
    if PACK == 1:
        return places
    else:
        return places._reinterpret(descriptor.dtype, [PLACES, ROWS, HEAD], descriptor.layout)


@gluon.jit
def bring_queries(descriptor, full, places, place, row, unit, HEAD: gl.constexpr, PACK: gl.constexpr):
    """Asks for 64 query rows: tokens from `row` on of one head, or 64 / PACK tokens of PACK heads, one head after the other."""
    mbarrier.expect(full.index(place), ROWS * HEAD * 2)
    if PACK == 1:
        tma.async_copy_global_to_shared(descriptor, [row, unit * HEAD], full.index(place), places.index(place))
    else:
        PANELS: gl.constexpr = HEAD // 64
        for i in gl.static_range(PACK):
            for panel in gl.static_range(PANELS):
                box = places.index((place * PANELS + panel) * PACK + i)
                column = (unit * PACK + i) * HEAD + panel * 64
                tma.async_copy_global_to_shared(descriptor, [row, column], full.index(place), box)


# Hardware barriers. Triton itself takes one for each role, up to number 6. Who arrives at one need not first meet the other
# warps of its group, as it must at a barrier in shared memory, where one thread arrives for all of them.
TURNS_FROM = gl.constexpr(7)  # one for each consumer
EMPTIES_FROM = gl.constexpr(10)  # one for each place of K or V


@gluon.jit
def _at_barrier(ASSEMBLY: gl.constexpr, number, WARPS: gl.constexpr):
    x = gl.full([1], 0, gl.int32, gl.BlockedLayout([1], [32], [WARPS], [0])) + number
    gl.inline_asm_elementwise(ASSEMBLY, "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_for_turn(W: gl.constexpr):
    """Until the consumer before has started its products."""
    _at_barrier("bar.sync $1, 256; mov.b32 $0, $1;", TURNS_FROM + W, 4)


@gluon.jit
def pass_turn(TO: gl.constexpr):
    """Lets consumer TO start its products."""
    _at_barrier("bar.arrive $1, 256; mov.b32 $0, $1;", TURNS_FROM + TO, 4)


@gluon.jit
def give_back(place, CONSUMERS: gl.constexpr):
    """A consumer has read what lies in a place of K or V."""
    if CONSUMERS == 2:
        _at_barrier("bar.arrive $1, 288; mov.b32 $0, $1;", EMPTIES_FROM + place, 4)
    else:
        _at_barrier("bar.arrive $1, 416; mov.b32 $0, $1;", EMPTIES_FROM + place, 4)


@gluon.jit
def wait_for_empty(place, CONSUMERS: gl.constexpr):
    """The loading warp: until all consumers have given a place back."""
    if CONSUMERS == 2:
        _at_barrier("bar.sync $1, 288; mov.b32 $0, $1;", EMPTIES_FROM + place, 1)
    else:
        _at_barrier("bar.sync $1, 416; mov.b32 $0, $1;", EMPTIES_FROM + place, 1)


@gluon.jit
def give_back_keys(count, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """The place of the count-th tile's K; in rings of four it is given back with V's, as there are six barriers for places."""
    if STAGES <= 3:
        give_back(count % STAGES, CONSUMERS)


@gluon.jit
def give_back_values(count, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    give_back(count % STAGES + (STAGES if STAGES <= 3 else 0), CONSUMERS)


@gluon.jit
def mask(s, at, newest, COLUMNS: gl.constexpr):
    """Scores of keys from `at` on, those after a row's newest key set to -inf."""
    keys = at + gl.arange(0, s.shape[1], COLUMNS)
    return gl.where(gl.expand_dims(keys, 0) <= gl.expand_dims(newest, 1), s, float("-inf"))


@gluon.jit
def exp2(x, POLYNOMIAL: gl.constexpr):
    """2^x for x <= 0; one of every POLYNOMIAL elements on the arithmetic units (0: none). There -inf gives 2^-126."""
    if POLYNOMIAL == 0:
        return gl.exp2(x)
    else:
        gl.static_assert(POLYNOMIAL == 8, "one of eight")
        return gl.inline_asm_elementwise(
            """{
            .reg .f32 x, t, f, p; .reg .b32 i, j;
            ex2.approx.ftz.f32 $0, $8;  ex2.approx.ftz.f32 $1, $9;  ex2.approx.ftz.f32 $2, $10; ex2.approx.ftz.f32 $3, $11;
            ex2.approx.ftz.f32 $4, $12; ex2.approx.ftz.f32 $5, $13; ex2.approx.ftz.f32 $6, $14;
            max.ftz.f32 x, $15, 0fC2FC0000;
            add.rn.ftz.f32 t, x, 0f4B400000;
            add.rn.ftz.f32 f, t, 0fCB400000;
            sub.rn.ftz.f32 f, x, f;
            fma.rn.ftz.f32 p, f, 0f3D61FBB0, 0f3E786F0F;
            fma.rn.ftz.f32 p, p, f, 0f3F31798D;
            fma.rn.ftz.f32 p, p, f, 0f3F7FFB49;
            mov.b32 i, t; shl.b32 i, i, 23; mov.b32 j, p; add.s32 i, i, j; mov.b32 $7, i;
            }""",
            "=f,=f,=f,=f,=f,=f,=f,=f,f,f,f,f,f,f,f,f",
            [x],
            dtype=gl.float32,
            is_pure=True,
            pack=8,
        )


@gluon.jit
def _by_thread(x):
    """[rows, n] -> [rows, n / 32, 4, 4, 2]: the columns that a thread of the matrix layout holds are all but the last 4."""
    return x.reshape([x.shape[0], x.shape[1] // 32, 4, 4, 2])


@gluon.jit
def _row_max(s, PER_ROW: gl.constexpr):
    """In a tree: one warp a scheduler has nothing else to do while it waits for the last of a chain of 64."""
    return gl.convert_layout(gl.max(gl.max(gl.max(gl.max(_by_thread(s), 4), 2), 1), 1), PER_ROW)


@gluon.jit
def _thread_sums(p):
    """[rows, 4]: what each of the four threads of a row holds; they meet only after the last tile."""
    return gl.sum(gl.sum(gl.sum(_by_thread(p), 4), 2), 1)


@gluon.jit
def softmax(s, m, total, scale, PER_ROW: gl.constexpr, POLYNOMIAL: gl.constexpr):
    """p, the new maximum, the denominators by thread, and what earlier sums shrink by. `total` None: there were none."""
    m_new = gl.maximum(m, _row_max(s, PER_ROW) * scale)
    safe = gl.where(m_new == float("-inf"), 0.0, m_new)  # no key so far: -inf - -inf is NaN
    p = exp2(s * scale - gl.expand_dims(safe, 1), POLYNOMIAL)
    rescale = gl.exp2(m - safe)
    part = _thread_sums(p)
    if total is None:
        total = part
    else:
        total = total * gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, part.type.layout)), 1) + part
    return p, m_new, total, rescale


@gluon.jit
def row_halves(s):
    """[64, n] -> two of [4, 8, n]: the upper and the lower rows of each warp's 16. A thread holds one row of each."""
    return s.reshape([4, 2, 8, s.shape[1]]).permute((0, 2, 3, 1)).split()


@gluon.jit
def whole_rows(upper, lower):
    """What row_halves took apart; convert_layout gives it the layout it had, without moving anything."""
    return gl.join(upper, lower).permute((0, 3, 1, 2)).reshape([64, upper.shape[2]])


@gluon.jit
def whole_column(upper, lower, LAYOUT: gl.constexpr):
    """The same for a number a row: two of [4, 8] -> [64]."""
    return gl.convert_layout(gl.join(upper, lower).permute((0, 2, 1)).reshape([64]), LAYOUT)


@gluon.jit
def column_halves(m):
    return m.reshape([4, 2, 8]).permute((0, 2, 1)).split()


@gluon.jit
def _half_by_thread(x):
    return x.reshape([4, 8, x.shape[2] // 32, 4, 4, 2])


@gluon.jit
def half_limits(s, m, scale):
    """Of half the rows: the new maximum, what to take from the scaled scores, and what earlier sums shrink by."""
    top = gl.max(gl.max(gl.max(gl.max(_half_by_thread(s), 5), 3), 2), 2)
    m_new = gl.maximum(m, gl.convert_layout(top, m.type.layout) * scale)
    safe = gl.where(m_new == float("-inf"), 0.0, m_new)
    return m_new, gl.convert_layout(safe, gl.SliceLayout(2, s.type.layout)), gl.exp2(m - safe)


@gluon.jit
def half_sums(p):
    """[4, 8, 4]: what each of the four threads of a row holds."""
    return gl.sum(gl.sum(gl.sum(_half_by_thread(p), 5), 3), 2)


@gluon.jit
def softmax_apart(s, m, scale, SCORES: gl.constexpr):
    """The first part of a tile's softmax: all maxima, and the exponentials of each warp's upper rows.

    Returns what softmax_together goes on with. In the machine code all of it comes before what follows the call, and nothing of
    the second part does: the lower rows' maxima run under the upper rows' exponentials.
    """
    upper, lower = row_halves(s)
    m_upper, m_lower = column_halves(m)
    m_upper, safe_upper, shrink_upper = half_limits(upper, m_upper, scale)
    p_upper = gl.exp2(upper * scale - gl.expand_dims(safe_upper, 2))
    m_lower, safe_lower, shrink_lower = half_limits(lower, m_lower, scale)
    sums_upper = end_block(half_sums(p_upper))
    m = whole_column(m_upper, m_lower, gl.SliceLayout(1, SCORES))
    shrink = whole_column(shrink_upper, shrink_lower, gl.SliceLayout(1, SCORES))
    return m, shrink, (p_upper, sums_upper, lower, safe_lower)


@gluon.jit
def softmax_together(part, total, shrink, scale, SCORES: gl.constexpr):
    """The second part: p, and the denominators by thread."""
    p_upper, sums_upper, lower, safe_lower = part
    p_lower = gl.exp2(lower * scale - gl.expand_dims(safe_lower, 2))
    sums = gl.convert_layout(whole_rows(sums_upper, half_sums(p_lower)), total.type.layout)
    total = total * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, total.type.layout)), 1) + sums
    return gl.convert_layout(whole_rows(p_upper, p_lower), SCORES), total


@gluon.jit
def end_block(x):
    """x, after all that it depends on; the assembler moves nothing across.

    What ends a basic block is a loop that a value would enter which no sum of exponentials takes (a NaN of certain bits).
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        setp.ne.b32 p, $1, 0x7fabcdef;
        AGAIN: @p bra DONE;
        nanosleep.u32 20;
        bra AGAIN;
        DONE: mov.b32 $0, $1;
        }""",
        "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def zero_rows_from(tile, first, HEAD: gl.constexpr, BLOCK_N: gl.constexpr):
    """Rows of a V tile past the request's end hold anything, also NaN, and 0 * NaN would reach the output."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD, HEAD // 8], [4, 1], [1, 0])
    rows = gl.arange(0, 32, gl.SliceLayout(1, layout))
    for i in gl.static_range(BLOCK_N // 32):  # in pieces: scores and output fill the registers
        if first < i * 32 + 32:
            piece = tile.slice(i * 32, 32)
            values = piece.load(layout)
            piece.store(gl.where(gl.expand_dims(i * 32 + rows < first, 1), values, 0.0).to(values.dtype))
    fence_async_shared()


@gluon.jit
def mend_values(
    vs, v_full, mending, count, mends, first, W: gl.constexpr, HEAD: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr
):
    """The first consumer zeroes the V rows past the request's end for all of them."""
    mended, noticed = mending
    if W == 0:
        mbarrier.wait(v_full.index(count % STAGES), count // STAGES & 1)
        zero_rows_from(vs.index(count % STAGES), first, HEAD, BLOCK_N)
        mbarrier.wait(noticed, (mends & 1) ^ 1)  # nobody is still waiting for the mending before this one
        mbarrier.arrive(mended, count=1)
    else:
        mbarrier.wait(mended, mends & 1)
        mbarrier.arrive(noticed, count=1)


@gluon.jit
def write_out(acc, total, place, places, at, output, row, unit, left, HEAD: gl.constexpr, PACK: gl.constexpr):
    """Output tokens [row, row + min(64 / PACK, left)) of a unit of PACK heads, through the place where their queries lay.

    The copy engine takes a whole block of tokens; a block with fewer goes row by row, since what follows is another request's.
    The copy reads `place` (number `at` of `places`) after this returns: tma.store_wait before it is filled again.
    """
    OUT, descriptor, stride_8 = output  # in units of 8 elements, so that the compiler knows that rows begin at 16 bytes
    TOKENS: gl.constexpr = ROWS // PACK
    whole = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, acc.type.layout))
    share = 1.0 / gl.where(whole == 0.0, 1.0, whole)
    place.store((acc * gl.expand_dims(share, 1)).to(place.dtype))
    fence_async_shared()
    if left >= TOKENS:
        if PACK == 1:
            tma.async_copy_shared_to_global(descriptor, [row, unit * HEAD], place)
        else:
            PANELS: gl.constexpr = HEAD // 64
            for i in gl.static_range(PACK):
                for panel in gl.static_range(PANELS):
                    box = places.index((at * PANELS + panel) * PACK + i)
                    tma.async_copy_shared_to_global(descriptor, [row, (unit * PACK + i) * HEAD + panel * 64], box)
    else:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD, HEAD // 8], [4, 1], [1, 0])
        line = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        token = line % TOKENS
        to = (row + token).to(gl.int64) * (stride_8 * 8) + (unit * PACK + line // TOKENS) * HEAD
        lanes_d = gl.arange(0, HEAD, gl.SliceLayout(0, layout))
        out = place.load(layout)
        gl.store(OUT + gl.expand_dims(to, 1) + gl.expand_dims(lanes_d, 0), out, mask=gl.expand_dims(token < left, 1))
