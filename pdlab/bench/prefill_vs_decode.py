"""The two phases of a real model on this device: time, and what share of the ceilings each one uses.

Every step goes through the executor, as the engine would run it: a prefill of `batch` prompts of `tokens` tokens, or a
decode of one token for each of `batch` requests with `tokens` in the cache. For each step

    latency                 ms between the device's first and last work of the step
    floor_latency           ms by the roofline: max(FLOPs / matrix rate, bytes / read bandwidth)
    compute_utilization     percent: counted FLOPs / latency / measured matrix rate
    bandwidth_utilization   percent: counted bytes / latency / measured read bandwidth

The ceilings are measured in the same run. The cache holds random numbers, its pages are scattered.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np

from pdlab.core.config import EngineConfig
from pdlab.core.errors import CapacityError, FetchError, PdlabError, WeightsError
from pdlab.core.plan import Plan, PlanShape, SamplingArrays
from pdlab.costs.formulas import decode_shape, itemsize_of, kv_bytes, prefill_shape, step_bytes, step_flops, weights_bytes
from pdlab.costs.roofline import Ceilings, step_time
from pdlab.hardware.timing import Timings, steady
from pdlab.models.catalogue import config_of
from pdlab.models.config import ModelConfig

if TYPE_CHECKING:
    from pdlab.bench.suites import Context

NAME = "prefill_vs_decode"
HELP = "latency and utilization of prefill and decode steps of real models"

PAGE = 16
_PREFILL = {
    "full": ((128, 1), (256, 1), (512, 1), (1024, 1), (2048, 1), (4096, 1), (512, 8), (2048, 4)),
    "smoke": ((16, 1), (64, 1), (128, 1), (32, 4)),
}
_DECODE = {
    "full": ((1, 512), (1, 2048), (1, 4096), (4, 2048), (16, 512), (16, 2048), (32, 2048), (64, 512), (64, 2048)),
    "smoke": ((1, 64), (1, 256), (4, 64), (8, 128)),
}
_MODELS = {
    "full": ("smollm2-135m", "random:llama-1b", "random:llama-3-8b"),
    "smoke": ("random:llama-tiny", "random:gpt2-tiny", "smollm2-135m"),
}


@dataclass(frozen=True)
class Step:
    """One measured step; `tokens` are the prompt's in prefill, those attended to (the new one included) in decode."""

    phase: str
    batch: int
    tokens: int

    @property
    def shape(self) -> PlanShape:
        if self.phase == "prefill":
            return prefill_shape(self.tokens, self.batch)
        return decode_shape(self.batch, self.tokens)

    @property
    def new(self) -> int:
        return self.tokens if self.phase == "prefill" else 1


def steps_of(profile: str, config: ModelConfig) -> list[Step]:
    """The profile's steps that the model's context allows, the phases in turn: a short budget sees some of both."""
    prefills, decodes = (
        [Step("prefill", b, t) for t, b in _PREFILL[profile]],
        [Step("decode", b, t) for b, t in _DECODE[profile]],
    )
    return [s for pair in zip_longest(prefills, decodes) for s in pair if s is not None and s.tokens <= config.max_context]


