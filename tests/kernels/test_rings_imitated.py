"""Rings of weights on a CPU, by the kernels' own code: tiles that programs draw are all computed, once, and give the same.

How programs share out tiles and keep their rings is the kernels'; the rest is imitated, see imitated_gluon.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
from fused_cases import Case, double, exact, exact_norm, make_ops, sampling_case
from imitated_gluon import Imitation
from imitated_values import Dense
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from pdlab.bench.product_tiles import shapes
from pdlab.bench.ring_tiles import ring_ways
from pdlab.kernels import ring_kernels as rings
from pdlab.kernels.fused_ops import FusedOps
from pdlab.kernels.norm_product import NOTHING
from pdlab.kernels.ops import NormWeights
from pdlab.kernels.product_tiles import RingTile
from pdlab.kernels.projection_sample import EMPTY, GREEDY, LOGITS, Race
from pdlab.kernels.ring_product import draw, drawn, window_of
from pdlab.models.catalogue import config_of

TOLERANCE = 1.2e-2  # as on a GPU: x, y and the result are rounded to 8 bits
SMALL: dict[str, Any] = {"tokens": 1, "dtype": "bfloat16", "hidden": 128, "heads": 4, "kv_heads": 2, "dim": 64, "ffn": 256}
KERNELS = ("ring_norm_product", "ring_residual_product", "ring_norm_qkv_rope", "ring_project")


@pytest.fixture(autouse=True)
def programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """An imitated device: `multi_processor_count` programs a launch."""
    device = SimpleNamespace(multi_processor_count=3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    for name in KERNELS:  # 64-bit words of the noise are not what is tried here, and not imitated
        kernel = getattr(rings, f"{name}_kernel")
        monkeypatch.setattr(rings, f"{name}_kernel", Imitation(kernel, noise_key=lambda seed, position: (seed, position)))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors of some hundred elements
    yield device
    torch.set_num_threads(threads)


class Writes:
    """How often each element of each tensor is written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times: dict[int, Counter[int]] = {}
        put = Dense.put

        def counted(tensor: Dense, index: torch.Tensor, values: torch.Tensor) -> None:
            self.times.setdefault(tensor.flat.data_ptr(), Counter()).update(index.flatten().tolist())
            put(tensor, index, values)

        monkeypatch.setattr(Dense, "put", counted)

    def of(self, tensor: torch.Tensor) -> list[int]:
        times = self.times.pop(tensor.data_ptr(), Counter())
        return [times[i] for i in range(tensor.numel())]


def ring_ops(case: Case, tile: RingTile, **options: Any) -> FusedOps:
    """Operations whose products all have this ring."""
    ops, w = make_ops(case, **options), case.make()[1]
    ops.ring = True
    for op, weight in (("norm_qkv_rope", w.qkv), ("out_residual", w.out), ("norm_mlp_up", w.up), ("down_residual", w.down)):
        ops.ring_tiles[op, *weight.shape] = tile
    return ops


def layer(case: Case, ops: FusedOps) -> dict[str, torch.Tensor]:
    x, w, rope, view, more = case.make()
    w.following = w.qkv
    q = ops.norm_qkv_rope(x, w, rope, view)
    return {
        "q": q, "k": view.k, "v": view.v, "out": ops.out_residual(more["attn"], x, w), "up": ops.norm_mlp_up(x, w),
        "down": ops.down_residual(more["u"], x, w),
    }  # fmt: skip


def apart(mine: torch.Tensor, right: torch.Tensor) -> float:
    return float((mine.double() - right).abs().max() / right.abs().max())


def test_drawn_tiles_give_what_given_ones_give_and_both_are_right() -> None:
    """The operations of a layer, which share their counter."""
    case, tile = Case(**SMALL), RingTile(1, 2)
    right, plain = exact(case), layer(case, ring_ops(case, tile))
    assert all(apart(plain[name], right[name]) < TOLERANCE for name in plain)
    for run in (1, 3):
        ops = ring_ops(case, replace(tile, draw=run))
        for _ in range(2):
            found = layer(case, ops)
            assert int(ops.drawn) == 0, "as it was, for the next launch"
            assert all(torch.equal(found[name], plain[name]) for name in plain)


