"""Data sheets of the GPUs the lab knows, each with its source.

Rates are dense (data sheets often print twice as much, for 2:4 sparsity), per second, with 32-bit accumulation where the
card distinguishes. `memory_bytes` reads the sheet's GB as GiB, which is what the parts hold; a program can allocate a few
per cent less. These are ceilings nobody reaches: a measured ceiling (`pdlab bench ceilings`) replaces them where one exists.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pdlab.core.errors import DeviceUnavailable

TERA = 1e12
GIB = 2**30
MIB = 2**20


@dataclass(frozen=True)
class DeviceSpec:
    """`bf16_flops` is 0 where the tensor cores have no bfloat16; all rates are operations or bytes a second."""

    slug: str
    name: str  # as the driver names it
    capability: tuple[int, int]
    memory_bytes: int
    bandwidth: float
    fp16_flops: float
    bf16_flops: float
    fp32_flops: float  # plain float32, no tf32
    l2_bytes: int
    multiprocessors: int
    source: str

    def flops(self, dtype: str) -> float:
        """Dense matrix rate in `dtype` (float16, bfloat16, float32); bfloat16 without tensor cores runs at float32's."""
        rates = {"float16": self.fp16_flops, "bfloat16": self.bf16_flops or self.fp32_flops, "float32": self.fp32_flops}
        if dtype not in rates:
            raise DeviceUnavailable(f"no data-sheet rate for dtype {dtype!r}", f"use one of: {', '.join(rates)}")
        return rates[dtype]


def device_slug(name: str) -> str:
    """'NVIDIA A100-SXM4-40GB' -> 'nvidia-a100-sxm4-40gb': lower case, every run of other characters one hyphen."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _spec(
    name: str,
    capability: tuple[int, int],
    gib: int,
    gb_per_s: float,
    tflops: tuple[float, float, float],
    l2_mib: float,
    sms: int,
    source: str,
) -> DeviceSpec:
    fp16, bf16, fp32 = (t * TERA for t in tflops)
    slug = device_slug(name)
    return DeviceSpec(slug, name, capability, gib * GIB, gb_per_s * 1e9, fp16, bf16, fp32, round(l2_mib * MIB), sms, source)


_NV = "https://www.nvidia.com/content/dam/en-zz/Solutions"
_T4 = f"{_NV}/Data-Center/tesla-t4/t4-tensor-core-datasheet-951643.pdf"
_A100 = f"{_NV}/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"

SPECS: dict[str, DeviceSpec] = {
    s.slug: s
    for s in (
        # the card's 256-bit bus at 10 Gbit/s; its data sheet rounds that to "300+"
        _spec("Tesla T4", (7, 5), 16, 320, (65, 0, 8.1), 4, 40, _T4),
        _spec("NVIDIA L4", (8, 9), 24, 300, (121, 121, 30.3), 48, 58, "https://www.nvidia.com/en-us/data-center/l4/"),
        _spec(
            "NVIDIA A10", (8, 6), 24, 600, (125, 125, 31.2), 6, 72,
            f"{_NV}/Data-Center/a10/pdf/datasheet-new/nvidia-a10-datasheet.pdf",
        ),
        _spec("NVIDIA A100-SXM4-40GB", (8, 0), 40, 1555, (312, 312, 19.5), 40, 108, _A100),
        _spec("NVIDIA A100-SXM4-80GB", (8, 0), 80, 2039, (312, 312, 19.5), 40, 108, _A100),
        _spec(
            "NVIDIA H100 80GB HBM3", (9, 0), 80, 3350, (989.5, 989.5, 67), 50, 132,
            "https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet",
        ),
        # the runtime reports 60 MiB of L2 on this part
        _spec(
            "NVIDIA H200", (9, 0), 141, 4800, (989.5, 989.5, 67), 60, 132,
            "https://nvdam.widen.net/s/nb5zzzsjdf/hpc-datasheet-sc23-h200-datasheet-3002446",
        ),
        # rates of one GPU of an HGX B200; 148 multiprocessors and 126 MiB as the runtime reports them
        _spec(
            "NVIDIA B200", (10, 0), 180, 8000, (2250, 2250, 80), 126, 148,
            "https://resources.nvidia.com/en-us-blackwell-architecture",
        ),
        _spec(
            "NVIDIA GeForce RTX 4090", (8, 9), 24, 1008, (165.2, 165.2, 82.6), 72, 128,
            "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf",
        ),
    )
}  # fmt: skip

# other names under which the driver or a user knows the same part, or one with the same rates
_ALIASES = {
    "t4": "tesla-t4",
    "nvidia-t4": "tesla-t4",
    "nvidia-tesla-t4": "tesla-t4",
    "l4": "nvidia-l4",
    "a10": "nvidia-a10",
    "nvidia-a10g": "nvidia-a10",
    "a100": "nvidia-a100-sxm4-40gb",
    "a100-40": "nvidia-a100-sxm4-40gb",
    "a100-40gb": "nvidia-a100-sxm4-40gb",
    "a100-sxm4-40gb": "nvidia-a100-sxm4-40gb",
    "nvidia-a100-40gb": "nvidia-a100-sxm4-40gb",
    "nvidia-a100-pcie-40gb": "nvidia-a100-sxm4-40gb",
    "a100-80": "nvidia-a100-sxm4-80gb",
    "a100-80gb": "nvidia-a100-sxm4-80gb",
    "nvidia-a100-80gb": "nvidia-a100-sxm4-80gb",
    "h100": "nvidia-h100-80gb-hbm3",
    "nvidia-h100": "nvidia-h100-80gb-hbm3",
    "h200": "nvidia-h200",
    "b200": "nvidia-b200",
    "rtx-4090": "nvidia-geforce-rtx-4090",
    "nvidia-rtx-4090": "nvidia-geforce-rtx-4090",
}


def find_spec(name: str) -> DeviceSpec | None:
    """The data sheet of a device name, slug or usual short form; None for a device that has none here."""
    slug = device_slug(name)
    return SPECS.get(_ALIASES.get(slug, slug))


def spec(name: str) -> DeviceSpec:
    """As find_spec, but an unknown device is a DeviceUnavailable that lists the known ones."""
    found = find_spec(name)
    if found is None:
        raise DeviceUnavailable(f"there is no data sheet for {name!r}", f"known: {', '.join(SPECS)}")
    return found
