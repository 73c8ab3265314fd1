"""What machine is this? Device, memory, dtype and profile, whatever the state of torch.

`probe()` never raises: where torch is missing or broken it says so in `problem` and describes the CPU.
"""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdlab.core.errors import DeviceUnavailable
from pdlab.hardware.specs import device_slug

__all__ = [
    "Machine",
    "cpu_slug",
    "default_dtype",
    "device_slug",
    "import_torch",
    "probe",
    "resolve_device",
    "triton_dot_allowed",
]


@dataclass(frozen=True)
class Machine:
    """One device to run on. `capability` and `multiprocessors` are None on a CPU; `problem` says why there is no GPU."""

    device: str  # cuda | cpu
    name: str
    slug: str
    capability: tuple[int, int] | None
    memory_bytes: int
    dtype: str
    profile: str  # smoke | full
    multiprocessors: int | None = None
    l2_bytes: int | None = None
    torch_version: str | None = None
    problem: str | None = None

    @property
    def is_gpu(self) -> bool:
        return self.device != "cpu"


def default_dtype(capability: tuple[int, int] | None) -> str:
    """The dtype rule: bfloat16 from compute capability 8.0 on, float16 below, float32 on a CPU (None).

    The capability decides, not torch.cuda.is_bf16_supported(): that answers True on a T4, which emulates it slowly.
    """
    if capability is None:
        return "float32"
    return "bfloat16" if tuple(capability) >= (8, 0) else "float16"


def triton_dot_allowed(capability: tuple[int, int] | None) -> bool:
    """Whether kernels built on tl.dot may be chosen: below 8.0 they compile without tensor cores and spill."""
    return capability is not None and tuple(capability) >= (8, 0)


def cpu_slug() -> str:
    """'cpu-x86-64', 'cpu-aarch64', ..."""
    return "cpu-" + (device_slug(platform.machine()) or "unknown")


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "CPU"


def _ram_bytes() -> int:
    """Physical memory, or a smaller limit that a container sets; 0 if unknown."""
    try:
        ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            ram = min(ram, int(Path(limit).read_text()))
        except (OSError, ValueError):
            continue
    return ram


def import_torch() -> tuple[Any, str | None]:
    """(torch, None), or (None, why it cannot be imported). A broken build raises OSError or worse; that is caught here."""
    try:
        import torch

        torch.zeros(1)  # a build without its native library imports far enough to mislead
        return torch, None
    except ImportError as error:
        return None, f"torch cannot be imported: {error}"
    except Exception as error:  # OSError from a missing shared library, AttributeError from a half-installed package
        return None, f"torch is installed but broken: {type(error).__name__}: {error}"


def _cpu_machine(torch: Any, problem: str | None) -> Machine:
    return Machine(
        device="cpu",
        name=_cpu_name(),
        slug=cpu_slug(),
        capability=None,
        memory_bytes=_ram_bytes(),
        dtype="float32",
        profile="smoke",
        torch_version=str(torch.__version__) if torch is not None else None,
        problem=problem,
    )


def probe(device: str = "auto") -> Machine:
    """The machine as seen through `device` (auto: the first GPU if there is one). Never raises; see Machine.problem."""
    torch, problem = import_torch()
    if torch is None or device == "cpu":
        return _cpu_machine(torch, problem)
    try:
        if not torch.cuda.is_available():
            return _cpu_machine(torch, "torch sees no CUDA device")
        index = int(device.partition(":")[2] or 0)
        props = torch.cuda.get_device_properties(index)
        capability = (int(props.major), int(props.minor))
        return Machine(
            device="cuda" if index == 0 else f"cuda:{index}",
            name=props.name,
            slug=device_slug(props.name),
            capability=capability,
            memory_bytes=int(props.total_memory),
            dtype=default_dtype(capability),
            profile="full",
            multiprocessors=int(props.multi_processor_count),
            l2_bytes=int(getattr(props, "L2_cache_size", 0)) or None,
            torch_version=str(torch.__version__),
        )
    except Exception as error:  # a driver that does not fit the CUDA runtime raises here
        return _cpu_machine(torch, f"CUDA is there but unusable: {type(error).__name__}: {error}")


def resolve_device(device: str = "auto") -> Machine:
    """As probe(), but what was asked for explicitly and isn't there raises DeviceUnavailable."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise DeviceUnavailable(f"there is no device {device!r}", "use auto, cpu, cuda or cuda:N")
    machine = probe(device)
    if machine.torch_version is None:
        raise DeviceUnavailable(machine.problem or "torch is missing", "install it: pip install torch")
    if device.startswith("cuda") and not machine.is_gpu:
        raise DeviceUnavailable(f"device {device!r} is not usable: {machine.problem}", "use device='cpu' or 'auto'")
    return machine
