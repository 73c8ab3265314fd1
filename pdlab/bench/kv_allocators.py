"""Four ways to lay out KV memory under one load: what each wastes, how many requests it serves, how long they take.

A closed loop of `concurrency` clients sends requests with the lengths of the Azure 2023 conversation trace to an engine whose
KV memory holds `kv_tokens` tokens. The service promises every request 1,024 tokens of output; schemes that reserve ahead make
room for that, though the median answer has 129. Every variant gets the same requests and the same bytes.

On a GPU a model runs, each load in its share of the time: a short probe says how long the variants will take, and where that
is too long all lengths, the promise and the memory are divided by 2, 4 or 8 (workload `azure_conversation_by_<n>`), so that
every request still runs to its end. `equal_requests` are as many as run at once, all alike, so that paged and contiguous run
the same steps; decode_step is what one of those takes.

Everywhere the same engine is also simulated on an H200 (8B) and an A100 of 40 GB (7B, the article's card). Percentages are
averages over time. waste_framework, on a GPU only, replays the pieces that per_request asks for through the caching allocator
of the tensor library.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pdlab.allocators.fragmentation import framework_waste
from pdlab.bench.memory_runs import (
    LONGEST,
    PROMISED,
    conversation,
    equals,
    play,
    real_engine,
    recorder_for,
    report,
    report_equal,
    shortened,
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
from pdlab.workloads.replay import Outcome
from pdlab.workloads.workload import Workload

if TYPE_CHECKING:
    from pdlab.bench.suites import Context

NAME = "kv_allocators"
HELP = "KV memory per request, contiguous, paged and hybrid: waste, latency and throughput at 10 to 400 requests"
SIMULATES = True

SCHEMES = ("paged", "contiguous_pool", "per_request", "hybrid")
PAGE_SIZES = {"paged_1": 1, "paged_256": 256}
SIMULATED = {"nvidia-h200": "llama-3-8b", "nvidia-a100-sxm4-40gb": "llama-2-7b"}
PROBE = 16  # what lengths are divided by to find out how long a load takes


@dataclass(frozen=True)
class Load:
    """One row of the comparison. `kv_tokens` None: all the memory there is."""

    model: str
    concurrency: int
    requests: int
    make: Callable[[int, int, int], Workload] = conversation
    kv_tokens: int | None = None
    shared: int = 0  # tokens of a common beginning; with it prefixes are reused
    share: float = 0.0  # of the measuring time, in proportion to the others'; 0: of what those leave
    by: int = 1  # all lengths, and the memory, are divided by this

    def workload(self, seed: int) -> Workload:
        made = shortened(self.make(self.concurrency, self.requests, seed), self.by)
        return with_shared_prefixes(made, 4, self.shared // self.by) if self.shared else made

    def config(self, variant: str, **more: Any) -> EngineConfig:
        small = self.make is small_talk
        return EngineConfig(
            **{
                "kv_allocator": "paged" if variant in PAGE_SIZES else variant,
                "page_size": PAGE_SIZES.get(variant, 16),
                "max_batch_requests": self.concurrency,
                "max_batch_tokens": 512 if small else 2048,
                "max_model_len": 256 if small else LONGEST // self.by,
                "promised_output_tokens": 40 if small else PROMISED // self.by,
                "kv_capacity_tokens": self.kv_tokens and self.kv_tokens // self.by,
                "prefix_reuse": bool(self.shared),
                **more,
            }
        )


def real_loads(full: bool) -> list[Load]:
    """Most wanted first, but one model after the other."""
    if not full:
        return [Load("llama-tiny", 8, 24, small_talk, kv_tokens=512), Load("llama-tiny", 2, 8, small_talk, kv_tokens=512)]
    tight = 64 << 10  # less than 100 of these requests need at once
    return [
        Load("llama-3-8b", 100, 160, share=3),
        Load("llama-3-8b", 25, 50, share=2),
        Load("llama-3-8b", 400, 480, share=4),
        Load("llama-1b", 100, 160, share=2),
        Load("llama-3-8b", 100, 160, kv_tokens=tight),
        Load("llama-3-8b", 100, 160, kv_tokens=tight, shared=512),
    ]


def simulated_loads(full: bool, model: str) -> list[Load]:
    counts = (100, 50, 25, 10, 200, 400) if full else (10, 50, 100)
    loads = [Load(model, c, max(50, 3 * c) if full else 2 * c) for c in counts]
    return [Load(model, 100, 300, shared=512, kv_tokens=40_000), *loads] if full else loads


def run(ctx: Context) -> None:
    """On a GPU the model first: simulating needs none and can be done elsewhere."""
    parts = (_measure_all, _simulate_all) if ctx.device.startswith("cuda") else (_simulate_all, _measure_all)
    for part in parts:
        if ctx.measures if part is _measure_all else ctx.simulates:
            part(ctx)


def _params(load: Load, workload: Workload, kv_tokens: int) -> dict[str, Any]:
    return {"model": load.model, "concurrency": load.concurrency, "workload": workload.name, "kv_tokens": kv_tokens}


def _settings(config: EngineConfig) -> dict[str, Any]:
    names = ("kv_allocator", "page_size", "promised_output_tokens", "prefix_reuse", "pool_fit", "compact_on_refusal")
    return {name: getattr(config, name) for name in names}


# --- simulated


def _simulate_all(ctx: Context) -> None:
    for device, model in SIMULATED.items():
        if ctx.full or device != "nvidia-h200":
            with recorder_for(ctx, device) as record:
                for load in simulated_loads(ctx.full, model):
                    _simulate(ctx, record, device, load, (*SCHEMES, *PAGE_SIZES) if ctx.full else SCHEMES)


def _simulate(ctx: Context, record: Any, device: str, load: Load, variants: tuple[str, ...]) -> None:
    workload = load.workload(ctx.seed)
    for variant in variants:
        if ctx.left() <= 0:
            return
        config = load.config(variant, executor="simulated", simulated_device=device)
        with simulated_engine(f"random:{load.model}", config) as engine:
            outcome = play(engine, workload)
            params = _params(load, workload, engine.executor.capacity())
        report(record, outcome, variant=variant, kind="simulated", params=params, settings=_settings(config))
        ctx.say(f"  {device} simulated, {load.concurrency:>3} requests, {variant:<15} {outcome.throughput:8.2f} req/s")


# --- measured


def _at_full_size(ctx: Context) -> bool:
    return ctx.full and ctx.device.startswith("cuda")


def _measure_all(ctx: Context) -> None:
    """Each model is loaded once, and compared at equal batches behind its first load."""
    from pdlab.models.loading import load as load_model

    full = _at_full_size(ctx)
    loads = real_loads(full)
    loaded: Any = None
    done: list[Load] = []
    for i, load in enumerate(loads):
        if load.share == 0 and ctx.left() <= 0 and full:
            return
        fresh = loaded is None or loaded.config.name != config_of(f"random:{load.model}").name
        if fresh and ctx.left() > 0:
            loaded = None  # the old weights go before the new ones come
            loaded = load_model(f"random:{load.model}", device=ctx.device, dtype=ctx.dtype, seed=ctx.seed)
        if full and ctx.left() > 0:
            seconds = ctx.left() * (load.share / sum(later.share for later in loads[i:]) if load.share else 1)
            load = _fitted(ctx, loaded, load, seconds, fresh)
        _measure(ctx, loaded, load, SCHEMES)
        done.append(load)
        if i == 0:
            _compare_equals(ctx, loaded, *((64, 512, 64) if full else (4, 24, 8)))
        ctx.record.flush()
    if full and loaded is not None and loaded.config.name == config_of(f"random:{done[0].model}").name:
        _measure(ctx, loaded, done[0], tuple(PAGE_SIZES))


def _fitted(ctx: Context, loaded: Any, load: Load, seconds: float, fresh: bool) -> Load:
    """The load with the longest requests that every variant can serve within `seconds`, judged by a short one of its kind.
    Where the model is fresh, both kinds of memory are tried before, so that no kernel is compiled on anybody's time."""
    from pdlab.engine.executor import kv_capacity

    short = replace(load, by=PROBE)
    for variant in ("contiguous_pool", "paged", "paged") if fresh else ("paged",):
        config = short.config(variant, device=ctx.device, dtype=ctx.dtype)
        began = time.perf_counter()
        with real_engine(loaded, config) as engine:
            probed = play(engine, short.workload(ctx.seed), warm=_rehearsal(load, ctx.seed)).seconds
        each = time.perf_counter() - began - probed  # to make an engine, to rehearse, and to close it
    fits = [by for by in (1, 2, 4, 8) if 1.15 * len(SCHEMES) * (each + probed * PROBE / by) <= seconds]
    by = fits[0] if fits else 8
    ctx.say(f"  {load.model}, {load.concurrency} requests: {each:.1f} s to begin, lengths by {by}: {probed * PROBE / by:.1f} s")
    if by == 1:
        return load
    return replace(load, by=by, kv_tokens=load.kv_tokens or kv_capacity(load.config("paged"), loaded.model, LONGEST))


