"""Generators: seeds reproduce every arrival, and what was published of the Azure traces is met."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdlab.core.errors import WorkloadError
from pdlab.workloads import generators as g
from pdlab.workloads.workload import Item, Workload

ARRIVALS = {
    "poisson": g.poisson(5.0),
    "gamma": g.gamma(5.0, 2.0),
    "steady": g.steady(5.0),
    "on_off": g.on_off(10.0, 3.0, 3.0),
    "hyperexponential": g.hyperexponential(5.0, 4.0, 0.05),
}
MAKERS = {
    "conversation": lambda seed: g.azure_conversation(200, seed=seed),
    "code": lambda seed: g.azure_code(200, seed=seed),
    "long": lambda seed: g.chat_with_long(200, rate=3, long_share=0.1, seed=seed),
    "prefixes": lambda seed: g.shared_prefixes(200, rate=3, prompts=g.uniform(1, 9), outputs=g.fixed(3), seed=seed),
    "grower": lambda seed: g.sudden_grower(
        200, rate=3, grower_at=7, grower_tokens=999, prompts=g.lognormal(50, 1, 500), outputs=g.fixed(3), seed=seed
    ),
    "starving": lambda seed: g.starving_long(200, rate=3, seed=seed),
    "closed": lambda seed: g.closed_loop(5, 200, prompts=g.uniform(1, 9), outputs=g.uniform(1, 9), seed=seed),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_seed_reproduces_every_request_and_another_seed_does_not(name):
    make = MAKERS[name]
    assert make(3).items == make(3).items
    assert make(3).items != make(4).items


# Tolerances of the fit: mean 2 %, p50, p90, p99 1 % or one token. They hold the sampling error of 100,000 draws (the mean
# of a heavy tail wanders most) and the rounding to whole tokens; the fitted function itself has the moments exactly.
@pytest.mark.parametrize(
    ("make", "prompt", "output", "rate", "cv"),
    [
        (g.azure_conversation, (1155, 1020, 2734, 4142), (211, 129, 424, 601), 5.53, 1.09),
        (g.azure_code, (2048, 1469, 5188, 7436), (27.9, 13, 55, 251), 2.57, 13.2),
    ],
)
def test_azure_generators_have_the_published_moments(make, prompt, output, rate, cv):
    items = make(100_000, seed=11).items
    for got, want in ((np.array([i.prompt_tokens for i in items]), prompt), (np.array([i.max_tokens for i in items]), output)):
        assert got.mean() == pytest.approx(want[0], rel=0.02)
        assert np.percentile(got, [50, 90, 99]) == pytest.approx(want[1:], rel=0.01, abs=1)
        assert got.min() >= 1
    gaps = np.diff([i.arrival_s for i in items])
    # a coefficient of variation of 13 converges slowly: 270 long pauses in 100,000 gaps
    assert 1 / gaps.mean() == pytest.approx(rate, rel=0.02 if cv < 2 else 0.15)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.02 if cv < 2 else 0.15)


@pytest.mark.parametrize("name", ARRIVALS)
def test_arrivals_rise_and_have_their_rate(name):
    times = ARRIVALS[name](np.random.default_rng(5), 20_000)
    assert np.all(np.diff(times) >= 0)
    assert len(times) / times[-1] == pytest.approx(5.0, rel=0.1)  # 20,000 gaps, the burstiest with variation 4: 3 % sd


def test_on_off_leaves_gaps_that_poisson_does_not():
    rng = np.random.default_rng
    gaps = np.diff(g.on_off(100.0, 1.0, 5.0)(rng(1), 5000))
    assert (gaps > 1.0).sum() > 10
    assert np.diff(g.poisson(100.0)(rng(1), 5000)).max() < 0.5


@given(
    q=st.lists(st.integers(1, 5000), min_size=5, max_size=5).map(sorted),
    share=st.floats(0.05, 0.95),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=60, deadline=None)
def test_quantile_fits_meet_mean_and_quantiles_wherever_they_are_possible(q, share, seed):
    least, p50, p90, p99, most = q
    u, knots = np.array([0, 0.5, 0.9, 0.99, 1]), np.array(q, float)
    floor, spread = np.diff(u) @ knots[:-1], np.diff(u) @ np.diff(knots)
    if spread == 0:
        return
    mean = floor + share * spread
    got = g.quantiles(mean, p50, p90, p99, most, least)(np.random.default_rng(seed), 20_000)
    assert got.min() >= 1
    assert got.max() <= most
    sd = got.std() / np.sqrt(len(got))
    assert got.mean() == pytest.approx(mean, abs=6 * sd + 0.5)  # six standard errors, and half a token of rounding
    assert ((got < p50).mean()) <= 0.5 + 0.03
    assert ((got > p50).mean()) <= 0.5 + 0.03


def test_streams_need_no_list_and_agree_with_workloads_when_drawn_in_one_block():
    args = (g.poisson(2.0), g.uniform(1, 50), g.fixed(4))
    assert tuple(g.stream(300, *args, seed=9, block=300)) == g.make("w", 300, *args, seed=9).items
    times = [i.arrival_s for i in g.stream(1000, *args, seed=9, block=64)]
    assert times == sorted(times)
    assert len(times) == 1000


def test_longest_bounds_prompt_plus_output():
    for item in g.azure_conversation(2000, seed=2, longest=512):
        assert item.prompt_tokens >= 1
        assert item.prompt_tokens + item.max_tokens <= 512


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: g.poisson(0),
        lambda: g.poisson(float("nan")),
        lambda: g.gamma(1, -1),
        lambda: g.hyperexponential(1, 0.5, 0.1),
        lambda: g.hyperexponential(1, 4, 2.0),
        lambda: g.uniform(0, 5),
        lambda: g.quantiles(10, 20, 30, 40, 50),  # half of all are at least 20, yet the mean would be 10
        lambda: g.quantiles(25, 30, 20, 40, 50),
        lambda: g.make("w", 0, g.all_at_once(), g.fixed(1), g.fixed(1)),
        lambda: g.chat_with_long(5, rate=1, long_share=1.5),
        lambda: g.sudden_grower(5, rate=1, grower_at=5, grower_tokens=9, prompts=g.fixed(1), outputs=g.fixed(1)),
        lambda: Workload("w", [], clients=0),
        lambda: Item(-1.0, prompt_tokens=1),
        lambda: Item(float("inf"), prompt_tokens=1),
        lambda: Item(0.0),
        lambda: Item(0.0, prompt_tokens=5, pieces=((1, 6),)),
        lambda: Item(0.0, prompt_tokens=5, pieces=((1, -6),)),
        lambda: Item(0.0, prompt_tokens=5, pieces=((1, "2"),)),
        lambda: Item(0.0, prompt_tokens=5, pieces=3),
        lambda: Item(0.0, prompt_tokens="5"),
        lambda: Item(0.0, prompt_tokens=5.5),
        lambda: Item(0.0, prompt_tokens=True),
        lambda: Item("0", prompt_tokens=5),
        lambda: Item(None, prompt_tokens=5),
        lambda: Item(float("nan"), prompt_tokens=5),
        lambda: g.ties(3).scaled(0),
    ],
)
def test_impossible_parameters_are_refused_with_a_hint(wrong):
    with pytest.raises(WorkloadError) as e:
        wrong()
    assert e.value.hint


def test_scaling_keeps_requests_and_changes_only_their_times():
    w = g.azure_conversation(50, seed=1)
    twice = w.scaled(2.0)
    assert [i.arrival_s * 2 for i in twice] == pytest.approx([i.arrival_s for i in w])
    assert [i.max_tokens for i in twice] == [i.max_tokens for i in w]
