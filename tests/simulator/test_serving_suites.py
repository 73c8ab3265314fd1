"""The serving suites: a simulator process needs nothing but its Imitation, and the bound check can fail."""

import json
import pickle
from itertools import pairwise
from types import SimpleNamespace

import pytest

from pdlab.bench import _training, batching, estimator_error, scheduling_host, scheduling_mixed_load, serving, serving_outcomes
from pdlab.bench.records import Recorder
from pdlab.bench.suites import Context
from pdlab.core.config import EngineConfig
from pdlab.core.plan import PlanShape
from pdlab.core.trace import TraceRow
from pdlab.costs import recorded_steps
from pdlab.costs.estimator import RooflineEstimator
from pdlab.costs.formulas import decode_shape, prefill_shape
from pdlab.costs.learned import LearnedEstimator
from pdlab.costs.roofline import sheet_ceilings
from pdlab.models.catalogue import config_of
from pdlab.workloads.replay import Ended, Outcome

MODEL, CEILINGS = config_of("llama-tiny"), sheet_ceilings("cpu-x86-64")


def imitation():
    learned = LearnedEstimator(MODEL, CEILINGS, 4, 128)
    for n in range(1, 60):
        for shape in (decode_shape(1 + n % 16, 50 + n), prefill_shape(2 * n), PlanShape(((n, 0),), 4, 200, 0, 5)):
            learned.learn(shape, 2e-3 + 1e-4 * shape.new_tokens)
    config = EngineConfig(estimator="learned", max_batch_tokens=128, max_batch_requests=16, patience_s=2.0)
    scale = serving.Scale("llama-tiny", 2048, 16, serving.with_objectives(config, learned.step_seconds))
    return serving.Imitation(scale, learned.state(), CEILINGS, 16384, "float32", "cpu-x86-64")


def context(tmp_path, budget_s=60.0):
    machine = SimpleNamespace(slug="cpu-x86-64", is_gpu=False, device="cpu", dtype="float32")
    recorder = Recorder(scheduling_mixed_load.NAME, "cpu-x86-64", out=tmp_path, command="test")
    return Context(machine, "smoke", recorder, budget_s, say=lambda line: None)


def test_an_imitation_survives_the_way_to_another_process():
    one = imitation()
    other = pickle.loads(pickle.dumps(one))
    workload = serving.mixed_load(one.scale, 40, 50.0, 1)
    a, b = (i.run(i.scale.config, workload) for i in (one, other))
    assert a.complete == b.complete == 40
    assert a.requests == b.requests
    assert one.capacity(40, 3) > 0


def test_the_mixed_load_has_its_share_of_long_prompts_and_upper_class():
    items = serving.mixed_load(imitation().scale, 400, 10.0, 2).items
    assert sum(i.kind == "long" for i in items) == 2
    assert all(i.prompt_tokens == 2048 for i in items if i.kind == "long")
    assert 0.15 < sum(i.priority for i in items) / 400 <= 0.2


def test_every_policy_is_simulated_into_rows_that_the_format_takes(tmp_path, monkeypatch):
    monkeypatch.setattr(scheduling_mixed_load, "SEEDS", (1, 2, 3))
    ctx = context(tmp_path)
    with ctx.record as recorder:
        scheduling_mixed_load.sweep(ctx, recorder, imitation(), 60)
    rows = [r for r in recorder.rows if r.ok]
    assert {r.variant for r in rows} == set(scheduling_mixed_load.VARIANTS)
    assert {r.kind for r in rows} == {"simulated"}
    for metric in ("goodput", "throughput", "ttft", "per_token", "end_to_end", "longest_wait"):
        found = [r for r in rows if r.metric == metric and r.variant == "fcfs"]
        assert found, metric
        assert all({"load", "workload", "model"} <= r.params.keys() for r in found)
    assert {r.params["workload"] for r in rows} == set(scheduling_mixed_load.SWEEPS)
    assert all(r.median > 0 for r in rows if r.metric == "ttft_without_long")
    over = {r.variant: r.median for r in rows if r.metric == "waits_over_bound" and r.params["workload"] == "chat_with_long"}
    assert over["sjf_aging"] == over["deadline"] == over["oracle"] == 0
    assert (tmp_path / "cpu-x86-64" / "scheduling_mixed_load.csv").is_file()


def test_with_no_time_left_rows_say_so(tmp_path, monkeypatch):
    ctx = context(tmp_path, budget_s=0.0)
    with ctx.record as recorder:
        session = SimpleNamespace(scale=imitation().scale, capacities=lambda *names: dict.fromkeys(names, 50.0))
        monkeypatch.setattr(serving.Imitation, "of", classmethod(lambda cls, session: imitation()))
        scheduling_mixed_load.measure(ctx, session, 1.0)
    assert {r.status for r in recorder.rows} == {"skipped:the time budget ran out"}
    assert {r.variant for r in recorder.rows} == set(scheduling_mixed_load.MEASURED)


