"""The decode suites measure what they say on a CPU, check it first, and write rows that belong together."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pdlab.bench import _breakdown, _compiled, _decode, _stages, decode_single_stream, suites
from pdlab.bench import fused_norm_qkv_rope as fused_qkv
from pdlab.bench import fused_projection_sample as fused_head
from pdlab.hardware.probe import resolve_device
from pdlab.hardware.timing import L2Rotation
from pdlab.kernels.kv_view import KVView
from pdlab.kernels.reference import ReferenceOps
from pdlab.models.catalogue import config_of, parameter_count
from pdlab.models.loading import load

READ = 1e10


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_decode, "_read", lambda device: READ)
    monkeypatch.setattr(decode_single_stream, "MODELS", {"smoke": ("random:llama-tiny",)})
    monkeypatch.setattr(decode_single_stream, "LENGTHS", {"smoke": (9, 6)})


def run(name: str, out: Path) -> tuple[suites.Outcome, Any]:
    return suites.run(name, device="cpu", out=out, say=lambda line: None)


@pytest.mark.parametrize(
    ("name", "metric"),
    [("fused_norm_qkv_rope", "latency"), ("fused_projection_sample", "latency"), ("decode_batched", "latency"),
     ("decode_single_stream", "throughput")],
)  # fmt: skip
def test_every_measurement_has_its_floor_and_the_ceiling_of_its_run(name: str, metric: str, tmp_path: Path) -> None:
    outcome, recorder = run(name, tmp_path)
    rows = [r for r in recorder.rows if r.ok]
    measured = {json.dumps(r.params, sort_keys=True) for r in rows if r.metric == metric}
    floors = {json.dumps(r.params, sort_keys=True) for r in rows if r.metric == f"floor_{metric}" and r.kind == "predicted"}
    assert measured
    assert measured == floors
    assert [r.median for r in rows if r.metric == "read"] == [READ / 1e12]
    assert outcome.files
    graphs = {r.params["graph"] for r in rows if "graph" in r.params}
    assert graphs <= {False}, "a CPU has no graphs"


def test_a_share_is_the_counted_bytes_over_time_and_ceiling(tmp_path: Path) -> None:
    from pdlab.costs.formulas import decode_shape, step_bytes

    _, recorder = run("decode_single_stream", tmp_path)
    by = {(r.metric, r.variant): r.median for r in recorder.rows if r.ok}
    moved = step_bytes(config_of("llama-tiny"), decode_shape(1, 9 + 3), 4).total
    assert by["floor_throughput", "ours"] == pytest.approx(READ / moved)
    for variant in ("ours", "unfused"):
        assert by["bandwidth_share", variant] == pytest.approx(100 * by["throughput", variant] * moved / READ)
    assert ("throughput", "unfused_graph") not in by, "a CPU has no graphs"
    operations = {r.params["operation"] for r in recorder.rows if r.metric == "kernel_time"}
    assert operations == set(_breakdown.OPERATIONS)


def test_what_the_budget_leaves_no_time_for_is_said(tmp_path: Path) -> None:
    for name in ("fused_norm_qkv_rope", "fused_projection_sample", "decode_batched", "decode_single_stream"):
        outcome, recorder = suites.run(name, device="cpu", out=tmp_path, say=lambda line: None, budget_s=0)
        assert outcome.skipped > 0
        skipped = [r.status for r in recorder.rows if not r.ok]
        assert set(skipped) == {"skipped:the time budget ran out"}


def test_layouts_and_techniques_say_what_a_cpu_cannot_show(tmp_path: Path) -> None:
    _, recorder = run("kv_layout", tmp_path)
    assert {r.metric for r in recorder.rows} == {"order_cost"}
    _, recorder = run("bandwidth_techniques", tmp_path)
    assert {r.metric for r in recorder.rows} <= {"instructions", "global_loads", "constant_loads", "shared_loads"}


# --- the switches


def test_the_waterfall_turns_one_switch_a_step_and_every_set_has_its_own_name() -> None:
    falls = _stages.waterfall()
    assert [len(b - a) for a, b in pairwise(falls)] == [1] * (len(falls) - 1)
    assert (_stages.name_of(falls[0]), _stages.name_of(falls[-1])) == ("unfused", "ours")
    every = {*falls, *_stages.alone(), *_stages.left_out()}
    assert len({_stages.name_of(s) for s in every}) == len(every)


def test_variants_take_turns_and_slow_ones_keep_the_mean_context() -> None:
    order: list[str] = []
    calls = {name: (lambda name=name: order.append(name) or len(order) / 10) for name in "ab"}
    found = _stages.in_turns(calls, 3, on_gpu=False)
    assert order == list("ababab")
    assert (found["a"].median, found["a"].n, found["a"].unit) == (0.3, 3, "s")
    with _stages.make_llm(load("random:llama-tiny"), _stages.ALL, length=301) as llm:
        prompt, new = _stages.lengths_for(llm, 60, 240, seconds=1e-9, seed=0)
        assert (prompt, new) == (60 + 112, 16)
        assert prompt + new / 2 == 60 + 240 / 2
        assert llm.config.steps_in_flight == 2


# --- rivals


@pytest.mark.parametrize("name", ["random:llama-tiny", "random:gpt2-tiny"])
def test_the_step_for_compilation_is_the_models_own(name: str) -> None:
    loaded = load(name, seed=3)
    decoder = _compiled.Decoder(loaded, prompt=11, new=5, seed=1, compiled=False)
    model, c = loaded.model, loaded.config
    n, slots = 11, torch.arange(11, 16)
    k, v = (x.clone().transpose(1, 2).unsqueeze(3) for x in (decoder.k, decoder.v))  # [layers, pages of 1, heads, 1, D]
    model.ops = ReferenceOps()
    token = torch.tensor([7])
    for step in range(3):
        at = torch.tensor([n + step])
        view = KVView("extent", 1, k, v, torch.zeros(1, 0, dtype=torch.int32), torch.zeros(1, dtype=torch.int64),
                      (at + 1).int(), torch.tensor([0, 1], dtype=torch.int32), slots[step : step + 1], at, 1, n + step + 1,
                      ((1, n + step + 1),))  # fmt: skip
        x = model.forward(token, at, view)
        with torch.no_grad():
            torch.testing.assert_close(decoder.hidden(), x, rtol=1e-5, atol=1e-5)
            decoder.step()
        token = model.logits(x).argmax(-1)
        assert decoder.token.tolist() == token.tolist()
    assert decoder.position.tolist() == [n + 3]
    assert c.num_layers == len(decoder.k)


def test_a_compiled_step_that_differs_is_refused() -> None:
    decoder = _compiled.Decoder(load("random:llama-tiny"), prompt=5, new=3, seed=1, compiled=False)
    decoder.check()
    decoder.layer = lambda *arguments: 2 * _compiled.layer_step(*arguments)
    with pytest.raises(AssertionError, match="compiled step is wrong"):
        decoder.check()


@pytest.mark.parametrize("name", ["llama-tiny", "gpt2-tiny"])
def test_transformers_gets_a_model_of_the_same_shape(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    from pdlab.bench._transformers import config_for

    model = transformers.AutoModelForCausalLM.from_config(config_for(config_of(name)))
    assert sum(p.numel() for p in model.parameters()) == parameter_count(config_of(name))


# --- where the time goes


def test_the_profile_names_every_operation_and_leaves_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "deep" / "trace.json"
    found = _breakdown.profile(load("random:llama-tiny"), _stages.ALL, 20, trace)
    assert set(found) == set(_breakdown.OPERATIONS)
    assert all(us > 0 for us in found.values())
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert set(_breakdown.OPERATIONS) <= names


def test_a_kernel_belongs_to_the_operation_that_launched_it() -> None:
    """Kernels run later than their launches, of which those of PyTorch and of the driver have different categories."""

    def event(cat: str, name: str, ts: float, dur: float, correlation: int | None = None, tid: int = 7) -> dict[str, Any]:
        args = {} if correlation is None else {"correlation": correlation}
        return {"cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}

    events = [
        event("user_annotation", "attention", 0, 10),
        event("user_annotation", "down_residual", 20, 10),
        event("user_annotation", "something else", 40, 10),
        event("cuda_runtime", "cudaLaunchKernel", 2, 1, 1),
        event("cuda_driver", "cuLaunchKernelEx", 5, 1, 2),
        event("cuda_driver", "cuLaunchKernelEx", 25, 1, 3),
        event("cuda_driver", "cuLaunchKernelEx", 45, 1, 4),
        event("cuda_runtime", "cudaLaunchKernel", 26, 1, 5, tid=8),
        event("kernel", "one", 100, 3.0, 1),
        event("kernel", "two", 103, 4.0, 2),
        event("kernel", "three", 110, 5.0, 3),
        event("kernel", "outside every operation", 120, 6.0, 4),
        event("kernel", "another thread's", 130, 7.0, 5),
        event("kernel", "launched before the trace", 140, 8.0, 99),
        event("gpu_user_annotation", "attention", 100, 40),
    ]
    assert _breakdown.attribute(events) == {"attention": 7.0, "down_residual": 5.0}
    assert _breakdown.attribute(events[:3]) == {"attention": 10, "down_residual": 10}


def test_ranges_change_no_result_and_hide_no_attribute() -> None:
    ops = SimpleNamespace(fused=True, attention=lambda q, view: q + view)
    ranged = _breakdown.RangedOps(ops)
    assert (ranged.fused, ranged.attention(2, 3)) == (True, 5)
    with pytest.raises(AttributeError):
        ranged.missing  # noqa: B018


# --- the checks can fail


def context(tmp_path: Path) -> suites.Context:
    from pdlab.bench.records import Recorder

    machine = resolve_device("cpu")
    return suites.Context(machine, "smoke", Recorder("x", machine.slug, out=tmp_path), 60.0)


@pytest.mark.parametrize("model", ["llama-tiny", "gpt2-tiny"])
def test_a_wrong_q_or_a_write_beside_its_slot_is_found(model: str, tmp_path: Path) -> None:
    arguments = fused_qkv.make_arguments(config_of(model), context(tmp_path), 3, 0)
    right = fused_qkv.apart
    for call in (right, lambda *a: ReferenceOps().norm_qkv_rope(*a[:4])):
        fused_qkv.check("right", call, arguments)
    with pytest.raises(AssertionError, match="q is wrong"):
        fused_qkv.check("twice", lambda *a: 2 * right(*a), arguments)

    def astray(*a: Any) -> torch.Tensor:
        q = right(*a)
        a[3].k[-1, :, -1] = a[3].k[0, :, 0] = 1.0
        return q

    with pytest.raises(AssertionError, match=r"K is wrong|slots of the cache"):
        fused_qkv.check("astray", astray, arguments)


def test_a_token_that_did_not_win_is_found(tmp_path: Path) -> None:
    ctx, config = context(tmp_path), config_of("llama-tiny")
    x, head = fused_head.make_head(config, ctx, 4, 0)
    for kind in ("greedy", "temperature"):
        sampling = fused_head.make_sampling(kind, 4, "cpu")
        tokens = ReferenceOps().projection_sample(x, head, sampling).tokens
        fused_head.check_ours(tokens, x, head, sampling)
        with pytest.raises(AssertionError, match="below the best"):
            fused_head.check_ours((tokens + 1) % config.vocab_size, x, head, sampling)


def test_the_plain_sampler_draws_from_the_filtered_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(fused_head, "TOP_K", 6)
    x, head = fused_head.make_head(config_of("llama-tiny"), context(tmp_path), 1, 0)
    scaled = fused_head.plain_logits(x, head)[0] / fused_head.TEMPERATURE
    top, ids = scaled.topk(6)
    mass = top.softmax(-1)
    kept = mass.cumsum(-1) - mass < fused_head.TOP_P
    truth = dict(zip(ids[kept].tolist(), (mass[kept] / mass[kept].sum()).tolist()))
    many = x.expand(4000, -1)
    for race in (True, False):
        tokens = fused_head.plain_sample("top_k_top_p", race, many, head).numpy()
        assert set(np.unique(tokens)) <= set(truth)
        for token, p in truth.items():  # five standard deviations
            assert abs((tokens == token).mean() - p) < 5 * (p * (1 - p) / 4000) ** 0.5 + 1e-9


# --- hardware counters

NCU = [
    "==PROF== Connected to process 7",
    '"ID","Process ID","Kernel Name","dram__bytes_read.sum","gpu__time_duration.sum"',
    '"","","","Mbyte","us"',
    '"0","7","norm_qkv_rope/ring_kernel","1,012.5","9"',
    '"1","7","norm_qkv_rope/other","0.5","9"',
    '"2","7","attention/flash_decode_kernel","2","9"',
    '"3","7","take_kernel","9","9"',
]


def test_the_counters_table_is_read_by_operation_and_held_against_the_count(tmp_path: Path) -> None:
    from pdlab.bench import hardware_counters as counters
    from pdlab.bench.records import Recorder
    from pdlab.core.errors import MeasurementError
    from pdlab.costs.formulas import decode_shape, step_bytes

    found = counters.read_table(NCU)
    assert found == {"norm_qkv_rope": 1013e6, "attention": 2e6, "take_kernel": 9e6}
    with Recorder("decode_single_stream", "nvidia-h200", out=tmp_path, command="test") as recorder:
        counters.report(found, "llama-1b", recorder, "bfloat16")
    ratios = {r.params["operation"]: r.median for r in recorder.rows if r.metric == "dram_read_ratio"}
    counted = step_bytes(config_of("llama-1b"), decode_shape(1, counters.TOKENS), 2)
    assert ratios["attention"] == pytest.approx(2e6 / counted.attention)
    assert ratios["all"] == pytest.approx(1015e6 / (counted.attention + counted.norm_qkv_rope))
    for broken in (NCU[:1], [*NCU[:2], NCU[2].replace("Mbyte", "furlong"), *NCU[3:]]):
        with pytest.raises(MeasurementError):
            counters.read_table(broken)
    with pytest.raises(MeasurementError, match="no kernel carries"):
        counters.report({"take_kernel": 1.0}, "llama-1b", recorder, "bfloat16")


def test_the_step_that_counters_look_at_runs() -> None:
    from pdlab.bench import hardware_counters as counters

    counters.step("random:llama-tiny", tokens=20)


def test_a_rival_that_fails_is_left_out_with_the_reason(tmp_path: Path) -> None:
    ctx = context(tmp_path)
    x, head = fused_head.make_head(config_of("llama-tiny"), ctx, 2, 0)
    calls = {"unfused": fused_head.plain_logits, "flashinfer": lambda x, head: 1 / 0, "cublas": fused_head.product}
    assert set(fused_head.usable(ctx, calls, x, head, {"batch": 2})) == {"unfused", "cublas"}
    (row,) = ctx.record.rows
    assert (row.variant, row.status) == ("flashinfer", "skipped:ZeroDivisionError: division by zero")


# --- compiling ahead


def test_every_job_of_compiling_ahead_is_done_by_one_process_and_needs_a_gpu() -> None:
    from pdlab.bench import compile_ahead as ahead
    from pdlab.core.errors import DeviceUnavailable

    names = list(ahead.jobs())
    assert sorted(name for part in range(5) for name in names[part::5]) == sorted(names)
    kinds = {"all", "stream", "norm_qkv_rope", "projection_sample", "batched", "layouts"}
    assert {name.split()[0] for name in names} == kinds
    assert "stream llama-1b ours" in names
    assert not any("unfused" in name for name in names), "plain PyTorch has nothing to compile"
    if not torch.cuda.is_available():
        with pytest.raises(DeviceUnavailable):
            ahead.work(0, 1, 1.0)


def test_two_layers_stand_for_a_model_and_run(tmp_path: Path) -> None:
    from dataclasses import replace as changed

    from pdlab.bench import compile_ahead as ahead

    ctx = context(tmp_path)
    assert ahead.two_layers("llama-tiny", ctx.machine).config == changed(config_of("llama-tiny"), num_layers=2)
    ahead.stream(ctx, "llama-tiny", _stages.ALL)
    prepared: list[int] = []
    ahead.in_turn(ctx, "llama-tiny", lambda loaded, ops: prepared.append(len(loaded.model.layers)))
    assert prepared == [2]
    ahead.batched(ctx, "gpt2-tiny", 3)


@pytest.mark.parametrize("fails_at", [1, 4])
def test_a_rival_that_fails_in_any_turn_has_no_time_and_a_reason(fails_at: int) -> None:
    """Ours may not fail; without a place for reasons nobody may."""
    calls = 0

    def rival(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls >= fails_at:
            raise RuntimeError("no kernel image\nfor this device")
        return x

    def turns(name: str, left_out: dict[str, str] | None) -> dict[str, Any]:
        rotation = L2Rotation(lambda i: (torch.ones(4),), 16, l2_bytes=0)
        both = {"unfused": lambda x: x + 1, name: rival}
        return _decode.take_turns(both, rotation, "cpu", graph=False, rounds=3, n=3, budget_ms=1, left_out=left_out)

    why: dict[str, str] = {}
    assert list(turns("torch_compile", why)) == ["unfused"]
    assert why == {"torch_compile": "RuntimeError: no kernel image for this device"}
    for name, place in (("ours", {}), ("torch_compile", None)):
        calls = 0
        with pytest.raises(RuntimeError, match="no kernel image"):
            turns(name, place)
