"""All layers of a decode step with one activation row as one kernel: a producer warp streams weights, four warps compute.

For each layer, what five fused kernels do in turn (x is the residual stream, [H]):

    q, k, v = rope(norm(x) W_qkv^T), k and v into the cache;   a = attention(q);   x += a W_out^T
    u = silu(g) * v,  [g, v] = norm(x) W_up^T;                 x += u W_down^T

As many programs as multiprocessors are resident from beginning to end. Weights depend on nothing, so in each program one warp
does nothing but copy this program's pieces of all products of all layers, one after the other, into a ring in shared memory
(192 KB: 26 MB on a whole H200, 5.6 us of reading), and stops where the ring is full, or where enough is on its way: whatever
else is read waits behind that, so it is no more than the memory needs to keep its rate, see persistent_products. The other
warps multiply what has arrived (see ring_product) and wait for one another's results, words in L2 that carry an epoch (see
persistent_words):

    x after W_down, x after W_out, u   all programs for all: each of them reads the whole vector
    q, k and v of a KV head            its parts of the cache, a program each
    sums of those parts                one program a query head, which adds them up
    attention's output                 all programs

u may also be counted (IN_WORDS false): stored plainly, a release by each program, an acquire by each that reads.

Epochs: EPOCH is the last one used; a launch of L layers takes the next L + 1, one for the x it begins with and one a layer.
The last program to leave moves EPOCH on, and where it passes WRAP makes all words zero, an epoch that nobody waits for, and
begins again: so no word, however old, has the epoch that somebody waits for before its result is there.

Each kind of result has one buffer, and no word is written over while somebody may still look at it:
  - The chain x > q, k, v > sums > a > x > u > x ... has a link for each kind. A link's tasks are shared out to programs, each
    needs all words of the link before (attention's only those of its head, but all heads are needed one link later), and a
    program looks at its last word of the link before, ahead of publishing its first of its own. One without a task in a link
    does not look.
  - So once all words of a link are there, nobody looks at the link before it any more; and whoever writes a link's words of
    layer l + 1 has, from link to link, waited for all words of the links behind that link's words of layer l.
  - x is read twice, by the next product and by whoever adds to it two links later, ahead of publishing the sum; that too is
    before x of the next layer is written, as the chain goes through the sums.

A program's share of a product begins where its share of the one before ended, so that remainders even out over the stack.

A wait is bounded; past its bound it gives NaN, other waits end soon after, the residual stream comes out as NaN, which
sampling reports as a bad row, and `DecodeStack.failed` counts it. Counters are zero between launches: the last program to
leave clears them, as nobody can still be looking.

All programs have to be resident for any to get on, and nobody makes sure that they are: a dependent launch begins with those
for which there is room, and the others follow as kernels before or beside it leave their multiprocessors. What comes behind it
cannot be in the way, it is let begin only when all of these have. So kernels beside it must end within the bound of a wait, and
two stacks must not run at once. A cooperative launch, for which the driver keeps the room, costs the overlap.

Bytes and floor: the layers' weights and the cached K and V once. Bound: bandwidth. LLaMA 1B: 1.95 GB, 420 us at 4.63 TB/s.
Hopper only, compiled there and nowhere else. Oracle: reference.ReferenceOps, layer by layer.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from pdlab.kernels.copy_hints import leave_l2_first
from pdlab.kernels.persistent_attention import (
    attention,
    combine,
    keys_of,
    older,
    places,
    positions,
    rows_of,
    task_of,
)
from pdlab.kernels.persistent_products import arrive, counted, first_task, gated, produce, qkv, residual
from pdlab.kernels.persistent_words import staged, word
from pdlab.kernels.ring_product import LINES, PAIRS, PANEL, barrier, launch_dependents, wait_for_the_kernel_before

WRAP = gl.constexpr(1 << 30)  # the epoch behind which they begin again
PHASES = gl.constexpr(10)  # of a layer, whose ends are stamped


@gluon.constexpr_function
def words_of(hidden, ffn, heads, kv_heads, head, parts):
    """Where each kind of words begins: x after W_down, x after W_out, q and k and v, attention's output, u, sums; the end."""
    sizes = (
        hidden // 2,
        hidden // 2,
        (heads + 2 * kv_heads) * head // 2,
        heads * head // 2,
        ffn // 2,
        heads * parts * (head + 2),
    )
    begins = [0]
    for size in sizes:
        begins.append(begins[-1] + (size + 15) // 16 * 16)  # whole lines
    return tuple(begins)


@gluon.jit
def _stamp(TRACE, layer, phase: gl.constexpr, TRACED: gl.constexpr):
    """The time in ns at which this program is through with a phase, to TRACE [layers, PHASES, programs]."""
    if TRACED:
        now = gl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=gl.int64, is_pure=False, pack=1)
        gl.store(TRACE + (layer * PHASES + phase) * gl.num_programs(0) + gl.program_id(0), now)


