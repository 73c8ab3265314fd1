"""Tiny models in float32 on the CPU, loaded once, and the prompts that the engine's tests run through them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from pdlab import LLM, SamplingParams
from pdlab.models.loading import Loaded, load

FAMILIES = ("random:llama-tiny", "random:gpt2-tiny")
LENGTHS = (1, 2, 13, 16, 17, 33, 64)  # around page and chunk borders
GREEDY = SamplingParams(max_tokens=23, ignore_eos=True)


@lru_cache(maxsize=4)
def loaded(name: str) -> Loaded:
    return load(name, device="cpu", dtype="float32", seed=3)


def tiny(name: str = FAMILIES[0], **config: Any) -> LLM:
    """An LLM over a shared tiny model; `config` are fields of EngineConfig."""
    return LLM(loaded(name), **{"kv_capacity_tokens": 2048, "device": "cpu", **config})


def prompts(lengths: tuple[int, ...] = LENGTHS, seed: int = 1) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, n).tolist() for n in lengths]


@lru_cache(maxsize=4)
def alone(name: str) -> tuple[tuple[int, ...], ...]:
    """Greedy tokens of each prompt run by itself, in a fresh engine."""
    with tiny(name) as llm:
        return tuple(tuple(llm.generate(p, GREEDY)[0].token_ids) for p in prompts())


def assert_nothing_leaked(llm: LLM) -> None:
    """Idle: no request, no row, no page is held, and the allocator's invariants hold."""
    engine = llm.engine
    assert engine.idle
    assert not engine.scheduler.running
    assert not engine.scheduler.waiting
    assert not engine.allocator.live()
    assert all(r is None for r in engine.scheduler.rows.request)
    stats = engine.allocator.stats()
    assert stats.reserved == 0
    assert stats.retired == 0
    assert stats.free == stats.capacity
    engine.allocator.check()
