"""Decode steps of 1 to 64 requests: how long the weights, read once for all of them, stay the largest part.

A step goes through the executor as the engine would run it, two in flight, over caches of random numbers in scattered pages.
`latency` ms between the ends of successive steps, `floor_latency` by the roofline with the read bandwidth of the same run,
`throughput` tokens a second of all requests together, `bandwidth_share` percent of the read ceiling, weights and cache counted.
The variants take turns: `ours`, and the plain operations in a CUDA graph (`unfused_graph`).
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from pdlab.bench import _stages as stages
from pdlab.core.errors import PdlabError
from pdlab.costs.formulas import decode_shape, itemsize_of, kv_bytes, step_bytes, weights_bytes
from pdlab.hardware.timing import Timings, alternate, steady
from pdlab.models.catalogue import config_of

if TYPE_CHECKING:
    from pdlab.bench.suites import Context
    from pdlab.models.loading import Loaded

NAME = "decode_batched"
HELP = "decode steps of 1 to 64 requests against the roofline"

MODELS = {"full": ("random:llama-1b", "random:llama-3-8b", "random:llama-2-7b"), "smoke": ("random:llama-tiny",)}
BATCHES = {"full": (1, 8, 64, 32, 16, 4, 2), "smoke": (1, 4)}  # the ends first, in case the budget is short
CONTEXT = {"full": 640, "smoke": 40}  # tokens each request attends to: the mean of the headline's answers
VARIANTS = (stages.ALL, frozenset({"graph"}), stages.without("hints"))  # of which a CPU has the first only


def measure_batch(ctx: Context, loaded: Loaded, batch: int, read: float) -> None:
    from pdlab.bench._breakdown import run_steps, step_of

    config, context = loaded.config, CONTEXT[ctx.profile]
    params = {"model": config.name, "batch": batch, "context": context, "dtype": ctx.dtype}
    nbytes = step_bytes(config, decode_shape(batch, context), itemsize_of(ctx.dtype)).total
    with ExitStack() as stack:
        calls: dict[str, Any] = {}
        for switches in VARIANTS[: None if ctx.machine.is_gpu else 1]:
            executor, plan = stack.enter_context(step_of(loaded, switches, context, batch))
            run_steps(executor, [plan(i) for i in range(4)], 2)  # compiles, captures

            def once(executor: Any = executor, plan: Any = plan) -> Timings:
                def sample() -> list[float]:
                    plans = [plan(i) for i in range(18 if ctx.full else 5)]
                    return [1e3 * gap for gap in run_steps(executor, plans, 2)[2:]]

                return steady(sample, "ms", ctx.machine.is_gpu)

            calls[stages.name_of(switches)] = once
        times = alternate(calls, 2 if ctx.full else 1)
    ctx.record.add("floor_latency", nbytes / read * 1e3, "ms", kind="predicted", params=params)
    for name, t in times.items():
        share = t.rate(100 * nbytes / read * 1e3, "percent")
        ctx.record.add("latency", t, variant=name, params=params)
        ctx.record.add("throughput", t.rate(1e3 * batch, "tok/s"), variant=name, params=params)
        ctx.record.add("bandwidth_share", share, variant=name, params=params)
        ctx.say(f"  {config.name} batch {batch} {name}: {t.median:.3f} ms, {share.median:.1f} % of the read ceiling")
    ctx.record.flush()


def run(ctx: Context) -> None:
    import torch

    from pdlab.bench import _decode
    from pdlab.bench.prefill_vs_decode import _load

    torch.manual_seed(ctx.seed)
    read = _decode.read_ceiling(ctx)
    names = MODELS[ctx.profile]
    whole = ctx.left()
    for i, name in enumerate(names):
        config, size = config_of(name), itemsize_of(ctx.dtype)
        most = max(BATCHES[ctx.profile])
        need = weights_bytes(config, size) + len(VARIANTS) * kv_bytes(config, most * (CONTEXT[ctx.profile] + 32), size)
        params = {"model": config.name, "dtype": ctx.dtype}
        keep = whole * (len(names) - 1 - i) / len(names)
        if need > ctx.machine.memory_bytes * 0.8 or ctx.left() <= keep:
            why = "the time budget ran out" if ctx.left() <= keep else f"needs {need / 1e9:.1f} GB"
            ctx.record.skip("latency", "ms", why, params=params)
            continue
        loaded = _load(name, ctx)
        for batch in BATCHES[ctx.profile]:
            if ctx.left() <= keep:
                ctx.record.skip("latency", "ms", "the time budget ran out", params=params | {"batch": batch})
                continue
            try:
                measure_batch(ctx, loaded, batch, read)
            except PdlabError as error:
                ctx.record.skip("latency", "ms", str(error), params=params | {"batch": batch})
        del loaded
        if ctx.machine.is_gpu:
            torch.cuda.empty_cache()
