"""How far the simulator may be trusted: the same workload on the real engine and simulated, quantile by quantile.

The simulator is calibrated by other loads and seeds of the same run, never by the workload it is judged on. An error is
100 · (simulated - real) / real; it is a measured number. `speed` is simulated seconds a real second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdlab.bench import serving

if TYPE_CHECKING:
    from pdlab.bench.suites import Context

NAME = "simulator_error"
HELP = "the simulator's quantiles against the real engine's on the same workload"

TRAINING = (0.3, 0.7, 1.0)
HELD_OUT = (0.5, 0.85)
POLICIES = ("fcfs", "sjf_aging")


def run(ctx: Context) -> None:
    session = serving.Session(ctx)
    session.measure_capacity(300 if ctx.full else 60)
    seconds = 0.8 * ctx.left() / (len(TRAINING) + len(HELD_OUT) * len(POLICIES))
    session.train(TRAINING, session.requests_for(seconds, 0.6))
    imitation = serving.Imitation.of(session)
    for load in HELD_OUT:
        n = session.requests_for(seconds, load)
        for policy in POLICIES:
            config = session.config.with_(policy=policy)
            workload = serving.mixed_load(session.scale, n, load * session.capacity, ctx.seed + 400)
            real, simulated = session.real(config, workload), imitation.run(config, workload)
            params = {"workload": "chat_with_long", "model": session.scale.model, "load": load}
            pairs = {("throughput", 50): (simulated.throughput, real.throughput)}
            for quantity in ("ttft", "per_token", "end_to_end"):
                for q in serving.QUANTILES:
                    pairs[quantity, q] = tuple(getattr(o, quantity).quantile(q / 100) for o in (simulated, real))
            for (quantity, q), (ours, truth) in pairs.items():
                error = 100 * (ours - truth) / truth
                ctx.record.add(
                    "error", error, "percent", variant=policy, n=n, params={**params, "quantity": quantity, "quantile": q}
                )
                ctx.say(f"  {policy} at {load:.0%}, {quantity} P{q}: {ours:.4g} simulated, {truth:.4g} real, {error:+.1f} %")
            ctx.record.add("speed", simulated.speed, "ratio", variant=policy, n=n, params=params)
