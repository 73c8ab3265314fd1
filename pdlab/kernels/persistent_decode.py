"""All layers of a decode step with one activation row as one kernel: a producer warp streams weights, four warps compute.

For each layer, what five fused kernels do in turn (x is the residual stream, [H]):

    q, k, v = rope(norm(x) W_qkv^T), k and v into the cache;   a = attention(q);   x += a W_out^T
    u = silu(g) * v,  [g, v] = norm(x) W_up^T;                 x += u W_down^T

As many programs as multiprocessors are resident from beginning to end. Weights depend on nothing, so in each program one warp
does nothing but copy this program's pieces of all products of all layers, one after the other, into a ring in shared memory
(192 KB: 25 MB on a whole H200, 5.4 us of reading), and stops only where the ring is full. The other warps multiply what has
arrived (see ring_product) and wait for one another's results by counters in L2 (a release by each program that has stored its
results, an acquire by each that will read them):

    after W_qkv, W_out, W_up, W_down   all programs for all: each of them reads the whole vector
    after attention                    for KV_HEADS arrivals: the last program of a head to finish combines that head's parts

A program's share of a product begins where its share of the one before ended, so that remainders even out over the stack.

Counters are zero between launches: the last program to leave clears them, as nobody can still be looking. A wait is bounded;
past its bound programs go on without waiting, the residual stream comes out as NaN, which sampling reports as a bad row, and
`DecodeStack.failed` counts it. The launch is cooperative: the driver refuses a grid that would not be resident at once.

Bytes and floor: the layers' weights and the cached K and V once. Bound: bandwidth. LLaMA 1B: 1.95 GB, 420 us at 4.63 TB/s.
Hopper only, compiled there and nowhere else. Oracle: reference.ReferenceOps, layer by layer.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from pdlab.kernels.persistent_attention import attention
from pdlab.kernels.persistent_products import activation, arrive, gated, produce, qkv, residual
from pdlab.kernels.ring_product import LINES, PAIRS, PANEL, barrier


@gluon.jit
def _leave(X, COUNT, FAILED, counters, programs, patience, HIDDEN: gl.constexpr):
    """The last program to leave clears the counters for the next launch; where a wait gave up it makes X [HIDDEN] NaN.

    COUNT [counters] is followed by the programs that have left and those that gave up.
    """
    BLOCK: gl.constexpr = 128
    gl.atomic_add(COUNT + counters + 1, (patience == 0).to(gl.int32), sem="relaxed", scope="gpu")
    barrier()
    if gl.atomic_add(COUNT + counters, 1, sem="acq_rel", scope="gpu") == programs - 1:
        lane = gl.arange(0, BLOCK, gl.BlockedLayout([1], [32], [4], [0]))
        if gl.atomic_add(COUNT + counters + 1, 0, sem="acquire", scope="gpu") > 0:
            gl.atomic_add(FAILED, 1, sem="relaxed", scope="gpu")
            for first in range(0, HIDDEN, BLOCK):
                gl.store(X + first + lane, float("nan"), mask=first + lane < HIDDEN)
        for first in range(0, counters + 2, BLOCK):
            gl.store(COUNT + first + lane, 0, mask=first + lane < counters + 2)


@gluon.jit
def _consume(
    ring, full, empty, ys, X, OUT_X, norms, rope, where, table, caches, vectors, partial, COUNT, FAILED, numbers,
    HIDDEN: gl.constexpr, FFN: gl.constexpr, HEADS: gl.constexpr, KV_HEADS: gl.constexpr, HEAD: gl.constexpr,
    GROUP_PAD: gl.constexpr, PARTS: gl.constexpr, PAGED: gl.constexpr, PAGE: gl.constexpr, PANELS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    WIDTH: gl.constexpr = HEADS * HEAD
    TILE: gl.constexpr = 2 * PAIRS
    AT_OUT: gl.constexpr = (HEADS + 2 * KV_HEADS) * HEAD // TILE
    AT_UP: gl.constexpr = AT_OUT + HIDDEN // TILE
    AT_DOWN: gl.constexpr = AT_UP + 2 * FFN // TILE
    COUNTERS: gl.constexpr = 5 + KV_HEADS  # of a layer
    ATTN_NORM, MLP_NORM, eps_attn, eps_mlp = norms
    COS, SIN = rope
    POSITIONS, SLOTS, LENGTHS = where
    KC, VC, kv_stride = caches
    Q, ATTN, U = vectors
    scale_log2, layers, parts, patience = numbers
    programs = gl.num_programs(0)
    token, length = (gl.load(SLOTS), gl.load(POSITIONS)), gl.load(LENGTHS)
    i = 0
    before, count, arrived = X, COUNT, COUNT  # nobody is waited for before the first layer
    target = 0
    for layer in range(layers):
        begin = layer * (AT_DOWN + HIDDEN // TILE)
        far_layer = layer.to(gl.int64) * kv_stride  # type: ignore[attr-defined]  # a cache may hold more than 32 bits count
        kc, vc = KC + far_layer, VC + far_layer
        count = COUNT + layer * COUNTERS
        scale, patience = activation(before, ATTN_NORM + layer * HIDDEN, eps_attn, ys, arrived, target, patience, HIDDEN, True)
        i = qkv(ring, full, empty, ys, scale, i, begin, token, COS, SIN, Q, kc, vc, HIDDEN, HEADS, KV_HEADS, HEAD // 2, PAGE,
                 PANELS, STAGES)  # fmt: skip
        arrive(count)
        patience = attention(
            Q, kc, vc, table, partial, ATTN, count, programs, length, parts, scale_log2, patience,
            KV_HEADS, HEADS // KV_HEADS, GROUP_PAD, HEAD, PARTS, PAGED, PAGE,
        )  # fmt: skip
        _one, patience = activation(ATTN, ATTN, 0.0, ys, count + 1, KV_HEADS, patience, WIDTH, False)
        i = residual(ring, full, empty, ys, i, begin + AT_OUT, before, OUT_X, HIDDEN, WIDTH, PANELS, STAGES)
        before = OUT_X
        arrive(count + 2)
        scale, patience = activation(OUT_X, MLP_NORM + layer * HIDDEN, eps_mlp, ys, count + 2, programs, patience, HIDDEN, True)
        i = gated(ring, full, empty, ys, scale, i, begin + AT_UP, U, FFN, HIDDEN, PANELS, STAGES)
        arrive(count + 3)
        _one, patience = activation(U, U, 0.0, ys, count + 3, programs, patience, FFN, False)
        i = residual(ring, full, empty, ys, i, begin + AT_DOWN, OUT_X, OUT_X, HIDDEN, FFN, PANELS, STAGES)
        arrived, target = count + 4, programs
        arrive(arrived)
    _leave(OUT_X, COUNT, FAILED, layers * COUNTERS, programs, patience, HIDDEN)


@gluon.jit(do_not_specialize=["layers", "parts", "patience"])
def persistent_decode_kernel(
    X, OUT_X, QKV, OUT, UP, DOWN, ATTN_NORM, MLP_NORM, COS, SIN, POSITIONS, SLOTS, LENGTHS, TABLE, BASE, KC, VC, Q, ATTN, U,
    PART_O, PART_M, PART_L, COUNT, FAILED, kv_stride, eps_attn, eps_mlp, scale_log2, layers, parts, patience,
    HIDDEN: gl.constexpr, FFN: gl.constexpr, HEADS: gl.constexpr, KV_HEADS: gl.constexpr, HEAD: gl.constexpr,
    GROUP_PAD: gl.constexpr, PARTS: gl.constexpr, PAGED: gl.constexpr, PAGE: gl.constexpr, PANELS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    WIDTH: gl.constexpr = HEADS * HEAD
    PACKED: gl.constexpr = (HEADS + 2 * KV_HEADS) * HEAD
    LONGEST: gl.constexpr = FFN if FFN > WIDTH and FFN > HIDDEN else WIDTH if WIDTH > HIDDEN else HIDDEN
    ring = gl.allocate_shared_memory(QKV.dtype, [STAGES * 2 * PANELS, LINES, PANEL], QKV.layout)
    ys = gl.allocate_shared_memory(QKV.dtype, [(LONGEST // 16 + PANEL - 1) // PANEL, 16, PANEL], QKV.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    fence_async_shared()
    norms = (ATTN_NORM, MLP_NORM, eps_attn, eps_mlp)
    rope, where, table = (COS, SIN), (POSITIONS, SLOTS, LENGTHS), (TABLE, BASE)
    caches, vectors, partial = (KC, VC, kv_stride), (Q, ATTN, U), (PART_O, PART_M, PART_L)
    numbers, weights = (scale_log2, layers, parts, patience), (QKV, OUT, UP, DOWN)
    # constants stay constants only where they are written in the call itself
    # fmt: off
    gl.warp_specialize([
        (_consume, (ring, full, empty, ys, X, OUT_X, norms, rope, where, table, caches, vectors, partial, COUNT, FAILED,
                    numbers, HIDDEN, FFN, HEADS, KV_HEADS, HEAD, GROUP_PAD, PARTS, PAGED, PAGE, PANELS, STAGES)),
        (produce, (ring, full, empty, weights, layers, HIDDEN, FFN, WIDTH, PACKED, HEAD // 2, PANELS, STAGES)),
    ], [1], [40])
    # fmt: on
