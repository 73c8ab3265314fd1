"""Sampling from float32 logits with filters, by passes over whole rows: for rows that filtered_sample leaves open.

    s = (l - max l) / T,   keep: rank < k,  mass before < p * mass of what k left,  s >= log(min_p),   argmax of s + noise

What is kept is a beginning of the tokens ordered by s (equal s: lowest id first), so nothing needs sorting:

  - the candidate is the best s + noise of all; whether it is kept follows from the number and the mass of the tokens before
    it, one pass. If it is not, no token behind it is either, and the next candidate is the best before it: a rejection cuts
    away about half of what is left.
  - top-k would reject most candidates of a flat row, and with top-p the mass of the k best is needed: so first a value that
    exactly the k best reach is searched, among the floats in their order, by eight pivots a pass.

PARTS programs share a row and meet after every pass: one program would have one multiprocessor's bandwidth for 0.5 MB a pass.
They wait for one another, so all are resident (a cooperative launch), in as many groups as the device holds; a group takes one
row after another. Where that cannot be, one program takes a row. The sums of a row are added in an order that does not depend
on how many rows there are.

Bytes: a row of logits a pass, 4 V, from L1 and L2; 128256 tokens 0.5 MB. Bound: a meeting's latency for few rows, else
arithmetic.

Oracle: reference_sampling.sample_from_logits, up to the rounding of sums. Twin for the interpreter: this kernel itself.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pdlab.kernels.projection_sample import EMPTY, gumbel, noise_key, race_key, winner

_EMPTY = tl.constexpr(EMPTY)


@triton.jit
def _scaled(LOGITS, v, best, temperature, VOCAB: tl.constexpr):
    """s of the tokens v; -inf past the end."""
    return (tl.load(LOGITS + v, mask=v < VOCAB, other=float("-inf")) - best) / temperature


@triton.jit
def value_of(ordered):
    """The float of a place in their order: 0 is the float 0, more negative places are smaller floats (bits ^ 0x7FFFFFFF)."""
    ordered = ordered.to(tl.int32)
    return tl.where(ordered == 0, 0, ordered ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _meet(mine, ROOM, COUNT, turn, part, PARTS: tl.constexpr, PAD: tl.constexpr, WORDS: tl.constexpr, OTHER: tl.constexpr):
    """What each program of a row brought, int64 [PAD, WORDS] with OTHER in lines past PARTS, and the next turn.

    `mine`: int64 [WORDS]. There is room for two turns: who writes for the turn after next has seen that all came to the next
    one, which they do when they have read this one.
    """
    word = tl.arange(0, WORDS)
    line = tl.arange(0, PAD)[:, None]
    if PARTS == 1:
        return tl.where(line == 0, mine[None, :], OTHER), turn + 1
    room = ROOM + turn % 2 * (PARTS * WORDS)
    tl.store(room + part * WORDS + word, mine)
    tl.debug_barrier()  # every thread's store comes before the release
    tl.atomic_add(COUNT, 1, sem="acq_rel", scope="gpu")
    while tl.atomic_add(COUNT, 0, sem="acquire", scope="gpu") < (turn + 1) * PARTS:
        pass
    # .cg: written by other multiprocessors during this launch
    return tl.load(room + line * WORDS + word[None, :], mask=line < PARTS, other=OTHER, cache_modifier=".cg"), turn + 1


@triton.jit
def _met_best(top, ROOM, COUNT, turn, part, PARTS: tl.constexpr, PAD: tl.constexpr):
    """The largest key of all programs of the row."""
    word = tl.arange(0, 8)
    mine = tl.where(word == 0, tl.max(top, 0), _EMPTY)
    met, turn = _meet(mine, ROOM, COUNT, turn, part, PARTS, PAD, 8, _EMPTY)
    return tl.max(tl.max(met, 1), 0), turn


@triton.jit
def _before(
    LOGITS, best, temperature, s0, v0, ROOM, COUNT, turn, part, VOCAB: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr,
    PARTS: tl.constexpr, PAD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """How many tokens rank before (s0, v0), and their mass."""
    count = tl.zeros((BLOCK,), tl.int32)
    mass = tl.zeros((BLOCK,), tl.float32)
    for first in tl.range(part * SPAN, tl.minimum(part * SPAN + SPAN, VOCAB), BLOCK, num_stages=STAGES):
        v = first + tl.arange(0, BLOCK)
        s = _scaled(LOGITS, v, best, temperature, VOCAB)
        ahead = (s > s0) | ((s == s0) & (v < v0))
        count += ahead.to(tl.int32)
        mass += tl.where(ahead, tl.exp(s), 0.0)
    word = tl.arange(0, 8)
    share = tl.sum(mass, 0).to(tl.int32, bitcast=True)
    mine = tl.where(word == 0, tl.sum(count, 0), tl.where(word == 1, share, 0)).to(tl.int64)
    met, turn = _meet(mine, ROOM, COUNT, turn, part, PARTS, PAD, 8, 0)
    counts = tl.where(word[None, :] == 0, met, 0)
    shares = tl.where(word[None, :] == 1, met, 0).to(tl.int32).to(tl.float32, bitcast=True)
    return tl.sum(tl.sum(counts, 1), 0).to(tl.int32), tl.sum(tl.sum(shares, 1), 0), turn


@triton.jit
def _pivot(low, high, step, PLACE: tl.constexpr, first):
    """One of eight: -0.5, -1, -2, ... to begin with, then in equal steps of the order of floats."""
    MAGNITUDE: tl.constexpr = -((126 + PLACE) * (1 << 23)) - 1  # of -0.5 * 2^PLACE
    return tl.where(first, MAGNITUDE, tl.minimum(tl.minimum(low + (PLACE + 1) * step, high), 0))


@triton.jit
def _reaching(
    LOGITS, best, temperature, low, high, first_pass, part, VOCAB: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """int64 [8] each: pivots between low and high, and how many of this program's tokens reach them."""
    step = (high - low + 8) // 9
    p0 = _pivot(low, high, step, 0, first_pass)
    p1 = _pivot(low, high, step, 1, first_pass)
    p2 = _pivot(low, high, step, 2, first_pass)
    p3 = _pivot(low, high, step, 3, first_pass)
    p4 = _pivot(low, high, step, 4, first_pass)
    p5 = _pivot(low, high, step, 5, first_pass)
    p6 = _pivot(low, high, step, 6, first_pass)
    p7 = _pivot(low, high, step, 7, first_pass)
    a = tl.zeros((BLOCK,), tl.int32)  # two counts in each, of 16 bits: a program holds less than 2^15 tokens a lane
    b = tl.zeros((BLOCK,), tl.int32)
    c = tl.zeros((BLOCK,), tl.int32)
    d = tl.zeros((BLOCK,), tl.int32)
    for first in tl.range(part * SPAN, tl.minimum(part * SPAN + SPAN, VOCAB), BLOCK, num_stages=STAGES):
        s = _scaled(LOGITS, first + tl.arange(0, BLOCK), best, temperature, VOCAB)
        a += (s >= value_of(p0)).to(tl.int32) + tl.where(s >= value_of(p1), 65536, 0)
        b += (s >= value_of(p2)).to(tl.int32) + tl.where(s >= value_of(p3), 65536, 0)
        c += (s >= value_of(p4)).to(tl.int32) + tl.where(s >= value_of(p5), 65536, 0)
        d += (s >= value_of(p6)).to(tl.int32) + tl.where(s >= value_of(p7), 65536, 0)
    word = tl.arange(0, 8)
    pair = word // 2
    even = word % 2 == 0
    low_half = _choose(pair, _halves(a, False, SPAN), _halves(b, False, SPAN), _halves(c, False, SPAN), _halves(d, False, SPAN))
    high_half = _choose(pair, _halves(a, True, SPAN), _halves(b, True, SPAN), _halves(c, True, SPAN), _halves(d, True, SPAN))
    pivots = tl.where(even, _choose(pair, p0, p2, p4, p6), _choose(pair, p1, p3, p5, p7))
    return pivots.to(tl.int64), tl.where(even, low_half, high_half).to(tl.int64)