def _rehearsal(load: Load, seed: int) -> Workload:
    """A few requests, short ones where the load's are long."""
    return (load if load.make is small_talk else replace(load, by=PROBE)).workload(seed).head(16)


def _measure(ctx: Context, loaded: Any, load: Load, variants: tuple[str, ...]) -> None:
    on_gpu, workload = ctx.device.startswith("cuda"), load.workload(ctx.seed)
    for variant in variants:
        if ctx.left() <= 0:
            asked = _params(load, workload, load.kv_tokens or 0)
            ctx.record.skip("throughput", "req/s", "the time budget ran out", variant=variant, params=asked)
            continue
        config = load.config(variant, device=ctx.device, dtype=ctx.dtype)
        ops: list[KVOp] = []
        try:
            with real_engine(loaded, config) as engine:
                params = _params(load, workload, engine.executor.capacity())
                if on_gpu and variant == "per_request":
                    ops = watch_ops(engine)
                outcome = play(engine, workload, warm=_rehearsal(load, ctx.seed))
        except CapacityError as error:
            asked = _params(load, workload, load.kv_tokens or 0)
            ctx.record.skip("throughput", "req/s", str(error), variant=variant, params=asked)
            continue
        report(ctx.record, outcome, variant=variant, kind="measured", params=params, settings=_settings(config))
        if ops:
            _framework(ctx, ops, loaded.config.kv_bytes_per_token(itemsize_of(ctx.dtype)), params)
        ctx.say(f"  {load.model}, {load.concurrency:>3} requests, {variant:<15} {outcome.throughput:8.2f} req/s")


