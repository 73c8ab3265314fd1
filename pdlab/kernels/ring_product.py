"""Products of one activation row on Hopper: a ring of weights in shared memory, full before its turn comes, and tensor cores.

What products.products computes for one row (P = W y, y = x * g / rms, or x) by as many programs as the device has
multiprocessors. Each takes every P-th tile of 4 + 4 weight rows and keeps STAGES pieces of W on their way, brought by the
tensor memory accelerator. The ring is filled before the wait for the kernel launched before: 25 MB on a whole H200, 5 us of
reading, so that the memory does not rest while a step goes from one product to the next. x is read once a program.

Multiply-adds on the plain cores would take as long as the reading: eight instructions a weight, and sums across threads. A
tensor core wants at least eight columns, and one activation row has one. So a weight row is cut in 16 SEGMENTS, and so is x:

    W [N, K] is also W' [16 N, K/16], and x is X' [16, K/16];   C = W' X'^T,   P[n] = sum over s of C[16 n + s, s]

No weight is moved for that, it is the same memory. A warp's 16 rows of C are the segments of one weight row, so their sum stays
within it. y is rounded to 16 bits, as unfused operations round it too.

The halves of a tile are partners for the caller: gates and values, rotary halves, or just rows (PARTNERS as in products).

Hopper only, compiled there and nowhere else. Used by ring_kernels. Oracle: reference.ReferenceOps.
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

from pdlab.kernels.copy_hints import leave_l2_first

WARPS = 4
SEGMENTS = 16
PAIRS = gl.constexpr(4)  # rows of each half of a tile: one a warp
LINES = gl.constexpr(64)  # rows of W' that they are
PANEL = gl.constexpr(64)  # columns of W' in one copy: 128 bytes, the widest swizzle
barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.constexpr_function
def pieces_of(k, panels):
    """Pieces of `panels` panels that a tile of rows of k elements is."""
    return (k // 16 + panels * 64 - 1) // (panels * 64)


@gluon.jit
def launch_dependents():
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_for_the_kernel_before():
    gl.inline_asm_elementwise("griddepcontrol.wait; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def first_rows(tile, apart, PARTNERS: gl.constexpr):
    """The first weight row of each half of a tile."""
    a = tile * (2 * PAIRS)
    b = a + PAIRS
    if PARTNERS == -1:
        a = tile * PAIRS
        b = apart + a
    if PARTNERS > 0:
        a = tile * PAIRS // PARTNERS * (2 * PARTNERS) + tile * PAIRS % PARTNERS
        b = a + PARTNERS
    return a, b


@gluon.jit
def ask_following(NEXT, over, PANELS: gl.constexpr, NEXT_SIZE: gl.constexpr, NEXT_APART: gl.constexpr):
    """Asks into L2 for a piece's worth of what is read next, NEXT_SIZE elements at NEXT: this program's part of the `over`-th.

    NEXT_APART: half of it at this distance, since gates and values lie half a matrix apart.
    """
    THREADS: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    EACH: gl.constexpr = 2 * PANELS * LINES * PANEL  # elements of a piece
    line = gl.arange(0, EACH // 64, THREADS) * 64
    place = over * gl.num_programs(0) + gl.program_id(0)
    at = place * EACH + line
    if NEXT_APART:
        at = place * (EACH // 2) + line % (EACH // 2) + line // (EACH // 2) * NEXT_APART
    where = NEXT + gl.minimum(at.to(gl.int64), NEXT_SIZE - 1)
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [where.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def ask(
    ring, full, WD, NEXT, tile, i, pieces, tiles, apart, PIECE: gl.constexpr,
    PANELS: gl.constexpr, STAGES: gl.constexpr, PARTNERS: gl.constexpr,
    NEXT_SIZE: gl.constexpr, NEXT_APART: gl.constexpr,
):  # fmt: skip
    """Starts the copy of this program's piece i of `pieces`, which is piece PIECE of `tile`: PANELS panels of both its halves.
    Past the end, what the next kernel reads is asked into L2 instead: the stream of requests does not end before the kernel
    does."""
    stage = i % STAGES
    ours = tile < tiles
    a, b = first_rows(tile, apart, PARTNERS)
    mbarrier.expect(full.index(stage), 2 * PANELS * WD.block_type.nbytes, pred=ours)
    for p in gl.static_range(PANELS):
        at = stage * (2 * PANELS) + p
        column = (PIECE * PANELS + p) * PANEL
        tma.async_copy_global_to_shared(WD, [a * 16, column], full.index(stage), ring.index(at), pred=ours)
        tma.async_copy_global_to_shared(WD, [b * 16, column], full.index(stage), ring.index(at + PANELS), pred=ours)
    if NEXT_SIZE:  # noqa: SIM102 - known when compiling, the other is not
        if tile >= tiles:
            ask_following(NEXT, i - pieces, PANELS, NEXT_SIZE, NEXT_APART)


@gluon.jit
def fill(
    WD, NEXT, tiles, apart,
    K: gl.constexpr, PANELS: gl.constexpr, STAGES: gl.constexpr, PARTNERS: gl.constexpr,
    AHEAD: gl.constexpr, NEXT_SIZE: gl.constexpr, NEXT_APART: gl.constexpr, HINT: gl.constexpr, WD_AT: gl.constexpr,
):  # fmt: skip
    """(the ring, on its way; its barriers; pieces that this program's tiles are). Behind it AHEAD pieces of what is read next
    go to L2.

    HINT: weights leave L2 first; WD_AT: arguments before WD.
    """
    if HINT:
        leave_l2_first(WD_AT)
    PIECES: gl.constexpr = pieces_of(K, PANELS)
    ring = gl.allocate_shared_memory(WD.dtype, [STAGES * 2 * PANELS, LINES, PANEL], WD.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
    fence_async_shared()
    pieces = (tiles - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0) * PIECES
    for i in gl.static_range(STAGES):
        tile = gl.program_id(0) + i // PIECES * gl.num_programs(0)
        ask(ring, full, WD, NEXT, tile, i, pieces, tiles, apart, i % PIECES, PANELS, STAGES, PARTNERS, NEXT_SIZE, NEXT_APART)
    if NEXT_SIZE:
        for i in gl.static_range(AHEAD):  # behind those that will be asked for in the course of the tiles
            ask_following(NEXT, STAGES + i, PANELS, NEXT_SIZE, NEXT_APART)
    return ring, full, pieces


@gluon.jit
def stage(x, weights, eps, ys, K: gl.constexpr, NORM: gl.constexpr):
    """Puts x, panels [16, PANEL] in registers, into `ys` as X', with NORM times the norm's weights; returns 1/rms, or 1."""
    THREADS: gl.constexpr = x[0].type.layout
    scale = 1.0
    if NORM:
        squares = gl.zeros([16, PANEL], gl.float32, THREADS)
        for p in gl.static_range(len(x)):
            here = x[p].to(gl.float32)
            squares += here * here
            ys.index(p).store((here * weights[p].to(gl.float32)).to(ys.dtype))
        scale = gl.rsqrt(gl.sum(gl.sum(squares, 1), 0) / K + eps)
    else:
        for p in gl.static_range(len(x)):
            ys.index(p).store(x[p])
    fence_async_shared()
    barrier()
    return scale


@gluon.jit
def activation(X, NORM_W, eps, WD, K: gl.constexpr, NORM: gl.constexpr):
    """(X' in shared memory, behind the norm but for 1/rms; that, or 1). Waits for x."""
    LENGTH: gl.constexpr = K // 16
    COUNT: gl.constexpr = (LENGTH + PANEL - 1) // PANEL
    THREADS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    ys = gl.allocate_shared_memory(WD.dtype, [COUNT, 16, PANEL], WD.layout)
    segment = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(1, THREADS)), 1)
    lane = gl.expand_dims(gl.arange(0, PANEL, gl.SliceLayout(0, THREADS)), 0)
    weights = ()
    if NORM:
        for p in gl.static_range(COUNT):
            k = p * PANEL + lane
            weights = weights + (gl.load(NORM_W + segment * LENGTH + k, mask=k < LENGTH, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    launch_dependents()
    wait_for_the_kernel_before()
    x = ()
    for p in gl.static_range(COUNT):
        k = p * PANEL + lane
        x = x + (gl.load(X + segment * LENGTH + k, mask=k < LENGTH, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    return ys, stage(x, weights, eps, ys, K, NORM)


@gluon.jit
def diagonal(c, ROW: gl.constexpr):
    """P [PAIRS] of C [64, 16]."""
    LAYOUT: gl.constexpr = c.type.layout
    line = gl.arange(0, LINES, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, 16, gl.SliceLayout(0, LAYOUT))
    own = gl.expand_dims(line % 16, 1) == gl.expand_dims(column, 0)
    parts = gl.sum(gl.where(own, c, 0.0), 1)
    return gl.convert_layout(gl.sum(gl.reshape(parts, (PAIRS, 16)), 1), ROW)


@gluon.jit
def next_tile(
    ring, full, WD, NEXT, ys, scale, tile, t, pieces, tiles, apart,
    K: gl.constexpr, PANELS: gl.constexpr, STAGES: gl.constexpr, PARTNERS: gl.constexpr, ROW: gl.constexpr,
    NEXT_SIZE: gl.constexpr, NEXT_APART: gl.constexpr,
):  # fmt: skip
    """Products float32 [PAIRS] of the two halves of `tile`, the program's t-th, while later pieces come in."""
    PIECES: gl.constexpr = pieces_of(K, PANELS)
    COUNT: gl.constexpr = (K // 16 + PANEL - 1) // PANEL
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 16, 16])
    a = gl.zeros([LINES, 16], gl.float32, ACC)
    b = gl.zeros([LINES, 16], gl.float32, ACC)
    for c in gl.static_range(PIECES):
        i = t * PIECES + c
        stage = i % STAGES
        mbarrier.wait(full.index(stage), i // STAGES & 1)
        for p in gl.static_range(PANELS):
            if c * PANELS + p < COUNT:
                y = ys.index(c * PANELS + p).permute((1, 0))
                a = warpgroup_mma(ring.index(stage * (2 * PANELS) + p), y, a, is_async=True)
                b = warpgroup_mma(ring.index(stage * (2 * PANELS) + PANELS + p), y, b, is_async=True)
        a, b = warpgroup_mma_wait(0, deps=[a, b])
        barrier()  # all warps have read the stage
        ask(
            ring, full, WD, NEXT, tile + (c + STAGES) // PIECES * gl.num_programs(0), i + STAGES, pieces, tiles, apart,
            (c + STAGES) % PIECES, PANELS, STAGES, PARTNERS, NEXT_SIZE, NEXT_APART,
        )  # fmt: skip
    return diagonal(a, ROW) * scale, diagonal(b, ROW) * scale
