"""Policies under mixed load: conversation-sized requests among which one in 200 brings a very long prompt.

Three policies run on the real engine at two loads; all of them are simulated from 30 to 110 % of capacity, three seeds
each, on the simulator that the same run calibrates. `load` is a share of the capacity of first come, first served, of the
engine that the row speaks of. Everybody has the same batching: prompts in chunks beside the decodes.

`article` stands for the article's scheduler with its ties broken (its own crashes at the first tie, see `article_crash`,
the milliseconds until then); what it never runs counts as unfinished. Every wait of the policies that bound it is held
against the bound: `waits_over_bound`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdlab.bench import serving
from pdlab.core.config import EngineConfig
from pdlab.core.errors import PolicyError
from pdlab.hardware.timing import summarize
from pdlab.workloads.replay import Outcome
from pdlab.workloads.workload import Workload

if TYPE_CHECKING:
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
MEASURED = ("fcfs", "deadline", "sjf_aging")
LOADS = (0.9, 0.6, 0.3, 0.75, 1.0, 1.1)  # the headline first, should the budget run out
SEEDS = (1, 2, 3)


def simulate(imitation: serving.Imitation, config: EngineConfig, n: int, rate: float, seed: int) -> Outcome:
    """One policy at one load; a policy that never ends is cut off at three times the time of the arrivals."""
    workload = serving.mixed_load(imitation.scale, n, rate, seed)
    return imitation.run(config, workload, until_s=3 * workload.duration_s + 1)


def ttft_without_long(imitation: serving.Imitation, n: int, rate: float, seed: int) -> float:
    """Seconds: P99 to the first token under `deadline` if the long prompts cost the others nothing.

    The long ones are one in 200 and late whatever is done, so of the others one in 200 may be later than P99: with the
    long prompts taken out of the same arrivals, that is P99.5 of the rest.
    """
    workload = serving.mixed_load(imitation.scale, n, rate, seed)
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


def _measure(ctx: Context, session: serving.Session, seconds: float) -> None:
    for load in LOADS[:2]:
        n = session.requests_for(seconds, load)
        for variant in MEASURED:
            params = {"load": load, "workload": "chat_with_long", "model": session.scale.model}
            if ctx.left() <= 0:
                ctx.record.skip("ttft", "ms", "the time budget ran out", variant=variant, params={**params, "quantile": 99})
                continue
            config = session.config.with_(policy=VARIANTS[variant])
            workload = serving.mixed_load(session.scale, n, load * session.capacity, SEEDS[0])
            outcome = session.real(config, workload)
            serving.record_outcomes(
                ctx, [outcome], session.estimator, config, variant=variant, kind="measured", settings={"requests": n}, **params
            )


def _simulate(ctx: Context, imitation: serving.Imitation, n: int) -> None:
    e = imitation.estimator()
    capacity = imitation.capacity(n // 2, 900)
    ctx.say(f"  simulated: capacity {capacity:.2f} requests/s, first token due in {imitation.scale.config.ttft_objective_s} s")
    with serving.workers(ctx.full) as submit:
        runs = {
            (load, variant): [
                submit(simulate, imitation, imitation.scale.config.with_(policy=policy), n, load * capacity, seed)
                for seed in SEEDS
            ]
            for load in (LOADS if ctx.full else LOADS[:1])
            for variant, policy in VARIANTS.items()
        }
        for (load, variant), futures in runs.items():
            params = {"load": load, "workload": "chat_with_long", "model": imitation.scale.model}
            if ctx.left() <= 0 and not all(f.done() for f in futures):
                ctx.record.skip("ttft", "ms", "the time budget ran out", variant=variant, params={**params, "quantile": 99})
                for f in futures:
                    f.cancel()
                continue
            outcomes = [f.result() for f in futures]
            config = imitation.scale.config.with_(policy=VARIANTS[variant])
            serving.record_outcomes(
                ctx, outcomes, e, config, variant=variant, kind="simulated", settings={"requests": n, "seeds": 3}, **params
            )
            p99 = sorted(o.ttft.quantile(0.99) for o in outcomes)[1]
            ctx.say(f"  simulated: {variant} at {load:.0%}: P99 to first token {1e3 * p99:.0f} ms")
    if ctx.left() > 0:
        floors = [1e3 * ttft_without_long(imitation, n, LOADS[0] * capacity, seed) for seed in SEEDS]
        ctx.record.add(
            "ttft_without_long", summarize(floors, "ms"), variant="deadline", kind="simulated", quantile=99, load=LOADS[0],
            workload="chat_with_long", model=imitation.scale.model,
        )  # fmt: skip
        ctx.say(f"  simulated: without the long prompts {sorted(floors)[1]:.0f} ms")
    crash = crash_after(imitation, imitation.scale.config, n, LOADS[0] * capacity)
    ctx.record.add(
        "article_crash", 1e3 * crash, "ms", variant="article", kind="simulated", load=LOADS[0], workload="chat_with_long",
        model=imitation.scale.model,
    ) if crash == crash else None  # fmt: skip


def run(ctx: Context) -> None:
    session = serving.Session(ctx)
    session.measure_capacity(400 if ctx.full else 60)
    session.train((0.5, 0.8), session.requests_for(0.05 * ctx.budget_s, 0.6))
    ctx.say(f"  capacity {session.capacity:.2f} requests/s, estimator error {session.estimator.error()}")
    share = 0.5 if ctx.full else 0.2  # of what is left, for the real runs
    _measure(ctx, session, share * ctx.left() / (2 * len(MEASURED)) / 1.3)
    imitation = serving.Imitation.of(session)
    del session
    _simulate(ctx, imitation, 8000 if ctx.full else 120)
