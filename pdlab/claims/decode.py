"""Rules about decoding at the memory wall: fused operations, the share of time that is memory, bandwidth techniques."""

from __future__ import annotations

from typing import Any

from pdlab.claims.evidence import NOISE, Claim, Evidence, Finding, Pair, gain_range, graded, middle, not_measured
from pdlab.costs.formulas import decode_shape, step_flops
from pdlab.costs.roofline import op_times, sheet_ceilings
from pdlab.costs.tables import Row
from pdlab.models.catalogue import config_of


def fusion_gain(ev: Evidence, claim: Claim) -> Finding:
    """The gain of the fused operation over the same operations launched one by one, in the same run, the median over all shapes
    and batches recorded: reproduced from the claimed ratio on (less 3 % noise), partly if there is a gain at all. Beside it
    the gain that is left when a CUDA graph has taken away what launches cost."""
    f = claim.figures
    note = _solve_operation(f)
    where = f.get("where", {})
    pairs = ev.pairs(claim.experiment, f["metric"], f["variants"], f["baselines"], where)
    if not pairs:
        return not_measured(claim, ev, f"{f['metric']} of {f['variants'][0]} beside {f['baselines'][0]}", note)
    pair = middle(pairs)
    word = "median gain" if len(pairs) > 1 else "gain"
    reason = f"{word} {pair.gain:.2f}x against {f['ratio']:.2f}x claimed; {gain_range(pairs)}{_by(pairs, 'sampling')}"
    graphed = ev.pairs(claim.experiment, f["metric"], f["variants"], f["baselines"], where | {"graph": True})
    if graphed:
        left = middle(graphed).gain
        reason += f". Both in a CUDA graph: median {left:.2f}x, {gain_range(graphed)}{_by(graphed, 'sampling')}"
        reason += f"; {_left_without_launches(pair.gain, left)}"
    value, what = ev.value(pair.ours, pair.gain, "ratio"), "fused over operations launched one by one, the median"
    return Finding(graded(pair.gain, f["ratio"]), f"{reason}. {note}".rstrip(". "), value, what)


def _left_without_launches(launched: float, graphed: float) -> str:
    """What is left of a gain where a graph launches; it may even be larger, where launches are most of the fused time."""
    if graphed > (1 + NOISE) * launched:
        return "the gain is larger there: launches are a larger part of the fused time than of the time apart"
    if graphed - 1 < (launched - 1) / 2:
        return "launches are most of the gain"
    return "most of the gain is left without them"


def _by(pairs: list[Pair], name: str) -> str:
    """The median of each value of a parameter, where the pairs have several."""
    values = list(dict.fromkeys(p.params[name] for p in pairs if name in p.params))
    if len(values) < 2:
        return ""
    medians = (f"{value} {middle([p for p in pairs if p.params.get(name) == value]).gain:.2f}x" for value in values)
    return f" ({', '.join(medians)})"


def _solve_operation(f: dict[str, Any]) -> str:
    """For how many tokens or layers the claim's card could need the stated milliseconds for one operation."""
    if "operation" not in f:
        return ""
    cfg, op, ms = config_of("llama-2-7b"), f["operation"], f["ms"][1]
    card = sheet_ceilings(f["device"], "float16")
    calls = 1 if op == "projection_sample" else cfg.num_layers
    one = op_times(cfg, decode_shape(1, 1), card, 2)[op].seconds / calls * 1e3
    flops = getattr(step_flops(cfg, decode_shape(1, 1)), op) / calls
    return (
        f"Predicted for {f['device']}, llama-2-7b: one call at batch 1 needs {one:.3f} ms, so {ms} ms is {ms / one:.1f} calls, "
        f"or one call over {ms / 1e3 * card.matmul_flops_per_s / flops:,.0f} tokens"
    )


