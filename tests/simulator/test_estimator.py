"""The learning estimator against a device that is not a roofline, and what it knows of lengths."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlab.core.config import EngineConfig, SamplingParams
from pdlab.core.errors import MeasurementError
from pdlab.core.plan import PlanShape
from pdlab.core.request import Request
from pdlab.core.trace import TraceRow
from pdlab.costs import tables
from pdlab.costs.calibration import cost_model, data_sheet_cost, estimator_file, save_for_device
from pdlab.costs.estimator import RooflineEstimator, make_estimator
from pdlab.costs.formulas import decode_shape, prefill_shape
from pdlab.costs.learned import LearnedEstimator
from pdlab.costs.lengths import OutputLengths
from pdlab.costs.roofline import op_times, sheet_ceilings
from pdlab.models.catalogue import config_of

MODEL = config_of("qwen3-8b")
CEILINGS = sheet_ceilings("nvidia-h200")


def device(shape: PlanShape) -> float:
    """Smooth rooflines at unequal shares, rows in tiles of 64, launches: nothing that the features hold exactly."""
    rows = shape.new_tokens
    pad = -(-rows // 64) * 64 - rows if rows > 64 else 0
    padded = PlanShape(shape.prefill, shape.decode_count, shape.decode_kv_tokens, shape.pad_tokens + pad, shape.sampled)
    total = 5e-4 + 2e-5 * len(shape.prefill)
    for op, r in op_times(MODEL, padded, CEILINGS, 2).items():
        share = 0.45 if op == "attention" else 0.68
        total += (
            (r.flops / (share * CEILINGS.matmul_flops_per_s)) ** 4 + (r.bytes / (0.85 * CEILINGS.read_bytes_per_s)) ** 4
        ) ** 0.25
    return total


def step(rng, load):
    decodes = int(rng.integers(1, 1 + int(250 * load)))
    kv = int(decodes * rng.uniform(300, 1800))
    if rng.random() < 0.5:
        return PlanShape((), decodes, kv, 0, decodes)
    chunks, left = [], 2048 - decodes
    while left > 0 and len(chunks) < 6 and (not chunks or rng.random() < 0.6):
        new = int(min(left, rng.integers(16, 2500)))
        chunks.append((new, int(rng.choice([0, 0, 0, 2048, 16384]))))
        left -= new
    return PlanShape(tuple(chunks), decodes, kv, 0, decodes + len(chunks))


def mape(estimator, rng, load, n=400):
    shapes = [step(rng, load) for _ in range(n)]
    return 100 * np.mean([abs(estimator.step_seconds(s) / device(s) - 1) for s in shapes])


def taught(n, seed=0, noise=0.015):
    rng = np.random.default_rng(seed)
    learned = LearnedEstimator(MODEL, CEILINGS, 2)
    for _ in range(n):
        s = step(rng, 0.9)
        learned.learn(s, device(s) * float(np.exp(rng.normal(0, noise))))
    return learned


def test_it_starts_as_the_roofline_and_learns_held_out_loads_to_three_percent():
    rng = np.random.default_rng(7)
    fresh = LearnedEstimator(MODEL, CEILINGS, 2)
    for shape in (decode_shape(1, 512), decode_shape(64, 2000), prefill_shape(2048)):
        floor = RooflineEstimator(MODEL, CEILINGS, 2).step_seconds(shape)
        assert fresh.step_seconds(shape) == pytest.approx(floor, rel=0.35)  # it adds what the roofline overlaps
    before = mape(fresh, rng, 0.6)
    learned = taught(1500)
    assert before > 15
    for load in (0.3, 0.6, 0.75):
        assert mape(learned, rng, load) <= 3.0


def test_it_says_its_own_error_and_is_about_right():
    learned = taught(1500)
    said = learned.error()
    truth = mape(learned, np.random.default_rng(3), 0.9)
    assert 0.3 * truth < np.mean(list(said.values())) < 3 * truth + 1.5  # 1.5 %: the noise it was shown is in what it says
    assert np.isnan(LearnedEstimator(MODEL, CEILINGS, 2).error()["decode"])


def test_a_few_wild_observations_teach_nothing():
    learned = taught(600)
    rng = np.random.default_rng(5)
    before = mape(learned, np.random.default_rng(9), 0.6)
    for _ in range(5):
        s = step(rng, 0.6)
        learned.learn(s, 20 * device(s))
    assert mape(learned, np.random.default_rng(9), 0.6) < before + 2.5
    learned.learn(step(rng, 0.6), float("nan"))
    learned.learn(step(rng, 0.6), -1.0)
    assert np.isfinite(learned.step_seconds(decode_shape(3, 100)))


def test_it_follows_a_device_that_slows_down():
    learned, rng = taught(600), np.random.default_rng(2)
    for _ in range(600):
        s = step(rng, 0.9)
        learned.learn(s, 1.2 * device(s))
    s = decode_shape(50, 1000)
    assert learned.step_seconds(s) == pytest.approx(1.2 * device(s), rel=0.06)


def trace_row(shape: PlanShape, seconds: float) -> TraceRow:
    return TraceRow(
        step=0, clock="real", t_submit=0.0, t_start=1.0, t_end=1.0 + seconds, prefill_tokens=shape.prefill_tokens,
        prefill_context=shape.prefill_context, decode_count=shape.decode_count, kv_tokens=shape.decode_kv_tokens, pad_tokens=0,
        waiting=0, running=0, preempted=0, pages_used=0, waste_internal=0.0, waste_external=0.0, host_s=2e-4, predicted_s=0.0,
    )  # fmt: skip


def test_trace_rows_teach_as_shapes_do_where_a_row_says_all():
    a, b = LearnedEstimator(MODEL, CEILINGS, 2), LearnedEstimator(MODEL, CEILINGS, 2)
    for n in (1, 5, 64, 200):
        for shape in (decode_shape(n, 700), PlanShape(((n, 300),), 3, 900, 0, 4)):
            a.observe(trace_row(shape, device(shape)))
            b.observe(trace_row(shape, device(shape)), shape)
    assert a.step_seconds(decode_shape(33, 500)) == pytest.approx(b.step_seconds(decode_shape(33, 500)))
    assert a.host.between(decode_shape(5, 700)) == pytest.approx(2e-4, rel=0.02)


def test_what_was_learned_survives_saving(tmp_path, monkeypatch):
    learned = taught(300)
    learned.lengths.add("chat", 77)
    monkeypatch.setenv("PDLAB_HOME", str(tmp_path))
    path = save_for_device(learned, "nvidia-h200", "bfloat16")
    assert path == tmp_path / estimator_file("nvidia-h200", "qwen3-8b", "bfloat16")
    again = LearnedEstimator(MODEL, sheet_ceilings("nvidia-l4"), 2)
    again.load(path)
    for s in (decode_shape(7, 99), prefill_shape(300)):
        assert again.step_seconds(s) == again.lasting_seconds(s) == learned.lasting_seconds(s)
    assert again.lengths.to_dict() == {"chat": [77]}
    cost = cost_model(MODEL, "nvidia-h200")
    assert cost.source == "recorded"
    assert cost.step_seconds(decode_shape(7, 99)) == learned.lasting_seconds(decode_shape(7, 99))


@pytest.mark.parametrize("shape", [decode_shape(40, 1300), PlanShape(((900, 0),), 30, 36000, 0, 31)], ids=["decodes", "mixed"])
def test_the_next_price_follows_the_latest_steps_and_the_lasting_one_hardly_does(shape):
    learned = taught(3000)
    lasting = learned.lasting_seconds(shape)
    assert learned.step_seconds(shape) == pytest.approx(lasting, rel=0.05)
    for _ in range(12):
        learned.learn(shape, 1.06 * lasting)
    follows, after = learned.step_seconds(shape), learned.lasting_seconds(shape)
    assert follows > after
    assert follows == pytest.approx(1.06 * lasting, rel=0.035)
    for _ in range(3):
        learned.learn(shape, 100 * lasting)  # it compiled something
    assert learned.step_seconds(shape) == follows
    for _ in range(20):
        learned.learn(shape, lasting)
    assert learned.step_seconds(shape) == pytest.approx(lasting, rel=0.03)


@pytest.mark.parametrize("damage", ["cut", "other_model", "other_kind", "nan", "short", "missing"])
def test_a_damaged_or_foreign_file_is_refused(tmp_path, damage):
    path = tmp_path / "e.json"
    taught(5).save(path)
    state = json.loads(path.read_text())
    target = LearnedEstimator(MODEL, CEILINGS, 2)
    if damage == "cut":
        path.write_text(path.read_text()[:200])
    elif damage == "missing":
        path.unlink()
    elif damage == "other_model":
        target = LearnedEstimator(config_of("llama-1b"), CEILINGS, 2)
    elif damage == "other_kind":
        target = RooflineEstimator(MODEL, CEILINGS, 2)
    else:
        weights = state["regimes"]["mixed"]["weights"]
        weights[0] = float("nan")
        if damage == "short":
            weights.pop()
        path.write_text(json.dumps(state))
    before = target.step_seconds(decode_shape(2, 50))
    with pytest.raises(MeasurementError, match="saved"):
        target.load(path)
    assert target.step_seconds(decode_shape(2, 50)) == before


def test_recorded_rows_calibrate_a_device(tmp_path, monkeypatch):
    from pdlab.costs.tables import COLUMNS, Row

    monkeypatch.setenv("PDLAB_HOME", str(tmp_path))
    path = tmp_path / "measurements" / "nvidia-h200" / "prefill_vs_decode.csv"
    path.parent.mkdir(parents=True)
    points = [("prefill", 1, n) for n in (64, 128, 256, 512, 1024, 2048)] + [
        ("decode", b, n) for b in (1, 8, 64) for n in (512, 2048)
    ]
    lines = [",".join(COLUMNS)]
    for phase, batch, tokens in points:
        shape = prefill_shape(tokens, batch) if phase == "prefill" else decode_shape(batch, tokens)
        params = {"model": "llama-2-7b", "phase": phase, "batch": batch, "tokens": tokens, "dtype": "bfloat16"}
        ms = 1e3 * data_sheet_cost(config_of("llama-2-7b"), "nvidia-a100-sxm4-40gb", "bfloat16")(
            shape
        )  # another device's times
        row = Row("r", "2026-01-01T00:00:00Z", "prefill_vs_decode", "ours", "latency", "ms", ms, ms, ms, 5, params=params)
        lines.append(",".join('"' + c.replace('"', '""') + '"' for c in row.cells()))
    path.write_text("\n".join(lines) + "\n")
    cost = cost_model(config_of("llama-2-7b"), "nvidia-h200")
    assert cost.source == "recorded"
    for shape in (prefill_shape(700), decode_shape(20, 1000)):
        want = data_sheet_cost(config_of("llama-2-7b"), "nvidia-a100-sxm4-40gb", "bfloat16")(shape)
        assert cost.step_seconds(shape) == pytest.approx(want, rel=0.15)  # between the recorded points


# ---- remaining work


def request(prompt, kind="", done=0, output=0):
    r = Request(1, [1] * prompt, SamplingParams(max_tokens=9999), 0.0, kind=kind)
    r.num_computed, r.output_token_ids = done, [1] * output
    return r


@pytest.mark.parametrize("name", ["roofline", "learned"])
def test_remaining_work_falls_as_work_is_done(name):
    e = make_estimator(EngineConfig(estimator=name), MODEL, CEILINGS, 2)
    whole, half = e.remaining_if(request(4000), 100), e.remaining_if(request(4000, done=2000), 100)
    decoding = e.remaining_if(request(4000, done=4010, output=10), 90)
    assert whole > half > decoding > 0
    assert e.remaining_if(request(4000), 200) > whole
    assert e.remaining(request(400)) < e.remaining(request(4000))


def test_lengths_are_learned_by_class_and_never_read_from_max_tokens():
    e = RooflineEstimator(MODEL, CEILINGS, 2)
    for _ in range(50):
        e.finished(request(5, "short", output=4))
        e.finished(request(5, "long", output=900))
    assert e.remaining(request(5, "short")) < 0.1 * e.remaining(request(5, "long"))
    capped, free = request(5, "long"), request(5, "long")
    capped.params = SamplingParams(max_tokens=1)
    assert e.remaining(capped) == e.remaining(free)


@given(
    lengths=st.lists(st.integers(1, 60), min_size=8, max_size=80),
    generated=st.integers(0, 70),
    window=st.integers(8, 40),
    q=st.sampled_from([0.25, 0.5, 0.9]),
)
def test_expected_length_is_the_quantile_of_the_latest_lengths_above_what_is_there(lengths, generated, window, q):
    known = OutputLengths(q, window)
    for n in lengths:
        known.add("k", n)
    above = sorted(n for n in lengths[-window:] if n > generated)
    got = known.remaining("k", generated)
    if above:
        assert got == above[min(len(above) - 1, int(q * len(above)))] - generated
    else:
        assert got == generated
    assert known.remaining("never seen", 0) > 0


def test_a_model_known_by_a_few_recorded_steps_is_priced_alike_whichever_was_recorded_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Recordings of several days differ; their order in the table says nothing."""
    model, long = config_of("llama-1b"), PlanShape(((16384, 0),), sampled=1)
    cost = cost_model(model, "nvidia-h200")
    assert "rows of prefill_vs_decode" in cost.detail
    here = cost.step_seconds(long)
    newest = tables.newest
    monkeypatch.setattr(tables, "newest", lambda rows: newest(rows)[::-1])
    assert cost_model(model, "nvidia-h200").step_seconds(long) == pytest.approx(here, rel=1e-6)
