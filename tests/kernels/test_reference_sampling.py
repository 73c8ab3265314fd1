"""Sampling: the right distribution, the same token whatever the batch, no wait for the device."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from pdlab.kernels.ops import SampleResult, SamplingBatch
from pdlab.kernels.reference_sampling import BAD_ROW, gumbel, keep_mask, sample_from_logits, uniform

VOCAB = 37
LOGITS = torch.randn(VOCAB, generator=torch.Generator().manual_seed(5)) * 2.0


def batch(
    rows: int, *, seeds: torch.Tensor | None = None, positions: torch.Tensor | None = None, **options: Any
) -> SamplingBatch:
    """Same options in every row; seed s in row s unless given."""
    defaults = {"temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    columns = {k: torch.full((rows,), float(options.get(k, d))) for k, d in defaults.items()}
    filtered = options.get("top_k", 0) > 0 or columns["top_p"][0] < 1 or columns["min_p"][0] > 0
    return SamplingBatch(
        **columns,
        top_k=torch.full((rows,), options.get("top_k", 0), dtype=torch.int32),
        seed=torch.arange(rows) if seeds is None else seeds,
        position=torch.zeros(rows, dtype=torch.int64) if positions is None else positions,
        seen=options.get("seen"),
        any_random=bool(columns["temperature"][0] > 0),
        any_filter=bool(filtered),
        num_logprobs=options.get("num_logprobs", -1),
    )


def exact_distribution(
    logits: torch.Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> list[float]:
    """Probabilities by the definitions, in plain Python floats: sort, cut, renormalize."""
    top = max(logits.tolist())
    weights = [math.exp((x - top) / temperature) for x in logits.tolist()]
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))[: top_k or None]
    total, before, kept = sum(weights[i] for i in order), 0.0, []
    for i in order:
        if before < top_p and weights[i] >= min_p:
            kept.append(i)
        before += weights[i] / total
    mass = sum(weights[i] for i in kept)
    return [weights[i] / mass if i in kept else 0.0 for i in range(len(weights))]


OPTIONS: dict[str, dict[str, Any]] = {
    "temperature 1": {"temperature": 1.0},
    "temperature 0.6": {"temperature": 0.6},
    "temperature 3": {"temperature": 3.0},
    "top-k 5": {"temperature": 1.3, "top_k": 5},
    "top-k 1": {"temperature": 1.3, "top_k": 1},
    "top-p 0.7": {"temperature": 1.0, "top_p": 0.7},
    "min-p 0.1": {"temperature": 1.5, "min_p": 0.1},
    "all three": {"temperature": 2.0, "top_k": 20, "top_p": 0.9, "min_p": 0.08},
}


@pytest.mark.parametrize("vary", ["seeds", "positions"])
@pytest.mark.parametrize("name", OPTIONS)
def test_tokens_follow_the_exact_distribution(name: str, vary: str) -> None:
    """Chi-square over 40,000 draws; seeds are fixed, so this passes always or never. The limit is 5 standard deviations."""
    draws = 40_000
    many = torch.arange(draws)
    keys = {"seeds": many, "positions": None} if vary == "seeds" else {"seeds": torch.full((draws,), 11), "positions": many}
    tokens = sample_from_logits(LOGITS.expand(draws, -1), batch(draws, **keys, **OPTIONS[name])).tokens
    counts = torch.bincount(tokens, minlength=VOCAB).double()
    expected = torch.tensor(exact_distribution(LOGITS, **OPTIONS[name]), dtype=torch.float64) * draws
    assert counts[expected == 0].sum() == 0, "a token outside the filters was drawn"
    common = expected >= 5  # the rest goes into one cell, as the approximation needs
    cells = torch.cat([counts[common], counts[~common].sum()[None]])
    means = torch.cat([expected[common], expected[~common].sum()[None]])
    cells, means = cells[means > 0], means[means > 0]
    freedom = len(means) - 1
    chi_square = ((cells - means).square() / means).sum()
    assert chi_square <= freedom + 5 * math.sqrt(2 * max(freedom, 1))


def test_a_row_samples_the_same_token_in_any_batch() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(23, 501, generator=generator) * 3
    options = batch(23, temperature=1.1, top_k=60, top_p=0.95, seeds=torch.arange(23) * 977, positions=torch.arange(23) + 3)
    together = sample_from_logits(logits, options).tokens

    def pick(rows: torch.Tensor) -> torch.Tensor:
        chosen = {k: v[rows] if isinstance(v, torch.Tensor) else v for k, v in vars(options).items()}
        return sample_from_logits(logits[rows], SamplingBatch(**chosen)).tokens

    shuffled = torch.randperm(23, generator=generator)
    assert torch.equal(pick(shuffled), together[shuffled])
    assert torch.equal(torch.cat([pick(torch.tensor([i])) for i in range(23)]), together)
    assert len(set(together.tolist())) > 15, "rows should differ"


def test_greedy_and_random_rows_share_a_batch() -> None:
    options = batch(6, temperature=0.8)
    options.temperature = torch.tensor([0.0, 0.8, 0.0, 0.8, 0.8, 0.0])
    tokens = sample_from_logits(LOGITS.expand(6, -1), options).tokens
    alone = sample_from_logits(LOGITS.expand(6, -1), batch(6, temperature=0.8)).tokens
    assert (tokens[[0, 2, 5]] == LOGITS.argmax()).all()
    assert torch.equal(tokens[[1, 3, 4]], alone[[1, 3, 4]])


def test_ties_go_to_the_lowest_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 2.0]])
    assert sample_from_logits(logits, batch(1)).tokens.tolist() == [1]
    keep = keep_mask(logits - 3.0, torch.tensor([2]), torch.tensor([1.0]), torch.tensor([0.0]))
    assert keep.tolist() == [[False, True, True, False, False]]


def test_a_tiny_temperature_is_greedy_and_never_overflows() -> None:
    logits = torch.tensor([[-1e4, 80.0, 79.9, -torch.inf]])
    for temperature in (1e-3, 1e-30):
        assert sample_from_logits(logits, batch(1, temperature=temperature)).tokens.tolist() == [1]


def test_filters_do_not_depend_on_being_cut_into_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(9, 64, generator=torch.Generator().manual_seed(2)) * 4
    options = batch(9, temperature=1.0, top_k=30, top_p=0.8)
    whole = sample_from_logits(logits, options).tokens
    monkeypatch.setattr("pdlab.kernels.reference_sampling._FILTER_ELEMENTS", 130)
    assert torch.equal(sample_from_logits(logits, options).tokens, whole)


def test_repetition_penalty_makes_seen_tokens_less_likely_and_leaves_others() -> None:
    logits = torch.tensor([[2.0, 1.9, -1.0, -1.1], [2.0, 1.9, -1.0, -1.1]])
    seen = torch.tensor([[True, False, False, False], [True, True, False, False]])
    options = batch(2, repetition_penalty=2.0, seen=seen)
    assert sample_from_logits(logits, options).tokens.tolist() == [1, 0]
    only_negative = sample_from_logits(
        -torch.ones(1, 3), batch(1, repetition_penalty=1.5, seen=torch.tensor([[True, True, False]]))
    )
    assert only_negative.tokens.tolist() == [2]


def test_logprobs_are_the_models_own_whatever_the_filters() -> None:
    rows = 3
    seen = torch.zeros(rows, VOCAB, dtype=torch.bool)
    seen[:, :9] = True
    options = batch(rows, temperature=2.0, top_k=4, repetition_penalty=1.4, seen=seen, num_logprobs=6)
    result = sample_from_logits(LOGITS.expand(rows, -1), options)
    want = LOGITS.double().log_softmax(-1)
    assert result.logprob is not None
    assert result.top_ids is not None
    assert result.top_logprobs is not None
    torch.testing.assert_close(result.logprob.double(), want[result.tokens], atol=1e-6, rtol=0)
    assert result.top_ids.tolist() == [want.argsort(descending=True)[:6].tolist()] * rows
    torch.testing.assert_close(result.top_logprobs[0].double(), want[result.top_ids[0]], atol=1e-6, rtol=0)
    none = sample_from_logits(LOGITS.expand(1, -1), batch(1, num_logprobs=0))
    assert none.logprob is not None
    assert none.top_ids is not None
    assert none.top_ids.shape == (1, 0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_finite_maximum_is_marked_and_harms_no_other(bad: float, temperature: float) -> None:
    logits = LOGITS.repeat(4, 1)
    logits[1, 20] = bad
    logits[2] = -torch.inf
    options = batch(4, temperature=temperature, num_logprobs=1)
    tokens = sample_from_logits(logits, options).tokens
    clean = sample_from_logits(LOGITS.repeat(4, 1), options).tokens
    assert tokens[[1, 2]].tolist() == [BAD_ROW, BAD_ROW]
    assert torch.equal(tokens[[0, 3]], clean[[0, 3]])


def scalar_uniform(seed: int, position: int, token: int) -> float:
    """The documented formula on unsigned Python integers, as a kernel would write it."""
    w64, w32 = (1 << 64) - 1, (1 << 32) - 1

    def split(z: int) -> int:
        z = (z + 0x9E3779B97F4A7C15) & w64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & w64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & w64
        return z ^ (z >> 31)

    def mix(x: int) -> int:
        x = (x ^ (x >> 16)) * 0x7FEB352D & w32
        x = (x ^ (x >> 15)) * 0x846CA68B & w32
        return x ^ (x >> 16)

    key = split((split(seed & w64) + position) & w64)
    h = mix(mix((token + key) & w32) ^ (key >> 32))
    return min((h + 0.5) * 2.0**-32, 1 - 2.0**-24)


def test_noise_is_the_documented_hash() -> None:
    seeds, positions = torch.tensor([0, 1, -7, 2**62 + 12345]), torch.tensor([0, 5, 8191, 3])
    got = uniform(seeds, positions, 1000)
    for row, (seed, position) in enumerate(zip(seeds.tolist(), positions.tolist(), strict=True)):
        for token in (0, 1, 2, 511, 999):
            assert got[row, token].item() == pytest.approx(scalar_uniform(seed, position, token), rel=2**-23)


def test_noise_is_gumbel_and_independent_between_rows_and_neighbours() -> None:
    noise = gumbel(torch.arange(64) // 8, torch.arange(64) % 8, 4096).double()
    n = noise.numel()
    assert noise.isfinite().all()
    assert abs(noise.mean() - 0.5772156649) < 5 * math.sqrt(math.pi**2 / 6 / n)
    assert abs(noise.var() - math.pi**2 / 6) < 5 * math.sqrt(4.4 * (math.pi**2 / 6) ** 2 / n)  # kurtosis 5.4
    for p in (1e-4, 0.01, 0.5, 0.99, 0.9999):  # tails: P(g <= x) = exp(-exp(-x))
        share = float((noise <= -math.log(-math.log(p))).double().mean())
        assert abs(share - p) < 5 * math.sqrt(p * (1 - p) / n)
    rank = noise - noise.mean()
    for shifted in (rank.roll(1, 0), rank.roll(1, 1), rank.roll(8, 0), rank.flip(1)):
        assert abs((rank * shifted).mean() / rank.var()) < 5 / math.sqrt(n)


@pytest.mark.gpu
def test_tokens_are_the_same_on_the_gpu_and_nothing_waits() -> None:
    logits = torch.randn(17, 50_001, generator=torch.Generator().manual_seed(3)) * 3
    options = batch(17, temperature=0.9, top_k=400, top_p=0.9, min_p=1e-3, num_logprobs=2)
    want = sample_from_logits(logits, options)
    on_gpu = SamplingBatch(**{k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in vars(options).items()})
    device_logits = logits.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got: SampleResult = sample_from_logits(device_logits, on_gpu)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(got.tokens.cpu(), want.tokens)
