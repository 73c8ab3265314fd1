"""What prices a step before it runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from pdlab.core.plan import PlanShape
from pdlab.core.request import Request
from pdlab.core.trace import TraceRow


class Estimator(ABC):
    """Contract 6, second half. All times are seconds."""

    @abstractmethod
    def step_seconds(self, shape: PlanShape) -> float:
        """How long the device needs for a step of this shape."""

    def prefill_seconds(self, tokens: int) -> float:
        """How long the device needs to compute `tokens` tokens of one request alone, from nothing."""
        return self.step_seconds(PlanShape(prefill=((tokens, 0),), sampled=1)) if tokens > 0 else 0.0

    @abstractmethod
    def remaining(self, request: Request) -> float:
        """Expected seconds of device time until the request ends, were it alone."""

    def remaining_if(self, request: Request, more: float) -> float:
        """`remaining` were it known that `more` output tokens are still to come."""
        return self.remaining(request)

    @abstractmethod
    def observe(self, row: TraceRow, shape: PlanShape | None = None, launch_s: float = 0.0) -> None:
        """A step ended; a learning estimator refines itself. `shape` is the plan's, where the caller still has it: a row
        alone does not say how its prefill tokens were divided among requests. `launch_s`: how long handing it to a device
        that works beside the host took the host."""

    def finished(self, request: Request) -> None:
        """A request ended; a learning estimator refines its output-length quantiles."""
        return None

    @abstractmethod
    def save(self, path: Path) -> None: ...

    @abstractmethod
    def load(self, path: Path) -> None: ...
