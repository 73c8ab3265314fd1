"""Attention of the persistent decode kernel: each program a part of one KV head's cache; one a query head adds its parts up.

Few keys a program, so plain arithmetic does: 16 bytes of a key's row a thread, for all query heads of the group at once. Each
warp has keys of its own and a softmax of its own, so nothing crosses warps until the part is through.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from pdlab.kernels.persistent_words import float_word, halves, part_words, rows, word
from pdlab.kernels.ring_product import barrier

STEP = gl.constexpr(8)  # cached tokens that a part is a multiple of


@gluon.constexpr_function
def keys_of(head):
    """Cached tokens that attention takes at a time: as many as registers hold for a group of four query heads."""
    return 32 if head <= 64 else 16


@gluon.constexpr_function
def score_layout(group, head):
    """[group, warps, keys of a warp, head]: 16 bytes of a key's row a thread, the group's query heads all in each thread."""
    return gl.BlockedLayout([group, 1, 1, 8], [1, 1, 256 // head, head // 8], [1, 4, 1, 1], [3, 2, 1, 0])


@gluon.constexpr_function
def sums_layout(head):
    """[group, warps, head]: what the warps have of four channels all in one thread."""
    return gl.BlockedLayout([1, 4, 4], [128 // head, 1, head // 4], [4, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def rows_of(group):
    """Rows in which a KV head's q, k and v are handed over: one a query head, k, v, up to a power of two."""
    return 1 << (group + 1).bit_length()


@gluon.constexpr_function
def reads_of(group, head):
    """Looks of two words by each of 128 threads that bring them."""
    return max(1, rows_of(group) * head // 512)


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
def _attend(q, k, v, m, denominator, acc, t, limit, scale_log2):
    """One step of the warps' online softmax: keys k and values v [4, KEYS / 4, D] at positions t join m and denominator [G, 4]
    and acc [G, 4, D]."""
    s = gl.sum(gl.expand_dims(k.to(gl.float32), 0) * q, 3) * scale_log2
    seen = gl.convert_layout(t, gl.SliceLayout(0, s.type.layout)) < limit
    s = gl.where(gl.expand_dims(seen, 0), s, float("-inf"))
    m_new = gl.maximum(m, gl.max(s, 2))
    # before the first key m_new is -inf, and -inf - -inf is NaN: subtract 0 there instead
    safe = gl.where(m_new == float("-inf"), 0.0, m_new)
    p = gl.exp2(s - gl.expand_dims(safe, 2))
    rescale = gl.exp2(m - safe)
    denominator = denominator * rescale + gl.sum(p, 2)
    values = gl.expand_dims(v.to(gl.float32), 0) * gl.expand_dims(p, 3)
    kept = gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(2, acc.type.layout)), 2)
    return m_new, denominator, acc * kept + gl.sum(values, 2)


