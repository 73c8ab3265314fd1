"""Products whose first weights are in shared memory before their turn: what can be said of them without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from pdlab.kernels.fused_ops import FusedOps
from pdlab.kernels.product_tiles import ProductTile, product_rule
from pdlab.kernels.products import Workspace
from pdlab.kernels.staged_product import constants, fits, plain_tile
from pdlab.kernels.tuning import Tuning

LLAMA = {"HEADS": 32, "KV_HEADS": 8, "PAGE": 16}
# name, k, activation rows held, tile, weight rows of a copy, sizes of the operation
JOBS: list[tuple[str, int, int, dict[str, Any], int, dict[str, Any]]] = [
    ("staged_norm_product_kernel", 4096, 64, {"rows": 256, "split": 1, "warps": 8, "stages": 5, "fetch": 4}, 128,
     {"WIDTH": 14336, "GATED": True}),
    ("staged_residual_product_kernel", 8192, 32, {"rows": 128, "split": 8, "warps": 4, "stages": 5, "fetch": 0}, 64,
     {"OUTPUTS": 2048}),
    ("staged_qkv_rope_kernel", 2048, 8, {"rows": 128, "split": 4, "warps": 4, "stages": 6, "fetch": 2}, 32,
     LLAMA | {"HALF": 32}),
]  # fmt: skip
MOST = 227 << 10  # bytes of shared memory a block may have at 9.0 (CUDA programming guide)


def test_the_kernels_compile_without_spills_and_fit(compile_environment: dict[str, str]) -> None:
    here = Path(__file__).parent
    environment = compile_environment | {"PYTHONPATH": f"{here.parent.parent}:{here}"}
    command = [sys.executable, str(here / "staged_compile_worker.py"), json.dumps(JOBS)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(found) == len(JOBS), run.stderr[-3000:]
    for one in found:
        assert one["STACK"] == 0
        assert one["HGMMA"] > 0
        assert one["shared"] <= MOST
        assert 0 < one["hinted"] < one["copies"], "weights leave L2 first, activations do not"


def test_a_ring_is_never_longer_than_what_goes_through_it() -> None:
    tile = ProductTile(128, 64, 4, 0, 16, 4, 12, True, True)
    assert constants(tile, 2048)["STAGES"] == constants(tile, 2048)["PIECES"] == constants(tile, 2048)["FETCH"] == 8


@pytest.mark.parametrize(
    "changed", [{"tokens": 1}, {"k": 96}, {"bias": True}, {"dtype": torch.float32}, {"tma": False}], ids=lambda c: next(iter(c))
)
def test_what_they_cannot_do_is_left_to_the_others(changed: dict[str, Any]) -> None:
    facts = {"tokens": 4, "k": 512, "bias": False, "dtype": torch.bfloat16, "tma": True}

    def fit(tokens: int, k: int, bias: bool, dtype: torch.dtype, tma: bool) -> bool:
        x, weight = torch.zeros(tokens, k, dtype=dtype), torch.zeros(256, k, dtype=dtype)
        return fits(x, weight, weight[:, 0] if bias else None, ProductTile(128, 64, 2, 0, 0, 4, 4, True, tma))

    assert fit(**facts)
    assert not fit(**facts | changed)


class OnDevice:
    """What is asked of 64 activation rows on a GPU."""

    is_cuda, device = True, torch.device("cuda", 0)

    def __len__(self) -> int:
        return 64


def test_a_product_that_they_refuse_gets_a_tile_that_the_plain_kernel_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    tuning = Tuning("nvidia-h200", (9, 0), 132, 50 << 20)
    monkeypatch.setattr(Tuning, "of_device", lambda index: tuning)
    staged = ProductTile(128, 64, 1, 0, 0, 4, 12, False, True)
    weight = torch.empty(2048, 8192, device="meta")
    tile = plain_tile("down_residual", OnDevice(), weight, staged)  # type: ignore[arg-type]
    assert tile == replace(product_rule(tuning, "down_residual", 2048, 8192, 64), pdl=False)
    assert tile.stages * (tile.rows + 64) * tile.k * 2 <= MOST
    assert plain_tile("down_residual", torch.zeros(4, 512), weight, staged) == replace(staged, tma=False)


def test_tiles_that_were_measured_in_16_bits_are_not_used_for_32() -> None:
    """The table's 9 stages of 128 + 64 rows take 221 KB in 16 bits."""
    tuning, shape = Tuning("nvidia-h200", (9, 0), 132, 50 << 20), SimpleNamespace(num_heads=32, num_kv_heads=8, head_dim=64)
    for dtype in (torch.bfloat16, torch.float32):
        weight = torch.empty(2048, 8192, dtype=dtype, device="meta")
        ops = FusedOps([], "plain", shape, 64, torch.device("cpu"), str(dtype), tuning)
        tile = ops.tile("down_residual", weight, 64)
        assert tile.stages * (tile.rows + 64) * tile.k * weight.element_size() <= MOST
        assert tile.tma is (dtype == torch.bfloat16)


def test_arrivals_are_counted_apart_for_each_number_of_programs() -> None:
    """A launch adds as many as share a tile, so a counter stays a multiple of that only if no other number is added to it."""
    workspace = Workspace(torch.device("cpu"))
    two, four = workspace.arrivals(32, 2), workspace.arrivals(32, 4)
    two += 2
    assert workspace.arrivals(200, 2) is two
    assert not four.any()
    assert not workspace.arrivals(300, 2).any(), "what is outgrown stays with the graphs that know it"
