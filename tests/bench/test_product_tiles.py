"""The sweep of decode tiles: candidates that a device can hold, right answers before times, and a table that is found again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pdlab.bench import product_tiles
from pdlab.hardware import timing
from pdlab.hardware.timing import summarize
from pdlab.kernels.product_tiles import ProductTile, ring_rule
from pdlab.kernels.tuning import Tuning
from pdlab.models.catalogue import config_of

H200 = Tuning("no-such-device", (9, 0), 132, 50 << 20)
L4 = Tuning("no-such-device", (8, 9), 58, 48 << 20)


@pytest.mark.parametrize("tuning", [H200, L4], ids=["capability 9.0", "capability 8.9"])
@pytest.mark.parametrize("batch", product_tiles.BATCHES)
def test_candidates_fit_the_device_and_cover_all_of_k(tuning: Tuning, batch: int) -> None:
    for op, (outputs, k) in product_tiles.shapes(config_of("llama-3-8b")).items():
        found = list(product_tiles.product_candidates(tuning, op, outputs, k, batch))
        assert len(found) > 1, "the rule has a rival"
        assert len(set(found)) == len(found), "nothing is timed twice"
        columns = max(16, batch)
        for tile in found:
            held = product_tiles.held_bytes(tile, columns)
            assert held < tuning.shared_bytes
            assert 1 < tile.rows * tile.split < outputs
            assert tile.fetch * tile.k * (1 if tile.tma else tile.split) <= k
            assert tile.pdl == (tuning.capability >= (9, 0))


class FakeContext:
    device, dtype, seed = "cpu", "float32", 0

    def __init__(self) -> None:
        self.rows: list[tuple[str, object]] = []
        self.record = self

    def left(self) -> float:
        return 1.0

    def add(self, metric: str, value: object, **more: object) -> None:
        self.rows.append((metric, value))

    def skip(self, metric: str, unit: str, why: str, **more: object) -> None:
        self.rows.append(("skipped", why))


@pytest.mark.parametrize("op", ["norm_qkv_rope", "out_residual", "norm_mlp_up", "down_residual"])
def test_a_wrong_tile_is_not_timed(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "graph_time_us", lambda *args, **kw: summarize([3.0], "us"))
    outputs, k = product_tiles.shapes(config_of("llama-tiny"))[op]
    context = FakeContext()
    product = product_tiles.Product(context, config_of("llama-tiny"), op, outputs, k, 4)  # type: ignore[arg-type]
    right = product.truth.float()
    tile = ProductTile(64, 128, 1, 0, 0, 4, 4)
    monkeypatch.setattr(product, "call", lambda weight, tile: right)
    assert product.time(tile) == 3.0
    monkeypatch.setattr(product, "call", lambda weight, tile: right + torch.randn_like(right))
    assert product.time(tile) is None
    assert [name for name, _ in context.rows] == ["latency", "skipped"]
    assert "wrong" in str(context.rows[1][1])


def test_what_the_sweep_wrote_is_what_a_step_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    from pdlab.kernels import product_tiles as kernels

    where = {"op": "down_residual", "outputs": 4096, "k": 14336}
    tile = ProductTile(64, 256, 2, 0, 4, 4, 3, pdl=True)
    sizes = {"rows": 64, "tile_k": 256, "split": 2, "ahead": 0, "fetch": 4, "warps": 4, "stages": 3, "pdl": True}
    tables = {
        "product_tiles": [where | {"min_batch": 2, "max_batch": 8} | sizes],
        "ring_tiles": [where | {"panels": 1, "stages": 4, "ahead": 2}],
    }
    monkeypatch.setattr(kernels, "table", lambda device: tables)
    assert kernels.product_tile(H200, batch=8, **where) == tile
    assert kernels.product_tile(H200, batch=9, **where) == kernels.product_rule(H200, batch=9, **where)
    assert kernels.ring_tile(H200, **where) == kernels.RingTile(1, 4, ahead=2)
    assert kernels.ring_tile(H200, **where | {"op": "out_residual"}) == ring_rule(14336)


def test_steps_decide_between_the_fastest_of_both_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was slower by itself is taken where a step is faster with it."""
    plain, staged = ProductTile(64, 128, 2, 0, 4, 4, 4), ProductTile(128, 64, 4, 0, 0, 4, 6, tma=True)
    tried: list[dict[str, ProductTile]] = []

    def step(ctx: object, loaded: object, batch: int, tiles: dict[str, ProductTile]) -> float:
        tried.append(tiles)
        return 10 - 2 * tiles["norm_qkv_rope"].tma + tiles["down_residual"].tma

    monkeypatch.setattr(product_tiles, "_step", step)
    found = {"norm_qkv_rope": [plain, staged], "out_residual": [plain], "down_residual": [plain, staged]}
    chosen = product_tiles._choose_in_steps(None, None, 8, found)  # type: ignore[arg-type]
    assert chosen["norm_qkv_rope"] == staged
    assert chosen["out_residual"] == chosen["down_residual"] == plain
    assert len(tried) == 3


