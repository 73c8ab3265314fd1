"""What compaction costs and what it buys.

Cost: moving `tokens` tokens' KV from a half-empty memory's end into its holes, by our kernel and by one gather and scatter in
plain PyTorch, beside the floor: 2 (K, V) * 2 (read, write) * layers * kv_heads * head_dim * itemsize bytes a token at the
copy bandwidth measured in the same run.

Gain: a long closed loop over a contiguous pool that is short of memory, on a simulated H200. `refused` counts the allocations
that failed although as much memory was free, in too small pieces: how a server that runs for long ends out of memory.

    none         never compacts
    article      compacts everything after every 1000 requests that ended
    compaction   when an allocation fails for want of one piece, moves the fewest slots that make it
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from pdlab.allocators.contiguous_pool import ContiguousPool
from pdlab.allocators.fragmentation import average_waste
from pdlab.bench.kv_allocators import Load
from pdlab.bench.memory_runs import conversation, lengths_from, play, recorder_for, simulated_engine
from pdlab.core.plan import KVCopy
from pdlab.costs.formulas import itemsize_of
from pdlab.hardware.timing import Timings, alternate, time_ms
from pdlab.models.catalogue import config_of
from pdlab.models.config import ModelConfig

if TYPE_CHECKING:
    from pdlab.bench.suites import Context

NAME = "kv_compaction"
HELP = "moving KV while requests live: time beside the bandwidth floor, and allocations it saves over a long run"

SIMULATES = True
VARIANTS: dict[str, dict[str, Any]] = {
    "none": {},
    "article": {"compact_every": 1000},
    "compaction": {"compact_on_refusal": True},
}
DEVICE, MODEL = "nvidia-h200", "llama-3-8b"


def run(ctx: Context) -> None:
    """On a GPU a simulation is begun only where it will end in time: it needs none and can be done elsewhere."""
    if ctx.measures:
        _cost(ctx)
    if not ctx.simulates:
        return
    n = 4000 if ctx.full else 150
    took = n / 30 if ctx.device.startswith("cuda") else 0.0
    with recorder_for(ctx, DEVICE) as record:
        for variant, settings in VARIANTS.items():
            if ctx.left() > took:
                _gain(ctx, record, variant, settings, n)


def _gain(ctx: Context, record: Any, variant: str, settings: dict[str, Any], n: int) -> None:
    load = Load(MODEL, 100, n, conversation, kv_tokens=64 << 10)
    more = {key: value if ctx.full or key != "compact_every" else 50 for key, value in settings.items()}
    config = load.config("contiguous_pool", executor="simulated", simulated_device=DEVICE, **more)
    workload = load.workload(ctx.seed)
    with simulated_engine(f"random:{MODEL}", config) as engine:
        outcome = play(engine, workload)
        moved, refused = engine.scheduler.compactor.moved, engine.allocator.refused_in_pieces
        per_token = engine.model.kv_bytes_per_token(2)
    params = {"model": MODEL, "concurrency": 100, "workload": workload.name, "requests": n}
    settings = more | {"kv_tokens": load.kv_tokens, "lengths": lengths_from()}
    shared: dict[str, Any] = {"variant": variant, "kind": "simulated", "settings": settings}
    record.add("refused", refused, "count", params=params, **shared)
    record.add("preemptions", outcome.preemptions, "count", params=params, **shared)
    record.add("bytes_moved", float(2 * moved * per_token), "bytes", params=params, **shared)
    record.add("throughput", outcome.throughput, "req/s", n=outcome.complete, params=params, **shared)
    record.add(
        "waste_external", average_waste(outcome.trace or ()).external, "percent", n=outcome.steps, params=params, **shared
    )
    for quantile in (50, 99):
        ms = outcome.end_to_end.quantile(quantile / 100) * 1e3
        record.add("latency", ms, "ms", n=outcome.end_to_end.n, params=params | {"quantile": quantile}, **shared)
    ctx.say(f"  {variant:<11} {refused:>7} refused, {moved:>10,} slots moved, {outcome.throughput:6.2f} req/s")


def fragmented(tokens: int, page: int, seed: int) -> list[KVCopy]:
    """Copies that compact a memory of 2 * tokens slots, half of them free in pieces of 3 to 30 pages."""
    rng = np.random.default_rng(seed)
    pool = ContiguousPool(2 * tokens, quantum=page)
    sizes = (rng.integers(3, 31, 2 * tokens // page) * page).tolist()
    count = 0
    while pool.reserve(count, sizes[count]):
        count += 1
    for rid in rng.permutation(count)[: count // 2].tolist():
        pool.free(rid)
    return pool.compact(tokens)


def _cost(ctx: Context) -> None:
    import torch

    from pdlab.bench.ceilings import measure_copy
    from pdlab.kernels.kv_moves import kv_copy_reference, slot_lists, waves

    on_gpu = ctx.device.startswith("cuda")
    model: ModelConfig = config_of(f"random:{MODEL if on_gpu else 'llama-tiny'}")
    itemsize, dtype = itemsize_of(ctx.dtype), getattr(torch, ctx.dtype)
    per_token = model.kv_bytes_per_token(itemsize)
    ceiling = 1e12 * measure_copy(ctx.machine, (1 << 30) if on_gpu else (1 << 26), 10).median
    for page in (16, 1):
        for tokens in (32768, 4096) if on_gpu else (512,):
            if ctx.left() <= 0:
                return
            copies = fragmented(tokens, 16, ctx.seed)
            moved = sum(op.tokens for op in copies)
            shape = (model.num_layers, 2 * tokens // page, model.num_kv_heads, page, model.head_dim)
            k, v = (torch.randn(shape, dtype=dtype, device=ctx.device) for _ in range(2))
            sets = [slot_lists(wave, k.device) for wave in waves(copies)]
            rivals = {"torch": kv_copy_reference}
            if on_gpu:
                from pdlab.kernels.kv_copy import kv_copy

                rivals["ours"] = kv_copy

            def time_one(copy: Callable[..., None], k: Any = k, v: Any = v, sets: Any = sets) -> Timings:
                def move() -> None:
                    for src, dst in sets:
                        copy(k, v, src, dst)

                return time_ms(move, device=ctx.device, n=30)

            timed = alternate({name: partial(time_one, copy) for name, copy in rivals.items()})
            params = {"model": model.name, "tokens": moved, "layout": "pages" if page > 1 else "extents", "dtype": ctx.dtype}
            for name, timings in timed.items():
                ctx.record.add("latency", timings, variant=name, params=params, settings={"launches": len(sets)})
                ctx.record.add("bandwidth", timings.rate(2 * moved * per_token / 1e9, "TB/s"), variant=name, params=params)
            ctx.record.add("floor_latency", 2e3 * moved * per_token / ceiling, "ms", kind="predicted", params=params)
            ctx.record.add("bytes_moved", float(2 * moved * per_token), "bytes", params=params)
            ctx.say(
                f"  moved {moved:,} tokens as {params['layout']}: "
                + ", ".join(f"{n} {t.median:.2f} ms" for n, t in timed.items())
            )