def test_a_device_that_nobody_recorded_is_predicted():
    one = serving.Imitation.known("nvidia-l4", "qwen3-8b")
    assert one.kind == "predicted"
    assert one.scale.config.ttft_objective_s > serving.Imitation.known("nvidia-b200", "qwen3-8b").scale.config.ttft_objective_s


def test_the_warm_up_meets_every_batch_size_and_the_ladder_sees_each_for_a_while():
    config = serving.serving_config(max_batch_tokens=128, max_batch_requests=40)
    engine = imitation().engine(config)
    counts = [
        row.decode_count for row in serving.replay(engine, serving.ladder(config), keep=True).trace if not row.prefill_tokens
    ]
    for below, size in pairwise((0, 1, 2, 4, 8, 16, 24, 32, 40)):
        assert sum(below < n <= size for n in counts) >= _training.LADDER_STEPS // 2
    chunks = {n for w in serving.warm_up(config, 4000) for item in w for n in (item.prompt_tokens,)}
    assert {1, 2, 3, 5, 9, 16, 17, 33} <= chunks
    assert max(chunks) == 2 * 128 + 100


def test_the_prompt_ladder_sees_every_size_that_steps_with_prompts_are_padded_to():
    config = serving.serving_config(max_batch_tokens=1024, max_batch_requests=60)
    trace = serving.replay(imitation().engine(config), serving.prompt_ladder(config), keep=True).trace
    counts = [row.prefill_tokens + row.decode_count for row in trace if row.prefill_tokens and row.decode_count]
    for below, size in pairwise((32, 64, *range(128, 1025, 128))):
        assert sum(below < n <= size for n in counts) >= 3
    serving.prompt_ladder(serving.serving_config(max_batch_tokens=128, max_batch_requests=16))


def test_a_saturated_rate_counts_neither_ramp_nor_drain():
    admitted = [*[0.0] * 30, *[0.5 * i for i in range(1, 61)]]
    outcome = Outcome("w", 1, 1, requests=[ended(i, 0.0, t, 1e3) for i, t in enumerate(admitted)])
    assert serving.saturated_rate(outcome) == pytest.approx(2.0, rel=0.02)


def ended(number, arrival, admitted, finish):
    return Ended(number, "", 0, 10, 1, arrival, admitted, admitted, finish, "length", 0)


def test_a_wait_over_its_bound_is_counted_and_one_with_company_is_not():
    e = SimpleNamespace(prefill_seconds=lambda n: 5.0, decode_seconds=lambda n, c: 0.0)
    alone = Outcome("w", 1, 1, requests=[ended(0, 0.0, 10.0, 11.0)])
    assert serving_outcomes.waits_over_bound(alone, e, 2.0) == 1  # patience 2 and nobody else there
    company = Outcome("w", 1, 1, requests=[ended(0, 0.0, 10.0, 11.0), ended(1, 0.0, 1.0, 6.0), ended(2, 1.0, 6.0, 10.0)])
    assert serving_outcomes.waits_over_bound(company, e, 2.0) == 0  # 2 s of patience and two others of 5 s each
    assert serving_outcomes.waits_over_bound(alone, e, 20.0) == 0


def test_fairness_is_one_when_all_are_slowed_alike_and_less_when_not():
    e = SimpleNamespace(prefill_seconds=lambda n: 1.0, decode_seconds=lambda n, c: 0.0)
    alike = Outcome("w", 1, 1, requests=[ended(i, i, i, i + 2.0) for i in range(4)])
    apart = Outcome("w", 1, 1, requests=[ended(i, 0, 0, 10.0 if i == 0 else 1.0) for i in range(4)])
    assert serving_outcomes.fairness(alike, e) == pytest.approx(1.0)
    assert serving_outcomes.fairness(apart, e) < 0.5


def test_the_judge_says_afterwards_what_each_estimator_would_have_said_then():
    one = imitation()
    known = one.estimator()
    before = json.dumps(known.state())
    judge = serving_outcomes.Judge.of(known, RooflineEstimator(MODEL, CEILINGS, 4))
    engine = one.engine(one.scale.config)
    engine.estimator = engine.scheduler.estimator = judge
    workload = serving.mixed_load(one.scale, 40, 50.0, 1)
    trace = serving.replay(engine, workload, keep=True).trace
    errors = judge.errors()
    assert errors.keys() == {"ours", "ours_learning", "roofline"}
    assert json.dumps(known.state()) == before, "who has learned nothing more prices all of it"
    steps = [(row, shape) for row, shape, _ in judge.steps]
    assert len(steps) > 30
    for (row, shape), ours, learning in zip(steps, errors["ours"], errors["ours_learning"], strict=True):
        seconds = row.t_end - row.t_start
        assert learning == (bool(shape.prefill), pytest.approx(abs(row.predicted_s / seconds - 1), abs=1e-9))
        assert ours[1] == pytest.approx(abs(known.step_seconds(shape) / seconds - 1))
    assert {row.step for row, _ in steps} <= {row.step for row in trace}


