"""Rules about the KV cache: its size, its allocators, and Little's law."""

from __future__ import annotations

from pdlab.claims.evidence import (
    NOISE,
    Claim,
    Evidence,
    Finding,
    Pair,
    gain_range,
    graded,
    middle,
    not_measured,
    predicted,
)  # fmt: skip
from pdlab.costs.kv_sizes import known_shapes, kv_table, solve_kv_models, widest_multi_head_model
from pdlab.costs.roofline import littles_law_latency
from pdlab.costs.tables import Row
from pdlab.hardware.specs import spec


def kv_size_is_solved(ev: Evidence, claim: Claim) -> Finding:
    """Solved, not measured: reproduced if a known model whose weights fit the claim's card reaches the size with one input;
    impossible as stated if only larger batches, or models larger than the card, do."""
    target, tokens = claim.figures["bytes"], claim.figures["tokens"]
    card = spec(claim.figures["device"])
    found = solve_kv_models(target, tokens, memory_bytes=card.memory_bytes)
    alone = [s for s in found if s.batch == 1]
    usual = kv_table(tokens, dtypes=("float16",), shapes=[s for s in known_shapes() if s.name == "llama-2-7b"])[0]
    wide, deep = widest_multi_head_model(target / tokens, card.memory_bytes - target, 2)
    batched = ", ".join(f"{s.model} {s.dtype} x {s.batch}" for s in found if s.batch > 1 and s.fits and s.dtype != "bfloat16")
    reason = (
        f"{target / tokens / 1e6:.1f} MB a token; llama-2-7b in float16 has {usual.kv_bytes / tokens / 1e6:.2f} MB, "
        f"{usual.kv_bytes / 1e9:.2f} GB at {tokens} tokens. One input reaches it only with "
        f"{', '.join(sorted({s.model for s in alone})) or 'no known model'}, which "
        f"{'fits' if any(s.fits for s in alone) else 'does not fit'} {card.name}; a multi-head model that fits beside it "
        f"could be at most {wide:.0f} wide, so {deep:.0f} layers deep. With batches: {batched}"
    )
    verdict = "reproduced" if any(s.fits for s in alone) else "impossible"
    what = f"llama-2-7b in float16, one input of {tokens} tokens"
    return Finding(verdict, reason, predicted(usual.kv_bytes, "bytes", None), what)


