"""The phases of the persistent decode kernel: products, attention, and how programs wait for one another (persistent_decode).

A product of one activation row on tensor cores, as in ring_product: a weight row is cut in segments of BK, and so is y,

    W [N, K] is also W' [N K/BK, BK], and y is Y' [BK, K/BK];   C = W' Y',   P[n] = sum over s of C[n K/BK + s, s]

A piece is LINES rows of W', ROWS rows of W: 32 KB of 16-bit weights at LINES = BK = 128. Programs share the pieces of the whole
stack as one line, piece g belonging to program g mod P, so a product's remainder is made good by the next one's.

Between programs all goes through L2: results are stored, a barrier of the program's threads orders the stores before one
thread's release, and a reader acquires before it loads, past its L1 cache (.cg).

CUT is (LINES, BK, stages of a product's loop, whether to ask ahead); FIRST where each of a layer's products begins on the line.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pdlab.kernels.flash_decode import _attend


@triton.jit
def arrive(COUNT):
    """Tells the others that this program's stores so far are made."""
    tl.debug_barrier()  # every thread's stores come before the release below
    tl.atomic_add(COUNT, 1, sem="release", scope="gpu")


@triton.jit
def wait(COUNT, target, patience):
    """Waits until `target` have arrived, at most `patience` looks; returns the patience left for later waits: all or none.

    Bounded, so that a program that fails to come makes a wrong answer, which is marked, and never a kernel without an end.
    """
    seen = tl.atomic_add(COUNT, 0, sem="acquire", scope="gpu")
    looks = patience * 0
    while (seen < target) & (looks < patience):
        seen = tl.atomic_add(COUNT, 0, sem="acquire", scope="gpu")
        looks += 1
    return tl.where(seen < target, 0, patience)


