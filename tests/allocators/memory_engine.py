"""A real engine, scheduler and allocator over a pretended device whose "model" is a hash of what its memory holds.

The next token of a request is a function of every token that its slots read back, so a single slot that is lost, shared by
mistake or moved to the wrong place changes the answer. `expected` computes the same answer from the prompt alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from memory_model import Memory

from pdlab.core.clock import VirtualClock
from pdlab.core.config import EngineConfig, SamplingParams
from pdlab.core.plan import IN_FLIGHT, Plan, PlanShape
from pdlab.core.request import Request
from pdlab.core.trace import TraceRow
from pdlab.costs.interface import Estimator
from pdlab.engine.engine import Engine
from pdlab.engine.interface import StepResult
from pdlab.models.config import ModelConfig

VOCAB = 1000
MODEL = ModelConfig("memory", "llama", VOCAB, 8, 1, 1, 1, 8, 8, max_context=4096)


def next_token(sequence: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(sequence, np.int64).tobytes()) % VOCAB


def expected(prompt: Sequence[int], n: int) -> list[int]:
    sequence = list(prompt)
    for _ in range(n):
        sequence.append(next_token(np.array(sequence)))
    return sequence[len(prompt) :]


class _Done:
    def __init__(self, result: StepResult) -> None:
        self._result = result

    def done(self) -> bool:
        return True

    def result(self) -> StepResult:
        return self._result


class MemoryExecutor:
    """Contract 4. Knows a plan's arrays and nothing else of the engine."""

    def __init__(self, capacity: int) -> None:
        self.clock, self.overlaps = VirtualClock(), False
        self._capacity = capacity
        self.memory = Memory(capacity)
        self.last: dict[int, int] = {}
        self.copied = 0

    def capacity(self) -> int:
        return self._capacity

    def submit(self, plan: Plan) -> _Done:
        self.memory.run(plan.kv_ops)
        ids = plan.token_ids.copy()
        new = np.diff(plan.q_start)
        for at, row in zip(np.flatnonzero(ids == IN_FLIGHT), np.repeat(plan.rows, new)[ids == IN_FLIGHT], strict=True):
            ids[at] = self.last[int(row)]
        assert len(set(plan.slots.tolist())) == len(plan.slots), "two tokens of a step share a slot"
        self.memory.mem[plan.slots] = ids
        tokens = [next_token(self.memory.mem[self._slots(plan, int(b))]) for b in plan.sample_rows]
        self.last |= zip(plan.rows[plan.sample_rows].tolist(), tokens, strict=True)
        start = self.clock.now()
        self.clock.advance(1e-3)
        return _Done(StepResult(plan.step, np.array(tokens, np.int64), start, self.clock.now()))

    def _slots(self, plan: Plan, b: int) -> np.ndarray:
        t = np.arange(plan.context_lens[b])
        if plan.kv_kind == "extent":
            return plan.base[b] + t
        size = self.page_size
        return plan.page_table[b].astype(np.int64)[t // size] * size + t % size

    page_size = 1

    def reset(self) -> None: ...

    def close(self) -> None: ...


class _Constant(Estimator):
    def step_seconds(self, shape: PlanShape) -> float:
        return 1e-3

    def remaining(self, request: Request) -> float:
        return 1e-3 * request.params.max_tokens

    def observe(self, row: TraceRow, shape: PlanShape | None = None, launch_s: float = 0.0) -> None: ...

    def save(self, path: Path) -> None: ...

    def load(self, path: Path) -> None: ...


def make_engine(capacity: int, **settings: object) -> Engine:
    config = EngineConfig(executor="simulated", **settings)  # type: ignore[arg-type]
    executor = MemoryExecutor(capacity)
    executor.page_size = config.page_size
    return Engine(config, MODEL, executor, _Constant())


def run(engine: Engine, prompts: Sequence[Sequence[int]], lengths: Sequence[int], *, arrive_every: int = 0) -> list[Request]:
    """Every request to its end, checking the allocator after each step; a new one comes every `arrive_every` steps."""
    requests: list[Request] = []
    coming = list(zip(prompts, lengths, strict=True))
    for turn in range(100_000):
        while coming and turn >= arrive_every * len(requests):
            prompt, n = coming.pop(0)
            requests.append(engine.add(prompt, SamplingParams(max_tokens=n, ignore_eos=True)))
        if engine.idle and not coming:
            break
        engine.step()
        engine.allocator.check()
    assert engine.idle, "requests are left that nothing will ever end"
    return requests


def assert_nothing_is_left(engine: Engine) -> None:
    stats = engine.allocator.stats()
    assert (stats.live, stats.reserved, stats.held, stats.retired) == (0, 0, 0, 0), "memory leaked"
    assert stats.free == stats.capacity