def make_plan(step: Step, number: int, vocab: int, capacity: int, rng: np.random.Generator) -> Plan:
    """A greedy plan of the step with random tokens and scattered pages, the first `step.batch` rows of an executor."""
    b, new, before = step.batch, step.new, step.tokens - step.new
    pages = -(-step.tokens // PAGE)
    table = rng.permutation(capacity // PAGE)[: b * pages].reshape(b, pages).astype(np.int32)
    position = np.arange(before, step.tokens)
    slots = table[:, position // PAGE].astype(np.int64) * PAGE + position % PAGE
    rows = np.arange(b, dtype=np.int32)

    def of(value: float, dtype: Any) -> np.ndarray:
        return np.full(b, value, dtype)

    sampling = SamplingArrays(
        temperature=of(0, np.float32), top_k=of(0, np.int32), top_p=of(1, np.float32), min_p=of(0, np.float32),
        repetition_penalty=of(1, np.float32), seed=of(0, np.int64), position=of(0, np.int64), logprobs=of(-1, np.int32),
    )  # fmt: skip
    return Plan(
        step=number,
        request_ids=rows.astype(np.int64),
        rows=rows,
        q_start=np.arange(0, b * new + 1, new, dtype=np.int32),
        context_lens=np.full(b, step.tokens, np.int32),
        token_ids=rng.integers(0, vocab, b * new, dtype=np.int64),
        positions=np.tile(position, b).astype(np.int32),
        slots=slots.reshape(-1),
        kv_kind="paged",
        page_table=table,
        base=np.zeros(b, np.int64),
        sample_rows=rows,
        sampling=sampling,
        shape=step.shape,
    )


def _load(name: str, ctx: Context) -> Any:
    """The model; random weights of the same shape where the real ones are not cached, or what reads them is missing.

    What is timed depends on shapes only, so nothing is downloaded for it.
    """
    from pdlab.models.fetch import cached_path
    from pdlab.models.loading import load

    shape = f"random:{name.removeprefix('random:')}"
    try:
        here = cached_path(name) is not None
        return load(name if here else shape, device=ctx.device, dtype=ctx.dtype, seed=ctx.seed)
    except (FetchError, ModuleNotFoundError) as error:
        ctx.say(f"  {name}: random weights instead ({error})")
        return load(shape, device=ctx.device, dtype=ctx.dtype, seed=ctx.seed)


def _executor(ctx: Context, loaded: Any, steps: list[Step]) -> Any:
    from pdlab.engine.executor import TorchExecutor
    from pdlab.kernels.dispatch import make_ops

    padded = [s.batch * -(-s.tokens // PAGE) * PAGE for s in steps]
    config = EngineConfig(
        device=ctx.device,
        dtype=ctx.dtype,
        page_size=PAGE,
        max_batch_requests=max(s.batch for s in steps),
        max_batch_tokens=max(s.batch * s.new for s in steps),
        kv_capacity_tokens=max(padded),
    )
    loaded.model.ops = make_ops(config, loaded.config, loaded.model.device, loaded.model.dtype)
    executor = TorchExecutor(config, loaded.model, max_len=max(s.tokens for s in steps))
    executor.k.normal_()
    executor.v.normal_()
    return executor


def time_step(executor: Any, plan: Plan, on_gpu: bool, n: int, budget_ms: float) -> Timings:
    """Milliseconds of the step on its device; raises the step's own error."""

    def once() -> float:
        result = executor.submit(plan).result()
        if result.error is not None:
            raise result.error
        return (result.t_end - result.t_start) * 1e3

    warm = min(once() for _ in range(3 if on_gpu else 2))
    count = max(3, min(n, int(budget_ms / max(warm, 1e-3))))
    return steady(lambda: [once() for _ in range(count)], "ms", on_gpu)


def report(ctx: Context, cfg: ModelConfig, step: Step, timings: Timings, ceilings: Ceilings) -> None:
    """The four rows of one step."""
    itemsize = itemsize_of(ctx.dtype)
    flops, moved = step_flops(cfg, step.shape).total, step_bytes(cfg, step.shape, itemsize).total
    floor = step_time(cfg, step.shape, ceilings, itemsize)
    params = {"model": cfg.name, "phase": step.phase, "batch": step.batch, "tokens": step.tokens, "dtype": ctx.dtype}
    compute = timings.rate(1e5 * flops / ceilings.matmul_flops_per_s, "percent")  # 100 % of the floor in ms, over ms
    bandwidth = timings.rate(1e5 * moved / ceilings.read_bytes_per_s, "percent")
    ctx.record.add("latency", timings, params=params)
    ctx.record.add("floor_latency", floor.seconds * 1e3, "ms", kind="predicted", params=params)
    ctx.record.add("compute_utilization", compute, params=params)
    ctx.record.add("bandwidth_utilization", bandwidth, params=params)
    ctx.say(
        f"  {cfg.name} {step.phase} {step.batch} x {step.tokens}: {timings.median:.3f} ms (floor {floor.seconds * 1e3:.3f}, "
        f"{floor.bound}), compute {compute.median:.1f} %, bandwidth {bandwidth.median:.1f} %"
    )


def _why_not(ctx: Context, cfg: ModelConfig, steps: list[Step]) -> str:
    """Why the model cannot be measured here, or an empty string."""
    itemsize = itemsize_of(ctx.dtype)
    tokens = max(s.batch * s.tokens for s in steps)
    rows = max(s.batch * s.new for s in steps)
    activations = 4 * rows * (2 * cfg.ffn_size + 4 * cfg.hidden_size) * itemsize
    need = weights_bytes(cfg, itemsize) + kv_bytes(cfg, tokens, itemsize) + activations
    have = ctx.machine.memory_bytes * (0.85 if ctx.machine.is_gpu else 0.5)
    return "" if need <= have else f"needs {need / 1e9:.1f} GB and {have / 1e9:.1f} GB can be used"


def _skip(ctx: Context, cfg: ModelConfig, steps: list[Step], why: str) -> None:
    ctx.say(f"  {cfg.name}: skipped, {why}")
    for s in steps:
        ctx.record.skip("latency", "ms", why, model=cfg.name, phase=s.phase, batch=s.batch, tokens=s.tokens, dtype=ctx.dtype)


def measure_model(
    ctx: Context, name: str, ceilings: Ceilings, deadline_left: float, steps: list[Step] | None = None, loaded: Any = None
) -> None:
    """Every step of one model, until ctx.left() falls to `deadline_left`; what is left out gets a row that says so.

    `steps` other than the profile's, and a model that is `loaded` already, are for notebooks.
    """
    cfg = config_of(name)
    steps = steps_of(ctx.profile, cfg) if steps is None else [s for s in steps if s.tokens <= cfg.max_context]
    if why := _why_not(ctx, cfg, steps):
        return _skip(ctx, cfg, steps, why)
    if ctx.left() <= deadline_left:
        return _skip(ctx, cfg, steps, "the time budget ran out")
    try:
        loaded = _load(name, ctx) if loaded is None else loaded
        executor = _executor(ctx, loaded, steps)
    except (CapacityError, WeightsError) as error:
        return _skip(ctx, cfg, steps, str(error))
    rng = np.random.default_rng(ctx.seed)
    try:
        for number, step in enumerate(steps):
            if ctx.left() <= deadline_left:
                return _skip(ctx, cfg, steps[number:], "the time budget ran out")
            plan = make_plan(step, number, cfg.vocab_size, executor.capacity(), rng)
            budget_ms = 400 if ctx.full else 150
            try:
                timings = time_step(executor, plan, ctx.machine.is_gpu, 20, budget_ms)
            except Exception as error:
                if isinstance(error, PdlabError) or "out of memory" in str(error).lower():
                    _skip(ctx, cfg, [step], " ".join(str(error).split())[:120])
                    continue
                raise
            report(ctx, cfg, step, timings, ceilings)
    finally:
        executor.close()
        del loaded, executor


def run(ctx: Context) -> None:
    import torch

    from pdlab.bench import ceilings as ceilings_suite

    torch.manual_seed(ctx.seed)
    ceilings = ceilings_suite.measure(ctx.device, ctx.dtype)
    ctx.say(f"  ceilings: read {ceilings.read_bytes_per_s / 1e12:.3g} TB/s, {ceilings.matmul_flops_per_s / 1e12:.4g} TFLOP/s")
    names = _MODELS[ctx.profile]
    share = ctx.left() / len(names)
    for i, name in enumerate(names):
        measure_model(ctx, name, ceilings, deadline_left=share * (len(names) - 1 - i))
