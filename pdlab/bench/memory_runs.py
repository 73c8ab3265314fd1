"""What the three KV-memory suites share: closed loops of conversation-like requests, replayed on a model or in simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pdlab.allocators.fragmentation import average_waste
from pdlab.bench.records import Recorder
from pdlab.core.config import EngineConfig
from pdlab.core.errors import CapacityError
from pdlab.core.paths import home_dir
from pdlab.core.plan import KVOp
from pdlab.engine.engine import Engine
from pdlab.hardware.timing import summarize
from pdlab.workloads.generators import CONVERSATION, all_at_once, fixed, lognormal, make
from pdlab.workloads.replay import Outcome, replay
from pdlab.workloads.traces import azure
from pdlab.workloads.workload import Item, Workload

if TYPE_CHECKING:
    from pdlab.bench.suites import Context

LONGEST = 4096  # prompt + output; longer ones of the trace are cut, so that every model here takes them
PROMISED = 1024  # output tokens that the service lets every request ask for; the trace's 99th percentile is 601


def trace_file() -> Path:
    """Where the Azure conversation trace is looked for; see workloads.traces for where to get it."""
    return home_dir() / "traces" / "AzureLLMInferenceTrace_conv.csv"


@lru_cache(maxsize=1)
def _recorded(path: Path) -> tuple[Item, ...]:
    return azure(path).items


def conversation(clients: int, n: int, seed: int) -> Workload:
    """n requests with the lengths of the Azure conversation trace; each client sends its next when its last has ended.

    Drawn from the trace itself where its file is there (`lengths_from`), else from the generator fitted to it.
    """
    items: Iterable[Item] = make("", n, all_at_once(), *CONVERSATION, seed=seed, longest=LONGEST, kind="conversation")
    if trace_file().is_file():
        recorded = _recorded(trace_file())
        drawn = np.random.default_rng(seed).choice(len(recorded), n, replace=n > len(recorded)).tolist()
        items = (_cut(recorded[i]) for i in drawn)
    return Workload("azure_conversation", items, seed, clients)


def _cut(item: Item) -> Item:
    """At most LONGEST tokens; the prompt gives way, as in the generator."""
    answer = min(item.max_tokens, LONGEST - 1)
    return replace(item, arrival_s=0.0, prompt_tokens=min(item.prompt_tokens, LONGEST - answer), max_tokens=answer)


def lengths_from() -> str:
    """What `conversation` draws from, for provenance."""
    return trace_file().name if trace_file().is_file() else "the generator fitted to the trace's moments"


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


def with_shared_prefixes(workload: Workload, groups: int, tokens: int, longest: int | None = None) -> Workload:
    """Every request begins with one of `groups` equal prefixes of `tokens` tokens; its own prompt gives way to `longest`."""

    def prompt(item: Item) -> int:
        whole = item.prompt_tokens + tokens
        return whole if longest is None else max(tokens, min(whole, longest - item.max_tokens))

    items = (replace(item, prompt_tokens=prompt(item), pieces=((i % groups, tokens),)) for i, item in enumerate(workload))
    return Workload(f"{workload.name}_shared_prefixes", items, workload.seed, workload.clients)


def equals(clients: int, prompt: int, answer: int) -> Workload:
    """As many equal requests as run at once: whatever the memory's layout, all schemes run the very same steps."""
    items = make("equal_requests", clients, all_at_once(), fixed(prompt), fixed(answer), seed=0)
    return Workload("equal_requests", items, 0, clients)


def every_shape(most: int) -> Iterator[Workload]:
    """Rehearsals, after which few kernels are left to compile: chunks of long prompts and short ones alone, and beside
    decodes, in batches up to `most` requests. A kernel may be made anew for a size of batch, of chunk, or of both."""
    for decodes in (0, *sorted({min(n, most) for n in (20, 100, 300)})):
        short = [Item(0.0, prompt_tokens=6, max_tokens=8 + i % 24) for i in range(decodes)]
        more = [Item(0.0, prompt_tokens=n, max_tokens=2) for n in (1900, 1900, 200, 20, 200)]
        yield Workload("every_shape", short + more, clients=decodes + 2 if decodes else 1)