@pytest.mark.parametrize(
    ("k", "tile"),
    [
        (1152, RingTile(1, 3)),  # two pieces a tile, the second a part of a panel
        (2304, RingTile(1, 2)),  # more pieces than stages
        (2304, RingTile(1, 7)),
        (3968, RingTile(2, 4)),  # two pieces of two panels
    ],
    ids=str,
)
def test_tiles_of_several_pieces_come_in_their_order(k: int, tile: RingTile) -> None:
    g = torch.Generator().manual_seed(k)
    u, weight, x = (torch.randn(shape, generator=g).bfloat16() for shape in ((1, k), (8 * 23, k), (1, 8 * 23)))
    right = x.double() + u.double() @ weight.double().T
    count = torch.zeros(1, dtype=torch.int32)
    norm = NormWeights(1 + 0.2 * torch.randn(k, generator=g).bfloat16(), None, 1e-5)
    normed = exact_norm(u.double(), double(norm)) @ weight.double().T
    plain = rings.ring_residual_product(u, weight, x, tile, count)
    alone = rings.ring_norm_product(u, norm, weight, NOTHING, tile, count)
    assert apart(plain, right) < TOLERANCE
    assert apart(alone, normed) < TOLERANCE
    for run in (1, 2, 4):
        drawing = replace(tile, draw=run)
        assert rings.given_tiles(drawing, k, 3, 23)
        assert torch.equal(rings.ring_residual_product(u, weight, x, drawing, count), plain)
        assert torch.equal(rings.ring_norm_product(u, norm, weight, NOTHING, drawing, count), alone)
        assert int(count) == 0


@pytest.mark.parametrize("tile", [RingTile(1, 2, ahead=3), RingTile(1, 2, ahead=3, draw=2)], ids=str)
def test_asking_for_the_next_products_weights_stays_within_them(tile: RingTile) -> None:
    case = Case(**SMALL)
    plain = layer(case, ring_ops(case, RingTile(1, 2)))
    found = layer(case, ring_ops(case, tile, prefetch=True))
    assert all(torch.equal(found[name], plain[name]) for name in plain)


