"""The decode kernel with a ring of asynchronous copies: on a GPU against float64, and what decides whether it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from attention_cases import make_case, oracle, relative

from pdlab.kernels import tuning
from pdlab.kernels.flash_decode import Workspace
from pdlab.kernels.flash_decode_ring import fits, flash_decode_ring, run_of
from pdlab.kernels.tuning import DecodeRing, Tuning, ring_rule

# p and the output are rounded to the dtype: relative 2^-9 and 2^-12 on average, each
TOLERANCE = {"bfloat16": 6e-3, "float16": 8e-4}
LENS = [1, 33, 700, 4096, 129, 64, 65, 0, 17]
SHAPES = [  # heads, KV heads, head size, page, paged
    (32, 8, 128, 16, True), (32, 8, 64, 16, True), (8, 8, 128, 7, True), (7, 1, 64, 1, True), (8, 1, 128, 64, True),
    (10, 2, 64, 256, True), (6, 2, 128, 1, False), (9, 3, 64, 4, False),
]  # fmt: skip


def workspace(programs: int, group: int, dim: int, segments: int) -> Workspace:
    return Workspace.create("cuda", programs=programs, rows=group, head_dim=dim, segments=segments)


def errors(
    shape: tuple[int, int, int, int, bool], dtype: str, lens: list[int], cuts: list[tuple[DecodeRing, int]]
) -> list[float]:
    """Relative error of three launches for each tile and number of programs; the counters must be 0 between them."""
    heads, kv_heads, dim, page, paged = shape
    q, view = make_case(lens, [1] * len(lens), heads=heads, kv_heads=kv_heads, dim=dim, page=page, paged=paged, dtype=dtype,
                        device="cuda")  # fmt: skip
    truth, found = oracle(q, view), []
    for tile, programs in cuts:
        work = workspace(programs, heads // kv_heads, dim, len(lens) * kv_heads)
        for _ in range(3):
            found.append(relative(flash_decode_ring(q, view, work, tile, programs), truth))
        assert int(work.counters.abs().sum()) == 0, "the next launch would combine too early"
    return found


def rule(dim: int) -> DecodeRing:
    return ring_rule(torch.cuda.get_device_capability(), Tuning.of_device().shared_bytes, dim)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_ring_matches_float64_however_the_work_is_cut(shape: tuple[int, int, int, int, bool], dtype: str) -> None:
    """More programs than tiles, pieces of one segment, and stretches that begin and end anywhere."""
    tile = rule(shape[2])
    found = errors(shape, dtype, LENS, [(tile, programs) for programs in (1, 7, 132, 264, 2000)])
    assert max(found) < TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("lens", [[1], [40000], [4096] * 8, [30000, *range(1, 100, 7)], list(range(300))], ids=len)
def test_the_ring_matches_float64_whatever_the_lengths(lens: list[int]) -> None:
    tile = rule(128)
    assert max(errors((32, 8, 128, 16, True), "bfloat16", lens, [(tile, 132 * tile.blocks_per_sm)])) < TOLERANCE["bfloat16"]


@triton.jit
def late_writer(Q, K, V, NEW_Q, NEW_KV, SLOTS, rounds, TOKENS: tl.constexpr, PDL: tl.constexpr):
    """Lets its dependents begin, takes its time, and only then writes the queries and the newest K and V."""
    i = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    lanes = tl.arange(0, TOKENS)
    x = tl.load(NEW_Q + i * TOKENS + lanes).to(tl.float32)
    for _ in range(rounds):
        x = tl.sqrt(x * x)  # what the compiler cannot leave out: signs are put back below
    keep = tl.where(x >= 0, tl.load(NEW_Q + i * TOKENS + lanes), 0.0)
    tl.store(Q + i * TOKENS + lanes, keep)
    kv = tl.load(NEW_KV + i * TOKENS + lanes)
    slot = tl.load(SLOTS + i)
    tl.store(K + slot * TOKENS + lanes, kv)
    tl.store(V + slot * TOKENS + lanes, -kv)


def under_a_late_writer(rounds: int = 3000) -> float:
    """Error of the ring behind a kernel that writes its queries and newest K and V after the ring has begun, in one graph."""
    dim, lens = 128, [700, 1, 64, 4096, 65]
    q, view = make_case(lens, [1] * 5, heads=1, kv_heads=1, dim=dim, page=1, dtype="bfloat16", device="cuda")
    tile, pdl = rule(dim), torch.cuda.get_device_capability() >= (9, 0)
    new_kv = torch.randn(5, dim, device="cuda").bfloat16()
    slots = view.block_table[torch.arange(5), view.seq_lens.long() - 1].long()
    stale, work, out = torch.full_like(q, 7.0), workspace(264, 1, dim, 5), torch.empty_like(q)

    def both() -> None:
        late_writer[(5,)](stale, view.k, view.v, q, new_kv, slots, rounds, TOKENS=dim, PDL=pdl, num_warps=1,
                          **({"launch_pdl": True} if pdl else {}))  # fmt: skip
        flash_decode_ring(stale, view, work, tile, 132 * tile.blocks_per_sm, out=out)

    both()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            both()
    stale.fill_(7.0)
    view.k[slots, 0, 0], view.v[slots, 0, 0] = 9.0, 9.0
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(stale, q), "the writer must have written"
    return relative(out, oracle(q, view))


@pytest.mark.gpu
def test_the_newest_key_and_the_queries_are_read_after_the_kernel_before_has_written_them() -> None:
    assert under_a_late_writer() < TOLERANCE["bfloat16"]


@pytest.mark.gpu
def test_what_is_asked_into_the_cache_changes_nothing() -> None:
    q, view = make_case([300, 900], [1, 1], heads=8, kv_heads=2, dim=128, dtype="bfloat16", device="cuda")
    work, tile = workspace(264, 4, 128, 4), rule(128)
    plain = flash_decode_ring(q, view, work, tile, 264)
    for rows in (1, 8, 3000):
        weights = torch.randn(rows, 1024, device="cuda").bfloat16()
        assert torch.equal(flash_decode_ring(q, view, work, tile, 264, prefetch=weights), plain)


def test_keys_side_by_side_follow_from_the_page_size() -> None:
    assert [run_of(page, True) for page in (1, 7, 4, 24, 16, 64, 256)] == [1, 1, 4, 8, 16, 16, 16]
    assert [run_of(page, False) for page in (1, 16)] == [16, 1]  # a base may begin anywhere in a page


@pytest.mark.parametrize("shared", [100 << 10, 164 << 10, 228 << 10])
@pytest.mark.parametrize("head", [64, 128])
def test_the_rule_fills_shared_memory_with_as_many_blocks_as_the_grid_has(shared: int, head: int) -> None:
    tile = ring_rule((9, 0), shared, head)
    block = (tile.stages * 2 * 16 * tile.warps * head + 64 // 2 * head) * 2 + 1024  # ring, exchange, CUDA's own reserve
    assert tile.stages >= 2
    assert tile.blocks_per_sm * block <= shared
    assert (tile.blocks_per_sm + 1) * block > shared or tile.blocks_per_sm == 3


def test_the_first_fitting_entry_decides_between_the_decode_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDLAB_HOME", str(tmp_path))
    (tmp_path / "tuning").mkdir()
    ring: dict[str, Any] = {"warps": 4, "stages": 5, "blocks_per_sm": 3, "least": 2, "pdl": True}
    entries = [
        {"kind": "decode_ring", "head_dim": 128, "max_batch": 1, **ring},
        {"kind": "decode", "head_dim": 128, "block_n": 64, "warps": 4, "stages": 3, "blocks_per_sm": 2},
    ]
    (tmp_path / "tuning" / "some-gpu.json").write_text(json.dumps({"attention_tiles": entries}))
    tuning.table.cache_clear()
    try:
        device = Tuning("some-gpu", (9, 0), 132, 50 << 20)
        assert device.ring(128, 4, batch=1, kv=500) == DecodeRing(4, 5, 3, 2, True)
        assert device.ring(128, 4, batch=2, kv=500) is None
        assert device.ring(64, 4, batch=2) == ring_rule((9, 0), device.shared_bytes, 64)
        assert device.ring(80, 4, batch=1) is None
        assert Tuning("some-gpu", (7, 5), 40, 4 << 20).ring(128, 4, batch=1) is None
        assert device.most_decode_programs(128) >= 3 * 132
    finally:
        tuning.table.cache_clear()


def test_it_leaves_alone_what_it_cannot_do() -> None:
    q, view = make_case([40], [1], heads=4, kv_heads=2, dim=64)
    assert not fits(q, view), "a CPU has no asynchronous copies"
