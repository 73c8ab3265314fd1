"""A real model in float32 answers the same whatever memory it runs in: four allocators, prefixes, preemption, compaction.

Float32 on a CPU: the same operations on the same rows give the same logits up to rounding, and the random model's best two
tokens lie much further apart than that.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from pdlab import LLM, EngineConfig, SamplingParams  # noqa: E402
from pdlab.models.loading import Loaded, load  # noqa: E402

COMPACT_ALWAYS: dict[str, Any] = {"compact_every": 1, "compact_threshold": 1e-9, "compact_on_refusal": True}
MEMORIES: dict[str, dict[str, Any]] = {
    "paged": {"kv_allocator": "paged"},
    "paged-reuse": {"kv_allocator": "paged", "prefix_reuse": True},
    "contiguous_pool": {"kv_allocator": "contiguous_pool", "pool_headroom": 0.0},
    "per_request": {"kv_allocator": "per_request"},
    "hybrid-reuse": {"kv_allocator": "hybrid", "hybrid_threshold": 40, "prefix_reuse": True},
}


@pytest.fixture(scope="module")
def model() -> Loaded:
    return load("random:llama-tiny", device="cpu", dtype="float32", seed=1)


def workload(vocab: int) -> tuple[list[list[int]], list[SamplingParams]]:
    rng = np.random.default_rng(9)
    system = rng.integers(0, vocab, 19).tolist()
    prompts = [rng.integers(0, vocab, n).tolist() for n in rng.integers(2, 30, 9).tolist()]
    prompts = [system + p if i % 2 else p for i, p in enumerate(prompts)]
    return prompts, [SamplingParams(max_tokens=int(n), ignore_eos=True) for n in rng.integers(4, 25, 9)]


@pytest.fixture(scope="module")
def alone(model: Loaded) -> list[tuple[int, ...]]:
    """Each request's answer in a memory of its own, one at a time."""
    prompts, params = workload(model.config.vocab_size)
    config = EngineConfig(device="cpu", dtype="float32", max_batch_requests=1, max_model_len=128, kv_capacity_tokens=128)
    with LLM(model, config) as llm:
        return [tuple(out.token_ids) for out in llm.generate(prompts, params)]


@pytest.mark.parametrize("compaction", [{}, COMPACT_ALWAYS], ids=["still", "compacted"])
@pytest.mark.parametrize("name", MEMORIES)
def test_greedy_tokens_do_not_depend_on_the_memory(
    name: str, compaction: dict[str, Any], model: Loaded, alone: list[tuple[int, ...]]
) -> None:
    prompts, params = workload(model.config.vocab_size)
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        page_size=4,
        max_model_len=100,
        kv_capacity_tokens=112,
        max_batch_tokens=24,
        **MEMORIES[name],
        **compaction,
    )
    with LLM(model, config) as llm:
        outs = llm.generate(prompts, params)
        llm.engine.allocator.check()
        moved = llm.engine.scheduler.compactor.moved
    assert [tuple(out.token_ids) for out in outs] == alone
    assert (moved > 0) == (bool(compaction) and name != "per_request")


def test_the_memory_was_short_enough_to_preempt(model: Loaded) -> None:
    prompts, params = workload(model.config.vocab_size)
    config = EngineConfig(device="cpu", dtype="float32", page_size=4, max_model_len=100, kv_capacity_tokens=112)
    with LLM(model, config, max_batch_tokens=24) as llm:
        llm.generate(prompts, params)
        assert sum(row.preempted for row in llm.engine.trace) > 0
