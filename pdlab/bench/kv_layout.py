"""Does the order of the cache's bytes matter to decode attention? Per token, per head, and two Z-orders, in one kernel.

`latency` and `bandwidth` of each layout of kernels.kv_layouts on the same numbers, checked against float64, and of the engine's
own kernel over pages of 16 tokens. `floor_latency`: the bytes of K and V over the read bandwidth measured in the same run.
On a GPU, calls are timed inside a CUDA graph of 20 over rotated caches. Without one, `order_cost` is timed instead: how long
plain PyTorch takes to put a cache into the layout's order; it shows that the four orders exist, not how fast a GPU reads them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from pdlab.bench.suites import Context

NAME = "kv_layout"
HELP = "decode attention over K and V laid out per token, per head and in Z-order"

_CASES = {"full": ((8, 4096), (1, 65536), (32, 4096), (1, 4096)), "smoke": ((2, 256),)}
_TILES = ((64, 4, 3), (128, 8, 3))  # tokens a step, warps, stages: the better of them stands for a layout


def _caches(batch: int, length: int, heads: tuple[int, int, int], ctx: Context) -> tuple[torch.Tensor, ...]:
    """q [B, N, D] and K, V [B, T, H, D]."""
    import torch

    n, h, d = heads
    g = torch.Generator(ctx.device).manual_seed(ctx.seed)
    dtype = getattr(torch, ctx.dtype)
    shapes = ((batch, n, d), (batch, length, h, d), (batch, length, h, d))
    return tuple(torch.randn(*s, generator=g, device=ctx.device).to(dtype) for s in shapes)


def _truth(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of the last request in float64, [1, N, D]."""
    keys, values = (x[-1:].transpose(1, 2).double() for x in (k, v))
    grouped = q[-1:].double().view(1, keys.shape[1], -1, q.shape[2]) * q.shape[2] ** -0.5
    out: torch.Tensor = (grouped @ keys.transpose(-1, -2)).softmax(-1) @ values
    return out.view(1, *q.shape[1:])


def _measure(ctx: Context, batch: int, length: int, heads: tuple[int, int, int], read: float) -> None:
    import torch

    from pdlab.bench import _attention, _decode
    from pdlab.hardware.timing import L2Rotation
    from pdlab.kernels.kv_layouts import LAYOUTS, arrange, layout_decode

    n, h, d = heads
    params = {"batch": batch, "kv_len": length, "heads": n, "kv_heads": h, "head_dim": d, "dtype": ctx.dtype}
    q, k, v = _caches(batch, length, heads, ctx)
    truth = _truth(q, k, v)
    programs = 4 * (ctx.machine.multiprocessors or 1)
    nbytes = 2 * k.numel() * k.element_size()
    calls: dict[str, Any] = {}
    for layout in LAYOUTS:
        at = arrange(k, layout), arrange(v, layout)
        for block_n, warps, stages in _TILES:
            call = partial(
                layout_decode, layout=layout, length=length, kv_heads=h, programs=programs, block_n=block_n, warps=warps,
                stages=stages,
            )  # fmt: skip
            _decode.check(layout, call(q, *at)[-1:], truth)
            calls[f"{layout}/{block_n}"] = call
        del at
    rest: dict[str, Any] = {
        "heads": n,
        "kv_heads": h,
        "head_dim": d,
        "page": 16,
        "dtype": ctx.dtype,
        "device": ctx.device,
        "seed": ctx.seed,
    }
    paged, view = _attention.make_view([length] * batch, [1] * batch, **rest)
    engine = _attention.backend("auto", paged, view, batch)
    _attention.check("ours", engine, paged, view)

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:  # random numbers are random in any order
        pages: torch.Tensor = engine(q, replace(view, k=k.view(view.k.shape), v=v.view(view.v.shape)))
        return pages

    rotation = L2Rotation(lambda i: (q, *(torch.randn_like(k).view(batch, -1) for _ in "kv")), nbytes)
    times = _decode.take_turns(calls | {"ours": ours}, rotation, ctx.device, graph=True, n=7, budget_ms=20)
    best = {x: min((t for name, t in times.items() if name.startswith(x + "/")), key=lambda t: t.median) for x in LAYOUTS}
    best["ours"] = times["ours"]
    _decode.report(ctx, best, nbytes / read * 1e6, params)
    for name, t in best.items():
        ctx.record.add("bandwidth", t.rate(nbytes / 1e6, "TB/s"), variant=name, params=params)


def _order(ctx: Context, batch: int, length: int, heads: tuple[int, int, int]) -> None:
    from pdlab.hardware.timing import time_ms
    from pdlab.kernels.kv_layouts import LAYOUTS, arrange

    _, k, _ = _caches(batch, length, heads, ctx)
    params = {"batch": batch, "kv_len": length, "kv_heads": heads[1], "head_dim": heads[2], "dtype": ctx.dtype}
    for layout in LAYOUTS:
        ctx.record.add("order_cost", time_ms(partial(arrange, k, layout), n=5), variant=layout, params=params)


def run(ctx: Context) -> None:
    from pdlab.bench import _decode
    from pdlab.kernels.dispatch import why_not

    reason = why_not("triton", ctx.machine.capability)
    if not ctx.machine.is_gpu:
        for batch, length in _CASES["smoke"]:
            _order(ctx, batch, length, (4, 2, 32))
        return
    if reason:
        ctx.record.skip("latency", "us", reason, params={})
        return
    read = _decode.read_ceiling(ctx)
    for batch, length in _CASES[ctx.profile]:
        if ctx.left() <= 0:
            ctx.record.skip("latency", "us", "the time budget ran out", params={"batch": batch, "kv_len": length})
            continue
        _measure(ctx, batch, length, (32, 8, 128), read)
