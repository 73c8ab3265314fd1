"""The suites run on a CPU, stay in their budget, and write rows that the format and the other readers accept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pdlab.bench import ceilings, compare, prefill_vs_decode, records, suites
from pdlab.core.errors import ConfigError, MeasurementError
from pdlab.costs import tables
from pdlab.costs.roofline import Ceilings
from pdlab.hardware.probe import cpu_slug
from pdlab.models.catalogue import config_of


@pytest.fixture(autouse=True)
def places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for module in (tables, records):
        monkeypatch.setattr(module, "data_dir", lambda: tmp_path / "data")
        monkeypatch.setattr(module, "home_dir", lambda: tmp_path / "home")
    return tmp_path


def test_every_suite_has_a_name_of_its_module_and_a_line_of_help() -> None:
    known = suites.names()
    assert {"ceilings", "prefill_vs_decode"} <= set(known)
    for name, text in known.items():
        if text.startswith("not available"):
            continue
        module = suites.load(name)
        assert module.__name__ == f"pdlab.bench.{name}"
        assert text == module.HELP
        assert "\n" not in text


def test_a_suite_that_cannot_be_imported_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    real = suites.importlib.import_module

    def broken(name: str) -> object:
        if name.endswith("ceilings"):
            raise SyntaxError("half\nwritten")
        return real(name)

    monkeypatch.setattr(suites.importlib, "import_module", broken)
    known = suites.names()
    assert known["ceilings"] == "not available here: SyntaxError: half written"
    assert "prefill_vs_decode" in known
    with pytest.raises(ConfigError, match=r"'ceilings' cannot run here.*half"):
        suites.load("ceilings")


def test_an_unknown_suite_lists_the_known() -> None:
    with pytest.raises(ConfigError, match="ceilings"):
        suites.load("no_such_suite")


def test_ceilings_are_positive_and_feed_the_roofline(monkeypatch: pytest.MonkeyPatch, places: Path) -> None:
    monkeypatch.setattr(ceilings, "_buffer_bytes", lambda machine, quick=False: 1 << 20)
    monkeypatch.setattr(ceilings, "_products", lambda machine: [("float32", 64)])
    lines: list[str] = []
    outcome, recorder = suites.run("ceilings", device="cpu", out=places / "out", say=lines.append, budget_s=1e6)
    assert (outcome.rows, outcome.skipped) == (3, 0)
    assert {r.metric: r.unit for r in recorder.rows} == {"copy": "TB/s", "read": "TB/s", "matmul": "TFLOP/s"}
    assert all(r.median > 0 for r in recorder.rows)
    assert len(lines) == 3
    from pdlab.costs.roofline import ceilings_for

    found = ceilings_for(cpu_slug(), "float32", places / "out")
    assert found.kind == "measured"
    assert found.matmul_flops_per_s == pytest.approx(1e12 * recorder.rows[2].median, rel=1e-4)


def test_a_budget_that_is_spent_skips_the_rest_and_says_so(monkeypatch: pytest.MonkeyPatch, places: Path) -> None:
    monkeypatch.setattr(ceilings, "_buffer_bytes", lambda machine, quick=False: 1 << 20)
    _, recorder = suites.run("ceilings", device="cpu", out=places / "out", budget_s=0, say=lambda line: None)
    skipped = [r for r in recorder.rows if r.metric == "matmul"]
    assert skipped
    assert all(r.status == "skipped:the time budget ran out" for r in skipped)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_plan_gives_each_request_pages_of_its_own(phase: str) -> None:
    step = prefill_vs_decode.Step(phase, 5, 45)
    plan = prefill_vs_decode.make_plan(step, 0, 384, 5 * 48, np.random.default_rng(0))
    assert len(np.unique(plan.page_table)) == plan.page_table.size == 5 * 3
    assert len(np.unique(plan.slots)) == len(plan.slots) == plan.new_tokens == plan.shape.new_tokens
    assert plan.slots.max() < 5 * 48
    assert plan.context_lens.tolist() == [45] * 5
    last = plan.positions[plan.q_start[1:] - 1]
    assert last.tolist() == [44] * 5
    table = plan.page_table[np.repeat(np.arange(5), step.new), plan.positions // 16]
    assert (plan.slots == table.astype(np.int64) * 16 + plan.positions % 16).all()


def test_both_phases_of_both_families_are_measured(monkeypatch: pytest.MonkeyPatch, places: Path) -> None:
    monkeypatch.setattr(ceilings, "measure", lambda device, dtype: Ceilings(1e10, 1e10, 5e10, "measured"))
    monkeypatch.setattr(prefill_vs_decode, "_MODELS", {"smoke": ("random:llama-tiny", "random:gpt2-tiny")})
    monkeypatch.setattr(prefill_vs_decode, "_PREFILL", {"smoke": ((9, 1), (5, 3))})
    monkeypatch.setattr(prefill_vs_decode, "_DECODE", {"smoke": ((1, 20), (4, 33))})
    outcome, recorder = suites.run("prefill_vs_decode", device="cpu", out=places / "out", say=lambda line: None, budget_s=1e6)
    assert outcome.skipped == 0
    assert outcome.rows == 2 * 4 * 4
    rows = {(r.metric, r.params["model"], r.params["phase"], r.params["batch"]): r for r in recorder.rows}
    for model in ("llama-tiny", "gpt2-tiny"):
        for phase, batch in (("prefill", 1), ("prefill", 3), ("decode", 1), ("decode", 4)):
            latency, floor = rows["latency", model, phase, batch], rows["floor_latency", model, phase, batch]
            shares = [rows[f"{what}_utilization", model, phase, batch] for what in ("compute", "bandwidth")]
            assert set(latency.params) == {"model", "phase", "batch", "tokens", "dtype"}
            assert (latency.kind, floor.kind) == ("measured", "predicted")
            # the larger utilization is the floor's share of the latency, by definition of both
            assert max(s.median for s in shares) == pytest.approx(100 * floor.median / latency.median, rel=1e-6)


def test_a_model_too_large_for_the_machine_is_skipped_with_the_sizes(monkeypatch: pytest.MonkeyPatch, places: Path) -> None:
    monkeypatch.setattr(ceilings, "measure", lambda device, dtype: Ceilings(1e10, 1e10, 5e10, "measured"))
    monkeypatch.setattr(prefill_vs_decode, "_MODELS", {"smoke": ("random:llama-3-8b",)})
    real = suites.resolve_device

    def small(device: str) -> object:
        from dataclasses import replace

        return replace(real(device), memory_bytes=2**30)

    monkeypatch.setattr(suites, "resolve_device", small)
    outcome, recorder = suites.run("prefill_vs_decode", device="cpu", out=places / "out", say=lambda line: None, budget_s=1e6)
    assert outcome.skipped == outcome.rows > 0
    assert "needs 32" in recorder.rows[0].status


def _rows(places: Path, device: str, values: dict[str, float]) -> None:
    with records.Recorder("attention", device, out=places / "data" / "measurements") as record:
        for metric, value in values.items():
            record.add(metric, value, "ms", n=3, batch=1)
    (places / "data" / "measurements" / device).exists()


def test_two_devices_are_compared_by_equal_parameters_each_against_its_own_floor(places: Path) -> None:
    _rows(places, "cpu-a", {"latency": 10.0, "floor_latency": 5.0, "only_a": 1.0})
    _rows(places, "cpu-b", {"latency": 2.0, "floor_latency": 1.8})
    rows = {r["metric"]: r for r in compare.compare_rows("cpu-a", "cpu-b")}
    assert set(rows) == {"latency", "only_a"}
    assert rows["latency"]["ratio"] == pytest.approx(0.2)
    assert (rows["latency"]["a_roofline"], rows["latency"]["b_roofline"]) == pytest.approx((0.5, 0.9))
    assert (rows["only_a"]["b"], rows["only_a"]["ratio"], rows["only_a"]["a_roofline"]) == (None, None, None)
    table = compare.compare("cpu-a", "cpu-b", "attention")
    assert table.loc[table.metric == "latency", "params"].tolist() == ['{"batch":1}']
    assert "(50 %)" in compare.render(list(rows.values()), "cpu-a", "cpu-b")


def test_what_both_devices_have_comes_first_and_people_see_the_rest_only_when_they_ask(places: Path) -> None:
    _rows(places, "cpu-a", {"only_a": 1.0, "latency": 10.0})
    _rows(places, "cpu-b", {"only_b": 3.0, "latency": 2.0})
    rows = compare.compare_rows("cpu-a", "cpu-b")
    assert [r["metric"] for r in rows] == ["latency", "only_a", "only_b"]
    shown = compare.render(rows, "cpu-a", "cpu-b")
    assert "ours latency" in shown
    assert "only_" not in shown
    assert "on cpu-a alone: 1 of attention" in shown
    assert "--all" in shown
    everything = compare.render(rows, "cpu-a", "cpu-b", everything=True)
    assert "only_a" in everything
    assert "only_b" in everything
    assert "--all" not in everything


def test_a_table_for_notebooks_tells_rows_apart_by_variant_and_settings(places: Path) -> None:
    for device in ("cpu-a", "cpu-b"):
        _rows(places, device, {"latency": 10.0, "floor_latency": 5.0, f"only_{device}": 1.0})
    table = compare.side_by_side(compare.compare_rows("cpu-a", "cpu-b"), "cpu-a", "cpu-b")
    (row,) = table.to_numpy().tolist()
    assert row == ["attention: ours, latency", "batch 1", "10", "10", "ms", "1", "50 %", "50 %"]
    assert len(set(table.columns)) == len(table.columns)
    assert len(compare.side_by_side(compare.compare_rows("cpu-a", "cpu-a"), "cpu-a", "cpu-a").columns) == 8


def test_two_devices_with_nothing_in_common_are_told_so(places: Path) -> None:
    _rows(places, "cpu-a", {"latency": 10.0})
    _rows(places, "cpu-b", {"bandwidth": 2.0})
    for everything in (False, True):
        shown = compare.render(compare.compare_rows("cpu-a", "cpu-b"), "cpu-a", "cpu-b", everything=everything)
        assert "every parameter" in shown
        assert "ratio:" not in shown
        assert ("have no measurement in common" in shown) != everything


def test_comparing_what_was_not_recorded_says_what_was(places: Path) -> None:
    _rows(places, "cpu-a", {"latency": 10.0})
    with pytest.raises(MeasurementError, match="cpu-a"):
        compare.compare_rows("cpu-a", "cpu-b")
    with pytest.raises(MeasurementError, match="attention"):
        compare.compare_rows("cpu-a", "cpu-a", "no_such_experiment")


@pytest.mark.skipif(sys.platform != "linux", reason="Triton has wheels for Linux only")
def test_the_read_kernel_sums_every_element_once_whatever_the_length() -> None:
    script = """
