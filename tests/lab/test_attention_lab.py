"""What the notebook about attention shows: pictures of what the code does, tables of what was recorded, source as it stands."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from pdlab.bench.attention_tiles import QUERIES
from pdlab.bench.records import Recorder
from pdlab.lab import attention, attention_figures, attention_tables
from pdlab.lab.style import LabFigure

LONG = [8192, *[256] * 31]


def whole(figure: LabFigure) -> LabFigure:
    assert figure.texts_outside() == []
    return figure


def test_both_ways_to_split_read_every_token_once_and_equal_stretches_end_together() -> None:
    work = attention.stretches(LONG, kv_heads=3, programs=17, tile=64)
    for programs in work.values():
        assert len(programs) == 17
        read = {b: sum(n for mine in programs for owner, n in mine if owner == b) for b in range(len(LONG))}
        assert read == {b: 3 * n for b, n in enumerate(LONG)}
    whole_, even = ([sum(n for _, n in mine) for mine in programs] for programs in work.values())
    assert max(whole_) >= 8192
    assert max(even) - min(even) <= 64
    whole(attention_figures.split(work, claim="A claim", footer="counted"))


def test_weights_fade_by_one_factor_when_the_maximum_grows() -> None:
    scores = np.random.default_rng(0).standard_normal(50) * 3
    weights = attention.online_weights(scores, 16)
    assert weights.shape == (4, 50)
    for step in range(3):
        seen = slice(0, 16 * (step + 1))
        ratio = weights[step + 1, seen] / weights[step, seen]
        assert np.allclose(ratio, ratio[0])
        assert ratio[0] <= 1
    assert np.allclose(weights[-1] / weights[-1].sum(), np.exp(scores) / np.exp(scores).sum())
    whole(attention_figures.fading(weights, 16, claim="A claim", footer="counted"))


@pytest.mark.parametrize(("block_m", "block_n"), [(64, 64), (64, 16), (32, 128)])
def test_the_walk_numbers_exactly_the_squares_that_are_worked_on(block_m: int, block_n: int) -> None:
    figure = whole(attention_figures.tile_walk(256, block_m, block_n, 2, claim="A claim", footer="counted"))
    numbers = [text.get_text() for text in figure.axes[1].texts if text.get_text().isdigit()]
    squares = -(-(3 * block_m) // block_n)
    assert numbers == [str(i) for i in range(1, squares + 1)]


def test_the_articles_plain_times_imply_one_product_and_its_fused_times_a_share_of_the_card() -> None:
    times = {256: (12, 9), 1024: (185, 62), 2048: (738, 214)}
    table = attention.implied_heads(times, "nvidia-a100-sxm4-40gb", 128, 16 * 32 * 32)
    assert table.implied.max() / table.implied.min() < 1.2
    assert table.fused_percent.is_monotonic_increasing
    assert (table.fused_percent < 100).all()
    doubled = attention.implied_heads({256: (24, 9)}, "nvidia-a100-sxm4-40gb", 128, 1)
    assert doubled.implied[256] == pytest.approx(2 * table.implied[256])
    shares = {"this project, some-gpu, recorded": {256: 30.0, 2048: 80.0}}
    whole(attention_figures.implied(table, 16384, "a guess", shares, claim="A claim", footer="predicted"))


def test_source_is_shown_as_it_stands_and_a_line_that_is_gone_is_an_error() -> None:
    shown = attention.excerpt(attention.stretches, "segments =", "busy =").data
    assert shown.splitlines()[1].startswith("segments = [(b, n)")
    assert shown.splitlines()[-2].startswith("busy =")
    with pytest.raises(ValueError, match="no line that begins with"):
        attention.excerpt(attention.stretches, "nothing like it")


def _recorded(folder: Path) -> dict[str, pd.DataFrame]:
    found = {}
    heads = {"heads": 32, "kv_heads": 32, "head_dim": 128, "causal": True, "dtype": "bfloat16"}
    with Recorder("attention_prefill", "nvidia-h200", out=folder, command="test") as record:
        for n, batch in ((256, 64), (2048, 8), (256, 1)):
            params = heads | {"seq_len": n, "batch": batch}
            record.add("floor_throughput", 700.0, "TFLOP/s", kind="predicted", params=params)
            for variant, rate in (("ours", 400.0), ("cudnn", 300.0 if n == 256 else 500.0), ("article", 20.0)):
                record.add("throughput", rate, "TFLOP/s", variant=variant, params=params)
                record.add("latency", 100 / rate, "ms", variant=variant, params=params)
        record.add("eager_latency", 0.02, "ms", params=heads | {"seq_len": 256, "batch": 1})
        record.add("eager_latency", 0.01, "ms", variant="article", params=heads | {"seq_len": 256, "batch": 1})
    found["prefill"] = attention.tidy(record.rows)
    with Recorder("attention_decode", "nvidia-h200", out=folder, command="test") as record:
        for batch, kv, page, ragged in ((1, 4096, 16, False), (32, 4096, 0, False), (32, 131072, 16, True)):
            params = {"heads": 32, "kv_heads": 8, "head_dim": 128, "batch": batch, "kv_len": kv, "page": page, "ragged": ragged}
            record.add("share_of_floor", 90.0, "percent", params=params)
            if page:
                record.add("share_of_floor", 80.0, "percent", variant="flashinfer", params=params)
    found["decode"] = attention.tidy(record.rows)
    with Recorder("attention_tiles", "nvidia-h200", out=folder, command="test") as record:
        for m, n, stages, us in ((64, 64, 2, 900.0), (128, 64, 2, 700.0), (128, 64, 3, 600.0), (128, 128, 2, 650.0)):
            sizes = {"tile_block_m": m, "tile_block_n": n, "tile_warps": 4, "tile_stages": stages}
            for length in (256, 4096):
                record.add("latency", us, "us", params={"kernel": "prefill", "head_dim": 128, "length": length} | sizes)
    found["tiles"] = attention.tidy(record.rows)
    return found


def test_records_become_figures_whose_claims_are_computed(tmp_path: Path) -> None:
    tables = _recorded(tmp_path)
    prefill = whole(attention_figures.recorded_prefill(tables["prefill"], "nvidia-h200"))
    assert "1 of 2 lengths" in prefill.claim
    decode = whole(attention_figures.recorded_decode(tables["decode"], "nvidia-h200"))
    assert "90 to 90 %" in decode.claim
    cells = attention_tables.decode_grid(tables["decode"])
    assert list(cells.columns) == ["this project", "FlashInfer"]
    assert list(cells.index) == ["1 × 4,096, pages of 16", "32 × 4,096, extents", "131,072 beside 31 × 4,096, pages of 16"]
    grid = attention_tables.tile_grid(tables["tiles"], 128, 4096)
    assert grid.loc[128, 64] == np.nanmax(grid.to_numpy())
    tiles = whole(attention_figures.recorded_tiles(tables["tiles"], "nvidia-h200"))
    assert "128 × 64 at 256 tokens (1.5× the worst), 128 × 64 at 4,096 tokens (1.5× the worst)" in tiles.claim


def test_the_best_square_of_each_length_has_a_frame_whatever_its_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rate = next(x for x in np.random.default_rng(0).uniform(100, 700, 1000) if 100 * x / x < 100)  # rounded twice
    grid = pd.DataFrame([[rate / 2, rate / 3], [rate / 4, rate]], index=[64, 128], columns=[32, 64])
    monkeypatch.setattr(attention_tables, "tile_grid", lambda *of: grid)
    figure = attention_figures.recorded_tiles(_recorded(tmp_path)["tiles"], "nvidia-h200")
    frames = [patch for patch in figure.axes[0].patches if not patch.get_fill()]
    assert len(frames) == len(QUERIES)


def test_gains_keep_launched_calls_and_single_prompts_apart(tmp_path: Path) -> None:
    gains = attention_tables.gains(_recorded(tmp_path)["prefill"], "recorded")
    found = {(row.series, row.x): row.y for row in gains.itertuples()}
    assert found["many prompts", 256] == pytest.approx(20)
    assert found["one prompt", 256] == pytest.approx(20)
    assert found["one prompt, launched by itself", 256] == pytest.approx(0.5)
    whole(attention_figures.crossover({"here": gains, "there": gains}, 512, claim="A claim", footer="recorded"))


def test_of_several_passes_each_variant_keeps_the_rows_of_its_middle_one(tmp_path: Path) -> None:
    passes = []
    with Recorder("attention_prefill", "cpu-test", out=tmp_path, command="test") as record:
        for article, sdpa in ((9.0, 2.0), (1.0, 3.0), (2.0, 30.0)):  # a burst in the first pass, and one in the last
            start = len(record.rows)
            record.add("floor_throughput", 5.0, "TFLOP/s", kind="predicted", params={"seq_len": 32})
            for variant, ms in (("article", article), ("sdpa", sdpa)):
                record.add("latency", ms, "ms", variant=variant, params={"seq_len": 32})
                record.add("throughput", 1 / ms, "TFLOP/s", variant=variant, params={"seq_len": 32})
            passes.append(record.rows[start:])
    kept = [(row.metric, row.variant, row.median) for row in attention.middle_pass(passes) if row.kind == "measured"]
    assert sorted(kept) == [("latency", "article", 2.0), ("latency", "sdpa", 3.0),
                            ("throughput", "article", 1 / 2.0), ("throughput", "sdpa", 1 / 3.0)]  # fmt: skip
    assert len(attention.middle_pass(passes)) == 5


def test_a_gain_is_told_of_many_prompts_or_else_of_one_and_never_of_launches() -> None:
    rows = [(64, 3.0, "many prompts"), (64, 9.0, "one prompt"), (512, 2.0, "one prompt"),
            (512, 5.0, "one prompt, launched by itself")]  # fmt: skip
    told = attention_tables.told(pd.DataFrame(rows, columns=["x", "y", "series"]))
    assert told.to_dict() == {64: "3.0×", 512: "2.0×"}
    alone = attention_tables.told(pd.DataFrame(rows[2:3], columns=["x", "y", "series"]))
    assert alone.to_dict() == {512: "2.0×"}


def test_a_table_without_rows_says_how_to_get_them() -> None:
    def never(table: Any, device: str) -> None:
        raise AssertionError

    said = attention_tables.shown(pd.DataFrame(), never, "some-gpu", "attention_tiles")
    assert "pdlab bench attention_tiles --record" in said.data


def test_every_missing_care_shows_in_the_picture() -> None:
    lab: Any = SimpleNamespace(device="cpu", seed=0)
    errors, broken = attention.stability(lab, "float16", 32)
    assert (broken.careful == 0).all()
    assert (errors.careful < 5e-3).all()
    for care in errors.columns.drop("careful"):
        assert ((errors[care] > 0.05) | (broken[care] > 0)).any(), care
    whole(attention_figures.cares(errors, broken, claim="A claim", footer="measured"))