def memory_share_of_decode(ev: Evidence, claim: Claim) -> Finding:
    """By byte accounting at batch 1: the share of an answer's time in which the memory must be busy at the read ceiling. It is
    a property of the engine, so all recorded ones are named. The lab's own, the median over models, decides: reproduced from
    nine tenths of the claimed share on, partly down to half of it. Where no answer was recorded, single decode steps decide."""
    claimed = claim.figures["percent"]
    rows = ev.rows(claim.experiment, "bandwidth_share")
    if not any(r.variant == "ours" for r in rows):
        rows = ev.rows("prefill_vs_decode", "bandwidth_utilization", "ours", phase="decode", batch=1)
    if not rows:
        return not_measured(claim, ev, "answer, or decode step at batch 1")
    ours = sorted((r for r in rows if r.variant == "ours"), key=lambda r: r.median)
    row = ours[(len(ours) - 1) // 2]
    verdict = "reproduced" if row.median >= 0.9 * claimed else "partly" if row.median >= claimed / 2 else "not_reproduced"
    models = "in the one model recorded" if len(ours) == 1 else f"in the median of {len(ours)} models"
    reason = (
        f"at batch 1 the bytes that must move take {row.median:.0f} % of the time at the read ceiling {models}"
        f"{_engines(rows)}. The rest is launches, host and gaps, which an engine can shorten: {claimed} % is one engine's "
        f"share of one model, not decoding's{_counters(ev, claim)}"
    )
    return Finding(verdict, reason, ev.value(row), f"memory's share of the time, {models.removeprefix('in the ')}")


_WORDS = {"unfused_graph": "unfused in a graph", "torch_compile": "torch.compile"}


def _engines(rows: list[Row]) -> str:
    """The range of each variant over the models."""
    parts = []
    for variant in ("unfused", "unfused_graph", "torch_compile", "ours"):
        shares = sorted(r.median for r in rows if r.variant == variant)
        if shares:
            span = f"{shares[0]:.0f}" if len(shares) == 1 else f"{shares[0]:.0f} to {shares[-1]:.0f}"
            parts.append(f"{_WORDS.get(variant, variant)} {span} %")
    return f" ({', '.join(parts)})" if len(parts) > 1 else ""


def _counters(ev: Evidence, claim: Claim) -> str:
    """What hardware counters say of the bytes that were counted, where they were recorded."""
    rows = ev.rows(claim.experiment, "dram_read_ratio")
    if not rows:
        return ""
    ratios = sorted(r.median for r in rows)
    return f". Hardware counters read {ratios[0]:.2f} to {ratios[-1]:.2f} times the bytes counted"


def bandwidth_techniques(ev: Evidence, claim: Claim) -> Finding:
    """Each technique's gain in used bandwidth in the same run, the median over shapes: norm weights in shared memory and
    __restrict__ together in one kernel, times the better Z-order over the better plain layout of the cache (which concerns
    attention alone, so the product is an upper bound). Reproduced from the claimed gain on, partly if there is a gain."""
    f = claim.figures
    together = ev.pairs(claim.experiment, "bandwidth", ["article"], ["none"])
    if not together:
        return not_measured(claim, ev, "bandwidth of the techniques", _bandwidth_note(f))
    words, product, decisive = [], middle(together).gain, middle(together)
    for variant, name in (("shared_norm", "norm weights in shared memory"), ("restrict", "__restrict__")):
        alone = ev.pairs(claim.experiment, "bandwidth", [variant], ["none"])
        if alone:
            words.append(f"{name} {middle(alone).gain:.3f}x{_spread([p.gain for p in alone])}")
    words.append(f"both {product:.3f}x")
    orders = _z_orders(ev)
    if orders:
        product *= orders[(len(orders) - 1) // 2]
        words.append(f"Z-order {orders[(len(orders) - 1) // 2]:.3f}x{_spread(orders)}")
    else:
        words.append("Z-order not recorded")
    reason = f"{', '.join(words)}: {product:.2f}x in the median against {f['ratio']:.2f}x claimed. {_bandwidth_note(f)}"
    verdict = graded(product, f["ratio"])
    what = "bandwidth with all three over without, the median"
    return Finding(verdict, reason.rstrip(". "), ev.value(decisive.ours, product, "ratio"), what)


def _spread(gains: list[float]) -> str:
    """From the least to the most, of several."""
    return f" ({min(gains):.2f}x to {max(gains):.2f}x)" if len(gains) > 1 else ""


def _z_orders(ev: Evidence) -> list[float]:
    """Gains of the better Z-order over the better of the plain layouts, rising, one a shape; empty where none was recorded."""
    plain = ["per_token", "per_head"]
    by_params: dict[tuple[tuple[str, Any], ...], list[float]] = {}
    for baseline in plain:
        for pair in ev.pairs("kv_layout", "bandwidth", ["z_token_head", "z_token_dim"], [baseline]):
            by_params.setdefault(tuple(sorted(pair.params.items())), []).append(pair.gain)
    return sorted(min(several) for several in by_params.values())


def _bandwidth_note(f: dict[str, Any]) -> str:
    ratio = f["after_percent"] / f["before_percent"]
    percents = f"{f['before_percent']} to {f['after_percent']} %"
    return f"{percents} is {ratio:.2f}x at fixed bytes, which the article's own times (E3) contradict"
