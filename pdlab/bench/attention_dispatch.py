"""Which attention backend is fastest here, by phase, length and batch; the answer becomes the device's dispatch table.

Every backend that can run is timed on the same paged cache, SDPA also with each of its kernels forced; the fastest of each
cell goes to tuning/<device>.json, as rules that `kernels.dispatch` reads (the smallest bounds first). A difference within the
timer's own spread goes to the default. Without --record the table goes to the user's own folder, where it extends the shipped.
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
_SHAPES = {"full": ((32, 8, 128), (32, 8, 64)), "smoke": ((6, 2, 64),)}
_PLAIN_UP_TO = 1 << 25  # scores of plain attention, which is hopeless beyond


def rules(fastest: dict[tuple[str, int, int], str], dtype: str, head_dim: int, default: str) -> list[dict[str, Any]]:
    """Table entries, smallest bounds first; cells the default wins are written too, or a larger bound would hide them."""
    made = []
    for (phase, length, batch), name in sorted(fastest.items()):
        bounds = {"max_kv": length, "max_batch": batch} | ({"max_q": length} if phase == "prefill" else {})
        made.append({"phase": phase, "dtype": dtype, "head_dim": head_dim, **bounds, "backend": name})
    return made


def candidates(phase: str, page: int, capability: tuple[int, int] | None) -> list[str]:
    """Backends worth timing for steps of a phase: those that run here, SDPA's kernels apart where they can be forced.

    A kernel can be forced for prompts only: single queries come with a mask, which most of them refuse.
    """
    from pdlab.kernels.dispatch import why_not

    names = ["plain", "sdpa", "triton"] + ["flash_attn"] * (page % 256 == 0)
    if phase == "prefill" and capability is not None:
        names += ["sdpa:cudnn", "sdpa:flash", "sdpa:efficient"]
    return [name for name in names if not why_not(name.partition(":")[0], capability)]


def run(ctx: Context) -> None:
    from pdlab.bench import _attention as common
    from pdlab.kernels.dispatch import default_backend, why_not

    default = default_backend(ctx.machine.capability, ctx.dtype)
    flash_attn = why_not("flash_attn", ctx.machine.capability) is None
    for heads, kv_heads, dim in _SHAPES[ctx.profile]:
        shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": dim}
        for page in (16, 256) if flash_attn else (16,):
            fastest = {}
            for phase, n, batch in _CELLS[ctx.profile]:
                params = shape | {"phase": phase, "length": n, "batch": batch, "dtype": ctx.dtype, "page": page}
                if ctx.left() <= 0:
                    ctx.record.skip("latency", "ms", "the time budget ran out", params=params)
                    continue
                fastest[phase, n, batch] = _cell(ctx, params, default)
            if fastest:
                pages = {"min_page": page} if page == 256 else {"max_page": 255}
                made = [entry | pages for entry in rules(fastest, ctx.dtype, dim, default)]
                common.write_table(ctx, "attention_dispatch", made, {"head_dim": dim, "dtype": ctx.dtype, **pages})
    common.insist(ctx)


def _cell(ctx: Context, params: dict[str, Any], default: str) -> str:
    """The fastest backend of one cell."""
    from pdlab.bench import _attention as common

    n, batch, phase = params["length"], params["batch"], params["phase"]
    heads = {name: params[name] for name in ("heads", "kv_heads", "head_dim", "page")}
    new = n if phase == "prefill" else 1
    q, view = common.make_view([n] * batch, [new] * batch, **heads, dtype=ctx.dtype, device=ctx.device, seed=ctx.seed)
    names = candidates(phase, params["page"], ctx.machine.capability)
    if n * batch * new > _PLAIN_UP_TO and len(names) > 1:
        names.remove("plain")
    calls = {name: common.backend(name, q, view, batch) for name in names}
    found = common.measure(calls, q, view, graph=phase == "decode", rounds=2, budget_ms=30)
    common.record_left_out(ctx, found.left_out, "latency", "ms", params)
    times = found.times
    for name, t in times.items():
        ctx.record.add("latency", t, variant=name, params=params)
    if not times:  # `insist` fails the suite at its end where ours is among them
        return default
    best = min(times, key=lambda name: times[name].median)
    usual = times.get(default)
    told = ", ".join(f"{k} {t.median:.3f}" for k, t in times.items())
    ctx.say(f"  {params['head_dim']} {phase} {n} x {batch}, page {params['page']}, ms: {told}")
    return default if usual is not None and usual.p10 <= times[best].p90 else best
