"""Live measurements as tables, the lab's few formulas, verdicts from a notebook's own rows, the map of the series."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pandas as pd
import pytest

from pdlab.bench.prefill_vs_decode import Step
from pdlab.bench.records import Recorder
from pdlab.core.errors import MeasurementError
from pdlab.costs import tables
from pdlab.costs.formulas import decode_shape, prefill_shape, step_flops
from pdlab.costs.roofline import Ceilings, step_time
from pdlab.hardware.probe import Machine
from pdlab.lab import figures, measure, series
from pdlab.lab.session import Lab, LiveText
from pdlab.models.catalogue import config_of

TOP = Ceilings(10e9, 10e9, 100e9, "measured")


def test_a_machine_on_which_no_step_could_be_measured_ends_in_words() -> None:
    steps = pd.DataFrame({"model": "m", "phase": ["prefill", "decode"], "ms": [1.0, 2.0]})
    assert len(measure.together([steps, pd.DataFrame(), steps])) == 4
    with pytest.raises(MeasurementError, match="not one prefill and not one decode step"):
        measure.together([pd.DataFrame()])
    with pytest.raises(MeasurementError, match="not one decode step could be measured") as e:
        measure.together([steps[:1], steps])
    assert "smaller" in e.value.hint


@pytest.fixture
def lab() -> Lab:
    machine = Machine("cpu", "A CPU", "cpu-x86-64", None, 8 * 2**30, "float32", "smoke", torch_version="2.13.0")
    lab = Lab(machine, "smoke", "")
    lab._ceilings["float32"] = TOP
    return lab


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder("prefill_vs_decode", "cpu-x86-64", out=tmp_path, command="test")


STEPS = [Step("prefill", 1, 5), Step("prefill", 3, 17), Step("decode", 1, 9), Step("decode", 3, 33)]


def test_every_step_asked_for_is_measured_in_the_order_asked(lab: Lab, recorder: Recorder) -> None:
    table = measure.phases(lab, recorder, "random:llama-tiny", STEPS)
    assert [(r.phase, r.batch, r.tokens) for r in table.itertuples()] == [(s.phase, s.batch, s.tokens) for s in STEPS]
    assert list(table.new_tokens) == [5, 51, 1, 3]
    assert (table.p10 <= table.ms).all()
    assert (table.ms <= table.p90).all()
    config = config_of("llama-tiny")
    for row, step in zip(table.itertuples(), STEPS):
        floor = step_time(config, step.shape, TOP, 4)
        assert row.flops == step_flops(config, step.shape).total
        assert row.floor_ms == pytest.approx(1e3 * floor.seconds)
        assert row.compute_percent == pytest.approx(100 * row.flops / (row.ms / 1e3) / TOP.matmul_flops_per_s, rel=1e-3)
    assert {r.metric for r in recorder.rows} >= {"latency", "compute_utilization", "bandwidth_utilization"}


def test_a_short_budget_leaves_out_the_dearest_steps_and_says_so(
    lab: Lab, recorder: Recorder, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pdlab.bench import suites

    answers = iter([9.0, 9.0, 9.0] + [0.0] * 99)  # the budget is gone after two steps
    monkeypatch.setattr(suites.Context, "left", lambda self: next(answers))
    table = measure.phases(lab, recorder, "random:llama-tiny", STEPS)
    assert 0 < len(table) < len(STEPS)
    assert {r.phase for r in table.itertuples()} == {"prefill", "decode"}
    assert "llama-tiny, prefill 3 x 17: skipped: the time budget ran out" in capsys.readouterr().out


def test_the_tables_of_a_measurement_can_be_drawn(lab: Lab, recorder: Recorder) -> None:
    table = measure.phases(lab, recorder, "random:llama-tiny", STEPS)
    prefill, decode = table[table.phase == "prefill"], table[table.phase == "decode"]
    panels = {
        "prefill": measure.over(prefill, "new_tokens", prefill.model),
        "decode": measure.over(decode, "batch", decode.model),
    }
    points = measure.roof_points(table)
    assert list(points.label) == ["5 tokens", "17 tokens", "batch 1", "batch 3"]
    lines = measure.utilization_lines(decode)
    at_floor = lines[lines.kind == "predicted"].groupby("x").y.max()
    assert at_floor.to_numpy() == pytest.approx(100, rel=1e-3)  # on its floor a step uses one ceiling fully
    drawn = [
        figures.latency(panels, claim="c", footer="f", xlabel="x", ylabel="y"),
        figures.roofline(points, read_bytes_per_s=10e9, matmul_flops_per_s=100e9, claim="c", footer="f"),
        figures.utilization(lines, claim="c", footer="f", xlabel="batch", limit=(30, "thirty")),
    ]
    assert all(figure.texts_outside() == [] for figure in drawn)


def test_the_knee_of_a_roofline_is_where_its_two_parts_meet() -> None:
    batches = [1, 2, 7, 19, 64]
    assert measure.knee(batches, [max(3.0, 0.25 * b) for b in batches]) == pytest.approx(12)


@pytest.mark.parametrize("name", ["smollm2-135m", "llama-3-8b", "gpt2-xl"])
def test_attention_is_half_of_the_flops_at_the_half_point(name: str) -> None:
    config = config_of(name)
    costs = step_flops(config, prefill_shape(round(measure.half_point(config))))
    products = costs.total - costs.attention - costs.projection_sample
    assert costs.attention == pytest.approx(products, rel=1e-3)


@pytest.mark.parametrize("name", ["smollm2-135m", "llama-2-7b", "llama-3-8b"])
def test_beyond_the_context_limit_no_batch_makes_decode_compute_bound(name: str) -> None:
    """Checked against the whole roofline at a batch of a million, where the weights' bytes no longer matter."""
    config, top = config_of(name), Ceilings(4.63e12, 4.26e12, 700e12)
    limit = measure.context_limit(config, top.ridge, 2)
    bound = {c: step_time(config, decode_shape(10**6, c), top, 2).bound for c in (round(limit * 0.9), round(limit * 1.1))}
    assert list(bound.values()) == ["compute", "bandwidth"]


