"""Products of the persistent decode kernel: one warp copies weights into a ring, two warpgroups multiply them by turns.

A product of one activation row on tensor cores, as in ring_product: rows of 8 weight rows are cut in 16 segments, and a tile of
a product is 8 of them. This program's tiles of a product are dealt to its two warpgroups in turn, so that one adds up and
stores its results while the other multiplies.

Between programs all goes through L2: results are stored, a barrier of the program's threads orders the stores before one
thread's release, and a reader acquires before it loads, past its L1 cache (.cg).
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

from pdlab.kernels.ring_product import LINES, PAIRS, PANEL, barrier, diagonal, first_rows, pieces_of

# results of a tile's half: a row a warp
ROW = gl.constexpr(gl.SliceLayout(1, gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])))
GROUPS = gl.constexpr(2)  # warpgroups that multiply


@gluon.jit
def arrive(COUNT):
    """Tells the others that this program's stores so far are made."""
    barrier()  # every thread's stores come before the release below
    gl.atomic_add(COUNT, 1, sem="release", scope="gpu")


@gluon.jit
def wait(COUNT, target, patience):
    """Waits until `target` have arrived, at most `patience` looks; returns the patience left for later waits: all or none.

    Each thread looks for itself, so each may read what was released. Bounded, so that a program that fails to come makes a
    wrong answer, which is marked, and never a kernel without an end.
    """
    at = COUNT.to(gl.int64)
    seen = _look(at)
    looks = patience * 0
    while (seen < target) & (looks < patience):
        seen = _look(at)
        looks += 1
    barrier()
    return gl.where(seen < target, 0, patience)


