"""An executor that computes nothing: it advances a virtual clock by what a cost model says a step takes.

    ready = host has planned        start = max(ready, device is free)
    end = max(start + cost(plan.shape) + copies, ready + launching)

The host plans and commits before each step and is busy while it launches one, so that overlapping it with the device
(steps_in_flight = 2) pays here as it does on a GPU, and a short step with prompts takes as long as its launches do.
Tokens are made up from (seed, output position) alone and are never an end token, so a request ends where its `max_tokens`
says. Scheduler and allocators cannot tell this executor from one that runs a model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from pdlab.core.clock import Clock, VirtualClock
from pdlab.core.config import EngineConfig
from pdlab.core.errors import CapacityError, DeviceUnavailable, EngineClosed, StepFailed
from pdlab.core.plan import KVCopy, Plan, PlanShape
from pdlab.costs.calibration import cost_model
from pdlab.costs.formulas import itemsize_of, weights_bytes
from pdlab.costs.host_times import HostTimes
from pdlab.costs.roofline import ceilings_for
from pdlab.engine.interface import StepResult
from pdlab.hardware.specs import SPECS, find_spec
from pdlab.models.config import ModelConfig

CPU_MEMORY_BYTES = 4 << 30  # KV memory is cut from this where the simulated device is a CPU
RUNTIME_SHARE = 0.03  # of device memory: context, kernels, activations


def synthetic_tokens(seed: np.ndarray, position: np.ndarray, vocab: int, avoid: tuple[int, ...] = ()) -> np.ndarray:
    """i64, the broadcast shape of the arguments: a hash (splitmix64) of (seed, position) into [0, vocab) less `avoid`."""
    with np.errstate(over="ignore"):
        z = seed.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + position.astype(np.uint64) * np.uint64(0xD1B54A32D192ED03)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    skip = sorted({t for t in avoid if 0 <= t < vocab})
    tokens = (z % np.uint64(max(1, vocab - len(skip)))).astype(np.int64)
    for t in skip:
        tokens += tokens >= t
    return tokens


def _grown(s: PlanShape, steps: int) -> PlanShape:
    """A decode step's shape so many steps later: every decode attends to as many tokens more."""
    kv, longest = s.decode_kv_tokens + steps * s.decode_count, s.decode_longest and s.decode_longest + steps
    return replace(s, decode_kv_tokens=kv, decode_longest=longest)


class _Handle:
    def __init__(self, owner: SimulatedExecutor, result: StepResult) -> None:
        self._owner, self._result = owner, result

    def done(self) -> bool:
        return self._owner.clock.now() >= self._result.t_end

    def result(self) -> StepResult:
        self._owner.collect(self)
        self._owner.clock.sleep_until(self._result.t_end)
        return self._result


