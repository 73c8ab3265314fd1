"""Steps kept in a file, estimators fitted to many steps at once, and both judged offline."""

import gzip
import json
from types import SimpleNamespace

import numpy as np
import pytest

from pdlab.bench import _offline, estimator_error, simulator_error
from pdlab.bench.records import Recorder
from pdlab.bench.suites import Context
from pdlab.core.errors import MeasurementError
from pdlab.core.plan import PlanShape
from pdlab.core.trace import TraceRow
from pdlab.costs import recorded_steps
from pdlab.costs.formulas import decode_shape
from pdlab.costs.learned import LearnedEstimator
from pdlab.costs.roofline import sheet_ceilings
from pdlab.models.catalogue import config_of

MODEL, CEILINGS = config_of("llama-tiny"), sheet_ceilings("cpu-x86-64")
DEVICE = ("nvidia-h200", "qwen3-8b", "bfloat16")


def row(t_submit, t_start, t_end, s, host_s=0.0):
    return TraceRow(
        0, "real", t_submit, t_start, t_end, s.prefill_tokens, s.prefill_context, s.decode_count, s.decode_kv_tokens,
        s.pad_tokens, 0, 0, 0, 0, 0.0, 0.0, host_s, 0.0,
    )  # fmt: skip


def some_runs():
    decodes, mixed = decode_shape(3, 40), PlanShape(((20, 0), (7, 64)), 3, 123, 1, 5, 90)
    first = [(row(10.0, 10.001, 10.004, decodes, 2e-4), decodes, 3e-4), (row(10.005, 10.006, 10.02, mixed), mixed, 0.012)]
    return {4: first, 7: [(row(11.0, 11.0, 11.5, mixed), mixed, 0.0)]}


def test_steps_come_back_to_the_microsecond_and_the_same_steps_are_the_same_bytes(tmp_path):
    about = {"runs": [{"run": 4, "use": "training"}, {"run": 7, "use": "held-out"}]}
    recorded_steps.write(tmp_path / "a.csv.gz", about, some_runs())
    recorded_steps.write(tmp_path / "b.csv.gz", about, some_runs())
    assert (tmp_path / "a.csv.gz").read_bytes() == (tmp_path / "b.csv.gz").read_bytes()
    read = recorded_steps.read(tmp_path / "a.csv.gz")
    assert read.about == about
    assert [run["run"] for run in read.of("held-out")] == [7]
    for number, steps in some_runs().items():
        start = steps[0][0].t_submit
        for (was, shape, launch_s), step in zip(steps, read.runs[number], strict=True):
            assert step.shape == shape
            assert step.launch_s == pytest.approx(launch_s, abs=1e-6)
            for name in ("t_submit", "t_start", "t_end"):
                assert getattr(step.row, name) == pytest.approx(getattr(was, name) - start, abs=5e-6)


def test_files_from_before_longest_decodes_were_recorded_are_read(tmp_path):
    about, path = {"runs": [{"run": 4, "use": "training"}, {"run": 7, "use": "held-out"}]}, tmp_path / "a.csv.gz"
    recorded_steps.write(path, about, some_runs())
    first, *table = gzip.decompress(path.read_bytes()).decode().splitlines()
    path.write_bytes(gzip.compress("\n".join([first, *(line.rsplit(",", 1)[0] for line in table)]).encode()))
    shapes = [step.shape for step in recorded_steps.read(path).runs[4]]
    assert [s.decode_longest for s in shapes] == [0, 0]
    assert [s.decode_kv_tokens for s in shapes] == [120, 123]


@pytest.mark.parametrize("damage", ["1,2,3", "7,0,0,x,0,0,,1,1,0,1", "9,0,0,5,0,0,,1,1,0,1"])
def test_a_damaged_file_is_named_with_its_line(tmp_path, damage):
    about = {"runs": [{"run": 4, "use": "training"}, {"run": 7, "use": "held-out"}]}
    path = tmp_path / "a.csv.gz"
    recorded_steps.write(path, about, some_runs())
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()) + damage.encode() + b"\n"))
    with pytest.raises(MeasurementError, match=r"line 6"):
        recorded_steps.read(path)