@gluon.jit
def _look(at):
    return gl.inline_asm_elementwise("ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [at], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def first_tile(begin):
    """This program's first tile of a product before which `begin` tiles of the stack lie."""
    programs = gl.num_programs(0)
    return (gl.program_id(0) + programs - begin % programs) % programs


@gluon.jit
def tiles_of(begin, OUTPUTS: gl.constexpr):
    """How many tiles of a product this program has."""
    programs = gl.num_programs(0)
    return (OUTPUTS // (2 * PAIRS) - first_tile(begin) + programs - 1) // programs


# --- the producer


@gluon.jit
def _ask(UP_AT, layer, begin, K: gl.constexpr, FFN: gl.constexpr, AHEAD: gl.constexpr):
    """Asks for AHEAD of this program's tiles of W_up into L2, from its second on: a lane a 16th of the gates or the values."""
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    first = first_tile(begin)
    for j in range(1, 1 + AHEAD):
        row = (first + j * gl.num_programs(0)) * PAIRS
        part = (lane % 16) * (PAIRS * K // 16)
        at = UP_AT + (layer.to(gl.int64) * (2 * FFN) + row + lane // 16 * FFN) * K + part
        inside = (row < FFN).to(gl.int32) + lane * 0
        gl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }",
            "=r,l,r,r", [at.to(gl.int64), lane * 0 + PAIRS * K // 8, inside], dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@gluon.jit
def _stream(
    ring, full, empty, WD, layer, begin, i,
    OUTPUTS: gl.constexpr, K: gl.constexpr, PARTNERS: gl.constexpr, PANELS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copies this program's pieces of one product of one layer, from the i-th piece of the ring on; the next piece's number.

    Two tiles side by side, a piece of each in turn: one for each warpgroup. A last one without a partner comes alone."""
    apart: gl.constexpr = OUTPUTS // 2
    row = layer * OUTPUTS
    mine = tiles_of(begin, OUTPUTS)
    for t in range(0, mine, GROUPS):
        for c in range(pieces_of(K, PANELS)):
            for w in gl.static_range(GROUPS):
                if t + w < mine:
                    a, b = first_rows(first_tile(begin) + (t + w) * gl.num_programs(0), apart, PARTNERS)
                    stage = i % STAGES
                    mbarrier.wait(empty.index(stage), i // STAGES & 1 ^ 1)
                    mbarrier.expect(full.index(stage), 2 * PANELS * WD.block_type.nbytes)
                    for p in gl.static_range(PANELS):
                        at = stage * (2 * PANELS) + p
                        column = (c * PANELS + p) * PANEL
                        tma.async_copy_global_to_shared(WD, [(row + a) * 16, column], full.index(stage), ring.index(at))
                        tma.async_copy_global_to_shared(
                            WD, [(row + b) * 16, column], full.index(stage), ring.index(at + PANELS)
                        )
                    i += 1
    return i


@gluon.jit
def produce(
    ring, full, empty, weights, layers,
    HIDDEN: gl.constexpr, FFN: gl.constexpr, WIDTH: gl.constexpr, PACKED: gl.constexpr, HALF: gl.constexpr,
    PANELS: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """One warp: all pieces of all products of all layers. A ring that is full holds it up while the others wait for one another
    between products, so as it comes to W_qkv it asks for AHEAD tiles of W_up, behind those that the ring will hold, into L2."""
    QKV, OUT, UP, DOWN, UP_AT = weights
    # tiles of a layer before each product, and of all
    TILE: gl.constexpr = 2 * PAIRS
    AT_OUT: gl.constexpr = PACKED // TILE
    AT_UP: gl.constexpr = AT_OUT + HIDDEN // TILE
    AT_DOWN: gl.constexpr = AT_UP + 2 * FFN // TILE
    i = 0
    for layer in range(layers):
        begin = layer * (AT_DOWN + HIDDEN // TILE)
        if AHEAD:
            _ask(UP_AT, layer, begin + AT_UP, HIDDEN, FFN, AHEAD)
        i = _stream(ring, full, empty, QKV, layer, begin, i, PACKED, HIDDEN, HALF, PANELS, STAGES)
        i = _stream(ring, full, empty, OUT, layer, begin + AT_OUT, i, HIDDEN, WIDTH, 0, PANELS, STAGES)
        i = _stream(ring, full, empty, UP, layer, begin + AT_UP, i, 2 * FFN, HIDDEN, -1, PANELS, STAGES)
        i = _stream(ring, full, empty, DOWN, layer, begin + AT_DOWN, i, HIDDEN, FFN, 0, PANELS, STAGES)


# --- the consumers


@gluon.jit
def activation(X, NORM_W, eps, ys, scales, ready, count, target, patience, K: gl.constexpr, NORM: gl.constexpr):
    """Waits for x, brings it into `ys` as X', behind the norm but for 1/rms, which goes into `scales`, and tells the other
    warpgroup. (That scale, or 1; the patience left.)"""
    LENGTH: gl.constexpr = K // 16
    COUNT: gl.constexpr = (LENGTH + PANEL - 1) // PANEL
    THREADS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    segment = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(1, THREADS)), 1)
    lane = gl.expand_dims(gl.arange(0, PANEL, gl.SliceLayout(0, THREADS)), 0)
    weights = ()
    if NORM:
        for p in gl.static_range(COUNT):
            k = p * PANEL + lane
            weights = weights + (gl.load(NORM_W + segment * LENGTH + k, mask=k < LENGTH, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    patience = wait(count, target, patience)
    scale = 1.0
    x = ()
    for p in gl.static_range(COUNT):
        k = p * PANEL + lane
        # .cg: written by other multiprocessors during this launch, so read from L2
        x = x + (gl.load(X + segment * LENGTH + k, mask=k < LENGTH, other=0.0, cache_modifier=".cg"),)  # type: ignore[assignment]  # noqa: RUF005
    if NORM:
        squares = gl.zeros([16, PANEL], gl.float32, THREADS)
        for p in gl.static_range(COUNT):
            here = x[p].to(gl.float32)  # type: ignore[var-annotated]
            squares += here * here
            ys.index(p).store((here * weights[p].to(gl.float32)).to(ys.dtype))
        scale = gl.rsqrt(gl.sum(gl.sum(squares, 1), 0) / K + eps)
    else:
        for p in gl.static_range(COUNT):
            ys.index(p).store(x[p])
    if NORM:
        scales.store(gl.full([PAIRS], 1.0, gl.float32, ROW) * scale)
    fence_async_shared()
    barrier()
    mbarrier.arrive(ready, count=1)
    return scale, patience


@gluon.jit
def _tile(
    ring, full, empty, ys, i, t, mine, K: gl.constexpr, PANELS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Products float32 [PAIRS] of the two halves of tile t of this program's `mine`, whose pieces begin with the i-th."""
    pair = t // GROUPS * GROUPS
    side_by_side = gl.minimum(mine - pair, GROUPS)
    first = i + pair * pieces_of(K, PANELS) + (t - pair)
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 16, 16])
    a = gl.zeros([LINES, 16], gl.float32, ACC)
    b = gl.zeros([LINES, 16], gl.float32, ACC)
    for c in range(pieces_of(K, PANELS)):
        at = first + c * side_by_side
        stage = at % STAGES
        mbarrier.wait(full.index(stage), at // STAGES & 1)
        for p in gl.static_range(PANELS):
            y = ys.index(c * PANELS + p).permute((1, 0))
            a = warpgroup_mma(ring.index(stage * (2 * PANELS) + p), y, a, is_async=True)
            b = warpgroup_mma(ring.index(stage * (2 * PANELS) + PANELS + p), y, b, is_async=True)
        a, b = warpgroup_mma_wait(0, deps=[a, b])
        barrier()  # all warps have read the stage
        mbarrier.arrive(empty.index(stage), count=1)
    return diagonal(a, ROW), diagonal(b, ROW)


@gluon.jit
def qkv(
    ring, full, empty, ys, scale, i, begin, token, COS, SIN, Q, KC, VC, W: gl.constexpr,
    HIDDEN: gl.constexpr, HEADS: gl.constexpr, KV_HEADS: gl.constexpr, HALF: gl.constexpr, PAGE: gl.constexpr,
    PANELS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Rotary embedding of what W_qkv gives; q to Q [N, D], k and v into the layer's cache. Warpgroup W's tiles; i: the first
    piece of this program's. Returns the piece behind its last."""
    PIECES: gl.constexpr = pieces_of(HIDDEN, PANELS)
    OUTPUTS: gl.constexpr = (HEADS + 2 * KV_HEADS) * (2 * HALF)
    slot, position = token
    lanes = gl.arange(0, PAIRS, ROW)
    dtype: gl.constexpr = Q.dtype.element_ty
    mine = tiles_of(begin, OUTPUTS)
    for t in range(W, mine, GROUPS):
        pair = (first_tile(begin) + t * gl.num_programs(0)) * PAIRS + lanes
        head, d = pair // HALF, pair % HALF
        turned = head < HEADS + KV_HEADS
        cos = gl.load(COS + position * HALF + d, mask=turned, other=1.0)
        sin = gl.load(SIN + position * HALF + d, mask=turned, other=0.0)
        a, b = _tile(ring, full, empty, ys, i, t, mine, HIDDEN, PANELS, STAGES)
        a, b = a * scale, b * scale
        ra = (a * cos - b * sin).to(dtype)
        rb = (b * cos + a * sin).to(dtype)
        is_q = head < HEADS
        to = Q + head * (2 * HALF) + d
        gl.store(to, ra, mask=is_q)
        gl.store(to + HALF, rb, mask=is_q)
        kv_head = (head - HEADS) % KV_HEADS
        at = (slot // PAGE * (KV_HEADS * PAGE) + kv_head * PAGE + slot % PAGE) * (2 * HALF) + d
        is_k = turned & (head >= HEADS)
        is_v = head >= HEADS + KV_HEADS
        gl.store(KC + at, ra, mask=is_k)
        gl.store(KC + at + HALF, rb, mask=is_k)
        gl.store(VC + at, ra, mask=is_v)
        gl.store(VC + at + HALF, rb, mask=is_v)
    return i + mine * PIECES


@gluon.jit
def residual(
    ring, full, empty, ys, i, begin, BEFORE, AFTER, W: gl.constexpr,
    OUTPUTS: gl.constexpr, K: gl.constexpr, PANELS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """AFTER [OUTPUTS] = BEFORE + products; both may be the same memory: a place has one program. W, i and result as in qkv."""
    PIECES: gl.constexpr = pieces_of(K, PANELS)
    lanes = gl.arange(0, PAIRS, ROW)
    mine = tiles_of(begin, OUTPUTS)
    for t in range(W, mine, GROUPS):
        n = (first_tile(begin) + t * gl.num_programs(0)) * (2 * PAIRS) + lanes
        xa = gl.load(BEFORE + n, cache_modifier=".cg")
        xb = gl.load(BEFORE + n + PAIRS, cache_modifier=".cg")
        a, b = _tile(ring, full, empty, ys, i, t, mine, K, PANELS, STAGES)
        gl.store(AFTER + n, (a + xa.to(gl.float32)).to(AFTER.dtype.element_ty))
        gl.store(AFTER + n + PAIRS, (b + xb.to(gl.float32)).to(AFTER.dtype.element_ty))
    return i + mine * PIECES


@gluon.jit
def gated(
    ring, full, empty, ys, scale, i, begin, U, W: gl.constexpr, FFN: gl.constexpr, HIDDEN: gl.constexpr, PANELS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """U [FFN] = silu(gate) * value of what W_up gives. W, i and result as in qkv."""
    PIECES: gl.constexpr = pieces_of(HIDDEN, PANELS)
    lanes = gl.arange(0, PAIRS, ROW)
    mine = tiles_of(begin, 2 * FFN)
    for t in range(W, mine, GROUPS):
        gate, value = _tile(ring, full, empty, ys, i, t, mine, HIDDEN, PANELS, STAGES)
        gate, value = gate * scale, value * scale
        n = (first_tile(begin) + t * gl.num_programs(0)) * PAIRS + lanes
        gl.store(U + n, (gate / (1.0 + gl.exp(-gate)) * value).to(U.dtype.element_ty))
    return i + mine * PIECES