@gluon.jit
def task_of(length, parts, KV_HEADS: gl.constexpr):
    """(KV head, part of its cache, its first position and the one behind its last) of this program."""
    task = gl.program_id(0)
    part = task // KV_HEADS
    begin = part * (((length + STEP - 1) // STEP + parts - 1) // parts * STEP)
    end = gl.minimum(begin + ((length + STEP - 1) // STEP + parts - 1) // parts * STEP, length)
    return task % KV_HEADS, part, begin, gl.where(part < parts, end, 0)


@gluon.jit
def positions(first, GROUP_PAD: gl.constexpr, HEAD: gl.constexpr):
    """Positions [4, KEYS / 4] of the keys from `first` on, a row a warp."""
    OF_KEYS: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(0, score_layout(GROUP_PAD, HEAD)))
    EACH: gl.constexpr = keys_of(HEAD) // 4
    warp = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(1, OF_KEYS)), 1)
    return first + warp * EACH + gl.expand_dims(gl.arange(0, EACH, gl.SliceLayout(0, OF_KEYS)), 0)


@gluon.jit
def places(t, head, newest, table, KV_HEADS: gl.constexpr, HEAD: gl.constexpr, PAGED: gl.constexpr, PAGE: gl.constexpr):
    """int64 offsets [4, KEYS / 4, D] in a layer's cache of positions t; behind the newest, 0 or more, they repeat it."""
    d = gl.arange(0, HEAD, gl.SliceLayout(0, gl.SliceLayout(0, t.type.layout.parent)))
    cells = _cells(gl.minimum(t, newest), head, table, KV_HEADS, HEAD, PAGED, PAGE)
    return gl.expand_dims(cells, 2) + gl.expand_dims(gl.expand_dims(d, 0), 0)


@gluon.jit
def older(KC, VC, at, t, end, newest):
    """Keys and values [4, KEYS / 4, D] at positions t below `end` but for the newest, which is not in the cache yet."""
    there = gl.expand_dims((t < end) & (t < newest), 2)
    k = gl.load(KC + at, mask=there, other=0.0, cache_modifier=".cg")
    return k, gl.load(VC + at, mask=there, other=0.0, cache_modifier=".cg")


@gluon.jit
def _handed(WORDS, smem, head, epoch, LOST, patience, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD: gl.constexpr):
    """Waits for q [GROUP, D], k and v of a KV head, rotary pairs in words, and brings them into `smem` [ROWS, D]."""
    HALF: gl.constexpr = HEAD // 2
    ROWS: gl.constexpr = rows_of(GROUP)
    READS: gl.constexpr = reads_of(GROUP, HEAD)
    ACROSS: gl.constexpr = HALF // (2 * READS)
    LANES: gl.constexpr = ACROSS if ACROSS < 32 else 32
    OF_WORDS: gl.constexpr = gl.BlockedLayout([1, 1], [32 // LANES, LANES], [4, 1], [1, 0])
    row = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, OF_WORDS)), 1)
    column = gl.expand_dims(gl.arange(0, ACROSS, gl.SliceLayout(0, OF_WORDS)), 0)
    of_kv = KV_HEADS * GROUP + head + gl.minimum(row - GROUP, 1) * KV_HEADS
    from_head = gl.where(row < GROUP, head * GROUP + row, of_kv)
    at = WORDS.to(gl.int64) + (from_head * HALF + column * (2 * READS)) * 8
    a, b = halves(rows(at, epoch, LOST, patience, READS), smem.dtype)
    smem.store(gl.reshape(gl.permute(gl.join(a, b), (0, 2, 1)), (ROWS, HEAD)))
    barrier()


