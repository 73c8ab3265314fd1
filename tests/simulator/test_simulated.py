"""The simulated executor and the engine over it: time adds up, runs change nothing, memory stays bounded."""

import gc
import tracemalloc
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdlab.core.config import EngineConfig
from pdlab.core.errors import CapacityError, DeviceUnavailable, EngineClosed, StepFailed
from pdlab.core.plan import KVCopy, PlanShape
from pdlab.core.request import Request
from pdlab.core.trace import TraceRow
from pdlab.engine.engine import Engine
from pdlab.engine.simulated import SimulatedExecutor, kv_capacity, make_simulated, synthetic_tokens
from pdlab.models.catalogue import config_of
from pdlab.workloads import generators as g
from pdlab.workloads.replay import Histogram, replay, simulate, simulated_engine

MODEL = config_of("llama-tiny")


def one_plan(**changes):
    """The plan of a first step of one request, from the real scheduler."""
    from dataclasses import replace

    from pdlab.core.config import SamplingParams

    engine = simulated_engine("llama-tiny", EngineConfig(kv_capacity_tokens=256))
    engine.add([1, 2, 3], SamplingParams(max_tokens=4))
    return replace(engine.scheduler.plan(0.0), **changes)


# ---- executor


def test_steps_start_when_the_host_has_submitted_and_the_device_is_free():
    ex = SimulatedExecutor(MODEL, lambda s: 1.0, 64, steps_in_flight=2, host_s=0.25)
    first, second = ex.submit(one_plan()), ex.submit(one_plan(step=1))
    assert not first.done()
    a, b = first.result(), second.result()
    assert (a.t_start, a.t_end) == (0.25, 1.25)
    assert (b.t_start, b.t_end) == (1.25, 2.25)  # planned in the shadow of the first
    assert ex.clock.now() == 2.25
    third = ex.submit(one_plan(step=2)).result()
    assert third.t_start == 2.5


class Launches:
    """A host that plans for a tenth of a second and launches for two."""

    def between(self, shape):
        return 0.1

    def launch(self, shape):
        return 2.0


def test_a_short_step_takes_as_long_as_its_launches_unless_they_hide_behind_another():
    ex = SimulatedExecutor(MODEL, lambda s: 0.5, 64, steps_in_flight=2, host=Launches())
    first, second = ex.submit(one_plan()), ex.submit(one_plan(step=1))
    assert (first.result().t_start, first.result().t_end) == (0.1, 2.1)
    assert (second.result().t_start, second.result().t_end) == (pytest.approx(2.2), pytest.approx(4.2))
    slow = SimulatedExecutor(MODEL, lambda s: 5.0, 64, steps_in_flight=2, host=Launches())
    a, b = slow.submit(one_plan()), slow.submit(one_plan(step=1))
    assert a.result().t_end == pytest.approx(5.1)
    assert b.result().t_end == pytest.approx(10.1), "launched while the first one ran"


def test_more_steps_than_may_be_in_flight_are_refused():
    ex = SimulatedExecutor(MODEL, lambda s: 1.0, 64)
    ex.submit(one_plan())
    with pytest.raises(StepFailed, match="unfinished"):
        ex.submit(one_plan(step=1))
    ex.reset()
    assert ex.submit(one_plan(step=1)).result().t_start == 1.0
    ex.close()
    with pytest.raises(EngineClosed):
        ex.submit(one_plan(step=2))


def test_moving_kv_costs_time():
    ex = SimulatedExecutor(MODEL, lambda s: 1.0, 64, copy_s_per_token=0.01)
    result = ex.submit(one_plan(kv_ops=(KVCopy(0, 10, 5), KVCopy(20, 40, 15)))).result()
    assert result.t_end - result.t_start == pytest.approx(1.2)


def test_a_run_takes_as_long_as_its_steps_and_samples_the_same_tokens():
    def cost(s):
        return 1.0 + 0.01 * s.decode_kv_tokens

    shape = PlanShape(decode_count=2, decode_kv_tokens=100, sampled=2)
    plan = one_plan(shape=shape, repeat=5)
    for flight, host in ((1, 0.5), (2, 0.5), (2, 9.0)):
        ex = SimulatedExecutor(MODEL, cost, 64, steps_in_flight=flight, host_s=host)
        result = ex.submit(plan).result()
        each = [cost(PlanShape(decode_count=2, decode_kv_tokens=100 + 2 * i)) for i in range(5)]
        want = sum(each) + 4 * host if flight == 1 else sum(max(e, host) for e in each)
        assert result.t_end - result.t_start == pytest.approx(want)
        assert result.tokens.shape == (5, 1)
    position = plan.sampling.position
    singles = [synthetic_tokens(plan.sampling.seed, position + i, MODEL.vocab_size, MODEL.eos_token_ids) for i in range(5)]
    assert np.array_equal(result.tokens, np.stack(singles))


