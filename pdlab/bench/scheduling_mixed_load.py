"""Policies under mixed load: chats among which one in 200 brings a very long prompt.

Two sizes of chats: `chat_with_long` has the Azure conversation trace's lengths (prompts of 1,155 tokens in the mean, one in a
hundred over 4,142), `short_chat_with_long` ShareGPT's (161). What a long prompt costs the others, an order can take away; what
the others' own prompts take, it cannot: `ttft_without_long` says how much that is.

Three policies run on the real engine at two loads; all of them are simulated from 30 to 110 % of capacity, several seeds
each, on the simulator that the same run calibrates, or that an earlier one did. `load` is a share of the rate at which first
come, first served admits from a queue that never empties. Everybody has the same batching: prompts in chunks beside decodes.

Every measured run is held-out data for two other tables, and is written there too: its steps are priced before they run
(`estimator_error`), and the same requests are simulated (`simulator_error`), when all runs are over. What scheduling costs the
host goes to `scheduling_host`, and every step, training's too, to the file that costs.recorded_steps describes.

`article` stands for the article's scheduler with its ties broken (its own crashes at the first tie, see `article_crash`,
the milliseconds until then); what it never runs counts as unfinished. Every wait of the policies that bound it is held
against the bound: `waits_over_bound`.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from pdlab.bench import scheduling_host, serving
from pdlab.bench.estimator_error import judge_of, save, save_steps
from pdlab.bench.memory_runs import recorder_for
from pdlab.bench.serving_outcomes import quantities_of, record_differences, record_outcomes, record_prices
from pdlab.core.config import EngineConfig
from pdlab.core.errors import PolicyError
from pdlab.hardware.timing import summarize
from pdlab.workloads.replay import Outcome
from pdlab.workloads.workload import Workload

if TYPE_CHECKING:
    from pdlab.bench.records import Recorder
    from pdlab.bench.suites import Context

NAME = "scheduling_mixed_load"
HELP = "time to first token, goodput and waits of every scheduling policy under mixed load"

VARIANTS = {
    "fcfs": "fcfs",
    "deadline": "deadline",
    "sjf_aging": "sjf_aging",
    "sjf": "sjf",
    "oracle": "oracle",
    "least_remaining": "least_remaining",
    "priority": "priority",
    "article": "article_no_ties",
}
SIMULATES = True
SIMULATED = ("nvidia-h200", "nvidia-a100-sxm4-80gb")  # devices, for who only simulates; one never recorded is predicted
MEASURED = ("fcfs", "deadline", "sjf_aging")
# of the time for real runs, by workload and load, and who runs: tails need more requests where load is high, and first come's
# queue takes half a minute to grow. What comes last is left out first where the time runs out
MEASURED_SHARES = {
    ("chat_with_long", 0.9): (0.66, MEASURED),
    ("short_chat_with_long", 0.9): (0.28, MEASURED),
    ("chat_with_long", 0.6): (0.06, MEASURED[:1]),
}
DRAIN_S = 6.0  # about what the last answers take after the last arrival
AFTERWARDS_S = 24.0  # about what capacities, the simulations of the measured runs and scheduling_host take beside them
LOADS = (0.9, 0.6, 0.3, 0.75, 1.0, 1.1)  # the headline first, should the budget run out
SEEDS = (201, 202, 203, 204, 205)  # none that a policy was tuned on
FEW_SEEDS = SEEDS[:2]  # away from the headline
SWEEPS = {"short_chat_with_long": LOADS[:1], "chat_with_long": LOADS}  # loads that are simulated


def simulate(imitation: serving.Imitation, config: EngineConfig, n: int, rate: float, seed: int, name: str) -> Outcome:
    """One policy at one load; a policy that never ends is cut off at three times the time of the arrivals."""
    workload = serving.mixed_load(imitation.scale, n, rate, seed, name)
    return imitation.run(config, workload, until_s=3 * workload.duration_s + 1)


def ttft_without_long(imitation: serving.Imitation, n: int, rate: float, seed: int, name: str) -> float:
    """Seconds: P99 to the first token under `deadline` if the long prompts cost the others nothing.

    The long ones are one in 200 and late whatever is done, so of the others one in 200 may be later than P99: with the
    long prompts taken out of the same arrivals, that is P99.5 of the rest.
    """
    workload = serving.mixed_load(imitation.scale, n, rate, seed, name)
    others = Workload(workload.name, (item for item in workload if item.kind != "long"), seed)
    return imitation.run(imitation.scale.config.with_(policy="deadline"), others).ttft.quantile(1 - serving.LONG_SHARE)


def crash_after(imitation: serving.Imitation, config: EngineConfig, n: int, rate: float) -> float:
    """Virtual seconds until the article's scheduler, ties and all, compares two requests; NaN if it never does."""
    engine = imitation.engine(config.with_(policy="article"))
    try:
        serving.replay(engine, serving.mixed_load(imitation.scale, n, rate, SEEDS[0]))
    except PolicyError:
        return engine.clock.now()
    finally:
        engine.close()
    return float("nan")


