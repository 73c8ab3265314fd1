"""The pool, pieces of their own, and the hybrid: where room is found, what growth costs, what compaction brings together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdlab.allocators import make_allocator
from pdlab.allocators.contiguous_pool import ContiguousPool
from pdlab.allocators.extents import FreeExtents
from pdlab.allocators.hybrid import Hybrid, ThresholdRule
from pdlab.allocators.per_request import PerRequest
from pdlab.core.config import EngineConfig
from pdlab.core.errors import AllocatorError, CapacityError, ConfigError
from pdlab.core.plan import KVAllocate, KVCopy, KVFree


@given(
    st.lists(st.tuples(st.sampled_from(["take", "give", "pop", "at"]), st.integers(0, 40), st.integers(1, 9))), st.booleans()
)
@settings(deadline=None, max_examples=150)
def test_free_extents_are_the_set_of_free_units_in_the_fewest_pieces(steps: list[tuple[str, int, int]], best: bool) -> None:
    free = FreeExtents(40, "best" if best else "first")
    units = set(range(40))
    for what, at, n in steps:
        run = set(range(at, min(at + n, 40)))
        if what == "take":
            sizes = [size for _, size in free.extents() if size >= n]
            start = free.take(n)
            assert (start is None) == (not sizes)
            if start is not None:
                assert set(range(start, start + n)) <= units
                units -= set(range(start, start + n))
        elif what == "give" and run and not run & units:
            free.give(at, len(run))
            units |= run
        elif what == "pop" and units:
            assert free.pop() == max(units)
            units.remove(max(units))
        elif what == "at":
            possible = run <= units and at - 1 not in units and len(run) == n
            assert free.take_at(at, n) == possible
            units -= run if possible else set()
        assert set(free) == units
        assert len(free) == len(units)
        assert all(a + n < b for (a, n), (b, _) in zip(free.extents(), free.extents()[1:], strict=False))
        assert free.largest() == max((n for _, n in free.extents()), default=0)


def holes(fit: str) -> ContiguousPool:
    """Free extents of 30, 10 and 60 slots, in this order of address."""
    pool = ContiguousPool(150, quantum=1, fit=fit)
    for rid, size in enumerate((30, 20, 10, 30)):
        assert pool.reserve(rid, size)
    pool.free(0)
    pool.free(2)
    return pool


def test_first_fit_takes_the_lowest_hole_and_best_fit_the_smallest() -> None:
    for fit, start in (("first", 0), ("best", 50)):
        pool = holes(fit)
        assert pool.stats().waste_external == pytest.approx(40 / 100)
        assert pool.reserve(9, 8)
        assert pool.base(9) == start


def test_free_memory_in_pieces_is_refused_until_it_is_compacted() -> None:
    pool = holes("first")
    assert not pool.reserve(9, 61)
    pool.take_ops()
    copies = pool.compact(10_000)
    assert sum(op.tokens for op in copies) > 0
    assert pool.stats().waste_external == 0
    assert pool.reserve(9, 100)
    pool.check()


def test_making_room_for_one_request_moves_the_fewest_slots() -> None:
    """Gaps of 30, 10 and 60 between requests of 20 and 30: room for 61 costs 30, for 91 everything."""
    for room, moved in ((60, 0), (61, 30), (70, 30), (71, 50), (100, 50), (101, 0)):
        pool = holes("first")
        copies = pool.compact(10_000, room)
        pool.check()
        assert sum(op.tokens for op in copies) == moved
        assert (pool.stats().largest_free >= room) == (room <= 100)
    assert holes("first").compact(29, 61) == []


def test_a_request_grows_in_place_where_it_can_and_moves_where_it_must() -> None:
    pool = ContiguousPool(200, quantum=10)
    pool.reserve(1, 10)
    assert pool.reserve(1, 25)
    assert (pool.base(1), pool.room(1), pool.take_ops()) == (0, 30, ())
    pool.reserve(2, 10)
    assert pool.reserve(1, 31)
    assert pool.take_ops() == (KVCopy(0, 40, 30),)
    assert (pool.base(1), pool.moves) == (40, 1)
    assert pool.reserve(3, 30)
    assert pool.base(3) == 0


def test_headroom_is_given_up_before_a_request_is_refused() -> None:
    pool = ContiguousPool(60, quantum=1, headroom=0.5)
    pool.reserve(1, 10)
    assert pool.room(1) == 15
    pool.reserve(2, 10, longest=12)
    assert pool.room(2) == 12  # it can never use more
    assert pool.reserve(1, 30)  # 45 with headroom, and 33 are free
    assert pool.room(1) == 30


@pytest.mark.parametrize("in_flight", [False, True])
def test_compaction_moves_at_most_its_budget(in_flight: bool) -> None:
    pool = ContiguousPool(400, quantum=1)
    for rid in range(40):
        pool.reserve(rid, 10)
    for rid in range(0, 40, 2):
        pool.free(rid)
    if in_flight:
        pool.submitted(0)
    moved = []
    while copies := pool.compact(35):
        moved.append(sum(op.tokens for op in copies))
        pool.check()
        assert len(moved) < 100
    assert max(moved) <= 35
    pool.retire(0)
    while pool.compact(35):
        pass
    assert pool.stats().waste_external == 0


def test_the_budget_also_holds_for_pages() -> None:
    paged = make_allocator(EngineConfig(page_size=4), 80, max_len=80)
    for rid in range(10):
        paged.reserve(rid, 8)
    for rid in range(5):
        paged.free(rid)
    assert [sum(op.tokens for op in paged.compact(13)) for _ in range(5)] == [12, 12, 12, 4, 0]
    assert [owner < 0 for _, _, owner, _ in paged.layout()] == [False] * 10 + [True] * 10


def test_pieces_of_their_own_are_made_once_and_given_back_once() -> None:
    a = PerRequest(100, max_len=40, quantum=8)
    assert a.reserve(1, 5, longest=17)
    assert a.reserve(2, 3)
    assert not a.reserve(3, 1, longest=60)
    assert a.reserve(1, 17)
    a.free(1)
    assert a.take_ops() == (KVAllocate(1, 0, 24), KVAllocate(2, 24, 40), KVFree(1, 0))
    assert (a.room(2), a.compact(1000)) == (40, [])
    with pytest.raises(AllocatorError, match="admitted with"):
        a.reserve(2, 41)


def test_a_service_that_promises_output_reserves_it_for_everybody() -> None:
    a = PerRequest(4000, max_len=1000, promised=300)
    for rid, (n, longest, room) in enumerate([(50, 60, 352), (800, 850, 1008), (50, 500, 512)]):
        assert a.reserve(rid, n, longest)
        assert a.room(rid) == room  # whole quanta of 16
    h = Hybrid(4000, 16, threshold=360, max_len=1000, promised=300)
    assert h.reserve(1, 50, 60)
    assert h.reserve(2, 100, 110)
    assert h.split() == (22, 7)


def test_refusals_for_want_of_one_large_piece_are_told_apart() -> None:
    pool = holes("first")
    assert not pool.reserve(9, 61)
    assert not pool.reserve(9, 101)
    assert (pool.refusals, pool.refused_in_pieces) == (2, 1)


def test_pieces_of_different_lengths_leave_free_memory_that_no_request_can_use() -> None:
    a = PerRequest(96, max_len=96, quantum=1)
    for rid in range(4):
        a.reserve(rid, 1, longest=24)
    a.free(0)
    a.free(2)
    assert not a.reserve(9, 1, longest=25)
    assert (a.stats().free, a.stats().largest_free, a.stats().waste_external) == (48, 24, 0.5)


def hybrid(**settings: Any) -> Hybrid:
    return Hybrid(128, 4, **settings)


def test_small_requests_get_one_run_and_large_ones_pages_from_the_other_end() -> None:
    a = hybrid(threshold=20)
    assert a.reserve(1, 6, longest=18)
    assert a.reserve(2, 9, longest=60)
    assert a.page_table(1).tolist() == [0, 1, 2, 3, 4]
    assert a.page_table(2).tolist() == [31, 30, 29]
    assert a.split() == (5, 3)
    assert a.room(1) == 20


def test_a_request_that_outgrows_its_run_goes_on_in_pages_without_a_copy() -> None:
    a = hybrid(threshold=8)
    assert a.reserve(1, 5, longest=8)
    a.written(1, list(range(5)))
    before = a.slots(1, 0, 5)
    assert a.reserve(1, 14)
    assert (a.slots(1, 0, 5) == before).all()
    assert a.page_table(1).tolist() == [0, 1, 31, 30]
    assert a.take_ops() == ()


def test_where_no_run_is_left_a_small_request_takes_pages() -> None:
    a = hybrid(threshold=16)
    for rid in range(32):
        assert a.reserve(rid, 4, longest=4)
    for rid in range(0, 32, 2):
        a.free(rid)
    assert a.reserve(99, 10, longest=16)
    assert len(a.page_table(99)) == 3
    assert a.split()[1] == 3


def test_compaction_makes_room_for_runs_again() -> None:
    a = hybrid(threshold=16)
    for rid in range(16):
        a.reserve(rid, 8)
    for rid in range(0, 16, 2):
        a.free(rid)
    assert a.pages.free.largest() == 2  # type: ignore[attr-defined]
    assert a.compact(1000)
    assert a.pages.free.largest() == 16  # type: ignore[attr-defined]
    a.check()


def test_the_threshold_is_the_largest_whose_waste_stays_within_the_share() -> None:
    """Ten requests of each kind, 11 steps long. Pooled, a short one wastes 20 - 15 = 5 a step and a long one 900 - 105 = 795;
    held are 15 and 105 a step. Short ones alone: 50 of 50 + 1200 = 4 %. Both: 8000 of 9200 = 87 %."""
    rule = ThresholdRule(0.041, every=20)
    for _ in range(10):
        rule.ended(20, 10, 20)
        rule.ended(900, 100, 110)
    assert rule.threshold == 20
    strict, lax = ThresholdRule(0.039, every=20), ThresholdRule(0.88, every=20)
    for longest, first, last in rule._ended:
        strict.ended(longest, first, last)
        lax.ended(longest, first, last)
    assert (strict.threshold, lax.threshold) == (0, 900)


def test_the_learned_threshold_follows_the_traffic() -> None:
    a = Hybrid(4096, 16, waste=0.1)
    rng = np.random.default_rng(3)
    for rid in range(200):
        longest, answer = (32, 16) if rid % 2 else (2000, int(rng.integers(100, 200)))
        assert a.reserve(rid, 16, longest)
        assert a.reserve(rid, 16 + answer)
        a.written(rid, [-1] * (16 + answer))
        a.free(rid)
    assert a.threshold == 32
    assert a.reserve(999, 16, 32)
    assert a.split() == (2, 0)


@pytest.mark.parametrize("kind", ["contiguous_pool", "per_request", "hybrid", "paged"])
def test_memory_for_less_than_one_piece_is_refused_with_what_would_do(kind: str) -> None:
    with pytest.raises(CapacityError, match="more memory"):
        make_allocator(EngineConfig(kv_allocator=kind, page_size=16), 15, max_len=8)


@pytest.mark.parametrize(
    "setting",
    [{"pool_fit": "worst"}, {"pool_headroom": 1.0}, {"hybrid_threshold": 0}, {"promised_output_tokens": 0},
     {"hybrid_waste": -0.1}, {"compact_every": 0},
     {"compact_threshold": 0.0}, {"compact_threshold": 1.5}, {"compact_budget": 0}],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused_by_name(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting))):
        EngineConfig(**setting)
