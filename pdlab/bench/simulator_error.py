"""How far the simulator may be trusted, and how fast it is.

On the real engine (measured): the same workload there and simulated, quantile by quantile. The simulator is calibrated by
other loads and seeds of the same run, never by the workload it is judged on. An error is 100 · (simulated - real) / real;
it is a measured number. `speed` is simulated seconds a real second.

Without a GPU (`--only simulated`): the load tests that an H200 recorded, simulated again as their training runs alone calibrate
the simulator now (kind "simulated": what the device did was measured then; see bench._offline). And its speed over an hour of
the Azure conversation trace, on one core of this machine, and the memory that a million requests take: both are measured, and
speak of this machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pdlab.bench import _offline, serving
from pdlab.bench.memory_runs import lengths_from, trace_file
from pdlab.bench.serving_outcomes import quantities_of, record_differences
from pdlab.workloads.generators import azure_conversation, fixed, lognormal, poisson, stream
from pdlab.workloads.replay import replay
from pdlab.workloads.traces import azure
from pdlab.workloads.workload import Item

if TYPE_CHECKING:
    from pdlab.bench.suites import Context

NAME = "simulator_error"
HELP = "the simulator's quantiles against the real engine's on the same workload; its speed and memory"

SIMULATES = True
HELD_OUT = (0.9, 0.6)
POLICIES = ("fcfs", "deadline", "sjf_aging")
HOUR = 19_366  # requests of the Azure conversation trace, which lasts 3,503 s
MANY = (10_000, 1_000_000)


def _compare(ctx: Context) -> None:
    with serving.Session(ctx) as session:
        session.learn(0.3 * ctx.left())
        capacity = session.capacities("chat_with_long")["chat_with_long"]
        seconds = ctx.left() / (len(HELD_OUT) * len(POLICIES))
        imitation = serving.Imitation.of(session)
        for load in HELD_OUT:
            # what drains after the last arrival takes its time too
            n = serving.requests_for(0.7 * seconds, load * capacity)
            workload = serving.mixed_load(session.scale, n, load * capacity, ctx.seed + 400)
            for policy in POLICIES:
                config = session.config.with_(policy=policy)
                real, simulated = session.real(config, workload), imitation.run(config, workload)
                record_differences(
                    ctx,
                    quantities_of(real),
                    simulated,
                    variant=policy,
                    workload=workload.name,
                    model=session.scale.model,
                    load=load,
                )


def _speed(ctx: Context, imitation: serving.Imitation) -> None:
    """The trace itself where its file is there, else as many requests like it; nothing but totals is kept."""
    workload = azure(trace_file()) if trace_file().is_file() else azure_conversation(HOUR, seed=ctx.seed)
    engine = imitation.engine(imitation.scale.config)
    outcome = replay(engine, workload, seed=ctx.seed)
    engine.close()
    settings = {"workload": lengths_from(), "steps": outcome.steps, "seconds": outcome.seconds}
    ctx.record.add(
        "speed", outcome.speed, "ratio", n=outcome.ended, settings=settings, workload="azure_conversation",
        model=imitation.scale.model,
    )  # fmt: skip
    ctx.say(f"  {outcome.seconds:.0f} s of {outcome.ended:,} requests in {outcome.wall_s:.1f} s: {outcome.speed:.0f} times")


def _memory(ctx: Context, imitation: serving.Imitation, n: int) -> None:
    """The most resident memory while n short requests pass, above what there was before them."""
    import psutil

    process, most = psutil.Process(), 0

    def watched() -> Iterator[Item]:
        nonlocal most
        lengths = lognormal(24, 0.7, 100), fixed(8)
        for i, item in enumerate(stream(n, poisson(400), *lengths, seed=ctx.seed)):
            if i % 1000 == 0:
                most = max(most, process.memory_info().rss)
            yield item

    before = process.memory_info().rss
    engine = imitation.engine(imitation.scale.config)
    outcome = replay(engine, watched(), seed=ctx.seed)
    engine.close()
    params = {"requests": n, "workload": "short_requests", "model": imitation.scale.model}
    ctx.record.add("peak_memory", most - before, "bytes", n=outcome.ended, params=params)
    ctx.say(f"  {outcome.complete:,} requests in {outcome.wall_s:.0f} s: {(most - before) / 1e6:.1f} MB at most")


def run(ctx: Context) -> None:
    if ctx.measures:
        _compare(ctx)
        return
    _offline.differences(ctx)
    imitation = serving.Imitation.known("nvidia-h200", "qwen3-8b")
    if ctx.left() > 0:
        _speed(ctx, imitation)
    for n in MANY:
        if ctx.left() > 0:
            _memory(ctx, imitation, n)
