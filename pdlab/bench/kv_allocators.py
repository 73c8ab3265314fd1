"""Four ways to lay out KV memory under one load: what each wastes, how many requests it serves, how long they take.

A closed loop of `concurrency` clients sends requests with the lengths of the Azure 2023 conversation trace to an engine. The
service promises every request 1,024 tokens of output; schemes that reserve ahead make room for that, though the median answer
has 129. Every variant gets the same requests and the same bytes.

On a GPU a model runs, and the most wanted load comes first: a short probe says how long the variants will take, and where that
leaves no time for the others at half their lengths, all lengths, the promise and the memory are divided by 2, 4, 8 or 16
(`azure_conversation_by_<n>`), so that every request still runs to its end; waste is then not recorded, since pages are not
divided. All variants run over one executor for
pages and one for extents, half of the memory each. `equal_requests` are as many as run at once, all alike, so that paged and
contiguous run the same steps; decode_step is what one of those takes.

Everywhere the same engine is also simulated on an H200 (8B) and an A100 of 40 GB (7B, the article's card). Percentages are
averages over time. waste_framework, on a GPU only, replays the pieces that per_request asks for through the caching allocator
of the tensor library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from pdlab.allocators.fragmentation import framework_waste
from pdlab.bench import memory_kernels
from pdlab.bench.memory_runs import (
    LONGEST,
    PROMISED,
    Pace,
    conversation,
    engines_over,
    equals,
    every_shape,
    lengths_from,
    on_device,
    play,
    recorder_for,
    report,
    report_equal,
    short_and_long,
    shortened,
    simulated_engine,
    small_talk,
    watch_ops,
    with_shared_prefixes,
)
from pdlab.core.config import EngineConfig
from pdlab.core.errors import CapacityError
from pdlab.core.plan import KVOp
from pdlab.costs.formulas import itemsize_of, weights_bytes
from pdlab.costs.roofline import ceilings_for
from pdlab.engine.engine import Engine
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
DIVISORS = (1, 2, 4, 8, 16)  # of all lengths, to save time


@dataclass(frozen=True)
class Load:
    """One row of the comparison. `kv_tokens` None: all the memory there is."""

    model: str
    concurrency: int
    requests: int
    make: Callable[[int, int, int], Workload] = conversation
    kv_tokens: int | None = None
    shared: int = 0  # tokens of a common beginning; with it prefixes are reused
    share: float = 1.0  # of the measuring time, in proportion to the loads of other models
    variants: tuple[str, ...] = SCHEMES
    divisors: tuple[int, ...] = DIVISORS  # that lengths and memory may be divided by
    by: int = 1  # the one that they are divided by
    exact: bool = False  # clients ask for the length that they need, not for what the service promises

    def workload(self, seed: int) -> Workload:
        made = shortened(self.make(self.concurrency, self.requests, seed), self.by)
        return with_shared_prefixes(made, 4, self.shared // self.by, self.longest) if self.shared else made

    def memory(self, there: int) -> int:
        """Slots for this load where there are so many: no more than it can use."""
        return min(there // self.by, self.concurrency * self.longest) if self.kv_tokens is None else self.kv_tokens // self.by

    @property
    def longest(self) -> int:
        """Tokens of prompt and answer that one request may have."""
        return 256 if self.make is small_talk else LONGEST // self.by

    def config(self, variant: str, **more: Any) -> EngineConfig:
        small = self.make is small_talk
        return EngineConfig(
            **{
                "kv_allocator": "paged" if variant in PAGE_SIZES else variant,
                "page_size": PAGE_SIZES.get(variant, 16),
                "max_batch_requests": self.concurrency,
                "max_batch_tokens": 512 if small else 2048,
                "max_model_len": self.longest,
                "promised_output_tokens": None if self.exact else 40 if small else PROMISED // self.by,
                "kv_capacity_tokens": self.kv_tokens,
                "prefix_reuse": bool(self.shared),
                **more,
            }
        )


def real_loads(full: bool) -> list[Load]:
    """Most wanted first, but one model after the other."""
    if not full:
        return [Load("llama-tiny", 8, 24, small_talk, kv_tokens=512), Load("llama-tiny", 2, 8, small_talk, kv_tokens=512)]
    return [
        Load("llama-3-8b", 100, 125, share=6),
        Load("llama-3-8b", 100, 100, shared=512, kv_tokens=32_000, share=2, variants=("paged",), divisors=(1,)),
        Load("llama-3-8b", 25, 32, share=3),
        Load("llama-3-8b", 400, 400, share=12),
        Load("llama-1b", 100, 125, share=4),
    ]


def simulated_loads(full: bool, model: str) -> list[Load]:
    counts = (100, 50, 25, 10, 200, 400) if full else (10, 50, 100)
    loads = [Load(model, c, max(50, 3 * c) if full else 2 * c) for c in counts]
    if not full:
        return loads
    some_small = Load(model, 100, 300, short_and_long, kv_tokens=48_000, exact=True)  # else the hybrid's pool has no use
    return [Load(model, 100, 300, shared=512, kv_tokens=32_000), some_small, *loads]


def run(ctx: Context) -> None:
    """On a GPU the model first: simulating needs none and can be done elsewhere."""
    parts = (_measure_all, _simulate_all) if ctx.device.startswith("cuda") else (_simulate_all, _measure_all)
    for part in parts:
        if ctx.measures if part is _measure_all else ctx.simulates:
            part(ctx)


def _params(load: Load, workload: Workload) -> dict[str, Any]:
    return {"model": load.model, "concurrency": load.concurrency, "workload": workload.name}


def _settings(config: EngineConfig, workload: Workload, kv_tokens: int) -> dict[str, Any]:
    names = ("kv_allocator", "page_size", "promised_output_tokens", "prefix_reuse", "pool_fit", "steps_in_flight")
    settings = {name: getattr(config, name) for name in names} | {"requests": len(workload), "kv_tokens": kv_tokens}
    return settings | ({"lengths": lengths_from()} if workload.name.startswith(("azure", "short")) else {})


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
            settings = _settings(config, workload, engine.executor.capacity())
        report(record, outcome, variant=variant, kind="simulated", params=_params(load, workload), settings=settings)
        record.flush()
        ctx.say(f"  {device} simulated, {load.concurrency:>3} requests, {variant:<15} {outcome.throughput:8.2f} req/s")


# --- measured


def _at_full_size(ctx: Context) -> bool:
    return ctx.full and ctx.device.startswith("cuda")


def _measure_all(ctx: Context) -> None:
    from pdlab.models.loading import load as load_model

    loads = real_loads(_at_full_size(ctx))
    setup = 0.0  # seconds that the last model took before its first load
    for name, group in groupby(loads, key=lambda load: load.model):
        own = list(group)
        model = config_of(f"random:{name}")
        if weights_bytes(model, itemsize_of(ctx.dtype)) > 0.8 * ctx.machine.memory_bytes > 0:
            for load in own:
                _skip(ctx, load, load.variants, f"the weights of {name} leave no room on {ctx.machine.slug}")
            continue
        if ctx.left() <= setup / 2:
            for load in own:
                _skip(ctx, load, load.variants)
            continue
        before = ctx.left()
        if _at_full_size(ctx) and before > 40:
            at_once = memory_kernels.how_many(ctx.machine.memory_bytes)
            took = memory_kernels.make(name, max(load.concurrency for load in own), at_once=at_once)
            ctx.say(f"  {name}: kernels made in {took:.0f} s")
        loaded = load_model(f"random:{name}", device=ctx.device, dtype=ctx.dtype, seed=ctx.seed)
        share_of_others = sum(load.share for load in loads[loads.index(own[-1]) + 1 :])
        setup = before - _measure_model(ctx, loaded, own, share_of_others)
        del loaded  # these weights go before the next ones come
        ctx.record.flush()


def _measure_model(ctx: Context, loaded: Any, loads: list[Load], share_of_others: float) -> float:
    """All loads of one model; the seconds that were left when the first began. `share_of_others`: of the time, for later
    models."""
    full, pieces = _at_full_size(ctx), []
    largest = replace(max(loads, key=lambda load: load.concurrency), kv_tokens=None)
    config = largest.config("paged", **on_device(ctx))
    room = max(load.kv_tokens or 0 for load in loads)
    if any(load.kv_tokens is None for load in loads):
        from pdlab.engine.kv_memory import kv_capacity

        room = max(room, kv_capacity(config, loaded.model, largest.longest) * 9 // 20)  # graphs need memory too
    owners = [config.with_(kv_allocator=v, kv_capacity_tokens=room) for v in SCHEMES[:2]]
    with engines_over(loaded, owners) as make:
        pace = _pace(ctx, make, loads[0], largest.concurrency) if full else None
        begun = ctx.left()
        for i, load in enumerate(loads):
            if pace is not None:
                own = sum(later.share for later in loads[i:])
                kept = sum(_costs(pace, later, ctx.seed)[:2][-1][1] for later in loads[i + 1 :])
                fitted = _fitted(pace, load, ctx.left() * own / (own + share_of_others) - kept, ctx.seed)
                if fitted is None:
                    _skip(ctx, load, load.variants)
                    continue
                load = fitted
            pieces += _measure(ctx, make, load, room)
            if i == 0:
                _compare_equals(ctx, make, load.model, *((64, 512, 64) if full else (4, 24, 8)))
            ctx.record.flush()
    for params, ops in pieces:
        _framework(ctx, ops, loaded.config.kv_bytes_per_token(itemsize_of(ctx.dtype)), params)
    return begun


def _pace(ctx: Context, make: Callable[[EngineConfig], Engine], load: Load, most: int) -> Pace:
    """Compiles what both kinds of memory need, and says how fast the model is."""
    short, outcome = replace(load, by=DIVISORS[-1]), None
    for variant in SCHEMES[1::-1]:
        for shapes in every_shape(most):
            play(make(replace(load, concurrency=most).config(variant, **on_device(ctx))), shapes)
        for _ in range(2):
            outcome = play(make(short.config(variant, **on_device(ctx))), short.workload(ctx.seed))
    assert outcome is not None
    model = config_of(f"random:{load.model}")
    read = ceilings_for(ctx.machine.slug, ctx.dtype).read_bytes_per_s
    pace = Pace.of(outcome, model.kv_bytes_per_token(itemsize_of(ctx.dtype)) / read)
    ctx.say(f"  {load.model}: {1e6 * pace.prompt_token:.0f} us a prompt token, {1e3 * pace.step:.1f} ms a step")
    return pace


def _costs(pace: Pace, load: Load, seed: int) -> list[tuple[Load, float]]:
    """The load with its lengths divided by each number that it may be, and the seconds that all its variants will take."""
    tried = [replace(load, by=by) for by in load.divisors]
    return [(x, 1.1 * len(x.variants) * pace.seconds(x.workload(seed))) for x in tried]


def _fitted(pace: Pace, load: Load, seconds: float, seed: int) -> Load | None:
    """The load, its lengths divided by as little as lets every variant serve it within `seconds`; None where they may not be
    divided and that takes longer."""
    costs = _costs(pace, load, seed)
    return next((x for x, cost in costs if cost <= seconds), costs[-1][0] if len(costs) > 1 else None)


def _skip(ctx: Context, load: Load, variants: Sequence[str], why: str = "the time budget ran out") -> None:
    params = _params(load, load.workload(ctx.seed))
    for variant in variants:
        ctx.record.skip("throughput", "req/s", why, variant=variant, params=params)


def _measure(
    ctx: Context, make: Callable[[EngineConfig], Engine], load: Load, room: int
) -> list[tuple[dict[str, Any], list[KVOp]]]:
    """Rows of each variant; returns (params, operations) of those that ask the device for pieces of their own."""
    workload, slots, pieces = load.workload(ctx.seed), load.memory(room), []
    params = _params(load, workload)
    for i, variant in enumerate(load.variants):
        if ctx.left() <= 0:
            _skip(ctx, load, load.variants[i:])
            break
        config = load.config(variant, **on_device(ctx), kv_capacity_tokens=slots)
        try:
            engine = make(config)
        except CapacityError as error:
            _skip(ctx, load, [variant], str(error))
            continue
        ops = watch_ops(engine)
        outcome = play(engine, workload, warm=0 if _at_full_size(ctx) else 8)
        about: dict[str, Any] = {"kind": "measured", "params": params, "settings": _settings(config, workload, slots)}
        report(ctx.record, outcome, variant=variant, waste=load.by == 1, **about)
        ctx.record.flush()
        if variant == "per_request" and ctx.device.startswith("cuda"):
            pieces.append((params, ops))
        ctx.say(f"  {load.model}, {load.concurrency:>3} requests, {variant:<15} {outcome.throughput:8.2f} req/s")
    return pieces


def _compare_equals(
    ctx: Context, make: Callable[[EngineConfig], Engine], model: str, batch: int, prompt: int, answer: int
) -> None:
    """Paged beside contiguous, in turns, where the layout is all that differs."""
    if ctx.left() <= 0:
        return
    load = Load(model, batch, batch, kv_tokens=batch * (prompt + answer + 16))
    workload = equals(batch, prompt, answer)
    configs = {v: load.config(v, **on_device(ctx)) for v in SCHEMES[:2]}
    outcomes: dict[str, list[Outcome]] = {v: [] for v in configs}
    for turn in range(3):
        for variant, config in configs.items():
            outcome = play(make(config), workload)
            outcomes[variant] += [outcome] if turn else []  # the first is the rehearsal
    for variant, played in outcomes.items():
        settings = _settings(configs[variant], workload, load.kv_tokens or 0)
        report_equal(ctx.record, played, variant=variant, params=_params(load, workload), settings=settings)
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