@pytest.mark.parametrize(("seconds", "written", "skipped"), [(9, 3, 0), (5, 2, 0), (4, 1, 1), (1, 0, 2)])
def test_a_sweep_that_the_budget_cuts_short_leaves_the_table_as_it_is(
    monkeypatch: pytest.MonkeyPatch, seconds: int, written: int, skipped: int
) -> None:
    """Each model takes two seconds."""
    from pdlab.bench import prefill_vs_decode
    from pdlab.kernels import dispatch

    left, tables, skips = [seconds], list[object](), list[object]()

    def choose(*arguments: object) -> dict[str, ProductTile]:
        left[0] -= 2
        return {}

    monkeypatch.setattr(dispatch, "why_not", lambda *arguments: "")
    monkeypatch.setattr(Tuning, "of_device", lambda: H200)
    monkeypatch.setattr(prefill_vs_decode, "_load", lambda name, ctx: SimpleNamespace(config=name))
    monkeypatch.setattr(product_tiles, "BATCHES", (8,))
    monkeypatch.setattr(product_tiles, "_sweep_products", lambda *arguments: {})
    monkeypatch.setattr(product_tiles, "_choose_in_steps", choose)
    monkeypatch.setattr(product_tiles, "_write", lambda ctx, config, chosen: tables.append(config))
    record = SimpleNamespace(skip=lambda *arguments, **more: skips.append(more["params"]))
    machine = SimpleNamespace(capability=(9, 0), is_gpu=True)
    product_tiles.run(SimpleNamespace(machine=machine, record=record, left=lambda: left[0]))  # type: ignore[arg-type]
    assert len(tables) == written
    assert skips == [{"model": name} for name in product_tiles.MODELS[3 - skipped :]]


def test_every_candidate_can_be_compiled_ahead() -> None:
    jobs = product_tiles.compiled_products(H200)
    each = [
        len(list(product_tiles.product_candidates(H200, op, *shape, batch)))
        for name in product_tiles.MODELS
        for op, shape in product_tiles.shapes(config_of(name)).items()
        if op != "projection_sample"
        for batch in product_tiles.BATCHES
    ]
    assert len(jobs) == sum(each)


def test_a_tile_of_qkv_that_does_not_rotate_right_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from pdlab.bench import fused_norm_qkv_rope as suite
    from pdlab.kernels import norm_qkv_rope as kernels
    from pdlab.kernels import row_kernels

    config, context = config_of("llama-tiny"), FakeContext()
    monkeypatch.setattr(row_kernels, "norm_rows", lambda x, norm: x)
    monkeypatch.setattr(kernels, "norm_qkv_rope", lambda x, *args, **kw: x)
    monkeypatch.setattr(suite, "check", lambda name, call, arguments: call(*arguments))
    assert product_tiles._rotates_right(context, config, 4, ProductTile(64, 128, 1, 0, 0, 4, 4))  # type: ignore[arg-type]

    def wrong(name: str, call: object, arguments: object) -> None:
        raise AssertionError(f"{name}'s q is wrong")

    monkeypatch.setattr(suite, "check", wrong)
    assert not product_tiles._rotates_right(context, config, 4, ProductTile(64, 128, 1, 0, 0, 4, 4))  # type: ignore[arg-type]
    assert "wrong" in str(context.rows[-1][1])