def littles_law(ev: Evidence, claim: Claim) -> Finding:
    """Little's law gives the mean latency from requests in flight over throughput. Impossible as stated if that mean lies
    above the stated P99; else the recorded throughput ratio and internal waste decide, the middle one of several models."""
    f = claim.figures
    mean = littles_law_latency(f["in_flight"], f["qps"]) * 1e3
    where = {"concurrency": f["in_flight"], "workload": f["workload"]}
    waste = sorted(ev.rows(claim.experiment, "waste_internal", f["variant"], **where), key=lambda r: r.median)
    pairs = ev.pairs(claim.experiment, "throughput", [f["variant"]], [f["baseline"]], where)
    value, what, recorded = None, "", "waste and throughput are not recorded here"
    if waste:
        row = waste[(len(waste) - 1) // 2]
        value, what = ev.value(row), f"internal waste of {f['variant']}"
        outside = ev.rows(claim.experiment, "waste_external", f["variant"], **where)
        recorded = f"{row.kind}: internal waste {_span(waste)} % (article {f['waste_percent']} %)"
        recorded += f", external {_span(outside)} %" if outside else ""
        if pairs and f["variant"] != f["baseline"]:
            claimed = f["qps"] / f["baseline_qps"]
            recorded += f", throughput {middle(pairs).gain:.2f}x of {f['baseline']} (article {claimed:.2f}x)"
    if mean > f["p99_ms"]:
        slowest = (mean - 0.99 * f["p99_ms"]) / 0.01
        reason = (
            f"{f['in_flight']} in flight at {f['qps']} a second is a mean of {mean:.0f} ms, above the P99 of {f['p99_ms']} ms: "
            f"the slowest 1 % would have to average {slowest / 1e3:.1f} s; {recorded}"
        )
        return Finding("impossible", reason, value, what)
    if not waste or not pairs:
        return not_measured(claim, ev, f"waste and throughput of {f['variant']} at {f['in_flight']} requests")
    near = abs(waste[(len(waste) - 1) // 2].median - f["waste_percent"]) <= max(2.0, 0.25 * f["waste_percent"])
    claimed = f["qps"] / f.get("baseline_qps", f["qps"])
    grade = graded(middle(pairs).gain, claimed) if f["variant"] != f["baseline"] else "reproduced"
    return Finding("reproduced" if near and grade == "reproduced" else "partly", recorded, value, what)


def _span(rows: list[Row]) -> str:
    low, high = (f"{f(r.median for r in rows):.1f}" for f in (min, max))
    return low if low == high else f"{low} to {high}"


def _gains(ev: Evidence, claim: Claim) -> dict[int, tuple[float, Pair]]:
    """{requests in flight: (gain of the variant over its baseline, the pair)} of the model with most such points."""
    f = claim.figures
    by_model: dict[str, dict[int, tuple[float, Pair]]] = {}
    for p in ev.pairs(claim.experiment, "throughput", [f["variant"]], [f["baseline"]], {"workload": f["workload"]}):
        by_model.setdefault(str(p.params.get("model")), {})[int(p.params["concurrency"])] = p.gain, p
    return dict(sorted(max(by_model.values(), key=len, default={}).items()))


def _wins_from(gains: dict[int, tuple[float, Pair]]) -> int | None:
    """The concurrency from which on the variant always wins by more than noise."""
    return next((c for c in gains if all(g > 1 + NOISE for d, (g, _) in gains.items() if d >= c)), None)


def crossover_in_concurrency(ev: Evidence, claim: Claim) -> Finding:
    """Reproduced if the variant starts to win (by more than 3 %) within a factor of two of the claimed concurrency; partly
    if it wins from another point on, or near the claimed one on the article's card alone; not reproduced if it never wins.
    A card with more memory crosses over later, so what is recorded for the article's card stands beside it."""
    f = claim.figures
    gains = _gains(ev, claim)
    if len(gains) < 2:
        return not_measured(claim, ev, f"{f['variant']} beside {f['baseline']} at several concurrencies")
    first, (gain, last) = _wins_from(gains), gains[max(gains)]
    reason = f"{last.ours.kind}, {_said(f['variant'], gains)}{'' if first else _none_preempted(ev, claim)}"
    there = _gains(Evidence(f["device"], ev.extra), claim) if ev.device != f["device"] else {}
    if there:
        reason += f". {f['device']}, {there[max(there)][1].ours.kind}: {_said(f['variant'], there)}"
    if first is None:
        verdict = "partly" if _near(f["concurrency"], there) else "not_reproduced"
        what = f"throughput of {f['variant']} over {f['baseline']} at {max(gains)} requests"
        return Finding(verdict, reason, ev.value(last.ours, gain, "ratio"), what)
    verdict = "reproduced" if _near(f["concurrency"], gains) else "partly"
    return Finding(verdict, reason, ev.value(last.ours, first, "count"), f"requests from which on {f['variant']} wins")


def _near(claimed: int, gains: dict[int, tuple[float, Pair]]) -> bool:
    """Whether the variant starts to win within a factor of two of the claimed concurrency, and not at the very first."""
    first = _wins_from(gains)
    return first is not None and claimed / 2 <= first <= 2 * claimed and min(gains) < first


def _none_preempted(ev: Evidence, claim: Claim) -> str:
    """That no request lost its memory, where preemptions were counted and there was not one."""
    f = claim.figures
    both, where = (f["variant"], f["baseline"]), {"workload": f["workload"]}
    counts = [r.median for v in both for r in ev.rows(claim.experiment, "preemptions", v, **where)]
    return f"; no request was preempted on {ev.device}" if counts and not any(counts) else ""


def _said(variant: str, gains: dict[int, tuple[float, Pair]]) -> str:
    first = _wins_from(gains)
    begins = f"no lasting win of {variant}" if first is None else f"{variant} wins from {first} requests on"
    return f"{begins}: {', '.join(f'{c}: {g:.2f}x' for c, (g, _) in gains.items())}"


def hybrid_beats_both(ev: Evidence, claim: Claim) -> Finding:
    """Reproduced if the hybrid's throughput beats each rival's by more than 3 %, the median over loads and workloads; partly
    if it keeps up with both."""
    f = claim.figures
    each = [
        [p for w in f["workloads"] for p in ev.pairs(claim.experiment, "throughput", [f["variant"]], [r], {"workload": w})]
        for r in f["rivals"]
    ]
    if not all(each):
        return not_measured(claim, ev, f"{f['variant']} beside {' and '.join(f['rivals'])}")
    middles = [middle(pairs) for pairs in each]
    worst = min(middles, key=lambda p: p.gain)
    verdict = "reproduced" if worst.gain > 1 + NOISE else "partly" if worst.gain >= 1 - NOISE else "not_reproduced"
    reason = ", ".join(f"{m.gain:.2f}x of {r} ({gain_range(p)})" for m, r, p in zip(middles, f["rivals"], each))
    kinds = " and ".join(sorted({p.ours.kind for pairs in each for p in pairs}))
    what = f"throughput of {f['variant']} over {worst.base.variant}, the better of both"
    return Finding(verdict, f"{kinds}: {reason}", ev.value(worst.ours, worst.gain, "ratio"), what)


def compaction_cures(ev: Evidence, claim: Claim) -> Finding:
    """Reproduced if allocations are refused although as much memory is free, and the claimed rhythm of compaction at least
    halves them; partly if the trouble shows and this rhythm, or another, lessens it by more than 3 %; not reproduced if it
    never shows or nothing helps."""
    f = claim.figures
    rows = {v: ev.rows(claim.experiment, "refused", v) for v in (f["baseline"], f["variant"], f["better"])}
    if not rows[f["baseline"]] or not rows[f["variant"]]:
        return not_measured(claim, ev, f"refused allocations of {f['baseline']} and {f['variant']}")
    without, rhythm = rows[f["baseline"]][-1], rows[f["variant"]][-1]
    better = rows[f["better"]][-1] if rows[f["better"]] else None
    best = min(r.median for r in (rhythm, better) if r is not None)
    counts = ", ".join(f"{v} {rs[-1].median:,.0f}" for v, rs in rows.items() if rs)
    reason = f"{without.kind}: allocations refused although as much memory was free: {counts}"
    if not without.median:
        return Finding("not_reproduced", reason, ev.value(without), "refused without compaction")
    lessened = best < without.median * (1 - NOISE)
    verdict = "reproduced" if rhythm.median <= without.median / 2 else "partly" if lessened else "not_reproduced"
    return Finding(verdict, reason, ev.value(rhythm), f"refused with the article's rhythm, {without.median:,.0f} without")
