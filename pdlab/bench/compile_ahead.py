"""Compiles the kernels of the decode, attention or serving suites in several processes, before a recording: alone it would
wait for each in turn.

    python -m pdlab.bench.compile_ahead --processes 12 --seconds 30
    pdlab bench decode_single_stream --record --budget 100

or `--what products` and `product_tiles`, `--what rings` and `ring_tiles`, `--what attention` and the attention suites,
`--what serving` and `scheduling_mixed_load`, `estimator_error` and `simulator_error`, `--what batching` and `batching`. Triton
keeps what it compiled in TRITON_CACHE_DIR, so set that for both commands alike where it is not the default. Models are cut to
two layers, which have every kernel that the whole model has. Nothing is timed, and nothing is recorded.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pdlab.bench import _stages as stages
from pdlab.core.errors import DeviceUnavailable
from pdlab.hardware.probe import Machine, resolve_device
from pdlab.models.catalogue import config_of

if TYPE_CHECKING:
    from pdlab.bench.suites import Context
    from pdlab.models.loading import Loaded

MODELS = ("llama-1b", "llama-3-8b", "llama-2-7b", "gpt2-xl")
ROWS = (1, 8, 32, 64)  # decode batches that have kernels of their own
UNLAUNCHED = ("serving", "batching")  # what is gone through without a launch, see _kernels_ahead


def two_layers(name: str, machine: Machine) -> Loaded:
    """A catalogue shape with random weights and two layers."""
    import torch

    from pdlab.models.loading import DTYPES, Loaded, build
    from pdlab.models.source import RandomSource
    from pdlab.models.tokenizer import ByteTokenizer

    config = replace(config_of(name), num_layers=2)
    model = build(config, RandomSource(config, torch.device(machine.device), DTYPES[machine.dtype], 0))
    return Loaded(config, model, ByteTokenizer(config), "random")


def stream(ctx: Context, name: str, switches: stages.Switches) -> None:
    """What decode_single_stream needs: a prompt, a prompt in two chunks, and steps of one row."""
    with stages.make_llm(two_layers(name, ctx.machine), switches, length=769) as llm:
        for prompt in (512, 620):
            stages.stream_seconds(llm, prompt, 4, 0)


def in_turn(ctx: Context, name: str, prepare: Callable[[Loaded, Any], None]) -> None:
    """A step of one row; `prepare` is given the model and its operations first."""
    from pdlab.bench._breakdown import run_steps, step_of

    loaded = two_layers(name, ctx.machine)
    with step_of(loaded, stages.ALL, 640) as (executor, plan):
        prepare(loaded, executor.model.ops)
        run_steps(executor, [plan(i) for i in range(2)], 1)


def all_layers(loaded: Loaded, ops: Any) -> None:
    """Has the persistent kernel do them, as this device's table has it for the whole model, else as it is cut by default."""
    from pdlab.kernels.decode_stack import StackTile, recorded_tile, stack_key

    key = stack_key(loaded.model.layers) | {"layers": config_of(loaded.config.name).num_layers}
    ops.stack_tile = recorded_tile(ops.tuning, key, 1) or StackTile()


def ring_ways() -> dict[str, Callable[[Context], None]]:
    """Every way of ring_tiles, of each model."""
    from pdlab.bench import ring_tiles
    from pdlab.kernels.decode_stack import StackTile

    def rings(loaded: Loaded, ops: Any, way: str) -> None:
        ring_tiles._sized(loaded, way)(ops)
        ops.persistent = False

    def stack(loaded: Loaded, ops: Any, way: str) -> None:
        ops.stack_tile = StackTile(**ring_tiles.persistent_ways()[way])

    ways: dict[str, Callable[[Loaded, Any], None]] = {w: partial(rings, way=w) for w in ring_tiles.ring_ways()}
    ways |= {f"persistent {w}": partial(stack, way=w) for w in ring_tiles.persistent_ways()}
    return {f"{name} {way}": partial(in_turn, name=name, prepare=ways[way]) for way in ways for name in ring_tiles.MODELS}


def batched(ctx: Context, name: str, batch: int) -> None:
    from pdlab.bench._breakdown import run_steps, step_of

    with step_of(two_layers(name, ctx.machine), stages.ALL, 640, batch) as (executor, plan):
        run_steps(executor, [plan(i) for i in range(4)], 2)


def norm_qkv_rope(ctx: Context, name: str, batch: int) -> None:
    from pdlab.bench import fused_norm_qkv_rope as suite

    config = config_of(name)
    for call in suite.operations(config, ctx).values():
        call(*suite.make_arguments(config, ctx, batch, 0))


def projection_sample(ctx: Context, name: str, batch: int) -> None:
    from pdlab.bench import fused_projection_sample as suite

    config = config_of(name)
    x, head = suite.make_head(config, ctx, batch, 0)
    for kind in suite.KINDS:
        suite.variants(ctx, config, kind, batch, False)["ours"](x, head)


def layouts(ctx: Context, batch: int, length: int) -> None:
    from pdlab.bench import kv_layout

    kv_layout._measure(ctx, batch, length, (32, 8, 128), 1e12)


def meet_all(ctx: Context, what: str) -> None:
    """What a load meets (serving), or ways of forming batches (batching): graphs of decodes and of steps with prompts, and
    every kind of step that is launched kernel by kernel."""
    from pdlab.bench import batching, serving

    scale = serving.scale_of(ctx)
    if what == "batching":
        budget = {"max_batch_tokens": batching.BUDGET, "static_batch_tokens": batching.BUDGET}
        scale = replace(scale, model=batching.MODEL, config=scale.config.with_(**budget))
    scale = replace(scale, config=scale.config.with_(kv_capacity_tokens=200_000))
    way = "static" if what == "batching" else "continuous_chunked"
    with serving.Session(
        ctx, scale, batching=way, capture=what != "batching", loaded=two_layers(scale.model, ctx.machine)
    ) as session:
        session.warm()


