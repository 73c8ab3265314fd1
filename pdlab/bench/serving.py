"""What the serving suites share: one model under load, on the real engine and on the simulator calibrated by it.

A `Session` loads the model, warms up every shape of step, and lets the learning estimator see a few loads. The simulator
that this calibrates says what the capacity is; then the same workload runs on either engine.
"""

from __future__ import annotations

import concurrent.futures
import gc
import json
import math
import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from pdlab.bench import _training
from pdlab.bench._training import ladder, prompt_ladder, warm_up
from pdlab.bench.memory_runs import Part, real_engine
from pdlab.core.config import EngineConfig
from pdlab.core.paths import find_data
from pdlab.core.plan import PlanShape
from pdlab.core.trace import TraceRow
from pdlab.costs.calibration import data_sheet_cost, estimator_file
from pdlab.costs.formulas import itemsize_of, kv_bytes, weights_bytes
from pdlab.costs.interface import Estimator
from pdlab.costs.learned import LearnedEstimator
from pdlab.costs.roofline import Ceilings, ceilings_for
from pdlab.engine.coalescing import CoalescingEngine
from pdlab.engine.engine import Engine, Flight
from pdlab.engine.interface import StepResult
from pdlab.engine.simulated import SimulatedExecutor, make_simulated, simulated_dtype
from pdlab.models.catalogue import config_of
from pdlab.workloads import generators
from pdlab.workloads.replay import Outcome, replay
from pdlab.workloads.workload import Workload

if TYPE_CHECKING:
    from pdlab.bench.suites import Context
    from pdlab.models.loading import Loaded

LONG_SHARE = 0.005
CHATS = {"chat_with_long": generators.CONVERSATION, "short_chat_with_long": generators.SHORT_CHAT}
CAPACITY_REQUESTS = 2000  # of the saturated run that says what capacity is
OBJECTIVE_STEPS = 8  # full steps of prompts in which a first token is due; chosen on seeds 301 to 303, see docs/scheduling.md


@dataclass(frozen=True)
class Scale:
    """The model of a machine and the workload in its size: `shrink` divides the conversation's lengths."""

    model: str
    long_tokens: int
    shrink: int
    config: EngineConfig


def serving_config(**changes: Any) -> EngineConfig:
    """What the service under load is set to."""
    return EngineConfig(estimator="learned", max_batch_tokens=2048, max_batch_requests=512, patience_s=60.0).with_(**changes)


def scale_of(ctx: Context) -> Scale:
    """qwen3-8b where it fits, else llama-1b; a tiny model and lengths a sixteenth on a CPU."""
    base = serving_config(device=ctx.device, dtype=ctx.dtype)
    if not ctx.machine.is_gpu:
        small = base.with_(max_batch_tokens=128, max_batch_requests=16, kv_capacity_tokens=16384)
        return Scale("llama-tiny", 2048, 16, small)
    for model in ("qwen3-8b", "llama-1b"):
        config, size = config_of(model), itemsize_of(ctx.dtype)
        if weights_bytes(config, size) + kv_bytes(config, 200_000, size) < 0.8 * ctx.machine.memory_bytes:
            return Scale(model, 32_768, 1, base)
    return Scale("llama-1b", 8192, 4, base)


