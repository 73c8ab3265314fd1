"""How well a step's time is known before it runs: mean absolute percentage error on loads that nobody learned from.

The learning estimator sees some loads of the mixed workload on the real engine, then stops learning and prices every step
of other loads; the roofline with no data prices the same steps. What was learned is saved for this device, where the
simulator and later engines find it.

Without a GPU (`--only simulated`): the same on the steps that an H200 recorded, fitted to its training runs and judged on the
loads after them. What is judged was measured then, the predictions are made now: kind "simulated", see bench._offline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdlab.bench import _offline, serving
from pdlab.bench.records import snapshot, target_root
from pdlab.bench.serving_outcomes import Judge, record_prices
from pdlab.core.paths import checkout_dir, data_dir, home_dir
from pdlab.costs.calibration import save_for_device
from pdlab.costs.estimator import RooflineEstimator

if TYPE_CHECKING:
    from pdlab.bench.suites import Context

NAME = "estimator_error"
HELP = "error of the step-time estimator on held-out loads, learned and as a bare roofline"

SIMULATES = True
HELD_OUT = (0.9, 0.45, 0.7)


def judge_of(session: serving.Session) -> Judge:
    """What prices the steps of a held-out load: the session's estimator as it is now, and the roofline with no data."""
    return Judge(session.estimator, {"roofline": RooflineEstimator(session.model, session.ceilings, session.itemsize)})


def save(ctx: Context, session: serving.Session) -> None:
    """Keeps what was learned for this device: in data/ when recording, else beside this run's tables."""
    recording = target_root(True) in ctx.record.roots
    shipped = data_dir() if checkout_dir() is not None else home_dir()
    root = shipped if recording else target_root(False).parent
    provenance = snapshot(ctx.seed, ctx.record.command, ctx.record.gpu_index)
    path = save_for_device(session.estimator, ctx.machine.slug, ctx.dtype, root, provenance)
    ctx.say(f"  saved what was learned from {session.estimator.seen} steps to {path}")


def run(ctx: Context) -> None:
    if not ctx.measures:
        _offline.prices(ctx)
        return
    with serving.Session(ctx) as session:
        session.learn(0.45 * ctx.left())
        save(ctx, session)
        seconds = max(0.0, ctx.left()) / len(HELD_OUT)
        for i, load in enumerate(HELD_OUT):
            judge = judge_of(session)
            n = session.requests_for(seconds, load)
            workload = serving.mixed_load(session.scale, n, load * session.capacity, ctx.seed + 300 + i)
            session.real(session.config, workload, judge, seconds)
            record_prices(ctx, judge, load=load, workload=workload.name, model=session.scale.model)