def side_by_side(ctx: Context, what: str, processes: int, seconds: float) -> int:
    """Goes through `meet_all` without launching and has the kernels compiled by other processes meanwhile; how many were."""
    from pdlab.bench import _kernels_ahead as ahead
    from pdlab.bench.serving import workers

    began, target = time.monotonic(), ahead.target_here()
    with workers(True, processes) as submit:
        waiting: list[tuple[str, Any]] = []
        with ahead.unlaunched(lambda wanted: waiting.append((wanted.name, submit(ahead.compile_for, target, wanted)))):
            meet_all(ctx, what)
        spent = []
        for name, future in waiting:
            try:
                spent.append(future.result(max(0.0, began + seconds - time.monotonic())))
            except TimeoutError:
                print(f"not reached: {name}", flush=True)
            except Exception as error:  # a kernel that does not compile here will say so again where it is launched
                print(f"failed: {name}: {type(error).__name__}: {str(error).splitlines()[:1]}", flush=True)
    took = time.monotonic() - began
    print(f"{len(spent)} of {len(waiting)} kernels in {took:.1f} s, one after the other {sum(spent):.1f} s", flush=True)
    return len(spent)


def jobs() -> dict[str, Callable[[Context], None]]:
    """Everything to compile, by a name that says what it is; what a recording needs first comes first."""
    found: dict[str, Callable[[Context], None]] = {}
    for name in MODELS[:3]:
        found[f"all layers of {name}"] = partial(in_turn, name=name, prepare=all_layers)
    for name in MODELS:
        sets = [stages.ALL, frozenset({"graph", "attention"})]
        sets += stages.waterfall() if name in MODELS[:2] else []
        sets += stages.left_out() if name == MODELS[0] else []
        for switches in sets:
            if switches & {"attention", "fused"}:
                found[f"stream {name} {stages.name_of(switches)}"] = partial(stream, name=name, switches=switches)
    for batch in ROWS:
        for name in MODELS:
            found[f"norm_qkv_rope {name} {batch}"] = partial(norm_qkv_rope, name=name, batch=batch)
            found[f"projection_sample {name} {batch}"] = partial(projection_sample, name=name, batch=batch)
            if batch > 1 and name != MODELS[3]:
                found[f"batched {name} {batch}"] = partial(batched, name=name, batch=batch)
    found["layouts"] = partial(layouts, batch=1, length=4096)
    return found


def jobs_of(what: str) -> dict[str, Callable[[Context], None]]:
    if what in ("decode", "rings"):
        return jobs() if what == "decode" else ring_ways()
    from pdlab.bench import _attention_ahead, product_tiles
    from pdlab.kernels.tuning import Tuning

    tuning = Tuning.of_device()
    if what == "attention":
        return _attention_ahead.jobs(tuning)
    steps = {f"batched {name} {rows}": partial(batched, name=name, batch=rows) for name in MODELS[:2] for rows in ROWS[1:]}
    return steps | product_tiles.compiled_products(tuning)


def context_here(seconds: float) -> Context:
    """Of this process; nothing is said or kept."""
    import tempfile
    from pathlib import Path

    from pdlab.bench.records import Recorder
    from pdlab.bench.suites import Context

    machine = resolve_device("auto")
    if not machine.is_gpu:
        raise DeviceUnavailable("there is no GPU to compile for", "run this where the recording will run")
    recorder = Recorder("compile_ahead", machine.slug, out=Path(tempfile.gettempdir()))
    return Context(machine, "full", recorder, seconds, say=lambda line: None)


def work(part: int, parts: int, seconds: float, what: str = "decode") -> None:
    """Every `parts`-th job from `part` on, until the time is over; a job that fails is named and left."""
    started, context = time.monotonic(), context_here(seconds)
    for name, job in list(jobs_of(what).items())[part::parts]:
        if time.monotonic() - started > seconds:
            print(f"not reached: {name}", flush=True)
            continue
        began = time.monotonic()
        try:
            job(context)
            print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)
        except Exception as error:  # a kernel that does not compile here will say so again in its suite
            print(f"failed: {name}: {type(error).__name__}: {str(error).splitlines()[:1]}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser: Any = argparse.ArgumentParser(prog="python -m pdlab.bench.compile_ahead", description=__doc__,
                                          formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--seconds", type=float, default=30.0, help="after which no process begins another kernel")
    parser.add_argument("--part", type=int, help="be one of the processes: this one of --processes")
    parser.add_argument(
        "--what", choices=("decode", "rings", "attention", "products", *UNLAUNCHED), default="decode", help="whose kernels"
    )
    given = parser.parse_args(arguments)
    if given.what in UNLAUNCHED:
        side_by_side(context_here(given.seconds), given.what, given.processes, given.seconds)
        return 0
    if given.part is not None:
        work(given.part, given.processes, given.seconds, given.what)
        return 0
    command = [sys.executable, "-m", "pdlab.bench.compile_ahead", "--processes", str(given.processes)]
    command += ["--seconds", str(given.seconds), "--what", given.what, "--part"]
    running = [subprocess.Popen([*command, str(i)]) for i in range(given.processes)]
    return max(process.wait() for process in running)


if __name__ == "__main__":
    raise SystemExit(main())