def test_training_has_small_prompts_beside_many_decodes_and_a_deep_one_in_chunks_of_several_sizes():
    one = imitation()
    config = one.scale.config.with_(max_batch_requests=60, max_batch_tokens=512)

    def steps(workload, **changes):
        trace = serving.replay(one.engine(config.with_(**changes)), workload, keep=True).trace
        return [row for row in trace if row.prefill_tokens and row.decode_count]

    small = [row for row in steps(_training.small_prompts(config)) if row.decode_count == 30]
    assert {row.prefill_tokens for row in small} >= {20, 64, 110, 200, 420}
    deep, late = _training.deep_prompt(config, 3900), {"policy": "deadline", "ttft_objective_s": 1e-3}
    in_time, limited = steps(deep), steps(deep, **late)
    assert max(row.prefill_context for row in in_time) > 3000
    assert len(limited) > len(in_time) + 2
    assert {row.prefill_tokens for row in limited} - {row.prefill_tokens for row in in_time}
    assert sum(load.share for load in _training.LOADS) == pytest.approx(1.0)


def test_a_session_keeps_its_steps_beside_what_it_learned(tmp_path, monkeypatch):
    monkeypatch.setattr(estimator_error, "_root", lambda ctx: tmp_path)
    ctx = context(tmp_path)
    shape = PlanShape(((7, 20),), 2, 90, 0, 3, 50)
    row = TraceRow(0, "real", 1.0, 1.1, 1.2, 7, 20, 2, 90, 0, 0, 0, 0, 0, 0.0, 0.0, 1e-3, 0.1)
    runs = [({"run": 1, "use": "training", "workload": "ladder", "policy": "fcfs"}, [(row, shape, 2e-3)])]
    config = serving.serving_config(ttft_objective_s=0.4, per_token_objective_s=0.1)
    session = SimpleNamespace(model=MODEL, config=config, padded=True, lengths={"chat": [4]}, runs=runs)
    estimator_error.save_steps(ctx, session)
    read = recorded_steps.read(tmp_path / recorded_steps.steps_file("cpu-x86-64", "llama-tiny", "float32"))
    assert [step.shape for step in read.runs[1]] == [shape]
    assert (read.about["objectives"], read.about["lengths"]) == ({"ttft_s": 0.4, "per_token_s": 0.1}, {"chat": [4]})


def test_spread_bursts_differ_only_by_their_spread():
    equal, spread = batching.burst(50, 0.0, 1, 3), batching.burst(50, 1.0, 1, 3)
    assert {i.prompt_tokens for i in equal} == {256}
    assert len({i.prompt_tokens for i in spread}) > 30
    assert max(i.prompt_tokens for i in spread) <= 8 * 256


def test_scheduling_is_timed_without_what_the_allocator_is_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(scheduling_host, "RUNNING", 24)
    watch = scheduling_host.Stopwatch()
    nested = SimpleNamespace(inner=lambda: 1, outer=lambda: nested.inner())
    watch.watch(nested, "inner")
    watch.watch(nested, "outer")
    assert nested.outer() == 1
    once = watch.seconds
    assert once > 0
    us = scheduling_host.scheduling_us("deadline", steps=20)
    assert us.n == 20
    assert 0 < us.p10 <= us.median <= us.p90


@pytest.mark.slow
@pytest.mark.parametrize("suite", ["batching", "scheduling_mixed_load", "estimator_error", "simulator_error"])
def test_a_serving_suite_runs_on_this_machine(suite, tmp_path):
    from pdlab.bench import suites

    outcome, recorder = suites.run(suite, out=tmp_path, budget_s=10.0, device="cpu", profile="smoke")
    assert outcome.rows > 0
    assert any(r.ok and r.kind == "measured" for r in recorder.rows)


def test_a_budget_that_is_spent_before_it_begins_still_measures_one_case(tmp_path):
    ctx = context(tmp_path, budget_s=0.0)
    with ctx.record as recorder:
        batching.run(ctx)
    measured = [row for row in recorder.rows if row.ok and row.metric == "throughput"]
    assert [row.params["workload"] for row in measured] == ["spread_1"]
    assert sum(not row.ok for row in recorder.rows) == len(batching.VARIANTS) * len(batching.SPREADS) - 1
