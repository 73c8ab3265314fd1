"""The persistent decode kernel's ring of weights by itself: its producer and its products, on a CPU.

However few panels may be on their way, however small the ring and whoever is next: every product is right, no place is written
while it is read, and nobody waits for ever. Copies arrive in any order, see imitated_shared.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
from imitated_gluon import Imitation
from imitated_shared import Deadlock, Descriptor, Groups, Hazard, of_thread
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from pdlab.kernels.persistent_products import ROW, _multiply, _stream, _tile, counted, first_task
from pdlab.kernels.ring_product import LINES, PAIRS, PANEL, SEGMENTS, barrier, diagonal

TOLERANCE = 1e-5  # sums of exact products, in another order


@gluon.jit
def _read(
    ring, full, empty, one, two, layers,
    N1: gl.constexpr, K1: gl.constexpr, N2: gl.constexpr, K2: gl.constexpr,
    PANELS: gl.constexpr, STAGES: gl.constexpr, NEAR: gl.constexpr, FAR: gl.constexpr,
):  # fmt: skip
    i = 0
    for layer in range(layers):
        begin = layer * (N1 // 8 + N2 // 16)
        i = _stream(ring, full, empty, one, layer, begin, i, N1, K1, 0, PANELS, STAGES, NEAR, FAR)
        i = _stream(ring, full, empty, two, layer, begin + N1 // 8, i, N2, K2, -1, PANELS, STAGES, NEAR, FAR)


@gluon.jit
def _products(
    ring, full, empty, ys, vectors, results, COUNT, layers,
    N1: gl.constexpr, K1: gl.constexpr, N2: gl.constexpr, K2: gl.constexpr, PANELS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    X1, X2 = vectors
    OUT1, OUT2 = results
    lanes = gl.arange(0, PAIRS, ROW)
    i = 0
    for layer in range(layers):
        begin = layer * (N1 // 8 + N2 // 16)
        if first_task(begin) < N1 // 8:
            counted(X1, ys, COUNT, 0, COUNT, 1, K1)
        for tile in range(first_task(begin), N1 // 8, gl.num_programs(0)):
            a, b, i = _tile(ring, full, empty, ys, 1.0, i, K1, PANELS, STAGES)
            at = OUT1 + layer * N1 + tile * 8 + lanes
            gl.store(at, a)
            gl.store(at + PAIRS, b)
        if first_task(begin + N1 // 8) < N2 // 16:
            counted(X2, ys, COUNT, 0, COUNT, 1, K2)
        for task in range(first_task(begin + N1 // 8), N2 // 16, gl.num_programs(0)):
            c, i = _multiply(ring, full, empty, ys, i, 2, K2, PANELS, STAGES)
            for tile in gl.static_range(2):
                at = OUT2 + layer * N2 + (task * 2 + tile) * PAIRS + lanes
                gl.store(at, diagonal(c[2 * tile], ROW))
                gl.store(at + N2 // 2, diagonal(c[2 * tile + 1], ROW))


@gluon.jit
def ring_alone(
    X1, X2, ONE, TWO, OUT1, OUT2, COUNT, layers,
    N1: gl.constexpr, K1: gl.constexpr, N2: gl.constexpr, K2: gl.constexpr,
    PANELS: gl.constexpr, STAGES: gl.constexpr, NEAR: gl.constexpr, FAR: gl.constexpr,
):  # fmt: skip
    """Two products a layer, as W_out's and W_up's: OUT1 [layers, N1] of ONE [layers, N1, K1], OUT2 [layers, N2] of TWO."""
    LONGEST: gl.constexpr = K1 if K1 > K2 else K2
    ring = gl.allocate_shared_memory(ONE.dtype, [STAGES * 2 * PANELS, LINES, PANEL], ONE.layout)
    ys = gl.allocate_shared_memory(ONE.dtype, [(LONGEST // 16 + PANEL - 1) // PANEL, 16, PANEL], ONE.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES * PANELS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(empty.index(s), count=1)
    for s in gl.static_range(STAGES * PANELS):
        mbarrier.init(full.index(s), count=1)
    gl.warp_specialize([
        (_products, (ring, full, empty, ys, (X1, X2), (OUT1, OUT2), COUNT, layers, N1, K1, N2, K2, PANELS, STAGES)),
        (_read, (ring, full, empty, ONE, TWO, layers, N1, K1, N2, K2, PANELS, STAGES, NEAR, FAR)),
    ], [1], [40])  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors of some hundred elements
    yield
    torch.set_num_threads(threads)


class Cut:
    """A matrix's descriptor, as from_tensor makes it."""

    def __init__(self, weights: torch.Tensor) -> None:
        self.base = weights.view(-1, weights.shape[2] // SEGMENTS)
        self.block_shape = [LINES.value, PANEL.value]


def apart(
    programs: int, layers: int, panels: int, stages: int, near: int, far: int, pieces: tuple[int, int], seed: int,
    tiles: tuple[int, int] = (3, 2), **instead: Any,
) -> float:  # fmt: skip
    """How far both products of all layers are from the right ones. `tiles`: tasks of each; `pieces` of a row of each."""
    g = torch.Generator().manual_seed(seed)
    (n1, k1), (n2, k2) = ((each * n, 1024 * panels * p) for each, n, p in zip((8, 16), tiles, pieces, strict=True))

    def some(*shape: int) -> torch.Tensor:
        return torch.randint(-4, 5, shape, generator=g).bfloat16()

    x1, x2, one, two = some(k1), some(k2), some(layers, n1, k1), some(layers, n2, k2)
    out1, out2 = (torch.full((layers, n), float("nan")) for n in (n1, n2))
    Imitation(ring_alone, seed, **instead)[(programs,)](
        x1, x2, Cut(one), Cut(two), out1, out2, torch.zeros(1, dtype=torch.int32), layers,
        N1=n1, K1=k1, N2=n2, K2=k2, PANELS=panels, STAGES=stages, NEAR=near, FAR=far,
    )  # fmt: skip
    right = [(w.float() @ x.float()) for w, x in ((one, x1), (two, x2))]
    off = [float((mine - r).abs().max() / r.abs().max()) for mine, r in zip((out1, out2), right, strict=True)]
    return max(error if error == error else float("inf") for error in off)


@given(
    data=st.data(), programs=st.integers(1, 7), layers=st.integers(1, 3), panels=st.sampled_from([1, 2]),
    stages=st.integers(2, 5), pieces=st.tuples(st.integers(1, 4), st.integers(1, 4)), seed=st.integers(0, 1 << 20),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_products_are_right_whatever_the_bounds_and_whoever_is_next(
    data: st.DataObject, programs: int, layers: int, panels: int, stages: int, pieces: tuple[int, int], seed: int
) -> None:
    """Programs without a task in a product, or in any; rings smaller than a tile; bounds of one panel up to all places."""
    near, far = (data.draw(st.integers(1, stages * panels)) for _ in range(2))
    tiles = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 3)))
    assert apart(programs, layers, panels, stages, near, far, pieces, seed, tiles) < TOLERANCE


