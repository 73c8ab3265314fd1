"""Products whose first weights are in shared memory before their turn, on a Hopper GPU, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fused_cases import Case, errors

from pdlab.kernels.product_tiles import ProductTile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0"
    ),
]
SHAPE = Case(8, hidden=512, heads=8, kv_heads=2, dim=64, ffn=768, page=16, dtype="bfloat16", device="cuda")
TILE = ProductTile(128, 64, 1, 0, 0, 4, 4, pdl=False, tma=True)


@pytest.mark.parametrize("tokens", [2, 8, 9, 32, 50, 64])
@pytest.mark.parametrize(
    ("shape", "tile"),
    [
        pytest.param({}, {}, id="four stages"),
        pytest.param({}, {"fetch": 4}, id="also into L2"),
        pytest.param({"dim": 128, "heads": 4, "kv_heads": 1}, {"split": 4, "stages": 6}, id="hd=128-four programs a tile"),
        pytest.param({"heads": 6, "hidden": 448}, {"stages": 3}, id="tiles that end beyond the outputs"),
        pytest.param({}, {"rows": 256, "warps": 8, "split": 2, "pdl": True}, id="256 rows-dependent launch"),
    ],
)
def test_staged_products_match_float64(tokens: int, shape: dict[str, int], tile: dict[str, int]) -> None:
    case = replace(SHAPE, tokens=tokens, **shape)
    for _ in range(2):  # counters are zero again after a launch
        found = errors(case, lambda *_: replace(TILE, **tile))
        assert max(found.values()) < 1.2e-2, found  # as in test_fused_gpu
