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


@gluon.jit
def _arrive(COUNT):
    """Tells the others that this program's stores so far are made."""
    barrier()  # every thread's stores come before the release below
    gl.atomic_add(COUNT, 1, sem="release", scope="gpu")


@gluon.jit
def _wait(COUNT, target, patience):
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
def _first_tile(begin):
    """This program's first tile of a product before which `begin` tiles of the stack lie."""
    programs = gl.num_programs(0)
    return (gl.program_id(0) + programs - begin % programs) % programs


# --- the producer


@gluon.jit
def _stream(
    ring, full, empty, WD, layer, begin, i,
    OUTPUTS: gl.constexpr, K: gl.constexpr, PARTNERS: gl.constexpr, PANELS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copies this program's pieces of one product of one layer, from the i-th piece of the ring on; the next piece's number."""
    apart: gl.constexpr = OUTPUTS // 2
    for tile in range(_first_tile(begin), OUTPUTS // (2 * PAIRS), gl.num_programs(0)):
        a, b = first_rows(tile, apart, PARTNERS)
        row = layer * OUTPUTS
        for c in range(pieces_of(K, PANELS)):
            stage = i % STAGES
            mbarrier.wait(empty.index(stage), i // STAGES & 1 ^ 1)
            mbarrier.expect(full.index(stage), 2 * PANELS * WD.block_type.nbytes)
            for p in gl.static_range(PANELS):
                at = stage * (2 * PANELS) + p
                column = (c * PANELS + p) * PANEL
                tma.async_copy_global_to_shared(WD, [(row + a) * 16, column], full.index(stage), ring.index(at))
                tma.async_copy_global_to_shared(WD, [(row + b) * 16, column], full.index(stage), ring.index(at + PANELS))
            i += 1
    return i


@gluon.jit
def _produce(
    ring, full, empty, weights, layers,
    HIDDEN: gl.constexpr, FFN: gl.constexpr, WIDTH: gl.constexpr, PACKED: gl.constexpr, HALF: gl.constexpr,
    PANELS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    QKV, OUT, UP, DOWN = weights
    # tiles of a layer before each product, and of all
    TILE: gl.constexpr = 2 * PAIRS
    AT_OUT: gl.constexpr = PACKED // TILE
    AT_UP: gl.constexpr = AT_OUT + HIDDEN // TILE
    AT_DOWN: gl.constexpr = AT_UP + 2 * FFN // TILE
    i = 0
    for layer in range(layers):
        begin = layer * (AT_DOWN + HIDDEN // TILE)
        i = _stream(ring, full, empty, QKV, layer, begin, i, PACKED, HIDDEN, HALF, PANELS, STAGES)
        i = _stream(ring, full, empty, OUT, layer, begin + AT_OUT, i, HIDDEN, WIDTH, 0, PANELS, STAGES)
        i = _stream(ring, full, empty, UP, layer, begin + AT_UP, i, 2 * FFN, HIDDEN, -1, PANELS, STAGES)
        i = _stream(ring, full, empty, DOWN, layer, begin + AT_DOWN, i, HIDDEN, FFN, 0, PANELS, STAGES)


# --- products


@gluon.jit
def _activation(X, NORM_W, eps, ys, count, target, patience, K: gl.constexpr, NORM: gl.constexpr):
    """Waits for x, and brings it into `ys` as X', behind the norm but for 1/rms; (that, or 1; the patience left)."""
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
    patience = _wait(count, target, patience)
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
    fence_async_shared()
    barrier()
    return scale, patience


@gluon.jit
def _tile(ring, full, empty, ys, scale, i, K: gl.constexpr, PANELS: gl.constexpr, STAGES: gl.constexpr):
    """Products float32 [PAIRS] of the two halves of the tile whose first piece is i; the number of the piece behind it."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 16, 16])
    a = gl.zeros([LINES, 16], gl.float32, ACC)
    b = gl.zeros([LINES, 16], gl.float32, ACC)
    for c in range(pieces_of(K, PANELS)):
        stage = (i + c) % STAGES
        mbarrier.wait(full.index(stage), (i + c) // STAGES & 1)
        for p in gl.static_range(PANELS):
            y = ys.index(c * PANELS + p).permute((1, 0))
            a = warpgroup_mma(ring.index(stage * (2 * PANELS) + p), y, a, is_async=True)
            b = warpgroup_mma(ring.index(stage * (2 * PANELS) + PANELS + p), y, b, is_async=True)
        a, b = warpgroup_mma_wait(0, deps=[a, b])
        barrier()  # all warps have read the stage
        mbarrier.arrive(empty.index(stage), count=1)
    return diagonal(a, ROW) * scale, diagonal(b, ROW) * scale, i + pieces_of(K, PANELS)


@gluon.jit
def _qkv(
    ring, full, empty, ys, scale, i, begin, token, COS, SIN, Q, KC, VC,
    HIDDEN: gl.constexpr, HEADS: gl.constexpr, KV_HEADS: gl.constexpr, HALF: gl.constexpr, PAGE: gl.constexpr,
    PANELS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Rotary embedding of what W_qkv gives; q to Q [N, D], k and v into the layer's cache."""
    slot, position = token
    lanes = gl.arange(0, PAIRS, ROW)
    dtype: gl.constexpr = Q.dtype.element_ty
    for tile in range(_first_tile(begin), (HEADS + 2 * KV_HEADS) * HALF // PAIRS, gl.num_programs(0)):
        pair = tile * PAIRS + lanes
        head, d = pair // HALF, pair % HALF
        turned = head < HEADS + KV_HEADS
        cos = gl.load(COS + position * HALF + d, mask=turned, other=1.0)
        sin = gl.load(SIN + position * HALF + d, mask=turned, other=0.0)
        a, b, i = _tile(ring, full, empty, ys, scale, i, HIDDEN, PANELS, STAGES)
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
    return i


@gluon.jit
def _residual(
    ring, full, empty, ys, i, begin, BEFORE, AFTER,
    OUTPUTS: gl.constexpr, K: gl.constexpr, PANELS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """AFTER [OUTPUTS] = BEFORE + products; both may be the same memory: a place has one program."""
    lanes = gl.arange(0, PAIRS, ROW)
    for tile in range(_first_tile(begin), OUTPUTS // (2 * PAIRS), gl.num_programs(0)):
        n = tile * (2 * PAIRS) + lanes
        xa = gl.load(BEFORE + n, cache_modifier=".cg")
        xb = gl.load(BEFORE + n + PAIRS, cache_modifier=".cg")
        a, b, i = _tile(ring, full, empty, ys, 1.0, i, K, PANELS, STAGES)
        gl.store(AFTER + n, (a + xa.to(gl.float32)).to(AFTER.dtype.element_ty))
        gl.store(AFTER + n + PAIRS, (b + xb.to(gl.float32)).to(AFTER.dtype.element_ty))
    return i


@gluon.jit
def _gated(
    ring, full, empty, ys, scale, i, begin, U, FFN: gl.constexpr, HIDDEN: gl.constexpr, PANELS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    lanes = gl.arange(0, PAIRS, ROW)
    for tile in range(_first_tile(begin), FFN // PAIRS, gl.num_programs(0)):
        gate, value, i = _tile(ring, full, empty, ys, scale, i, HIDDEN, PANELS, STAGES)
        gl.store(U + tile * PAIRS + lanes, (gate / (1.0 + gl.exp(-gate)) * value).to(U.dtype.element_ty))
    return i


# --- attention


@gluon.constexpr_function
def keys_of(head):
    """Cached tokens that attention takes at a time: as many as registers hold for a group of four query heads."""
    return 32 if head <= 64 else 16


@gluon.constexpr_function
def score_layout(group, head):
    """[group, keys, head]: 16 bytes of a key's row a thread, the group's query heads all in each thread."""
    return gl.BlockedLayout([group, 1, 8], [1, 256 // head, head // 8], [1, 4, 1], [2, 1, 0])


@gluon.constexpr_function
def part_layout(parts, group, head):
    """[parts, group, head]: all parts of four channels in one thread, so nothing crosses threads."""
    lanes = min(32, head // 4)
    return gl.BlockedLayout([parts, 1, 4], [1, 32 // lanes, lanes], [1, 4, 1], [2, 1, 0])


@gluon.jit
def _cells(t, head, table, KV_HEADS: gl.constexpr, HEAD: gl.constexpr, PAGED: gl.constexpr, PAGE: gl.constexpr):
    """int64 offsets, in elements, of one head's rows at positions t."""
    TABLE, BASE = table
    if PAGED:
        page = gl.load(TABLE + t // PAGE).to(gl.int64)
        return (page * (KV_HEADS * PAGE) + head * PAGE + t % PAGE) * HEAD
    else:
        slot = gl.load(BASE) + t
        return (slot // PAGE * (KV_HEADS * PAGE) + head * PAGE + slot % PAGE) * HEAD


@gluon.jit
def _attend(
    q, k, v, m, denominator, acc, t, limit, scale_log2,
):  # fmt: skip
    """One step of the online softmax: keys k and values v [KEYS, D] at positions t join m, denominator [G] and acc [G, D]."""
    wide = gl.expand_dims(k.to(gl.float32), 0)
    s = gl.sum(wide * gl.expand_dims(q.to(gl.float32), 1), 2) * scale_log2
    seen = gl.convert_layout(t, gl.SliceLayout(0, s.type.layout)) < limit
    s = gl.where(gl.expand_dims(seen, 0), s, float("-inf"))
    m_new = gl.maximum(m, gl.max(s, 1))
    # before the first key m_new is -inf, and -inf - -inf is NaN: subtract 0 there instead
    safe = gl.where(m_new == float("-inf"), 0.0, m_new)
    p = gl.exp2(s - gl.expand_dims(safe, 1))
    rescale = gl.exp2(m - safe)
    denominator = denominator * rescale + gl.sum(p, 1)
    values = gl.expand_dims(v.to(gl.float32), 0) * gl.expand_dims(p, 2)
    kept = gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, acc.type.layout)), 1)
    return m_new, denominator, acc * kept + gl.sum(values, 1)


@gluon.jit
def _attention(
    Q, KC, VC, table, partial, OUT, count, programs, length, parts, scale_log2, patience,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, GROUP_PAD: gl.constexpr, HEAD: gl.constexpr, PARTS: gl.constexpr,
    PAGED: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """This program's part of a head's cache; a head's last part to finish combines them all. `count` + 1 then counts the head,
    `count` + 5 + head its parts. Returns the patience left."""
    ALL: gl.constexpr = score_layout(GROUP_PAD, HEAD)
    OF_KEYS: gl.constexpr = gl.SliceLayout(0, ALL)
    OF_QUERIES: gl.constexpr = gl.SliceLayout(1, ALL)
    OF_GROUP: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, ALL))
    KEYS: gl.constexpr = keys_of(HEAD)
    PART_O, PART_M, PART_L = partial
    task = gl.program_id(0)
    head, part = task % KV_HEADS, task // KV_HEADS
    stretch = ((length + KEYS - 1) // KEYS + parts - 1) // parts * KEYS
    begin = part * stretch
    end = gl.minimum(begin + stretch, length)
    newest = length - 1
    t = begin + gl.arange(0, KEYS, gl.SliceLayout(1, OF_KEYS))
    d = gl.expand_dims(gl.arange(0, HEAD, gl.SliceLayout(0, OF_KEYS)), 0)
    # the first keys but the newest are older than this launch: on their way while the others finish W_qkv
    older = gl.expand_dims((t < end) & (t < newest) & (part < parts), 1)
    cells = _cells(gl.minimum(t, newest), head, table, KV_HEADS, HEAD, PAGED, PAGE)
    at = gl.expand_dims(cells, 1) + d
    k = gl.load(KC + at, mask=older, other=0.0, cache_modifier=".cg")
    v = gl.load(VC + at, mask=older, other=0.0, cache_modifier=".cg")
    patience = _wait(count, programs, patience)
    if part < parts:
        g = gl.expand_dims(gl.arange(0, GROUP_PAD, gl.SliceLayout(1, OF_QUERIES)), 1)
        channel = gl.expand_dims(gl.arange(0, HEAD, gl.SliceLayout(0, OF_QUERIES)), 0)
        q = gl.load(Q + (head * GROUP + g) * HEAD + channel, mask=g < GROUP, other=0.0, cache_modifier=".cg")
        is_newest = gl.expand_dims(t == newest, 1)
        k = gl.where(is_newest, gl.load(KC + at, mask=is_newest, other=0.0, cache_modifier=".cg"), k)
        v = gl.where(is_newest, gl.load(VC + at, mask=is_newest, other=0.0, cache_modifier=".cg"), v)
        m = gl.full([GROUP_PAD], float("-inf"), gl.float32, OF_GROUP)
        denominator = gl.full([GROUP_PAD], 0.0, gl.float32, OF_GROUP)
        acc = gl.zeros([GROUP_PAD, HEAD], gl.float32, OF_QUERIES)
        for _first in range(begin + KEYS, end, KEYS):
            later = t + KEYS
            cells = _cells(gl.minimum(later, newest), head, table, KV_HEADS, HEAD, PAGED, PAGE)
            at = gl.expand_dims(cells, 1) + d
            there = gl.expand_dims(later < end, 1)
            k_later = gl.load(KC + at, mask=there, other=0.0, cache_modifier=".cg")
            v_later = gl.load(VC + at, mask=there, other=0.0, cache_modifier=".cg")
            m, denominator, acc = _attend(q, k, v, m, denominator, acc, t, end, scale_log2)
            k, v, t = k_later, v_later, later
        m, denominator, acc = _attend(q, k, v, m, denominator, acc, t, end, scale_log2)
        rows = gl.arange(0, GROUP_PAD, OF_GROUP)
        mine = (head * PARTS + part) * GROUP
        gl.store(PART_M + mine + rows, m, mask=rows < GROUP)
        gl.store(PART_L + mine + rows, denominator, mask=rows < GROUP)
        gl.store(PART_O + (mine + g) * HEAD + channel, acc, mask=g < GROUP)
        barrier()  # every thread's stores come before the release below
        if gl.atomic_add(count + 5 + head, 1, sem="acq_rel", scope="gpu") == parts - 1:
            _combine(partial, OUT, head, parts, GROUP, GROUP_PAD, HEAD, PARTS)
            _arrive(count + 1)
    return patience


@gluon.jit
def _combine(partial, OUT, head, parts, GROUP: gl.constexpr, GROUP_PAD: gl.constexpr, HEAD: gl.constexpr, PARTS: gl.constexpr):
    """The group's outputs, OUT [N, D], of all parts; parts without a key have maximum -inf."""
    ALL: gl.constexpr = part_layout(PARTS, GROUP_PAD, HEAD)
    OF_ROW: gl.constexpr = gl.SliceLayout(2, ALL)
    ONE: gl.constexpr = gl.SliceLayout(0, ALL)
    PART_O, PART_M, PART_L = partial
    part = gl.expand_dims(gl.arange(0, PARTS, gl.SliceLayout(1, OF_ROW)), 1)
    row = gl.expand_dims(gl.arange(0, GROUP_PAD, gl.SliceLayout(0, OF_ROW)), 0)
    d = gl.expand_dims(gl.expand_dims(gl.arange(0, HEAD, gl.SliceLayout(0, ONE)), 0), 0)
    there = (part < parts) & (row < GROUP)
    at = (head * PARTS + part) * GROUP + row
    # .cg: written by other multiprocessors; all at once, for each look at L2 takes its time
    m = gl.load(PART_M + at, mask=there, other=float("-inf"), cache_modifier=".cg")
    share = gl.load(PART_L + at, mask=there, other=0.0, cache_modifier=".cg")
    acc = gl.load(PART_O + gl.expand_dims(at, 2) * HEAD + d, mask=gl.expand_dims(there, 2), other=0.0, cache_modifier=".cg")
    top = gl.max(m, 0)
    weight = gl.exp2(m - gl.expand_dims(gl.where(top == float("-inf"), 0.0, top), 0))
    total = gl.convert_layout(gl.sum(weight * share, 0), gl.SliceLayout(1, ONE))
    out = gl.sum(acc * gl.expand_dims(weight, 2), 0) / gl.expand_dims(gl.where(total == 0.0, 1.0, total), 1)
    rows = gl.expand_dims(gl.arange(0, GROUP_PAD, gl.SliceLayout(1, ONE)), 1)
    channel = gl.expand_dims(gl.arange(0, HEAD, gl.SliceLayout(0, ONE)), 0)
    gl.store(OUT + (head * GROUP + rows) * HEAD + channel, out.to(OUT.dtype.element_ty), mask=rows < GROUP)


# --- all layers


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
        scale, patience = _activation(before, ATTN_NORM + layer * HIDDEN, eps_attn, ys, arrived, target, patience, HIDDEN, True)
        i = _qkv(ring, full, empty, ys, scale, i, begin, token, COS, SIN, Q, kc, vc, HIDDEN, HEADS, KV_HEADS, HEAD // 2, PAGE,
                 PANELS, STAGES)  # fmt: skip
        _arrive(count)
        patience = _attention(
            Q, kc, vc, table, partial, ATTN, count, programs, length, parts, scale_log2, patience,
            KV_HEADS, HEADS // KV_HEADS, GROUP_PAD, HEAD, PARTS, PAGED, PAGE,
        )  # fmt: skip
        _one, patience = _activation(ATTN, ATTN, 0.0, ys, count + 1, KV_HEADS, patience, WIDTH, False)
        i = _residual(ring, full, empty, ys, i, begin + AT_OUT, before, OUT_X, HIDDEN, WIDTH, PANELS, STAGES)
        before = OUT_X
        _arrive(count + 2)
        scale, patience = _activation(
            OUT_X, MLP_NORM + layer * HIDDEN, eps_mlp, ys, count + 2, programs, patience, HIDDEN, True
        )
        i = _gated(ring, full, empty, ys, scale, i, begin + AT_UP, U, FFN, HIDDEN, PANELS, STAGES)
        _arrive(count + 3)
        _one, patience = _activation(U, U, 0.0, ys, count + 3, programs, patience, FFN, False)
        i = _residual(ring, full, empty, ys, i, begin + AT_DOWN, OUT_X, OUT_X, HIDDEN, FFN, PANELS, STAGES)
        arrived, target = count + 4, programs
        _arrive(arrived)
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
        (_produce, (ring, full, empty, weights, layers, HIDDEN, FFN, WIDTH, PACKED, HEAD // 2, PANELS, STAGES)),
    ], [1], [40])
    # fmt: on