@pytest.mark.parametrize("want", [GREEDY, LOGITS])
@pytest.mark.parametrize("count", [2, 7])
def test_the_vocabularys_drawn_tiles_are_written_once_and_its_race_has_one_winner(
    want: int, count: int, programs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs.multi_processor_count = count
    x, head, sampling = sampling_case(3, 1, 64 * 8, 256, torch.bfloat16)
    race, tickets, writes = Race("cpu"), torch.zeros(1, dtype=torch.int32), Writes(monkeypatch)
    given_out = rings.ring_project(x, head, want, sampling, RingTile(1, 3), race, tickets)
    writes.times.clear()
    for run in (1, 2, 5):
        for _ in range(2):
            out = rings.ring_project(x, head, want, sampling, RingTile(1, 3, draw=run), race, tickets)
            assert torch.equal(out, given_out)
            assert int(tickets) == int(race.done) == 0
            assert int(race.best[0]) == EMPTY
            if want == LOGITS:
                assert writes.of(out) == [1] * 512
    logits = rings.ring_project(x, head, LOGITS, sampling, RingTile(1, 3), race, tickets)
    if want == GREEDY:
        assert int(given_out) == int(logits.argmax())


@pytest.mark.parametrize("seed", range(12))
def test_every_drawn_tile_is_computed_once_however_programs_run(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The residual kernel by itself, with any first tiles and runs, and as many tiles as make the last run partial or whole."""
    g = torch.Generator().manual_seed(seed)

    def some(least: int, most: int) -> int:
        return int(torch.randint(least, most + 1, (), generator=g))

    stages, count, run, k = some(2, 5), some(1, 9), some(1, 4), 128
    first = window_of(k, 1, stages, run) + some(0, 2)
    tiles = (first + 1) * count + some(0, 20)
    u, weight, x = (torch.randn(shape, generator=g).bfloat16() for shape in ((1, k), (8 * tiles, k), (1, 8 * tiles)))
    tickets, writes = torch.zeros(1, dtype=torch.int32), Writes(monkeypatch)
    fixed = dict(OUTPUTS=8 * tiles, K=k, PANELS=1, STAGES=stages, HINT=False, AHEAD=0, NEXT_SIZE=0, NEXT_APART=0)  # noqa: C408
    rings.ring_residual_product_kernel.seed = 100 * seed
    for _ in range(2):
        out = torch.full_like(x, float("nan"))
        rings.ring_residual_product_kernel[(count,)](
            u, rings._descriptor(weight), weight, x, out, tickets, tiles, RUN=run, FIRST=first, **fixed
        )
        assert writes.of(out) == [1] * 8 * tiles
        assert int(tickets) == 0
        whole = (tiles - first * count) // run
        assert writes.of(tickets) == [whole + count + 1], "each whole run, one more a program, and back to zero"
        right = x.double() + u.double() @ weight.double().T
        assert apart(out, right) < TOLERANCE


@gluon.jit
def tickets_kernel(DRAW, OUT, tiles, WINDOW: gl.constexpr, RUN: gl.constexpr, FIRST: gl.constexpr):
    ids = ()
    for i in gl.static_range(WINDOW):
        ids = ids + (gl.program_id(0) + i * gl.num_programs(0),)  # type: ignore[assignment]  # noqa: RUF005
    t = 0
    while ids[0] < tiles:
        gl.atomic_add(OUT + ids[0], 1)
        due, ticket = draw(DRAW, ids[WINDOW - 1], t + WINDOW, tiles, RUN, FIRST)
        ids = ids[1:] + (drawn(DRAW, due, ticket, ids[WINDOW - 1], t + WINDOW, tiles, RUN, FIRST),)  # noqa: RUF005
        t += 1


@given(
    data=st.data(), programs=st.integers(1, 8), window=st.integers(1, 5), run=st.integers(1, 6), seed=st.integers(0, 1 << 20)
)
@settings(max_examples=100, deadline=None)
def test_tickets_are_every_tile_once_and_leave_the_counter_zero(
    data: st.DataObject, programs: int, window: int, run: int, seed: int
) -> None:
    first = window + data.draw(st.integers(0, 3))
    tiles = (first + 1) * programs + data.draw(st.integers(0, 40))
    tickets, launch = torch.zeros(1, dtype=torch.int32), Imitation(tickets_kernel, seed)
    for _ in range(2):
        times = torch.zeros(tiles, dtype=torch.int32)
        launch[(programs,)](tickets, times, tiles, WINDOW=window, RUN=run, FIRST=first)
        assert times.tolist() == [1] * tiles
        assert int(tickets) == 0


def test_tiles_are_drawn_only_where_enough_are_left() -> None:
    """Each program computes at least one more on average, and its ring never asks for one that is not drawn yet."""
    tile = RingTile(1, 7, draw=2)
    for tiles in range(132, 4000, 7):
        first = rings.given_tiles(tile, 2048, 132, tiles)
        assert first == 0 or (first >= window_of(2048, 1, 7, 2) and tiles >= (first + 1) * 132)
        assert (first > 0) == (tiles >= 6 * 132)
        assert rings.given_tiles(replace(tile, draw=0), 2048, 132, tiles) == 0


def test_the_sweeps_ways_that_draw_do_so_for_gates_and_up_alone() -> None:
    ways = {name: way for name, way in ring_ways().items() if name.endswith("drawn")}
    assert ways
    for model in ("llama-1b", "llama-3-8b", "llama-2-7b"):
        for op, (outputs, k) in shapes(config_of(model)).items():
            for name, way in ways.items():
                assert way(op, k) == replace(ring_ways()[name.removesuffix(", drawn")](op, k), draw=way(op, k).draw)
                assert (rings.given_tiles(way(op, k), k, 132, outputs // 8) > 0) == (op == "norm_mlp_up")
