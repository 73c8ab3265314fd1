"""Which caches the warp-specialized prefill kernels take, and what one item of theirs is; decided on the host."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_cases import make_case
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from pdlab.kernels.flash_prefill_hopper import SPARE, fits, heads_at_once, heads_that_fit, item_of
from pdlab.kernels.tuning import HopperTile

ALONE = HopperTile(3, 64, 4, turns=False, blocks=4, share=4)


@pytest.mark.parametrize(
    ("page", "paged", "takes"),
    [(1, False, True), (1, True, False), (7, True, False), (8, True, True), (16, True, True), (64, True, True),
     (96, True, False), (128, True, True), (192, True, False), (256, True, True)],
)  # fmt: skip
def test_pages_are_taken_where_tiles_and_pages_divide_each_other(page: int, paged: bool, takes: bool) -> None:
    q, view = make_case([300, 20], [30, 20], heads=4, kv_heads=2, dim=64, page=page, paged=paged, dtype="float16")
    assert fits(q, view) == takes


def test_other_head_sizes_dtypes_and_scattered_heads_are_left_to_the_plain_kernel() -> None:
    for dim, dtype in ((80, "float16"), (64, "float32")):
        q, view = make_case([30], [30], heads=4, kv_heads=2, dim=dim, dtype=dtype)
        assert not fits(q, view)
    q, view = make_case([30], [30], heads=4, kv_heads=2, dim=64, dtype="float16")
    packed = torch.cat((q, q), 1)
    assert fits(packed[:, :4], view)  # q out of a packed projection
    assert not fits(packed.transpose(0, 1).contiguous().transpose(0, 1), view)


@pytest.mark.parametrize(("group", "share"), [(1, 1), (2, 2), (3, 1), (4, 4), (6, 2), (8, 4)])
def test_an_item_takes_heads_that_read_the_same_keys(group: int, share: int) -> None:
    _, view = make_case([256, 20], [256, 20], heads=group, kv_heads=1, dim=64)
    assert item_of(ALONE, view, 32, group, 64, 16) == (ALONE, 256, share)


def test_heads_share_an_item_only_where_every_multiprocessor_gets_one() -> None:
    _, view = make_case([256] * 4, [256] * 4, heads=4, kv_heads=1, dim=64)
    assert item_of(ALONE, view, 32, 4, 64, 32)[2] == 4
    assert item_of(ALONE, view, 32, 4, 64, 33)[2] == 1


def test_items_of_few_prompts_are_shorter() -> None:
    tile = HopperTile(2, 64, 4, turns=0, blocks=4, places=3)
    _, view = make_case([256], [256], heads=4, kv_heads=1, dim=64)
    assert [item_of(tile, view, 32, 4, 128, at_once)[1] for at_once in (32, 33, 132)] == [256, 128, 128]


def test_items_are_of_several_blocks_only_where_the_longest_cache_fits_the_ring() -> None:
    _, view = make_case([257, 20], [100, 20], heads=4, kv_heads=1, dim=128)
    tile, rows, share = item_of(ALONE, view, 32, 4, 128, 132)
    assert (tile.blocks, tile.consumers, tile.block_n, tile.stages, rows, share) == (0, 2, 128, 2, 128, 1)
    streaming = replace(ALONE, blocks=3)  # as many blocks as consumers: each has one, nothing needs to stay
    assert item_of(streaming, view, 32, 4, 128, 132) == (streaming, 192, 1)


@pytest.mark.parametrize(("group", "pack"), [(1, 1), (2, 2), (3, 1), (4, 4), (8, 4)])
def test_packed_heads_share_a_tile_of_rows(group: int, pack: int) -> None:
    _, view = make_case([300], [300], heads=group, kv_heads=1, dim=64)
    tile = HopperTile(3, 128, 4, pack=4)
    assert item_of(tile, view, group, group, 64, 132) == (tile, 192 // pack, pack)


def rounds_of(kv_heads: int, at_once: int) -> list[int]:
    """Heads that run together, round by round, as rank_and_unit takes them."""
    return [min(at_once, kv_heads - first) for first in range(0, kv_heads, at_once)]


@pytest.mark.parametrize(
    ("kv_heads", "fit", "rounds"),
    [
        (8, 7.5, [8]),  # 16,384 tokens x 64 in half of an H200's 60 MiB
        (8, 3.75, [4, 4]),
        (32, 7.5, [8] * 4),
        (32, 3.75, [4] * 8),
        (32, 15, [16, 16]),
        (32, 25, [16, 16]),
        (8, 6.9, [4, 4]),  # not 7 and one at the end
        (7, 4, [4, 3]),
        (10, 4, [4, 4, 2]),
        (10, 3, [2] * 5),  # not three times 3 and one at the end
        (32, 6, [4] * 8),
        (32, 40, [32]),
        (8, 0.01, [1] * 8),
        (1, 0.5, [1]),
    ],
)
def test_heads_are_divided_evenly_into_as_few_rounds_as_have_room(kv_heads: int, fit: float, rounds: list[int]) -> None:
    assert rounds_of(kv_heads, heads_at_once(kv_heads, fit)) == rounds


@given(kv_heads=st.integers(1, 96), fit=st.floats(0, 128))
def test_rounds_have_room_no_few_heads_are_left_for_the_end_and_no_fewer_rounds_would_do(kv_heads: int, fit: float) -> None:
    def allowed(at_once: int) -> bool:
        return at_once == 1 or (at_once <= SPARE * fit and 2 * rounds_of(kv_heads, at_once)[-1] >= at_once)

    at_once = heads_at_once(kv_heads, fit)
    rounds = rounds_of(kv_heads, at_once)
    assert 1 <= at_once <= kv_heads
    assert allowed(at_once)
    assert not any(allowed(more) for more in range(at_once + 1, kv_heads + 1) if len(rounds_of(kv_heads, more)) < len(rounds))
    # with fewer heads at once there would be more rounds
    assert at_once == 1 or len(rounds_of(kv_heads, at_once - 1)) > len(rounds)


def test_twice_the_cache_takes_twice_the_heads() -> None:
    fits = [heads_that_fit(30 << 20, caches, 16384, 64) for caches in (1, 2)]
    assert fits == [7.5, 15]
    assert [heads_at_once(32, fit) for fit in fits] == [8, 16]


def test_a_ring_that_needs_more_hardware_barriers_than_there_are_is_refused() -> None:
    HopperTile(2, 64, 6)
    HopperTile(3, 64, 9, blocks=4)  # its places are given back otherwise
    with pytest.raises(ValueError, match="at most 6"):
        HopperTile(2, 64, 7)
