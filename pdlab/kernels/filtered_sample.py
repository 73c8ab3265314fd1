"""Sampling from float32 logits with top-k, top-p and min-p; the second stage of projection_sample.

    s = (l - max l) / T,   keep: rank < k,  mass before < p * mass of what k left,  s >= log(min_p),   argmax of s + noise

What is kept is a beginning of the tokens ordered by s (equal s: lowest id first), mostly a short one, so a row is read once:

  - each program takes SHARE tokens and leaves the largest logit of every GROUP of them, the sum of exp where the whole
    row's is needed, and where its best token is.
  - then one program a row searches a value that about k groups reach, or groups with p of the mass. At least as many tokens
    reach it, or as heavy ones, and all of them are in those groups: it reads these once more and lays the tokens aside.
  - the rest is done among them, in registers. A candidate is the best s + noise of all; whether it is kept follows from the
    number and the mass of the tokens before it. If it is not, no token behind it is either, and the next candidate is the best
    before it.

Noise lies between -2.82 and 22.88, so no token with s below -26 can win: with a low temperature few can. Where the tokens laid
aside do not settle a row (large k, a flat row under top-p, no filter at all) it stays open for filtered_search.

Nothing depends on how many rows there are: a row's programs, its sums and their order are the same in any batch.

Bytes: 4 V a row, and 4 GROUP for each group read again; 128256 tokens 0.51 MB. Bound: latency for few rows, else bandwidth:
128 rows 14 us at 4.63 TB/s.

Oracle: reference_sampling.sample_from_logits, up to the rounding of sums. Twin for the interpreter: this kernel itself.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from pdlab.kernels.filtered_search import filtered_search_kernel, value_of
from pdlab.kernels.ops import SamplingBatch
from pdlab.kernels.projection_sample import EMPTY, gumbel, noise_key, race_key, score_of, winner

SHARE = 4096  # tokens of one of a row's programs
GROUP = 32  # tokens of which the largest logit is left: a line of L2
AT_ONCE = tl.constexpr(64)  # groups read again
MOST_WANTED = tl.constexpr(640)  # a larger k leaves its row open, as does one of more than half the groups: too many reach it
MOST_READ = tl.constexpr(512)  # groups, where no k says how many: then passes over whole rows take no longer
ASIDE = tl.constexpr(1024)  # room for them: a group may hold several
RESIDENT = 4  # programs of a row that a multiprocessor holds, at least
LOOKING: dict[str, int] = {"num_warps": 4}
DECIDING: dict[str, int] = {"num_warps": 8, "maxnreg": 255}  # left alone, the compiler spills to make room for a second program
MOST_ROWS = 512  # of one launch
_EMPTY = tl.constexpr(EMPTY)
_HIGHEST_NOISE = tl.constexpr(22.9)
_UNREACHABLE = tl.constexpr(-26.0)  # the lowest noise and the highest lie less far apart


@triton.jit
def _from_room(at, mask, other):
    """float32 that was left as bits."""
    bits = tl.load(at, mask=mask, other=0, cache_modifier=".cg")
    return tl.where(mask, bits.to(tl.float32, bitcast=True), other)


@triton.jit(do_not_specialize=["first_row"])
def row_tops_kernel(
    LOGITS, TEMPERATURE, TOP_K, TOP_P, ROOM, first_row,
    VOCAB: tl.constexpr, SHARE: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr, PAD: tl.constexpr, WORDS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A program a row and SHARE tokens. int32 ROOM, WORDS a row, gets the largest logit of each group; of all of a program's
    tokens the largest, where it is, and the mass. Floats as their bits."""
    GROUPS: tl.constexpr = SHARE // GROUP
    here = tl.program_id(0) // PARTS
    row = first_row + here
    part = tl.program_id(0) % PARTS
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    g = tl.arange(0, GROUPS)
    v = part * SHARE + g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    logits = tl.load(LOGITS + row.to(tl.int64) * VOCAB + v, mask=v < VOCAB, other=float("-inf"))
    temperature, p, k = tl.load(TEMPERATURE + row), tl.load(TOP_P + row), tl.load(TOP_K + row)
    logits = tl.where(logits == logits, logits, float("inf"))  # NaN must show, and no comparison finds it
    tops = tl.max(logits, 1)
    top = tl.max(tops, 0)
    at = tl.min(tl.min(tl.where(logits == top, v, VOCAB), 1), 0)
    mass = tl.full((), 0.0, tl.float32)
    if ((k <= 0) | (k >= VOCAB)) & (p < 1) & (temperature > 0):
        mass = tl.sum(tl.sum(tl.where(logits > float("-inf"), tl.exp((logits - top) / temperature), 0.0), 1), 0)
    ROOM += here * WORDS
    tl.store(ROOM + part * GROUPS + g, tops.to(tl.int32, bitcast=True))
    own = ROOM + 2 * PAD * GROUPS + part
    tl.store(own, tl.where(top == 0, 0.0, top).to(tl.int32, bitcast=True))  # as a key the other zero is less
    tl.store(own + PAD, at)
    tl.store(own + 2 * PAD, mass.to(tl.int32, bitcast=True))


