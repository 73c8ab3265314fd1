"""What the three KV-memory suites share: closed loops of conversation-like requests, replayed on a model or in simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pdlab.allocators.fragmentation import average_waste
from pdlab.bench.records import Recorder
from pdlab.core.config import EngineConfig
from pdlab.core.plan import KVOp
from pdlab.engine.engine import Engine
from pdlab.hardware.timing import summarize
from pdlab.workloads.generators import CONVERSATION, all_at_once, fixed, lognormal, make
from pdlab.workloads.replay import Outcome, replay
from pdlab.workloads.workload import Workload

if TYPE_CHECKING:
    from pdlab.bench.suites import Context

LONGEST = 4096  # prompt + output; longer ones of the trace are cut, so that every model here takes them
PROMISED = 1024  # output tokens that the service lets every request ask for; the trace's 99th percentile is 601


def conversation(clients: int, n: int, seed: int) -> Workload:
    """n requests with the lengths of the Azure conversation trace; each client sends its next when its last has ended."""
    items = make("azure_conversation", n, all_at_once(), *CONVERSATION, seed=seed, longest=LONGEST, kind="conversation")
    return Workload("azure_conversation", items, seed, clients)


def small_talk(clients: int, n: int, seed: int) -> Workload:
    """The same in miniature, for a CPU and a tiny model."""
    lengths = lognormal(24, 0.7, 100), lognormal(10, 0.8, 40)
    return Workload("small_talk", make("small_talk", n, all_at_once(), *lengths, seed=seed), seed, clients)


def short_and_long(clients: int, n: int, seed: int) -> Workload:
    """Every other request a question with a one-word answer, the rest conversation; each asks for exactly what it needs."""
    short = make("short", n // 2, all_at_once(), lognormal(60, 0.5, 200), lognormal(4, 0.4, 8), seed=seed, kind="short")
    long = conversation(clients, n - n // 2, seed)
    mixed = [item for pair in zip(long, short, strict=False) for item in pair]
    return Workload("short_and_long", mixed, seed, clients)


def with_shared_prefixes(workload: Workload, groups: int, tokens: int) -> Workload:
    """Every request begins with one of `groups` equal prefixes of `tokens` tokens."""
    items = (
        replace(item, prompt_tokens=item.prompt_tokens + tokens, pieces=((i % groups, tokens),))
        for i, item in enumerate(workload)
    )
    return Workload(f"{workload.name}_shared_prefixes", items, workload.seed, workload.clients)


def equals(clients: int, prompt: int, answer: int) -> Workload:
    """As many equal requests as run at once: whatever the memory's layout, all schemes run the very same steps."""
    items = make("equal_requests", clients, all_at_once(), fixed(prompt), fixed(answer), seed=0)
    return Workload("equal_requests", items, 0, clients)


def shortened(workload: Workload, by: int) -> Workload:
    """The same requests with all lengths divided by `by`, for measuring in less time."""
    if by == 1:
        return workload
    items = (
        replace(item, prompt_tokens=max(1, item.prompt_tokens // by), max_tokens=max(1, item.max_tokens // by))
        for item in workload
    )
    return Workload(f"{workload.name}_by_{by}", items, workload.seed, workload.clients)


@contextmanager
def real_engine(loaded: Any, config: EngineConfig) -> Iterator[Engine]:
    """An engine on the loaded model, its decode graphs captured: the greedy ones, which is how made-up prompts go on."""
    from pdlab.llm import LLM

    with LLM(loaded, config) as llm:
        llm.engine.executor.capture_graphs(("greedy",))  # type: ignore[attr-defined]
        yield llm.engine


@contextmanager
def simulated_engine(model: str, config: EngineConfig) -> Iterator[Engine]:
    """An engine over an imitated device that takes every step by itself: a run of steps taken at once reserves ahead, which
    would count as waste."""
    from pdlab.workloads.replay import simulated_engine as coalescing

    e = coalescing(model, config)
    try:
        yield Engine(e.config, e.model, e.executor, e.estimator)
    finally:
        e.close()


def recorder_for(ctx: Context, device: str) -> Recorder:
    """Where numbers that speak of `device` go: the suite's own recorder for this machine, else one beside it."""
    if device == ctx.record.device:
        return ctx.record
    other = Recorder(ctx.record.experiment, device, seed=ctx.record.seed, command=ctx.record.command)
    other.roots, other.gpu_index, other.run_id = ctx.record.roots, None, ctx.record.run_id
    ctx.record.beside.append(other)
    return other


def watch_ops(engine: Engine) -> list[KVOp]:
    """A list that fills with every KV operation that later plans carry."""
    seen: list[KVOp] = []
    compactor = engine.scheduler.compactor
    take: Callable[[], tuple[KVOp, ...]] = compactor.take_ops

    def watched() -> tuple[KVOp, ...]:
        ops = take()
        seen.extend(ops)
        return ops

    compactor.take_ops = watched  # type: ignore[method-assign]
    return seen


def play(engine: Engine, workload: Workload, *, warm: int | Workload = 0) -> Outcome:
    """Replays the workload, after the first `warm` of its requests, or other ones, as a rehearsal that is not counted and
    leaves no prefix to be found."""
    if warm:
        replay(engine, workload.head(warm) if isinstance(warm, int) else warm, seed=1)
        engine.allocator.drop_prefixes()
    outcome = replay(engine, workload, keep=True)
    engine.allocator.check()
    return outcome


def report(
    record: Recorder, outcome: Outcome, *, variant: str, kind: str, params: dict[str, Any], settings: dict[str, Any]
) -> None:
    """latency, throughput, waste and preemptions of one replay."""
    shared: dict[str, Any] = {"variant": variant, "kind": kind, "settings": settings}
    for quantile in (50, 99):
        ms = outcome.end_to_end.quantile(quantile / 100) * 1e3
        record.add("latency", ms, "ms", n=outcome.end_to_end.n, params=params | {"quantile": quantile}, **shared)
    record.add("throughput", outcome.throughput, "req/s", n=outcome.complete, params=params, **shared)
    waste = average_waste(outcome.trace or ())
    record.add("waste_internal", waste.internal, "percent", n=outcome.steps, params=params, **shared)
    record.add("waste_external", waste.external, "percent", n=outcome.steps, params=params, **shared)
    record.add("preemptions", outcome.preemptions, "count", params=params, **shared)


def report_equal(
    record: Recorder, outcomes: Sequence[Outcome], *, variant: str, params: dict[str, Any], settings: dict[str, Any]
) -> None:
    """throughput, and the time of a step in which all of these requests decode, of several replays of equal requests."""
    steps = [
        1e3 * (row.t_end - row.t_start)
        for outcome in outcomes
        for row in outcome.trace or ()
        if not row.prefill_tokens and row.decode_count == params["concurrency"]
    ]
    shared: dict[str, Any] = {"variant": variant, "params": params, "settings": settings}
    record.add("throughput", summarize([o.throughput for o in outcomes], "req/s"), **shared)
    record.add("decode_step", summarize(steps, "ms"), **shared)