def shortened(workload: Workload, by: int) -> Workload:
    """The same requests with all lengths divided by `by`."""
    items = (
        replace(item, prompt_tokens=max(1, item.prompt_tokens // by), max_tokens=max(1, item.max_tokens // by))
        for item in workload
    )
    return workload if by == 1 else Workload(f"{workload.name}_by_{by}", items, workload.seed, workload.clients)


@contextmanager
def real_engine(loaded: Any, config: EngineConfig) -> Iterator[Engine]:
    """An engine on the loaded model, its decode graphs captured: the greedy ones, which is how made-up prompts go on."""
    from pdlab.llm import LLM

    with LLM(loaded, config) as llm:
        llm.engine.executor.capture_graphs(("greedy",))  # type: ignore[attr-defined]
        yield llm.engine


def on_device(ctx: Context) -> dict[str, Any]:
    """Fields of EngineConfig for a model that runs here. On a GPU the host plans a step while the one before runs."""
    return {"device": ctx.device, "dtype": ctx.dtype, "steps_in_flight": 2 if ctx.device.startswith("cuda") else 1}


class Part:
    """An executor of whose KV memory the first `slots` are used; it belongs to somebody else, who closes it."""

    def __init__(self, executor: Any, slots: int) -> None:
        self._executor, self._slots = executor, slots

    def capacity(self) -> int:
        return self._slots

    def close(self) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)


@contextmanager
def engines_over(loaded: Any, owners: Sequence[EngineConfig]) -> Iterator[Callable[[EngineConfig], Engine]]:
    """Makes engines of any allocator over one executor for each kind of memory in `owners`, whose graphs are captured
    once. One engine runs at a time; none may ask for more rows, tokens a step or memory than its owner has."""
    from pdlab.engine.executor import EXTENT_ALLOCATORS

    with ExitStack() as stack:
        made = {config.kv_allocator in EXTENT_ALLOCATORS: stack.enter_context(real_engine(loaded, config)) for config in owners}
        for owner in made.values():  # some seconds now rather than in the middle of a load
            owner.executor.capture_prefill_graphs()  # type: ignore[attr-defined]

        def engine(config: EngineConfig) -> Engine:
            owner = made[config.kv_allocator in EXTENT_ALLOCATORS]
            there = owner.executor.capacity()
            if (slots := config.kv_capacity_tokens or there) > there:
                raise CapacityError(f"a load wants {slots:,} slots of {there:,}", "run it on a device with more memory")
            owner.executor.reset()
            return Engine(config, owner.model, Part(owner.executor, slots), owner.estimator)

        yield engine


@dataclass(frozen=True)
class Pace:
    """How fast a model is, as far as it matters for saying how long a load will take. Seconds."""

    prompt_token: float
    step: float  # of decodes that hold little
    kv_token: float  # more for each token that a step's decodes hold

    @classmethod
    def of(cls, outcome: Outcome, kv_token: float) -> Pace:
        rows = [(r.t_end - r.t_start, r.prefill_tokens) for r in outcome.trace or ()]
        most = max(n for _, n in rows)
        prompts = [seconds / n for seconds, n in rows if 2 * n > most]  # smaller chunks cost what the step's decodes do
        steps = [seconds for seconds, n in rows if not n]
        return cls(float(np.median(prompts)), float(np.median(steps)), kv_token)  # medians: a kernel may still be compiled

    def seconds(self, workload: Workload) -> float:
        """Of a closed loop in which all clients begin at once and few send a second request: the prompts, then steps in which
        ever fewer answers are still growing."""
        prompts, answers = np.array([(i.prompt_tokens, i.max_tokens) for i in workload]).T
        growing = (answers[:, None] > np.arange(answers.max())).sum(0) * (workload.clients or len(answers)) / len(answers)
        step = np.maximum(self.step, growing * self.prompt_token) + growing * prompts.mean() * self.kv_token
        return float(prompts.sum() * self.prompt_token + 1.1 * step.sum())


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
    record: Recorder,
    outcome: Outcome,
    *,
    variant: str,
    kind: str,
    params: dict[str, Any],
    settings: dict[str, Any],
    waste: bool = True,
) -> None:
    """latency, throughput, preemptions, unfinished (requests that ended otherwise than complete) and, where lengths are as
    they should be, waste of one replay."""
    shared: dict[str, Any] = {"variant": variant, "kind": kind, "settings": settings}
    for quantile in (50, 99):
        ms = outcome.end_to_end.quantile(quantile / 100) * 1e3
        record.add("latency", ms, "ms", n=outcome.end_to_end.n, params=params | {"quantile": quantile}, **shared)
    record.add("throughput", outcome.throughput, "req/s", n=outcome.complete, params=params, **shared)
    record.add("preemptions", outcome.preemptions, "count", params=params, **shared)
    record.add("unfinished", outcome.ended - outcome.complete, "count", n=outcome.ended, params=params, **shared)
    if waste:
        found = average_waste(outcome.trace or ())
        record.add("waste_internal", found.internal, "percent", n=outcome.steps, params=params, **shared)
        record.add("waste_external", found.external, "percent", n=outcome.steps, params=params, **shared)


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