@triton.jit
def place_of(line, g, FIRST: tl.constexpr):
    """(where the weights of piece g of the line begin, which of a layer's four products it belongs to, its number there, g).

    `line`: a pointer, offsets from it [layers, 6], how many pieces there are, how far ahead to ask. Apart from `ask`, so that
    the table is looked up while a product is under way.
    """
    _w, OFFSETS, pieces, _far = line
    known = tl.minimum(g, pieces - 1)
    here = known % FIRST[4]
    which = (here >= FIRST[1]).to(tl.int32) + (here >= FIRST[2]).to(tl.int32) + (here >= FIRST[3]).to(tl.int32)
    number = here - choose(which, FIRST)
    return tl.load(OFFSETS + known // FIRST[4] * 6 + which), which, number, g


@triton.jit
def choose(which, values: tl.constexpr):
    """values[which], of four that are known when compiling."""
    low = tl.where(which == 0, values[0], values[1])
    return tl.where(which < 2, low, tl.where(which == 2, values[2], values[3]))


@triton.jit
def ask(line, place, SIZES: tl.constexpr, STRIDES: tl.constexpr, CUT: tl.constexpr):
    """Asks for a piece into L2, a lane 128 bytes. SIZES, STRIDES: elements of each product, and of a piece of it.

    Rotary partners are asked for in the order in which they lie: within a head, that is soon enough.
    """
    LANES: tl.constexpr = CUT[0] * CUT[1] // 64
    offset, which, number, g = place
    if CUT[3]:  # noqa: SIM102 - known when compiling, the other is not
        if g < line[2]:
            stride, size = choose(which, STRIDES), choose(which, SIZES)
            # of a gate's piece and its value's, half each, half a matrix apart
            part = tl.where(which == 2, stride // 2, stride)
            whole = tl.where(which == 2, size // 2, size)
            lane = tl.minimum(tl.arange(0, LANES) * 64, stride - 64)
            value = lane >= part
            at = tl.minimum(number.to(tl.int64) * part + tl.where(value, lane - part, lane), whole - 64)
            where = (line[0] + offset + at + tl.where(value, whole, 0)).to(tl.int64)
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [where], dtype=tl.int32, is_pure=False, pack=1
            )


@triton.jit
def weights_of(line, layer, i):
    """A layer's tensor i, in the order of OFFSETS_OF."""
    return line[0] + tl.multiple_of(tl.load(line[1] + layer * 6 + i), 8)


@triton.jit
def first_piece(begin):
    """The first piece from `begin` of the line on that is this program's, counted from there."""
    programs = tl.num_programs(0)
    return (tl.program_id(0) + programs - begin % programs) % programs


@triton.jit
def activation(X, NORM_W, eps, K: tl.constexpr, BK: tl.constexpr, SEGMENTS: tl.constexpr, NORM: tl.constexpr):
    """(Y' [BK, COLUMNS] in x's type, behind the norm but for 1/rms; that, or 1). Columns past K / BK are zero."""
    COLUMNS: tl.constexpr = SEGMENTS if SEGMENTS > 16 else 16  # the fewest that a matrix product takes
    k = tl.arange(0, BK)
    s = tl.arange(0, COLUMNS)
    at = s[None, :] * BK + k[:, None]
    keep = at < K
    x = tl.load(X + at, mask=keep, other=0.0, cache_modifier=".cg")  # written by other SMs during this launch
    scale = 1.0
    if NORM:
        g = tl.load(NORM_W + at, mask=keep, other=0.0).to(tl.float32)
        wide = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(tl.sum(wide * wide, 0), 0) / K + eps)
        x = (wide * g).to(x.dtype)
    return x, scale


@triton.jit
def piece(W, y, rows, K: tl.constexpr, BK: tl.constexpr, SEGMENTS: tl.constexpr, ROWS: tl.constexpr):
    """P float32 [ROWS] of the weight rows `rows` [ROWS * SEGMENTS], each named once a segment. SEGMENTS: K / BK, padded."""
    LINES: tl.constexpr = ROWS * SEGMENTS
    s = tl.arange(0, LINES) % SEGMENTS
    at = W + (rows.to(tl.int64) * K + s * BK)[:, None] + tl.arange(0, BK)[None, :]
    if SEGMENTS * BK == K:
        w = tl.load(at)
    else:
        w = tl.load(at, mask=(s * BK < K)[:, None], other=0.0)
    c = tl.dot(w, y, input_precision="ieee")
    own = s[:, None] == tl.arange(0, y.shape[1])[None, :]
    return tl.sum(tl.reshape(tl.sum(tl.where(own, c, 0.0), 1), (ROWS, SEGMENTS)), 1)


@triton.jit
def halves(p, PAIRS: tl.constexpr):
    """Rows 2i and 2i + 1 of p [2 * PAIRS] as two blocks [PAIRS]."""
    return tl.split(tl.reshape(p, (PAIRS, 2)))


@triton.jit
def rotate_and_store(
    p, unit, scale, slot, position, COS, SIN, Q, KC, VC,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Rotary embedding of the pairs `unit` [PAIRS]; q to Q [N, D], k and v into the layer's cache at `slot`."""
    a, b = halves(p * scale, PAIRS)
    head, d = unit // HALF, unit % HALF
    turned = head < HEADS + KV_HEADS
    cos = tl.load(COS + position * HALF + d, mask=turned, other=1.0)
    sin = tl.load(SIN + position * HALF + d, mask=turned, other=0.0)
    ra, rb = a * cos - b * sin, b * cos + a * sin
    is_q, is_v = head < HEADS, (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS)
    is_k = turned & (head >= HEADS)
    to = head * (2 * HALF) + d
    tl.store(Q + to, ra.to(Q.dtype.element_ty), mask=is_q)
    tl.store(Q + to + HALF, rb.to(Q.dtype.element_ty), mask=is_q)
    kv_head = (head - HEADS) % KV_HEADS
    cell = (slot // PAGE * (KV_HEADS * PAGE) + kv_head * PAGE + slot % PAGE) * (2 * HALF) + d
    tl.store(KC + cell, ra.to(KC.dtype.element_ty), mask=is_k)
    tl.store(KC + cell + HALF, rb.to(KC.dtype.element_ty), mask=is_k)
    tl.store(VC + cell, ra.to(VC.dtype.element_ty), mask=is_v)
    tl.store(VC + cell + HALF, rb.to(VC.dtype.element_ty), mask=is_v)


@triton.jit
def leave(X, COUNT, FAILED, counters, programs, patience, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    """The last program to leave clears the counters for the next launch; where a wait gave up it makes X [HIDDEN] NaN.

    COUNT [counters] is followed by the programs that have left and those that gave up.
    """
    tl.atomic_add(COUNT + counters + 1, (patience == 0).to(tl.int32), sem="relaxed", scope="gpu")
    tl.debug_barrier()
    if tl.atomic_add(COUNT + counters, 1, sem="acq_rel", scope="gpu") == programs - 1:
        lane = tl.arange(0, BLOCK)
        if tl.atomic_add(COUNT + counters + 1, 0, sem="acquire", scope="gpu") > 0:
            tl.atomic_add(FAILED, 1, sem="relaxed", scope="gpu")
            for first in range(0, HIDDEN, BLOCK):
                tl.store(X + first + lane, float("nan"), mask=first + lane < HIDDEN)
        for first in range(0, counters + 2, BLOCK):
            tl.store(COUNT + first + lane, 0, mask=first + lane < counters + 2)


@triton.jit
def attend_part(
    Q, KC, VC, table, partial, head, part, parts, length, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr,
    BLOCK_N: tl.constexpr, PARTS: tl.constexpr, PAGED: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Softmax of one KV head's group over its `part`-th stretch of the cache; unnormalized, with maximum and denominator."""
    ROWS: tl.constexpr = 16  # the fewest that a matrix product takes
    TABLE, BASE, table_stride, scale_log2 = table
    PART_O, PART_M, PART_L = partial
    row, d = tl.arange(0, ROWS), tl.arange(0, HEAD)
    ours = row < GROUP
    q = tl.load(
        Q + (head * GROUP + row)[:, None] * HEAD + d[None, :], mask=ours[:, None], other=0.0, cache_modifier=".cg"
    )  # fmt: skip
    stretch = tl.cdiv(tl.cdiv(length, BLOCK_N), parts) * BLOCK_N
    first = part * stretch
    row_stride: tl.constexpr = HEAD
    page_stride: tl.constexpr = KV_HEADS * PAGE * HEAD
    m, denominator, acc = _attend(
        q, KC + head * (PAGE * HEAD), VC + head * (PAGE * HEAD), TABLE, BASE, scale_log2, 0, first,
        tl.minimum(first + stretch, length), length, 1, table_stride, page_stride, row_stride,
        GROUP, ROWS, HEAD, HEAD, BLOCK_N, 1, PAGED, PAGE, 2,
    )  # fmt: skip
    mine = (head * PARTS + part) * GROUP + row
    tl.store(PART_M + mine, m, mask=ours)
    tl.store(PART_L + mine, denominator, mask=ours)
    tl.store(PART_O + mine[:, None] * HEAD + d[None, :], acc, mask=ours[:, None])


@triton.jit
def combine_parts(
    partial, OUT, head, parts, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, HEAD: tl.constexpr,
    PARTS: tl.constexpr, PARTS_PAD: tl.constexpr,
):  # fmt: skip
    """The group's outputs, OUT [N, D], of all parts; parts without a key have maximum -inf."""
    PART_O, PART_M, PART_L = partial
    part, row, d = tl.arange(0, PARTS_PAD), tl.arange(0, GROUP_PAD), tl.arange(0, HEAD)
    at = (head * PARTS + part)[:, None] * GROUP + row[None, :]
    there = (part < parts)[:, None] & (row < GROUP)[None, :]
    # .cg: written by other SMs during this launch; all at once, for each look at L2 takes its time
    m = tl.load(PART_M + at, mask=there, other=float("-inf"), cache_modifier=".cg")
    share = tl.load(PART_L + at, mask=there, other=0.0, cache_modifier=".cg")
    acc = tl.load(
        PART_O + at[:, :, None] * HEAD + d[None, None, :], mask=there[:, :, None], other=0.0, cache_modifier=".cg"
    )  # fmt: skip
    top = tl.max(m, 0)
    weight = tl.exp2(m - tl.where(top == float("-inf"), 0.0, top)[None, :])
    total = tl.sum(weight * share, 0)
    out = tl.sum(acc * weight[:, :, None], 0) / tl.where(total == 0.0, 1.0, total)[:, None]
    to = OUT + (head * GROUP + row)[:, None] * HEAD + d[None, :]
    tl.store(to, out.to(OUT.dtype.element_ty), mask=(row < GROUP)[:, None])


@triton.jit
def qkv_phase(
    X, eps, line, layer, token, COS, SIN, Q, cache, HIDDEN: tl.constexpr, SEGMENTS: tl.constexpr, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, HEAD: tl.constexpr, PAGE: tl.constexpr, FIRST: tl.constexpr, SIZES: tl.constexpr,
    STRIDES: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = CUT[0] // SEGMENTS
    HALF: tl.constexpr = HEAD // 2
    LAST: tl.constexpr = (HEADS + 2 * KV_HEADS) * HALF - 1
    r = tl.arange(0, CUT[0]) // SEGMENTS
    w, norm = weights_of(line, layer, 0), weights_of(line, layer, 4)
    begin = layer * FIRST[4]
    y, scale = activation(X, norm, eps, HIDDEN, CUT[1], SEGMENTS, True)
    for t in tl.range(first_piece(begin), FIRST[1], tl.num_programs(0), num_stages=CUT[2]):
        place = place_of(line, begin + t + line[3], FIRST)
        pair = tl.minimum(t * (ROWS // 2) + r // 2, LAST)
        rows = pair // HALF * HEAD + r % 2 * HALF + pair % HALF
        p = piece(w, y, rows, HIDDEN, CUT[1], SEGMENTS, ROWS)
        ask(line, place, SIZES, STRIDES, CUT)
        pair = t * (ROWS // 2) + tl.arange(0, ROWS // 2)
        rotate_and_store(
            p, pair, scale, token[0], token[1], COS, SIN, Q, cache[0], cache[1], HEADS, KV_HEADS, HALF, PAGE, ROWS // 2
        )  # fmt: skip


@triton.jit
def attention_phase(
    Q, cache, table, partial, OUT, count, length, parts, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    HEAD: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, PARTS_PAD: tl.constexpr, PAGED: tl.constexpr,
    PAGE: tl.constexpr,
):  # fmt: skip
    """A head's last part to finish combines them all; `count` + 1 then counts the head, `count` + 5 + head its parts."""
    for task in range(tl.program_id(0), parts * KV_HEADS, tl.num_programs(0)):
        head, part = task % KV_HEADS, task // KV_HEADS
        attend_part(
            Q, cache[0], cache[1], table, partial, head, part, parts, length, KV_HEADS, GROUP, HEAD, BLOCK_N, PARTS, PAGED, PAGE
        )  # fmt: skip
        tl.debug_barrier()  # every thread's stores come before the release below
        if tl.atomic_add(count + 5 + head, 1, sem="acq_rel", scope="gpu") == parts - 1:
            combine_parts(partial, OUT, head, parts, GROUP, GROUP_PAD, HEAD, PARTS, PARTS_PAD)
            arrive(count + 1)


@triton.jit
def residual_phase(
    U, RESIDUAL, OUT, line, layer, PRODUCT: tl.constexpr, HIDDEN: tl.constexpr, K: tl.constexpr, SEGMENTS: tl.constexpr,
    FIRST: tl.constexpr, SIZES: tl.constexpr, STRIDES: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """OUT [HIDDEN] = RESIDUAL + W U, W the layer's PRODUCT-th weights; OUT may be RESIDUAL: a place has one program."""
    ROWS: tl.constexpr = CUT[0] // SEGMENTS
    PIECES: tl.constexpr = FIRST[PRODUCT + 1] - FIRST[PRODUCT]
    w = weights_of(line, layer, PRODUCT)
    begin = layer * FIRST[4] + FIRST[PRODUCT]
    y, _one = activation(U, U, 0.0, K, CUT[1], SEGMENTS, False)
    for t in tl.range(first_piece(begin), PIECES, tl.num_programs(0), num_stages=CUT[2]):
        place = place_of(line, begin + t + line[3], FIRST)
        n = t * ROWS + tl.arange(0, ROWS)
        before = tl.load(RESIDUAL + n, mask=n < HIDDEN, other=0.0, cache_modifier=".cg").to(tl.float32)
        rows = tl.minimum(t * ROWS + tl.arange(0, CUT[0]) // SEGMENTS, HIDDEN - 1)
        p = piece(w, y, rows, K, CUT[1], SEGMENTS, ROWS)
        ask(line, place, SIZES, STRIDES, CUT)
        tl.store(OUT + n, (before + p).to(OUT.dtype.element_ty), mask=n < HIDDEN)


@triton.jit
def up_phase(
    X, eps, U, line, layer, HIDDEN: tl.constexpr, FFN: tl.constexpr, SEGMENTS: tl.constexpr, FIRST: tl.constexpr,
    SIZES: tl.constexpr, STRIDES: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = CUT[0] // SEGMENTS
    PIECES: tl.constexpr = FIRST[3] - FIRST[2]
    r = tl.arange(0, CUT[0]) // SEGMENTS
    w, norm = weights_of(line, layer, 2), weights_of(line, layer, 5)
    begin = layer * FIRST[4] + FIRST[2]
    y, scale = activation(X, norm, eps, HIDDEN, CUT[1], SEGMENTS, True)
    for t in tl.range(first_piece(begin), PIECES, tl.num_programs(0), num_stages=CUT[2]):
        place = place_of(line, begin + t + line[3], FIRST)
        rows = tl.minimum(t * (ROWS // 2) + r // 2, FFN - 1) + r % 2 * FFN  # a gate, its value, the next gate
        p = piece(w, y, rows, HIDDEN, CUT[1], SEGMENTS, ROWS)
        ask(line, place, SIZES, STRIDES, CUT)
        gate, value = halves(p * scale, ROWS // 2)
        n = t * (ROWS // 2) + tl.arange(0, ROWS // 2)
        tl.store(U + n, (gate / (1.0 + tl.exp(-gate)) * value).to(U.dtype.element_ty), mask=n < FFN)
