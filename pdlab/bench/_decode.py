"""What the decode suites share: this process's read ceiling, a check against float64, rows of latencies beside their floor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from pdlab.bench._turns import in_turns, reason
from pdlab.hardware.probe import resolve_device
from pdlab.hardware.timing import L2Rotation, Timings, graph_time_us, time_ms

if TYPE_CHECKING:
    import torch

    from pdlab.bench.suites import Context

# products accumulate in float32; what is rounded to the dtype are the inputs of the next product and the output, so relative
# 2^-9 (bfloat16) and 2^-12 (float16) on average, a few times over
TOLERANCE = {"bfloat16": 1e-2, "float16": 1.5e-3, "float32": 1e-5}


@cache
def _read(device: str) -> float:
    from pdlab.bench import ceilings

    machine = resolve_device(device)
    timings, _ = ceilings.measure_read(machine, ceilings._buffer_bytes(machine, quick=not machine.is_gpu), 10)
    return timings.median * 1e12


def read_ceiling(ctx: Context) -> float:
    """Bytes a second that this device reads at best, measured once in this process; a row says so in every table."""
    value = _read(ctx.device)
    ctx.record.add("read", value / 1e12, "TB/s", variant="ceiling", n=10)
    return value


def relative_error(got: torch.Tensor, truth: torch.Tensor) -> float:
    return float((got.double() - truth).norm() / truth.norm())


def check(name: str, got: torch.Tensor, truth: torch.Tensor) -> None:
    """Raises AssertionError unless `got` is the float64 `truth` to within rounding of its dtype."""
    error = relative_error(got, truth)
    if not error < TOLERANCE[str(got.dtype).removeprefix("torch.")]:
        raise AssertionError(f"{name} is wrong: relative error {error:.2e}")


def take_turns(
    calls: Mapping[str, Callable[..., Any]],
    rotation: L2Rotation,
    device: str,
    *,
    graph: bool,
    rounds: int = 3,
    n: int = 15,
    budget_ms: float = 20.0,
    left_out: dict[str, str] | None = None,
) -> dict[str, Timings]:
    """Microseconds of each call, in turns of which each round begins one further on, over rotated inputs; in a CUDA graph of
    20 calls, or launched one by one.

    `left_out` is told why a rival failed, at its first call or in its last capture, and that one has no time; without it, and
    for those named `ours`, the failure is raised.
    """

    def once(call: Callable[..., Any]) -> Timings:
        if graph:
            return graph_time_us(call, rotation=rotation, n=n, budget_ms=budget_ms, warmup=1)
        return time_ms(call, rotation=rotation, device=device, n=n, warmup=1, budget_ms=budget_ms).scaled(1e3, "us")

    def of(call: Callable[..., Any]) -> Callable[[], Timings]:
        return lambda: once(call)

    def refused(name: str, error: Exception) -> None:
        if left_out is None or name.startswith("ours"):
            raise error
        left_out[name] = reason(error)

    return in_turns({name: of(call) for name, call in calls.items()}, rounds, 0.0, refused)


def report(ctx: Context, times: Mapping[str, Timings], floor_us: float, params: dict[str, Any], **settings: Any) -> None:
    """Latency rows of all variants, the floor's beside them, and a line about each."""
    ctx.record.add("floor_latency", floor_us, "us", kind="predicted", params=params)
    words = []
    for name, t in times.items():
        ctx.record.add("latency", t, variant=name, params=params, settings=settings.get(name))
        words.append(f"{name} {t.median:.1f}")
    where = " ".join(str(v) for v in params.values())
    ctx.say(f"  {where}: {', '.join(words)} us (floor {floor_us:.1f})")
    ctx.record.flush()