@gluon.jit
def attention(
    WORDS, PART, smem, KC, VC, table, first, second, task, length, epoch, LOST, patience, scale_log2,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, GROUP_PAD: gl.constexpr, HEAD: gl.constexpr, PARTS: gl.constexpr,
    PAGED: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """This program's part of a head's cache, to words PART [N, PARTS, D + 2]: sums, maximum, denominator.

    `first` and `second`: older keys and values of the part's first two blocks, which were asked for long ago.
    """
    ALL: gl.constexpr = score_layout(GROUP_PAD, HEAD)
    OF_ROWS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, ALL))  # [any, D]
    OF_SUMS: gl.constexpr = gl.SliceLayout(2, ALL)
    OF_QUERIES: gl.constexpr = gl.SliceLayout(1, OF_SUMS)
    OF_WARPS: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, ALL))
    SPREAD: gl.constexpr = sums_layout(HEAD)
    OF_GROUP: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, SPREAD))
    KEYS: gl.constexpr = keys_of(HEAD)
    head, part, begin, end = task
    newest = length - 1
    _handed(WORDS, smem, head, epoch, LOST, patience, KV_HEADS, GROUP, HEAD)
    q = smem.slice(0, GROUP_PAD, 0).load(OF_QUERIES).to(gl.float32)
    q = gl.expand_dims(gl.expand_dims(q, 1), 2)
    k_newest = gl.expand_dims(smem.slice(GROUP, 1, 0).load(OF_ROWS), 0)
    v_newest = gl.expand_dims(smem.slice(GROUP + 1, 1, 0).load(OF_ROWS), 0)
    m = gl.full([GROUP_PAD, 4], float("-inf"), gl.float32, OF_WARPS)
    denominator = gl.full([GROUP_PAD, 4], 0.0, gl.float32, OF_WARPS)
    acc = gl.zeros([GROUP_PAD, 4, HEAD], gl.float32, OF_SUMS)
    t = positions(begin, GROUP_PAD, HEAD)
    k, v = first
    k_next, v_next = second
    for here in range(begin, end, KEYS):
        is_newest = gl.expand_dims(t == newest, 2)
        k_here, v_here = gl.where(is_newest, k_newest, k), gl.where(is_newest, v_newest, v)
        k, v = k_next, v_next
        if here + 2 * KEYS < end:
            later = t + 2 * KEYS
            k_next, v_next = older(KC, VC, places(later, head, newest, table, KV_HEADS, HEAD, PAGED, PAGE), later, end, newest)
        m, denominator, acc = _attend(q, k_here, v_here, m, denominator, acc, t, end, scale_log2)
        t += KEYS
    # the warps' sums as one
    m = gl.convert_layout(m, gl.SliceLayout(2, SPREAD))
    top = gl.max(m, 1)
    weight = gl.exp2(m - gl.expand_dims(gl.where(top == float("-inf"), 0.0, top), 1))
    total = gl.sum(gl.convert_layout(denominator, gl.SliceLayout(2, SPREAD)) * weight, 1)
    sums = gl.sum(gl.convert_layout(acc, SPREAD) * gl.expand_dims(weight, 2), 1)
    g = gl.expand_dims(gl.arange(0, GROUP_PAD, gl.SliceLayout(1, gl.SliceLayout(1, SPREAD))), 1)
    channel = gl.expand_dims(gl.arange(0, HEAD, gl.SliceLayout(0, gl.SliceLayout(1, SPREAD))), 0)
    to = ((head * GROUP + g) * PARTS + part) * (HEAD + 2) + channel
    gl.store(PART + to, float_word(sums, epoch), mask=g < GROUP, cache_modifier=".cg")
    each = gl.arange(0, GROUP_PAD, OF_GROUP)
    mine = ((head * GROUP + each) * PARTS + part) * (HEAD + 2) + HEAD
    gl.store(PART + mine, float_word(top, epoch), mask=each < GROUP, cache_modifier=".cg")
    gl.store(PART + mine + 1, float_word(total, epoch), mask=each < GROUP, cache_modifier=".cg")


@gluon.jit
def combine(
    PART, WORDS, n, parts, epoch, LOST, patience, HEAD: gl.constexpr, PARTS: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """Query head n's output of all its parts, to WORDS [N, D / 2] of neighbouring channels. Parts without a key have maximum
    -inf. Each thread sees all parts of its channels: no look at L2 waits for another, and nothing crosses threads."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    pair = gl.arange(0, HEAD // 2, LANES)
    row = PART.to(gl.int64) + n * (PARTS * (HEAD + 2) * 8)
    d = part_words(row + pair * 16, row + pair * 0 + HEAD * 8, epoch, LOST, patience, parts, PARTS, HEAD)
    top = d[2].to(gl.float32, bitcast=True)
    for p in gl.static_range(1, PARTS):
        top = gl.maximum(top, d[4 * p + 2].to(gl.float32, bitcast=True))
    top = gl.where(top == float("-inf"), 0.0, top)
    even = gl.zeros([HEAD // 2], gl.float32, LANES)
    odd = gl.zeros([HEAD // 2], gl.float32, LANES)
    total = gl.zeros([HEAD // 2], gl.float32, LANES)
    for p in gl.static_range(PARTS):
        weight = gl.exp2(d[4 * p + 2].to(gl.float32, bitcast=True) - top)
        even += weight * d[4 * p].to(gl.float32, bitcast=True)
        odd += weight * d[4 * p + 1].to(gl.float32, bitcast=True)
        total += weight * d[4 * p + 3].to(gl.float32, bitcast=True)
    total = gl.where(total == 0.0, 1.0, total)
    gl.store(
        WORDS + n * (HEAD // 2) + pair, word((even / total).to(dtype), (odd / total).to(dtype), epoch), cache_modifier=".cg"
    )
