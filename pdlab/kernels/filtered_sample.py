"""Sampling from float32 logits with top-k, top-p and min-p, one program a row; the second stage of projection_sample.

    s = (l - max l) / T,   keep: rank < k,  mass before < p * mass of what k left,  s >= log(min_p),   argmax of s + noise

What is kept is a beginning of the tokens ordered by s (equal s: lowest id first), so nothing needs sorting:

  - the candidate is the best s + noise of all; whether it is kept follows from the number and the mass of the tokens before
    it, one pass. If it is not, no token behind it is either, and the next candidate is the best before it: a rejection cuts
    away about half of what is left.
  - top-k would reject most candidates of a flat row, and with top-p the mass of the k best is needed: so first a value that
    exactly the k best reach is searched, among the floats in their order, by eight pivots a pass.

Bytes: a row of logits a pass, 4 V, from L2; 128256 tokens 0.5 MB. Bound: one multiprocessor's L2 bandwidth a row.

Oracle: reference_sampling.sample_from_logits, up to the rounding of sums. Twin for the interpreter: this kernel itself.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pdlab.kernels.ops import SamplingBatch
from pdlab.kernels.projection_sample import gumbel, noise_key, race_key, winner


@triton.jit
def _scaled(LOGITS, v, best, temperature, VOCAB: tl.constexpr):
    """s of the tokens v; -inf past the end."""
    return (tl.load(LOGITS + v, mask=v < VOCAB, other=float("-inf")) - best) / temperature


@triton.jit
def _ordered(s):
    """int32 that orders like the float (which is at most 0, and not NaN): 0 is the largest, more negative is smaller."""
    bits = s.to(tl.int32, bitcast=True)
    return tl.where(bits == 0, 0, bits ^ 0x7FFFFFFF)


@triton.jit
def _best(LOGITS, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The largest logit, as a key of the race: NaN counts as largest."""
    top = tl.full((BLOCK,), -(1 << 63), tl.int64)
    for first in tl.range(0, VOCAB, BLOCK, num_stages=4):
        v = first + tl.arange(0, BLOCK)
        top = tl.maximum(top, race_key(tl.load(LOGITS + v, mask=v < VOCAB, other=float("-inf")), v))
    return tl.max(top, 0)