@triton.jit
def _reached_by(tops, weight, best, want, most, lowest):
    """A value that those of `tops` reach which weigh `want` or more together, and not above `most`, or else are few; not below
    `lowest`, and that where all of them weigh less."""
    low = tl.maximum(tl.min(tl.where(tops > float("-inf"), tops, float("inf")), 0), lowest)
    high = best
    count = tl.sum((tops >= low).to(tl.int32), 0)
    held = tl.sum(tl.where(tops >= low, weight, 0.0), 0)
    low = tl.where(held < want, lowest, low)  # most tokens are banned, say: all that can win may find room
    step = tl.full((), 0, tl.int32)
    while (held > most) & (count > AT_ONCE) & (step < 32):
        middle = 0.5 * low + 0.5 * high
        reach = tops >= middle
        weighs = tl.sum(tl.where(reach, weight, 0.0), 0)
        enough = weighs >= want
        count = tl.where(enough, tl.sum(reach.to(tl.int32), 0), count)
        low = tl.where(enough, middle, low)
        held = tl.where(enough, weighs, held)
        high = tl.where(enough, high, middle)
        step += 1
    return low


@triton.jit
def _lay_aside(LOGITS, LIST, FOUND, tops, cut, most, VOCAB: tl.constexpr, GROUP: tl.constexpr, ROW: tl.constexpr):
    """Puts the tokens whose logits reach `cut` into FOUND, by their ids: logits, then ids. How many there are; more than ASIDE
    where there is no room for them, or they are in more than `most` groups. `tops` [ROW] of those; LIST: room for as many."""
    g = tl.arange(0, ROW)
    hot = (tops >= cut).to(tl.int32)
    groups = tl.sum(hot, 0)
    held = tl.where(groups > most, ASIDE + 1, 0)
    if held == 0:
        tl.store(LIST + tl.cumsum(hot, 0) - 1, g, mask=hot > 0)
        tl.debug_barrier()
        for first in range(0, groups, AT_ONCE):
            i = first + tl.arange(0, AT_ONCE)
            group = tl.load(LIST + i, mask=i < groups, other=0, cache_modifier=".cg")
            v = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
            logits = tl.load(LOGITS + v, mask=(i < groups)[:, None] & (v < VOCAB), other=float("-inf"))
            reach = (logits >= cut).to(tl.int32)
            count = tl.sum(reach, 1)
            at = held + (tl.cumsum(count, 0) - count)[:, None] + tl.cumsum(reach, 1) - 1
            room = (reach > 0) & (at < ASIDE)
            tl.store(FOUND + at, logits.to(tl.int32, bitcast=True), mask=room)
            tl.store(FOUND + ASIDE + at, v, mask=room)
            held += tl.sum(count, 0)
        tl.debug_barrier()
    return held


