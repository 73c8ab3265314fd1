"""How well a step's time is known before it runs: mean absolute percentage error on loads that nobody learned from.

The learning estimator sees some loads of the mixed workload on the real engine, and then prices every step of other loads
before it runs: `ours` learns no more, `ours_learning` goes on with every step that it has priced, as every engine's does, and
`roofline` has no data. What was learned is saved for this device, where the simulator and later engines find it, and all steps
beside it (costs.recorded_steps).

Without a GPU (`--only simulated`): the same on the steps that an H200 recorded, fitted to its training runs and judged on the
loads after them. What is judged was measured then, the predictions are made now: kind "simulated", see bench._offline.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pdlab.bench import _offline, serving
from pdlab.bench.records import snapshot, target_root
from pdlab.bench.serving_outcomes import Judge, record_prices
from pdlab.core.paths import checkout_dir, data_dir, home_dir
from pdlab.costs import recorded_steps
from pdlab.costs.calibration import save_for_device
from pdlab.costs.estimator import RooflineEstimator

if TYPE_CHECKING:
    from pdlab.bench.suites import Context

NAME = "estimator_error"
HELP = "error of the step-time estimator on held-out loads, learned and as a bare roofline"

SIMULATES = True
HELD_OUT = (0.9, 0.45, 0.7)


def judge_of(session: serving.Session) -> Judge:
    """What prices the steps of a held-out load: by the session's estimator as it is now."""
    return Judge.of(session.estimator, RooflineEstimator(session.model, session.ceilings, session.itemsize))


def _root(ctx: Context) -> Path:
    """data/ when recording, else beside this run's tables."""
    shipped = data_dir() if checkout_dir() is not None else home_dir()
    return shipped if target_root(True) in ctx.record.roots else target_root(False).parent


def save(ctx: Context, session: serving.Session) -> None:
    """Keeps what was learned for this device."""
    provenance = snapshot(ctx.seed, ctx.record.command, ctx.record.gpu_index)
    path = save_for_device(session.estimator, ctx.machine.slug, ctx.dtype, _root(ctx), provenance)
    ctx.say(f"  saved what was learned from {session.estimator.seen} steps to {path}")


def save_steps(ctx: Context, session: serving.Session) -> None:
    """Keeps the steps of training and of what was measured after it, beside what was learned."""
    model, due = session.model.name.removeprefix("random:"), session.config
    about = {
        "provenance": snapshot(ctx.seed, ctx.record.command, ctx.record.gpu_index), "model": model, "dtype": ctx.dtype,
        "padded": session.padded, "lengths": session.lengths, "runs": [about for about, _ in session.runs],
        "objectives": {"ttft_s": due.ttft_objective_s, "per_token_s": due.per_token_objective_s},
    }  # fmt: skip
    path = _root(ctx) / recorded_steps.steps_file(ctx.machine.slug, model, ctx.dtype)
    recorded_steps.write(path, about, {about["run"]: steps for about, steps in session.runs})
    ctx.say(f"  kept {sum(len(steps) for _, steps in session.runs)} steps of {len(session.runs)} runs in {path}")


def run(ctx: Context) -> None:
    if not ctx.measures:
        _offline.prices(ctx)
        return
    with serving.Session(ctx) as session:
        session.learn(0.45 * ctx.left())
        save(ctx, session)
        name = "chat_with_long"
        capacity = session.capacities(name)[name]
        seconds = max(0.0, ctx.left()) / len(HELD_OUT)
        for i, load in enumerate(HELD_OUT):
            judge, rate, seed = judge_of(session), load * capacity, ctx.seed + 300 + i
            n = serving.requests_for(seconds, rate)
            about = {"use": "held-out", "load": load, "rate": rate, "requests": n, "seed": seed}
            session.real(session.config, serving.mixed_load(session.scale, n, rate, seed, name), judge, seconds, keep=about)
            record_prices(ctx, judge, load=load, workload=name, model=session.scale.model)
        save_steps(ctx, session)