@given(first=st.floats(0.001, 2), growth=st.floats(0, 0.1), until=st.floats(0, 100), most=st.integers(1, 200))
def test_steps_until_is_the_least_run_that_reaches_the_time(first, growth, until, most):
    ex = SimulatedExecutor(MODEL, lambda s: first + growth * s.decode_kv_tokens, 64)
    k = ex.steps_until(PlanShape(decode_count=1, decode_kv_tokens=0), until, most)

    def ends(n):
        return sum(first + growth * i for i in range(n))

    assert 1 <= k <= most
    if k < most:
        assert ends(k) >= until - 1e-6
    if k > 1:
        assert ends(k - 1) <= until + 1e-6


def test_tokens_depend_on_seed_and_position_alone_and_never_end_a_request():
    seed, position = np.arange(50, dtype=np.int64), np.arange(50, dtype=np.int64)
    tokens = synthetic_tokens(seed[:, None], position[None, :], 11, (3, 7, 10, 99, -1))
    assert set(np.unique(tokens)) == set(range(11)) - {3, 7, 10}
    assert tokens[4, 9] == synthetic_tokens(seed[4:5], position[9:10], 11, (3, 7, 10))[0]


def test_capacity_is_what_the_weights_leave():
    model = config_of("qwen3-8b")
    config = EngineConfig()
    tokens = kv_capacity(config, model, 100 << 30, 16 << 30, 2)
    assert tokens % config.page_size == 0
    assert tokens * model.kv_bytes_per_token(2) < 84 << 30
    assert kv_capacity(config.with_(kv_capacity_tokens=123), model, 1, 1, 2) == 123
    with pytest.raises(CapacityError, match="weights"):
        make_simulated(config.with_(simulated_device="tesla-t4", dtype="float32"), model)
    with pytest.raises(DeviceUnavailable, match="abacus"):
        make_simulated(config.with_(simulated_device="abacus"), model)


def test_what_nothing_was_recorded_for_is_marked_as_predicted(monkeypatch, tmp_path):
    monkeypatch.setenv("PDLAB_HOME", str(tmp_path))
    assert make_simulated(EngineConfig(simulated_device="nvidia-l4"), config_of("gpt2-xl")).calibration == "predicted"


# ---- runs of identical steps


def outcome_of(kind, config, workload, model="llama-1b"):
    fast = simulated_engine(model, config)
    engine = fast if kind == "runs" else Engine(fast.config, fast.model, fast.executor, fast.estimator)
    return replay(engine, workload, keep=True, seed=1)


@given(
    rate=st.sampled_from([2.0, 20.0, 200.0]),
    seed=st.integers(0, 99),
    policy=st.sampled_from(["fcfs", "sjf_aging", "least_remaining"]),
    batching=st.sampled_from(["continuous_chunked", "static"]),
    rows=st.sampled_from([3, 64]),
)
@settings(max_examples=12, deadline=None)
def test_runs_change_no_time_no_token_and_no_trace_row(rate, seed, policy, batching, rows):
    # an oracle of lengths: the learned quantiles would differ by the order in which a run's ends are seen
    workload = g.make("w", 25, g.poisson(rate), g.lognormal(60, 1, 400), g.lognormal(40, 1, 200), seed=seed)
    config = EngineConfig(
        policy=policy, batching=batching, kv_capacity_tokens=4096, max_batch_requests=rows, max_batch_tokens=128
    )
    runs, steps = outcome_of("runs", config, workload), outcome_of("steps", config, workload)
    assert len(runs.requests) == len(steps.requests) == 25
    for a, b in zip(sorted(runs.requests), sorted(steps.requests), strict=True):
        assert (a.request_id, a.output_tokens, a.reason, a.preemptions) == (
            b.request_id,
            b.output_tokens,
            b.reason,
            b.preemptions,
        )
        assert (a.admitted_s, a.first_token_s, a.finish_s) == pytest.approx((b.admitted_s, b.first_token_s, b.finish_s))
    assert len(runs.trace) == len(steps.trace)
    ignore = ("host_s", "predicted_s", "pages_used", "waste_internal", "waste_external")  # runs reserve ahead
    for a, b in zip(runs.trace, steps.trace, strict=True):
        one, other = asdict(a), asdict(b)
        for name in set(one) - set(ignore):
            assert one[name] == pytest.approx(other[name]), name