@triton.jit
def _reached_by_exactly(s, known, count, k):
    """A value that exactly k of the `count` known s reach, or the largest that more do. k is not above `count`."""
    bits = s.to(tl.int32, bitcast=True)
    place = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    low = tl.min(tl.where(known, place, 0), 0)
    high = tl.full((), 1, tl.int32)
    held = count
    while (high - low > 1) & (held != k):
        middle = low + (high - low) // 2
        reach = tl.sum((known & (place >= middle)).to(tl.int32), 0)
        enough = reach >= k
        low = tl.where(enough, middle, low)
        held = tl.where(enough, reach, held)
        high = tl.where(enough, high, middle)
    return value_of(low)


@triton.jit
def _settle(s, v, known, k, p, floor, whole, edge, all_known, best_token, key1, key2, VOCAB: tl.constexpr):
    """(token, whether it is certain) of a row of which the tokens with s > edge are `known`; with `all_known` no other can win.

    `whole`: mass of the row, float64, where k is VOCAB.
    """
    mass = tl.where(known, tl.exp(s), 0.0).to(tl.float64)
    count = tl.sum(known.to(tl.int32), 0)
    known_mass = tl.sum(mass, 0)
    last = tl.full((), float("-inf"), tl.float32)
    total = known_mass  # with all known, the others weigh less than a sum's rounding
    if k <= count:
        last = _reached_by_exactly(s, known, count, k)
        ahead = known & (s > last)
        equal = (k - tl.sum(ahead.to(tl.int32), 0)).to(tl.float64)  # as many as k leaves room for
        total = tl.sum(tl.where(ahead, mass, 0.0), 0) + equal * tl.exp(last).to(tl.float64)
    total = tl.where(k < VOCAB, total, whole)
    limit = tl.where(p < 1, p.to(tl.float64) * total, float("inf"))
    noisy = s + gumbel(v, key1, key2)
    alive = known & (s >= last) & (s >= floor)
    s0 = tl.full((), float("-inf"), tl.float32)
    v0 = tl.full((), VOCAB, tl.int32)
    token = best_token
    key = tl.full((), _EMPTY, tl.int64)
    searching = count > 0
    while searching:
        ahead = (s > s0) | ((s == s0) & (v < v0))
        key = tl.max(tl.where(alive & ahead, race_key(noisy, v), _EMPTY), 0)
        token = winner(key)
        token = tl.where(token >= 0, token, best_token)  # nothing before the last one: the best itself is always kept
        v0 = token.to(tl.int32)
        s0 = tl.max(tl.where(known & (v == v0), s, float("-inf")), 0)
        ahead = known & ((s > s0) | ((s == s0) & (v < v0)))
        rank = tl.sum(ahead.to(tl.int32), 0)
        searching = (rank > 0) & ((rank >= k) | (tl.sum(tl.where(ahead, mass, 0.0), 0) >= limit))
    # what is not known ranks behind: is none of it kept, or beaten whatever its noise?
    settled = all_known | (k <= count) | (known_mass >= limit) | (floor > edge) | (score_of(key) >= edge + _HIGHEST_NOISE)
    weighed = (p >= 1) | (k == VOCAB) | (k <= count) | all_known
    return token, settled & weighed & (count > 0)