def measure(ctx: Context, session: serving.Session, seconds: float) -> None:
    """The same arrivals under each policy on the real engine, each run judged by what was learned before it."""
    done: list[tuple[EngineConfig, Workload, Outcome, dict[str, Any]]] = []
    capacities = session.capacities(*dict.fromkeys(name for name, _ in MEASURED_SHARES))
    seconds = min(seconds, ctx.left())
    for (name, load), (share, variants) in MEASURED_SHARES.items():
        each, rate = seconds * share / len(variants), load * capacities[name]
        n = serving.requests_for(max(0.5 * each, each - DRAIN_S), rate)
        workload = serving.mixed_load(session.scale, n, rate, SEEDS[0], name)
        for variant in variants:
            params: dict[str, Any] = {"load": load, "workload": workload.name, "model": session.scale.model}
            if ctx.left() <= 0:
                ctx.record.skip("ttft", "ms", "the time budget ran out", variant=variant, params={**params, "quantile": 99})
                continue
            config, judge = session.config.with_(policy=VARIANTS[variant]), judge_of(session)
            about = {"use": "held-out", "load": load, "rate": rate, "requests": n, "seed": SEEDS[0]}
            outcome = session.real(config, workload, judge, keep=about)
            record_outcomes(
                ctx.record, [outcome], session.estimator, config, variant=variant, kind="measured", settings={"requests": n},
                **params,
            )  # fmt: skip
            if variant == "fcfs":
                record_prices(ctx, judge, **params)
            done.append((config, workload, outcome, {"variant": variant, **params}))
    imitation = serving.Imitation.of(session)
    with serving.workers(ctx.full) as submit:
        futures = [submit(imitation.run, config, workload) for config, workload, _, _ in done]
        for (_, _, outcome, params), future in zip(done, futures, strict=True):
            record_differences(ctx, quantities_of(outcome), future.result(), **params)


def sweep(ctx: Context, record: Recorder, imitation: serving.Imitation, n: int) -> None:
    """Every policy at every load on the simulator; n requests a run. A device that is only predicted: the headline."""
    if imitation.kind == "predicted":
        _sweep(ctx, record, imitation, n, "chat_with_long", LOADS[:1])
        return
    for name, loads in SWEEPS.items():
        _sweep(ctx, record, imitation, n, name, loads if ctx.full else LOADS[:1])


def _sweep(ctx: Context, record: Recorder, imitation: serving.Imitation, n: int, name: str, loads: tuple[float, ...]) -> None:
    e, base = imitation.estimator(), imitation.scale.config
    capacity = imitation.capacity(serving.CAPACITY_REQUESTS if ctx.full else 60, 900, name)
    ctx.say(f"  {imitation.kind}, {name}: capacity {capacity:.2f} requests/s, first token due in {base.ttft_objective_s} s")
    common: dict[str, Any] = {"workload": name, "model": imitation.scale.model}
    with serving.workers(ctx.full) as submit:
        runs = {
            (load, variant): [
                submit(simulate, imitation, base.with_(policy=policy), n, load * capacity, seed, name)
                for seed in (SEEDS if load == LOADS[0] else FEW_SEEDS)
            ]
            for load in loads
            for variant, policy in VARIANTS.items()
        }
        alone = [submit(ttft_without_long, imitation, n, LOADS[0] * capacity, seed, name) for seed in SEEDS]
        for (load, variant), futures in runs.items():
            params = {"load": load, **common}
            if ctx.left() <= 0 and not all(f.done() for f in futures):
                record.skip("ttft", "ms", "the time budget ran out", variant=variant, params={**params, "quantile": 99})
                for f in futures:
                    f.cancel()
                continue
            outcomes = [f.result() for f in futures]
            settings = {"requests": n, "seeds": len(outcomes), "capacity": capacity, **imitation.calibration}
            config = base.with_(policy=VARIANTS[variant])
            record_outcomes(record, outcomes, e, config, variant=variant, kind=imitation.kind, settings=settings, **params)
            p99 = statistics.median(o.ttft.quantile(0.99) for o in outcomes)
            ctx.say(f"  {imitation.kind}: {variant} at {load:.0%}: P99 to first token {1e3 * p99:.0f} ms")
        if ctx.left() <= 0:
            for f in alone:
                f.cancel()
        elif alone:
            floors = summarize([1e3 * f.result() for f in alone], "ms")
            record.add(
                "ttft_without_long", floors, variant="deadline", kind=imitation.kind, quantile=99, load=LOADS[0], **common
            )
            ctx.say(f"  {imitation.kind}: without the long prompts {floors.median:.0f} ms")
    crash = crash_after(imitation, base, n, LOADS[0] * capacity)
    if crash == crash:
        record.add("article_crash", 1e3 * crash, "ms", variant="article", kind=imitation.kind, load=LOADS[0], **common)


def run(ctx: Context) -> None:
    n = 2500 if ctx.full else 120
    if ctx.measures:
        with serving.Session(ctx) as session:
            session.learn((0.1 if ctx.simulates else 0.17) * ctx.left())
            save(ctx, session)
            try:
                measure(ctx, session, 0.3 * ctx.left() if ctx.simulates else ctx.left() - AFTERWARDS_S)
            finally:
                save_steps(ctx, session)
            scheduling_host.record(ctx)
            imitation = serving.Imitation.of(session)
        if ctx.simulates:
            sweep(ctx, ctx.record, imitation, n)
        return
    for device in SIMULATED:
        with recorder_for(ctx, device) as record:
            sweep(ctx, record, serving.Imitation.known(device, "qwen3-8b"), n)