def _compare_equals(ctx: Context, loaded: Any, batch: int, prompt: int, answer: int) -> None:
    """Paged beside contiguous, in turns, where the layout is all that differs."""
    if ctx.left() <= 0:
        return
    load = Load(loaded.config.name.removeprefix("random:"), batch, batch, kv_tokens=2 * batch * (prompt + answer))
    workload = equals(batch, prompt, answer)
    config = {v: load.config(v, device=ctx.device, dtype=ctx.dtype, promised_output_tokens=None) for v in SCHEMES[:2]}
    outcomes: dict[str, list[Outcome]] = {v: [] for v in config}
    with ExitStack() as stack:
        engines = {v: stack.enter_context(real_engine(loaded, c)) for v, c in config.items()}
        for turn in range(4):
            for variant, engine in engines.items():
                outcome = play(engine, workload)
                outcomes[variant] += [outcome] if turn else []  # the first is the rehearsal
    for variant, played in outcomes.items():
        params = _params(load, workload, load.kv_tokens or 0)
        report_equal(ctx.record, played, variant=variant, params=params, settings=_settings(config[variant]))
    rate = {v: max(o.throughput for o in played) for v, played in outcomes.items()}
    ctx.say(f"  {batch} equal requests at once: paged at {rate['paged'] / rate['contiguous_pool']:.1%} of contiguous")


def _framework(ctx: Context, ops: Any, per_token: int, params: dict[str, Any]) -> None:
    """What the tensor library itself would waste, and what its calls cost the host."""
    found = framework_waste(ops, per_token, ctx.device)
    shared: dict[str, Any] = {"variant": "per_request", "params": params, "n": len(ops)}
    ctx.record.add("waste_framework", found.waste, "percent", **shared)
    ctx.record.add("allocate", found.allocate_us, "us", **shared)
    ctx.record.add("free", found.free_us, "us", **shared)
    ctx.record.add("refused_by_device", found.failed, "count", **shared)
