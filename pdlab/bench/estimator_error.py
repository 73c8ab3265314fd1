"""How well a step's time is known before it runs: mean absolute percentage error on loads that nobody learned from.

The learning estimator sees some loads of the mixed workload on the real engine, then stops learning and prices every step
of two other loads; the roofline with no data prices the same steps. What was learned is saved for this device, where the
simulator and later engines find it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdlab.bench import serving
from pdlab.bench.records import target_root
from pdlab.core.paths import checkout_dir, data_dir, home_dir
from pdlab.costs.calibration import save_for_device
from pdlab.costs.estimator import RooflineEstimator
from pdlab.hardware.timing import summarize

if TYPE_CHECKING:
    from pdlab.bench.suites import Context

NAME = "estimator_error"
HELP = "error of the step-time estimator on held-out loads, learned and as a bare roofline"

TRAINING = (0.2, 0.5, 0.8, 1.05)
HELD_OUT = (0.35, 0.65, 0.9)


def run(ctx: Context) -> None:
    session = serving.Session(ctx)
    session.measure_capacity(300 if ctx.full else 60)
    seconds = 0.8 * ctx.left() / (len(TRAINING) + len(HELD_OUT))
    n = session.requests_for(seconds, 0.5)
    session.train(TRAINING, n)
    roofline = RooflineEstimator(session.model, session.ceilings, session.itemsize)
    for load in HELD_OUT:
        judge = serving.Judge(session.estimator, {"roofline": roofline})
        workload = serving.mixed_load(session.scale, n, load * session.capacity, ctx.seed + 300)
        session.real(session.config, workload, judge)
        for variant, errors in judge.errors.items():
            for metric, chosen in (
                ("mape", [e for _, e in errors]),
                ("mape_decode", [e for prefill, e in errors if not prefill]),
                ("mape_mixed", [e for prefill, e in errors if prefill]),
            ):
                if not chosen:
                    continue
                mean = 100 * sum(chosen) / len(chosen)
                spread = summarize([100 * e for e in chosen], "percent")
                ctx.record.add(
                    metric, mean, "percent", variant=variant, n=len(chosen), load=load, workload="chat_with_long",
                    model=session.scale.model, settings={"median": spread.median, "p90": spread.p90},
                )  # fmt: skip
            ctx.say(
                f"  {variant} at {load:.0%}: {100 * sum(e for _, e in errors) / len(errors):.2f} % over {len(errors)} steps"
            )
    recording = target_root(True) in ctx.record.roots
    shipped = data_dir() if checkout_dir() is not None else home_dir()
    root = shipped if recording else target_root(False).parent
    path = save_for_device(session.estimator, ctx.machine.slug, ctx.dtype, root)
    ctx.say(f"  saved what was learned from {session.estimator.seen} steps to {path}")