class SimulatedExecutor:
    """Contract 4 on a virtual clock.

    `step_seconds(shape)` is what the device needs; `capacity_tokens` the KV slots; `host` what the host needs for planning,
    committing and launching, by a step's shape, or `host_s` seconds a step and none for launching; `copy_s_per_token` what
    moving one token's KV costs (compaction, copy on write); `calibration` says where the cost model comes from
    (costs.calibration: "recorded" or "predicted") and is shown wherever a number made here is shown.
    """

    def __init__(
        self,
        model: ModelConfig,
        step_seconds: Callable[[PlanShape], float],
        capacity_tokens: int,
        *,
        steps_in_flight: int = 1,
        host_s: float = 0.0,
        host: HostTimes | None = None,
        copy_s_per_token: float = 0.0,
        calibration: str = "predicted",
        clock: VirtualClock | None = None,
    ) -> None:
        self._virtual = clock or VirtualClock()
        self.clock: Clock = self._virtual
        self.model, self.step_seconds, self.calibration = model, step_seconds, calibration
        self.host, self._host_s = host, host_s
        self.copy_s_per_token, self.steps_in_flight = copy_s_per_token, steps_in_flight
        self.overlaps = False  # its steps take the host no real time
        self._capacity = capacity_tokens
        self._device_free = 0.0
        self._unfinished: list[_Handle] = []
        self._closed = False
        # with two steps in flight a run is planned while the device is busy, and the step after it while its last step runs:
        self._shadow = 0.0  # as long as this takes

    def capacity(self) -> int:
        return self._capacity

    def submit(self, plan: Plan) -> _Handle:
        if self._closed:
            raise EngineClosed("a step was submitted to a closed executor", "make a new LLM")
        if len(self._unfinished) >= self.steps_in_flight:
            raise StepFailed(
                f"step {plan.step} was submitted while {len(self._unfinished)} steps are unfinished",
                f"collect a result first; steps_in_flight is {self.steps_in_flight}",
            )
        between, launching = self.between(plan.shape), 0.0 if plan.repeat > 1 else self._launching(plan.shape)
        if self._shadow > 0:
            launching = max(0.0, between + launching - self._shadow)
        elif self.steps_in_flight == 1 or plan.repeat == 1:
            self._virtual.advance(between)
        self._shadow = self._one(plan.shape, plan.repeat - 1) if self.steps_in_flight == 2 and plan.repeat > 1 else 0.0
        ready = self.clock.now()
        start = max(ready, self._device_free)
        end = max(start + self._duration(plan), ready + launching)
        self._device_free = end
        self._virtual.advance(launching)
        handle = _Handle(self, StepResult(plan.step, self._tokens(plan), start, end))
        self._unfinished.append(handle)
        return handle

    def between(self, shape: PlanShape) -> float:
        """Seconds of planning and committing a step."""
        return self._host_s if self.host is None else self.host.between(shape)

    def _launching(self, shape: PlanShape) -> float:
        return 0.0 if self.host is None else self.host.launch(shape)

    def _busy(self, shape: PlanShape) -> float:
        """Seconds that a step keeps the host from the next one."""
        return self.between(shape) + self._launching(shape)

    def steps_until(self, shape: PlanShape, until: float, most: int) -> int:
        """How many repetitions of a decode step reach `until`, the last one ending at or after it; 1 to `most`."""
        left = until - self.clock.now() - self.between(shape)
        first = self._one(shape, 0)
        growth = (self._one(shape, most) - first) / max(1, most)
        k, each = 1, first
        while k < most and k * each < left:
            k = min(most, max(k + 1, int(min(left / each, most))))
            each = first + growth * (k - 1) / 2
        while k > 1 and (k - 1) * (first + growth * (k - 2) / 2) >= left:
            k -= 1
        return k

    def run_times(self, shape: PlanShape, result: StepResult, k: int) -> tuple[list[float], list[float]]:
        """(starts, ends) of the k device steps of a run that `result` came from."""
        device = np.linspace(self.step_seconds(shape), self.step_seconds(_grown(shape, k - 1)), k)
        each = device + self.between(shape) if self.steps_in_flight == 1 else np.maximum(device, self._busy(shape))
        ends = result.t_end - (each.sum() - np.cumsum(each))
        return (ends - device).tolist(), ends.tolist()

    def _one(self, shape: PlanShape, grown: int) -> float:
        """Seconds between the starts of two steps of a run, `grown` steps into it."""
        device = self.step_seconds(_grown(shape, grown))
        return device + self.between(shape) if self.steps_in_flight == 1 else max(device, self._busy(shape))

    def _duration(self, plan: Plan) -> float:
        copies = sum(op.tokens for op in plan.kv_ops if isinstance(op, KVCopy)) * self.copy_s_per_token
        n = plan.repeat
        if n == 1:
            return copies + self.step_seconds(plan.shape)
        # identical decode steps whose attended tokens grow by one a request: the cost is close to linear in between
        mean = (self._one(plan.shape, 0) + self._one(plan.shape, n - 1)) / 2
        return copies + n * mean - (self.between(plan.shape) if self.steps_in_flight == 1 else 0.0)

    def _tokens(self, plan: Plan) -> np.ndarray:
        seed, position = plan.sampling.seed, plan.sampling.position
        if plan.repeat > 1:
            position = position[None, :] + np.arange(plan.repeat, dtype=np.int64)[:, None]
        return synthetic_tokens(seed, position, self.model.vocab_size, self.model.eos_token_ids)

    def collect(self, handle: _Handle) -> None:
        """A step's result was taken; results come in the order of submission."""
        if handle in self._unfinished:
            self._unfinished.remove(handle)

    def reset(self) -> None:
        self.clock.sleep_until(self._device_free)
        self._unfinished.clear()

    def close(self) -> None:
        self._closed = True
        self._unfinished.clear()


def kv_capacity(config: EngineConfig, model: ModelConfig, memory_bytes: int, weight_bytes: int, itemsize: int) -> int:
    """KV slots of a device of `memory_bytes`: what weights and the runtime leave, times kv_memory_utilization."""
    if config.kv_capacity_tokens is not None:
        return config.kv_capacity_tokens
    free = memory_bytes * (1 - RUNTIME_SHARE) - weight_bytes
    tokens = int(free * config.kv_memory_utilization) // model.kv_bytes_per_token(itemsize)
    if tokens < config.page_size:
        raise CapacityError(
            f"{model.name} has {weight_bytes / 1e9:.1f} GB of weights, {config.simulated_device} {memory_bytes / 1e9:.0f} GB",
            "choose a smaller model, a narrower dtype or a larger device",
        )
    return tokens // config.page_size * config.page_size


def simulated_dtype(config: EngineConfig) -> str:
    """The dtype rule applied to the simulated device."""
    if config.dtype != "auto":
        return config.dtype
    sheet = find_spec(config.simulated_device)
    if sheet is None:
        return "float32"
    return "bfloat16" if sheet.capability >= (8, 0) else "float16"


def make_simulated(config: EngineConfig, model: ModelConfig, clock: VirtualClock | None = None) -> SimulatedExecutor:
    """An executor that imitates `config.simulated_device` running `model`; see costs.calibration for what it knows of it."""
    dtype = simulated_dtype(config)
    itemsize = itemsize_of(dtype)
    cost = cost_model(model, config.simulated_device, dtype)
    sheet = find_spec(config.simulated_device)
    if sheet is None and not config.simulated_device.startswith("cpu"):
        raise DeviceUnavailable(f"there is no data sheet for {config.simulated_device!r}", f"known: {', '.join(SPECS)}, cpu-…")
    memory = sheet.memory_bytes if sheet else CPU_MEMORY_BYTES
    copy = 2 * model.kv_bytes_per_token(itemsize) / ceilings_for(config.simulated_device, dtype).copy_bytes_per_s
    return SimulatedExecutor(
        model,
        cost.step_seconds,
        kv_capacity(config, model, memory, weights_bytes(model, itemsize), itemsize),
        steps_in_flight=config.steps_in_flight,
        host=cost.host,
        copy_s_per_token=copy,
        calibration=cost.source,
        clock=clock,
    )
