"""What this device reaches at best: copying, reading, multiplying matrices. Every other ratio is a share of these.

    copy     2 n bytes (read + written) over the time of copying n bytes
    read     n bytes over the time of summing them
    matmul   2 n^3 FLOPs over the time of an n x n product, per dtype

Random data throughout: on some GPUs a product of zeros runs an eighth faster than one of random numbers. The floor rows
hold the data sheet's figures, so that a measured ceiling can be read as a share of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from pdlab.costs.roofline import Ceilings
from pdlab.hardware.probe import Machine, resolve_device
from pdlab.hardware.specs import find_spec
from pdlab.hardware.timing import Timings, time_ms

if TYPE_CHECKING:
    from pdlab.bench.suites import Context

NAME = "ceilings"
HELP = "copy and read bandwidth, matrix products: what the device reaches at best"

_READ_SWEEP = [(block, per_sm, warps) for block in (4096, 8192, 16384) for per_sm in (1, 2, 4, 8) for warps in (4, 8, 16)]


def _buffer_bytes(machine: Machine, quick: bool = False) -> int:
    """Far beyond any cache, within a sixteenth of the memory."""
    largest = 4 * 2**30 if machine.is_gpu else 256 * 2**20
    return int(min(largest, machine.memory_bytes // 16 or largest)) // (4 if quick else 1) // 4096 * 4096


def measure_copy(machine: Machine, nbytes: int, n: int = 20) -> Timings:
    """TB/s, bytes read plus bytes written."""
    import torch

    source = torch.randn(nbytes // 4, device=machine.device)
    target = torch.empty_like(source)
    timings = time_ms(lambda: target.copy_(source), device=machine.device, n=n, budget_ms=1500)
    if not torch.equal(source[-4096:], target[-4096:]):
        raise AssertionError("the copy that was timed did not copy")
    return timings.rate(2 * nbytes / 1e9, "TB/s")


def _best_reader(machine: Machine, x: Any) -> tuple[Callable[[], Any], dict[str, Any]]:
    """The fastest way found to read `x` whole, and its settings. Falls back to torch.sum where Triton is missing."""
    import torch

    if not machine.is_gpu:
        return (lambda: x.sum()), {"reader": "torch.sum"}
    try:
        from pdlab.bench.read_kernel import read_sum
    except ImportError as error:
        print(f"  read: Triton is missing ({error}); torch.sum reads a few per cent slower", file=sys.stderr)
        return (lambda: x.sum()), {"reader": "torch.sum"}
    truth = float(x.double().sum())
    best: tuple[float, Callable[[], Any], dict[str, Any]] | None = None
    for block, per_sm, warps in _READ_SWEEP:
        out = torch.full((per_sm * (machine.multiprocessors or 1),), float("nan"), device=x.device)
        call = partial(read_sum, x, out, block, warps)
        # each float32 lane adds about a hundred numbers, so all of them together err by far less than 1e-8 n; a block that
        # was left out or read twice shows, being 64 or more off; an output that was not written is NaN
        if not abs(float(call().double().sum()) - truth) <= 1e-8 * x.numel() + 1e-2:
            raise AssertionError(f"read_sum is wrong for block={block}, programs={out.numel()}")
        quick = time_ms(call, device=machine.device, n=5, warmup=1, budget_ms=30).median
        if best is None or quick < best[0]:
            best = (quick, call, {"reader": "triton", "block": block, "programs": out.numel(), "warps": warps})
    assert best is not None
    return best[1], best[2]


def measure_read(machine: Machine, nbytes: int, n: int = 30) -> tuple[Timings, dict[str, Any]]:
    """TB/s read, and the reader's settings."""
    import torch

    x = torch.randn(nbytes // 4, device=machine.device)
    call, settings = _best_reader(machine, x)
    return time_ms(call, device=machine.device, n=n, budget_ms=1500).rate(nbytes / 1e9, "TB/s"), settings


def measure_matmul(machine: Machine, dtype: str, size: int, n: int = 20) -> Timings:
    """TFLOP/s of a size x size product of random matrices in `dtype`, through torch (cuBLAS on a GPU)."""
    import torch

    a, b = (torch.randn(size, size, device=machine.device).to(getattr(torch, dtype)) for _ in range(2))
    out = torch.empty_like(a)
    timings = time_ms(lambda: torch.matmul(a, b, out=out), device=machine.device, n=n, budget_ms=1500)
    return timings.rate(2 * size**3 / 1e9, "TFLOP/s")


def measure(device: str = "auto", dtype: str | None = None, quick: bool = True) -> Ceilings:
    """The three ceilings in a few seconds, for whoever reports ratios: a ratio is taken within one run."""
    machine = resolve_device(device)
    nbytes, n = _buffer_bytes(machine, quick), 10 if quick else 20
    read, _ = measure_read(machine, nbytes, n)
    copy = measure_copy(machine, nbytes, n)
    sizes = (4096, 8192) if machine.is_gpu else (512, 1024)
    product = max(measure_matmul(machine, dtype or machine.dtype, size, n).median for size in sizes)
    _release(machine)
    return Ceilings(read.median * 1e12, copy.median * 1e12, product * 1e12, "measured")


def _release(machine: Machine) -> None:
    if machine.is_gpu:
        import torch

        torch.cuda.empty_cache()


def _products(machine: Machine) -> list[tuple[str, int]]:
    if not machine.is_gpu:
        return [("float32", 512), ("float32", 1024)]
    dtypes = ["float16"] if machine.dtype == "float16" else ["bfloat16", "float16"]
    return [(d, n) for d in dtypes for n in (2048, 4096, 8192)] + [("float32", 4096)]


def run(ctx: Context) -> None:
    import torch

    torch.manual_seed(ctx.seed)
    machine = ctx.machine
    sheet = find_spec(machine.slug)
    bandwidth = sheet.bandwidth if sheet else 0.0
    nbytes = _buffer_bytes(machine, quick=not ctx.full)

    def report(metric: str, timings: Timings, sheet_rate: float, settings: Any = None, **params: Any) -> None:
        ctx.record.add(metric, timings, params=params, settings=settings)
        if sheet_rate:
            floor = sheet_rate / 1e12
            ctx.record.add(f"floor_{metric}", floor, timings.unit, variant="data_sheet", kind="predicted", params=params)
        what = " ".join([metric, *(str(v) for v in params.values())])
        ctx.say(f"  {what}: {timings.median:.4g} {timings.unit}" + (f" ({timings.status})" if timings.throttled else ""))

    report("copy", measure_copy(machine, nbytes), bandwidth)
    read, settings = measure_read(machine, nbytes)
    report("read", read, bandwidth, settings)
    _release(machine)
    for dtype, size in _products(machine):
        if ctx.left() <= 0:
            ctx.record.skip("matmul", "TFLOP/s", "the time budget ran out", dtype=dtype, n=size)
            continue
        report("matmul", measure_matmul(machine, dtype, size), sheet.flops(dtype) if sheet else 0.0, dtype=dtype, n=size)
    _release(machine)
