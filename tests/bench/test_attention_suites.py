"""The attention suites measure what they say on a CPU, check it first, and write tables that dispatch and tuning accept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pdlab.bench import (
    _attention,
    attention_decode,
    attention_dispatch,
    attention_prefill,
    attention_stability,
    attention_tiles,
    ceilings,
    suites,
)
from pdlab.costs.roofline import Ceilings
from pdlab.kernels.dispatch import choose
from pdlab.kernels.tuning import first_match


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "measure", lambda *args, **kwargs: Ceilings(1e10, 1e10, 1e11, "measured"))
    monkeypatch.setattr(attention_decode, "_SMOKE", [(2, 40, 16), (2, 33, 0)])
    monkeypatch.setattr(attention_prefill, "LENGTHS", {"smoke": (17, 40)})
    monkeypatch.setattr(attention_prefill, "TOKENS", {"smoke": 40})
    monkeypatch.setattr(attention_dispatch, "_CELLS", {"smoke": [("prefill", 24, 2), ("decode", 40, 3)]})
    monkeypatch.setattr(attention_stability, "TILES", (32,))


@pytest.mark.parametrize("name", ["attention_decode", "attention_prefill"])
def test_every_case_has_each_rival_and_its_floor_under_the_same_parameters(name: str, tmp_path: Path) -> None:
    outcome, recorder = suites.run(name, device="cpu", out=tmp_path, say=lambda line: None)
    assert outcome.skipped == 0
    metric = "latency" if name == "attention_decode" else "throughput"
    by_params: dict[str, set[str]] = {}
    for row in recorder.rows:
        if row.metric in (metric, f"floor_{metric}"):
            by_params.setdefault(str(sorted(row.params.items())), set()).add(
                "floor" if row.kind == "predicted" else row.variant
            )
    assert len(by_params) == 2
    assert all(found == {"plain", "sdpa", "floor"} for found in by_params.values())


def test_a_wrong_kernel_is_not_timed() -> None:
    q, view = _attention.make_view(
        [30, 20], [30, 20], heads=2, kv_heads=1, head_dim=8, page=4, dtype="float32", device="cpu", seed=0
    )  # fmt: skip
    right = _attention.backend("plain", q, view, 2)
    _attention.check("right", right, q, view)
    with pytest.raises(AssertionError, match="relative error"):
        _attention.check("wrong", lambda q, view: right(q, view) * 1.001, q, view)


def test_the_dispatch_suite_writes_rules_that_dispatch_follows(tmp_path: Path) -> None:
    suites.run("attention_dispatch", device="cpu", out=tmp_path, say=lambda line: None)
    fastest = {("decode", 64, 1): "a", ("decode", 64, 8): "b", ("decode", 4096, 1): "c", ("prefill", 128, 1): "default"}
    table = attention_dispatch.rules(fastest, "float32", 64, "default")
    facts = {"dtype": "float32", "head_dim": 64}
    assert choose(table, "default", q=1, kv=64, batch=1, **facts) == "a"
    assert choose(table, "default", q=1, kv=64, batch=2, **facts) == "b"
    assert choose(table, "default", q=1, kv=65, batch=1, **facts) == "c"
    assert choose(table, "default", q=1, kv=4097, batch=1, **facts) == "default"
    assert choose(table, "default", q=9, kv=9, batch=1, **facts) == "default"
    assert attention_dispatch.rules({("decode", 64, 1): "default"}, "float32", 64, "default") == []


def test_each_missing_care_shows_in_the_stability_rows(tmp_path: Path) -> None:
    _, recorder = suites.run("attention_stability", device="cpu", out=tmp_path, say=lambda line: None)

    def bad(variant: str, case: str, dtype: str) -> bool:
        rows = [r for r in recorder.rows if r.variant == variant and r.params["case"] == case and r.params["dtype"] == dtype]
        return any(r.median > 0.1 for r in rows if r.ok)  # a percentage that is not finite, or a relative error

    assert not any(bad("careful", r.params["case"], r.params["dtype"]) for r in recorder.rows)
    assert bad("no_wide_scores", "overflow", "float16")
    assert bad("no_subtract_max", "large", "bfloat16")
    assert bad("no_rescale", "growing", "float32")
    assert bad("no_guard_empty", "masked", "float32")


def test_tiles_that_are_swept_fit_and_become_entries_by_length() -> None:
    for dim in (64, 128):
        for shared in (164 << 10, 100 << 10, 228 << 10):
            decode, prefill = (
                list(attention_tiles.decode_tiles(shared, dim, False)),
                list(attention_tiles.prefill_tiles(shared, dim)),
            )
            assert len(set(decode)) == len(decode) >= 3
            assert len(set(prefill)) == len(prefill) >= 3
    plain, ring = ({"block_m": 64, "block_n": 64, "warps": 4, "stages": 2}, {"consumers": 2, "block_n": 128, "stages": 2})
    best = {("prefill", 256): (1.0, plain), ("prefill", 4096): (2.0, plain | {"block_m": 128})}
    best |= {("prefill_hopper", 256): (1.1, ring), ("prefill_hopper", 4096): (1.9, ring)}
    table = attention_tiles.entries(best, 128)
    for queries, block_m, hopper in ((100, 64, False), (256, 64, False), (257, 128, True), (20000, 128, True)):
        found = first_match(table, kind="prefill", head_dim=128, queries=queries, page=16)
        assert found is not None
        assert found["block_m"] == block_m
        assert (first_match(table, kind="prefill_hopper", head_dim=128, queries=queries) is not None) == hopper


def test_the_suites_on_a_machine_without_a_gpu_say_why_tiles_are_not_swept(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    outcome, recorder = suites.run("attention_tiles", device="cpu", out=tmp_path, say=lambda line: None)
    assert (outcome.rows, outcome.skipped) == (1, 1)
    assert "CUDA" in recorder.rows[0].status
