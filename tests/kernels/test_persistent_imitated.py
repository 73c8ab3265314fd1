"""The persistent decode kernel's own code on a CPU: right, whoever is next, and never outside the memory that it is given.

How programs share out work and wait, and every address, are the kernel's; the rest is imitated, see imitated_gluon. Launches
are dependent ones, and touching any tensor before the kernel before has ended is an error, but for weights by the copy engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from imitated_gluon import Imitation, TooEarly
from imitated_values import OutOfBounds, Sparse
from persistent_cases import (
    TOLERANCE,
    StackCase,
    apart,
    at_length,
    begun_again,
    exact,
    given_up,
    leave_nothing_else,
    stack_errors,
)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from pdlab.kernels import decode_stack
from pdlab.kernels.persistent_decode import WRAP, persistent_decode_kernel

BASE: dict[str, Any] = {"hidden": 128, "heads": 4, "kv_heads": 2, "dim": 64, "ffn": 128, "dtype": "bfloat16", "programs": 3}


def case(**more: Any) -> StackCase:
    return StackCase(**BASE | more)


@pytest.fixture(autouse=True)
def _imitated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(decode_stack, "persistent_decode_kernel", Imitation(persistent_decode_kernel, early=()))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors of some hundred elements
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "settings",
    [
        {"length": 1, "page": 16},
        {"length": 70, "programs": 9},  # four parts of each head's cache, and a program that has none
        {"length": 33, "page": 1, "programs": 2},
        {"length": 21, "programs": 70, "layers": 1},  # more programs than any product has tasks
        {"length": 100, "kind": "extent", "page": 1},
        {"length": 40, "ffn": 1152, "layers": 1},  # two panels, of which the second is not full
        {"length": 9, "heads": 6, "tile": {"u_words": False, "stages": 2}},
    ],
    ids=str,
)
def test_two_launches_match_the_plain_operations(settings: dict[str, Any]) -> None:
    found = stack_errors(case(**settings))
    assert found.pop("counters") == 0
    assert max(found.values()) < TOLERANCE, found


@pytest.mark.parametrize("most", [1, 96])
def test_the_bound_on_the_length_may_be_far_from_the_length(most: int) -> None:
    """A graph knows the bound alone, by which the cache is cut in parts: here one, and more than there is cache for."""
    here = case(length=96, programs=5, layers=1, page=16, heads=2, kv_heads=1)
    x, layers, rope, view = here.make()
    stack = here.stack(layers)
    for length in (96, 1, 33):
        now = at_length(view, length)
        got = stack(x, rope, replace(now, max_kv=most))
        assert apart(got, exact(x, layers, rope, now)) < TOLERANCE


def test_scores_far_below_zero_count_like_any_others() -> None:
    """Of four parts' places one has a key; what stands for the others must be below every score."""
    here = case(length=1, programs=9, layers=1)
    x, layers, rope, view = here.make()
    heads = layers[0].qkv.view(-1, here.dim, here.hidden)
    heads[:4], heads[4:6] = heads[[0, 0, 2, 2]], -20 * heads[[0, 2]]  # k is -20 q: scores of some -200
    assert apart(here.stack(layers)(x, rope, view), exact(x, layers, rope, view)) < TOLERANCE


@pytest.mark.parametrize("settings", [{"page": 16}, {"page": 1}, {"page": 1, "kind": "extent"}], ids=str)
def test_an_empty_cache_is_read_nowhere(settings: dict[str, Any]) -> None:
    """What a graph's capture runs before there is a request."""
    here = case(length=5, layers=1, **settings)
    x, layers, rope, view = here.make()
    view.k.fill_(float("nan"))
    view.v.fill_(float("nan"))
    out = here.stack(layers)(x, rope, at_length(view, 0))
    assert out.isfinite().all()


@pytest.mark.parametrize(
    "settings",
    [
        {"length": 1, "heads": 16, "page": 3},  # a group of 8; nothing is older than the newest
        {"length": 16, "dim": 128, "heads": 2, "kind": "extent", "page": 1},  # one block, of which the newest is the last
        {"length": 17, "dim": 128, "heads": 16, "hidden": 128, "page": 1, "programs": 9},  # four parts, one of one key
        {"length": 33, "page": 16, "programs": 17},  # eight parts of 5 steps
        {"length": 300, "page": 3},  # one part of ten blocks
        {"length": 200, "dim": 128, "heads": 2, "page": 16, "programs": 4},  # two parts of seven blocks
    ],
    ids=str,
)
def test_nothing_behind_the_newest_token_is_read(settings: dict[str, Any]) -> None:
    here = case(layers=1, **settings)
    x, layers, rope, view = here.make()
    stack = here.stack(layers)
    leave_nothing_else(view, here.length)
    got = stack(x, rope, replace(view, k=view.k.clone(), v=view.v.clone()))
    assert apart(got, exact(x, layers, rope, view)) < TOLERANCE
    assert int(stack.failed) == 0