def test_attention_of_many_query_heads_above_the_ridge_has_no_limit() -> None:
    assert measure.context_limit(config_of("llama-3-8b"), 1.0, 2) == float("inf")


def test_verdicts_are_drawn_from_the_rows_given_and_nothing_else(
    lab: Lab, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tables, "data_dir", lambda: tmp_path / "nothing")
    monkeypatch.setattr(tables, "home_dir", lambda: tmp_path / "nothing")

    def verdict(compute: float, bandwidth: float) -> str:
        of = {"model": "m", "phase": "decode", "batch": 1, "tokens": 9, "dtype": "float32"}
        rows = [
            recorder.add("compute_utilization", compute, "percent", params=of),
            recorder.add("bandwidth_utilization", bandwidth, "percent", params=of),
        ]
        return measure.verdicts(lab, rows, ["A3"]).data

    assert "**reproduced**" in verdict(4.0, 60.0)
    assert "**not reproduced**" in verdict(70.0, 20.0)
    assert "**not measured**" in verdict(4.0, 60.0)  # the reference's own column
    assert "does not count" in verdict(4.0, 60.0)
    assert (
        "**: simulated there<br>**not measured**: recorded on" in measure.verdicts(lab, [], ["A3"], here="simulated there").data
    )
    assert "**A1**" not in verdict(4.0, 60.0)