def test_with_two_steps_in_flight_runs_agree_to_a_step_in_first_tokens_and_to_two_percent_in_the_rest():
    workload = g.make("w", 40, g.poisson(15), g.lognormal(300, 1, 2000), g.lognormal(50, 1, 300), seed=3)
    config = EngineConfig(steps_in_flight=2)
    runs, steps = (outcome_of(kind, config, workload, "qwen3-8b") for kind in ("runs", "steps"))
    # who arrives in the last moment of a run joins a step earlier or later, and a first token takes few steps
    one_step = steps.per_token.quantile(0.01)
    assert runs.ttft.mean == pytest.approx(steps.ttft.mean, abs=one_step / 2)
    for name in ("per_token", "end_to_end"):
        assert getattr(runs, name).mean == pytest.approx(getattr(steps, name).mean, rel=0.02)


# ---- replay


def test_a_stream_leaves_nothing_behind():
    def count():
        return sum(isinstance(o, Request | TraceRow) for o in gc.get_objects())

    def watched(stream):
        for i, item in enumerate(stream):
            if i % 400 == 399:
                alive.append(count() - others)
            yield item

    gc.collect()
    others, alive = count(), []

    stream = g.stream(2000, g.poisson(400.0), g.uniform(1, 20), g.uniform(1, 6), seed=4)
    outcome = simulate("llama-tiny", EngineConfig(kv_capacity_tokens=8192), watched(stream))
    assert outcome.complete == 2000
    assert len(alive) == 5
    assert max(alive) < 50  # those that live, and what the last collection left


@pytest.mark.slow
def test_a_million_requests_fit_in_bounded_memory():
    stream = g.stream(1_000_000, g.poisson(2000.0), g.uniform(1, 8), g.uniform(1, 3), seed=4)
    tracemalloc.start()
    outcome = simulate("llama-tiny", EngineConfig(kv_capacity_tokens=8192), stream)
    assert outcome.complete == 1_000_000
    assert tracemalloc.get_traced_memory()[1] < 100e6
    tracemalloc.stop()


def test_a_closed_loop_never_has_more_requests_than_clients():
    workload = g.closed_loop(3, 20, prompts=g.uniform(1, 30), outputs=g.uniform(1, 9), seed=1)
    outcome = simulate("llama-tiny", EngineConfig(kv_capacity_tokens=1024), workload, keep=True)
    assert outcome.complete == 20
    edges = sorted([(r.arrival_s, 1) for r in outcome.requests] + [(r.finish_s, -1) for r in outcome.requests], key=lambda e: e)
    level = most = 0
    for _, change in sorted(edges, key=lambda e: (e[0], e[1])):
        level += change
        most = max(most, level)
    assert most <= 3


def test_refused_requests_are_counted_and_stopping_early_ends_the_rest():
    from pdlab.workloads.workload import Item, Workload

    items = [Item(0.0, prompt_tokens=10**7), Item(0.0, prompt_tokens=5, max_tokens=3), Item(1e6, prompt_tokens=5, max_tokens=3)]
    outcome = simulate("llama-tiny", EngineConfig(kv_capacity_tokens=256), Workload("w", items), until_s=50.0)
    assert outcome.reasons == {"error": 1, "length": 1}
    outcome = simulate("llama-tiny", EngineConfig(kv_capacity_tokens=256), g.ties(5, output=2000), until_s=1e-3)
    assert outcome.reasons.get("aborted", 0) + outcome.reasons.get("error", 0) == 5


@given(values=st.lists(st.floats(1e-6, 1e4), min_size=1, max_size=300), q=st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]))
def test_histogram_quantiles_are_within_a_quarter_of_a_percent(values, q):
    h = Histogram()
    for v in values:
        h.add(v)
    exact = sorted(values)[max(0, int(np.ceil(q * len(values) - 1e-9)) - 1)]
    assert h.quantile(q) == pytest.approx(exact, rel=0.0026)
    assert h.mean == pytest.approx(np.mean(values))


def test_goodput_counts_what_met_its_objectives():
    workload = g.make("w", 30, g.all_at_once(), g.fixed(64), g.fixed(8))
    strict = simulate("llama-1b", EngineConfig(ttft_objective_s=1e-9, kv_capacity_tokens=8192), workload)
    loose = simulate(
        "llama-1b", EngineConfig(ttft_objective_s=1e3, per_token_objective_s=1e3, kv_capacity_tokens=8192), workload
    )
    assert (strict.good, loose.good) == (0, 30)
    assert loose.goodput == pytest.approx(loose.throughput)
