"""What pages promise: shared while equal, copied when they part, kept for the next equal prompt, never lost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdlab.allocators.interface import CACHED, FREE, RETIRED, SHARED
from pdlab.allocators.paged import Paged
from pdlab.core.errors import AllocatorError, CapacityError
from pdlab.core.plan import KVCopy


def filled(allocator: Paged, rid: int, tokens: list[int]) -> None:
    assert allocator.reserve(rid, len(tokens))
    allocator.written(rid, tokens)


@given(st.integers(1, 256), st.lists(st.integers(1, 300), min_size=1, max_size=8))
@settings(deadline=None, max_examples=60)
def test_internal_waste_is_less_than_a_page_a_request_and_external_waste_is_none(size: int, lengths: list[int]) -> None:
    a = Paged(4096, size)
    for rid, n in enumerate(lengths):
        if a.reserve(rid, n):
            a.written(rid, [-1] * n)
    a.free(0) if 0 in a.live() else None
    stats = a.stats()
    assert stats.reserved - stats.held <= (size - 1) * stats.live
    assert stats.waste_external == 0.0
    assert stats.largest_free == stats.free


def test_a_refused_request_leaves_nothing_behind() -> None:
    a = Paged(64, 8)
    filled(a, 1, list(range(40)))
    before = a.layout()
    assert not a.reserve(2, 25)
    assert not a.reserve(1, 65)
    assert (a.layout(), a.live(), a.refusals) == (before, {1}, 2)
    assert a.reserve(2, 24)


def test_a_child_copies_only_the_rows_it_shares_and_only_when_it_writes() -> None:
    a = Paged(64, 8)
    filled(a, 1, list(range(11)))
    assert a.fork(1, 2)
    assert a.stats().reserved == 16
    assert a.take_ops() == ()
    assert a.reserve(2, 12)
    (copy,) = a.take_ops()
    assert copy == KVCopy(int(a.slots(1, 8, 9)[0]), int(a.slots(2, 8, 9)[0]), 3)
    assert a.reserve(1, 12)
    assert a.take_ops() == ()  # the parent goes on in place
    assert (a.slots(1, 0, 8) == a.slots(2, 0, 8)).all()


def test_a_child_left_alone_takes_the_last_page_over() -> None:
    a = Paged(16, 8)  # full: there is no page to copy into
    filled(a, 1, list(range(12)))
    a.fork(1, 2)
    assert not a.reserve(2, 13)
    a.free(1)
    assert a.reserve(2, 13)
    assert a.take_ops() == ()


def test_a_page_that_is_taken_over_is_no_longer_found_by_what_its_first_owner_wrote() -> None:
    a = Paged(64, 4, prefix_reuse=True)
    filled(a, 1, [0, 1, 2, 3, 4, 5])
    a.fork(1, 2)
    a.written(1, [6, 7], 6)  # the parent fills the page that the child still shares
    assert a.match_prefix(list(range(9))) == 8
    a.free(1)
    assert a.reserve(2, 8)
    a.written(2, [60, 70], 6)
    a.check()
    assert a.match_prefix(list(range(9))) == 4
    assert a.match_prefix([0, 1, 2, 3, 4, 5, 60, 70, 8]) == 8


def test_rows_that_a_step_in_flight_reads_are_not_taken_over() -> None:
    a = Paged(64, 4)
    filled(a, 1, [0, 1, 2, 3, 4])
    a.fork(1, 2)
    a.submitted(0)
    a.written(1, [5], 5)  # by step 0, which reads its own row
    a.free(1)
    assert a.reserve(2, 6)
    assert len(a.take_ops()) == 1
    a.check()


def test_a_prefix_never_covers_the_last_token() -> None:
    a = Paged(64, 4, prefix_reuse=True)
    filled(a, 1, list(range(12)))
    assert [a.match_prefix(list(range(n))) for n in (3, 4, 5, 8, 9, 12, 13, 40)] == [0, 0, 4, 4, 8, 8, 12, 12]
    assert a.match_prefix(np.arange(13)) == 12
    assert a.match_prefix([1, *range(1, 12)]) == 0


def test_a_page_of_unknown_tokens_is_found_once_they_are_known() -> None:
    a = Paged(64, 4, prefix_reuse=True)
    a.reserve(1, 8)
    a.written(1, [0, 1, -1, -1, -1])  # sampled, and still on the device
    assert a.match_prefix(list(range(9))) == 0
    a.written(1, [2, 3, 4], 2)
    a.appended([1], [5], [5])
    a.written(1, [6, 7], 6)
    assert a.match_prefix(list(range(9))) == 8


def test_the_least_recently_used_end_of_a_prefix_is_evicted_first() -> None:
    a = Paged(24, 4, prefix_reuse=True)
    filled(a, 1, list(range(12)))
    a.free(1)
    filled(a, 2, list(range(100, 112)))
    a.free(2)
    assert a.adopt_prefix(3, list(range(9))) == 8  # used again: younger than request 2's pages
    a.free(3)
    assert a.stats().cached == a.stats().free == 24
    assert a.reserve(4, 4)
    assert a.match_prefix(list(range(13))) == 8
    assert a.reserve(4, 16)
    assert a.match_prefix(list(range(100, 113))) == 0
    assert a.match_prefix(list(range(13))) == 8


def test_a_page_is_adopted_even_while_it_waits_for_a_step_in_flight() -> None:
    a = Paged(32, 4, prefix_reuse=True)
    filled(a, 1, list(range(9)))
    a.submitted(5)
    a.free(1)
    assert a.stats().retired == 12
    assert a.adopt_prefix(2, list(range(9))) == 8
    a.retire(5)
    a.check()
    assert (a.stats().retired, a.stats().free, a.stats().held) == (0, 24, 8)


def test_what_is_freed_is_given_out_only_after_the_steps_in_flight() -> None:
    a = Paged(32, 4)
    filled(a, 1, list(range(32)))
    a.submitted(0)
    a.submitted(1)
    a.free(1)
    a.retire(0)
    assert not a.reserve(2, 1)
    a.retire(1)
    assert a.reserve(2, 32)


def test_layout_says_who_owns_each_page() -> None:
    a = Paged(24, 4, prefix_reuse=True)
    filled(a, 1, list(range(6)))
    a.fork(1, 2)
    assert a.reserve(2, 7)
    a.take_ops()
    filled(a, 3, list(range(50, 54)))
    a.free(3)
    a.submitted(0)
    a.free(2)
    assert a.layout() == [
        (0, 4, 1, 4),
        (4, 4, 1, 2),
        (8, 4, RETIRED, 0),
        (12, 4, CACHED, 4),
        (16, 4, FREE, 0),
        (20, 4, FREE, 0),
    ]
    a.fork(1, 4)
    assert [owner for _, _, owner, _ in a.layout()][:2] == [SHARED, SHARED]


def test_after_a_failed_step_nothing_is_found_and_what_runs_is_not_shared() -> None:
    a = Paged(64, 4, prefix_reuse=True)
    filled(a, 1, list(range(8)))
    filled(a, 2, list(range(50, 58)))
    a.free(2)
    a.drop_prefixes()
    a.check()
    assert (a.match_prefix(list(range(9))), a.stats().cached) == (0, 0)
    a.reserve(1, 12)
    a.written(1, [8, 9, 10, 11], 8)
    assert a.match_prefix(list(range(13))) == 0


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 30)), max_size=30), st.integers(1, 9))
@settings(deadline=None, max_examples=60)
def test_a_batch_of_calls_equals_the_calls_in_turn(wanted: list[tuple[int, int]], size: int) -> None:
    one, many = Paged(100, size), Paged(100, size)
    rids, lengths = [r for r, _ in wanted], [n for _, n in wanted]
    granted = many.reserve_many(rids, lengths)
    for rid, n in wanted[:granted]:
        assert one.reserve(rid, n)
    assert granted == len(wanted) or not one.reserve(*wanted[granted])
    live = sorted(many.live())
    room = [many.room(rid) for rid in live]
    for a in (one, many):
        for rid, n in zip(live, room, strict=True):
            a.written(rid, [-1] * (n - 1))
    many.appended(live, [7] * len(live), [n - 1 for n in room])
    for rid, n in zip(live, room, strict=True):
        one.written(rid, [7], n - 1)
    assert many.stats() == one.stats()
    lo = [n // 2 for n in room]
    together = many.slots_many(live, lo, room)
    assert together.tolist() == [s for rid, a, b in zip(live, lo, room, strict=True) for s in one.slots(rid, a, b)]
    table = many.page_tables(live)
    assert [row[: len(one.page_table(rid))].tolist() for row, rid in zip(table, live, strict=True)] == [
        one.page_table(rid).tolist() for rid in live
    ]


@pytest.mark.parametrize("call", ["free", "page_table", "room"])
def test_asking_for_an_unknown_request_is_a_clear_error(call: str) -> None:
    with pytest.raises(AllocatorError, match="request 9 owns nothing here"):
        getattr(Paged(16, 4), call)(9)


def test_misuse_is_refused_and_changes_nothing() -> None:
    a = Paged(32, 4)
    filled(a, 1, list(range(5)))
    for misuse in (
        lambda: a.written(1, [0] * 4, 5),  # beyond its room
        lambda: a.written(1, [0], 6),  # leaves a gap
        lambda: a.slots(1, 0, 9),
        lambda: a.fork(1, 1),
        lambda: a.adopt_prefix(1, [1, 2]),
    ):
        with pytest.raises(AllocatorError):
            misuse()
    a.check()
    with pytest.raises(CapacityError, match="3 slots hold no page of 4 tokens"):
        Paged(3, 4)


def test_check_notices_a_leaked_page_and_a_page_with_two_owners() -> None:
    a = Paged(32, 4)
    filled(a, 1, list(range(9)))
    filled(a, 2, list(range(9)))
    page = a.pages.free.pop()
    with pytest.raises(AllocatorError, match="leaked"):
        a.check()
    a.pages.free.append(page)
    a.check()
    a._owners[2].pages[0] = a._owners[1].pages[0]
    with pytest.raises(AllocatorError, match="reference counts"):
        a.check()
