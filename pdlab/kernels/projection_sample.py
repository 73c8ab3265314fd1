"""Final norm, output projection and sampling in one pass over the vocabulary, without writing the logits.

    l[v] = W[v] . norm(x),     token = argmax over v of  l[v]                              (temperature 0)
                                                     or  l[v] / T + g(seed, position, v)   (Gumbel trick)

An argmax of tiles is the argmax of their argmaxes, so logits and noise never leave the registers: each program sends its
best as one 64-bit atomic maximum a row, score in the upper half and the complement of the token in the lower, so that equal
scores go to the lowest id whatever the order of arrival. The last program to finish decodes the winners. The noise is the
hash of reference_sampling: (seed, position, token id), nothing else.

Bytes: W once, V H itemsize. Bound: bandwidth. 128256 x 4096 in bf16: 1.05 GB, 227 us at 4.63 TB/s.

Filters, penalties and log-probabilities need more than the best: for them the same kernel writes float32 logits instead.

Oracle: reference.ReferenceOps.projection_sample. Twin for the interpreter: this kernel itself (fp16, fp32).
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

from pdlab.kernels.ops import HeadWeights, SamplingBatch
from pdlab.kernels.product_tiles import ProductTile, columns_of
from pdlab.kernels.products import LAYER, PLAIN, RMS, constants, descriptors, products

LOGITS, GREEDY, RANDOM = 0, 1, 2  # what is made of the products
_LOGITS, _RANDOM = tl.constexpr(LOGITS), tl.constexpr(RANDOM)
EMPTY = -(1 << 63)  # below the key of any score
_EMPTY = tl.constexpr(EMPTY)
MAX_SAMPLED = 256  # rows of one launch
_MOST = tl.constexpr(MAX_SAMPLED)
_ONE_INSTRUCTION = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")  # the interpreter knows no assembly


@triton.jit
def _mix32(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _splitmix64(z):
    z = z + 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def noise_key(seed, position):
    """Two words a row from which the noise of all its tokens follows."""
    key = _splitmix64(_splitmix64(seed.to(tl.uint64, bitcast=True)) + position.to(tl.uint64, bitcast=True))
    return key.to(tl.uint32), (key >> 32).to(tl.uint32)


@triton.jit
def _log(x):
    """Of a positive x that is not tiny; on a GPU one instruction, within 2^-22 of the base-2 logarithm."""
    if _ONE_INSTRUCTION:
        log2 = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        log2 = tl.log2(x)
    return log2 * 0.69314718055994531


@triton.jit
def noise_hash(token, key1, key2):
    """32 random bits of a token; arguments broadcast."""
    return _mix32(_mix32(token.to(tl.uint32) + key1) ^ key2)


@triton.jit
def hash_gumbel(h):
    """Standard Gumbel noise -log(-log(1 - u)) of 32 random bits. As exact as the score it is added to, and cheap."""
    u = tl.minimum((h.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994039535522)  # 2^-32, 1 - 2^-24
    # -log(1 - u) to the last digit where it is small, since those win the race: there by its series
    series = u * (1.0 + u * (0.5 + u * (0.33333333 + u * (0.25 + u * (0.2 + u * 0.16666667)))))
    e = tl.where(u < 0.0625, series, -_log(1.0 - u))
    return -_log(e)


@triton.jit
def gumbel(token, key1, key2):
    return hash_gumbel(noise_hash(token, key1, key2))


@triton.jit
def contest(temperature, key, real):
    """(slope, offset): a score of the row may win only where  logit * slope + offset >= log2(hash), or where that is NaN.

    Noise is at most -log u, u = hash / 2^32. `key`: the best so far. Both sides carry a margin far above their rounding, and a
    row of temperature 0 lets in whatever is not clearly below its best.
    """
    best = score_of(key)
    hot = temperature > 0
    bar = (best - 0.01 - tl.abs(best) * 2e-6) * 1.4426950408889634
    slope = tl.where(hot, 1.4426950408889634 / tl.maximum(temperature, 1e-6), 1024.0)
    offset = tl.where(hot, 32.0 - bar, 40.0 + tl.abs(best) * 0.001 - 1024.0 * best)
    return tl.where(real, slope, 0.0), tl.where(real, offset, float("-inf"))


@triton.jit
def room(logits, h, slope, offset):
    """Not below 0 where a score may win; see contest."""
    hashed = h.to(tl.float32)
    if _ONE_INSTRUCTION:
        log2 = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [hashed], dtype=tl.float32, is_pure=True, pack=1)
    else:
        log2 = tl.log2(hashed)
    return logits * slope + offset - log2


@triton.jit
def _largest(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def any_room(x):
    """Whether an element of [n, m] is not below 0; NaN is not."""
    if _ONE_INSTRUCTION:
        best = tl.reduce(tl.reduce(x, 1, _largest), 0, _largest)
    else:  # the interpreter walks through a reduction of our own element by element
        best = tl.max(tl.max(tl.where(x == x, x, float("inf")), 1), 0)
    return (best < 0) == 0


@triton.jit
def race_key(score, token):
    """int64 that orders by score, then by the lowest token; NaN above everything, so that it shows."""
    bits = tl.where(score == score, score.to(tl.int32, bitcast=True), 0x7FC00000)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)


@triton.jit
def score_of(key):
    """The score of a key; NaN of EMPTY."""
    ordered = (key >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def winner(key):
    """The token of a key, or -1 where its score is NaN or infinite."""
    score = score_of(key)
    finite = (score == score) & (tl.abs(score) != float("inf"))
    return tl.where(finite, 0x7FFFFFFF - (key & 0x7FFFFFFF), -1)


@triton.jit
def _prepare_race(TEMPERATURE, SEED, POSITION, BEST, FACTS, batch, BM: tl.constexpr, MOST: tl.constexpr):
    """What the race needs of each row, worked out by one thread for all: 64-bit products for every warp would cost as much as
    the noise. Programs write over each other: keys are the same for all, and any program's bar is one that the row has passed.
    """
    m = tl.arange(0, BM)
    real = m < batch
    key1, key2 = noise_key(tl.load(SEED + m, mask=real, other=0), tl.load(POSITION + m, mask=real, other=0))
    best = tl.load(BEST + m, mask=real, other=0, cache_modifier=".cg")
    slope, offset = contest(tl.load(TEMPERATURE + m, mask=real, other=0.0), best, real)
    tl.store(FACTS + m, key1.to(tl.int32, bitcast=True))
    tl.store(FACTS + MOST + m, key2.to(tl.int32, bitcast=True))
    tl.store(FACTS + 2 * MOST + m, slope.to(tl.int32, bitcast=True))
    tl.store(FACTS + 3 * MOST + m, offset.to(tl.int32, bitcast=True))
    tl.debug_barrier()


@triton.jit
def _enter_race(
    logits, first, rows, token, TEMPERATURE, BEST, FACTS, batch, ROWS: tl.constexpr, BM: tl.constexpr, WANT: tl.constexpr,
    MOST: tl.constexpr,
):  # fmt: skip
    """Sends the best of logits [ROWS, BM] for the activation rows from `first` on; 16 of those at a time, so that their noise
    finds room in registers, and none for rows that nobody asked for. Noise is worked out where a score may win with it."""
    if BM > 16:
        left, right = tl.split(tl.permute(tl.reshape(logits, (ROWS, 2, BM // 2)), (0, 2, 1)))
        _enter_race(left, first, rows, token, TEMPERATURE, BEST, FACTS, batch, ROWS, BM // 2, WANT, MOST)
        if first + BM // 2 < batch:
            _enter_race(right, first + BM // 2, rows, token, TEMPERATURE, BEST, FACTS, batch, ROWS, BM // 2, WANT, MOST)
    else:
        m = first + tl.arange(0, BM)
        real = m < batch
        if WANT == _RANDOM:
            key1 = tl.load(FACTS + m).to(tl.uint32, bitcast=True)
            key2 = tl.load(FACTS + MOST + m).to(tl.uint32, bitcast=True)
            slope = tl.load(FACTS + 2 * MOST + m).to(tl.float32, bitcast=True)
            offset = tl.load(FACTS + 3 * MOST + m).to(tl.float32, bitcast=True)
            h = noise_hash(rows[:, None], key1[None, :], key2[None, :])
            if any_room(room(logits, h, slope[None, :], offset[None, :])):
                temperature = tl.load(TEMPERATURE + m, mask=real, other=0.0)
                # below 1e-6 the noise is lost in rounding anyway, and the quotient must stay finite
                hot = logits * (1.0 / tl.maximum(temperature, 1e-6))[None, :] + hash_gumbel(h)
                _send_best(tl.where((temperature > 0)[None, :], hot, logits), rows, token, BEST + m, real)
        else:
            _send_best(logits, rows, token, BEST + m, real)


@triton.jit
def _send_best(score, rows, token, best_at, real):
    score = tl.where(score == score, score, float("inf"))  # NaN must show, and no comparison finds it
    best, at = tl.max(score, 0, return_indices=True)  # of equal scores the first; rows past the end repeat the last token
    tl.atomic_max(best_at, race_key(best, tl.minimum(token + at, tl.max(rows, 0))), mask=real, sem="relaxed")


@triton.jit(do_not_specialize=["batch"])
def projection_sample_kernel(
    X, NORM_W, NORM_B, W, XD, WD, TEMPERATURE, SEED, POSITION, OUT, BEST, DONE, FACTS, eps, batch,
    VOCAB: tl.constexpr,
    WANT: tl.constexpr,
    K: tl.constexpr, ROWS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, AHEAD: tl.constexpr,
    FETCH: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    token = tile * ROWS + tl.arange(0, ROWS)
    rows = tl.minimum(token, VOCAB - 1)
    m = tl.arange(0, BM)
    real = m < batch
    acc, _ = products(
        X, NORM_W, NORM_B, W, XD, WD, X, X, rows, tile, batch, eps,
        K, ROWS, BM, BK, 1, AHEAD, FETCH, NORM, PDL, STAGES, TMA,
    )  # fmt: skip
    if WANT == _LOGITS:
        at = m.to(tl.int64)[None, :] * VOCAB + token[:, None]
        tl.store(OUT + at, acc, mask=(token < VOCAB)[:, None] & real[None, :])
    else:
        if WANT == _RANDOM:
            _prepare_race(TEMPERATURE, SEED, POSITION, BEST, FACTS, batch, BM, _MOST)
        _enter_race(acc, 0, rows, tile * ROWS, TEMPERATURE, BEST, FACTS, batch, ROWS, BM, WANT, _MOST)
        tl.debug_barrier()  # every thread's maximum comes before the release below
        if tl.atomic_add(DONE, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
            won = tl.load(BEST + m, mask=real, other=0, cache_modifier=".cg")
            tl.store(OUT + m, winner(won), mask=real)
            tl.store(BEST + m, tl.full((BM,), _EMPTY, tl.int64), mask=real)  # for the next launch
            tl.store(DONE, 0)


class Race:
    """Where programs meet: the best key of each row and how many programs are done; as it was between launches."""

    def __init__(self, device: torch.device | str) -> None:
        self.best = torch.full((MAX_SAMPLED,), EMPTY, dtype=torch.int64, device=device)
        self.done = torch.zeros(1, dtype=torch.int32, device=device)
        self.facts = torch.zeros(4 * MAX_SAMPLED, dtype=torch.int32, device=device)  # of the rows, written by each launch


def project(
    x: torch.Tensor, head: HeadWeights, want: int, sampling: SamplingBatch, tile: ProductTile, race: Race,
    *, normed: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Tokens i64[S] (GREEDY, RANDOM) or float32 logits [S, V] (LOGITS) of x [S, H], contiguous, S up to MAX_SAMPLED.

    A row with a logit that is NaN or infinite gets token -1. `normed`: x has been through the norm already. Rows of
    temperature 0 are greedy under RANDOM too. `tile.split` is not used: a vocabulary has tiles enough.
    """
    if normed and x.is_cuda and torch.cuda.get_device_capability(x.device) == (9, 0):
        from pdlab.kernels import projection_sample_hopper as hopper

        if hopper.projects(x, head.proj):
            return hopper.project_hopper(x, head.proj, want, sampling, race, pdl=tile.pdl, hint=tile.hint)
    rows, k = x.shape
    vocab = head.proj.shape[0]
    columns = columns_of(rows)
    kind = PLAIN if normed else RMS if head.norm.bias is None else LAYER
    shape, dtype = ((rows, vocab), torch.float32) if want == LOGITS else ((rows,), torch.int64)
    out = torch.empty(shape, dtype=dtype, device=x.device)
    norm = head.norm
    projection_sample_kernel[(triton.cdiv(vocab, tile.rows),)](
        x, norm.weight, norm.weight if norm.bias is None else norm.bias, head.proj,
        *descriptors(x, head.proj, tile, columns), sampling.temperature, sampling.seed, sampling.position,
        out, race.best, race.done, race.facts, norm.eps, rows, VOCAB=vocab, WANT=want,
        **constants(tile, columns, k, kind),
    )  # fmt: skip
    return out