def some_steps(rng, n=600):
    """Decodes of a device that is three times slower than its data sheet in bytes, and now and then held up by something."""
    truth = LearnedEstimator(MODEL, CEILINGS, 4, 128)
    steps = []
    for _ in range(n):
        s = decode_shape(int(rng.integers(1, 65)), int(rng.integers(10, 900)))
        seconds = 3 * truth.device_seconds(s) * rng.normal(1, 0.01)
        steps.append((s, seconds * (4.0 if rng.random() < 0.03 else 1.0)))
    return steps


def test_all_steps_at_once_price_better_than_one_after_another():
    rng = np.random.default_rng(0)
    steps = some_steps(rng)
    one, all_ = LearnedEstimator(MODEL, CEILINGS, 4, 128), LearnedEstimator(MODEL, CEILINGS, 4, 128)
    for s, seconds in steps:
        one.learn(s, seconds)
    all_.refit(steps)
    later = some_steps(rng)
    error = {e: np.median([abs(e.step_seconds(s) / t - 1) for s, t in later]) for e in (one, all_)}
    assert all_.seen == len(steps)
    assert error[all_] < 0.02
    assert error[all_] <= error[one]
    all_.learn(*later[0])  # and goes on from there
    assert all_.seen == len(steps) + 1


def test_what_is_learned_from_is_kept_where_asked():
    e = LearnedEstimator(MODEL, CEILINGS, 4, 128)
    s = decode_shape(2, 30)
    e.learn(s, 1e-3)
    e.kept = []
    e.learn(s, 2e-3)
    e.learn(s, -1.0)
    assert e.kept == [(s, 2e-3)]


def test_the_shipped_recording_tells_training_from_held_out_runs():
    recorded = recorded_steps.find(*DEVICE)
    training, held_out = ([run["run"] for run in recorded.of(use)] for use in ("training", "held-out"))
    assert training
    assert held_out
    assert max(training) < min(held_out)  # what is judged came later
    assert all({"load", "rate", "requests", "seed"} <= set(run) for run in recorded.of("held-out"))


def offline(name, tmp_path, budget_s=60.0):
    machine = SimpleNamespace(slug="cpu-x86-64", is_gpu=False, device="cpu", dtype="float32")
    return Context(
        machine, "full", Recorder(name, "cpu-x86-64", out=tmp_path, command="test"), budget_s, only="simulated",
        say=lambda line: None,
    )  # fmt: skip


def test_prices_are_judged_on_held_out_steps_and_say_so(tmp_path):
    ctx = offline(estimator_error.NAME, tmp_path)
    with ctx.record:
        estimator_error.run(ctx)
    (beside,) = ctx.record.beside
    assert beside.device == "nvidia-h200"
    rows = [r for r in beside.rows if r.metric == "mape"]
    assert {r.variant for r in rows} == {"ours", "ours_learning", "roofline"}
    assert {r.kind for r in beside.rows} == {_offline.KIND} == {"simulated"}
    by = {(r.variant, json.dumps(r.params, sort_keys=True)): r.median for r in rows}
    assert all(by["ours", p] < by["roofline", p] for variant, p in by if variant == "ours")


def test_a_recorded_load_test_is_simulated_again(tmp_path, monkeypatch):
    recorded = recorded_steps.find(*DEVICE)
    shortest = min(recorded.of("held-out"), key=lambda run: run["requests"])
    keep = [run for run in recorded.about["runs"] if run["use"] == "training" or run is shortest]
    recorded.about["runs"] = keep
    monkeypatch.setattr(recorded_steps, "find", lambda *_: recorded)
    ctx = offline(simulator_error.NAME, tmp_path)
    with ctx.record:
        _offline.differences(ctx)
    (beside,) = ctx.record.beside
    rows = [r for r in beside.rows if r.metric == "error"]
    assert {r.params["quantity"] for r in rows} == {"throughput", "ttft", "per_token", "end_to_end"}
    assert all(r.kind == "simulated" and r.variant == shortest["policy"] for r in rows)
