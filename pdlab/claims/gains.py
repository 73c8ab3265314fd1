"""Rules about gains over a baseline: speed-ups, tails, cures, the whole stack."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from pdlab.claims.evidence import NOISE, Claim, Evidence, Finding, Pair, gain_range, graded, middle, not_measured
from pdlab.costs.tables import Row
from pdlab.models.catalogue import CATALOGUE


def speedup(ev: Evidence, claim: Claim) -> Finding:
    """The gain over the baseline in the same run, the median over all shapes recorded: reproduced from the claimed ratio on
    (less 3 % noise), partly if there is a gain at all."""
    f = claim.figures
    pairs = ev.pairs(claim.experiment, f["metric"], f["variants"], f["baselines"], f.get("where"))
    if not pairs:
        return not_measured(claim, ev, f"{f['metric']} of {f['variants'][0]} beside {f['baselines'][0]}")
    pair = middle(pairs)
    who = f"{pair.ours.variant} over {pair.base.variant}"
    reason = f"{who}: {_gain(pairs)} {pair.gain:.2f}x against {f['ratio']:.2f}x claimed; {gain_range(pairs)}"
    verdict = graded(pair.gain, f["ratio"])
    return Finding(verdict, reason, ev.value(pair.ours, pair.gain, "ratio"), f"{f['metric']} of {who}")


def _gain(pairs: list[Pair]) -> str:
    return "median gain" if len(pairs) > 1 else "gain"


def tail_reduction(ev: Evidence, claim: Claim) -> Finding:
    """How much lower the tail latency is than the baseline's in the same run, the median over the loads recorded:
    reproduced from the claimed reduction on (less 3 points), partly if it is lower at all. A variant that leaves requests
    without an answer has no tail to compare and is left out."""
    f = claim.figures
    dropped = {v: max((r.median for r in ev.rows(claim.experiment, "unfinished", v)), default=0) for v in f["variants"]}
    whole = [v for v in f["variants"] if not dropped[v]]
    notes = [f"{v} is left out: up to {n:.0f} requests of a run never end under it" for v, n in dropped.items() if n]
    cuts = _cuts(ev, claim, f["metric"], whole)
    if not cuts:
        return not_measured(claim, ev, f"{f['metric']} of {(whole or f['variants'])[0]} beside {f['baselines'][0]}", *notes[:1])
    cut, row = cuts[(len(cuts) - 1) // 2]
    verdict = "reproduced" if cut >= f["percent"] - 3 else "partly" if cut > 3 else "not_reproduced"
    spread = f"from {_lower(cuts[0][0])} to {_lower(cuts[-1][0])} over {len(cuts)} loads" if len(cuts) > 1 else "one load"
    quantile = f"P{f['where']['quantile']} " if "quantile" in f.get("where", {}) else ""
    tail = f"{quantile}{f['metric'].replace('_', ' ')}"
    if (other := f.get("also")) and (more := _cuts(ev, claim, other, whole)):
        notes.insert(0, f"{quantile}{other} is {more[(len(more) - 1) // 2][0]:.0f} % lower")
    found = f"{tail} of {row.variant} is {_lower(cut)} than of {f['baselines'][0]}, {f['percent']} % lower claimed"
    reason = "; ".join([f"{row.kind}: {found}", spread, *notes])
    what = f"cut in the {tail} of {row.variant} against {f['baselines'][0]}"
    return Finding(verdict, reason, ev.value(row, cut, "percent"), what)


def _lower(cut: float) -> str:
    """A cut in percent in words; a negative one is a rise."""
    return f"{abs(cut):.0f} % {'lower' if cut >= 0 else 'higher'}"


def _cuts(ev: Evidence, claim: Claim, metric: str, variants: list[str]) -> list[tuple[float, Row]]:
    """(percent below the baseline, the row), rising, for every set of parameters."""
    f = claim.figures
    pairs = ev.pairs(claim.experiment, metric, variants, f["baselines"], f.get("where"))
    return sorted(((100 * (1 - 1 / p.gain), p.ours) for p in pairs), key=lambda c: c[0])


def fewer_with_the_cure(ev: Evidence, claim: Claim) -> Finding:
    """Reproduced if the trouble shows without the cure and is at least halved with it; partly if it only shows, or is
    lessened by less; not reproduced if it never shows."""
    f = claim.figures
    rows = {v: ev.rows(claim.experiment, f["metric"], v) for v in (*f["variants"], *f["baselines"])}
    without = [r for v in f["baselines"] for r in rows[v]]
    cured = [r for v in f["variants"] for r in rows[v]]
    if not without:
        return not_measured(claim, ev, f"{f['metric']} without the cure (variant {f['baselines'][0]!r})")
    worst = max(without, key=lambda r: r.median)
    if worst.median <= f.get("noticeable", 0):
        return Finding("not_reproduced", f"{f['metric']} without the cure is {worst.median:g} {worst.unit}", ev.value(worst))
    if not cured:
        reason = f"{f['metric']} is {worst.median:g} {worst.unit}; the cure was not measured"
        return Finding("partly", reason, ev.value(worst), f"{f['metric']} without the cure")
    best = min(cured, key=lambda r: r.median)
    verdict = "reproduced" if best.median <= worst.median / 2 else "partly"
    reason = f"{f['metric']} {worst.median:g} {worst.unit} without, {best.median:g} with the cure"
    return Finding(verdict, reason, ev.value(best), f"{f['metric']} with the cure")


def _stages(ev: Evidence, experiment: str, metric: str, **where: Any) -> dict[str, list[Row]]:
    """Rows of an ablation by model, in the order of their stage, all of one run: the newest with two stages or more."""
    runs: dict[tuple[str, str], list[Row]] = {}
    for row in ev.rows(experiment, metric, **where):
        if "stage" in row.params and row.median > 0:
            runs.setdefault((str(row.params.get("model")), row.run_id), []).append(row)
    models = {model: rows for (model, _), rows in runs.items() if len(rows) > 1}  # later runs replace earlier ones
    return {m: sorted(rows, key=lambda r: (str(type(r.params["stage"])), r.params["stage"])) for m, rows in models.items()}


def whole_stack(ev: Evidence, claim: Claim) -> Finding:
    """Last stage of the ablation over its first: reproduced if throughput gains the claimed ratio and P99 falls by the
    claimed share; partly if only one does."""
    f = claim.figures
    throughput = _stages(ev, claim.experiment, "throughput")
    latency = _stages(ev, claim.experiment, "latency", quantile=99)
    gains = [(rows[-1].median / rows[0].median, rows[-1]) for rows in throughput.values()]
    cuts = [1 - rows[-1].median / rows[0].median for rows in latency.values()]
    if not gains:
        return not_measured(claim, ev, "ablation of two stages or more")
    gain, row = max(gains, key=lambda g: g[0])
    target = 1 - f["after_ms"] / f["before_ms"]
    cut = max(cuts, default=None)
    met = (gain >= f["ratio"] * (1 - NOISE)) + (cut is not None and cut >= target - NOISE)
    fall = "not recorded" if cut is None else f"{100 * cut:.0f} % lower"
    reason = f"throughput {gain:.2f}x against {f['ratio']}x, P99 {fall} against {100 * target:.0f} % lower"
    what = f"throughput of the last stage over the first, {row.params['model']}"
    return Finding(("not_reproduced", "partly", "reproduced")[met], reason, ev.value(row, gain, "ratio"), what)


def families_differ(ev: Evidence, claim: Claim) -> Finding:
    """Reproduced if some stage of the ablation gains at least so many times more on one family of models than on the other;
    not reproduced if none does."""
    stages = _stages(ev, claim.experiment, "throughput")
    by_family: dict[str, dict[str, tuple[float, Row]]] = {}
    for model, rows in stages.items():
        if model not in CATALOGUE:  # somebody's own model: its family is not known here
            continue
        gains = {str(b.params["stage"]): (b.median / a.median, b) for a, b in pairwise(rows)}
        by_family.setdefault(CATALOGUE[model].family, {}).update(gains)
    if len(by_family) < 2:
        return not_measured(claim, ev, "ablation of both families")
    llama, gpt2 = by_family["llama"], by_family["gpt2"]
    ratios = {s: (max(llama[s][0] / gpt2[s][0], gpt2[s][0] / llama[s][0]), llama[s][1]) for s in llama if s in gpt2}
    if not ratios:
        return not_measured(claim, ev, "stage measured on both families")
    stage, (ratio, row) = max(ratios.items(), key=lambda item: item[1][0])
    verdict = "reproduced" if ratio >= claim.figures["noticeable"] else "not_reproduced"
    reason = f"the gains differ most at stage {stage}: {ratio:.2f} times"
    return Finding(verdict, reason, ev.value(row, ratio, "ratio"), "one family's gain over the other's, at its most")
