"""Which attention backend is fastest here, by phase, length and batch; the answer becomes the device's dispatch table.

Every backend that can run is timed on the same paged cache; the fastest of each cell goes to tuning/<device>.json, as rules
that `kernels.dispatch` reads (the smallest bounds first). A difference within the timer's own spread goes to the default.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdlab.bench.suites import Context

NAME = "attention_dispatch"
HELP = "every attention backend by phase, length and batch; writes the device's dispatch table"

_CELLS = {
    "full": [("prefill", n, b) for n in (32, 128, 512, 2048, 8192) for b in (1, 8)]
    + [("decode", n, b) for n in (512, 4096, 32768) for b in (1, 8, 64) if n * b <= 300_000],
    "smoke": [("prefill", 64, 1), ("prefill", 128, 2), ("decode", 256, 1), ("decode", 256, 4)],
}


def rules(fastest: dict[tuple[str, int, int], str], dtype: str, head_dim: int, default: str) -> list[dict[str, Any]]:
    """Table entries, smallest bounds first; cells the default wins are written too, or a larger bound would hide them."""
    made = []
    for (phase, length, batch), name in sorted(fastest.items()):
        bounds = {"max_q": length, "max_batch": batch} if phase == "prefill" else {"max_kv": length, "max_batch": batch}
        made.append({"phase": phase, "dtype": dtype, "head_dim": head_dim, **bounds, "backend": name})
    return made if any(name != default for name in fastest.values()) else []


def run(ctx: Context) -> None:
    from pdlab.bench import _attention as common
    from pdlab.kernels.dispatch import default_backend, why_not

    page = 16
    default = default_backend(ctx.machine.capability, ctx.dtype)
    names = [n for n in ("plain", "sdpa", "triton") if not why_not(n, ctx.machine.capability)]
    for heads, kv_heads, dim in [(32, 8, 128), (32, 8, 64)] if ctx.full else [(6, 2, 64)]:
        fastest = {}
        for phase, n, batch in _CELLS[ctx.profile]:
            params = {"heads": heads, "kv_heads": kv_heads, "head_dim": dim, "phase": phase, "length": n, "batch": batch}
            params |= {"dtype": ctx.dtype, "page": page}
            if ctx.left() <= 0:
                ctx.record.skip("latency", "ms", "the time budget ran out", params=params)
                continue
            new = n if phase == "prefill" else 1
            q, view = common.make_view(
                [n] * batch, [new] * batch, heads=heads, kv_heads=kv_heads, head_dim=dim, page=page, dtype=ctx.dtype,
                device=ctx.device, seed=ctx.seed,
            )  # fmt: skip
            some = [x for x in names if x != "plain" or n * batch * (n if phase == "prefill" else 1) <= 1 << 25]
            calls = {name: common.backend(name, q, view, batch) for name in some}
            times = common.measure(calls, q, view, graph=phase == "decode", rounds=2)
            for name, t in times.items():
                ctx.record.add("latency", t, variant=name, params=params)
            best = min(times, key=lambda name: times[name].median)
            usual = times.get(default)
            fastest[phase, n, batch] = default if usual is not None and usual.p10 <= times[best].p90 else best
            ctx.say(f"  {dim} {phase} {n} x {batch}: " + ", ".join(f"{k} {t.median:.3f} ms" for k, t in times.items()))
        if fastest:
            made = rules(fastest, ctx.dtype, dim, default)
            common.write_table(ctx, "attention_dispatch", made, {"head_dim": dim, "dtype": ctx.dtype})
