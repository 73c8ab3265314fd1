"""What runs a plan. The scheduler and the allocators cannot tell which executor they drive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pdlab.core.clock import Clock
from pdlab.core.plan import Plan


@dataclass(frozen=True)
class StepResult:
    """Outcome of one plan. `tokens[i]` belongs to `plan.request_ids[plan.sample_rows[i]]`; seconds on the engine's clock."""

    step: int
    tokens: np.ndarray  # i64[S] (i64[repeat, S] when plan.repeat > 1)
    t_start: float
    t_end: float
    logprob: np.ndarray | None = None  # f32[S]
    top_ids: np.ndarray | None = None  # i64[S, n]
    top_logprobs: np.ndarray | None = None  # f32[S, n]
    error: BaseException | None = None  # the step failed; tokens are meaningless
    bad_rows: tuple[int, ...] = ()  # sampled rows whose logits held no finite value: those requests fail, no others


class Handle(Protocol):
    def done(self) -> bool:
        """True when result() would not block."""
        ...

    def result(self) -> StepResult:
        """Blocks until the step has ended. Never raises for a failing step: see StepResult.error."""
        ...


class Executor(Protocol):
    """Contract 4."""

    clock: Clock
    overlaps: bool  # the device works beside the host, so that submit returns once a step is launched

    def capacity(self) -> int:
        """Slots of KV memory there are."""
        ...

    def submit(self, plan: Plan) -> Handle:
        """Starts a step; at most EngineConfig.steps_in_flight may be unfinished."""
        ...

    def reset(self) -> None:
        """Forgets all rows and waits for what is running; used after a failing step."""
        ...

    def close(self) -> None:
        """Gives the memory back."""
        ...
