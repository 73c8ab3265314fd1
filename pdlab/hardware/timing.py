"""How long something takes: CUDA events, CUDA graphs for what is shorter than a launch, perf_counter on a CPU.

Every timer discards a warm-up and reports the median with p10 and p90. On a GPU, inputs that fit its L2 cache must be
rotated (`L2Rotation`), or the second call reads the cache instead of the memory. Below about 50 us the gap between two
launches is a visible part of a call, so `graph_time_us` captures at least 20 calls in one graph.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdlab.hardware import nvml

MIN_GRAPH_CALLS = 20
_RETRIES = 2  # how often a throttled sample is taken again before it is kept and marked


@dataclass(frozen=True)
class Timings:
    """Quantiles of one call's duration over `n` samples, in `unit`. `throttled`: heat or a power brake lowered the clock."""

    median: float
    p10: float
    p90: float
    n: int
    unit: str = "ms"
    throttled: bool = False

    @property
    def status(self) -> str:
        return "throttled" if self.throttled else "ok"

    def scaled(self, factor: float, unit: str) -> Timings:
        """The same samples multiplied by `factor`."""
        return Timings(self.median * factor, self.p10 * factor, self.p90 * factor, self.n, unit, self.throttled)

    def rate(self, amount: float, unit: str) -> Timings:
        """`amount` per duration. The slowest decile of durations is the lowest decile of rates, so p10 and p90 swap."""
        return Timings(amount / self.median, amount / self.p90, amount / self.p10, self.n, unit, self.throttled)


def quantile(sorted_values: Sequence[float], q: float) -> float:
    """Linear interpolation between order statistics, as numpy's default."""
    if not sorted_values:
        raise ValueError("no samples")
    at = q * (len(sorted_values) - 1)
    low = math.floor(at)
    high = min(low + 1, len(sorted_values) - 1)
    return sorted_values[low] + (sorted_values[high] - sorted_values[low]) * (at - low)


def summarize(samples: Sequence[float], unit: str = "ms", throttled: bool = False) -> Timings:
    ordered = sorted(samples)
    return Timings(quantile(ordered, 0.5), quantile(ordered, 0.1), quantile(ordered, 0.9), len(ordered), unit, throttled)


class L2Rotation:
    """Input sets to cycle through, so that together they exceed the L2 cache three times and no call finds its data there.

    `make(i)` returns the arguments of call i as a tuple; `bytes_per_set` is what one call reads. On a CPU, or where one set
    is already several times the cache, there is one set. `limit_bytes` bounds the memory taken.
    """

    def __init__(
        self,
        make: Callable[[int], tuple[Any, ...]],
        bytes_per_set: int,
        *,
        l2_bytes: int | None = None,
        limit_bytes: int = 4 * 2**30,
    ) -> None:
        cache = _l2_bytes() if l2_bytes is None else l2_bytes
        wanted = math.ceil(3 * cache / max(1, bytes_per_set)) + 1 if cache else 1
        count = max(1, min(wanted, limit_bytes // max(1, bytes_per_set), 512))
        self.sets = [make(i) for i in range(count)]
        self._next = 0

    def __len__(self) -> int:
        return len(self.sets)

    def next(self) -> tuple[Any, ...]:
        args = self.sets[self._next]
        self._next = (self._next + 1) % len(self.sets)
        return args


def _l2_bytes() -> int:
    import torch

    if not torch.cuda.is_available():
        return 0
    return int(getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "L2_cache_size", 0)) or 64 * 2**20


def _on_gpu(device: str | None) -> bool:
    import torch

    return torch.cuda.is_available() if device is None else str(device).startswith("cuda")


def steady(sample: Callable[[], list[float]], unit: str, on_gpu: bool) -> Timings:
    """Summarizes what `sample()` returns; while the card throttles it is taken again, at most twice, then kept and marked."""
    timings = None
    for attempt in range(1 + _RETRIES):
        values = sample()
        state = None if not on_gpu else nvml.state() if attempt else nvml.recent_state()
        timings = summarize(values, unit, state is not None and state.throttled)
        if not timings.throttled:
            break
        time.sleep(0.5)
    assert timings is not None
    return timings


def _counts(once_ms: float, n: int, budget_ms: float) -> int:
    return max(3, min(n, int(budget_ms / max(once_ms, 1e-6))))


def _cpu_samples(call: Callable[[], Any], n: int) -> list[float]:
    samples = []
    for _ in range(n):
        start = time.perf_counter()
        call()
        samples.append((time.perf_counter() - start) * 1e3)
    return samples


def _gpu_samples(call: Callable[[], Any], n: int) -> list[float]:
    import torch

    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(n)]
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [float(start.elapsed_time(end)) for start, end in events]


