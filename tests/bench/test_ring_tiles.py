"""The sweep of rings and of the persistent kernel: sizes that fit, no time without the kernel, a table of what won."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdlab.bench import _breakdown, ring_tiles
from pdlab.bench.records import Recorder
from pdlab.bench.suites import Context
from pdlab.hardware.probe import resolve_device
from pdlab.kernels.product_tiles import ring_rule
from pdlab.models.loading import load


def test_rings_leave_shared_memory_for_x_and_a_whole_one_for_no_second() -> None:
    for way, size in ring_tiles.ring_ways().items():
        for k in (1024, 2048, 4096, 8192, 11008, 14336):
            tile = size("out_residual", k)
            held = tile.panels * tile.stages * (16 << 10) + 2 * k
            assert held <= 227 << 10
            assert tile.stages >= 2
            if way.startswith("half"):
                assert 2 * held <= 227 << 10, "the next kernel's ring finds room beside"
        whole = ring_rule(4096)
        assert 2 * whole.panels * whole.stages * (16 << 10) > 227 << 10


@pytest.fixture
def context(tmp_path: Path) -> Context:
    machine = resolve_device("cpu")
    return Context(
        machine, "smoke", Recorder("ring_tiles", machine.slug, out=tmp_path / "measurements"), 60, say=lambda line: None
    )


def test_a_step_in_which_the_persistent_kernel_did_not_run_gives_no_time_and_no_entry(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here it cannot; the settings all name fields of its tile."""
    pytest.importorskip("triton")
    written: list[Any] = []
    monkeypatch.setattr("pdlab.bench._attention.write_table", lambda *arguments: written.append(arguments))
    loaded = load("random:llama-tiny", dtype="float32")
    ring_tiles._sweep_persistent(context, loaded, "whole", 1.0)
    assert [row.metric for row in context.record.rows] == ["step_latency"] * len(ring_tiles.persistent_ways())
    assert all(row.status != "ok" for row in context.record.rows)
    assert written == [], "what was not timed is no reason to forget what the table has"


@pytest.mark.parametrize(("faster_up_to", "most"), [(0, None), (512, 512), (2048, 2048), (9999, 8000)])
def test_the_table_has_the_most_tokens_at_which_the_persistent_kernel_was_faster(
    context: Context, monkeypatch: pytest.MonkeyPatch, faster_up_to: int, most: int | None
) -> None:
    pytest.importorskip("triton")
    written: list[Any] = []

    def step(ctx: Any, loaded: Any, way: str, *rest: Any, tokens: int = ring_tiles.TOKENS) -> float:
        if not way.startswith("persistent") or tokens > faster_up_to:
            return 1.0
        return 0.5 if way == "persistent 2 of 4, 2x" else 0.7

    monkeypatch.setattr(ring_tiles, "_step", step)
    monkeypatch.setattr(
        "pdlab.bench._attention.write_table", lambda ctx, key, entries, replaced: written.append((key, entries))
    )
    ring_tiles._sweep_persistent(context, load("random:llama-tiny", dtype="float32"), "whole", 1.0)
    [(key, entries)] = written
    assert key == "persistent_decode"
    assert [entry["max_kv"] for entry in entries] == ([] if most is None else [most + 1])
    assert all(entry["panels"] == 2 for entry in entries)
    json.dumps(entries)


def test_a_measured_step_asks_the_table_with_what_its_entry_bounds() -> None:
    """Its engine's room, which is all that a captured step knows of its cache."""
    loaded = load("random:llama-tiny", dtype="float32")
    for tokens in (40, 64):
        with _breakdown.step_of(loaded, frozenset(), tokens) as (executor, plan):
            assert executor._all_rows(1).max_kv == ring_tiles._bound(tokens)
            assert plan(0).context_lens == [tokens]