def mixed_load(scale: Scale, n: int, rate: float, seed: int, name: str = "chat_with_long") -> Workload:
    """Chats, exactly one in 200 with a very long prompt, one in five of the upper class. `name` says which chats (CHATS)."""
    w = generators.chat_with_long(
        n, rate=rate, long_share=LONG_SHARE, long_tokens=scale.long_tokens, seed=seed, chats=CHATS[name]
    )

    def sized(i: int, item: Any) -> Any:
        if item.kind == "long":
            return replace(item, priority=0, max_tokens=max(1, item.max_tokens // scale.shrink))
        p, o = max(1, item.prompt_tokens // scale.shrink), max(1, item.max_tokens // scale.shrink)
        return replace(item, prompt_tokens=p, max_tokens=o, priority=int(i % 5 == 0))

    return Workload(name, (sized(i, item) for i, item in enumerate(w)), seed)


def with_objectives(config: EngineConfig, step_seconds: Callable[[PlanShape], float]) -> EngineConfig:
    """Objectives in the device's own measure: a first token within OBJECTIVE_STEPS full steps of prompts, later ones in two."""
    step = step_seconds(PlanShape(((config.max_batch_tokens, 0),), sampled=1))
    return config.with_(ttft_objective_s=round(OBJECTIVE_STEPS * step, 4), per_token_objective_s=round(2 * step, 4))


def saturated_rate(outcome: Outcome) -> float:
    """Requests a second that were admitted while others waited, when all arrived at once: without the ramp at the beginning,
    when rows and memory fill up, and without the drain at the end, when nobody waits any more."""
    admitted = sorted(r.admitted_s for r in outcome.requests or [] if r.admitted_s is not None)
    first = len(admitted) // 3
    seconds = admitted[-1] - admitted[first]
    return (len(admitted) - 1 - first) / seconds if seconds > 0 else math.inf


class StepKeeper(Engine):
    """An engine that keeps what its estimator is told of every step."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.steps: list[tuple[TraceRow, PlanShape, float]] = []

    def record(self, flight: Flight, result: StepResult, commit_s: float) -> None:
        super().record(flight, result, commit_s)
        self.steps.append((self.trace[-1], flight.plan.shape, flight.launch_s))


class Session:
    """A loaded model on one executor, and what its estimator has learned of it. `ctx.say` reports progress. `runs`: of training
    and of what was measured, what costs.recorded_steps keeps of a run, and its steps.

    `batching`: the one that needs the largest buffers of those that will run here. `capture`: graphs of steps with prompts are
    captured now, some seconds, and not among the first requests. `loaded`: the scale's model, if it is there already.
    """

    def __init__(
        self, ctx: Context, scale: Scale | None = None, *, batching: str = "continuous_chunked", capture: bool = True,
        loaded: Loaded | None = None,
    ) -> None:  # fmt: skip
        from pdlab.models.loading import load

        self.ctx, self.scale = ctx, scale or scale_of(ctx)
        self.loaded = loaded or load(f"random:{self.scale.model}", device=ctx.device, dtype=ctx.dtype, seed=ctx.seed)
        self.model = self.loaded.config
        self.ceilings = ceilings_for(ctx.machine.slug, ctx.dtype)
        self.itemsize = itemsize_of(ctx.dtype)
        self.config = self.scale.config
        self._stack = ExitStack()
        owner = self._stack.enter_context(real_engine(self.loaded, self.config.with_(batching=batching)))
        self._executor = cast(Any, owner.executor)
        self.slots, self.padded = owner.executor.capacity(), self._executor.prefill_graphs is not None
        self.estimator = self.fresh_estimator()
        self.runs: list[tuple[dict[str, Any], list[tuple[TraceRow, PlanShape, float]]]] = []
        self.lengths: dict[str, list[int]] = {}  # of outputs, as training showed them
        if capture:
            self.capture()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def fresh_estimator(self) -> LearnedEstimator:
        """One that knows the data sheet, or the measured ceilings, and nothing else."""
        return LearnedEstimator(
            self.model, self.ceilings, self.itemsize, self.scale.config.max_batch_tokens, padded=self.padded
        )

    def capture(self, wanted: Callable[[Any], bool] = lambda shape: True) -> None:
        """Captures graphs of steps with prompts beforehand, those whose shape (engine.prefill_graphs.MixedShape) is wanted."""
        if seconds := self._executor.capture_prefill_graphs(wanted):
            self.ctx.say(f"  captured {len(self._executor.prefill_graphs)} graphs of steps with prompts in {seconds:.1f} s")

    def real(
        self, config: EngineConfig, workload: Workload, estimator: Estimator | None = None, seconds: float | None = None,
        keep: dict[str, Any] | None = None,
    ) -> Outcome:  # fmt: skip
        """The workload on the real engine; `estimator` (default: the session's, which goes on learning) prices its steps.
        After `seconds` what is left ends as aborted. `keep`: the run's steps are kept, with this said of them."""
        self._executor.reset()
        engine = StepKeeper(config, self.model, Part(self._executor, self.slots), estimator or self.estimator)
        gc.collect()
        gc.disable()  # a collection among the many rows that are kept here stops the engine for tens of milliseconds
        try:
            until = None if seconds is None else engine.clock.now() + seconds
            outcome = replay(engine, workload, keep=True, seed=self.ctx.seed, until_s=until)
        finally:
            gc.enable()
            engine.close()
        if keep is not None:
            about = {"run": len(self.runs) + 1, "workload": workload.name, "policy": config.policy, **keep}
            self.runs.append((about, engine.steps))
        self.ctx.say(
            f"  {config.policy}, {config.batching}: {outcome.ended} requests in {outcome.seconds:.1f} s, "
            f"P99 to first token {1e3 * outcome.ttft.quantile(0.99):.0f} ms"
        )
        return outcome

    def warm(self, config: EngineConfig | None = None) -> None:
        """Meets every kind of step once, with an estimator that is thrown away: compiling teaches nothing."""
        config = config or self.config
        for workload in warm_up(config, self._longest(config)):
            self.real(config, workload, self.fresh_estimator())

    def _longest(self, config: EngineConfig) -> int:
        """Tokens of the longest request that fits."""
        return min(self.slots, config.max_model_len or self.model.max_context)

    def learn(self, seconds: float) -> None:
        """Lets the estimator see fixed shapes and then, for about so many seconds, loads, with seeds that no measurement uses;
        fits it to all of that at once, and sets the objectives by what was learned."""
        self.warm()
        kept: list[tuple[PlanShape, float]] = []
        self.estimator.kept = kept
        training: dict[str, Any] = {"use": "training"}
        deep = _training.deep_prompt(self.config, min(self.scale.long_tokens, self._longest(self.config) - 32))
        for workload in (ladder(self.config), prompt_ladder(self.config), _training.small_prompts(self.config), deep):
            self.real(self.config, workload, keep=training)
        self.real(self.config.with_(policy="deadline", ttft_objective_s=0.1), deep, keep=training)  # it cannot be in time
        admitted: dict[str, float] = {}
        for i, part in enumerate(_training.LOADS):
            rate = 1e6 if part.load is None else part.load * admitted[part.chats]
            n = 1000 if part.load is None else max(8, round(rate * part.share * seconds))
            workload = mixed_load(self.scale, n, rate, self.ctx.seed + 100 + i, part.chats)
            outcome = self.real(self.config, workload, seconds=part.share * seconds, keep=training)
            if part.load is None:
                admitted[part.chats] = saturated_rate(outcome)
        self.estimator.kept = None
        self.estimator.refit(kept)
        self.lengths = self.estimator.lengths.to_dict()
        self.config = with_objectives(self.config, self.estimator.lasting_seconds)
        self.ctx.say(f"  learned from {len(kept)} steps, error before the fit {self.estimator.error()}")

    def capacities(self, *names: str, n: int = CAPACITY_REQUESTS) -> dict[str, float]:
        """Requests/s of each kind of chats, first come first served: the simulator's, for on the engine itself a saturated run
        that is mostly neither ramp nor drain takes minutes. `n`: requests of that run on a GPU's scale."""
        n, one = n if self.ctx.full else 60, Imitation.of(self)
        with workers(self.ctx.full and len(names) > 1) as submit:
            found = {name: submit(one.capacity, n, self.ctx.seed + 900, name) for name in names}
            capacities = {name: future.result() for name, future in found.items()}
        self.ctx.say(f"  capacity, requests/s: {capacities}")
        return capacities


def requests_for(seconds: float, rate: float) -> int:
    """How many requests arrive in so many seconds; at least enough for a tail."""
    return max(40, round(seconds * rate))


@dataclass(frozen=True)
class Imitation:
    """All that a simulator process needs: picklable."""

    scale: Scale
    state: dict[str, Any] | None  # of a LearnedEstimator; None: the data sheet prices its steps
    ceilings: Ceilings
    slots: int
    dtype: str
    device: str

    @classmethod
    def of(cls, session: Session) -> Imitation:
        e = session.estimator
        scale = replace(session.scale, config=session.config)
        device, dtype = session.ctx.machine.slug, session.ctx.dtype
        return cls(scale, e.state(), session.ceilings, session.slots, dtype, device)

    @classmethod
    def known(cls, device: str, model: str, **settings: Any) -> Imitation:
        """Of a device that is not here: by the estimator saved for it, else by its data sheet. For conversation-sized load."""
        shape = config_of(model)
        base = serving_config().with_(executor="simulated", simulated_device=device, **settings)
        executor = make_simulated(base, shape)
        dtype = simulated_dtype(base)
        ceilings = ceilings_for(device, dtype)
        path = find_data(estimator_file(device, shape.name.removeprefix("random:"), dtype))
        state = json.loads(path.read_text(encoding="utf-8")) if path is not None else None
        config = with_objectives(base, executor.step_seconds)
        return cls(Scale(model, 32_768, 1, config), state, ceilings, executor.capacity(), dtype, device)

    @property
    def kind(self) -> str:
        """What its numbers are: simulated, by step times that were recorded, or predicted."""
        return "predicted" if self.state is None else "simulated"

    @property
    def calibration(self) -> dict[str, Any]:
        """Where its step times come from, for provenance."""
        if self.state is None:
            return {"calibration": "data sheet"}
        source = self.state.get("provenance", {})
        return {"calibration": {name: source[name] for name in ("time_utc", "commit", "note") if name in source} or "this run"}

    def estimator(self) -> LearnedEstimator:
        """A copy of what had been learned."""
        e = LearnedEstimator(
            config_of(self.scale.model), self.ceilings, itemsize_of(self.dtype), self.scale.config.max_batch_tokens
        )
        if self.state is not None:
            e.restore(self.state)
        return e

    def engine(self, config: EngineConfig) -> CoalescingEngine:
        asked, frozen = self.estimator(), self.estimator()
        asked.spare_the_host()
        model = frozen.model
        cost = data_sheet_cost(model, self.device, self.dtype) if self.state is None else frozen.device_seconds
        executor = SimulatedExecutor(
            model, cost, self.slots, steps_in_flight=config.steps_in_flight, host=frozen.host, calibration=self.kind
        )
        return CoalescingEngine(config.with_(executor="simulated"), model, executor, asked)

    def run(self, config: EngineConfig, workload: Workload, until_s: float | None = None) -> Outcome:
        engine = self.engine(config)
        try:
            outcome = replay(engine, workload, keep=True, seed=workload.seed or 0, until_s=until_s)
        finally:
            engine.close()
        outcome.trace = None  # large, and nobody asks
        return outcome

    def capacity(self, n: int, seed: int, name: str = "chat_with_long") -> float:
        """Requests a second, first come first served, of a queue that never empties."""
        return saturated_rate(self.run(self.scale.config, mixed_load(self.scale, n, 1e6, seed, name)))


@contextmanager
def workers(parallel: bool, most: int | None = None) -> Iterator[Callable[..., concurrent.futures.Future[Any]]]:
    """`submit(function, *args)` over fresh processes (never forks: the parent may hold a CUDA context), or right here. `most`:
    of these processes; by default one fewer than there are cores."""
    if not parallel:

        def here(function: Callable[..., Any], *args: Any) -> concurrent.futures.Future[Any]:
            future: concurrent.futures.Future[Any] = concurrent.futures.Future()
            future.set_result(function(*args))
            return future

        yield here
        return
    count = most or max(1, (os.cpu_count() or 2) - 1)
    pool = concurrent.futures.ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"))
    try:
        yield pool.submit
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
