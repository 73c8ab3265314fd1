"""How far the simulator may be trusted: the same workload on the real engine and simulated, quantile by quantile.

The simulator is calibrated by other loads and seeds of the same run, never by the workload it is judged on. An error is
100 · (simulated - real) / real; it is a measured number. `speed` is simulated seconds a real second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdlab.bench import serving
from pdlab.bench.serving_outcomes import record_differences

if TYPE_CHECKING:
    from pdlab.bench.suites import Context

NAME = "simulator_error"
HELP = "the simulator's quantiles against the real engine's on the same workload"

HELD_OUT = (0.9, 0.6)
POLICIES = ("fcfs", "deadline", "sjf_aging")


def run(ctx: Context) -> None:
    with serving.Session(ctx) as session:
        session.learn(0.3 * ctx.left())
        seconds = ctx.left() / (len(HELD_OUT) * len(POLICIES))
        imitation = serving.Imitation.of(session)
        for load in HELD_OUT:
            # what drains after the last arrival takes its time too
            n = session.requests_for(0.7 * seconds, load)
            workload = serving.mixed_load(session.scale, n, load * session.capacity, ctx.seed + 400)
            for policy in POLICIES:
                config = session.config.with_(policy=policy)
                real, simulated = session.real(config, workload), imitation.run(config, workload)
                record_differences(
                    ctx, real, simulated, variant=policy, workload=workload.name, model=session.scale.model, load=load
                )
