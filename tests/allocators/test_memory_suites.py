"""The KV-memory suites: fair loads, numbers under the agreed names, and a soak that would notice a broken allocator."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pdlab.allocators import make_allocator
from pdlab.allocators.paged import Paged
from pdlab.bench import kv_allocators, kv_compaction, kv_operations, memory_kernels, memory_runs, prefix_reuse, suites
from pdlab.bench.memory_runs import LONGEST, PROMISED, Pace, conversation, with_shared_prefixes
from pdlab.bench.records import Recorder
from pdlab.core.config import ALLOCATORS, EngineConfig
from pdlab.core.errors import AllocatorError, ConfigError
from pdlab.hardware.probe import resolve_device
from pdlab.workloads.prompts import prompt_of


def context(tmp_path: Path) -> suites.Context:
    machine = resolve_device("cpu")
    return suites.Context(machine, "smoke", Recorder("kv_allocators", machine.slug, out=tmp_path), 60.0, say=lambda line: None)


SMALL = [kv_allocators.Load("llama-tiny", 6, 14, kv_allocators.small_talk, kv_tokens=512)]


def rows_of(name: str, tmp_path: Path, budget: float = 60.0) -> list[Any]:
    _, record = suites.run(name, device="cpu", profile="smoke", out=tmp_path, budget_s=budget, say=lambda line: None)
    return record.rows


def test_every_variant_is_measured_on_the_same_requests_and_the_same_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_allocators, "SIMULATED", {})
    monkeypatch.setattr(kv_allocators, "real_loads", lambda full: SMALL)
    rows = rows_of("kv_allocators", tmp_path)
    assert all(row.status == "ok" and math.isfinite(row.median) for row in rows)
    points: dict[tuple[Any, ...], set[str]] = {}
    equals = [row for row in rows if row.params["workload"] == "equal_requests"]
    assert {row.median for row in rows if row.metric == "unfinished"} == {0}
    assert {(row.metric, row.variant) for row in equals} == {
        (metric, variant) for metric in ("throughput", "decode_step") for variant in ("paged", "contiguous_pool")
    }
    for row in rows:
        if row in equals:
            continue
        points.setdefault((row.metric, *sorted(row.params.items())), set()).add(row.variant)
    assert {frozenset(v) for v in points.values()} == {frozenset({"per_request", "contiguous_pool", "paged", "hybrid"})}
    waste = {row.variant: row.median for row in rows if row.metric == "waste_internal" and row.params["concurrency"] == 6}
    assert waste["per_request"] > waste["contiguous_pool"] > waste["paged"]
    assert all(row.median == 0 for row in rows if row.metric == "waste_external" and row.variant in ("paged", "hybrid"))


def test_rehearsals_hold_long_and_short_chunks_alone_and_beside_batches_of_every_size() -> None:
    seen: set[tuple[int, str]] = set()
    for workload in memory_runs.every_shape(300):
        config = EngineConfig(executor="simulated", simulated_device="nvidia-h200", max_batch_requests=300)
        with memory_runs.simulated_engine("random:llama-3-8b", config) as engine:
            submit = engine.executor.submit

            def noted(plan: Any, submit: Any = submit) -> Any:
                chunk = int(np.diff(plan.q_start).max())
                rows = next(n for n in (1, 32, 256, 512) if plan.batch <= n)
                seen.add((rows, "decode" if chunk == 1 else "short" if chunk <= 256 else "long"))
                return submit(plan)

            engine.executor.submit = noted  # type: ignore[method-assign]
            assert memory_runs.play(engine, workload).complete == len(workload)
    assert seen == {(rows, kind) for rows in (1, 32, 256, 512) for kind in ("decode", "short", "long")}


def test_kernels_are_made_for_both_memories_and_all_sizes_of_batch_and_nothing_waits_for_a_process_that_hangs() -> None:
    sizes = (1, 2, 4, 8, *range(16, 101, 8), 100)
    tasks = memory_kernels.tasks(sizes)
    paged = {int(n) for memory, task in tasks if memory == "paged" and task != "shapes" for n in task.split(",")}
    assert paged == set(sizes)
    assert {(m, "shapes") for m in ("paged", "contiguous_pool")} < set(tasks)
    for task in ("shapes", "1,4"):
        memory_kernels.work("llama-tiny", "contiguous_pool", 6, task)
    hangs = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert 0.3 <= memory_kernels.make("llama-tiny", 24, at_once=3, patience_s=0.3, command=hangs) < 20
    assert memory_kernels.make("llama-tiny", 24, at_once=3, patience_s=60, command=[sys.executable, "-c", "1/0"]) < 60
    assert memory_kernels.how_many(1) == 1


def test_the_pace_of_prompts_is_that_of_full_chunks() -> None:
    steps = [(2048, 0.050), (2048, 0.052), (70, 0.012), (0, 0.010), (0, 0.011), (0, 0.030)]
    trace = [SimpleNamespace(t_start=0.0, t_end=seconds, prefill_tokens=n) for n, seconds in steps]
    pace = Pace.of(SimpleNamespace(trace=trace), 1e-8)  # type: ignore[arg-type]
    assert pace == Pace(pytest.approx(0.051 / 2048), 0.011, 1e-8)


def test_lengths_are_divided_by_as_little_as_the_time_allows_and_memory_with_them() -> None:
    load = kv_allocators.Load("llama-3-8b", 100, 125, kv_tokens=64 << 10)
    pace = Pace(prompt_token=1e-5, step=1e-2, kv_token=1e-9)
    given = (1e9, 30.0, 15.0, 1e-9)
    chosen = [kv_allocators._fitted(pace, load, seconds, seed=0) for seconds in given]
    assert chosen[0] == load
    assert [x.by for x in chosen] == sorted({x.by for x in chosen})
    assert chosen[-1].by == kv_allocators.DIVISORS[-1]
    assert all(len(x.variants) * pace.seconds(x.workload(0)) <= s for x, s in zip(chosen[:-1], given, strict=False))
    assert chosen[-1].workload(0).name == "azure_conversation_by_16"
    for x in chosen:
        assert [i.prompt_tokens for i in x.workload(0)] == [max(1, i.prompt_tokens // x.by) for i in load.workload(0)]
        config = x.config("per_request")
        assert (config.max_model_len, config.promised_output_tokens) == (LONGEST // x.by, PROMISED // x.by)
        assert x.memory(1 << 20) == (64 << 10) // x.by
    uncut = kv_allocators.replace(load, divisors=(1,))
    assert kv_allocators._fitted(pace, uncut, 1e-9, seed=0) is None


def test_the_first_load_leaves_the_others_time_at_half_their_lengths_and_what_has_none_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (kv_allocators.Load("llama-tiny", 3, n, kv_tokens=4096, divisors=(64, 128)) for n in (3, 4))
    given: list[float] = []

    def fitted(pace: Any, load: Any, seconds: float, seed: int) -> Any:
        given.append(seconds)
        return kv_allocators.replace(load, by=64)

    monkeypatch.setattr(kv_allocators, "real_loads", lambda full: [first, second])
    monkeypatch.setattr(kv_allocators, "_at_full_size", lambda ctx: True)
    monkeypatch.setattr(kv_allocators, "DIVISORS", (64,))
    monkeypatch.setattr(kv_allocators, "_compare_equals", lambda *args: None)
    monkeypatch.setattr(memory_kernels, "make", lambda *args, **how: 0.0)
    monkeypatch.setattr(kv_allocators, "_pace", lambda *args: Pace(1e-3, 1e-2, 0.0))
    monkeypatch.setattr(kv_allocators, "_fitted", fitted)
    monkeypatch.setattr(suites.Context, "left", lambda self: 8.0)
    ctx = context(tmp_path)
    kv_allocators._measure_all(ctx)
    half = kv_allocators.replace(second, by=128).workload(0)
    assert given == [pytest.approx(8 - 4.4 * Pace(1e-3, 1e-2, 0.0).seconds(half)), 8]
    assert {row.variant for row in ctx.record.rows} == set(kv_allocators.SCHEMES)
    assert all(row.status == "ok" for row in ctx.record.rows)
    monkeypatch.setattr(suites.Context, "left", lambda self: 0.0)
    late = context(tmp_path)
    kv_allocators._measure_all(late)
    assert [row.status for row in late.record.rows] == ["skipped:the time budget ran out"] * 2 * len(kv_allocators.SCHEMES)


def test_what_is_simulated_alone_is_all_that_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_allocators, "SIMULATED", {"nvidia-h200": "llama-3-8b"})
    monkeypatch.setattr(kv_allocators, "simulated_loads", lambda full, model: [kv_allocators.Load(model, 4, 6)])
    outcome, record = suites.run(
        "kv_allocators", device="cpu", out=tmp_path, budget_s=60, only="simulated", say=lambda line: None
    )
    assert record.rows == []
    assert {row.kind for other in record.beside for row in other.rows} == {"simulated"}
    assert outcome.rows == sum(len(other.rows) for other in record.beside) > 0
    assert [p.relative_to(tmp_path).as_posix() for p in map(Path, outcome.files)] == ["nvidia-h200/kv_allocators.csv"]
    with pytest.raises(ConfigError, match="simulates nothing"):
        suites.run("kv_operations", device="cpu", out=tmp_path, only="simulated")


def test_the_simulated_article_shows_paging_ahead_when_memory_is_short() -> None:
    from pdlab.bench.memory_runs import play, simulated_engine

    load = kv_allocators.Load("llama-2-7b", 40, 60, kv_tokens=24_000)
    served = {}
    for variant in ("per_request", "paged"):
        config = load.config(variant, executor="simulated", simulated_device="nvidia-a100-sxm4-40gb")
        with simulated_engine("random:llama-2-7b", config) as engine:
            served[variant] = play(engine, load.workload(0)).throughput
    assert served["paged"] > 1.1 * served["per_request"]


def test_the_load_has_the_lengths_of_the_trace_within_what_the_models_take() -> None:
    workload = conversation(20, 3000, seed=4)
    total = [item.prompt_tokens + item.max_tokens for item in workload]
    assert max(total) <= LONGEST
    assert np.mean([item.max_tokens for item in workload]) == pytest.approx(211, rel=0.06)
    shared = with_shared_prefixes(workload.head(8), 4, 64)
    prompts = [list(prompt_of(item, i, 1000, 0))[:64] for i, item in enumerate(shared)]
    assert prompts[0] == prompts[4] != prompts[1]
    assert shared.clients == 20


def test_where_the_trace_itself_is_there_its_lengths_are_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDLAB_HOME", str(tmp_path))
    assert memory_runs.lengths_from().startswith("the generator")
    memory_runs.trace_file().parent.mkdir()
    lengths = [(374, 44), (4000, 300), (5000, 9), (7, 5000)]
    lines = [f"2023-11-16 18:15:4{i}.6805900,{p},{o}" for i, (p, o) in enumerate(lengths)]
    memory_runs.trace_file().write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]) + "\n")
    assert memory_runs.lengths_from() == memory_runs.trace_file().name
    workload = conversation(3, 4, seed=1)
    assert {(i.prompt_tokens, i.max_tokens) for i in workload} == {(374, 44), (3796, 300), (4087, 9), (1, LONGEST - 1)}
    assert (workload.name, workload.clients, workload.duration_s) == ("azure_conversation", 3, 0)
    assert len(conversation(3, 40, seed=1)) == 40
    assert conversation(3, 40, seed=1).items == conversation(3, 40, seed=1).items != conversation(3, 40, seed=2).items


@pytest.mark.parametrize("kind", ALLOCATORS)
def test_a_soak_of_random_operations_loses_and_leaks_nothing(kind: str) -> None:
    config = EngineConfig(kv_allocator=kind, page_size=8, hybrid_threshold=60, prefix_reuse=True)
    soak = kv_operations.Soak(make_allocator(config, 2048, max_len=kv_operations.LONGEST), seed=3)
    done, _ = soak.run(6000, 60.0, check_every=1500)
    assert done == 6000
    assert soak.lost == 0
    assert len(soak.live) > 5
    assert soak.end() == 0


class Reckless(Paged):
    """Frees at once what a step in flight or a sharer may still need: what the soak must notice."""

    def fork(self, rid: int, new: int) -> bool:
        done = super().fork(rid, new)
        self._owners[new].room = len(self._owners[new].pages) * self.page_size  # both write the page that they share
        return done


def test_the_soak_notices_two_requests_that_write_one_page() -> None:
    soak = kv_operations.Soak(Reckless(2048, 8), seed=3)

    def troubled() -> bool:
        try:
            soak.run(6000, 60.0, check_every=500)
        except AllocatorError:
            return True
        return soak.lost > 0

    assert troubled()


def test_compaction_of_a_fragmented_memory_moves_no_more_than_was_asked() -> None:
    copies = kv_compaction.fragmented(4096, 16, seed=0)
    assert 500 < sum(op.tokens for op in copies) <= 4096


def test_making_room_on_demand_refuses_less_than_never_compacting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kv_compaction, "_cost", lambda ctx: None)
    refused: dict[str, float] = {}
    real = kv_compaction.recorder_for

    def keep(ctx: Any, device: str) -> Any:
        record = real(ctx, device)
        add = record.add

        def adding(metric: str, value: float, *args: Any, **more: Any) -> Any:
            if metric == "refused":
                refused[more["variant"]] = value
            return add(metric, value, *args, **more)

        record.add = adding
        return record

    monkeypatch.setattr(kv_compaction, "recorder_for", keep)
    monkeypatch.setattr(kv_compaction, "VARIANTS", {k: v for k, v in kv_compaction.VARIANTS.items() if k != "article"})
    rows_of("kv_compaction", tmp_path)
    assert (tmp_path / "nvidia-h200" / "kv_compaction.csv").exists()
    assert refused["compaction"] < refused["none"]


def test_every_turn_of_a_chat_begins_with_the_whole_turn_before() -> None:
    workload = prefix_reuse.chats(clients=3, per_client=2, turns=4, seed=1, system=32, scale=0.2)
    assert len(workload) == 24
    prompts = [list(prompt_of(item, i, 500, 0)) for i, item in enumerate(workload)]
    for wave in (0, 12):
        for chat in range(3):
            for turn in range(3):
                before, after = (prompts[wave + 3 * t + chat] for t in (turn, turn + 1))
                assert after[: len(before)] == before
    assert prompts[0][:32] == prompts[13][:32]
    assert prompts[0][32:40] != prompts[1][32:40]


def test_reuse_finds_the_history_and_nothing_else_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_reuse, "SIMULATED", {"nvidia-h200": "llama-3-8b"})
    rows = rows_of("prefix_reuse", tmp_path)
    hits = {row.variant: row.median for row in rows if row.metric == "hit_rate"}
    assert hits["none"] == 0
    assert 30 < hits["reuse"] < 90
    assert {row.variant for row in rows if row.metric == "latency"} == {"none", "reuse"}
