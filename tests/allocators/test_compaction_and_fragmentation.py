"""When compaction runs, and what the measures of waste and the pictures of memory say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pdlab.allocators import make_allocator
from pdlab.allocators.compaction import Compactor
from pdlab.allocators.fragmentation import Timeline, average_waste, picture
from pdlab.allocators.interface import FREE, Allocator
from pdlab.core.config import EngineConfig
from pdlab.core.trace import TRACE_COLUMNS, TraceRow


def full_of_holes(**settings: Any) -> tuple[Compactor, Allocator]:
    """100 slots, every other 10 of them free."""
    config = EngineConfig(kv_allocator="contiguous_pool", page_size=1, pool_headroom=0.0, **settings)
    allocator = make_allocator(config, 100, max_len=100)
    for rid in range(10):
        allocator.reserve(rid, 10)
    for rid in range(0, 10, 2):
        allocator.free(rid)
    return Compactor(config, allocator), allocator


def test_nothing_moves_unless_a_trigger_is_set() -> None:
    compactor, allocator = full_of_holes()
    compactor.ended()
    compactor.before_plan()
    assert not compactor.refused(50)
    assert (compactor.runs, compactor.take_ops(), allocator.stats().waste_external) == (0, (), 0.8)


def test_compaction_runs_after_every_nth_request_that_ended() -> None:
    compactor, allocator = full_of_holes(compact_every=3)
    for _ in range(2):
        compactor.ended()
        compactor.before_plan()
    assert compactor.runs == 0
    compactor.ended()
    compactor.before_plan()
    assert (compactor.runs, allocator.stats().waste_external) == (1, 0.0)
    assert sum(op.tokens for op in compactor.take_ops()) == compactor.moved


def test_compaction_runs_when_too_much_free_memory_is_out_of_reach() -> None:
    for threshold, runs in ((0.85, 0), (0.75, 1)):
        compactor, _ = full_of_holes(compact_threshold=threshold)
        compactor.before_plan()
        assert compactor.runs == runs


def test_an_allocation_that_failed_is_tried_again_after_compaction() -> None:
    compactor, allocator = full_of_holes(compact_on_refusal=True)
    assert not allocator.reserve(99, 50)
    assert not compactor.refused(51)  # more than there is: moving would not help
    assert compactor.refused(50)
    assert allocator.reserve(99, 50)
    assert not compactor.refused(1)  # nothing is left to bring together


def test_a_compaction_larger_than_its_budget_goes_on_before_later_steps() -> None:
    compactor, allocator = full_of_holes(compact_every=1, compact_budget=10)
    compactor.ended()
    waste = []
    for _ in range(8):
        compactor.before_plan()
        assert sum(op.tokens for op in compactor.take_ops()) <= 10
        waste.append(allocator.stats().waste_external)
    assert waste[-1] == 0.0
    assert waste[0] > 0.0


def row(**values: Any) -> TraceRow:
    zeros: dict[str, Any] = {**dict.fromkeys(TRACE_COLUMNS, 0), "clock": "virtual", "pages_used": 1}
    return TraceRow(**{**zeros, **values})


def test_average_waste_weighs_each_step_by_how_long_it_lasted() -> None:
    trace = [
        row(t_start=0.0, t_end=3.0, waste_internal=0.1, waste_external=0.0),
        row(t_start=3.0, t_end=4.0, waste_internal=0.5, waste_external=0.4),
        row(t_start=4.0, t_end=90.0, waste_internal=0.0, pages_used=0),  # nobody was there
    ]
    waste = average_waste(trace)
    assert waste.internal == pytest.approx(20.0)
    assert waste.external == pytest.approx(10.0)
    assert average_waste([]).internal == 0.0


def test_a_picture_shows_who_owns_each_stretch_and_how_full_it_is() -> None:
    allocator = make_allocator(EngineConfig(page_size=8), 80, max_len=80)
    allocator.reserve(5, 20)
    allocator.written(5, list(range(20)))
    owners, filled = picture(allocator, 10)
    assert owners.tolist() == [5] * 3 + [FREE] * 7
    assert filled.tolist() == pytest.approx([1, 1, 0.5, 0, 0, 0, 0, 0, 0, 0])
    _, coarse = picture(allocator, 3)
    assert coarse.tolist() == pytest.approx([20 / (80 / 3), 0, 0], abs=1e-6)


@pytest.mark.parametrize("kind", ["paged", "contiguous_pool", "per_request", "hybrid"])
def test_pictures_account_for_every_token_held(kind: str) -> None:
    allocator = make_allocator(EngineConfig(kv_allocator=kind, page_size=4), 200, max_len=50)
    rng = np.random.default_rng(1)
    for rid in range(5):
        n = int(rng.integers(1, 40))
        allocator.reserve(rid, n, n)
        allocator.written(rid, [-1] * n)
    allocator.free(2)
    assert sum(held for *_, held in allocator.layout()) == allocator.stats().held
    for blocks in (200, 37):
        _, filled = picture(allocator, blocks)
        assert filled.sum() * allocator.capacity / blocks == pytest.approx(allocator.stats().held, rel=1e-5)


class Steps:
    def __init__(self) -> None:
        self.allocator = make_allocator(EngineConfig(page_size=4), 40, max_len=40)
        self.clock = self
        self.turn = 0

    def now(self) -> float:
        return self.turn / 10

    def step(self) -> str:
        self.turn += 1
        self.allocator.reserve(self.turn, 4 * self.turn)
        return "events"


def test_a_timeline_watches_an_engine_without_changing_what_it_returns() -> None:
    engine = Steps()
    timeline = Timeline(blocks=10, frame_every=2).watch(engine)
    assert [engine.step() for _ in range(3)] == ["events"] * 3
    assert timeline.times == [0.1, 0.2, 0.3]
    assert timeline.frame_times == [0.1, 0.3]
    assert timeline.series("reserved").tolist() == [4, 12, 24]
    image = timeline.image(colours=2)
    assert image.shape == (10, 2)
    assert image[:, 0].tolist() == [5] + [0] * 9  # request 1 in colour 1, the rest free
