"""The rules about decoding draw the verdicts that their documentation says, from rows of one run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ledger import of, recorder

pytestmark = pytest.mark.usefixtures("places")


def record(places: Path, experiment: str, metric: str, unit: str, values: dict[str, float], **params: Any) -> None:
    """One run with a row a variant."""
    with recorder(places, experiment) as rows:
        for variant, value in values.items():
            rows.add(metric, value, unit, variant=variant, params=params)


def fused(places: Path, experiment: str, ours: float, unfused: float, **params: Any) -> None:
    record(places, experiment, "latency", "us", {"ours": ours, "unfused": unfused}, model="m", batch=1, **params)


def test_fusion_is_judged_by_launched_calls_and_says_what_a_graph_leaves_of_it(places: Path) -> None:
    fused(places, "fused_norm_qkv_rope", 10, 30, graph=False)
    assert "graph" not in of("D1").reason
    fused(places, "fused_norm_qkv_rope", 5, 6, graph=True)
    v = of("D1")
    assert (v.verdict, v.ours and v.ours["value"]) == ("reproduced", 3.0)
    assert "in a CUDA graph: median 1.20x" in v.reason
    assert "launches are most of the gain" in v.reason
    fused(places, "fused_norm_qkv_rope", 5, 14, graph=True)
    assert "most of the gain is left" in of("D1").reason
    fused(places, "fused_norm_qkv_rope", 5, 25, graph=True)
    assert "the gain is larger there" in of("D1").reason


def test_kinds_of_sampling_are_told_apart(places: Path) -> None:
    for sampling, unfused in (("greedy", 15), ("temperature", 30), ("top_k_top_p", 5)):
        fused(places, "fused_projection_sample", 10, unfused, graph=False, sampling=sampling)
    v = of("D2")
    assert v.verdict == "partly"  # the median of the three
    assert "greedy 1.50x, temperature 3.00x, top_k_top_p 0.50x" in v.reason


@pytest.mark.parametrize(("ours", "verdict"), [(83, "reproduced"), (54, "reproduced"), (40, "partly"), (20, "not_reproduced")])
def test_the_share_of_memory_is_that_of_the_labs_engine(places: Path, ours: float, verdict: str) -> None:
    shares = {"ours": ours, "unfused": 3.0, "unfused_graph": 18.0}
    record(places, "prefill_vs_decode", "bandwidth_utilization", "percent", {"ours": 99.0}, phase="decode", batch=1, model="m")
    record(places, "decode_single_stream", "bandwidth_share", "percent", shares, model="llama-1b")
    v = of("E1")
    assert v.verdict == verdict
    assert f"unfused 3 %, unfused in a graph 18 %, ours {ours} %" in v.reason
    assert "counters" not in v.reason
    record(places, "decode_single_stream", "dram_read_ratio", "ratio", {"ours": 1.04}, model="llama-1b", operation="attention")
    assert "1.04 to 1.04 times the bytes counted" in of("E1").reason


def test_of_several_models_the_median_decides_not_the_best(places: Path) -> None:
    for model, share in (("gpt2-xl", 20), ("llama-1b", 40), ("llama-3-8b", 90)):
        record(places, "decode_single_stream", "bandwidth_share", "percent", {"ours": share, "unfused": 2.0}, model=model)
    v = of("E1")
    assert (v.verdict, v.ours and v.ours["value"]) == ("partly", 40)
    assert "40 % of the time at the read ceiling in the median of 3 models" in v.reason
    assert "ours 20 to 90 %" in v.reason
    record(places, "decode_single_stream", "bandwidth_share", "percent", {"unfused": 99.0}, model="llama-2-7b")
    assert of("E1").verdict == "partly"  # another engine's share is told, and decides nothing


def techniques(places: Path, **rates: float) -> None:
    record(places, "bandwidth_techniques", "bandwidth", "TB/s", {"none": 2.0} | rates, case="norm_product", rows=1, k=1)


@pytest.mark.parametrize(
    ("article", "z", "verdict"),
    [(3.1, 1.0, "reproduced"), (2.2, 1.5, "reproduced"), (2.2, 0.9, "not_reproduced"), (2.2, 1.0, "partly")],
)
def test_the_techniques_are_multiplied_and_z_order_is_held_against_the_better_layout(
    places: Path, article: float, z: float, verdict: str
) -> None:
    techniques(places, article=article, restrict=2.0, shared_norm=article)
    assert "Z-order not recorded" in of("E2").reason
    rates = {"per_token": 1.0, "per_head": 4.0, "z_token_head": 4 * z, "z_token_dim": 0.5}
    record(places, "kv_layout", "bandwidth", "TB/s", rates, batch=1)
    v = of("E2")
    assert v.verdict == verdict
    assert f"Z-order {z:.3f}x" in v.reason
    assert "__restrict__ 1.000x" in v.reason
