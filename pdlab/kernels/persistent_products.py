"""Products of the persistent decode kernel: one warp copies weights into a ring, four multiply what has arrived.

A product of one activation row on tensor cores, as in ring_product: a weight row is cut in 16 segments, and a tile of a product
is 8 rows. Results go to the other programs as words that carry their epoch (persistent_words): rows n and n + 4 of a tile, or
the halves of a rotary pair, share one. A task of W_up is two tiles, so that 8 results of it are 4 words as well.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from pdlab.kernels.persistent_words import halves, settled, wait, word
from pdlab.kernels.ring_product import LINES, PAIRS, PANEL, barrier, diagonal, first_rows, pieces_of, stage

# results of a tile's half: a row a warp
ROW = gl.constexpr(gl.SliceLayout(1, gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])))


@gluon.jit
def arrive(COUNT):
    """Tells the others that this program's stores so far are made."""
    barrier()  # every thread's stores come before the release below
    gl.atomic_add(COUNT, 1, sem="release", scope="gpu")


@gluon.jit
def first_task(begin):
    """This program's first task of a product before which `begin` tasks of the stack lie."""
    programs = gl.num_programs(0)
    return (gl.program_id(0) + programs - begin % programs) % programs


# --- the producer


@gluon.jit
def _stream(
    ring, full, empty, WD, layer, begin, i,
    OUTPUTS: gl.constexpr, K: gl.constexpr, PARTNERS: gl.constexpr, PANELS: gl.constexpr, STAGES: gl.constexpr,
    NEAR: gl.constexpr, FAR: gl.constexpr,
):  # fmt: skip
    """Copies this program's pieces of one product of one layer, from the i-th piece of the ring on; the next piece's number.

    What anybody reads, be it in L2, has to wait behind the pieces that are on their way. So as long as the product's first
    piece may still be waiting for its activation no more than NEAR panels are, and from then on no more than FAR, however many
    the ring has room for.
    """
    PLACES: gl.constexpr = STAGES * PANELS
    begun = i
    apart: gl.constexpr = OUTPUTS // 2
    TILES: gl.constexpr = 2 if PARTNERS == -1 else 1  # of a task
    row = layer * OUTPUTS
    for task in range(first_task(begin), OUTPUTS // (2 * PAIRS * TILES), gl.num_programs(0)):
        for tile in range(task * TILES, task * TILES + TILES):
            a, b = first_rows(tile, apart, PARTNERS)
            for c in range(pieces_of(K, PANELS)):
                stage = i % STAGES
                mbarrier.wait(empty.index(stage), i // STAGES & 1 ^ 1)
                for p in gl.static_range(PANELS):
                    if NEAR < PLACES or FAR < PLACES:
                        before = i * PANELS + p - gl.where(i - begun < STAGES, NEAR, FAR)
                        if before >= 0:
                            mbarrier.wait(full.index(before % PLACES), before // PLACES & 1)
                    at = stage * (2 * PANELS) + p
                    there = full.index(stage * PANELS + p)
                    mbarrier.expect(there, 2 * WD.block_type.nbytes)
                    column = (c * PANELS + p) * PANEL
                    tma.async_copy_global_to_shared(WD, [(row + a) * 16, column], there, ring.index(at))
                    tma.async_copy_global_to_shared(WD, [(row + b) * 16, column], there, ring.index(at + PANELS))
                i += 1
    return i


@gluon.jit
def produce(
    ring, full, empty, weights, layers,
    HIDDEN: gl.constexpr, FFN: gl.constexpr, WIDTH: gl.constexpr, PACKED: gl.constexpr, HALF: gl.constexpr,
    PANELS: gl.constexpr, STAGES: gl.constexpr, NEAR: gl.constexpr, FAR: gl.constexpr,
):  # fmt: skip
    QKV, OUT, UP, DOWN = weights
    # tasks of a layer before each product, and of all
    TILE: gl.constexpr = 2 * PAIRS
    AT_OUT: gl.constexpr = PACKED // TILE
    AT_UP: gl.constexpr = AT_OUT + HIDDEN // TILE
    AT_DOWN: gl.constexpr = AT_UP + FFN // TILE
    i = 0
    for layer in range(layers):
        begin = layer * (AT_DOWN + HIDDEN // TILE)
        i = _stream(ring, full, empty, QKV, layer, begin, i, PACKED, HIDDEN, HALF, PANELS, STAGES, NEAR, FAR)
        i = _stream(ring, full, empty, OUT, layer, begin + AT_OUT, i, HIDDEN, WIDTH, 0, PANELS, STAGES, NEAR, FAR)
        i = _stream(ring, full, empty, UP, layer, begin + AT_UP, i, 2 * FFN, HIDDEN, -1, PANELS, STAGES, NEAR, FAR)
        i = _stream(ring, full, empty, DOWN, layer, begin + AT_DOWN, i, HIDDEN, FFN, 0, PANELS, STAGES, NEAR, FAR)


# --- products


@gluon.jit
def counted(X, ys, COUNT, target, LOST, patience, K: gl.constexpr):
    """Waits for `target` arrivals, and brings x [K] into `ys` as X'."""
    LENGTH: gl.constexpr = K // 16
    PARTS: gl.constexpr = (LENGTH + PANEL - 1) // PANEL
    THREADS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    segment = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(1, THREADS)), 1)
    lane = gl.expand_dims(gl.arange(0, PANEL, gl.SliceLayout(0, THREADS)), 0)
    there = wait(COUNT, target, LOST, patience) != 0
    x = ()
    for p in gl.static_range(PARTS):
        k = p * PANEL + lane
        # .cg: written by other multiprocessors during this launch, so read from L2
        here = gl.load(X + segment * LENGTH + k, mask=k < LENGTH, other=0.0, cache_modifier=".cg")
        x = x + (gl.where(there, here, float("nan")),)  # type: ignore[assignment]  # noqa: RUF005
    stage(x, (), 0.0, ys, K, False)


@gluon.jit
def _piece(ring, full, empty, ys, a, b, c, at, FIRST: gl.constexpr, PANELS: gl.constexpr, STAGES: gl.constexpr):
    """Begins the products of piece c of a tile, gives the piece before it back; a, b, and where the next piece will be.

    So the tensor cores do not wait for the barrier. `at`: the piece's stage and phase, the stage of the piece before, or -1.
    """
    stage, phase, last = at
    for p in gl.static_range(PANELS):
        mbarrier.wait(full.index(stage * PANELS + p), phase)
        y = ys.index(c * PANELS + p).permute((1, 0))
        a = warpgroup_mma(ring.index(stage * (2 * PANELS) + p), y, a, is_async=True)
        b = warpgroup_mma(ring.index(stage * (2 * PANELS) + PANELS + p), y, b, is_async=True)
    if not FIRST:
        a, b = warpgroup_mma_wait(2 * PANELS, deps=[a, b])  # those of the piece before have ended
        barrier()  # in all warps
        mbarrier.arrive(empty.index(gl.maximum(last, 0)), count=1, pred=last >= 0)
    end = stage == STAGES - 1
    return a, b, (gl.where(end, 0, stage + 1), gl.where(end, phase ^ 1, phase), stage)


@gluon.jit
def _multiply(ring, full, empty, ys, i, TILES: gl.constexpr, K: gl.constexpr, PANELS: gl.constexpr, STAGES: gl.constexpr):
    """C [LINES, 16] of both halves of each of TILES tiles, whose first piece is i; the number of the piece behind them."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 16, 16])
    PIECES: gl.constexpr = pieces_of(K, PANELS)
    at = (i % STAGES, i // STAGES & 1, i * 0 - 1)
    sums = ()
    for t in gl.static_range(TILES):
        a = gl.zeros([LINES, 16], gl.float32, ACC)
        b = gl.zeros([LINES, 16], gl.float32, ACC)
        if PIECES > 2:
            for c in range(PIECES):
                a, b, at = _piece(ring, full, empty, ys, a, b, c, at, False, PANELS, STAGES)
        else:
            for c in gl.static_range(PIECES):
                a, b, at = _piece(ring, full, empty, ys, a, b, c, at, t + c == 0, PANELS, STAGES)
        sums = sums + (a, b)  # type: ignore[assignment]  # noqa: RUF005
    sums = warpgroup_mma_wait(0, deps=sums)
    barrier()
    mbarrier.arrive(empty.index(at[2]), count=1)
    return sums, i + TILES * PIECES


@gluon.jit
def _tile(ring, full, empty, ys, scale, i, K: gl.constexpr, PANELS: gl.constexpr, STAGES: gl.constexpr):
    """Products float32 [PAIRS] of the two halves of the tile whose first piece is i; the number of the piece behind it."""
    c, i = _multiply(ring, full, empty, ys, i, 1, K, PANELS, STAGES)
    return diagonal(c[0], ROW) * scale, diagonal(c[1], ROW) * scale, i


@gluon.jit
def qkv(
    ring, full, empty, ys, scale, i, begin, token, COS, SIN, WORDS, epoch, KC, VC,
    HIDDEN: gl.constexpr, HEADS: gl.constexpr, KV_HEADS: gl.constexpr, HALF: gl.constexpr, PAGE: gl.constexpr,
    PANELS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Rotary embedding of what W_qkv gives: words [(N + 2 KV) HALF] of pairs; k and v into the layer's cache too."""
    slot, position = token
    lanes = gl.arange(0, PAIRS, ROW)
    dtype: gl.constexpr = KC.dtype.element_ty
    for tile in range(first_task(begin), (HEADS + 2 * KV_HEADS) * HALF // PAIRS, gl.num_programs(0)):
        pair = tile * PAIRS + lanes
        head, d = pair // HALF, pair % HALF
        turned = head < HEADS + KV_HEADS
        cos = gl.load(COS + position * HALF + d, mask=turned, other=1.0)
        sin = gl.load(SIN + position * HALF + d, mask=turned, other=0.0)
        a, b, i = _tile(ring, full, empty, ys, scale, i, HIDDEN, PANELS, STAGES)
        ra = (a * cos - b * sin).to(dtype)
        rb = (b * cos + a * sin).to(dtype)
        gl.store(WORDS + pair, word(ra, rb, epoch), cache_modifier=".cg")
        kv_head = (head - HEADS) % KV_HEADS
        at = (slot // PAGE * (KV_HEADS * PAGE) + kv_head * PAGE + slot % PAGE) * (2 * HALF) + d
        is_k = turned & (head >= HEADS)
        is_v = head >= HEADS + KV_HEADS
        gl.store(KC + at, ra, mask=is_k)
        gl.store(KC + at + HALF, rb, mask=is_k)
        gl.store(VC + at, ra, mask=is_v)
        gl.store(VC + at + HALF, rb, mask=is_v)
    return i


@gluon.jit
def residual(
    ring, full, empty, ys, i, begin, BEFORE, was, AFTER, epoch, OUT, LOST, patience,
    OUTPUTS: gl.constexpr, K: gl.constexpr, PANELS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """x + products of x in words BEFORE, of the epoch `was`, to words AFTER; and OUT [OUTPUTS] as plain values."""
    lanes = gl.arange(0, PAIRS, ROW)
    dtype: gl.constexpr = OUT.dtype.element_ty
    for tile in range(first_task(begin), OUTPUTS // (2 * PAIRS), gl.num_programs(0)):
        at = BEFORE + tile * PAIRS + lanes
        seen = gl.load(at, cache_modifier=".cg")  # on its way during the product
        a, b, i = _tile(ring, full, empty, ys, 1.0, i, K, PANELS, STAGES)
        xa, xb = halves(settled(seen, at, was, LOST, patience), dtype)
        ra, rb = (a + xa.to(gl.float32)).to(dtype), (b + xb.to(gl.float32)).to(dtype)
        gl.store(AFTER + tile * PAIRS + lanes, word(ra, rb, epoch), cache_modifier=".cg")
        n = tile * (2 * PAIRS) + lanes
        gl.store(OUT + n, ra)
        gl.store(OUT + n + PAIRS, rb)
    return i


@gluon.jit
def gated(
    ring, full, empty, ys, scale, i, begin, U, WORDS, epoch,
    FFN: gl.constexpr, HIDDEN: gl.constexpr, IN_WORDS: gl.constexpr, PANELS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """silu(gate) * value, to WORDS, or as plain values to U."""
    lanes = gl.arange(0, PAIRS, ROW)
    dtype: gl.constexpr = U.dtype.element_ty
    for task in range(first_task(begin), FFN // (2 * PAIRS), gl.num_programs(0)):
        c, i = _multiply(ring, full, empty, ys, i, 2, HIDDEN, PANELS, STAGES)
        gate, value = diagonal(c[0], ROW) * scale, diagonal(c[1], ROW) * scale
        ua = (gate / (1.0 + gl.exp(-gate)) * value).to(dtype)
        gate, value = diagonal(c[2], ROW) * scale, diagonal(c[3], ROW) * scale
        ub = (gate / (1.0 + gl.exp(-gate)) * value).to(dtype)
        if IN_WORDS:
            gl.store(WORDS + task * PAIRS + lanes, word(ua, ub, epoch), cache_modifier=".cg")
        else:
            n = task * (2 * PAIRS) + lanes
            gl.store(U + n, ua)
            gl.store(U + n + PAIRS, ub)
    return i
