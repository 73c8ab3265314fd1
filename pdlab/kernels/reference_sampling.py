"""Sampling from logits, in plain PyTorch: the oracle of every sampling kernel.

    l   <- repetition penalty(logits)
    s   <- (l - max l) / temperature
    keep: top-k, then top-p within what top-k left, and min-p (a share of the most likely token's probability)
    token = argmax over kept v of  s[v] + g(seed, position, v),      g = -log(e),  e = -log(1 - u)   (Gumbel trick)

The noise is a hash of (seed, position, token id) and nothing else, so a row's token depends on that row's logits alone:
not on its neighbours, its place in the batch, or the device.

    key  = splitmix64(splitmix64(seed) + position)           two 32-bit words k1 (low), k2 (high)
    h    = mix32(mix32(v + k1) ^ k2)                         mix32: xor-shift and multiply, all modulo 2^32
    u    = min((h as unsigned + 0.5) * 2^-32, 1 - 2^-24)     float32

e must be exact where it is small (small e wins the race): with w = 1 - u, e = log(w) * u / (w - 1), or u where w is 1.
"""

from __future__ import annotations

import torch

from pdlab.kernels.ops import SampleResult, SamplingBatch

BAD_ROW = -1  # the token of a row whose largest logit is NaN or infinite
_FILTER_ELEMENTS = 1 << 23  # logits sorted at once; bounds the memory of the float64 sums


def _signed(x: int, bits: int) -> int:
    return x - (1 << bits) if x >> (bits - 1) else x


def _splitmix64(z: torch.Tensor) -> torch.Tensor:
    """The 64-bit finalizer of SplitMix, on i64 with wrap-around."""
    z = z + _signed(0x9E3779B97F4A7C15, 64)
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _signed(0xBF58476D1CE4E5B9, 64)
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _signed(0x94D049BB133111EB, 64)
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def _mix32(x: torch.Tensor) -> torch.Tensor:
    """A bijection of 32 bits with little bias, on i32 with wrap-around (shifts made logical by a mask)."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * _signed(0x7FEB352D, 32)
    x = (x ^ ((x >> 15) & 0x1FFFF)) * _signed(0x846CA68B, 32)
    return x ^ ((x >> 16) & 0xFFFF)


def uniform(seed: torch.Tensor, position: torch.Tensor, vocab: int) -> torch.Tensor:
    """f32[S, vocab] in (0, 1), a function of (seed[s], position[s], token id)."""
    key = _splitmix64(_splitmix64(seed) + position)
    k1, k2 = key.to(torch.int32)[:, None], (key >> 32).to(torch.int32)[:, None]
    token = torch.arange(vocab, dtype=torch.int32, device=seed.device)
    h = _mix32(_mix32(token + k1) ^ k2)
    unsigned = h.to(torch.int64) & 0xFFFFFFFF
    return ((unsigned.float() + 0.5) * 2.0**-32).clamp(max=1.0 - 2.0**-24)


def gumbel(seed: torch.Tensor, position: torch.Tensor, vocab: int) -> torch.Tensor:
    """Standard Gumbel noise f32[S, vocab]; see the module's formula."""
    u = uniform(seed, position, vocab)
    w = 1.0 - u
    e = torch.where(w == 1.0, u, torch.log(w) * u / (w - 1.0))
    return -torch.log(e)


def penalize(logits: torch.Tensor, seen: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
    """Divides positive and multiplies negative logits of seen tokens by the row's penalty."""
    p = penalty[:, None]
    return torch.where(seen, torch.where(logits > 0, logits / p, logits * p), logits)


def keep_mask(scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Which tokens may be sampled, bool[S, V]; `scaled` has a maximum of 0 in each row. Equal logits: lowest id first.

    top-p keeps the fewest most likely tokens whose probabilities (after top-k, renormalized) reach p. Sums are float64 so
    that where the set ends does not depend on the order in which a device adds.
    """
    rows, vocab = scaled.shape
    if rows * vocab > _FILTER_ELEMENTS and rows > 1:
        step = max(1, _FILTER_ELEMENTS // vocab)
        parts = [slice(i, i + step) for i in range(0, rows, step)]
        return torch.cat([keep_mask(scaled[s], top_k[s], top_p[s], min_p[s]) for s in parts])
    ordered, ids = torch.sort(scaled, dim=-1, descending=True, stable=True)
    rank = torch.arange(vocab, device=scaled.device)
    k, p = top_k[:, None], top_p[:, None].double()
    keep = (k <= 0) | (rank < k)
    mass = torch.where(keep, ordered.double().exp(), 0.0)
    before = mass.cumsum(-1) - mass
    keep &= (p >= 1.0) | (before < p * mass.sum(-1, keepdim=True))
    keep &= (ordered >= min_p[:, None].log()) | (min_p[:, None] <= 0)
    keep[:, 0] = True
    return torch.empty_like(keep).scatter_(1, ids, keep)


def sample_from_logits(logits: torch.Tensor, sampling: SamplingBatch) -> SampleResult:
    """Tokens (and log-probabilities) for float32 logits [S, V]; never waits for the device.

    A row whose largest logit is NaN or infinite gets BAD_ROW: the model failed for it, and only for it.
    """
    model_logits = logits
    if sampling.seen is not None:
        logits = penalize(logits, sampling.seen, sampling.repetition_penalty)
    best = logits.amax(-1, keepdim=True)
    tokens = logits.argmax(-1)
    if sampling.any_random:
        random = sampling.temperature > 0
        scaled = (logits - best) / torch.where(random, sampling.temperature, 1.0)[:, None]
        score = scaled + gumbel(sampling.seed, sampling.position, logits.shape[1])
        if sampling.any_filter:
            keep = keep_mask(scaled, sampling.top_k, sampling.top_p, sampling.min_p)
            score = score.masked_fill(~keep, -torch.inf)
        tokens = torch.where(random, score.argmax(-1), tokens)
    result = SampleResult(torch.where(best[:, 0].isfinite(), tokens, BAD_ROW))
    if sampling.num_logprobs >= 0:
        logprobs = model_logits.log_softmax(-1)
        result.logprob = logprobs.gather(1, tokens[:, None])[:, 0]
        top = logprobs.topk(min(sampling.num_logprobs, logits.shape[1]), dim=-1)
        result.top_logprobs, result.top_ids = top.values, top.indices
    return result
