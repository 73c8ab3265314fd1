"""Rules about attention: plain against fused, tiles, numerical care."""

from __future__ import annotations

from typing import Any

from pdlab.claims.evidence import NOISE, Claim, Evidence, Finding, gain_range, middle, not_measured
from pdlab.costs import tables
from pdlab.costs.formulas import attention_flops
from pdlab.costs.roofline import sheet_ceilings
from pdlab.costs.tables import Row


def plain_attention_wins_below(ev: Evidence, claim: Claim) -> Finding:
    """Reproduced if plain attention is faster at every recorded length below the claimed crossover and slower from there
    on; partly if it is faster at some shorter length; not reproduced if fused attention always wins."""
    f = claim.figures
    own = "; ".join(f"its own table has Flash {a / b:.2f}x ahead at {n}" for n, (a, b) in f["own_table"].items())
    pairs = ev.pairs(claim.experiment, "throughput", f["fused"], [f["plain"]])
    short = [p for p in pairs if p.params["seq_len"] < f["crossover"]]
    if not short:
        return not_measured(claim, ev, f"attention below {f['crossover']} tokens beside {f['plain']}", own)
    plain = [p for p in short if p.gain < 1]
    late = [p for p in pairs if p.params["seq_len"] >= f["crossover"] and p.gain < 1]
    pair = min(short, key=lambda p: p.gain)
    verdict = "reproduced" if len(plain) == len(short) and not late else "partly" if plain else "not_reproduced"
    reason = (
        f"plain attention is faster at {len(plain)} of {len(short)} shapes below {f['crossover']} tokens; "
        f"fused is {gain_range(short)}; {own}"
    )
    return Finding(verdict, reason, ev.value(pair.ours, pair.gain, "ratio"))


def flash_speedups(ev: Evidence, claim: Claim) -> Finding:
    """Fused over plain attention at the claimed lengths, each the median over recorded shapes: reproduced if every one
    reaches the claimed ratio, partly if some do. Milliseconds are the A100's: the shapes they allow are solved."""
    f = claim.figures
    solved = _solve_attention(f)
    met, seen, value = 0, [], None
    for length, (plain_ms, fused_ms) in f["ms"].items():
        pairs = ev.pairs(claim.experiment, "throughput", f["fused"], [f["plain"]], {"seq_len": int(length)})
        if not pairs:
            continue
        pair = middle(pairs)
        met += pair.gain >= plain_ms / fused_ms * (1 - NOISE)
        seen.append(f"{length}: {pair.gain:.2f}x against {plain_ms / fused_ms:.2f}x")
        value = ev.value(pair.ours, pair.gain, "ratio")
    if not seen:
        return not_measured(claim, ev, "attention at these lengths beside plain attention", solved)
    verdict = "reproduced" if met == len(f["ms"]) else "partly" if met else "not_reproduced"
    return Finding(verdict, f"{'; '.join(seen)}. {solved}", value)


def _solve_attention(f: dict[str, Any]) -> str:
    """For which batch x heads x layers the card could need the claimed times at all: at most rate x time / FLOPs."""
    rate = sheet_ceilings(f["device"], "float16").matmul_flops_per_s
    parts = []
    for length, (_, fused_ms) in f["ms"].items():
        n = int(length)
        one = attention_flops(1, 1, n, n, f["head_dim"]) / rate * 1e3
        most = f"{fused_ms / one:,.0f} heads x batch x layers"
        parts.append(f"{fused_ms} ms at {n} is at most {most} (32 heads need {32 * one:.2g} ms)")
    return f"At {rate / 1e12:.0f} TFLOP/s, head size {f['head_dim']}: " + "; ".join(parts)


def best_tile_differs(ev: Evidence, claim: Claim) -> Finding:
    """Reproduced if the fastest tile of the same shape differs between two recorded GPUs; partly if, with one GPU recorded,
    it differs between shapes."""
    best: dict[str, dict[str, Row]] = {}
    for device in tables.devices(ev.extra):
        rows = Evidence(device, ev.extra).rows(claim.experiment, claim.figures["metric"])
        for row in rows if not device.startswith("cpu") else []:
            shape = tables.params_json({k: v for k, v in row.params.items() if not k.startswith("tile")})
            old = best.setdefault(device, {}).get(shape)
            if old is None or row.median > old.median:
                best[device][shape] = row
    if not best:
        return not_measured(claim, ev, "sweep of tiles")

    def tile(row: Row) -> str:
        return tables.params_json({k: v for k, v in row.params.items() if k.startswith("tile")} | {"variant": row.variant})

    mine = best.get(ev.device) or next(iter(best.values()))
    value = ev.value(next(iter(mine.values()))) if ev.device in best else None
    if len(best) == 1:
        tiles = {tile(r) for r in mine.values()}
        verdict = "partly" if len(tiles) > 1 else "not_measured"
        reason = f"one GPU recorded: {len(tiles)} best tiles over {len(mine)} shapes; a second GPU decides"
        return Finding(verdict, reason, value)
    shapes = set.intersection(*(set(b) for b in best.values()))
    differ = sum(len({tile(b[s]) for b in best.values()}) > 1 for s in shapes)
    reason = f"the best tile differs between {', '.join(best)} at {differ} of {len(shapes)} shapes"
    return Finding("reproduced" if differ else "not_reproduced", reason, value)


def care_prevents_errors(ev: Evidence, claim: Claim) -> Finding:
    """Reproduced if some variant without the numerical care errs at least so many times more than the careful kernel on the
    same input, against float64."""
    f = claim.figures
    variants = sorted({r.variant for r in ev.rows(claim.experiment, f["metric"])} - {f["careful"]})
    pairs = [p for v in variants for p in ev.pairs(claim.experiment, f["metric"], [f["careful"]], [v])]
    if not pairs:
        return not_measured(claim, ev, f"{f['metric']} of careful and careless kernels")
    worst = max(pairs, key=lambda p: p.base.median / p.ours.median)
    factor = worst.base.median / worst.ours.median
    reason = f"{worst.base.variant} errs {factor:.3g} times as much as {worst.ours.variant} ({worst.base.median:.2g})"
    return Finding("reproduced" if factor >= f["factor"] else "not_reproduced", reason, ev.value(worst.ours, factor, "ratio"))