@triton.jit
def _decide(
    LOGITS, ROOM, temperature, k, p, min_p, SEED, POSITION,
    VOCAB: tl.constexpr, SHARE: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """(the token of a row, whether that is certain, the row's mass where it is needed); else where its best is."""
    ROW: tl.constexpr = PAD * (SHARE // GROUP)
    part = tl.arange(0, PAD)
    g = tl.arange(0, ROW)
    tops = _from_room(ROOM + g, g < PARTS * (SHARE // GROUP), float("-inf"))
    own = ROOM + 2 * ROW + part
    top = _from_room(own, part < PARTS, float("-inf"))
    at = tl.load(own + PAD, mask=part < PARTS, other=0, cache_modifier=".cg")
    key = tl.max(race_key(top, at), 0)
    token = winner(key)
    certain = (token < 0) | (temperature <= 0)
    whole = tl.full((), 0.0, tl.float64)
    if certain == 0:
        best = score_of(key)
        share = _from_room(own + 2 * PAD, part < PARTS, 0.0)
        rest = tl.where(top > float("-inf"), tl.exp((top - best) / temperature), 0.0)
        whole = tl.sum(share.to(tl.float64) * rest.to(tl.float64), 0)
        floor = tl.where(min_p > 0, tl.log(min_p), float("-inf"))
        # below this none can win; where k and p meet, the mass of those below min_p counts
        reach = tl.where((k < VOCAB) & (p < 1), _UNREACHABLE, tl.minimum(tl.maximum(floor, _UNREACHABLE), 0.0)) * temperature
        lowest = best + reach - 1e-6 * (tl.abs(best) + tl.abs(reach))
        low = lowest
        MOST: tl.constexpr = min(MOST_WANTED, VOCAB // GROUP // 2)
        if k <= MOST:
            low = _reached_by(tops, tl.full((ROW,), 1.0, tl.float32), best, k * 1.0, k * 1.125, lowest)
        elif (k == VOCAB) & (p < 1):
            want = (p + 1e-5) * whole.to(tl.float32)
            weight = tl.where(tops > float("-inf"), tl.exp((tops - best) / temperature), 0.0)
            low = _reached_by(tops, weight, best, want, want + 0.01 * whole.to(tl.float32), lowest)
        cut = low - 1e-6 * (tl.abs(best) + tl.abs(low))
        found = ROOM + 2 * ROW + 3 * PAD
        held = _lay_aside(LOGITS, ROOM + ROW, found, tops, cut, tl.where(k <= MOST, ASIDE, MOST_READ), VOCAB, GROUP, ROW)
        if held <= ASIDE:
            i = tl.arange(0, ASIDE)
            s = (_from_room(found + i, i < held, float("-inf")) - best) / temperature
            v = tl.load(found + ASIDE + i, mask=i < held, other=VOCAB, cache_modifier=".cg")
            edge = (cut - best) / temperature  # all that are above are known, of those equal perhaps not
            known = (i < held) & (s > edge)
            key1, key2 = noise_key(tl.load(SEED), tl.load(POSITION))
            drawn, certain = _settle(s, v, known, k, p, floor, whole, edge, low <= lowest, token, key1, key2, VOCAB)
            token = tl.where(certain, drawn, token)
    return token, certain, whole.to(tl.float32)


@triton.jit(do_not_specialize=["first_row"])
def filtered_sample_kernel(
    LOGITS, TEMPERATURE, TOP_K, TOP_P, MIN_P, SEED, POSITION, TOKENS, ROOM, OPEN, first_row,
    VOCAB: tl.constexpr, SHARE: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr, PAD: tl.constexpr, WORDS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A program a row. ROOM as row_tops_kernel has left it, with room for a list of groups and ASIDE tokens; OPEN as
    filtered_search_kernel takes it."""
    here = tl.program_id(0)
    row = first_row + here
    temperature, p, min_p = tl.load(TEMPERATURE + row), tl.load(TOP_P + row), tl.load(MIN_P + row)
    k = tl.load(TOP_K + row)
    k = tl.where((k > 0) & (k < VOCAB), k, VOCAB)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token, certain, mass = _decide(
        LOGITS + row.to(tl.int64) * VOCAB, ROOM + here * WORDS, temperature, k, p, min_p, SEED + row, POSITION + row,
        VOCAB, SHARE, GROUP, PARTS, PAD,
    )  # fmt: skip
    tl.store(TOKENS + row, token)
    if certain == 0:
        at = OPEN + 2 + 2 * tl.atomic_add(OPEN, 1, sem="relaxed", scope="gpu")
        tl.store(at, row)
        tl.store(at + 1, mass.to(tl.int32, bitcast=True))


class Meeting:
    """What filtered_sample's launches leave for one another; as it was between calls, which must not run at the same time.

    `programs`: how many of filtered_search's the device holds at once; too few for one row: each takes a row by itself.
    """

    def __init__(self, device: torch.device | str, programs: int) -> None:
        self.programs = programs
        self.room = torch.zeros(max(16, 16 * programs), dtype=torch.int64, device=device)
        self.count = torch.zeros(max(2, 2 * programs), dtype=torch.int32, device=device)
        self.open = torch.zeros(2 + 2 * MOST_ROWS, dtype=torch.int32, device=device)
        # programmatic dependent launch: Hopper and later
        self.pdl = self.open.is_cuda and torch.cuda.get_device_capability(self.open.device) >= (9, 0)


def search_tile(vocab: int, programs: int, share: int = SHARE) -> tuple[dict[str, int], dict[str, Any]]:
    """filtered_search's compile-time arguments, and its launch's."""
    parts = triton.cdiv(vocab, share)
    if programs < parts or parts == 1:
        block = min(2048, triton.next_power_of_2(vocab))
        tile = {"BLOCK": block, "SPAN": triton.cdiv(vocab, block) * block, "PARTS": 1, "PAD": 1, "STAGES": 4}
        return tile, {"num_warps": 8 if block >= 2048 else 4}
    block = 256 if vocab % 4 else 512  # addresses one by one take registers
    tile = {"BLOCK": min(block, share), "SPAN": share, "PARTS": parts, "PAD": triton.next_power_of_2(parts), "STAGES": 1}
    return tile, {"num_warps": 4, "maxnreg": 65536 // 128 // RESIDENT, "launch_cooperative_grid": True}


def sample_tile(vocab: int, share: int = SHARE, pdl: bool = False) -> dict[str, Any]:
    """The compile-time arguments that row_tops and filtered_sample share."""
    parts = triton.cdiv(vocab, share)
    pad = triton.next_power_of_2(parts)
    group = min(GROUP, share // 16)
    words = 2 * pad * (share // group) + 3 * pad + 2 * ASIDE.value
    tile = {"VOCAB": vocab, "SHARE": share, "GROUP": group, "PARTS": parts, "PAD": pad, "WORDS": words, "PDL": pdl}
    return tile | ({"launch_pdl": True} if pdl else {})


def filtered_sample(
    logits: torch.Tensor, sampling: SamplingBatch, meeting: Meeting | None = None, share: int = SHARE
) -> torch.Tensor:
    """Tokens i64[S] of float32 logits [S, V], contiguous, with each row's own filters; temperature 0 is greedy.

    A row whose largest logit is NaN or infinite gets token -1. `meeting` None: one for this call. `share`: tokens of one of a
    row's programs, a power of two from 16 on.
    """
    rows, vocab = logits.shape
    meeting = Meeting(logits.device, 0) if meeting is None else meeting
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    tile = sample_tile(vocab, share, meeting.pdl)
    room = torch.empty(min(rows, MOST_ROWS) * tile["WORDS"], dtype=torch.int32, device=logits.device)
    search, launch = search_tile(vocab, meeting.programs, share)
    t, k, p = sampling.temperature, sampling.top_k, sampling.top_p
    given = (logits, t, k, p, sampling.min_p, sampling.seed, sampling.position, tokens)
    for first in range(0, rows, MOST_ROWS):
        here = min(MOST_ROWS, rows - first)
        groups = here if search["PARTS"] == 1 else min(here, meeting.programs // search["PARTS"])
        row_tops_kernel[(here * tile["PARTS"],)](logits, t, k, p, room, first, **tile, **LOOKING)
        filtered_sample_kernel[(here,)](*given, room, meeting.open, first, **tile, **DECIDING)
        filtered_search_kernel[(groups * search["PARTS"],)](
            *given, meeting.open, meeting.room, meeting.count, VOCAB=vocab, **search, **launch
        )
    return tokens
