"""Rules about attention: plain against fused, tiles, numerical care."""

from __future__ import annotations

from typing import Any

from pdlab.claims.evidence import NOISE, Claim, Evidence, Finding, at, gain_range, middle, not_measured
from pdlab.costs import tables
from pdlab.costs.formulas import attention_flops, plain_attention_bytes
from pdlab.costs.roofline import sheet_ceilings
from pdlab.costs.tables import Row
from pdlab.kernels.tuning import SHARED, PrefillTile


def plain_attention_wins_below(ev: Evidence, claim: Claim) -> Finding:
    """Reproduced if plain attention is faster at every recorded length below the claimed crossover and slower from there
    on; partly if it is faster at some shorter length; not reproduced if fused attention always wins. Calls in a CUDA graph
    and, where recorded, calls launched one by one count alike."""
    f = claim.figures
    own = "; ".join(f"its own table has Flash {a / b:.2f}x ahead at {n}" for n, (a, b) in f["own_table"].items())
    pairs = ev.pairs(claim.experiment, "throughput", f["fused"], f["plain"])
    pairs += ev.pairs(claim.experiment, "eager_latency", f["fused"], f["plain"])
    short = [p for p in pairs if p.params["seq_len"] < f["crossover"]]
    if not short:
        return not_measured(claim, ev, f"attention below {f['crossover']} tokens beside {f['plain'][0]}", own)
    plain = [p for p in short if p.gain < 1]
    late = [p for p in pairs if p.params["seq_len"] >= f["crossover"] and p.gain < 1]
    pair = min(short, key=lambda p: p.gain)
    verdict = "reproduced" if len(plain) == len(short) and not late else "partly" if plain else "not_reproduced"
    reason = (
        f"plain attention is faster in {len(plain)} of {len(short)} cases below {f['crossover']} tokens; "
        f"fused is {gain_range(short)}, closest at {pair.params['seq_len']} tokens; {own}"
    )
    what = f"fused over plain at {pair.params['seq_len']} tokens, where plain comes closest"
    return Finding(verdict, reason, ev.value(pair.ours, pair.gain, "ratio"), what)


def flash_speedups(ev: Evidence, claim: Claim) -> Finding:
    """Fused over plain attention at the claimed lengths, each the median over recorded shapes: reproduced if every one
    reaches the claimed ratio, partly if some do. Milliseconds are the A100's: the shapes they allow are solved."""
    f = claim.figures
    solved = _solve_attention(f)
    met, seen, value, what = 0, [], None, ""
    for length, (plain_ms, fused_ms) in f["ms"].items():
        pairs = ev.pairs(claim.experiment, "throughput", f["fused"], f["plain"], {"seq_len": int(length)})
        if not pairs:
            continue
        pair = middle(pairs)
        met += pair.gain >= plain_ms / fused_ms * (1 - NOISE)
        seen.append(f"{length}: {pair.gain:.2f}x against {plain_ms / fused_ms:.2f}x")
        value, what = ev.value(pair.ours, pair.gain, "ratio"), f"fused over plain at {length} tokens"
    if not seen:
        return not_measured(claim, ev, "attention at these lengths beside plain attention", solved)
    verdict = "reproduced" if met == len(f["ms"]) else "partly" if met else "not_reproduced"
    return Finding(verdict, f"{'; '.join(seen)}. {solved}", value, what)


def _solve_attention(f: dict[str, Any]) -> str:
    """For which batch x heads x layers the card could need the claimed times: from the bytes of plain attention, and at the
    most from the FLOPs of the fused."""
    card = sheet_ceilings(f["device"], "float16")
    plain, fused = [], []
    for length, (plain_ms, fused_ms) in f["ms"].items():
        n = int(length)
        plain.append(plain_ms * 1e-3 * card.read_bytes_per_s / plain_attention_bytes(1, 1, n, f["head_dim"]))
        one = attention_flops(1, 1, n, n, f["head_dim"]) / card.matmul_flops_per_s * 1e3
        fused.append(f"{fused_ms} ms at {n} is at most {fused_ms / one:,.0f}")
    return (
        f"Predicted for {f['device']}, head size {f['head_dim']}: plain attention that passes over 16-bit scores 8 times needs "
        f"the plain times for {min(plain):,.0f} to {max(plain):,.0f} heads x batch x layers; by its FLOPs the fused "
        + "; ".join(fused)
    )


