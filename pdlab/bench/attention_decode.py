"""Decode attention over a paged cache: this project's kernel beside FlashInfer, and torch's SDPA after a gather.

Bytes a step: 2 * tokens in the cache * KV heads * head size * itemsize; `floor_latency` is that over the read bandwidth
measured in the same run. Calls are timed inside a CUDA graph of 20 over rotated caches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdlab.bench.suites import Context

NAME = "attention_decode"
HELP = "decode attention over pages and extents: latency and bandwidth by batch, length and page size"

RAGGED = [131072] + [4096] * 31  # one long request beside many of ordinary length
_FULL = [(1, 4096, 16), (1, 65536, 16), (8, 4096, 16), (32, 4096, 16), (128, 2048, 16), (1, 1024, 16), (32, 1024, 16),
         (128, 1024, 16), (1, 131072, 16), (32, 4096, 1), (32, 4096, 64), (8, 4096, 64), (32, 4096, 0)]  # fmt: skip
_SMOKE = [(1, 256, 16), (4, 256, 16), (4, 128, 0)]


def cases(full: bool, heads: tuple[int, int, int]) -> list[tuple[list[int], dict[str, Any]]]:
    """(lengths, params) of each case; page 0 means extents."""
    n, k, d = heads
    shape = {"heads": n, "kv_heads": k, "head_dim": d}
    made = [
        ([kv] * b, shape | {"batch": b, "kv_len": kv, "page": p, "ragged": False}) for b, kv, p in (_FULL if full else _SMOKE)
    ]
    if full:
        made.append((RAGGED, shape | {"batch": len(RAGGED), "kv_len": max(RAGGED), "page": 16, "ragged": True}))
    return made


def run(ctx: Context) -> None:
    from pdlab.bench import _attention as common
    from pdlab.bench import ceilings

    read = ceilings.measure(ctx.device, ctx.dtype).read_bytes_per_s
    shapes = [(32, 8, 128), (32, 32, 64)] if ctx.full else [(6, 2, 64)]
    for lens, params in [case for heads in shapes for case in cases(ctx.full, heads)]:
        params = params | {"dtype": ctx.dtype}
        if ctx.left() <= 0:
            ctx.record.skip("latency", "us", "the time budget ran out", params=params)
            continue
        heads = {name: params[name] for name in ("heads", "kv_heads", "head_dim", "page")}
        q, view = common.make_view(lens, [1] * len(lens), **heads, dtype=ctx.dtype, device=ctx.device, seed=ctx.seed)
        gathered = "sdpa" if ctx.machine.is_gpu else "plain"
        calls = {"ours": common.backend("auto", q, view, len(lens)), gathered: common.backend(gathered, q, view, len(lens))}
        if not ctx.machine.is_gpu:
            calls = {"plain": calls["plain"], "sdpa": common.backend("sdpa", q, view, len(lens))}
        elif params["ragged"] or sum(lens) > 200_000:
            calls.pop(gathered)  # padding every request to the longest one would not fit
        calls |= common.decode_rivals(q, view)
        nbytes = 2 * sum(lens) * params["kv_heads"] * params["head_dim"] * q.element_size()
        ctx.record.add("floor_latency", nbytes / read * 1e6, "us", kind="predicted", params=params)
        for name, t in common.measure(calls, q, view, graph=True).items():
            ctx.record.add("latency", t.scaled(1e3, "us"), variant=name, params=params)
            ctx.record.add("bandwidth", t.rate(nbytes / 1e9, "TB/s"), variant=name, params=params)
            share = nbytes / read / (t.median * 1e-3)
            ctx.say(
                f"  {params['batch']} x {params['kv_len']} page {params['page']} {name}: {t.median * 1e3:.1f} us, {share:.0%}"
            )
