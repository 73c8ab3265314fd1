"""Pictures of memory: every state has its colour, every moment its place, and no word is clipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from pdlab.allocators import make_allocator
from pdlab.allocators.fragmentation import Timeline
from pdlab.allocators.interface import CACHED, FREE, RETIRED, SHARED
from pdlab.bench.kv_allocators import Load, small_talk
from pdlab.bench.memory_runs import play
from pdlab.bench.records import Recorder
from pdlab.core.config import EngineConfig
from pdlab.costs import tables
from pdlab.lab import memory
from pdlab.lab.style import LabFigure
from pdlab.models.loading import load

FOUR = ["per_request", "contiguous_pool", "paged", "hybrid"]
FOOTER = "nvidia-a100-sxm4-40gb · torch 2.13.0+cpu · pdlab 0.1.0 · simulated 2026-11-29 · profile smoke"
LONG = "Per request, 44 % of what is reserved is empty; in pages 2.4 %, and nobody can be sure of the article's own column"


@pytest.fixture(scope="module")
def runs() -> tuple[pd.DataFrame, dict[str, Timeline]]:
    load = Load("llama-tiny", 5, 10, small_talk, kv_tokens=320)
    return memory.simulated([load], FOUR, "nvidia-a100-sxm4-40gb", blocks=50, frame_every=3)


def test_every_state_of_memory_has_a_colour_of_its_own_and_fullness_shows() -> None:
    states = np.array([FREE, RETIRED, CACHED, SHARED, 0, 1, 2, 0])
    rgb = memory.paint(states, np.array([0, 0, 1, 1, 1, 1, 1, 0.0]))
    assert len(np.unique(rgb.round(3), axis=0)) == len(states)
    full, half, empty = (memory.paint(np.array([3]), np.array([share]))[0] for share in (1.0, 0.5, 0.0))
    assert full.sum() < half.sum() < empty.sum() < memory.paint(np.array([FREE]), np.array([0.0])).sum()


def test_a_run_gives_a_row_and_a_timeline_for_each_allocator(runs: tuple[pd.DataFrame, dict[str, Timeline]]) -> None:
    table, timelines = runs
    assert table.variant.tolist() == list(timelines) == FOUR
    assert (table["KV tokens"] <= 320).all()
    assert table.set_index("variant")["internal waste, %"].idxmax() == "per_request"
    assert all(len(t.frames) == -(-len(t.times) // 3) for t in timelines.values())


def figures(runs: tuple[pd.DataFrame, dict[str, Timeline]]) -> dict[str, LabFigure]:
    timelines = runs[1]
    toy = {name: make_allocator(EngineConfig(kv_allocator=name, page_size=4), 64, max_len=32) for name in FOUR}
    for a in toy.values():
        a.reserve(0, 9, 20)
        a.written(0, [-1] * 9)
    lines = pd.DataFrame({"x": [10, 50, 10, 50], "y": [1.0, 2.0, 1.0, 3.0], "series": list("aabb"), "kind": "simulated"})
    return {
        "filling": memory.filling(timelines, claim=LONG, footer=FOOTER),
        "first moment": memory.moment(timelines, 0.0, claim=LONG, footer=FOOTER),
        "last moment": memory.moment(timelines, 1.0, claim=LONG, footer=FOOTER),
        "strips": memory.strips(toy, claim=LONG, footer=FOOTER, blocks=64),
        "throughput": memory.throughput(lines, claim=LONG, footer=FOOTER, mark=50),
    }


def test_no_text_of_any_picture_is_clipped(runs: tuple[pd.DataFrame, dict[str, Timeline]]) -> None:
    for name, figure in figures(runs).items():
        assert figure.texts_outside() == [], name
        assert figure.claim == LONG


def test_ours_beside_the_article_is_relative_to_the_first_row(runs: tuple[pd.DataFrame, dict[str, Timeline]]) -> None:
    table = memory.serving_table(runs[0], {"per_request": (35, 128, 520), "paged": (8, 76, 850)}, 5)
    assert table.loc["per request", ["P99, ours", "req/s, ours", "req/s, article"]].tolist() == ["1.00"] * 3
    assert table.loc["paged", "req/s, article"] == "1.63"


def test_lines_that_coincide_are_all_seen() -> None:
    same = pd.DataFrame({"x": [10, 50] * 3, "y": [1.0, 2.0] * 3, "series": list("aabbcc"), "kind": "simulated"})
    figure = memory.throughput(same, claim="c", footer=FOOTER)
    widths = [line.get_linewidth() for line in figure.axes[0].lines]
    assert widths == sorted(widths, reverse=True)
    assert len(set(widths)) == 3


def test_an_allocator_keeps_its_colour_in_whatever_order_rows_come() -> None:
    def colours(names: list[str]) -> dict[str, object]:
        rows = pd.DataFrame({"x": [10] * len(names), "y": 1.0, "series": names, "kind": "recorded"})
        figure = memory.throughput(rows, claim="c", footer=FOOTER)
        return {str(line.get_label()): (line.get_color(), line.get_marker()) for line in figure.axes[0].lines}

    names = [name.replace("_", " ") for name in FOUR]
    assert colours(names) == colours(names[::-1])
    assert len(set(colours(names).values())) == 4
    assert colours(["paged"]).items() <= colours(names).items()


def test_what_is_recorded_becomes_a_row_a_variant_and_concurrency(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "data_dir", lambda: tmp_path)
    monkeypatch.setattr(tables, "home_dir", lambda: tmp_path / "home")
    assert memory.recorded("nvidia-h200", "m").empty
    with Recorder("kv_allocators", "nvidia-h200", out=tmp_path / "measurements", command="test") as record:
        for concurrency in (400, 25):
            for variant, rate in (("paged", 9.0), ("contiguous_pool", 8.0)):
                params = {"model": "m", "concurrency": concurrency, "workload": "azure_conversation"}
                record.add("throughput", rate, "req/s", variant=variant, params=params)
                record.add("latency", 1500.0, "ms", variant=variant, params=params | {"quantile": 99})
                record.add("throughput", 99.0, "req/s", variant=variant, params=params | {"workload": "equal_requests"})
                record.add("throughput", 77.0, "req/s", variant=variant, kind="simulated", params=params)
    table = memory.recorded("nvidia-h200", "m")
    assert table.concurrency.tolist() == [25, 25, 400, 400]
    assert table.variant.tolist() == ["paged", "contiguous_pool"] * 2
    assert table["requests a second"].tolist() == [9.0, 8.0] * 2
    assert table["P99, s"].tolist() == [1.5] * 4
    assert table["P50, s"].isna().all()
    assert memory.recorded("nvidia-h200", "m", "simulated")["requests a second"].tolist() == [77.0] * 4


def test_on_the_machine_itself_variants_take_turns_and_the_middle_one_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first turn that pays for compiling kernels is not what a reader is shown."""
    loaded = load("random:llama-tiny", device="cpu", dtype="float32")
    order: list[str] = []

    def slow_first(engine: Any, workload: Any, *, warm: int) -> Any:
        outcome = play(engine, workload, warm=warm)
        order.append(engine.config.kv_allocator)
        outcome.started_s, outcome.ended_s = 0.0, (100.0, 3.0, 2.0, 1.0, 4.0, 5.0)[len(order) - 1]
        return outcome

    monkeypatch.setattr(memory, "play", slow_first)
    lots = Load("llama-tiny", 3, 6, small_talk, kv_tokens=320)
    with Recorder("kv_allocators", "here", out=tmp_path, command="test") as record:
        table = memory.measured(loaded, lots, ["contiguous_pool", "paged"], recorder=record, turns=3)
    assert [name[0] for name in order] == list("cppccp")
    seconds = 6 / table.set_index("variant")["requests a second"]
    assert seconds.round(3).to_dict() == {"contiguous_pool": 4.0, "paged": 3.0}  # of 100 1 4 and of 3 2 5
    rates = {row.variant: row.median for row in record.rows if row.metric == "throughput"}
    assert rates == pytest.approx(dict(zip(table.variant, table["requests a second"])))