def best_tile_differs(ev: Evidence, claim: Claim) -> Finding:
    """Reproduced if the fastest tile of the same shape differs between two recorded GPUs; partly if, with one GPU recorded,
    it differs between shapes. What shared memory other generations have for the fastest tile is predicted beside it."""
    best: dict[str, dict[str, Row]] = {}
    for device in tables.devices(ev.extra):
        rows = Evidence(device, ev.extra).rows(claim.experiment, claim.figures["metric"])
        for row in rows if not device.startswith("cpu") else []:
            shape = tables.params_json({k: v for k, v in row.params.items() if not k.startswith("tile")})
            old = best.setdefault(device, {}).get(shape)
            if old is None or _faster(row, old):
                best[device][shape] = row
    if not best:
        return not_measured(claim, ev, "sweep of tiles")

    def tile(row: Row) -> str:
        return tables.params_json({k: v for k, v in row.params.items() if k.startswith("tile")} | {"variant": row.variant})

    mine = best.get(ev.device) or next(iter(best.values()))
    tiles = {tile(r) for r in mine.values()}
    value = ev.value(next(iter(mine.values())), len(tiles), "count") if ev.device in best else None
    what = f"different best tiles over {len(mine)} shapes" if value else ""
    elsewhere = _fits_elsewhere(list(mine.values()))
    if len(best) == 1:
        verdict = "partly" if len(tiles) > 1 else "not_measured"
        reason = f"one GPU recorded: {len(tiles)} best tiles over {len(mine)} shapes; a second GPU decides{elsewhere}"
        return Finding(verdict, reason, value, what)
    shapes = set.intersection(*(set(b) for b in best.values()))
    differ = sum(len({tile(b[s]) for b in best.values()}) > 1 for s in shapes)
    reason = f"the best tile differs between {', '.join(best)} at {differ} of {len(shapes)} shapes{elsewhere}"
    return Finding("reproduced" if differ else "not_reproduced", reason, value, what)


def _faster(row: Row, other: Row) -> bool:
    return row.median < other.median if row.unit in ("ms", "us") else row.median > other.median


def _fits_elsewhere(rows: list[Row]) -> str:
    """What the largest of the fastest plain prefill tiles would ask of other generations' shared memory."""
    sizes = []
    for p in (row.params for row in rows):
        if p.get("kernel") == "prefill" and {"tile_block_m", "tile_block_n", "tile_stages", "head_dim"} <= set(p):
            sizes.append(PrefillTile(p["tile_block_m"], p["tile_block_n"], 0, p["tile_stages"]).shared_bytes(p["head_dim"]))
    if not sizes:
        return ""
    need = max(sizes)
    small = [f"{major}.{minor}" for (major, minor), room in sorted(SHARED.items()) if need > room - (1 << 10)]
    where = f"more than capability {', '.join(small)} has" if small else "which every generation has"
    return f"; predicted: its largest plain prefill tile takes {need >> 10} KiB of shared memory, {where}"


def care_prevents_errors(ev: Evidence, claim: Claim) -> Finding:
    """Reproduced if, on some input, arithmetic without a numerical care errs at least so many times more against float64 than
    the same arithmetic with every care, or gives outputs that are not finite where the careful has none."""
    f = claim.figures
    careful = f["careful"]
    variants = sorted({r.variant for r in ev.rows(claim.experiment, f["finite"]) if r.variant.startswith(f["careless"])})
    pairs = [p for v in variants for p in ev.pairs(claim.experiment, f["metric"], [careful], [v])]
    broken = {v: _not_finite(ev, claim, v) for v in variants}
    if not pairs and not any(broken.values()):
        return not_measured(claim, ev, f"{f['metric']} of careful and careless arithmetic")
    failed = {v: n for v, n in broken.items() if n}
    reason = "".join(f"{v} is not finite in {n} cases where {careful} is; " for v, n in failed.items())
    if not pairs:
        return Finding("reproduced" if failed else "not_reproduced", reason.rstrip("; "))
    worst = max(pairs, key=lambda p: p.base.median / p.ours.median)
    factor = worst.base.median / worst.ours.median
    reason += f"{worst.base.variant} errs {_whole(factor)} times as much as {careful} ({worst.base.median:.2g})"
    own = [r.median for v in f["own"] for r in ev.rows(claim.experiment, f["metric"], v)]
    reason += f"; the kernels themselves err by {max(own):.2g} at most over {len(own)} cases" if own else ""
    verdict = "reproduced" if factor >= f["factor"] or failed else "not_reproduced"
    what = f"the error of {worst.base.variant} over {careful}, at its worst"
    return Finding(verdict, reason, ev.value(worst.ours, factor, "ratio"), what)


def _whole(factor: float) -> str:
    """Three digits, without an exponent."""
    return f"{float(f'{factor:.3g}'):,.0f}" if factor >= 1000 else f"{factor:.3g}"


def _not_finite(ev: Evidence, claim: Claim, variant: str) -> int:
    """In how many cases a variant has outputs that are not finite, and the careful arithmetic of the same case none."""
    f = claim.figures
    sound = {at(r) for r in ev.rows(claim.experiment, f["finite"], f["careful"]) if r.median == 0}
    return sum(r.median > 0 and at(r) in sound for r in ev.rows(claim.experiment, f["finite"], variant))
