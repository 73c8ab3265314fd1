"""Memory that is paid for and holds nothing: what it is, how it grows over time, and what it looks like.

Of a memory of C slots, with pieces (pages or extents) p of size s_p, of which a live request owns some and h_p rows hold a
token, F free slots (nobody's, or evictable), and U(F) the largest amount of F that one request could be given:

    internal   = (sum s_p - sum h_p) / sum s_p      over owned pieces, shared ones once: reserved, holding no token
    external   = (F - U(F)) / F                     free, but in pieces that a request cannot use together
    framework  = (R - A) / R                        R bytes the tensor library holds of the device, A of them in use by tensors

The first two are the allocator's (AllocatorStats). The third arises only where each request has a tensor of its own: it is
what a caching device allocator keeps, rounds up, or cannot put together; `framework_waste` measures it by making and dropping
the same pieces. Averages over time weigh each step by how long it lasted.

In the article's table the three are one column, so its 35 %, 5 % and 8 % can be neither of them alone for certain.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from pdlab.allocators.interface import FREE, Allocator, AllocatorStats
from pdlab.core.plan import KVAllocate, KVFree, KVOp
from pdlab.core.trace import TraceRow


def picture(allocator: Allocator, blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """The memory as `blocks` equal stretches: (owner i32[blocks], share of the stretch that holds tokens f32[blocks]).

    The owner of a stretch is that of the slot in its middle: a request, or FREE, RETIRED, CACHED, SHARED.
    """
    starts, sizes, owners, held = np.array(allocator.layout(), np.int64).reshape(-1, 4).T
    edges = np.linspace(0, allocator.capacity, blocks + 1)
    piece = np.searchsorted(starts, (edges[:-1] + edges[1:]) / 2, side="right") - 1
    # tokens below a slot, as a piecewise linear function: full up to the end of a piece's held rows, then flat
    at = np.stack([starts, starts + held, starts + sizes], axis=1).ravel()
    total = np.cumsum(np.stack([np.zeros_like(held), held, np.zeros_like(held)], axis=1).ravel())
    tokens = np.interp(edges, at, total)
    return owners[piece].astype(np.int32), (np.diff(tokens) / np.diff(edges)).astype(np.float32)


class Steps(Protocol):
    """What `Timeline.watch` needs of an engine."""

    allocator: Any
    clock: Any

    def step(self) -> Any: ...


@dataclass
class Timeline:
    """What an allocator looked like after each of an engine's steps.

    `times` [n] seconds; `stats` n AllocatorStats; every `frame_every`-th step also a picture: `frames` [m, blocks] owners,
    `filled` [m, blocks] shares, taken at `frame_times` [m].
    """

    blocks: int = 256
    frame_every: int = 1
    times: list[float] = field(default_factory=list)
    stats: list[AllocatorStats] = field(default_factory=list)
    frame_times: list[float] = field(default_factory=list)
    frames: list[np.ndarray] = field(default_factory=list)
    filled: list[np.ndarray] = field(default_factory=list)

    def record(self, t: float, allocator: Allocator) -> None:
        if len(self.times) % self.frame_every == 0:
            owners, filled = picture(allocator, self.blocks)
            self.frame_times.append(t)
            self.frames.append(owners)
            self.filled.append(filled)
        self.times.append(t)
        self.stats.append(allocator.stats())

    def watch(self, engine: Steps) -> Timeline:
        """Records after every later step of this engine."""
        step = engine.step

        def watched() -> Any:
            events = step()
            self.record(engine.clock.now(), engine.allocator)
            return events

        engine.step = watched  # type: ignore[method-assign]
        return self

    def series(self, name: str) -> np.ndarray:
        """One field or property of the stats over time, such as "waste_internal" or "reserved"."""
        return np.array([getattr(s, name) for s in self.stats])

    def image(self, colours: int = 12) -> np.ndarray:
        """i32[blocks, frames] for imshow: 0 free, 1 retired, 2 cached, 3 shared, then 4 + request mod `colours`."""
        owners = np.array(self.frames, np.int32).reshape(-1, self.blocks).T
        return np.where(owners < 0, FREE - owners, 4 + owners % colours)


@dataclass(frozen=True)
class Waste:
    """Averages over time, in percent."""

    internal: float
    external: float


def average_waste(trace: Iterable[TraceRow]) -> Waste:
    """Waste averaged over the steps of a trace in which somebody owned memory, weighed by how long each lasted."""
    rows = [(r.t_end - r.t_start, r.waste_internal, r.waste_external) for r in trace if r.pages_used]
    if not rows:
        return Waste(0.0, 0.0)
    seconds, internal, external = np.array(rows).T
    weight = seconds / seconds.sum() if seconds.sum() > 0 else np.full(len(rows), 1 / len(rows))
    return Waste(100 * float(weight @ internal), 100 * float(weight @ external))


@dataclass(frozen=True)
class FrameworkWaste:
    """`waste` percent, averaged over the operations; `allocate_us` and `free_us` medians of one call on the host."""

    waste: float
    allocate_us: float
    free_us: float
    failed: int  # allocations that the device refused


def framework_waste(ops: Sequence[KVOp], bytes_per_token: int, device: str = "cuda") -> FrameworkWaste:
    """Makes and drops the pieces that `ops` speak of as tensors of their own, and looks at what the tensor library holds.

    `ops` is what a per-request allocator handed to its plans, in order. Needs a CUDA device: a CPU has no such counters.
    """
    import torch

    torch.cuda.empty_cache()
    held_before, used_before = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    pieces: dict[int, torch.Tensor] = {}
    waste: list[float] = []
    made: list[float] = []
    dropped: list[float] = []
    failed = 0
    for op in ops:
        started = time.perf_counter()
        if isinstance(op, KVAllocate):
            try:
                pieces[op.base] = torch.empty(op.tokens * bytes_per_token, dtype=torch.uint8, device=device)
            except torch.OutOfMemoryError:
                failed += 1
            made.append(time.perf_counter() - started)
        elif isinstance(op, KVFree):
            pieces.pop(op.base, None)
            dropped.append(time.perf_counter() - started)
        held = torch.cuda.memory_reserved(device) - held_before
        used = torch.cuda.memory_allocated(device) - used_before
        if held > 0 and pieces:
            waste.append((held - used) / held)
    pieces.clear()
    torch.cuda.empty_cache()
    average, make, drop = (float(f(x)) if x else 0.0 for f, x in ((np.mean, waste), (np.median, made), (np.median, dropped)))
    return FrameworkWaste(100 * average, 1e6 * make, 1e6 * drop, failed)
