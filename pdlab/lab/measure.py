"""What notebooks measure live, as tables ready to draw, and the few formulas they need besides pdlab.costs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from pdlab.costs.formulas import decode_shape, itemsize_of, prefill_shape, step_bytes, step_flops
from pdlab.costs.roofline import step_time
from pdlab.models.catalogue import config_of
from pdlab.models.config import ModelConfig

if TYPE_CHECKING:
    import pandas as pd

    from pdlab.bench.prefill_vs_decode import Step
    from pdlab.bench.records import Recorder, Row
    from pdlab.lab.session import Lab

_COLUMNS = {"latency": "ms", "compute_utilization": "compute_percent", "bandwidth_utilization": "bandwidth_percent"}


def phases(
    lab: Lab, recorder: Recorder, model: str, steps: Sequence[Step], *, loaded: Any = None, budget_s: float = 30
) -> pd.DataFrame:
    """Times each step of `model` through the executor and records it; see bench.prefill_vs_decode.

    Columns: model, phase, batch, tokens, new_tokens (of the whole batch), ms, p10, p90, compute_percent, bandwidth_percent,
    flops, bytes, intensity, floor_ms, bound. The phases take turns, cheapest steps first, so a slow machine loses the largest
    of both; a step that was skipped is not in the table, its reason is printed. `loaded` is used if it is
    this model in this dtype.
    """
    import pandas as pd

    from pdlab.bench.prefill_vs_decode import measure_model
    from pdlab.bench.suites import Context

    ceilings, size, config = lab.ceilings(), itemsize_of(lab.dtype), config_of(model)
    before = len(recorder.rows)
    context = Context(lab.machine, lab.profile, recorder, budget_s, lab.seed, say=lambda line: None)
    if loaded is not None and (loaded.config.name != config.name or not str(loaded.model.dtype).endswith(lab.dtype)):
        loaded = None
    floors = {step: step_time(config, step.shape, ceilings, size) for step in steps}
    by_cost = sorted(steps, key=lambda step: floors[step].seconds)
    turns = [[step for step in by_cost if step.phase == phase] for phase in ("prefill", "decode")]
    order = [step for pair in zip_longest(*turns) for step in pair if step is not None]
    measure_model(context, model, ceilings, 0.0, order, loaded)
    found: dict[tuple[str, int, int], dict[str, Any]] = {}
    for row in recorder.rows[before:]:
        key = (row.params["phase"], row.params["batch"], row.params["tokens"])
        if row.status.startswith("skipped:"):
            print(f"{config.name}, {key[0]} {key[1]} x {key[2]}: {row.status.replace(':', ': ')}")
        elif row.metric in _COLUMNS:
            found.setdefault(key, {})[_COLUMNS[row.metric]] = row.median
            if row.metric == "latency":
                found[key] |= {"p10": row.p10, "p90": row.p90}
    table = []
    for step in steps:
        if (measured := found.get((step.phase, step.batch, step.tokens))) is None:
            continue
        f = floors[step]
        counts = {"flops": f.flops, "bytes": f.bytes, "intensity": f.intensity, "floor_ms": f.seconds * 1e3, "bound": f.bound}
        who = {"model": config.name, "phase": step.phase, "batch": step.batch, "tokens": step.tokens}
        table.append(who | {"new_tokens": step.batch * step.new} | measured | counts)
    return pd.DataFrame(table)


def together(parts: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """The tables of phases() as one. Raises MeasurementError where the first model has no prefill, or no decode step at all."""
    import pandas as pd

    from pdlab.core.errors import MeasurementError

    there = {phase for phase in ("prefill", "decode") if len(parts[0]) and (parts[0]["phase"] == phase).any()}
    if lost := [phase for phase in ("prefill", "decode") if phase not in there]:
        what = f"not one {' and not one '.join(lost)} step could be measured (the reasons are printed above)"
        raise MeasurementError(what, "use a smaller model, or shorter prompts and smaller batches, in the parameters cell")
    return pd.concat([part for part in parts if len(part)], ignore_index=True)


def over(table: pd.DataFrame, x: str, series: Sequence[str] | pd.Series, kind: str = "measured") -> pd.DataFrame:
    """A phases table for figures.latency: `ms` as `kind` and `floor_ms` as predicted over column `x`."""
    import pandas as pd

    base = pd.DataFrame({"x": table[x].to_numpy(), "series": list(series)})
    measured = base.assign(y=table["ms"].to_numpy(), p10=table["p10"].to_numpy(), p90=table["p90"].to_numpy(), kind=kind)
    measured = measured[measured["y"].notna()]
    return pd.concat([measured, base.assign(y=table["floor_ms"].to_numpy(), kind="predicted")], ignore_index=True)


def roof_points(table: pd.DataFrame) -> pd.DataFrame:
    """A phases table for figures.roofline: a series for each phase (and model, where there are several), its ends labelled."""
    points = table.copy()
    several = table["model"].nunique() > 1
    points["series"] = (points["model"] + " " if several else "") + points["phase"]
    points["flops_per_s"] = points["flops"] / points["ms"] * 1e3
    points["label"] = ""
    for _, rows in points.groupby("series"):
        for i in (rows.index[0], rows.index[-1]):
            prefill = rows.loc[i, "phase"] == "prefill"
            points.loc[i, "label"] = f"{rows.loc[i, 'tokens']:,} tokens" if prefill else f"batch {rows.loc[i, 'batch']}"
    return points


def utilization_lines(table: pd.DataFrame) -> pd.DataFrame:
    """Decode rows of one model for figures.utilization: both shares over the batch, as measured and as the floor allows."""
    import pandas as pd

    lines = []
    for series, column in {"compute": "compute_percent", "memory bandwidth": "bandwidth_percent"}.items():
        base = pd.DataFrame({"x": table["batch"], "y": table[column], "series": series})
        at_floor = (table[column] * table["ms"] / table["floor_ms"]).to_numpy()  # the same counts over the floor's time
        lines += [base.assign(kind="measured"), base.assign(y=at_floor, kind="predicted")]
    return pd.concat(lines, ignore_index=True)


def knee(batches: Sequence[int], times: Sequence[float]) -> float:
    """The batch at which a step's time turns from flat to proportional, read off measurements.

    Two asymptotes cross there: the time of the smallest batch, and the line through 0 and the largest batch. Where the
    largest batch is not yet proportional, the turn lies beyond what is returned.
    """
    return times[0] * batches[-1] / times[-1]


def half_point(config: ModelConfig) -> float:
    """Prompt length n at which attention is half of a prefill's FLOPs: products = 2 L N D (n + 1) a token."""
    costs = step_flops(config, prefill_shape(1))
    products = costs.total - costs.attention - costs.projection_sample  # the output projection is once a prompt, not a token
    return products / (2 * config.num_layers * config.q_size) - 1


