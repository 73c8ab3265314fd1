"""Rings of weights on a CPU, by the kernels' own code: every tile is computed, once, and all are right.

How programs share out tiles and keep their rings is the kernels'; the rest is imitated, see imitated_gluon.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from fused_cases import Case, double, exact, exact_norm, make_ops, sampling_case
from imitated_gluon import Imitation
from imitated_values import Dense

from pdlab.kernels import ring_kernels as rings
from pdlab.kernels.fused_ops import FusedOps
from pdlab.kernels.norm_product import NOTHING
from pdlab.kernels.ops import NormWeights
from pdlab.kernels.product_tiles import RingTile
from pdlab.kernels.projection_sample import EMPTY, GREEDY, LOGITS, Race

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


@pytest.mark.parametrize("tile", [RingTile(1, 2), RingTile(1, 7), RingTile(1, 2, hint=False)], ids=str)
def test_the_operations_of_a_layer_are_right(tile: RingTile) -> None:
    case = Case(**SMALL)
    right, found = exact(case), layer(case, ring_ops(case, tile))
    assert all(apart(found[name], right[name]) < TOLERANCE for name in found)


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
    norm = NormWeights(1 + 0.2 * torch.randn(k, generator=g).bfloat16(), None, 1e-5)
    normed = exact_norm(u.double(), double(norm)) @ weight.double().T
    plain = rings.ring_residual_product(u, weight, x, tile)
    alone = rings.ring_norm_product(u, norm, weight, NOTHING, tile)
    assert apart(plain, right) < TOLERANCE
    assert apart(alone, normed) < TOLERANCE


def test_asking_for_the_next_products_weights_stays_within_them() -> None:
    case = Case(**SMALL)
    plain = layer(case, ring_ops(case, RingTile(1, 2)))
    found = layer(case, ring_ops(case, RingTile(1, 2, ahead=3), prefetch=True))
    assert all(torch.equal(found[name], plain[name]) for name in plain)


@pytest.mark.parametrize("want", [GREEDY, LOGITS])
@pytest.mark.parametrize("count", [2, 7])
def test_the_vocabularys_tiles_are_written_once_and_its_race_has_one_winner(
    want: int, count: int, programs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs.multi_processor_count = count
    x, head, sampling = sampling_case(3, 1, 64 * 8, 256, torch.bfloat16)
    race, writes = Race("cpu"), Writes(monkeypatch)
    for _ in range(2):
        out = rings.ring_project(x, head, want, sampling, RingTile(1, 3), race)
        assert int(race.done) == 0, "as it was, for the next launch"
        assert int(race.best[0]) == EMPTY
        if want == LOGITS:
            assert writes.of(out) == [1] * 512
            logits = exact_norm(x.double(), double(head.norm)) @ head.proj.double().T
            assert apart(out, logits) < TOLERANCE
        else:
            assert int(out) == int(rings.ring_project(x, head, LOGITS, sampling, RingTile(1, 3), race).argmax())


@pytest.mark.parametrize("seed", range(12))
def test_every_tile_is_computed_once_however_programs_run(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The residual kernel by itself, with any number of programs and tiles, also fewer tiles than programs."""
    g = torch.Generator().manual_seed(seed)

    def some(least: int, most: int) -> int:
        return int(torch.randint(least, most + 1, (), generator=g))

    stages, count, tiles, k = some(2, 5), some(1, 9), some(1, 40), 128
    u, weight, x = (torch.randn(shape, generator=g).bfloat16() for shape in ((1, k), (8 * tiles, k), (1, 8 * tiles)))
    writes = Writes(monkeypatch)
    fixed = dict(OUTPUTS=8 * tiles, K=k, PANELS=1, STAGES=stages, HINT=False, AHEAD=0, NEXT_SIZE=0, NEXT_APART=0)  # noqa: C408
    rings.ring_residual_product_kernel.seed = 100 * seed
    for _ in range(2):
        out = torch.full_like(x, float("nan"))
        rings.ring_residual_product_kernel[(count,)](u, rings._descriptor(weight), weight, x, out, tiles, **fixed)
        assert writes.of(out) == [1] * 8 * tiles
        right = x.double() + u.double() @ weight.double().T
        assert apart(out, right) < TOLERANCE
