"""What the notebooks about decoding look up and draw: rows of one run, gains, the way to the wall, and how the figures fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from pdlab.bench import _stages as stages
from pdlab.bench.records import Recorder
from pdlab.costs import tables
from pdlab.kernels.kv_layouts import offsets
from pdlab.kernels.ops import NormWeights
from pdlab.lab import decode, decode_figures, decode_live, setup
from pdlab.models.catalogue import config_of
from pdlab.models.loading import load

GPU = "nvidia-h200"


@pytest.fixture(autouse=True)
def places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(tables, "data_dir", lambda: tmp_path / "data")
    monkeypatch.setattr(tables, "home_dir", lambda: tmp_path / "home")
    return tmp_path


def record(
    places: Path, experiment: str, values: dict[str, float], metric: str = "latency", unit: str = "us", **p: Any
) -> None:
    """One run."""
    with Recorder(experiment, GPU, out=places / "data" / "measurements", command="test") as recorder:
        for variant, value in values.items():
            kind = "predicted" if metric.startswith("floor") else "measured"
            recorder.add(metric, value, unit, variant=variant, kind=kind, params=p)


def test_only_rows_of_one_run_are_put_together_and_the_fuller_run_wins(places: Path) -> None:
    record(places, "x", {"ours": 1.0, "unfused": 5.0}, batch=1)
    record(places, "x", {"ours": 2.0, "unfused": 6.0}, batch=1)
    record(places, "x", {"ours": 3.0}, batch=1)  # newer, but alone
    record(places, "x", {"ours": 4.0}, batch=2)
    table = decode.together(GPU, "x", "latency")
    assert sorted(table["median"]) == [2.0, 4.0, 6.0]
    assert list(decode.together(GPU, "x", "latency", batch=2)["median"]) == [4.0]
    assert decode.day(table)


def test_a_newer_run_is_not_passed_over_for_variants_that_nobody_asks_for(places: Path) -> None:
    record(places, "x", {"ours": 1.0, "unfused": 5.0, "torch_compile": 3.0}, batch=1)
    record(places, "x", {"ours": 2.0, "unfused": 6.0}, batch=1)
    new = decode.together(GPU, "x", "latency", among=["ours", "unfused"])
    rivals = decode.together(GPU, "x", "latency", among=["ours", "torch_compile"])
    assert dict(zip(new["variant"], new["median"])) == {"ours": 2.0, "unfused": 6.0}
    assert dict(zip(rivals["variant"], rivals["median"])) == {"ours": 1.0, "torch_compile": 3.0}
    assert decode.apart(new, rivals).endswith(f"another run, {decode.day(rivals)}")
    assert decode.apart(rivals, rivals) == decode.apart(new, new.iloc[:0]) == ""


def test_what_was_never_recorded_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert decode.missing(decode.together(GPU, "kv_layout", "latency"), GPU, "kv_layout")
    assert "pdlab bench kv_layout --record, on nvidia-h200" in capsys.readouterr().out
    assert decode.latency_panels(GPU, "fused_norm_qkv_rope", "m")[0] == {}
    assert len(decode.gain_lines(decode.together(GPU, "x", "latency"), "unfused")) == 0
    assert len(decode.sampling_gains(GPU, "x", ["greedy"])) == 0
    assert len(decode.recorded_breakdown(GPU, "m")) == 0


def test_gains_divide_equal_parameters_and_keep_graphs_apart(places: Path) -> None:
    for batch, graph, unfused in ((1, True, 12.0), (1, False, 40.0), (8, False, 30.0)):
        record(places, "fused_norm_qkv_rope", {"ours": 10.0, "unfused": unfused}, model="m", batch=batch, graph=graph)
        record(places, "fused_norm_qkv_rope", {"ours": 9.0}, "floor_latency", model="m", batch=batch, graph=graph)
    table = decode.together(GPU, "fused_norm_qkv_rope", "latency")
    assert sorted(decode.gains(table, "unfused")["gain"]) == pytest.approx([1.2, 3.0, 4.0])
    lines = decode.gain_lines(table, "unfused")
    assert lines.set_index(["series", "x"])["y"]["launched one by one", 1] == pytest.approx(4.0)
    panels, rows = decode.latency_panels(GPU, "fused_norm_qkv_rope", "m")
    assert list(panels) == ["launched from Python", "in a CUDA graph"]
    assert len(rows) == 6
    assert set(panels["in a CUDA graph"]["kind"]) == {"recorded", "predicted"}


def test_the_product_alone_goes_with_every_kind_of_sampling(places: Path) -> None:
    where = {"model": "m", "batch": 1, "graph": True}
    record(places, "fused_projection_sample", {"ours": 8.0, "unfused": 9.0, "cublas": 7.0}, sampling="greedy", **where)
    record(places, "fused_projection_sample", {"ours": 8.0, "unfused": 12.0}, sampling="temperature", **where)
    _, rows = decode.latency_panels(GPU, "fused_projection_sample", "m", sampling="temperature")
    assert dict(zip(rows["variant"], rows["median"])) == {"ours": 8.0, "unfused": 12.0, "the product alone": 7.0}
    found = decode.sampling_gains(GPU, "fused_projection_sample", ["greedy", "temperature"])
    assert found.loc["temperature, in a graph", 1] == pytest.approx(1.5)


# --- the way to the wall


def walk(places: Path) -> pd.DataFrame:
    rates = {stages.name_of(s): 10.0 * 2**i for i, s in enumerate(stages.waterfall())}
    rates |= {stages.name_of(s): 15.0 for s in stages.alone() if len(s & {"graph"}) == 0}
    rates |= {"with_graph_attention_two_steps": 64.0, "without_persistent_and_prefetch": 0.9 * 5 * 2 ** len(stages.ORDER)}
    record(places, "decode_single_stream", rates, "throughput", "tok/s", model="m")
    return decode.together(GPU, "decode_single_stream", "throughput")


def test_the_waterfall_is_in_the_order_of_the_switches(places: Path) -> None:
    steps = decode.falls(walk(places), "m")
    assert list(steps) == ["plain PyTorch, launched", *decode.SWITCHES.values()]
    assert list(steps.values()) == sorted(steps.values())
    assert decode.falls(walk(places), "other") == {}


def test_every_switch_of_the_waterfall_has_words_and_no_words_lack_a_switch() -> None:
    assert tuple(decode.SWITCHES) == stages.ORDER
    assert len(decode.SWITCHES) + 1 == len(stages.waterfall())
    assert set(stages.BESIDES).isdisjoint(decode.SWITCHES)


def test_a_row_of_the_waterfall_means_the_same_in_every_panel(places: Path) -> None:
    steps = decode.falls(walk(places), "m")
    panels = {"a": (steps, 1500.0, {"torch.compile": 900.0}), "b": (steps, 1400.0, {"transformers": 9.0})}
    left, right = decode_figures.waterfall(panels, claim="c", footer="f").axes
    names = [label.get_text() for label in left.get_yticklabels()]
    assert names == [*steps, "torch.compile", "transformers"]
    assert left.get_ylim() == right.get_ylim()
    for ax, lacks in ((left, "transformers"), (right, "torch.compile")):
        said = {round(text.get_position()[1]): text.get_text() for text in ax.texts}
        assert len(said) == len(names)
        assert [names[i] for i, text in said.items() if "not recorded" in text] == [lacks]


def test_predicted_and_recorded_shares_stand_side_by_side() -> None:
    table = decode.beside_prediction({"plain": 10, "+ no gaps": 100}, 100, {"plain": 3, "+ ring": 36}, 90)
    assert list(table.index) == ["plain", "+ ring", "+ no gaps"]
    assert list(table["recorded, %"])[:2] == pytest.approx([10 / 3, 40])
    assert list(table["predicted, %"].dropna()) == [10, 100]


def test_a_variant_that_lacks_no_switch_is_no_switchs_effect(places: Path) -> None:
    """Records may hold rows of what is no switch any more, or not one of its own."""
    record(places, "x", {"ours": 1.0, "without_pages": 1.0, "without_hints": 2.0}, batch=1)
    record(places, "x", {"ours": 3.0, "without_hints": 4.0}, batch=1)  # newer, and as full of what still means something
    table = decode.together(GPU, "x", "latency")
    assert dict(zip(table["variant"], table["median"])) == {"ours": 3.0, "without_hints": 4.0}
    rates = {"unfused": 50.0, "ours": 1000.0, "without_hints": 900.0, "without_pages": 1100.0}
    table = pd.DataFrame([{"model": "m", "variant": v, "median": rate} for v, rate in rates.items()])
    assert list(decode.SWITCHES) == list(stages.ORDER)
    assert list(decode.switch_table(table, "m").index) == ["weights leave L2 first"]
    assert not [words for words in decode.falls(table, "m") if "pages" in words]


def test_rows_that_took_turns_are_compared_with_one_another(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run times all several times, each beside others."""
    walked = {stages.name_of(s): 10.0 + i for i, s in enumerate(stages.waterfall())}
    left_out = {"without_graph": 5.0, "without_hints": 30.0, "with_attention": 2.0, "ours": 40.0}
    with Recorder("decode_single_stream", GPU, out=places / "data" / "measurements", command="test") as recorder:
        for minute, rates in enumerate(({"ours": 9.0, "unfused": 1.0}, walked, {"ours": 77.0, "torch_compile": 3.0}, left_out)):
            monkeypatch.setattr("pdlab.bench.records.utc_now", lambda minute=minute: f"2026-12-01T12:0{minute}:00Z")
            for variant, rate in rates.items():
                recorder.add("throughput", rate, "tok/s", variant=variant, params={"model": "m"})
    steps = decode.together(GPU, "decode_single_stream", "throughput", among=decode.WORDS)
    assert list(decode.falls(steps, "m").values()) == list(walked.values())
    found = decode.switch_table(decode.together(GPU, "decode_single_stream", "throughput"), "m")["in all, against without"]
    assert found["one kernel for all layers"] == pytest.approx(walked["ours"] / walked["without_persistent"])
    assert found["weights leave L2 first"] == pytest.approx(40.0 / 30.0)


