"""Decode attention over a paged cache: this project's kernel beside FlashInfer and FA3, and torch's SDPA after a gather.

Bytes a step: 2 * tokens in the cache * KV heads * head size * itemsize; `floor_latency` is that over the read bandwidth
measured in the same run, and `share_of_floor` how much of it was reached. Calls are timed inside a CUDA graph of 20 over
rotated caches. Where `ours` is launched as a programmatic dependent, its loads begin under the call before, as they do under
a model's preceding kernel; `ours_alone` is the same without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdlab.bench.suites import Context

NAME = "attention_decode"
HELP = "decode attention over pages and extents: latency and bandwidth by batch, length and page size"

RAGGED = (131072, *[4096] * 31)  # one long request beside many of ordinary length
# Batch, tokens a request, tokens a page (0: extents). First what the targets name, then batches and lengths, then pages.
_FULL = [(1, 4096, 16), (8, 4096, 16), (32, 4096, 16), (1, 65536, 16), (128, 2048, 16)]
_GRID = [(b, kv, 16) for b in (1, 4, 16, 64, 128) for kv in (1024, 4096, 16384, 65536, 131072) if b * kv <= 1 << 19]
_GRID += [(8, 65536, 16)]
_PAGES = [(b, 4096, page) for page in (1, 64, 0) for b in (1, 8, 32)]
_OTHER_HEADS = [(1, 4096, 16), (8, 4096, 16), (32, 4096, 16), (1, 65536, 16)]
_SMOKE = [(1, 256, 16), (4, 256, 16), (4, 128, 0)]


def cases(full: bool) -> list[tuple[list[int], dict[str, Any]]]:
    """(lengths, params) of each case; page 0 means extents."""
    if not full:
        return [_case((6, 2, 64), [kv] * b, page) for b, kv, page in _SMOKE]
    made = [_case((32, 8, 128), [kv] * b, page) for b, kv, page in _FULL]
    made += [_case((32, 8, 128), list(RAGGED), page, ragged=True) for page in (16, 1, 64)]
    made += [_case((32, 8, 128), [kv] * b, page) for b, kv, page in _PAGES + _GRID if (b, kv, page) not in _FULL]
    made += [_case(heads, [kv] * b, page) for heads in ((32, 32, 64), (32, 8, 64)) for b, kv, page in _OTHER_HEADS]
    return made


def _case(heads: tuple[int, int, int], lens: list[int], page: int, ragged: bool = False) -> tuple[list[int], dict[str, Any]]:
    n, k, d = heads
    shape = {"heads": n, "kv_heads": k, "head_dim": d}
    return lens, shape | {"batch": len(lens), "kv_len": max(lens), "page": page, "ragged": ragged}


def run(ctx: Context) -> None:
    from pdlab.bench import _attention as common

    read = common.record_ceilings(ctx).read_bytes_per_s
    named: set[str] = set()
    for lens, params in cases(ctx.full):
        params = params | {"dtype": ctx.dtype}
        if ctx.left() <= 0:
            ctx.record.skip("latency", "us", "the time budget ran out", params=params)
            continue
        _measure(ctx, lens, params, read, named)
    common.insist(ctx)


def _measure(ctx: Context, lens: list[int], params: dict[str, Any], read: float, named: set[str]) -> None:
    """`named`: rivals whose absence has been written already."""
    from pdlab.bench import _attention as common
    from pdlab.bench import _attention_rivals as rivals

    heads = {name: params[name] for name in ("heads", "kv_heads", "head_dim", "page")}
    q, view = common.make_view(lens, [1] * len(lens), **heads, dtype=ctx.dtype, device=ctx.device, seed=ctx.seed)
    names = {"ours": "auto", "sdpa": "sdpa"} if ctx.machine.is_gpu else {"plain": "plain", "sdpa": "sdpa"}
    if ctx.machine.is_gpu and (params["ragged"] or params["page"] != 16 or sum(lens) > 40_000):
        names.pop("sdpa")  # gathering first loses by far, and the more there is to gather the longer it takes to tell
    calls = {name: common.backend(backend, q, view, len(lens)) for name, backend in names.items()}
    if ctx.machine.is_gpu:
        if (ctx.machine.capability or (0, 0)) >= (9, 0):
            calls["ours_alone"] = common.decode_alone(q, view, len(lens))
        there, missing = rivals.decode(q, view)
        calls |= there
        new = {name: why for name, why in missing.items() if name not in named}
        common.record_left_out(ctx, new, "latency", "us", params)
        named |= set(new)
    moved = 2 * sum(lens) * params["kv_heads"] * params["head_dim"] * q.element_size()
    ctx.record.add("floor_latency", moved / read * 1e6, "us", kind="predicted", params=params)
    found = common.measure(calls, q, view, graph=True, budget_ms=40)
    common.record_left_out(ctx, found.left_out, "latency", "us", params)
    for name, t in found.times.items():
        ctx.record.add("latency", t.scaled(1e3, "us"), variant=name, params=params)
        ctx.record.add("bandwidth", t.rate(moved / 1e9, "TB/s"), variant=name, params=params)
        ctx.record.add("share_of_floor", t.rate(100e3 * moved / read, "percent"), variant=name, params=params)
    times = ", ".join(f"{name} {t.median * 1e3:.1f}" for name, t in found.times.items())
    what = f"{params['heads']}/{params['kv_heads']} x {params['head_dim']}, {params['batch']} x {params['kv_len']}"
    ctx.say(f"  {what}, page {params['page']}{', ragged' * params['ragged']}, us: {times} (floor {moved / read * 1e6:.1f})")
