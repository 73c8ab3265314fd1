"""The attention suites measure what they say on a CPU, check it first, and write tables that dispatch and tuning accept."""

from __future__ import annotations

import json
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pdlab.bench import (
    _attention,
    attention_decode,
    attention_dispatch,
    attention_prefill,
    attention_stability,
    attention_tiles,
    ceilings,
    suites,
)
from pdlab.bench import _attention_rivals as rivals
from pdlab.costs import tables
from pdlab.costs.roofline import Ceilings
from pdlab.kernels.dispatch import choose
from pdlab.kernels.tuning import first_match


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    _attention._ceilings.cache_clear()
    monkeypatch.setattr(ceilings, "measure", lambda *args, **kwargs: Ceilings(1e10, 1e10, 1e11, "measured"))
    monkeypatch.setattr(attention_decode, "_SMOKE", [(2, 40, 16), (2, 33, 0)])
    monkeypatch.setitem(attention_prefill.LENGTHS, "smoke", (17, 40))
    monkeypatch.setitem(attention_prefill.TOKENS, "smoke", 40)
    monkeypatch.setitem(attention_prefill.SHORT, "smoke", ())
    monkeypatch.setitem(attention_prefill.ALONE, "smoke", (40,))
    monkeypatch.setitem(attention_dispatch._CELLS, "smoke", [("prefill", 24, 2), ("decode", 40, 3)])
    monkeypatch.setattr(attention_stability, "TILES", (32,))


@pytest.mark.parametrize("name", ["attention_decode", "attention_prefill"])
def test_every_case_has_each_rival_and_its_floor_under_the_same_parameters(name: str, tmp_path: Path) -> None:
    outcome, recorder = suites.run(name, device="cpu", out=tmp_path, say=lambda line: None)
    assert outcome.skipped == 0
    metric = "latency" if name == "attention_decode" else "throughput"
    by_params: dict[str, set[str]] = {}
    for row in recorder.rows:
        if row.metric in (metric, f"floor_{metric}"):
            by_params.setdefault(str(sorted(row.params.items())), set()).add(
                "floor" if row.kind == "predicted" else row.variant
            )
    assert len(by_params) == 2
    rivals = {"plain", "sdpa", "floor"} | ({"article"} if name == "attention_prefill" else set())
    assert all(found == rivals for found in by_params.values())
    assert {row.metric for row in recorder.rows} >= {"read_ceiling", "matmul_ceiling", "share_of_floor"}


def test_a_single_prompt_is_also_timed_launched_by_itself(tmp_path: Path) -> None:
    _, recorder = suites.run("attention_prefill", device="cpu", out=tmp_path, say=lambda line: None)
    eager = [row for row in recorder.rows if row.metric == "eager_latency"]
    assert {(row.variant, row.params["seq_len"], row.params["batch"]) for row in eager} == {
        (variant, 40, 1) for variant in ("article", "plain", "sdpa")
    }


BACKEND = _attention.backend


def _wrong(q: torch.Tensor, view: Any) -> torch.Tensor:
    return BACKEND("plain", q, view, len(view.host_lens))(q, view) * 1.001


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q [n, N, D], k and v [m, K, D], causal with the last query at the last key."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    late = torch.arange(len(k)) > torch.arange(len(k) - len(q), len(k))[:, None]
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[2] ** -0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(late, -torch.inf).softmax(-1), v)


def _packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    parts = list(zip(first[:-1].tolist(), first[1:].tolist()))
    return torch.cat([_attend(q[a:b], k[a:b], v[a:b]) for a, b in parts])


def _from_pages(cache: torch.Tensor, pages: torch.Tensor, length: int) -> torch.Tensor:
    return cache[pages.long()].flatten(0, 1)[:length]  # [pages, page, K, D], as FlashAttention keeps them


