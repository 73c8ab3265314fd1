"""Judging estimators and simulator on steps that a device recorded under load: on any CPU, and again whenever either changes.

The times are the device's; predictions and imitations are made here, from nothing but the recording's training runs, which
came before the held-out ones and have other seeds. What comes of it has the kind "simulated", beside what the recording session
itself said of its own estimator and simulator ("measured"), and its settings name the recording.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pdlab.bench import serving
from pdlab.bench.memory_runs import recorder_for
from pdlab.bench.serving_outcomes import QUANTILES, Judge, record_differences, record_prices
from pdlab.costs import recorded_steps, tables
from pdlab.costs.estimator import RooflineEstimator
from pdlab.costs.formulas import itemsize_of
from pdlab.costs.learned import LearnedEstimator
from pdlab.costs.recorded_steps import RecordedSteps
from pdlab.costs.roofline import Ceilings, ceilings_for
from pdlab.engine.simulated import make_simulated
from pdlab.models.catalogue import config_of

if TYPE_CHECKING:
    from pdlab.bench.suites import Context

RECORDED = (("nvidia-h200", "qwen3-8b", "bfloat16"),)  # device, model, dtype
KIND = "simulated"
BUDGET = 2048  # tokens of a step, see serving.serving_config


def ceilings_of(device: str, about: dict[str, Any]) -> Ceilings:
    return ceilings_for(device, about["dtype"])


def trained(recorded: RecordedSteps, device: str) -> LearnedEstimator:
    """One that saw the training runs as the engine did and was then fitted to all of them at once, as Session.learn does."""
    about = recorded.about
    learned = LearnedEstimator(
        config_of(about["model"]), ceilings_of(device, about), itemsize_of(about["dtype"]), BUDGET, padded=about["padded"]
    )
    learned.lengths.update(about["lengths"])
    learned.kept = []
    recorded.teach(learned, [run["run"] for run in recorded.of("training")])
    kept, learned.kept = learned.kept, None
    learned.refit(kept)
    return learned


def settings_of(recorded: RecordedSteps) -> dict[str, Any]:
    """For provenance: which recording the times are of, and where everything else was made."""
    source = recorded.about["provenance"]
    told = {name: source[name] for name in ("gpu", "time_utc", "commit", "command") if name in source}
    return {"judged": "offline, on recorded steps", "recording": told}


def prices(ctx: Context) -> None:
    """Rows of estimator_error: `ours` learned from training alone, `ours_learning` goes on with every step it has priced, as in
    an engine, `roofline` has seen nothing. First come, as the recording session judged it."""
    for device, model, dtype in RECORDED:
        recorded = recorded_steps.find(device, model, dtype)
        if recorded is None:
            ctx.record.skip("mape", "percent", f"no steps of {model} on {device} are recorded", variant="ours", params={})
            continue
        known = trained(recorded, device)
        with recorder_for(ctx, device) as record:
            for run in recorded.of("held-out"):
                if run["policy"] != "fcfs":
                    continue
                bare = RooflineEstimator(config_of(model), ceilings_of(device, recorded.about), itemsize_of(dtype))
                judge = Judge.of(known, bare)
                recorded.teach(judge, [run["run"]])
                params = {"load": run["load"], "workload": run["workload"], "model": model}
                record_prices(ctx, judge, record=record, kind=KIND, settings=settings_of(recorded), **params)


def imitation_of(recorded: RecordedSteps, device: str, learned: LearnedEstimator) -> serving.Imitation:
    """The simulator that the recording session would have calibrated with this estimator. Its objectives are the session's."""
    about = recorded.about
    base = serving.serving_config(executor="simulated", simulated_device=device)
    slots = make_simulated(base, config_of(about["model"])).capacity()
    due = about["objectives"]
    config = base.with_(ttft_objective_s=due["ttft_s"], per_token_objective_s=due["per_token_s"])
    scale = serving.Scale(about["model"], 32_768, 1, config)
    return serving.Imitation(scale, learned.state(), ceilings_of(device, about), slots, about["dtype"], device)


def real_quantities(device: str, variant: str, params: dict[str, Any]) -> dict[tuple[str, int], float]:
    """What the real engine was recorded to do under this load: requests/s and seconds, by (quantity, quantile)."""
    found: dict[tuple[str, int], float] = {}
    for row in tables.newest(tables.read(device, "scheduling_mixed_load")):
        of = {name: value for name, value in row.params.items() if name != "quantile"}
        if row.kind != "measured" or row.variant != variant or of != params:
            continue
        if row.metric == "throughput":
            found["throughput", 50] = row.median
        elif row.metric in ("ttft", "per_token", "end_to_end") and row.params.get("quantile") in QUANTILES:
            found[row.metric, int(row.params["quantile"])] = row.median / 1e3
    return found


def differences(ctx: Context) -> None:
    """Rows of simulator_error: the recorded load tests again, on the simulator that their training runs calibrate."""
    for device, model, dtype in RECORDED:
        recorded = recorded_steps.find(device, model, dtype)
        if recorded is None:
            ctx.record.skip("error", "percent", f"no steps of {model} on {device} are recorded", variant="fcfs", params={})
            continue
        imitation = imitation_of(recorded, device, trained(recorded, device))
        with recorder_for(ctx, device) as record:
            for run in recorded.of("held-out"):
                params = {"load": run["load"], "workload": run["workload"], "model": model}
                real = real_quantities(device, run["policy"], params)
                if not real or ctx.left() <= 0:
                    continue
                workload = serving.mixed_load(imitation.scale, run["requests"], run["rate"], run["seed"], run["workload"])
                simulated = imitation.run(imitation.scale.config.with_(policy=run["policy"]), workload)
                record_differences(
                    ctx, real, simulated, variant=run["policy"], record=record, kind=KIND, settings=settings_of(recorded),
                    **params,
                )  # fmt: skip
