"""Random engines against every allocator: no slot has two owners, none is lost, and every request reads its own tokens."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test
from memory_model import EngineMachine

from pdlab.allocators import make_allocator
from pdlab.allocators.hybrid import Hybrid
from pdlab.allocators.interface import Allocator
from pdlab.core.config import EngineConfig

CASES = {
    "paged-1": (EngineConfig(page_size=1), 61),
    "paged-5-reuse": (EngineConfig(page_size=5, prefix_reuse=True), 83),
    "paged-4-reuse": (EngineConfig(page_size=4, prefix_reuse=True), 64),
    "paged-16": (EngineConfig(page_size=16), 130),
    "pool-1-first": (EngineConfig(kv_allocator="contiguous_pool", page_size=1, pool_headroom=0.25), 101),
    "pool-8-best": (EngineConfig(kv_allocator="contiguous_pool", page_size=8, pool_fit="best"), 120),
    "per_request-4": (EngineConfig(kv_allocator="per_request", page_size=4), 150),
    "hybrid-4-reuse": (EngineConfig(kv_allocator="hybrid", page_size=4, hybrid_threshold=20, prefix_reuse=True), 96),
    "hybrid-3-learned": (EngineConfig(kv_allocator="hybrid", page_size=3, hybrid_waste=0.5), 90),
}


class MovingThreshold(EngineMachine):
    """A hybrid whose threshold jumps about while requests live: nothing that was given moves with it."""

    @rule(threshold=st.integers(0, 44))
    def move_threshold(self, threshold: int) -> None:
        assert isinstance(self.allocator, Hybrid)
        before = {rid: self.allocator.page_table(rid).tolist() for rid in self.running}
        self.allocator.fixed_threshold = threshold
        assert {rid: self.allocator.page_table(rid).tolist() for rid in self.running} == before


def play(case: str, examples: int, steps: int) -> None:
    config, capacity = CASES[case]

    def make() -> Allocator:
        return make_allocator(config, capacity, max_len=EngineMachine.longest)

    base = MovingThreshold if config.kv_allocator == "hybrid" else EngineMachine
    machine = type("Machine", (base,), {"make": staticmethod(make)})
    how = settings(max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(machine, settings=how)


@pytest.mark.parametrize("case", CASES)
def test_tokens_survive_any_interleaving(case: str) -> None:
    play(case, examples=20, steps=60)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_tokens_survive_any_long_interleaving(case: str) -> None:
    play(case, examples=60, steps=100)