def test_where_both_were_measured_both_reasons_are_given(
    lab: Lab, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("data_dir", "home_dir"):
        monkeypatch.setattr(tables, name, lambda: tmp_path)
    of = {"model": "m", "phase": "decode", "batch": 1, "tokens": 9, "dtype": "bfloat16"}
    with Recorder("prefill_vs_decode", "nvidia-h200", out=tmp_path / "measurements", command="test") as there:
        there.add("compute_utilization", 13.5, "percent", variant="ours", params=of)
        there.add("bandwidth_utilization", 71.0, "percent", variant="ours", params=of)
    rows = [
        recorder.add(f"{what}_utilization", v, "percent", params=of) for what, v in (("compute", 8.25), ("bandwidth", 22.0))
    ]
    why = measure.verdicts(lab, rows, ["A3"]).data.splitlines()[-1]
    assert re.search(r"here: .*\b8\b.* nvidia-h200: .*\b1[34]\b", why)


def test_a_recorded_verdict_has_the_day_of_the_row_that_decided_not_of_the_newest_table(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("data_dir", "home_dir"):
        monkeypatch.setattr(tables, name, lambda: tmp_path)
    folder = tmp_path / "measurements" / "nvidia-h200"
    folder.mkdir(parents=True)
    of = '"{""batch"":1,""dtype"":""bfloat16"",""model"":""m"",""phase"":""decode"",""tokens"":9}"'

    def row(day: str, experiment: str, metric: str, params: str) -> str:
        id = f"202601{day}T000000Z-abcdef"
        return f"{id},2026-01-{day}T00:00:00Z,{experiment},ours,{params},{metric},percent,9,9,9,3,measured,ok,{id}-0"

    written = {
        "prefill_vs_decode": [row("02", "prefill_vs_decode", f"{what}_utilization", of) for what in ("compute", "bandwidth")],
        "soak": [row("13", "soak", "cost", "{}")],
    }
    for name, rows in written.items():
        (folder / f"{name}.csv").write_text("\n".join([",".join(tables.COLUMNS), *rows, ""]))
    a2, a3 = measure.verdicts(lab, [], ["A2", "A3"]).data.splitlines()[-2:]
    assert "recorded on nvidia-h200 (2026-01-02)" in a3
    assert "2026-01-13" not in a2 + a3
    assert "**impossible**: by arithmetic, whatever is measured |" in a2
    assert "recorded on" not in a2


def test_names_with_underscores_in_verdicts_are_no_emphasis(lab: Lab) -> None:
    line = measure.verdicts(lab, [], ["E2"]).data.splitlines()[-1]
    assert r"\_\_restrict\_\_: bandwidth" in line
    assert "__restrict__" not in line


def test_headings_say_when_a_device_was_last_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("data_dir", "home_dir"):
        monkeypatch.setattr(tables, name, lambda: tmp_path)
    assert series.since("nvidia-h200") == ""
    folder = tmp_path / "measurements" / "nvidia-h200"
    folder.mkdir(parents=True)
    rows = [f"r,2026-01-{day}T00:00:00Z,e,ours,{{}},m,ms,1,1,1,3,measured,ok,p" for day in ("02", "13", "05")]
    (folder / "e.csv").write_text("\n".join([",".join(tables.COLUMNS), *rows, ""]))
    assert series.since("nvidia-h200") == " (2026-01-13)"


def test_a_device_without_records_is_played_back_as_predicted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tables, "data_dir", lambda: tmp_path / "data")
    monkeypatch.setattr(tables, "home_dir", lambda: tmp_path / "home")
    table, kind = measure.recorded_phases("nvidia-h200")
    assert kind == "predicted"
    assert table.ms.isna().all()
    assert (table.floor_ms > 0).all()
    with Recorder("prefill_vs_decode", "nvidia-h200", out=tmp_path / "data" / "measurements", command="test") as record:
        record.add("latency", 3.5, "ms", model="random:llama-1b", phase="decode", batch=3, tokens=129, dtype="bfloat16")
    table, kind = measure.recorded_phases("nvidia-h200")
    assert kind == "recorded"
    assert [(r.model, r.phase, r.batch, r.tokens, r.ms) for r in table.itertuples()] == [("llama-1b", "decode", 3, 129, 3.5)]
    drawn = measure.over(table, "batch", table.model, kind)
    assert set(drawn.kind) == {"recorded", "predicted"}


def test_the_contents_list_every_notebook_with_its_measured_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    entry = {"file": "07_x.ipynb", "title": "X", "goal": "g", "claims": ["F1"], "hardware": "any", "seconds": {"smoke": 31.4}}
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "manifest.json").write_text(
        json.dumps({"notebooks": [entry | {"measured_on": {"smoke": "cpu-x"}}]})
    )
    monkeypatch.setattr(series, "checkout_dir", lambda: tmp_path)
    assert "| 07 | [X](07_x.ipynb) | g | F1 | smoke 31 s (cpu-x) | any |" in series.contents().data
    kept = tmp_path / "docs" / "executed" / "gpu-y" / "07_x.html"
    kept.parent.mkdir(parents=True)
    kept.write_text("")
    assert "[X](07_x.ipynb) (executed: [gpu-y](../docs/executed/gpu-y/07_x.html)) |" in series.contents().data
    monkeypatch.setattr(series, "checkout_dir", lambda: None)
    assert "manifest" in series.contents().data


def test_the_ledger_shows_every_claim_and_no_markup_of_its_words() -> None:
    text = series.ledger("nvidia-h200").data
    assert text.count("\n| ") == 24
    assert "\\_\\_restrict\\_\\_" in text


def test_streamed_text_is_one_output_that_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    import IPython.display

    class Handle:
        def __init__(self) -> None:
            self.shown: list[str] = []

        def update(self, text: LiveText) -> None:
            self.shown.append(repr(text))

    handle, displays = Handle(), []
    monkeypatch.setattr(IPython.display, "display", lambda text, display_id: displays.append(repr(text)) or handle)
    text = LiveText()
    for piece in ("Par", "is", " is\n", "old."):
        text.add(piece)
    assert displays == ["Par"]
    assert handle.shown == ["Paris", "Paris is\n", "Paris is\nold."]


def test_long_streamed_lines_are_wrapped() -> None:
    text = LiveText()
    text.text = "word " * 60
    assert max(map(len, repr(text).splitlines())) <= 100