def context_limit(config: ModelConfig, ridge: float, itemsize: int) -> float:
    """Context C from which no batch makes decode compute-bound; infinite where attention itself is above the ridge.

    A further request adds 2 W + 4 L N D C FLOPs, and 2 L K D C numbers of cache and its activations in bytes; the ratio of
    the two is `ridge` at C. Both are lines in C, so two points of the counted formulas give them; 0 where even no cache
    is too much.
    """

    def added(context: int) -> tuple[float, float]:
        one, two = decode_shape(1, context), decode_shape(2, context)
        flops = step_flops(config, two).total - step_flops(config, one).total
        return flops, step_bytes(config, two, itemsize).total - step_bytes(config, one, itemsize).total

    (flops, moved), (flops_1, moved_1) = added(0), added(1)
    falls = ridge * (moved_1 - moved) - (flops_1 - flops)
    return max(0.0, (flops - ridge * moved) / falls) if falls > 0 else float("inf")


def recorded_phases(device: str, models: Sequence[str] = ("llama-1b", "llama-3-8b")) -> tuple[pd.DataFrame, str]:
    """The recorded steps of a device as a table for `over`, and the word for it: "recorded". `time_utc` says when.

    Where nothing was recorded yet: the floors of a usual set of steps from the data sheet, and "predicted".
    """
    import pandas as pd

    from pdlab.bench.prefill_vs_decode import Step, steps_of
    from pdlab.bench.records import latest
    from pdlab.costs.roofline import ceilings_for
    from pdlab.hardware.specs import spec

    rows, table = latest(device, "prefill_vs_decode", kind="measured"), []
    known = (
        {(r.model, r.phase, r.batch, r.tokens): r for r in rows[rows["metric"] == "latency"].itertuples()} if len(rows) else {}
    )
    wanted = list(known) or [(m, s.phase, s.batch, s.tokens) for m in models for s in steps_of("full", config_of(m))]
    for model, phase, batch, tokens in wanted:
        row = known.get((model, phase, batch, tokens))
        dtype = row.dtype if row else ("bfloat16" if spec(device).bf16_flops else "float16")
        floor = step_time(config_of(model), Step(phase, batch, tokens).shape, ceilings_for(device, dtype), itemsize_of(dtype))
        ms = (row.median, row.p10, row.p90) if row else (float("nan"),) * 3
        new = batch * (tokens if phase == "prefill" else 1)
        when = row.time_utc if row else ""
        table.append((model, phase, batch, tokens, new, *ms, floor.seconds * 1e3, floor.bound, dtype, when))
    columns = ["model", "phase", "batch", "tokens", "new_tokens", "ms", "p10", "p90", "floor_ms", "bound", "dtype", "time_utc"]
    return pd.DataFrame(table, columns=columns), "recorded" if known else "predicted"


