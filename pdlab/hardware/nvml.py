"""What the driver says of a GPU's state: clocks, temperature, power, and why it slows down.

Read through pynvml where it can be imported, else through `nvidia-smi`; None where neither answers. Nothing here changes a
setting of the card.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from dataclasses import dataclass
from typing import Any

# bits of clocks_event_reasons (NVML's nvmlClocksEventReason* constants)
REASONS = {
    0x001: "idle",
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake",
    0x100: "display_clock_setting",
}
# The power cap is left out: large matrix products run into it on a healthy card, and it is part of what the card can do.
# It is logged all the same.
THROTTLING = 0x008 | 0x020 | 0x040 | 0x080

UNKNOWN: dict[str, Any] = dict.fromkeys(("gpu", "driver", "clocks", "temperature", "power", "throttle"))

_FIELDS = (
    "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,temperature.gpu,power.draw,power.limit,clocks_event_reasons.active"
)


@dataclass(frozen=True)
class GpuState:
    """MHz, degrees Celsius, watts; None for what the driver does not report."""

    name: str
    driver: str
    sm_mhz: float | None
    memory_mhz: float | None
    max_sm_mhz: float | None
    temperature_c: float | None
    power_w: float | None
    power_limit_w: float | None
    reasons: int

    @property
    def throttled(self) -> bool:
        """The clock is being lowered by heat or by a power brake."""
        return bool(self.reasons & THROTTLING)

    @property
    def reason_names(self) -> list[str]:
        return [name for bit, name in REASONS.items() if self.reasons & bit]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _parse_smi(line: str) -> GpuState | None:
    cells = [c.strip() for c in line.split(",")]
    if len(cells) != len(_FIELDS.split(",")):
        return None
    try:
        reasons = int(cells[8], 0)
    except ValueError:
        reasons = 0
    sm, memory, max_sm, temperature, power, limit = (_number(c) for c in cells[2:8])
    return GpuState(cells[0], cells[1], sm, memory, max_sm, temperature, power, limit, reasons)


def _from_smi(index: int) -> GpuState | None:
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return None
    for fields in (_FIELDS, _FIELDS.replace("clocks_event_reasons", "clocks_throttle_reasons")):  # older drivers' name
        command = [smi, f"--query-gpu={fields}", "--format=csv,noheader,nounits", f"--id={index}"]
        try:
            out = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        except (OSError, subprocess.SubprocessError):
            return None
        if out.returncode == 0 and out.stdout.strip():
            return _parse_smi(out.stdout.strip().splitlines()[0])
    return None


def _from_pynvml(index: int) -> GpuState | None:
    try:
        import pynvml as nv

        nv.nvmlInit()
    except Exception:  # the module, the library or the driver is missing: nvidia-smi is asked next
        return None

    def ask(function: str, *args: Any, scale: float = 1.0) -> float | None:
        try:
            return float(getattr(nv, function)(*args)) * scale
        except Exception:  # NotSupported on some parts
            return None

    def text(value: Any) -> str:
        return value.decode() if isinstance(value, bytes) else str(value)

    try:
        gpu = nv.nvmlDeviceGetHandleByIndex(index)
        reasons = ask("nvmlDeviceGetCurrentClocksEventReasons", gpu)
        if reasons is None:
            reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons", gpu)
        return GpuState(
            text(nv.nvmlDeviceGetName(gpu)),
            text(nv.nvmlSystemGetDriverVersion()),
            ask("nvmlDeviceGetClockInfo", gpu, nv.NVML_CLOCK_SM),
            ask("nvmlDeviceGetClockInfo", gpu, nv.NVML_CLOCK_MEM),
            ask("nvmlDeviceGetMaxClockInfo", gpu, nv.NVML_CLOCK_SM),
            ask("nvmlDeviceGetTemperature", gpu, nv.NVML_TEMPERATURE_GPU),
            ask("nvmlDeviceGetPowerUsage", gpu, scale=1e-3),
            ask("nvmlDeviceGetPowerManagementLimit", gpu, scale=1e-3),
            int(reasons or 0),
        )
    except Exception:
        return None
    finally:
        nv.nvmlShutdown()


def state(index: int = 0) -> GpuState | None:
    """The GPU's state now, or None. `index` is the driver's, which CUDA_VISIBLE_DEVICES may renumber. Never raises."""
    return _from_pynvml(index) or _from_smi(index)


_recent: dict[int, tuple[float, float, GpuState | None]] = {}  # when it was asked, how long that took, the answer


def recent_state(index: int = 0) -> GpuState | None:
    """The state, asked again when it is over a second old, or over ten times as old as asking takes: asking nvidia-smi
    after every sample would take longer than the samples."""
    now = time.monotonic()
    if index in _recent:
        asked, cost, answer = _recent[index]
        if now - asked < max(1.0, 10 * cost):
            return answer
    answer = state(index)
    _recent[index] = (now, time.monotonic() - now, answer)
    return answer


def clocks(index: int = 0) -> dict[str, Any]:
    """The state as provenance records it: gpu, driver, clocks (MHz), temperature (°C), power (W), throttle (names)."""
    now = state(index)
    if now is None:
        return dict(UNKNOWN)
    return {
        "gpu": now.name,
        "driver": now.driver,
        "clocks": {"sm": now.sm_mhz, "memory": now.memory_mhz, "max_sm": now.max_sm_mhz},
        "temperature": now.temperature_c,
        "power": now.power_w,
        "throttle": now.reason_names,
    }
