"""Timers report quantiles of what was measured; no test here depends on how fast this machine is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlab.hardware import nvml, timing
from pdlab.hardware.timing import L2Rotation, Timings, alternate, steady, summarize, time_ms


@given(st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=50))
def test_quantiles_are_numpys_and_rise(samples: list[float]) -> None:
    import numpy as np

    t = summarize(samples)
    assert t.p10 <= t.median <= t.p90
    assert [t.p10, t.median, t.p90] == pytest.approx(np.quantile(samples, [0.1, 0.5, 0.9]).tolist(), rel=1e-9)
    assert t.n == len(samples)


@given(st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=20), st.floats(1e-3, 1e9))
def test_a_rates_quantiles_rise_too(samples: list[float], amount: float) -> None:
    rate = summarize(samples).rate(amount, "TB/s")
    assert rate.p10 <= rate.median <= rate.p90
    assert rate.unit == "TB/s"


def test_every_call_is_given_the_next_set_and_the_warm_up_is_not_counted() -> None:
    rotation = L2Rotation(lambda i: (i,), bytes_per_set=100, l2_bytes=100)
    assert len(rotation) == 4  # three times the cache and one more
    seen: list[int] = []
    t = time_ms(seen.append, rotation=rotation, device="cpu", n=7, warmup=2, budget_ms=1e6)
    assert t.n == 7
    assert seen == [i % 4 for i in range(2 + 1 + 7)]  # warm-up, the call that sizes the sample, the sample


def test_a_rotation_keeps_within_its_memory_and_needs_none_without_a_cache() -> None:
    assert len(L2Rotation(lambda i: (i,), 100, l2_bytes=0)) == 1
    assert len(L2Rotation(lambda i: (i,), 2**20, l2_bytes=2**30, limit_bytes=10 * 2**20)) == 10
    assert len(L2Rotation(lambda i: (i,), 2**40, l2_bytes=2**20)) == 1


def test_a_sample_never_has_fewer_than_three_values_however_small_the_budget() -> None:
    assert time_ms(lambda: None, device="cpu", budget_ms=0.0).n == 3


def _state(reasons: int) -> nvml.GpuState:
    return nvml.GpuState("NVIDIA H200", "580", 900.0, 3201.0, 1980.0, 88.0, 700.0, 700.0, reasons)


def test_a_throttled_sample_is_taken_again_a_bounded_number_of_times_then_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing.time, "sleep", lambda s: None)
    monkeypatch.setattr(nvml, "state", lambda index=0: _state(0x20))
    monkeypatch.setattr(nvml, "_recent", {})
    calls = []
    t = steady(lambda: calls.append(1) or [1.0, 2.0, 3.0], "ms", True)  # type: ignore[func-returns-value]
    assert (t.throttled, t.status, len(calls)) == (True, "throttled", 3)


def test_a_card_that_recovers_gives_an_unmarked_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing.time, "sleep", lambda s: None)
    states = iter([_state(0x40), _state(0x4)])
    monkeypatch.setattr(nvml, "state", lambda index=0: next(states))
    monkeypatch.setattr(nvml, "_recent", {})
    t = steady(lambda: [1.0], "ms", True)
    assert (t.throttled, t.status) == (False, "ok")


def test_rivals_take_turns_and_the_middle_round_counts() -> None:
    order: list[str] = []
    values = {"a": iter([5.0, 1.0, 3.0]), "b": iter([2.0, 9.0, 2.5])}

    def measure(name: str) -> Timings:
        order.append(name)
        v = next(values[name])
        return Timings(v, v, v, 1)

    got = alternate({"a": lambda: measure("a"), "b": lambda: measure("b")}, rounds=3)
    assert order == ["a", "b"] * 3
    assert (got["a"].median, got["b"].median) == (3.0, 2.5)


def test_a_throttled_round_counts_only_if_all_are() -> None:
    rounds = iter([Timings(9, 9, 9, 1, throttled=True), Timings(1, 1, 1, 1), Timings(2, 2, 2, 1)])
    assert alternate({"a": lambda: next(rounds)})["a"].median == 1


@pytest.mark.gpu
def test_a_graph_of_calls_is_timed_per_call() -> None:
    import torch

    x = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)
    out = torch.empty_like(x)
    graph = timing.graph_time_us(lambda: torch.matmul(x, x, out=out), calls=20, n=5)
    events = time_ms(lambda: torch.matmul(x, x, out=out), n=20)
    assert graph.unit == "us"
    assert graph.median / 1e3 == pytest.approx(events.median, rel=0.5)  # the same work, so the same order of time


@pytest.mark.gpu
def test_a_capture_that_fails_leaves_the_stream_as_it_was() -> None:
    import torch

    here = torch.cuda.current_stream()
    with pytest.raises(RuntimeError):
        timing.graph_time_us(torch.cuda.synchronize, calls=20, n=3)
    assert torch.cuda.current_stream() == here
    x = torch.ones(64, device="cuda")
    assert timing.graph_time_us(lambda: x + 1, calls=20, n=3).median > 0, "and the next is captured"