def test_the_persistent_kernel_is_compared_within_a_run(places: Path) -> None:
    assert len(decode.persistent_steps(GPU)) == 0
    first = {"whole": 0.7, "persistent 1x": 0.77}
    ways = {"whole": 0.76, "mixed": 0.75, "whole, prefetch": 0.5, "persistent 2 of 4": 0.65, "persistent unbounded": 0.78}
    for run in (first, ways, {"persistent 2 of 4": 0.6}):
        with Recorder("ring_tiles", GPU, out=places / "data" / "measurements", command="test") as recorder:
            for way, ms in run.items():
                recorder.add("step_latency", ms, "ms", variant="ours", params={"model": "m", "way": way, "tokens": 512})
                recorder.add("step_latency", ms / 2, "ms", variant="ours", params={"model": "m", "way": way, "tokens": 2048})
    table = decode.persistent_steps(GPU)
    assert list(table.iloc[0]) == ["m", 0.75, 0.78, 0.65]
    assert len(table) == 1


def test_a_switch_is_worth_what_it_gains_alone_and_what_its_absence_costs(places: Path) -> None:
    found = decode.switch_table(walk(places), "m")
    best = 10.0 * 2 ** len(stages.ORDER)
    assert found.loc["attention kernel", "alone"] == pytest.approx(1.5)
    assert found.loc["fused operations", "in all, against without"] == pytest.approx(best / 64)
    assert found.loc["one kernel for all layers", "in all, against without"] == pytest.approx(2.0)
    assert found.loc["prefetch (off by default)", "in all, against without"] == pytest.approx(0.9)