def _paged(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    rows = range(len(lens))
    return torch.cat([_attend(q[b : b + 1], *(_from_pages(c, table[b], int(lens[b])) for c in (k, v))) for b in rows])


def _stand_in(whose: str) -> types.ModuleType:
    """Modules with the signatures of FlashAttention 3's interfaces, from their documentation, computed in plain PyTorch."""
    module = types.ModuleType(whose)

    def upstream(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
                 causal: bool = False) -> Any:  # fmt: skip
        assert causal
        return _packed(q, k, v, cu_seqlens_q)

    def with_cache(q: Any, k_cache: Any, v_cache: Any, cache_seqlens: Any, page_table: Any, causal: bool = False) -> Any:
        return _paged(q.squeeze(1), k_cache, v_cache, cache_seqlens, page_table).unsqueeze(1)

    def vllms(q: Any, k: Any, v: Any, max_seqlen_q: int, cu_seqlens_q: Any, max_seqlen_k: int, cu_seqlens_k: Any = None,
              seqused_k: Any = None, block_table: Any = None, causal: bool = False, fa_version: int = 2) -> Any:  # fmt: skip
        assert causal
        assert fa_version == 3
        return _packed(q, k, v, cu_seqlens_q) if block_table is None else _paged(q, k, v, seqused_k, block_table)

    if whose == "flash_attn_interface":
        module.flash_attn_varlen_func, module.flash_attn_with_kvcache = upstream, with_cache  # type: ignore[attr-defined]
    else:
        module.FA3_AVAILABLE, module.flash_attn_varlen_func = True, vllms  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize("whose", ["flash_attn_interface", "vllm.vllm_flash_attn.flash_attn_interface"])
def test_flash_attention_3_is_asked_for_the_same_attention_by_either_interface(whose: str, monkeypatch: Any) -> None:
    for name in ("vllm", "vllm.vllm_flash_attn"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, whose, _stand_in(whose))
    shape: dict[str, Any] = {"heads": 6, "kv_heads": 2, "head_dim": 8, "dtype": "float32", "device": "cpu", "seed": 0}
    q, view = _attention.make_view([13, 13], [13, 13], page=0, **shape)
    calls, missing = rivals.prefill(("article",))
    assert set(calls) == {"article", "fa3"}
    assert not missing
    for name, call in calls.items():
        _attention.check(name, call, q, view)
    q, view = _attention.make_view([5, 33, 16], [1, 1, 1], page=4, **shape)
    _attention.check("fa3", rivals.decode(q, view)[0]["fa3"], q, view)


def test_flashinfer_is_planned_with_the_pages_of_each_request(monkeypatch: Any) -> None:
    class Wrapper:
        def __init__(self, scratch: Any, layout: str, use_tensor_cores: bool) -> None:
            assert layout == "HND"

        def plan(self, first: Any, pages: Any, last: Any, heads: int, kv_heads: int, dim: int, size: int, **_: Any) -> None:
            self.first, self.pages, self.last, self.size = first, pages, last, size

        def run(self, q: Any, cache: Any) -> Any:
            table = [self.pages[a:b] for a, b in zip(self.first[:-1], self.first[1:])]
            lens = [(len(t) - 1) * self.size + int(n) for t, n in zip(table, self.last)]
            k, v = (c.transpose(1, 2) for c in cache)
            return torch.cat([_attend(q[b : b + 1], *(_from_pages(c, t, n) for c in (k, v)))
                              for b, (t, n) in enumerate(zip(table, lens))])  # fmt: skip

    module = types.ModuleType("flashinfer")
    module.BatchDecodeWithPagedKVCacheWrapper = Wrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    q, view = _attention.make_view(
        [5, 33, 16], [1, 1, 1], heads=6, kv_heads=2, head_dim=8, page=4, dtype="float32", device="cpu", seed=0
    )
    calls, missing = rivals.decode(q, view)
    assert set(missing) == {"fa3"}
    _attention.check("flashinfer", calls["flashinfer"], q, view)


def test_rivals_that_are_not_here_are_named_with_the_reason(monkeypatch: Any) -> None:
    for name in ("flash_attn_interface", "vllm", "flashinfer"):
        monkeypatch.setitem(sys.modules, name, None)
    q, view = _attention.make_view(
        [5], [1], heads=2, kv_heads=2, head_dim=8, page=4, dtype="float32", device="cpu", seed=0
    )  # fmt: skip
    calls, missing = rivals.decode(q, view)
    assert calls == {}
    assert set(missing) == {"fa3", "flashinfer"}
    assert "flash_attn_interface" in missing["fa3"]
    assert "fa3" in rivals.prefill()[1]


def test_the_dispatch_suite_writes_rules_that_dispatch_follows(tmp_path: Path) -> None:
    suites.run("attention_dispatch", device="cpu", out=tmp_path, say=lambda line: None)
    fastest = {("decode", 64, 1): "a", ("decode", 64, 8): "b", ("decode", 4096, 1): "c", ("prefill", 128, 1): "default"}
    table = attention_dispatch.rules(fastest, "float32", 64, "default")
    facts = {"dtype": "float32", "head_dim": 64}
    assert choose(table, "default", q=1, kv=64, batch=1, **facts) == "a"
    assert choose(table, "default", q=1, kv=64, batch=2, **facts) == "b"
    assert choose(table, "default", q=1, kv=65, batch=1, **facts) == "c"
    assert choose(table, "default", q=1, kv=4097, batch=1, **facts) == "default"
    assert choose(table, "default", q=9, kv=9, batch=1, **facts) == "default"
    assert choose(table, "default", q=100, kv=5000, batch=1, **facts) == "default"  # measured without a cached prefix
    (kept,) = attention_dispatch.rules({("decode", 64, 1): "default"}, "float32", 64, "default")
    assert kept["backend"] == "default"  # else an older table's rule would show through


def test_a_table_goes_beside_records_that_are_kept_and_otherwise_to_the_users_own_folder(
    tmp_path: Path, monkeypatch: Any
) -> None:
    from pdlab.bench import records

    monkeypatch.setenv("PDLAB_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(records, "target_root", lambda record=False: tmp_path / ("data" if record else "runs") / "measurements")
    for kept in (False, True):
        suites.run("attention_dispatch", device="cpu", record=kept, say=lambda line: None)
    slug = suites.resolve_device("cpu").slug
    written = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("tuning/*.json"))
    assert written == [f"data/tuning/{slug}.json", f"home/tuning/{slug}.json"]
    content = json.loads((tmp_path / written[0]).read_text())
    assert len(content["attention_dispatch"]) == 2
    (run,) = {row.run_id for row in tables.read_file(tmp_path / "data" / "measurements" / slug / "attention_dispatch.csv")}
    assert content["measured"]["attention_dispatch"]["run_id"] == run


def test_each_missing_care_shows_in_the_stability_rows(tmp_path: Path) -> None:
    _, recorder = suites.run("attention_stability", device="cpu", out=tmp_path, say=lambda line: None)

    def bad(variant: str, case: str, dtype: str) -> bool:
        rows = [r for r in recorder.rows if r.variant == variant and r.params["case"] == case and r.params["dtype"] == dtype]
        return any(r.median > 0.1 for r in rows if r.ok)  # a percentage that is not finite, or a relative error

    assert not any(bad("careful", r.params["case"], r.params["dtype"]) for r in recorder.rows)
    assert bad("no_wide_scores", "overflow", "float16")
    assert bad("no_subtract_max", "large", "bfloat16")
    assert bad("no_rescale", "growing", "float32")
    assert bad("no_guard_empty", "masked", "float32")


def test_tiles_that_are_swept_fit_and_are_different() -> None:
    for dim in (64, 128):
        for shared in (164 << 10, 100 << 10, 228 << 10):
            for made in (
                list(attention_tiles.decode_tiles(shared, dim, False)),
                list(attention_tiles.ring_tiles(shared, dim, False)),
                list(attention_tiles.prefill_tiles(shared, dim)),
            ):
                assert len(set(made)) == len(made) >= 3
            for ring in attention_tiles.ring_tiles(shared, dim, True):
                assert ring.blocks_per_sm * ring.stages * 16 * ring.warps * dim * 2 * 2 < shared


def _prefill(length: int, group: int) -> attention_tiles.Work:
    return attention_tiles.Work("prefill", attention_tiles.TOKENS // length, length, group)


def test_the_fastest_prefill_tiles_become_entries_by_length_and_group() -> None:
    plain, hopper = ({"block_m": 64, "block_n": 64, "warps": 4, "stages": 2}, {"consumers": 2, "block_n": 128, "stages": 2})
    best: attention_tiles.Best = {("prefill", _prefill(256, 4)): (1.0, plain)}
    best["prefill", _prefill(4096, 4)] = (2.0, plain | {"block_m": 128})
    for group in (4, 1):
        for stages, (n, ms) in enumerate(((256, 1.1), (512, 1.0), (4096, 1.9), (16384, 3.0)), start=10 * group):
            best["prefill_hopper", _prefill(n, group)] = (ms, hopper | {"stages": stages})
    table = attention_tiles.entries(best, 128)

    def stages_of(queries: int, group: int) -> int | None:
        found = first_match(table, kind="prefill_hopper", head_dim=128, queries=queries, group=group)
        return found and found["stages"]

    for queries, block_m in ((100, 64), (256, 64), (257, 128), (20000, 128)):
        found = first_match(table, kind="prefill", head_dim=128, queries=queries, page=16)
        assert found is not None
        assert found["block_m"] == block_m
    assert [stages_of(n, 1) for n in (1, 256, 257, 512, 600, 5000, 99999)] == [10, 10, 11, 11, 12, 13, 13]
    assert [stages_of(n, 2) for n in (256, 512)] == [10, 11]  # groups that were not measured take those of 1
    assert [stages_of(n, 4) for n in (512, 600, 5000)] == [41, 42, 43]
    assert stages_of(256, 4) == 0  # the plain tile beat the group's own: none


def test_decode_takes_the_ring_where_it_is_the_faster_one() -> None:
    def ring(stages: int) -> dict[str, Any]:
        return {"warps": 4, "stages": stages, "blocks_per_sm": 2, "least": 2}

    works = [attention_tiles.Work("decode", b, n, 4) for b, n in attention_tiles.DECODES]
    best: attention_tiles.Best = {("decode_ring", work): (1.0, ring(i)) for i, work in enumerate(works, 2)}
    best["decode", works[-1]] = (1.1, {"block_n": 64, "warps": 4, "stages": 3, "blocks_per_sm": 2})

    def chosen(batch: int, kv: int) -> tuple[str, int]:
        found = first_match(attention_tiles.entries(best, 128), head_dim=128, rows=4, batch=batch, kv=kv, page=16)
        assert found is not None
        return found["kind"], found["stages"]

    assert chosen(1, 4096) == ("decode_ring", 2)
    assert chosen(1, 9000) == ("decode_ring", 3)
    assert chosen(7, 4096) == ("decode_ring", 4)
    assert chosen(7, 9000) == chosen(128, 99) == ("decode_ring", 5)
    best["decode_ring", works[-1]] = (1.2, ring(5))
    assert chosen(128, 99) == ("decode", 3)


def test_every_work_has_tiles_to_compare_and_shapes_are_not_swept_twice() -> None:
    from pdlab.kernels.tuning import Tuning

    for capability in ((8, 0), (8, 9), (9, 0)):
        works = attention_tiles.works(capability)
        assert len(set(works)) == len(works)
        for dim in (64, 128):
            swept = [list(attention_tiles.sweep(work, Tuning("x", capability, 100, 1), dim)) for work in works]
            assert all(len(set(made)) == len(made) for made in swept)
            assert sum(map(len, swept)) < 140
            assert capability != (9, 0) or all(swept)


def test_the_best_tile_of_long_prompts_is_tried_with_twice_the_cache_where_more_heads_would_then_run_together() -> None:
    pytest.importorskip("triton")
    from pdlab.kernels.tuning import HopperTile, Tuning

    tuning = Tuning("x", (9, 0), 132, 60 << 20)
    pairs = HopperTile(2, 128, 4, overlap=1)

    def tried(length: int, group: int, dim: int, best: HopperTile = pairs) -> list[int]:
        more = attention_tiles.with_more_cache(_prefill(length, group), best, tuning, dim)
        assert [replace(tile, caches=1) for tile in more] == [best] * len(more)
        return [best.caches] + [tile.caches for tile in more]

    for length in (4096, 16384):
        assert tried(length, 1, 64) == tried(length, 1, 128) == tried(length, 4, 128) == [1, 2]
        assert tried(length, 4, 64) == [1]  # all 8 heads have room already
    assert tried(2048, 1, 128) == [1]
    assert tried(4096, 1, 64, HopperTile(3, 64, 9, turns=0, blocks=8)) == [1]


def test_the_sweep_times_the_best_tile_again_with_twice_the_cache_and_keeps_the_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from pdlab.kernels.tuning import Tuning

    work, tuning = attention_tiles.Work("prefill", 1, 4096, 4), Tuning("x", (9, 0), 132, 8 << 20)
    context = types.SimpleNamespace(dtype="float32", device="cpu", seed=0, say=lambda line: None)
    monkeypatch.setattr(_attention, "make_view", lambda *args, **kwargs: (None, None))
    monkeypatch.setattr(_attention, "last_request", lambda *args: None)
    for gain in (-0.5, 0.5):
        timed: list[Any] = []

        def one(ctx: Any, kind: str, tile: Any, *rest: Any, gain: float = gain, timed: list[Any] = timed) -> float:
            timed.append(tile)
            return float(len(timed)) if tile.caches == 1 else 1 - gain

        monkeypatch.setattr(attention_tiles, "_one", one)
        best: attention_tiles.Best = {}
        attention_tiles._work(context, work, tuning, 64, best)  # type: ignore[arg-type]
        assert [tile.caches for tile in timed] == [1] * (len(timed) - 1) + [2]
        assert replace(timed[-1], caches=1) == timed[0]  # the first was the fastest
        assert best["prefill_hopper", work][1]["caches"] == (2 if gain > 0 else 1)


def test_kernels_are_compiled_ahead_once_each_and_for_every_suite() -> None:
    from pdlab.bench import _attention_ahead as ahead
    from pdlab.kernels.tuning import HopperTile, Tuning

    pairs = HopperTile(2, 128, 2)
    same = [replace(pairs, by_request=4096), replace(pairs, share=4), replace(pairs, caches=2)]
    others = [replace(pairs, pack=4), replace(pairs, turns=0), replace(pairs, blocks=3), replace(pairs, consumers=3)]
    key = ahead.compiled_for("prefill_hopper", pairs)
    assert all(ahead.compiled_for("prefill_hopper", tile) == key for tile in same)
    assert len({ahead.compiled_for("prefill_hopper", tile) for tile in [pairs, *others]}) == 5
    names = list(ahead.jobs(Tuning("x", (9, 0), 132, 50 << 20)))
    for kind in (
        "prefill_hopper",
        "decode_ring",
        "decode 128 page",
        "prefill 128 page",
        "decode 32/8",
        "prefill 32/32",
        "dispatch",
        "stability",
    ):
        assert any(name.startswith(kind) for name in names), kind
    assert len(names) < 250
    assert names[0].startswith("prefill_hopper")  # the longest first


def test_a_job_that_compiles_ahead_also_checks(tmp_path: Path) -> None:
    from pdlab.bench import _attention_ahead as ahead
    from pdlab.bench.records import Recorder

    machine = suites.resolve_device("cpu")
    context = suites.Context(machine, "smoke", Recorder("x", machine.slug, out=tmp_path), 1.0)
    params = {"heads": 6, "kv_heads": 2, "head_dim": 16}
    ahead._chosen(context, [33, 9], [33, 1], params, 4)
    _attention.backend, real = lambda *rest: _wrong, _attention.backend
    try:
        with pytest.raises(AssertionError, match="attention is wrong"):
            ahead._chosen(context, [33, 9], [33, 1], params, 4)
    finally:
        _attention.backend = real


def test_the_suites_on_a_machine_without_a_gpu_say_why_tiles_are_not_swept(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    outcome, recorder = suites.run("attention_tiles", device="cpu", out=tmp_path, say=lambda line: None)
    assert (outcome.rows, outcome.skipped) == (1, 1)
    assert "CUDA" in recorder.rows[0].status