def verdicts(lab: Lab, rows: Iterable[Row], ids: Sequence[str], reference: str = "nvidia-h200", here: str = "") -> Any:
    """The ledger's verdicts on `ids`, from this notebook's `rows` alone and from what is recorded for `reference`; Markdown.

    `here` says what the rows are of, where they were not measured on this machine.

    A CPU's rows show the mechanism; the ledger itself does not count them, and the table says so. Where both were measured,
    each has its own reason. The day is that of the recorded row that decided.
    """
    from IPython.display import Markdown

    from pdlab.claims import RULES, judge, read_claims
    from pdlab.claims.evidence import Evidence
    from pdlab.lab.series import literal

    class Own(Evidence):
        def all(self, experiment: str) -> list[Row]:
            return [row for row in rows if row.ok and row.experiment == experiment]

    rows = list(rows)
    recorded = {v.id: v for v in judge(reference, ids=ids)}
    own = f"this {lab.machine.name}" if lab.machine.is_gpu else "this CPU (shows the mechanism, does not count)"
    lines = [
        "| claim (the article's figures) | verdict | why |",  # three columns fit a phone
        "|---|---|---|",
    ]
    for claim in (c for c in read_claims() if c.id in ids):
        finding = RULES[claim.rule](Own(lab.machine.slug), claim)
        ledger = recorded[claim.id]
        why = finding.reason if finding.verdict != "not_measured" else ledger.reason
        if "not_measured" not in (finding.verdict, ledger.verdict) and finding.reason != ledger.reason:
            why = f"{here or 'here'}: {finding.reason}. {reference}: {ledger.reason}"
        said = "" if claim.article in ("", "–") else f" ({claim.article})"
        found = {here or own: finding.verdict, f"recorded on {reference}{_day(ledger.ours)}": ledger.verdict}
        if finding.verdict == ledger.verdict and (ledger.ours or {}).get("kind") == "predicted":
            found = {"by arithmetic, whatever is measured": ledger.verdict}
        verdict = "<br>".join(f"{_words(word)}: {source}" for source, word in found.items())
        lines.append(f"| **{claim.id}** {literal(claim.claim + said)} | {verdict} | {literal(why)} |")
    return Markdown("\n".join(lines))


def _day(ours: dict[str, Any] | None) -> str:
    """The day on which the run of a verdict's value began, from its provenance: " (2026-11-29)"; empty where there is none."""
    found = re.match(r"(\d{4})(\d\d)(\d\d)T", str((ours or {}).get("provenance_id")))
    return f" ({'-'.join(found.groups())})" if found else ""


def _words(verdict: str) -> str:
    return f"**{verdict.replace('_', ' ')}**"
