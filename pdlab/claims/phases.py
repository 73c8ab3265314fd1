"""Rules about the two phases: prefill, decode, and where their time goes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pdlab.claims.evidence import Claim, Evidence, Finding, at, not_measured, predicted
from pdlab.costs.formulas import decode_shape, prefill_shape, step_flops
from pdlab.costs.roofline import sheet_ceilings, step_time
from pdlab.costs.tables import Row
from pdlab.models.catalogue import config_of


def prefill_is_compute_bound(ev: Evidence, claim: Claim) -> Finding:
    """Reproduced if every recorded prefill step of at least so many tokens uses more of the matrix rate than of the
    bandwidth, and attention's counted FLOPs quadruple when the prompt doubles; partly if most steps do."""
    least = claim.figures["least_tokens"]
    both = [b for b in _utilizations(ev, claim, phase="prefill") if b[0].params["tokens"] * b[0].params["batch"] >= least]
    if not both:
        return not_measured(claim, ev, f"prefill steps of {least} tokens or more")
    wins = sum(c.median > b.median for c, b in both)
    top, middle = _top_and_middle(c for c, _ in both)
    cfg = config_of("llama-2-7b")
    growth = step_flops(cfg, prefill_shape(4096)).attention / step_flops(cfg, prefill_shape(2048)).attention
    share = [100 * (f := step_flops(cfg, prefill_shape(n))).attention / f.total for n in (2048, 32768)]
    reason = (
        f"{wins} of {len(both)} prefill steps of {least} tokens or more use a larger part of the matrix rate than of the "
        f"bandwidth; of the matrix rate {middle.median:.0f} % in the median, at most {top.median:.0f} % "
        f"({top.params['model']}, {top.params['batch']} x {top.params['tokens']}); attention's FLOPs grow {growth:.2f}x when "
        f"the prompt doubles, but are only {share[0]:.0f} % of all at 2048 tokens and {share[1]:.0f} % at 32768 (llama-2-7b)"
    )
    quadratic = abs(growth - 4) < 0.05
    verdict = "reproduced" if wins == len(both) and quadratic else "partly" if wins * 2 > len(both) else "not_reproduced"
    return Finding(verdict, reason, ev.value(middle), "the median step's share of the matrix rate")


def _top_and_middle(rows: Iterable[Row]) -> tuple[Row, Row]:
    """The largest row, and the median one (the lower of two)."""
    rising = sorted(rows, key=lambda r: r.median)
    return rising[-1], rising[(len(rising) - 1) // 2]


def _utilizations(ev: Evidence, claim: Claim, **where: Any) -> list[tuple[Row, Row]]:
    """(compute, bandwidth) utilization of each recorded step."""
    compute = ev.rows(claim.experiment, "compute_utilization", "ours", **where)
    bandwidth = {at(r): r for r in ev.rows(claim.experiment, "bandwidth_utilization", "ours", **where)}
    return [(c, bandwidth[at(c)]) for c in compute if at(c) in bandwidth]


def decode_underuses_compute(ev: Evidence, claim: Claim) -> Finding:
    """Reproduced if at least half of the recorded decode steps stay under the claimed compute utilization and use more of
    the bandwidth than of the matrix rate; partly if only one of the two holds."""
    limit = claim.figures["percent"]
    both = _utilizations(ev, claim, phase="decode")
    solved = _largest_batch_under(limit, claim.figures["device"])
    if not both:
        return not_measured(claim, ev, "decode steps", solved)
    under = sum(c.median < limit for c, _ in both)
    memory = sum(b.median > c.median for c, b in both)
    top, middle = _top_and_middle(c for c, _ in both)
    reason = (
        f"{under} of {len(both)} decode steps use under {limit} % of the matrix rate, {memory} a larger part of the bandwidth; "
        f"median {middle.median:.1f} %, at most {top.median:.1f} % ({top.params['model']}, batch {top.params['batch']}). "
        f"{solved}"
    )
    holds = (2 * under >= len(both)) + (2 * memory >= len(both))
    what = "the median step's share of the matrix rate"
    return Finding(("not_reproduced", "partly", "reproduced")[holds], reason, ev.value(middle), what)


def _largest_batch_under(percent: float, device: str) -> str:
    """Up to which batch a perfect engine on the claim's card would leave so much of its matrix rate unused."""
    cfg, card = config_of("llama-2-7b"), sheet_ceilings(device, "float16")

    def share(batch: int) -> float:
        r = step_time(cfg, decode_shape(batch, 512), card, 2)
        return 100 * r.compute_seconds / r.seconds

    batch = next((b for b in range(1, 513) if share(b) >= percent), None)
    until = f"up to batch {batch - 1}" if batch else f"at any batch (at most {share(512):.0f} %)"
    return f"Predicted for {device}, llama-2-7b over 512 cached tokens: under {percent} % {until}, even at the roofline"


def fixed_bytes(ev: Evidence, claim: Claim) -> Finding:
    """Time is bytes over used bandwidth. Impossible as stated if, at fixed bytes, no rounding of the stated percentages
    and of the earlier time gives the later time; else the recorded rows of E2 decide."""
    f = claim.figures
    before, after, ms, claimed = f["before_percent"], f["after_percent"], f["before_ms"], f["after_ms"]
    expected = ms * before / after
    low = (ms - 0.05) * (before - 0.5) / (after + 0.5)
    high = (ms + 0.05) * (before + 0.5) / (after - 0.5)
    bandwidth = sheet_ceilings(f["device"]).read_bytes_per_s
    moved = ms / 1e3 * before / 100 * bandwidth
    solved = (
        f"on {f['device']} {ms} ms at {before} % is {moved / 1e9:.1f} GB a token, "
        f"so a model of {moved / 2e9:.1f} B weights of two bytes"
    )
    ours = predicted(expected, "ms", f["device"])
    what = f"{ms} ms at {before} % brought to {after} %"
    if not low <= claimed + 0.05 or not claimed - 0.05 <= high:
        span = f"{low:.2f} to {high:.2f} with rounding"
        reason = f"{before} to {after} % takes {ms} ms to {expected:.2f} ms ({span}), not {claimed}; {solved}"
        return Finding("impossible", reason, ours, what)
    return not_measured(claim, ev, "bandwidth techniques", solved, ours, what)