@triton.jit
def _halves(packed, UPPER: tl.constexpr, SPAN: tl.constexpr):
    if SPAN < 32768:
        both = tl.sum(packed, 0)  # twice in the source, once in the code
        return both >> 16 if UPPER else both & 0xFFFF
    else:
        return tl.sum(packed >> 16, 0) if UPPER else tl.sum(packed & 0xFFFF, 0)


@triton.jit
def _choose(i, a, b, c, d):
    return tl.where(i == 0, a, tl.where(i == 1, b, tl.where(i == 2, c, d)))


@triton.jit
def _cut(
    LOGITS, best, temperature, k, ROOM, COUNT, turn, part, VOCAB: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr,
    PARTS: tl.constexpr, PAD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A t that k tokens reach: the largest with at least k of s >= t, or any with exactly k.

    Eight pivots a pass over the order of floats. The first pass splits by magnitude; from then on a ninth of what is left
    remains, and soon no second token lies in it: with distinct s a handful of passes, with many equal ones ten.
    """
    low = tl.full((), -2139095041, tl.int64)  # of -inf; count(s >= low) >= k always, count(s >= high) < k
    high = tl.full((), 1, tl.int64)
    held = tl.full((), VOCAB, tl.int64)  # count(s >= low)
    fresh = tl.full((), 1, tl.int32)
    while (high - low > 1) & (held != k):
        pivots, mine = _reaching(LOGITS, best, temperature, low, high, fresh == 1, part, VOCAB, BLOCK, SPAN, STAGES)
        fresh = tl.full((), 0, tl.int32)
        met, turn = _meet(mine, ROOM, COUNT, turn, part, PARTS, PAD, 8, 0)
        counts = tl.sum(met, 0)
        enough = (counts >= k) & (pivots < high)
        high = tl.minimum(high, tl.min(tl.where((counts < k) & (pivots < high), pivots, high), 0))
        held = tl.minimum(held, tl.min(tl.where(enough, counts, held), 0))
        low = tl.maximum(low, tl.max(tl.where(enough, pivots, low), 0))
    return value_of(low), turn


@triton.jit
def _candidate(
    LOGITS, best, temperature, key1, key2, floor, s0, v0, ROOM, COUNT, turn, part, VOCAB: tl.constexpr, BLOCK: tl.constexpr,
    SPAN: tl.constexpr, PARTS: tl.constexpr, PAD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The best s + noise among tokens that rank before (s0, v0) and are not below `floor`."""
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    at = tl.zeros((BLOCK,), tl.int32)
    for first in tl.range(part * SPAN, tl.minimum(part * SPAN + SPAN, VOCAB), BLOCK, num_stages=STAGES):
        v = first + tl.arange(0, BLOCK)
        s = _scaled(LOGITS, v, best, temperature, VOCAB)
        keep = ((s > s0) | ((s == s0) & (v < v0))) & (s >= floor) & (v < VOCAB)
        noisy = tl.where(keep, s + gumbel(v, key1, key2), float("-inf"))
        at = tl.where(noisy > top, v, at)
        top = tl.maximum(top, noisy)
    return _met_best(race_key(top, at), ROOM, COUNT, turn, part, PARTS, PAD)


@triton.jit
def _sample_row(
    LOGITS, TEMPERATURE, TOP_K, TOP_P, MIN_P, SEED, POSITION, best_token, mass, ROOM, COUNT, turn, part, row,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr, PARTS: tl.constexpr, PAD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The token of a row with a temperature, and the next turn. `best_token`: where its largest logit is, a finite one. `mass`
    of the row: where top-p counts and top-k does not."""
    LOGITS += row.to(tl.int64) * VOCAB
    temperature, best = tl.load(TEMPERATURE + row), tl.load(LOGITS + best_token)
    k, p, min_p = tl.load(TOP_K + row), tl.load(TOP_P + row), tl.load(MIN_P + row)
    k = tl.where((k > 0) & (k < VOCAB), k, VOCAB)
    key1, key2 = noise_key(tl.load(SEED + row), tl.load(POSITION + row))
    floor = tl.where(min_p > 0, tl.log(min_p), float("-inf"))
    s0 = tl.full((), float("-inf"), tl.float32)
    v0 = tl.full((), VOCAB, tl.int32)
    if k < VOCAB:
        s0, turn = _cut(
            LOGITS, best, temperature, k, ROOM, COUNT, turn, part, VOCAB, BLOCK, SPAN, PARTS, PAD, STAGES
        )  # fmt: skip
    if (p < 1) & (k < VOCAB):
        ahead, mass, turn = _before(
            LOGITS, best, temperature, s0, 0, ROOM, COUNT, turn, part, VOCAB, BLOCK, SPAN, PARTS, PAD, STAGES
        )  # fmt: skip
        mass += (k - ahead).to(tl.float32) * tl.exp(s0)  # of those equal to s0 as many as k leaves room for
    token = best_token
    searching = k > 0
    while searching:
        key, turn = _candidate(
            LOGITS, best, temperature, key1, key2, floor, s0, v0, ROOM, COUNT, turn, part,
            VOCAB, BLOCK, SPAN, PARTS, PAD, STAGES,
        )  # fmt: skip
        token = winner(key)
        token = tl.where(token >= 0, token, best_token)  # nothing before the last one: the best itself is always kept
        searching = (k < VOCAB) | (p < 1)
        if searching:
            s0 = (tl.load(LOGITS + token) - best) / temperature
            v0 = token.to(tl.int32)
            rank, before, turn = _before(
                LOGITS, best, temperature, s0, v0, ROOM, COUNT, turn, part, VOCAB, BLOCK, SPAN, PARTS, PAD, STAGES
            )  # fmt: skip
            searching = (rank > 0) & ((rank >= k) | ((p < 1) & (before >= p * mass)))
    return token, turn


@triton.jit
def filtered_search_kernel(
    LOGITS, TEMPERATURE, TOP_K, TOP_P, MIN_P, SEED, POSITION, TOKENS, OPEN, ROOM, COUNT,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr, PARTS: tl.constexpr, PAD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Tokens of the open rows, int32 OPEN: how many there are, how many programs are done, then each row and the bits of its
    mass. TOKENS holds where the largest logit of each is."""
    rows = tl.load(OPEN)
    if rows > 0:
        part = tl.program_id(0) % PARTS
        group = tl.program_id(0) // PARTS
        ROOM += group * (2 * PARTS * 8)
        COUNT += group * 2
        turn = tl.full((), 0, tl.int32)
        i = group
        while i < rows:
            row = tl.load(OPEN + 2 + 2 * i)
            mass = tl.load(OPEN + 3 + 2 * i).to(tl.float32, bitcast=True)
            best_token = tl.load(TOKENS + row)
            token, turn = _sample_row(
                LOGITS, TEMPERATURE, TOP_K, TOP_P, MIN_P, SEED, POSITION, best_token, mass, ROOM, COUNT, turn, part, row,
                VOCAB, BLOCK, SPAN, PARTS, PAD, STAGES,
            )  # fmt: skip
            if part == 0:
                tl.store(TOKENS + row, token)  # the others have read it before they first met
            i += tl.num_programs(0) // PARTS
        if PARTS > 1 and tl.atomic_add(COUNT + 1, 1, sem="acq_rel", scope="gpu") == PARTS - 1:  # nobody looks at it any more
            tl.store(COUNT, 0)
            tl.store(COUNT + 1, 0)
        if tl.atomic_add(OPEN + 1, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
            tl.store(OPEN, 0)
            tl.store(OPEN + 1, 0)
