"""The ledger's claims about attention: which rows their verdicts come from, and that other rows give another verdict."""

from __future__ import annotations

from pathlib import Path

import pytest
from ledger import GPU, of, recorder

pytestmark = pytest.mark.usefixtures("places")


def _attention(places: Path, gains: dict[int, float]) -> None:
    with recorder(places, "attention_prefill") as record:
        for n, gain in gains.items():
            for variant, value in (("torch_math", 10.0), ("ours", 10.0 * gain), ("fa2", 5.0)):
                record.add("throughput", value, "TFLOP/s", variant=variant, seq_len=n, heads=32, batch=1)


def test_the_crossover_is_found_or_refuted(places: Path) -> None:
    _attention(places, {128: 0.8, 256: 0.9, 512: 1.5})
    assert of("B2").verdict == "reproduced"
    _attention(places, {128: 0.8, 256: 1.2, 512: 1.5})
    assert of("B2").verdict == "partly"
    _attention(places, {128: 3.0, 256: 9.0, 512: 20.0})
    v = of("B2")
    assert v.verdict == "not_reproduced"
    assert "1.33x ahead at 256" in v.reason


@pytest.mark.parametrize(
    ("gains", "verdict"),
    [((1.4, 3.0, 3.5), "reproduced"), ((1.4, 2.0, 2.0), "partly"), ((1.1, 1.1, 1.1), "not_reproduced")],
)
def test_flash_must_reach_the_claimed_ratio_at_every_length(places: Path, gains: tuple[float, ...], verdict: str) -> None:
    _attention(places, dict(zip((256, 1024, 2048), gains)))
    v = of("B5")
    assert v.verdict == verdict
    assert "heads x batch x layers" in v.reason


def test_a_call_launched_by_itself_counts_for_the_crossover_too(places: Path) -> None:
    with recorder(places, "attention_prefill") as record:
        for variant, rate, ms in (("article", 10.0, 0.01), ("ours", 20.0, 0.02)):
            record.add("throughput", rate, "TFLOP/s", variant=variant, seq_len=128, batch=1)
            record.add("eager_latency", ms, "ms", variant=variant, seq_len=128, batch=1)
    v = of("B2")
    assert v.verdict == "partly"
    assert "1 of 2 cases" in v.reason


def _sweep(places: Path, device: str, best: int) -> None:
    with recorder(places, "attention_tiles", device) as record:
        for tile in (64, 128):
            sizes = {"tile_block_m": tile, "tile_block_n": 128, "tile_stages": 2}
            us = 1.0 if tile == best else 2.0
            record.add("latency", us, "us", params={"kernel": "prefill", "head_dim": 128, "length": 1024, **sizes})


def test_the_best_tile_needs_two_gpus(places: Path) -> None:
    _sweep(places, GPU, 128)
    v = of("B3")
    assert v.verdict == "not_measured"
    assert "160 KiB of shared memory, more than capability 8.6, 8.9, 12.0 has" in v.reason
    _sweep(places, "tesla-t4", 128)
    assert of("B3").verdict == "not_reproduced"
    _sweep(places, "tesla-t4", 64)
    _sweep(places, "nvidia-l4", 64)
    assert of("B3").verdict == "reproduced"


def _errors(places: Path, careless: float | None, not_finite: float) -> None:
    with recorder(places, "attention_stability") as record:
        case = {"case": "growing", "dtype": "float16", "tile": 64}
        for variant, error, share in (("careful", 1e-3, 0.0), ("no_rescale", careless, not_finite), ("ours_decode", 2e-3, 0.0)):
            record.add("not_finite", share, "percent", variant=variant, params=case)
            if error is None:
                record.skip("relative_error", "ratio", "no output is finite", variant=variant, params=case)
            else:
                record.add("relative_error", error, "ratio", variant=variant, params=case)


def test_care_counts_when_carelessness_errs_ten_times_more_or_gives_no_number(places: Path) -> None:
    _errors(places, 5e-3, 0.0)
    assert of("B4").verdict == "not_reproduced"
    _errors(places, 1.0, 0.0)
    v = of("B4")
    assert (v.verdict, v.ours["value"]) == ("reproduced", 1000)  # type: ignore[index]
    assert "themselves err by 0.002" in v.reason
    _errors(places, 5e-3, 0.0)
    _errors(places, None, 100.0)
    assert "no_rescale is not finite in 1 cases" in of("B4").reason
