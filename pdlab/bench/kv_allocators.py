"""Four ways to lay out KV memory under one load: what each wastes, how many requests it serves, how long they take.

A closed loop of `concurrency` clients sends requests with the lengths of the Azure 2023 conversation trace to an engine whose
KV memory holds `kv_tokens` tokens. The service promises every request 1,024 tokens of output; schemes that reserve ahead make
room for that, though the median answer has 129. Every variant gets the same requests and the same bytes.

On a GPU a model runs; everywhere the same engine is also simulated on an H200 (8B) and an A100 of 40 GB (7B, the article's
card). Percentages are averages over time. waste_framework, on a GPU only, replays the pieces that per_request asks for
through the caching allocator of the tensor library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pdlab.allocators.fragmentation import framework_waste
from pdlab.bench.memory_runs import (
    LONGEST,
    PROMISED,
    conversation,
    play,
    real_engine,
    recorder_for,
    report,
    simulated_engine,
    small_talk,
    watch_ops,
    with_shared_prefixes,
)
from pdlab.core.config import EngineConfig
from pdlab.core.errors import CapacityError
from pdlab.core.plan import KVOp
from pdlab.costs.formulas import itemsize_of
from pdlab.models.catalogue import config_of
from pdlab.workloads.workload import Workload

if TYPE_CHECKING:
    from pdlab.bench.suites import Context

NAME = "kv_allocators"
HELP = "KV memory per request, contiguous, paged and hybrid: waste, latency and throughput at 10 to 400 requests"

VARIANTS: dict[str, dict[str, Any]] = {
    "per_request": {"kv_allocator": "per_request"},
    "contiguous_pool": {"kv_allocator": "contiguous_pool"},
    "paged": {"kv_allocator": "paged"},
    "hybrid": {"kv_allocator": "hybrid"},
    "paged_1": {"kv_allocator": "paged", "page_size": 1},
    "paged_256": {"kv_allocator": "paged", "page_size": 256},
}
SIMULATED = {"nvidia-h200": "llama-3-8b", "nvidia-a100-sxm4-40gb": "llama-2-7b"}


@dataclass(frozen=True)
class Load:
    """One row of the comparison. `kv_tokens` None: all the memory there is."""

    model: str
    concurrency: int
    requests: int
    make: Callable[[int, int, int], Workload] = conversation
    kv_tokens: int | None = None
    shared: int = 0  # tokens of a common beginning; with it prefixes are reused

    def workload(self, seed: int) -> Workload:
        made = self.make(self.concurrency, self.requests, seed)
        return with_shared_prefixes(made, 4, self.shared) if self.shared else made

    def config(self, variant: str, **more: Any) -> EngineConfig:
        small = self.make is small_talk
        return EngineConfig(
            max_batch_requests=self.concurrency,
            max_batch_tokens=512 if small else 2048,
            max_model_len=256 if small else LONGEST,
            promised_output_tokens=40 if small else PROMISED,
            kv_capacity_tokens=self.kv_tokens,
            prefix_reuse=bool(self.shared),
            **{**VARIANTS[variant], **more},
        )


def real_loads(full: bool) -> list[Load]:
    if not full:
        return [Load("llama-tiny", 8, 24, small_talk, kv_tokens=512), Load("llama-tiny", 2, 8, small_talk, kv_tokens=512)]
    tight = 64 << 10  # less than 100 of these requests need at once
    return [
        Load("llama-3-8b", 100, 160),
        Load("llama-3-8b", 100, 160, kv_tokens=tight),
        Load("llama-3-8b", 100, 160, kv_tokens=tight, shared=512),
        Load("llama-3-8b", 25, 60),
        Load("llama-1b", 100, 160),
        Load("llama-3-8b", 400, 500),
    ]


def simulated_loads(full: bool, model: str) -> list[Load]:
    counts = (10, 25, 50, 100, 200, 400) if full else (10, 50, 100)
    loads = [Load(model, c, max(50, 3 * c) if full else 2 * c) for c in counts]
    return [*loads, Load(model, 100, 300, shared=512, kv_tokens=40_000)] if full else loads


def run(ctx: Context) -> None:
    """On a GPU the model first: simulating needs none and can be done elsewhere."""
    wanted = [v for v in VARIANTS if ctx.full or not v.startswith("paged_")]
    parts = (_measure_all, _simulate_all) if ctx.device.startswith("cuda") else (_simulate_all, _measure_all)
    for part in parts:
        part(ctx, wanted)


def _simulate_all(ctx: Context, wanted: list[str]) -> None:
    for device, model in SIMULATED.items():
        if ctx.full or device != "nvidia-h200":
            with recorder_for(ctx, device) as record:
                for load in simulated_loads(ctx.full, model):
                    _simulate(ctx, record, device, load, wanted)


def _measure_all(ctx: Context, wanted: list[str]) -> None:
    """Each model is loaded once; the page sizes are compared under the first load only."""
    from pdlab.models.loading import load as load_model

    loaded: Any = None
    for i, load in enumerate(real_loads(ctx.full and ctx.device.startswith("cuda"))):
        if ctx.left() <= 0:
            return
        if loaded is None or loaded.config.name != config_of(f"random:{load.model}").name:
            loaded = None  # the old weights go before the new ones come
            loaded = load_model(f"random:{load.model}", device=ctx.device, dtype=ctx.dtype, seed=ctx.seed)
        _measure(ctx, loaded, load, [v for v in wanted if i == 0 or not v.startswith("paged_")])


def _params(load: Load, workload: Workload, kv_tokens: int) -> dict[str, Any]:
    return {"model": load.model, "concurrency": load.concurrency, "workload": workload.name, "kv_tokens": kv_tokens}


def _settings(config: EngineConfig) -> dict[str, Any]:
    names = ("kv_allocator", "page_size", "promised_output_tokens", "prefix_reuse", "pool_fit", "compact_on_refusal")
    return {name: getattr(config, name) for name in names}


def _simulate(ctx: Context, record: Any, device: str, load: Load, wanted: list[str]) -> None:
    workload = load.workload(ctx.seed)
    for variant in wanted:
        if ctx.left() <= 0:
            return
        config = load.config(variant, executor="simulated", simulated_device=device)
        with simulated_engine(f"random:{load.model}", config) as engine:
            outcome = play(engine, workload)
            params = _params(load, workload, engine.executor.capacity())
        report(record, outcome, variant=variant, kind="simulated", params=params, settings=_settings(config))
        ctx.say(f"  {device} simulated, {load.concurrency:>3} requests, {variant:<15} {outcome.throughput:8.2f} req/s")


def _measure(ctx: Context, loaded: Any, load: Load, wanted: list[str]) -> None:
    on_gpu, workload = ctx.device.startswith("cuda"), load.workload(ctx.seed)
    for variant in wanted:
        if ctx.left() <= 0:
            return
        config = load.config(variant, device=ctx.device, dtype=ctx.dtype)
        ops: list[KVOp] = []
        try:
            with real_engine(loaded, config) as engine:
                params = _params(load, workload, engine.executor.capacity())
                outcome = play(engine, workload, warm=min(load.concurrency, 16))
                if on_gpu and variant == "per_request":  # some of it again, for the pieces that it asks for
                    ops = watch_ops(engine)
                    play(engine, workload.head(load.concurrency))
        except CapacityError as error:
            asked = _params(load, workload, load.kv_tokens or 0)
            ctx.record.skip("throughput", "req/s", str(error), variant=variant, params=asked)
            continue
        report(ctx.record, outcome, variant=variant, kind="measured", params=params, settings=_settings(config))
        if ops:
            _framework(ctx, ops, loaded.config.kv_bytes_per_token(itemsize_of(ctx.dtype)), params)
        ctx.say(f"  {load.model}, {load.concurrency:>3} requests, {variant:<15} {outcome.throughput:8.2f} req/s")


def _framework(ctx: Context, ops: Any, per_token: int, params: dict[str, Any]) -> None:
    """What the tensor library itself would waste, and what its calls cost the host."""
    found = framework_waste(ops, per_token, ctx.device)
    shared: dict[str, Any] = {"variant": "per_request", "params": params, "n": len(ops)}
    ctx.record.add("waste_framework", found.waste, "percent", **shared)
    ctx.record.add("allocate", found.allocate_us, "us", **shared)
    ctx.record.add("free", found.free_us, "us", **shared)
    ctx.record.add("refused_by_device", found.failed, "count", **shared)