@gluon.jit
def _publish(X, WORDS, epoch, HIDDEN: gl.constexpr):
    """x [HIDDEN] as words, as W_down's tasks leave them: rows n and n + 4 of eight."""
    BLOCK: gl.constexpr = 128
    lane = gl.arange(0, BLOCK, gl.BlockedLayout([1], [32], [4], [0]))
    for first in range(gl.program_id(0) * BLOCK, HIDDEN // 2, gl.num_programs(0) * BLOCK):
        at = first + lane
        low = at // PAIRS * (2 * PAIRS) + at % PAIRS
        mine = at < HIDDEN // 2
        pair = word(gl.load(X + low, mask=mine), gl.load(X + low + PAIRS, mask=mine), epoch)
        gl.store(WORDS + at, pair, mask=mine, cache_modifier=".cg")


@gluon.jit
def _ask(NORM_W, HIDDEN: gl.constexpr):
    """Asks a norm's weights into L2."""
    BLOCK: gl.constexpr = 128
    line = gl.arange(0, BLOCK, gl.BlockedLayout([1], [32], [4], [0])) * 64
    for first in gl.static_range(0, HIDDEN, BLOCK * 64):
        at = NORM_W + gl.minimum(first + line, HIDDEN - 1)
        gl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def _leave(X, WORDS, EPOCH, COUNT, FAILED, layers, HIDDEN: gl.constexpr, ALL: gl.constexpr):
    """The last program to leave prepares the next launch; where a wait gave up it makes X [HIDDEN] NaN.

    COUNT [layers] is followed by the programs that have left and the threads that gave up.
    """
    BLOCK: gl.constexpr = 128
    barrier()  # every thread's stores come before the release below
    if gl.atomic_add(COUNT + layers, 1, sem="acq_rel", scope="gpu") == gl.num_programs(0) - 1:
        lane = gl.arange(0, BLOCK, gl.BlockedLayout([1], [32], [4], [0]))
        if gl.atomic_add(COUNT + layers + 1, 0, sem="acquire", scope="gpu") > 0:
            gl.atomic_add(FAILED, 1, sem="relaxed", scope="gpu")
            for first in range(0, HIDDEN, BLOCK):
                gl.store(X + first + lane, float("nan"), mask=first + lane < HIDDEN)
        last = gl.load(EPOCH) + layers + 1
        if last > WRAP:
            for first in range(0, ALL, BLOCK):
                gl.store(WORDS + first + lane, 0, mask=first + lane < ALL)
        barrier()  # every thread has read EPOCH and the counters before they change
        gl.store(EPOCH, gl.where(last > WRAP, 0, last))
        for first in range(0, layers + 2, BLOCK):
            gl.store(COUNT + first + lane, 0, mask=first + lane < layers + 2)


@gluon.jit
def _consume(
    ring, full, empty, ys, smem, X, OUT_X, norms, rope, where, table, caches, U, state, numbers,
    HIDDEN: gl.constexpr, FFN: gl.constexpr, HEADS: gl.constexpr, KV_HEADS: gl.constexpr, HEAD: gl.constexpr,
    GROUP_PAD: gl.constexpr, PARTS: gl.constexpr, PAGED: gl.constexpr, PAGE: gl.constexpr, PANELS: gl.constexpr,
    STAGES: gl.constexpr, IN_WORDS: gl.constexpr, TRACED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    WIDTH: gl.constexpr = HEADS * HEAD
    GROUP: gl.constexpr = HEADS // KV_HEADS
    KEYS: gl.constexpr = keys_of(HEAD)
    # tasks of a layer before each product, and of all
    TILE: gl.constexpr = 2 * PAIRS
    AT_OUT: gl.constexpr = (HEADS + 2 * KV_HEADS) * HEAD // TILE
    AT_UP: gl.constexpr = AT_OUT + HIDDEN // TILE
    AT_DOWN: gl.constexpr = AT_UP + FFN // TILE
    AT: gl.constexpr = words_of(HIDDEN, FFN, HEADS, KV_HEADS, HEAD, PARTS)
    ATTN_NORM, MLP_NORM, eps_attn, eps_mlp = norms
    COS, SIN = rope
    POSITIONS, SLOTS, LENGTHS = where
    KC, VC, kv_stride = caches
    WORDS, EPOCH, COUNT, FAILED, TRACE = state
    scale_log2, layers, parts, patience = numbers
    if PDL:
        wait_for_the_kernel_before()  # it wrote X; weights do not depend on it, so the producer is long at work
    AFTER_DOWN, AFTER_OUT, HANDED = WORDS, WORDS + AT[1], WORDS + AT[2]
    ATTN, U_WORDS, PART = WORDS + AT[3], WORDS + AT[4], WORDS + AT[5]
    LOST = COUNT + layers + 1
    programs = gl.num_programs(0)
    epoch = gl.load(EPOCH) + 1
    _publish(X, AFTER_DOWN, epoch, HIDDEN)
    token, length = (gl.load(SLOTS), gl.load(POSITIONS)), gl.load(LENGTHS)
    newest = gl.maximum(length - 1, 0)  # of an empty cache too there is a page to look up, though nothing on it is read
    # where the part's first two blocks of keys lie is the same in every layer
    task = task_of(length, parts, KV_HEADS)
    head, part, key, end = task
    t = positions(key, GROUP_PAD, HEAD)
    first_at = places(t, head, newest, table, KV_HEADS, HEAD, PAGED, PAGE)
    second_at = places(t + KEYS, head, newest, table, KV_HEADS, HEAD, PAGED, PAGE)
    i = 0
    for layer in range(layers):
        begin = layer * (AT_DOWN + HIDDEN // TILE)
        far_layer = layer.to(gl.int64) * kv_stride  # type: ignore[attr-defined]  # a cache may hold more than 32 bits count
        kc, vc = KC + far_layer, VC + far_layer
        # all but the newest are older than this launch: on their way while the others finish W_down, and during W_qkv
        first = older(kc, vc, first_at, t, end, newest)
        second = older(kc, vc, second_at, t + KEYS, end, newest)
        if gl.program_id(0) % 16 == 0:
            _ask(MLP_NORM + layer * HIDDEN, HIDDEN)
            _ask(ATTN_NORM + gl.minimum(layer + 1, layers - 1) * HIDDEN, HIDDEN)
        scale = 1.0
        if first_task(begin) < AT_OUT:
            scale = staged(AFTER_DOWN, ATTN_NORM + layer * HIDDEN, eps_attn, ys, epoch, LOST, patience, HIDDEN, True, True)
        was = epoch
        epoch += 1
        _stamp(TRACE, layer, 0, TRACED)
        i = qkv(ring, full, empty, ys, scale, i, begin, token, COS, SIN, HANDED, epoch, kc, vc, HIDDEN, HEADS, KV_HEADS,
                HEAD // 2, PAGE, PANELS, STAGES)  # fmt: skip
        _stamp(TRACE, layer, 1, TRACED)
        if part < parts:
            attention(HANDED, PART, smem, kc, vc, table, first, second, task, length, epoch, LOST, patience, scale_log2,
                      KV_HEADS, GROUP, GROUP_PAD, HEAD, PARTS, PAGED, PAGE)  # fmt: skip
        _stamp(TRACE, layer, 2, TRACED)
        for n in range(programs - 1 - gl.program_id(0), HEADS, programs):
            combine(PART, ATTN, n, parts, epoch, LOST, patience, HEAD, PARTS, ys.dtype)
        _stamp(TRACE, layer, 3, TRACED)
        if first_task(begin + AT_OUT) < HIDDEN // TILE:
            staged(ATTN, X, 0.0, ys, epoch, LOST, patience, WIDTH, False, False)
        _stamp(TRACE, layer, 4, TRACED)
        i = residual(ring, full, empty, ys, i, begin + AT_OUT, AFTER_DOWN, was, AFTER_OUT, epoch, OUT_X, LOST, patience,
                     HIDDEN, WIDTH, PANELS, STAGES)  # fmt: skip
        _stamp(TRACE, layer, 5, TRACED)
        scale = 1.0
        if first_task(begin + AT_UP) < FFN // TILE:
            scale = staged(AFTER_OUT, MLP_NORM + layer * HIDDEN, eps_mlp, ys, epoch, LOST, patience, HIDDEN, True, True)
        _stamp(TRACE, layer, 6, TRACED)
        i = gated(ring, full, empty, ys, scale, i, begin + AT_UP, U, U_WORDS, epoch, FFN, HIDDEN, IN_WORDS, PANELS, STAGES)
        _stamp(TRACE, layer, 7, TRACED)
        if not IN_WORDS:
            arrive(COUNT + layer)
        if first_task(begin + AT_DOWN) < HIDDEN // TILE:
            if IN_WORDS:
                staged(U_WORDS, X, 0.0, ys, epoch, LOST, patience, FFN, False, True)
            else:
                counted(U, ys, COUNT + layer, programs, LOST, patience, FFN)
        _stamp(TRACE, layer, 8, TRACED)
        i = residual(ring, full, empty, ys, i, begin + AT_DOWN, AFTER_OUT, epoch, AFTER_DOWN, epoch, OUT_X, LOST, patience,
                     HIDDEN, FFN, PANELS, STAGES)  # fmt: skip
        _stamp(TRACE, layer, 9, TRACED)
    _leave(OUT_X, WORDS, EPOCH, COUNT, FAILED, layers, HIDDEN, AT[6])


@gluon.jit(do_not_specialize=["layers", "parts", "patience"])
def persistent_decode_kernel(
    X, OUT_X, QKV, OUT, UP, DOWN, ATTN_NORM, MLP_NORM, COS, SIN, POSITIONS, SLOTS, LENGTHS, TABLE, BASE, KC, VC, U,
    WORDS, EPOCH, COUNT, FAILED, TRACE, kv_stride, eps_attn, eps_mlp, scale_log2, layers, parts, patience,
    HIDDEN: gl.constexpr, FFN: gl.constexpr, HEADS: gl.constexpr, KV_HEADS: gl.constexpr, HEAD: gl.constexpr,
    GROUP_PAD: gl.constexpr, PARTS: gl.constexpr, PAGED: gl.constexpr, PAGE: gl.constexpr, PANELS: gl.constexpr,
    STAGES: gl.constexpr, IN_WORDS: gl.constexpr, TRACED: gl.constexpr, HINT: gl.constexpr,
    NEAR: gl.constexpr, FAR: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    if PDL:
        launch_dependents()  # the next kernel waits for this one's end; its programs are set off as these leave
    if HINT:
        for matrix in gl.static_range(4):
            leave_l2_first(2 + 5 * matrix)
    WIDTH: gl.constexpr = HEADS * HEAD
    PACKED: gl.constexpr = (HEADS + 2 * KV_HEADS) * HEAD
    LONGEST: gl.constexpr = FFN if FFN > WIDTH and FFN > HIDDEN else WIDTH if WIDTH > HIDDEN else HIDDEN
    ring = gl.allocate_shared_memory(QKV.dtype, [STAGES * 2 * PANELS, LINES, PANEL], QKV.layout)
    ys = gl.allocate_shared_memory(QKV.dtype, [(LONGEST // 16 + PANEL - 1) // PANEL, 16, PANEL], QKV.layout)
    smem = gl.allocate_shared_memory(QKV.dtype, [rows_of(HEADS // KV_HEADS), HEAD], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES * PANELS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(empty.index(s), count=1)
    for s in gl.static_range(STAGES * PANELS):
        mbarrier.init(full.index(s), count=1)
    fence_async_shared()
    norms = (ATTN_NORM, MLP_NORM, eps_attn, eps_mlp)
    rope, where, table = (COS, SIN), (POSITIONS, SLOTS, LENGTHS), (TABLE, BASE)
    caches, state = (KC, VC, kv_stride), (WORDS, EPOCH, COUNT, FAILED, TRACE)
    numbers, weights = (scale_log2, layers, parts, patience), (QKV, OUT, UP, DOWN)
    # constants stay constants only where they are written in the call itself
    # fmt: off
    gl.warp_specialize([
        (_consume, (ring, full, empty, ys, smem, X, OUT_X, norms, rope, where, table, caches, U, state, numbers, HIDDEN, FFN,
                    HEADS, KV_HEADS, HEAD, GROUP_PAD, PARTS, PAGED, PAGE, PANELS, STAGES, IN_WORDS, TRACED, PDL)),
        (produce, (ring, full, empty, weights, layers, HIDDEN, FFN, WIDTH, PACKED, HEAD // 2, PANELS, STAGES, NEAR, FAR)),
    ], [1], [40])
    # fmt: on