def test_the_predicted_walk_ends_at_the_wall_and_pays_for_each_kernel() -> None:
    config = config_of("llama-1b")
    plain = pd.Series({"norm_qkv_rope": 40, "attention": 22, "out_residual": 2, "norm_mlp_up": 13, "down_residual": 2,
                       "projection_sample": 15})  # fmt: skip
    walk = decode.predicted_walk(config, plain, 4.6e12, 640, launch_us=5, gap_us=1.5)
    us = [1e6 / rate for rate in walk.values()]
    assert us == sorted(us, reverse=True)
    floor = us[-1]
    assert floor == pytest.approx(decode.wall(GPU, ["llama-1b"], 4.6e12, 640)["ms a token"].iloc[0] * 1e3)
    assert us[0] == pytest.approx(5 * (79 * 16 + 15))
    assert us[1] - floor == pytest.approx(1.5 * (79 * 16 + 15))
    assert us[2] - floor == pytest.approx(1.5 * (58 * 16 + 15))
    assert us[3] - floor == pytest.approx(1.5 * 82)


def test_figures_keep_to_their_frames(places: Path) -> None:
    steps = decode.falls(walk(places), "m")
    table = pd.DataFrame({"ours": [9000.0, 4.0], "floor": [8000.0, 3.0]}, index=["norm_qkv_rope", "attention"])
    rates = pd.DataFrame({"none": [1.0, 2.0], "all": [1.1, np.nan]}, index=["6,144 × 4,096", "a"])
    orders = {name: offsets(name, 8, 4, 4).numpy() for name in ("per_token", "z_token_dim")}
    p = np.array([0.9, 0.09, 0.01])
    said: dict[str, Any] = {
        "claim": "A claim that is long enough to need a second line, as most of them are " * 2,
        "footer": "f",
    }
    for figure in (
        decode_figures.waterfall({"a": (steps, 1500.0, {"torch.compile": 900.0}), "b": (steps, 1400.0, {})}, **said),
        decode_figures.waterfall({"a": (steps, 1500.0, {})}, predicted=True, **said),
        decode_figures.operations({"a": table, "b": table}, **said),
        decode_figures.bars(rates, finish=3.0, ylabel="TB/s", **said),
        decode_figures.addresses(orders, **said),
        decode_figures.sampled(p, np.array([90, 9, 1]), **said),
    ):
        assert figure.texts_outside() == []