import torch
from pdlab.bench.read_kernel import read_sum
for n in (1, 63, 64, 65, 1000, 4097):
    x = torch.randn(n)
    for programs, block in ((1, 64), (3, 64), (7, 128)):
        out = torch.full((programs,), float("nan"))
        got = read_sum(x, out, block, 4).double().sum()
        assert abs(got - x.double().sum()) <= 1e-5 * (1 + x.abs().double().sum()), (n, programs, block, got)
"""
    env = {**os.environ, "TRITON_INTERPRET": "1"}  # float32 accumulation of a few thousand numbers: 1e-5 of their sum is ample
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_steps_beyond_a_models_context_are_left_out() -> None:
    steps = prefill_vs_decode.steps_of("full", config_of("gpt2"))
    assert steps
    assert max(s.tokens for s in steps) <= 1024


@pytest.mark.gpu
def test_the_suites_run_on_a_gpu(monkeypatch: pytest.MonkeyPatch, places: Path) -> None:
    monkeypatch.setattr(ceilings, "_buffer_bytes", lambda machine, quick=False: 1 << 28)
    monkeypatch.setattr(ceilings, "_products", lambda machine: [(machine.dtype, 1024)])
    monkeypatch.setattr(prefill_vs_decode, "_MODELS", {"full": ("random:llama-tiny", "random:gpt2-tiny")})
    for name in ("ceilings", "prefill_vs_decode"):
        outcome, recorder = suites.run(name, device="cuda", out=places / "out", say=lambda line: None)
        assert outcome.skipped == 0
        assert all(r.median > 0 for r in recorder.rows)
    reader = next(r for r in tables.read(recorder.device, "ceilings", places / "out") if r.metric == "read")
    provenance = records.provenance_of(recorder.device, reader.provenance_id, places / "out")
    assert provenance is not None
    assert provenance["settings"]["reader"] == "triton"
