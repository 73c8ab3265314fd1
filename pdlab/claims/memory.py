"""Rules about the KV cache: its size, its allocators, and Little's law."""

from __future__ import annotations

import statistics

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
    return Finding(verdict, reason, predicted(usual.kv_bytes, "bytes", None))


def littles_law(ev: Evidence, claim: Claim) -> Finding:
    """Little's law gives the mean latency from requests in flight over throughput. Impossible as stated if that mean lies
    above the stated P99; else the recorded throughput ratio and waste decide."""
    f = claim.figures
    mean = littles_law_latency(f["in_flight"], f["qps"]) * 1e3
    where = {"concurrency": f["in_flight"]}
    waste = ev.rows(claim.experiment, "waste_internal", f["variant"], **where)
    pairs = ev.pairs(claim.experiment, "throughput", [f["variant"]], [f["baseline"]], where)
    value, measured = None, "waste and throughput are not recorded here"
    if waste:
        value = ev.value(waste[0])
        measured = f"recorded: internal waste {waste[0].median:.1f} % (article {f['waste_percent']} %)"
        if pairs and f["variant"] != f["baseline"]:
            claimed = f["qps"] / f["baseline_qps"]
            measured += f", throughput {middle(pairs).gain:.2f}x of {f['baseline']} (article {claimed:.2f}x)"
    if mean > f["p99_ms"]:
        slowest = (mean - 0.99 * f["p99_ms"]) / 0.01
        reason = (
            f"{f['in_flight']} in flight at {f['qps']} a second is a mean of {mean:.0f} ms, above the P99 of {f['p99_ms']} ms: "
            f"the slowest 1 % would have to average {slowest / 1e3:.1f} s; {measured}"
        )
        return Finding("impossible", reason, value)
    if not waste or not pairs:
        return not_measured(claim, ev, f"waste and throughput of {f['variant']} at {f['in_flight']} requests")
    near = abs(waste[0].median - f["waste_percent"]) <= max(2.0, 0.25 * f["waste_percent"])
    claimed = f["qps"] / f.get("baseline_qps", f["qps"])
    grade = graded(middle(pairs).gain, claimed) if f["variant"] != f["baseline"] else "reproduced"
    return Finding("reproduced" if near and grade == "reproduced" else "partly", measured, value)


def crossover_in_concurrency(ev: Evidence, claim: Claim) -> Finding:
    """Reproduced if the variant starts to win (by more than 3 %) within a factor of two of the claimed concurrency; partly
    if it wins from another point on; not reproduced if it never wins."""
    f = claim.figures
    pairs = ev.pairs(claim.experiment, "throughput", [f["variant"]], [f["baseline"]])
    by_load: dict[int, list[Pair]] = {}
    for p in pairs:
        by_load.setdefault(int(p.params["concurrency"]), []).append(p)
    if len(by_load) < 2:
        return not_measured(claim, ev, f"{f['variant']} beside {f['baseline']} at several concurrencies")
    gains = {c: statistics.median(p.gain for p in ps) for c, ps in sorted(by_load.items())}
    first = next((c for c in gains if all(g > 1 + NOISE for d, g in gains.items() if d >= c)), None)
    text = ", ".join(f"{c}: {g:.2f}x" for c, g in gains.items())
    last = by_load[max(gains)][0]
    if first is None:
        return Finding("not_reproduced", f"no lasting win of {f['variant']}: {text}", ev.value(last.ours, last.gain, "ratio"))
    verdict = "reproduced" if f["concurrency"] / 2 <= first <= 2 * f["concurrency"] and min(gains) < first else "partly"
    return Finding(verdict, f"{f['variant']} wins from {first} requests on: {text}", ev.value(last.ours, first, "count"))


def hybrid_beats_both(ev: Evidence, claim: Claim) -> Finding:
    """Reproduced if the hybrid's throughput beats each rival's by more than 3 %; partly if it keeps up with both."""
    f = claim.figures
    each = [ev.pairs(claim.experiment, "throughput", [f["variant"]], [rival]) for rival in f["rivals"]]
    if not all(each):
        return not_measured(claim, ev, f"{f['variant']} beside {' and '.join(f['rivals'])}")
    middles = [middle(pairs) for pairs in each]
    worst = min(middles, key=lambda p: p.gain)
    verdict = "reproduced" if worst.gain > 1 + NOISE else "partly" if worst.gain >= 1 - NOISE else "not_reproduced"
    reason = ", ".join(f"{m.gain:.2f}x of {r} ({gain_range(p)})" for m, r, p in zip(middles, f["rivals"], each))
    return Finding(verdict, reason, ev.value(worst.ours, worst.gain, "ratio"))
