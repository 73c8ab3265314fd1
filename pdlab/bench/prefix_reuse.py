"""Prompts that begin alike, computed once: chats that send their whole history with every turn, and a common system prompt.

    hit_rate     percent of prompt tokens that were found in memory instead of computed
    latency      ms from arrival to the first token (quantile)
    throughput   requests a second

A chat has `turns` turns; each prompt is the system prompt, all earlier questions and answers, and a new question. A client
sends a turn when the last was answered. The variants are `reuse` and `none`: the same requests, the same memory. On a GPU two
short turns say how long the chats may be; `chat_by_2` has questions and answers half as long.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pdlab.bench.memory_runs import engines_over, every_shape, on_device, play, recorder_for, simulated_engine
from pdlab.core.config import EngineConfig
from pdlab.costs.formulas import itemsize_of, weights_bytes
from pdlab.engine.engine import Engine
from pdlab.models.catalogue import config_of
from pdlab.workloads.replay import Outcome
from pdlab.workloads.workload import Item, Workload

if TYPE_CHECKING:
    from pdlab.bench.suites import Context

NAME = "prefix_reuse"
HELP = "first-token latency and throughput of chats with and without reuse of what memory still holds"

SIMULATES = True
SIMULATED = {"nvidia-h200": "llama-3-8b", "nvidia-a100-sxm4-40gb": "llama-2-7b"}


def chats(clients: int, per_client: int, turns: int, seed: int, *, system: int = 256, scale: float = 1.0) -> Workload:
    """Turn by turn over all chats, so that every chat goes on after the others had their turn."""
    rng = np.random.default_rng(seed)
    items: list[Item] = []
    for wave in range(per_client):
        history: list[list[tuple[int, int]]] = [[(0, system)] for _ in range(clients)]
        for turn in range(turns):
            for chat, before in enumerate(history):
                question, answer = (max(1, int(scale * x)) for x in np.exp(rng.normal((4.2, 4.9), 0.7)))
                number = 2 * ((wave * turns + turn) * clients + chat) + 1
                before.append((number, question))
                items.append(
                    Item(0.0, prompt_tokens=sum(n for _, n in before), max_tokens=answer, kind="chat", pieces=tuple(before))
                )
                before.append((number + 1, answer))
    return Workload("chat" if scale == 1 else f"chat_by_{1 / scale:g}", items, seed, clients)


def hit_rate(engine: Engine, workload: Workload, warm: int | Workload = 0) -> tuple[Outcome, float]:
    """The replay, and the percentage of its prompt tokens that were found in memory; see memory_runs.play for `warm`."""
    if warm:
        play(engine, workload.head(warm) if isinstance(warm, int) else warm)
        engine.allocator.drop_prefixes()
    found = 0
    scheduler = engine.scheduler
    admit = scheduler.admit

    def counted(request: Any, now: float) -> bool:
        nonlocal found
        first = request.first_scheduled_s is None
        admitted = admit(request, now)
        found += request.cached_prompt_tokens if admitted and first else 0
        return admitted

    scheduler.admit = counted  # type: ignore[method-assign]
    outcome = play(engine, workload)
    return outcome, 100 * found / max(1, outcome.prompt_tokens)


CLIENTS, ROUNDS, TURNS = 64, 2, 6


def run(ctx: Context) -> None:
    """On a GPU the model first: simulating needs none and can be done elsewhere."""
    parts = (_measure, _simulate) if ctx.device.startswith("cuda") else (_simulate, _measure)
    for part in parts:
        if ctx.measures if part is _measure else ctx.simulates:
            part(ctx)


def _simulate(ctx: Context) -> None:
    workload = chats(CLIENTS, ROUNDS, TURNS, ctx.seed) if ctx.full else chats(8, 1, 3, ctx.seed)
    for device, model in SIMULATED.items():
        if ctx.full or device != "nvidia-h200":
            with recorder_for(ctx, device) as record:
                for reuse in (False, True):
                    if ctx.left() <= 0:
                        return
                    config = EngineConfig(executor="simulated", simulated_device=device, prefix_reuse=reuse)
                    with simulated_engine(f"random:{model}", config) as engine:
                        _report(ctx, record, engine, workload, model, reuse, "simulated")


def _measure(ctx: Context) -> None:
    from pdlab.models.loading import load

    full = ctx.full and ctx.device.startswith("cuda")
    model, clients = (_model(ctx), CLIENTS) if full else ("llama-tiny", 4)
    loaded = load(f"random:{model}", device=ctx.device, dtype=ctx.dtype, seed=ctx.seed)

    def config(reuse: bool) -> EngineConfig:
        longest = min(loaded.config.max_context, 8192)
        return EngineConfig(**on_device(ctx), prefix_reuse=reuse, max_batch_requests=clients, max_model_len=longest)

    short = chats(clients, 1, 2, ctx.seed, system=48, scale=0.1)
    with engines_over(loaded, [config(True)]) as make:
        workload = chats(clients, 1, 3, ctx.seed, system=48, scale=0.1)
        if full:
            workload = _affordable(ctx, make(config(True)), clients, short)
        for reuse in (True, False):
            if ctx.left() <= 0:
                return
            _report(ctx, ctx.record, make(config(reuse)), workload, model, reuse, "measured", short)
            ctx.record.flush()


def _model(ctx: Context) -> str:
    """The shape that is simulated too, where it fits and there is time to make its kernels; else a smaller one."""
    large = SIMULATED["nvidia-h200"]
    fits = weights_bytes(config_of(f"random:{large}"), itemsize_of(ctx.dtype)) < 0.6 * ctx.machine.memory_bytes
    return large if fits and ctx.left() >= 75 else "llama-1b"


def _affordable(ctx: Context, engine: Engine, clients: int, short: Workload) -> Workload:
    """The longest chats that both variants can serve in the time that is left, judged by short ones."""

    def work(w: Workload) -> float:  # a token of an answer costs about as much as six of a prompt
        return sum(item.prompt_tokens + 6.0 * item.max_tokens for item in w)

    for shapes in every_shape(clients):
        play(engine, shapes)  # compiles
    rate = work(short) / play(engine, short, warm=short).seconds
    for rounds, turns, scale in ((ROUNDS, TURNS, 1.0), (1, TURNS, 1.0), (1, TURNS, 0.5), (1, 4, 0.5), (1, 4, 0.25)):
        workload = chats(clients, rounds, turns, ctx.seed, scale=scale)
        seconds = work(workload) / rate
        if 2 * seconds <= 0.9 * ctx.left():
            break
    ctx.say(f"  {len(workload)} requests in chats of {turns} turns, lengths times {scale:g}: about {seconds:.0f} s each way")
    return workload


def _report(
    ctx: Context, record: Any, engine: Engine, workload: Workload, model: str, reuse: bool, kind: str, warm: int | Workload = 0
) -> None:
    outcome, hits = hit_rate(engine, workload, warm)
    variant = "reuse" if reuse else "none"
    params = {"model": model, "concurrency": workload.clients, "workload": workload.name, "requests": len(workload)}
    shared: dict[str, Any] = {"variant": variant, "kind": kind}
    record.add("hit_rate", hits, "percent", n=outcome.ended, params=params, **shared)
    for quantile in (50, 99):
        ms = outcome.ttft.quantile(quantile / 100) * 1e3
        record.add("latency", ms, "ms", n=outcome.ttft.n, params=params | {"quantile": quantile}, **shared)
    record.add("throughput", outcome.throughput, "req/s", n=outcome.complete, params=params, **shared)
    ctx.say(f"  {model} {kind}, {variant:<5} {hits:5.1f} % found, {outcome.throughput:7.2f} req/s")