@pytest.mark.parametrize("panels", [1, 2])
@pytest.mark.parametrize(("near", "far"), [(1, 1), (1, 3), (3, 1), (2, 4), (4, 4)])
def test_no_more_panels_are_on_their_way_than_the_larger_bound_and_at_first_than_the_near_one(
    near: int, far: int, panels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    copy = Descriptor.copy

    def counted_copy(self: Descriptor, at: list[Any], barrier: Any, to: Any, pred: Any = True) -> None:
        copy(self, at, barrier, to, pred)
        if of_thread.program == 0:
            counts.append(len(to.places.writing))  # of this one program

    monkeypatch.setattr(Descriptor, "copy", counted_copy)
    for seed in range(3):
        counts.clear()
        assert apart(1, 2, panels, 4, near, far, (3, 2), seed) < TOLERANCE
        assert max(counts) <= 2 * max(near, far), "a panel is two copies"
        assert max(counts[: 2 * panels * 4]) <= 2 * near, "as many panels as the ring has, of the first product"
    assert max(counts) > 2 * (max(near, far) - 1), "and as many as may be"


# --- what these tests would notice


@gluon.jit
def hasty_piece(ring, full, empty, ys, a, b, c, at, FIRST: gl.constexpr, PANELS: gl.constexpr, STAGES: gl.constexpr):
    """Gives the piece back whose products it has just begun."""
    stage, phase, _ = at
    for p in gl.static_range(PANELS):
        mbarrier.wait(full.index(stage * PANELS + p), phase)
        y = ys.index(c * PANELS + p).permute((1, 0))
        a = warpgroup_mma(ring.index(stage * (2 * PANELS) + p), y, a, is_async=True)
        b = warpgroup_mma(ring.index(stage * (2 * PANELS) + PANELS + p), y, b, is_async=True)
    a, b = warpgroup_mma_wait(2 * PANELS, deps=[a, b])
    barrier()
    mbarrier.arrive(empty.index(stage), count=1)
    end = stage == STAGES - 1
    return a, b, (gl.where(end, 0, stage + 1), gl.where(end, phase ^ 1, phase), stage)


@gluon.jit
def blind_piece(ring, full, empty, ys, a, b, c, at, FIRST: gl.constexpr, PANELS: gl.constexpr, STAGES: gl.constexpr):
    """Waits for the first of its panels only."""
    stage, phase, last = at
    mbarrier.wait(full.index(stage * PANELS), phase)
    for p in gl.static_range(PANELS):
        y = ys.index(c * PANELS + p).permute((1, 0))
        a = warpgroup_mma(ring.index(stage * (2 * PANELS) + p), y, a, is_async=True)
        b = warpgroup_mma(ring.index(stage * (2 * PANELS) + PANELS + p), y, b, is_async=True)
    a, b = warpgroup_mma_wait(2 * PANELS, deps=[a, b])
    mbarrier.arrive(empty.index(gl.maximum(last, 0)), count=1, pred=last >= 0)
    end = stage == STAGES - 1
    return a, b, (gl.where(end, 0, stage + 1), gl.where(end, phase ^ 1, phase), stage)


def vain_wait(most: int, deps: Any) -> Any:
    """Ends the products, and does not say so."""
    Groups.wait(most, deps)
    return deps


def fails(error: type[Exception], **more: Any) -> bool:
    """Whether one of some interleavings does, and no other error comes up."""
    settings: dict[str, Any] = {"programs": 1, "layers": 2, "panels": 2, "stages": 2, "near": 4, "far": 4, "pieces": (3, 2)}
    for seed in range(4):
        try:
            apart(**settings | more, seed=seed)
        except error:
            return True
    return False


def test_a_piece_that_is_given_back_too_early_is_noticed() -> None:
    assert fails(Hazard, _piece=hasty_piece)


def test_a_panel_that_nobody_waited_for_is_noticed() -> None:
    assert fails(Hazard, _piece=blind_piece)


def test_a_product_that_nobody_waited_for_is_no_value() -> None:
    assert fails(AttributeError, warpgroup_mma_wait=vain_wait)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"near": 5, "far": 2}, "a place is copied to again before it is waited for: that phase is never the last one over"),
        ({"near": 2, "far": 5}, "the same"),
        ({"near": -1, "far": 2}, "a panel is waited for that is asked for later"),
        ({"stages": 1, "near": 2, "far": 2}, "a piece is given back when the products of the next have begun"),
    ],
    ids=str,
)
def test_bounds_beyond_the_ring_and_a_ring_of_one_stage_hang_and_that_is_noticed(settings: dict[str, int], why: str) -> None:
    """What must not come as far as the kernel."""
    assert fails(Deadlock, **settings), why
