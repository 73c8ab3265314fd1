"""Ways of forming batches, by how much prompt lengths differ: throughput, and what padding costs.

All requests are there at once, so the order of arrival decides nothing but who shares a static batch. `workload` is
`spread_<sigma>`: prompts and outputs are lognormal around 256 and 64 tokens with that sigma. Padding is counted in tokens
(rows that were computed and thrown away) and in FLOPs, each as a share of all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pdlab.bench import serving
from pdlab.bench.memory_runs import recorder_for
from pdlab.bench.serving_outcomes import record_outcomes
from pdlab.core.config import EngineConfig
from pdlab.core.plan import PlanShape
from pdlab.costs.calibration import cost_model
from pdlab.costs.formulas import step_flops
from pdlab.models.catalogue import config_of
from pdlab.models.config import ModelConfig
from pdlab.scheduler.static_batching import padding_flops
from pdlab.workloads.generators import all_at_once, lognormal, make
from pdlab.workloads.replay import Outcome, replay, simulated_engine
from pdlab.workloads.workload import Workload

if TYPE_CHECKING:
    from pdlab.bench.records import Recorder
    from pdlab.bench.suites import Context

NAME = "batching"
HELP = "one at a time, static, the article's sorted batches, continuous: throughput and padding by length spread"

SIMULATES = True
SIMULATED = ("nvidia-h200",)  # devices, for who only simulates
MODEL, REQUESTS, BUDGET = "llama-1b", 192, 8192  # on a GPU
SPREADS = (1.0, 0.0, 0.5, 1.5)
# what the claim compares, then what takes least time: the rest is left out first where the time runs out
VARIANTS = ("static", "article", "continuous", "continuous_chunked", "article_mended", "one_at_a_time")


def burst(n: int, spread: float, shrink: int, seed: int) -> Workload:
    """n requests at once; the model's context cuts nothing off, since lengths end at eight times the median."""
    prompt, output = 256 // shrink, 64 // shrink
    lengths = lognormal(prompt, spread, 8 * prompt), lognormal(output, spread, 8 * output)
    return make(f"spread_{spread:g}", n, all_at_once(), *lengths, seed=seed)


def padding_shares(model: ModelConfig, outcome: Outcome) -> tuple[float, float]:
    """Percent of the rows, and of the FLOPs, that were padding."""
    flops = padded = 0.0
    for row in outcome.trace or []:
        chunks = ((row.prefill_tokens, row.prefill_context),) if row.prefill_tokens else ()
        shape = PlanShape(chunks, row.decode_count, row.kv_tokens, row.pad_tokens, row.decode_count + len(chunks))
        flops += step_flops(model, shape).total
        padded += padding_flops(model, shape)
    return 100 * outcome.pad_tokens / max(1, outcome.step_tokens), 100 * padded / max(1.0, flops)


def config_for(base: EngineConfig, batching: str, budget: int) -> EngineConfig:
    return base.with_(batching=batching, policy="fcfs", max_batch_tokens=budget, static_batch_tokens=budget)


def run(ctx: Context) -> None:
    if not ctx.measures:
        for device in SIMULATED:
            with recorder_for(ctx, device) as record:
                _simulate(ctx, record, device)
        return
    model = MODEL if ctx.full else "llama-tiny"
    shrink, n = (1, REQUESTS) if ctx.full else (16, 24)
    scale, budget = serving.scale_of(ctx), BUDGET // shrink
    config = scale.config.with_(max_batch_tokens=budget, static_batch_tokens=budget)
    with serving.Session(
        ctx, serving.Scale(model, scale.long_tokens, shrink, config), batching="static", capture=False
    ) as session:
        session.warm()
        _measure(ctx, session, n, budget)


def _count(batching: str, n: int) -> int:
    """One at a time needs no crowd to show its rate."""
    return max(4, n // 8) if batching == "one_at_a_time" else n


def _record(
    record: Recorder,
    model: ModelConfig,
    outcome: Outcome,
    estimator: Any,
    config: EngineConfig,
    kind: str,
    params: dict[str, Any],
) -> None:
    settings = {"requests": outcome.ended, "budget": config.static_batch_tokens}
    record_outcomes(record, [outcome], estimator, config, variant=config.batching, kind=kind, settings=settings, **params)
    tokens, flops = padding_shares(model, outcome)
    record.add("padding_tokens", tokens, "percent", variant=config.batching, kind=kind, params=params)
    record.add("padding_flops", flops, "percent", variant=config.batching, kind=kind, params=params)


def _simulate(ctx: Context, record: Recorder, device: str) -> None:
    base = EngineConfig(simulated_device=device, seed=ctx.seed)
    kind = "simulated" if cost_model(config_of(MODEL), device).source == "recorded" else "predicted"
    for spread in SPREADS:
        for batching in VARIANTS:
            config = config_for(base, batching, BUDGET)
            engine = simulated_engine(MODEL, config)
            outcome = replay(engine, burst(_count(batching, REQUESTS), spread, 1, ctx.seed), keep=True)
            engine.close()
            params = {"load": 1.0, "workload": f"spread_{spread:g}", "model": MODEL}
            _record(record, engine.model, outcome, engine.estimator, config, kind, params)
            ctx.say(f"  {kind}: {batching}, spread {spread:g}: {outcome.throughput:.1f} requests/s")


def _measure(ctx: Context, session: serving.Session, n: int, budget: int) -> None:
    model, shrink = session.scale.model, session.scale.shrink
    measured = 0
    for warm in (True, False):
        for spread in SPREADS[:1] if warm else SPREADS:
            for batching in VARIANTS:
                params = {"load": 1.0, "workload": f"spread_{spread:g}", "model": model}
                if ctx.left() <= 0 and (warm or measured):  # one case at least, however slow the machine
                    if not warm:
                        ctx.record.skip("throughput", "req/s", "the time budget ran out", variant=batching, params=params)
                    continue
                config = config_for(session.config, batching, budget)
                outcome = session.real(config, burst(_count(batching, n // 8 if warm else n), spread, shrink, ctx.seed))
                if not warm:
                    _record(ctx.record, session.model, outcome, session.estimator, config, "measured", params)
                    measured += 1
