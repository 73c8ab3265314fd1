"""Which kernels a run needs, found without compiling any, and compiled side by side.

A process meets its kernels one after the other, each with a step that waits for it. But what a kernel is compiled for follows
from the sizes of a step, not from what an earlier kernel wrote. So a run can be gone through with every launch left out: Triton
asks a hook before it compiles, and where the hook says that this is taken care of, it neither compiles nor launches. What it
was asked for, in Triton's own words, goes to other processes meanwhile. They need no GPU, only to know which one it is; and
what they compile lies in Triton's cache on disk, where the real run finds it.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Wanted:
    """A kernel and all that decides its machine code: `facts` is Triton's JSON. Picklable."""

    module: str
    name: str
    facts: str


class NothingLaunched:
    """Stands for engine.graphs.CudaCapture where nothing is launched: a graph would be empty, and its capture takes a while."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, step: Callable[[], torch.Tensor]) -> tuple[NothingLaunched, torch.Tensor]:
        return self, step()

    def replay(self) -> None:
        return None


def _first_token(self: Any, x: torch.Tensor, sampling: Any) -> Any:
    """Model.sample, after which every row has token 0: what the kernels that did not run would have written is no token."""
    import torch

    from pdlab.kernels.ops import SampleResult

    self.ops.projection_sample(x, self.head, sampling)
    return SampleResult(torch.zeros(len(x), dtype=torch.int64, device=x.device))


@contextmanager
def unlaunched(found: Callable[[Wanted], object]) -> Iterator[None]:
    """Triton's kernels are neither compiled nor launched in this block; `found` hears of each once. Engines go on with token 0,
    and their graphs are of no use afterwards. For a process that has launched nothing yet: a kernel that Triton holds already
    would run, on whatever its memory holds."""
    from triton import knobs

    from pdlab.engine import executor
    from pdlab.models.model import Model

    told: set[Wanted] = set()

    def hook(*, fn: Any, compile: Any, **_: Any) -> bool:  # the names are Triton's
        wanted = Wanted(fn.module, fn.name, compile["specialization_data"])
        if wanted not in told:
            told.add(wanted)
            found(wanted)
        return True

    with (
        patch.object(knobs.runtime, "jit_cache_hook", hook),
        patch.object(executor, "CudaCapture", NothingLaunched),
        patch.object(Model, "sample", _first_token),
    ):
        yield


class _Known:
    """A driver that knows which GPU to compile for, and has none."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def target_here() -> Any:
    """The GPU that Triton compiles for in this process; picklable."""
    from triton.runtime import driver

    return driver.active.get_current_target()


def compile_for(target: Any, wanted: Wanted) -> float:
    """Compiles a kernel into Triton's cache, for a process that launches nothing itself; seconds, next to none where the cache
    had it. Raises what Triton raises."""
    from triton.runtime import driver

    began = time.monotonic()
    driver.set_active(_Known(target))
    kernel = getattr(importlib.import_module(wanted.module), wanted.name)
    kernel.preload(wanted.facts)
    return time.monotonic() - began
