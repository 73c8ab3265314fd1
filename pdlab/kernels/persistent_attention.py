"""Attention of the persistent decode kernel: each program a part of one KV head's cache, the last of a head adds its parts up.

Few keys a program, so plain arithmetic does: 16 bytes of a key's row a thread, for all query heads of the group at once.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from pdlab.kernels.persistent_products import arrive, wait
from pdlab.kernels.ring_product import barrier


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
def attention(
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
    patience = wait(count, programs, patience)
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
            arrive(count + 1)
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