@triton.jit
def _before(LOGITS, best, temperature, s0, v0, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """How many tokens rank before (s0, v0), and their mass."""
    count = tl.zeros((BLOCK,), tl.int32)
    mass = tl.zeros((BLOCK,), tl.float32)
    for first in tl.range(0, VOCAB, BLOCK, num_stages=4):
        v = first + tl.arange(0, BLOCK)
        s = _scaled(LOGITS, v, best, temperature, VOCAB)
        ahead = (s > s0) | ((s == s0) & (v < v0))
        count += ahead.to(tl.int32)
        mass += tl.where(ahead, tl.exp(s), 0.0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _value(ordered):
    """The float that _ordered made this of."""
    return tl.where(ordered == 0, 0, ordered ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _cut(LOGITS, best, temperature, k, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """A t that k tokens reach: the largest with at least k of s >= t, or any with exactly k.

    Eight pivots a pass over the order of floats. The first pass splits by magnitude; from then on a ninth of what is left
    remains, and soon no second token lies in it: with distinct s a handful of passes, with many equal ones ten.
    """
    low = tl.full((), -(1 << 31), tl.int64)  # count(s >= low) >= k always; count(s >= high) < k
    high = tl.full((), 1, tl.int64)
    held = tl.full((), VOCAB, tl.int32)  # count(s >= low)
    step = tl.arange(0, 8)
    pivot = _ordered(-0.5 * (1 << step).to(tl.float32)).to(tl.int64)
    while (high - low > 1) & (held != k):
        count = tl.zeros((8, BLOCK), tl.int32)
        bound = pivot.to(tl.int32)[:, None]
        for first in tl.range(0, VOCAB, BLOCK, num_stages=4):
            s = _scaled(LOGITS, first + tl.arange(0, BLOCK), best, temperature, VOCAB)
            count += (_ordered(s)[None, :] >= bound).to(tl.int32)
        counts = tl.sum(count, 1)
        enough = (counts >= k) & (pivot < high)
        high = tl.minimum(high, tl.min(tl.where((counts < k) & (pivot < high), pivot, high), 0))
        held = tl.minimum(held, tl.min(tl.where(enough, counts, held), 0))
        low = tl.maximum(low, tl.max(tl.where(enough, pivot, low), 0))
        pivot = tl.minimum(low + (step + 1) * ((high - low + 8) // 9), high)
        pivot = tl.minimum(pivot, 0)  # fits 32 bits; the 1 above all is never asked for
    return _value(low.to(tl.int32))


@triton.jit
def _candidate(
    LOGITS, best, temperature, key1, key2, floor, s0, v0, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The best s + noise among tokens that rank before (s0, v0) and are not below `floor`."""
    top = tl.full((BLOCK,), -(1 << 63), tl.int64)
    for first in tl.range(0, VOCAB, BLOCK, num_stages=4):
        v = first + tl.arange(0, BLOCK)
        s = _scaled(LOGITS, v, best, temperature, VOCAB)
        keep = ((s > s0) | ((s == s0) & (v < v0))) & (s >= floor) & (v < VOCAB)
        top = tl.maximum(top, tl.where(keep, race_key(s + gumbel(v, key1, key2), v), -(1 << 63)))
    return tl.max(top, 0)


@triton.jit
def filtered_sample_kernel(
    LOGITS, TEMPERATURE, TOP_K, TOP_P, MIN_P, SEED, POSITION, TOKENS, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    LOGITS += row.to(tl.int64) * VOCAB
    key = _best(LOGITS, VOCAB, BLOCK)
    token = winner(key)
    temperature = tl.load(TEMPERATURE + row)
    if (token >= 0) & (temperature > 0):
        best_token = token
        best = tl.load(LOGITS + token)
        k, p, min_p = tl.load(TOP_K + row), tl.load(TOP_P + row), tl.load(MIN_P + row)
        k = tl.where((k > 0) & (k < VOCAB), k, VOCAB)
        key1, key2 = noise_key(tl.load(SEED + row), tl.load(POSITION + row))
        floor = tl.where(min_p > 0, tl.log(min_p), float("-inf"))
        s0 = tl.full((), float("-inf"), tl.float32)
        v0 = tl.full((), VOCAB, tl.int32)
        if k < VOCAB:
            s0 = _cut(LOGITS, best, temperature, k, VOCAB, BLOCK // 4)
        mass = tl.full((), 0.0, tl.float32)
        if p < 1:
            ahead, mass = _before(LOGITS, best, temperature, s0, 0, VOCAB, BLOCK)
            mass += (k - ahead).to(tl.float32) * tl.exp(s0)  # of those equal to s0 as many as k leaves room for
        searching = k > 0
        while searching:
            token = winner(_candidate(LOGITS, best, temperature, key1, key2, floor, s0, v0, VOCAB, BLOCK))
            token = tl.where(token >= 0, token, best_token)  # nothing before the last one: the best itself is always kept
            s0 = (tl.load(LOGITS + token) - best) / temperature
            v0 = token.to(tl.int32)
            rank, before = _before(LOGITS, best, temperature, s0, v0, VOCAB, BLOCK)
            searching = (rank > 0) & ((rank >= k) | ((p < 1) & (before >= p * mass)))
    tl.store(TOKENS + row, token)


def filtered_sample(logits: torch.Tensor, sampling: SamplingBatch) -> torch.Tensor:
    """Tokens i64[S] of float32 logits [S, V], contiguous, with each row's own filters; temperature 0 is greedy."""
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    block = min(4096, triton.next_power_of_2(vocab))
    filtered_sample_kernel[(rows,)](
        logits, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed, sampling.position, tokens,
        VOCAB=vocab, BLOCK=block, num_warps=16 if block >= 2048 else 4,
    )  # fmt: skip
    return tokens
