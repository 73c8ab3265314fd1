"""Rooflines: the least time a step can take, and which ceiling sets it.

    seconds  = max(FLOPs / matrix rate, bytes / read bandwidth)            nothing can be faster
    sequence = sum over operations of the same maximum                     nothing that runs one operation after another
    bound    = compute if the first term of `seconds` is larger, else bandwidth
    intensity = FLOPs / bytes; the ridge, where the bound changes, is matrix rate / bandwidth

(Williams, Waterman, Patterson: Roofline, CACM 2009.) Ceilings are measured ones where `pdlab bench ceilings` has been
recorded for the device, else the data sheet's, and say which.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pdlab.core.plan import PlanShape
from pdlab.costs import tables
from pdlab.costs.formulas import OPERATIONS, step_bytes, step_flops
from pdlab.hardware.specs import find_spec
from pdlab.models.config import ModelConfig

# (bytes, FLOPs) a second of an ordinary server core and of a mid-range GPU, for a device that was never measured and has
# no data sheet here: an engine must run there too. What rests on them is marked as predicted.
ASSUMED = {"cpu": (10e9, 50e9), "gpu": (500e9, 50e12)}


@dataclass(frozen=True)
class Ceilings:
    """Bytes and FLOPs a second. `source`: "measured", "data sheet" or "assumed"."""

    read_bytes_per_s: float
    copy_bytes_per_s: float
    matmul_flops_per_s: float
    source: str = "data sheet"

    @property
    def kind(self) -> str:
        """The word to show beside a number that rests on these: measured or predicted."""
        return "measured" if self.source == "measured" else "predicted"

    @property
    def ridge(self) -> float:
        """FLOPs a byte at which compute and bandwidth take equally long."""
        return self.matmul_flops_per_s / self.read_bytes_per_s


def sheet_ceilings(device: str, dtype: str = "bfloat16") -> Ceilings:
    """Ceilings from the data sheet of `device`; assumed ones for a CPU or a GPU without one."""
    sheet = find_spec(device)
    if sheet is not None:
        return Ceilings(sheet.bandwidth, sheet.bandwidth, sheet.flops(dtype), "data sheet")
    bandwidth, flops = ASSUMED["cpu" if device.startswith("cpu") else "gpu"]
    return Ceilings(bandwidth, bandwidth, flops, "assumed")


def measured_ceilings(device: str, dtype: str = "bfloat16", extra: Path | None = None) -> Ceilings | None:
    """Ceilings from recorded measurements (see tables), or None where read, copy or matmul in this dtype is missing."""
    rows = [r for r in tables.newest(tables.read(device, "ceilings", extra)) if r.kind == "measured"]
    reads = [r.median for r in rows if r.metric == "read"]
    copies = [r.median for r in rows if r.metric == "copy"]
    products = [r.median for r in rows if r.metric == "matmul" and r.params.get("dtype") == dtype]
    if not (reads and copies and products):
        return None
    return Ceilings(max(reads) * 1e12, max(copies) * 1e12, max(products) * 1e12, "measured")


def ceilings_for(device: str, dtype: str = "bfloat16", extra: Path | None = None) -> Ceilings:
    """Measured ceilings of a device slug where there are any, else the data sheet's."""
    sheet = find_spec(device)
    for slug in dict.fromkeys([device, sheet.slug if sheet else device]):
        found = measured_ceilings(slug, dtype, extra)
        if found is not None:
            return found
    return sheet_ceilings(device, dtype)


@dataclass(frozen=True)
class Roofline:
    """Least seconds of a step. `seconds` assumes perfect overlap, `sequence_seconds` one operation after another."""

    seconds: float
    bound: str  # compute | bandwidth
    flops: float
    bytes: float
    intensity: float
    compute_seconds: float
    bandwidth_seconds: float
    sequence_seconds: float


def roofline(flops: float, moved: float, ceilings: Ceilings) -> Roofline:
    """The roofline of one operation of `flops` FLOPs and `moved` bytes."""
    compute, bandwidth = flops / ceilings.matmul_flops_per_s, moved / ceilings.read_bytes_per_s
    seconds = max(compute, bandwidth)
    bound = "compute" if compute > bandwidth else "bandwidth"
    return Roofline(seconds, bound, flops, moved, flops / moved if moved else 0.0, compute, bandwidth, seconds)


def step_time(cfg: ModelConfig, shape: PlanShape, ceilings: Ceilings, itemsize: int) -> Roofline:
    """Least time of one step of a model; an empty step takes none."""
    flops, moved = step_flops(cfg, shape), step_bytes(cfg, shape, itemsize)
    sequence = sum(roofline(getattr(flops, op), getattr(moved, op), ceilings).seconds for op in OPERATIONS)
    r = roofline(flops.total, moved.total, ceilings)
    return Roofline(r.seconds, r.bound, r.flops, r.bytes, r.intensity, r.compute_seconds, r.bandwidth_seconds, sequence)


def op_times(cfg: ModelConfig, shape: PlanShape, ceilings: Ceilings, itemsize: int) -> dict[str, Roofline]:
    """The roofline of each operation, summed over the layers."""
    flops, moved = step_flops(cfg, shape), step_bytes(cfg, shape, itemsize)
    return {op: roofline(getattr(flops, op), getattr(moved, op), ceilings) for op in OPERATIONS}


def littles_law_latency(in_flight: float, throughput: float) -> float:
    """Mean seconds in the system, given how many are in it and how many leave a second (Little, 1961): L = lambda W."""
    return in_flight / throughput