@pytest.mark.parametrize("high", [0, 2, 5])
def test_the_legend_of_operations_leaves_the_bars_free(high: int) -> None:
    us = [870.0] * 6
    us[high] = 900.0
    names = ["norm_qkv_rope", "attention", "out_residual", "norm_mlp_up", "down_residual", "projection_sample"]
    table = pd.DataFrame({"ours": us, "plain operations": us, "floor": [50.0] * 6}, index=names)
    figure = decode_figures.operations({"a": table, "b": table}, claim="c", footer="f")
    figure.canvas.draw()
    for ax in figure.axes:
        box = ax.get_legend().get_window_extent()
        assert not any(box.overlaps(bar.get_window_extent()) for bar in ax.patches)


def test_the_kernel_table_counts_what_the_walk_pays_for() -> None:
    plain = pd.Series({"norm_qkv_rope": 40, "attention": 22, "out_residual": 2, "norm_mlp_up": 13, "down_residual": 2,
                       "projection_sample": 15})  # fmt: skip
    table = decode.kernel_table({"llama-1b": plain, "gpt2-xl": plain}, 4.6e12, 640)
    assert list(table["kernels, fused"]) == [5 * 16 + 2, 5 * 48 + 2]
    assert table.loc["llama-1b", "operators, plain"] == 79 * 16 + 15
    floor = decode.wall(GPU, ["llama-1b"], 4.6e12, 640)["ms a token"].iloc[0] * 1e3
    assert table.loc["llama-1b", "bytes of a fused kernel, us"] * 82 == pytest.approx(floor)
    assert [decode_live.tiny_of(config_of(m)) for m in ("gpt2-xl", "llama-3-8b")] == ["random:gpt2-tiny", "random:llama-tiny"]


def test_tables_for_readers_are_blank_where_there_is_no_number_and_name_switches_in_words() -> None:
    table = decode.written(pd.DataFrame({"a": [1.26, float("nan")], "b": [3, 4]}))
    assert table.to_numpy().tolist() == [["1.3", "3.0"], ["", "4.0"]]
    words = {"unfused": "plain PyTorch, launched", "unfused_graph": "+ CUDA graph", "ours": "+ one kernel for all layers"}
    assert decode.WORDS.items() >= words.items()
    assert list(decode.WORDS) == [stages.name_of(s) for s in stages.waterfall()]


def joined(figure: Any) -> list[int]:
    """Thick strokes of each map: neighbours of one token and head that lie side by side."""
    return [sum(line.get_linewidth() == 3.0 for line in ax.lines) for ax in figure.axes if ax.images]


def test_the_map_of_addresses_shows_which_order_cuts_a_heads_row() -> None:
    orders = {name: offsets(name, 8, 4, 4).numpy() for name in ("per_token", "per_head", "z_token_head", "z_token_dim")}
    strokes = joined(decode_figures.addresses(orders, claim="c", footer="f"))
    assert strokes == [8 * 4 * 3, 8 * 4 * 3, 8 * 4 * 3, 8 * 4 * 2]  # of four elements all three borders, or two pieces of two


# --- what is computed live