@pytest.mark.parametrize(
    ("near", "far", "u_words"), [(1, 1, True), (1, 1, False), (1, 3, False), (3, 1, True), (2, 3, False), (0, 0, True)]
)
def test_bounds_on_what_is_on_its_way_change_nothing(
    near: int, far: int, u_words: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rings are tried further in test_persistent_ring; here they meet with the hand-offs, whoever is next."""
    here = case(length=9, ffn=1152, layers=1, tile={"stages": 3, "near": near, "far": far, "u_words": u_words})
    x, layers, rope, view = here.make()
    stack = here.stack(layers)
    monkeypatch.setattr(decode_stack.persistent_decode_kernel, "seed", 100 * near + 10 * far + u_words)
    assert apart(stack(x, rope, view), exact(x, layers, rope, view)) < TOLERANCE
    assert int(stack.failed) == int(stack.count.abs().sum()) == 0


def test_two_stacks_take_turns() -> None:
    """Each has words and epochs of its own, and a launch begins before the other's has ended."""
    one, two = (case(layers=1, length=9, seed=seed) for seed in (1, 2))
    made = [(here.make(), here) for here in (one, two)]
    stacks = [here.stack(layers) for (_, layers, _, _), here in made]
    wanted = [exact(x, layers, rope, view) for (x, layers, rope, view), _ in made]
    for turn in (0, 1, 0):
        x, _, rope, view = made[turn][0]
        assert apart(stacks[turn](x, rope, view), wanted[turn]) < TOLERANCE


def test_a_read_ahead_of_the_kernel_befores_end_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    here = case(layers=1, length=3)
    x, layers, rope, view = here.make()
    stack = here.stack(layers)
    hasty = Imitation(persistent_decode_kernel, early=(), wait_for_the_kernel_before=lambda: None)
    monkeypatch.setattr(decode_stack, "persistent_decode_kernel", hasty)
    with pytest.raises(TooEarly, match="EPOCH is touched"):
        stack(x, rope, view)
    stack.tile = replace(stack.tile, pdl=False)
    assert stack(x, rope, view).isfinite().all(), "an ordinary launch begins when all before it has ended"


@pytest.mark.parametrize("more_pages", [-1, 1], ids=["layers 2^31 elements apart at most", "layers further apart"])
def test_a_cache_beyond_32_bits_gives_what_a_small_one_gives(more_pages: int) -> None:
    here = case(length=70, page=16, layers=3, heads=2, kv_heads=1)
    x, layers, rope, view = here.make()
    stack = here.stack(layers)
    used, cells = range(5), here.kv_heads * here.page * here.dim
    pages = 2**31 // cells + more_pages
    far = replace(view, block_table=view.block_table.clone(), slots=view.slots.clone())
    for name in ("k", "v"):
        near, cache = getattr(view, name), Sparse((here.layers, pages, *view.k.shape[2:]), torch.bfloat16)
        for layer in range(here.layers):
            for i in used:
                page = near[layer, view.block_table[0, i]].flatten()
                cache.put((layer * pages + pages - 1 - i) * cells + torch.arange(cells), page)
        far = replace(far, **{name: cache})
    far.block_table[0, : len(used)] = torch.tensor([pages - 1 - i for i in used])
    assert torch.equal(stack(x, rope, at_length(far, 70)), stack(x, rope, view))


def test_a_wait_that_gives_up_ends_with_nan_and_the_next_launch_is_right() -> None:
    assert given_up(case(layers=1)) == {"lost": True, "failed": 1, "after": 0.0, "left": 0}


def test_epochs_that_begin_again_change_nothing() -> None:
    assert begun_again(case(layers=1, length=3)) == [(WRAP.value, 0.0), (0, 0.0), (2, 0.0), (4, 0.0)]


def test_what_the_host_can_know_to_be_out_of_bounds_is_refused() -> None:
    here = case(layers=2)
    x, layers, rope, view = here.make()
    stack = here.stack(layers)
    longer = replace(view, max_kv=1000)
    for changed, why in (
        (view.layer(0), "all layers"),
        (replace(view, k=view.k[:1]), "all layers"),
        (replace(view, page_size=4), "all layers"),
        (replace(view, v=view.v[:, :-1]), "alike"),
        (replace(view, k=view.k.transpose(0, 1).contiguous().transpose(0, 1)), "contiguous"),
        (longer, "a row each"),
    ):
        with pytest.raises(ValueError, match=why):
            stack(x, rope, changed)
    enough = replace(rope, cos=rope.cos.repeat(50, 1), sin=rope.sin.repeat(50, 1))
    with pytest.raises(ValueError, match="do not hold"):
        stack(x, enough, longer)
    with pytest.raises(ValueError, match="one contiguous row"):
        stack(x.repeat(2, 1), rope, view)
    stack.tile = replace(stack.tile, traced=True)
    with pytest.raises(ValueError, match="stamps"):
        stack(x, rope, view)


def test_a_stack_is_not_made_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    here = case()
    layers = here.make()[1]
    before = [w.qkv.data_ptr() for w in layers]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="run the step once before"):
        here.stack(layers)
    assert [w.qkv.data_ptr() for w in layers] == before, "a graph may read them"


@gluon.jit
def astray(X, N, place, factor):
    gl.store(X + place, gl.load(N + place * factor // factor))


@pytest.mark.parametrize("place", [-1, 4])
def test_the_imitation_notices_one_element_out_of_bounds(place: int) -> None:
    n = torch.arange(4.0)
    launch = Imitation(astray)[(1,)]
    x = torch.zeros(4)
    launch(x, n, 3, 2)
    assert x.tolist() == [0, 0, 0, 3]
    with pytest.raises(OutOfBounds, match=rf"N\[{place} "):
        launch(x, n, place, 1)
    if place > 0:
        with pytest.raises(OutOfBounds, match=r"X\[4 "):
            launch(x, torch.zeros(5), place, 1)


def test_the_imitation_notices_what_32_bits_do_not_hold() -> None:
    launch = Imitation(astray)[(1,)]
    with pytest.raises(OverflowError, match="32 bits"):
        launch(torch.zeros(4), torch.zeros(4), 3, 1 << 30)
    launch(torch.zeros(4), torch.zeros(4), 3, 1 << 40)  # an argument of 64 bits
