"""The decode suites on a GPU, in miniature: kernels are held against float64 on the way, and the promised rows are there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pdlab.bench import _breakdown, _compiled, _decode, _stages, decode_single_stream, suites
from pdlab.core.config import SamplingParams
from pdlab.models.loading import load

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_decode, "_read", lambda device: 1e12)
    monkeypatch.setattr(decode_single_stream, "rival", lambda *arguments: None)  # compiling takes longer than the rest


@pytest.mark.parametrize(
    ("name", "variants"),
    [("fused_norm_qkv_rope", {"ours", "unfused"}), ("fused_projection_sample", {"ours", "unfused", "cublas"}),
     ("decode_batched", {"ours", "unfused_graph"}), ("bandwidth_techniques", {"none", "restrict", "shared_norm", "article"}),
     ("kv_layout", {"per_token", "per_head", "z_token_head", "z_token_dim", "ours"})],
)  # fmt: skip
def test_a_suite_runs_and_measures_its_variants(name: str, variants: set[str], tmp_path: Path) -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("the fused kernels are not chosen below capability 8.0")
    outcome, recorder = suites.run(name, profile="smoke", out=tmp_path, say=lambda line: None, budget_s=120)
    assert outcome.skipped == 0, [r.status for r in recorder.rows if not r.ok]
    assert variants <= {r.variant for r in recorder.rows if r.metric == "latency"}
    if name.startswith("fused"):
        assert {r.params["graph"] for r in recorder.rows if r.metric == "latency"} == {True, False}


def test_every_step_of_the_way_to_the_wall_is_measured(tmp_path: Path) -> None:
    _, recorder = suites.run("decode_single_stream", profile="smoke", out=tmp_path, say=lambda line: None, budget_s=120)
    seen = {r.variant for r in recorder.rows if r.metric == "throughput" and r.params["model"] == "llama-tiny"}
    assert {_stages.name_of(s) for s in [*_stages.waterfall(), *_stages.alone(), *_stages.left_out()]} <= seen


def test_a_graph_changes_no_token_and_all_switches_begin_alike() -> None:
    loaded = load("random:llama-tiny", device="cuda", dtype="float16")
    answers = {}
    for switches in (_stages.ALL, frozenset({"graph"}), frozenset[str]()):
        with _stages.make_llm(loaded, switches, length=80) as llm:
            (output,) = llm.generate([[5, 6, 7, 8, 9]], SamplingParams(max_tokens=12, ignore_eos=True))
        answers[_stages.name_of(switches)] = output.token_ids
    assert answers["unfused_graph"] == answers["unfused"]
    assert answers["ours"][0] == answers["unfused"][0]  # later ones may turn at a near tie of 16-bit numbers


def test_the_captured_step_is_the_eager_one() -> None:
    loaded = load("random:llama-tiny", device="cuda", dtype="float16")
    decoder = _compiled.Decoder(loaded, 20, 6, 0, compiled=False)
    decoder.capture()
    assert decoder.seconds() > 0
    captured = int(decoder.token)
    decoder.rewind()
    with torch.no_grad():
        for _ in range(5):
            decoder.step()
    assert int(decoder.token) == captured


def test_kernels_are_attributed_to_their_operations() -> None:
    found = _breakdown.profile(load("random:llama-tiny", device="cuda", dtype="float16"), _stages.ALL, 20)
    assert set(found) == set(_breakdown.OPERATIONS)
    assert all(0 < us < 1e4 for us in found.values())