def time_ms(
    fn: Callable[..., Any],
    *,
    rotation: L2Rotation | None = None,
    device: str | None = None,
    n: int = 50,
    warmup: int = 3,
    budget_ms: float = 1000.0,
) -> Timings:
    """Milliseconds a call of `fn(*rotation.next())`, or `fn()` without a rotation.

    Up to `n` samples, at least 3, as many as fit in `budget_ms` of measuring. `device` None means the GPU where there is one.
    """
    on_gpu = _on_gpu(device)

    def call() -> None:
        fn(*rotation.next()) if rotation is not None else fn()

    for _ in range(max(1, warmup)):
        call()
    samples = _gpu_samples if on_gpu else _cpu_samples
    if on_gpu:
        import torch

        torch.cuda.synchronize()
    once = samples(call, 1)[0]
    count = _counts(once, n, budget_ms)
    return steady(lambda: samples(call, count), "ms", on_gpu)


def graph_time_us(
    fn: Callable[..., Any],
    *,
    rotation: L2Rotation | None = None,
    calls: int = MIN_GRAPH_CALLS,
    fewest: int = MIN_GRAPH_CALLS,
    n: int = 30,
    warmup: int = 3,
    budget_ms: float = 500.0,
) -> Timings:
    """Microseconds a call of `fn` inside one CUDA graph of `calls` calls over rotated inputs.

    No fewer than `fewest`, 20, unless the caller knows that a call takes milliseconds.

    `fn` must be capturable: no host synchronization, no allocation outside torch's pool. Each sample is one replay divided by
    the number of calls. The outputs are thrown away; check them apart. Needs CUDA.
    """
    import torch

    calls = max(calls, fewest)
    sets = [rotation.next() for _ in range(calls)] if rotation is not None else [()] * calls
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # lazy initialization must happen before, and off, the captured stream
        for _ in range(max(1, warmup)):
            fn(*sets[0])
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # the outer context restores the stream where a capture fails: whoever catches that would go on in the capture's
    with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
        for args in sets:
            fn(*args)
    graph.replay()
    torch.cuda.synchronize()
    once = _gpu_samples(graph.replay, 1)[0]
    count = _counts(once, n, budget_ms)
    timings = steady(lambda: _gpu_samples(graph.replay, count), "ms", True)
    return timings.scaled(1e3 / calls, "us")


def alternate(candidates: Mapping[str, Callable[[], Timings]], rounds: int = 3) -> dict[str, Timings]:
    """Rivals measured in turns, A B A B; of each, the round with the middle median, so that drift favours nobody.

    `candidates` maps a name to a function that measures once and returns its Timings.
    """
    taken: dict[str, list[Timings]] = {name: [] for name in candidates}
    for _ in range(max(1, rounds)):
        for name, measure in candidates.items():
            taken[name].append(measure())
    middle = {}
    for name, several in taken.items():
        usable = [t for t in several if not t.throttled] or several
        middle[name] = sorted(usable, key=lambda t: t.median)[(len(usable) - 1) // 2]
    return middle