def test_answers_shrink_with_the_time_that_is_left_and_never_below_two_steps() -> None:
    assert decode_live.affordable(0.1, 0.05, 15, 4, 24) == 24
    assert decode_live.affordable(1.0, 1.0, 40, 4, 24) == 10
    assert decode_live.affordable(3.0, 1.0, 4, 4, 24) == 3


def test_a_stream_that_would_take_too_long_is_timed_on_fewer_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from pdlab.costs.roofline import Ceilings

    lab = setup("cpu", quiet=True)
    monkeypatch.setattr(lab, "ceilings", lambda dtype=None: Ceilings(1e10, 1e10, 1e11, "measured"))
    loaded = load("random:llama-tiny")
    recorder = Recorder("decode_single_stream", "cpu-test", out=tmp_path)
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(stages, "stream_seconds", lambda llm, prompt, new, seed: asked.append((prompt, new)) or 1.0)
    table = decode_live.streams(lab, recorder, loaded, [frozenset(), stages.ALL], 9, 21, budget_s=16.0)
    assert asked == [(9, 3), (17, 4), (17, 4), (17, 4), (17, 4)]  # 16 s for four answers
    assert "answers of 4 tokens were timed instead of 21" in capsys.readouterr().out
    assert list(table["tokens a second"]) == [1.0, 1.0]


def test_operators_are_counted_by_operation() -> None:
    counts = decode_live.operator_calls(load("random:llama-tiny"))["operators, plain"]
    assert counts["out_residual"] == 2  # a product and an addition
    assert counts["norm_qkv_rope"] > 10
    assert counts["projection_sample"] > 2


def test_only_operators_that_work_are_counted() -> None:
    x = torch.ones(4, 6)
    # an addition and a product
    assert decode_live.operators(lambda: (x + 1).view(6, 4).transpose(0, 1) @ x.view(6, 4)[:, :3]) == 2


def test_rounding_where_nothing_need_be_rounded_shows() -> None:
    g = torch.Generator().manual_seed(0)
    x = (torch.randn(3, 512, generator=g) + 6).bfloat16()
    weight = (torch.randn(40, 512, generator=g) * 512**-0.5).bfloat16()
    gain = (1 + 0.3 * torch.randn(512, generator=g)).bfloat16()
    rms = decode.norm_orders(NormWeights(gain, None, 1e-5), x, weight)
    layer = decode.norm_orders(NormWeights(gain, torch.zeros(512), 1e-5), x, weight)
    exact = "x g in registers, product, 1/rms (ours, one row)"
    assert all(rms[exact] < rms[name] / 100 for name in rms if name != exact)
    assert layer["x g rounded, product, mean taken off, 1/rms"] > 3 * layer["norm, rounded, product (ours, several rows)"]


def test_chi_square_accepts_chance_and_finds_a_bias() -> None:
    p = np.array([0.5, 0.3, 0.2])
    counts = np.random.default_rng(0).multinomial(10_000, p)
    assert decode.chi_square(p, counts) > 0.01
    assert decode.chi_square(p, counts + np.array([600, 0, 0])) < 1e-6
    assert decode.chi_square(p, [4950, 3050, 2000]) == pytest.approx(0.5134, abs=1e-3)  # exp(-(0.5 + 0.8333) / 2)


def test_apart_costs_the_bytes_between_the_operations() -> None:
    found = decode.unfused_bytes(config_of("llama-3-8b"), 64)
    assert found["apart"] - found["fused"] == 64 * 2 * (2 * 4096 + 2 * 6144 + 2 * 5120 + 2 * 1024)
    assert decode.run_length(offsets("z_token_dim", 16, 2, 16)) == 2
    assert decode.run_length(offsets("z_token_head", 16, 2, 16)) == 16


def test_live_streams_are_recorded_with_their_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pdlab.costs.roofline import Ceilings

    lab = setup("cpu", quiet=True)
    monkeypatch.setattr(lab, "ceilings", lambda dtype=None: Ceilings(1e10, 1e10, 1e11, "measured"))
    recorder = Recorder("decode_single_stream", "cpu-test", out=tmp_path)
    loaded = load("random:llama-tiny")
    table = decode_live.streams(lab, recorder, loaded, [frozenset(), stages.ALL], 9, 5, rounds=1)
    assert list(table.index) == ["unfused", "ours"]
    assert (table > 0).all(axis=None)
    parts = decode.breakdown(lab, loaded, 12)
    assert (parts["us"] > 0).all()
    assert len(decode_live.launch_curve(lab, [1024, 4096])) == 4
