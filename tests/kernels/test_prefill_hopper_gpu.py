"""The warp-specialized prefill kernels on a Hopper GPU against float64: extents and pages, prefixes, ragged lengths, groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import make_case, oracle, relative

from pdlab.kernels.tuning import HopperTile

pytestmark = pytest.mark.gpu
# p and the output are rounded to the dtype: relative 2^-9 and 2^-12 on average, each
TOLERANCE = {"bfloat16": 6e-3, "float16": 8e-4}
IN_TURNS = {
    128: [
        HopperTile(2, 128, 2),
        HopperTile(2, 128, 2, turns=0, pack=4),
        HopperTile(2, 64, 4, by_request=4096),
        HopperTile(2, 128, 2, overlap=1),
    ],
    64: [
        HopperTile(2, 128, 4),
        HopperTile(3, 128, 4, pack=4),
        HopperTile(3, 128, 4, turns=2),
        HopperTile(2, 128, 4, polynomial=8),
        HopperTile(2, 64, 6, turns=0, pack=2),
        HopperTile(3, 128, 4, pack=4, overlap=1),
    ],
}
ALONE = {
    128: [
        HopperTile(2, 64, 4, blocks=4, share=4, places=3),
        HopperTile(2, 128, 2, blocks=4),
    ],
    64: [
        HopperTile(3, 64, 8, blocks=8, places=4),
        HopperTile(2, 128, 5, blocks=8, share=4),
        HopperTile(3, 64, 9, blocks=2, polynomial=8),
    ],
}
EXTENT = (1, False)


@pytest.fixture(autouse=True)
def _hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("Hopper only")


def check(
    lens: list[int], queries: list[int], tile: HopperTile, causal: bool = True, l2_bytes: int = 32 << 20, **case: Any
) -> None:
    from pdlab.kernels.flash_prefill_hopper import fits, flash_prefill_hopper

    q, view = make_case(lens, queries, device="cuda", **case)
    assert fits(q, view)
    truth = oracle(q, view, causal)
    for _ in range(3):  # a race shows in some of several runs
        out = flash_prefill_hopper(q, view, tile, causal=causal, l2_bytes=l2_bytes)
        assert relative(out, truth) < TOLERANCE[case["dtype"]]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("page", "paged"), [EXTENT, (8, True), (16, True), (64, True), (256, True)])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 2, 128), (4, 4, 128), (8, 2, 64), (6, 2, 64)])
def test_mixed_lengths_and_prefixes_match_float64(
    dtype: str, page: int, paged: bool, heads: int, kv_heads: int, dim: int
) -> None:
    shape = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "dtype": dtype, "page": page, "paged": paged}
    for tile in IN_TURNS[dim] + ALONE[dim]:
        check([1, 127, 128, 700, 64, 2048, 1500], [1, 127, 128, 300, 64, 1, 1500], tile, **shape)


@pytest.mark.parametrize(("page", "paged"), [EXTENT, (16, True)])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("longest", [256, 512])
def test_prompts_that_stay_in_the_ring_match_float64(page: int, paged: bool, dim: int, longest: int) -> None:
    lens = [longest, 1, longest - 1, longest // 2 + 1, 130, longest - 64, 64, 65] * 3
    queries = [longest, 1, longest - 3, longest // 2 + 1, 130, 2, 64, 63] * 3
    for tile in ALONE[dim]:
        for heads, kv_heads in ((4, 4), (8, 2)):
            check(lens, queries, tile, heads=heads, kv_heads=kv_heads, dim=dim, dtype="bfloat16", page=page, paged=paged)


@pytest.mark.parametrize("prompt", [1, 2, 63, 64, 65, 127, 129, 256, 1000, 3000])
@pytest.mark.parametrize("dim", [64, 128])
def test_prompts_of_any_length_match_float64(prompt: int, dim: int) -> None:
    for tile in (IN_TURNS[dim][0], ALONE[dim][0]):
        check([prompt, 77], [prompt, 77], tile, heads=8, kv_heads=2, dim=dim, dtype="bfloat16", page=1, paged=False)


@pytest.mark.parametrize("dim", [64, 128])
def test_more_requests_than_a_warp_has_lanes_match_float64(dim: int) -> None:
    lens = [3, 200, 64, 1] * 12
    for tile in (IN_TURNS[dim][0], ALONE[dim][0]):
        check(lens, [3, 150, 64, 1] * 12, tile, heads=8, kv_heads=2, dim=dim, dtype="bfloat16", page=16)


@pytest.mark.parametrize("caches", [1, 2])
@pytest.mark.parametrize("dim", [64, 128])
def test_heads_that_run_a_few_at_a_time_match_float64(dim: int, caches: int) -> None:
    lens, queries = [700, 64, 1500], [700, 64, 900]
    two_heads = 2 * 2 * sum(lens) * dim * 2  # so of 5: 2, 2, 1 or 3, 2
    for tile in IN_TURNS[dim]:
        shape = {"heads": 20, "kv_heads": 5, "dim": dim, "dtype": "bfloat16", "page": 1, "paged": False}
        check(lens, queries, replace(tile, caches=caches, by_request=0), l2_bytes=two_heads, **shape)


@pytest.mark.parametrize("dim", [64, 128])
def test_full_attention_matches_float64(dim: int) -> None:
    for tile in (*IN_TURNS[dim][:2], ALONE[dim][0]):
        check([700, 200, 64], [300, 200, 5], tile, causal=False, heads=8, kv_heads=2, dim=dim, dtype="float16", page=16)


@pytest.mark.parametrize("tile", [HopperTile(2, 128, 2), HopperTile(2, 64, 5, blocks=4, share=4)])
def test_a_mixed_step_leaves_the_decodes_alone(tile: HopperTile) -> None:
    from pdlab.kernels.flash_prefill_hopper import flash_prefill_hopper

    q, view = make_case([60, 240, 90], [1, 221, 1], heads=8, kv_heads=2, dim=128, dtype="bfloat16", device="cuda")
    out = torch.full_like(q, 7.0)
    flash_prefill_hopper(q, view, tile, min_q=2, out=out)
    assert relative(out[1:222], oracle(q, view)[1:222]) < TOLERANCE["bfloat16"]
    assert bool((out[[0, 222]] == 7.0).all())


@pytest.mark.parametrize("tile", [HopperTile(2, 128, 2), HopperTile(2, 64, 5, blocks=4)])
def test_a_captured_graph_follows_lengths_and_pages_that_change(tile: HopperTile) -> None:
    from pdlab.kernels.flash_prefill_hopper import flash_prefill_hopper

    q, view = make_case([300, 200, 160], [130, 200, 31], heads=8, kv_heads=2, dim=128, dtype="bfloat16", device="cuda")
    fixed = replace(view, host_lens=(), max_kv=300)
    flash_prefill_hopper(q, fixed, tile)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_prefill_hopper(q, fixed, tile)
    for lens in ([300, 200, 160], [131, 200, 31], [140, 200, 100]):
        view.seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        graph.replay()
        now = replace(view, host_lens=tuple(zip([130, 200, 31], lens)))
        assert relative(out, oracle(q, now)) < TOLERANCE["bfloat16"]
