"""Do the article's three ways of using more bandwidth help, each alone and together, and do hints for the caches?

Part 1, CUDA C++ (kernels.cuda_norm_product), a norm and a matrix-vector product: `none`, `restrict` (`__restrict__` pointers),
`shared_norm` (norm weights and x kept in shared memory instead of read again for each row), `article` (both). `latency`,
`bandwidth`, and from the disassembly `constant_loads`, `global_loads`, `shared_loads`, `instructions`. The Z-order, the third
technique, has a suite of its own: kv_layout.

Part 2, Triton (kernels.hinted_product): hints on the weights' loads, for one matrix alone, and for a matrix that is read in
every step beside a stream of others that together are larger than the L2 cache: what a hint could keep there.

Everything is checked against float64, timed in turns in a CUDA graph over weights rotated past L2, and held against the read
bandwidth of the same run. Without a GPU the disassembly is compared where NVRTC is there, and nothing is timed.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from pdlab.hardware.timing import L2Rotation, Timings, graph_time_us

if TYPE_CHECKING:
    import torch

    from pdlab.bench.suites import Context

NAME = "bandwidth_techniques"
HELP = "norm weights in shared memory, __restrict__ and cache hints: what each does to a matrix-vector product"

# outputs, k of the QKV, MLP up and MLP down products of LLaMA 8B and of the QKV product of 1B
SHAPES = ((6144, 4096), (28672, 4096), (4096, 14336), (3072, 2048))
KEPT, STREAM = (3072, 4096), 8  # a matrix of 25 MB that is read in every step, and how many of its size pass by in between
_COUNTED = ("instructions", "global_loads", "constant_loads", "shared_loads")


def _weights(ctx: Context, rows: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    import torch

    dtype = torch.bfloat16
    return (
        (torch.randn(rows, k, device=ctx.device) * k**-0.5).to(dtype),
        torch.randn(k, device=ctx.device).to(dtype),
        (1 + 0.2 * torch.randn(k, device=ctx.device)).to(dtype),
    )


def _rates(ctx: Context, times: dict[str, Timings], nbytes: int, params: dict[str, Any]) -> None:
    for name, t in times.items():
        ctx.record.add("bandwidth", t.rate(nbytes / 1e6, "TB/s"), variant=name, params=params)


def norm_products(ctx: Context, rows: int, k: int, read: float) -> None:
    """Part 1 for one shape."""
    from pdlab.bench import _decode
    from pdlab.kernels.cuda_norm_product import BLOCKS_PER_SM, VARIANTS, NormProduct

    w, x, g = _weights(ctx, rows, k)
    y = x.double()
    truth = w.double() @ (y * g.double() / (y.square().mean() + 1e-5).sqrt())
    tried = {(name, blocks): NormProduct(name, k, blocks) for name in VARIANTS for blocks in BLOCKS_PER_SM}
    for (name, _), kernel in tried.items():
        _decode.check(name, kernel(w, x, g), truth)
    nbytes = w.numel() * w.element_size()
    rotation = L2Rotation(lambda i: _weights(ctx, rows, k), nbytes)
    quick = {key: graph_time_us(kernel, rotation=rotation, n=3, warmup=1).median for key, kernel in tried.items()}
    best = {name: min(BLOCKS_PER_SM, key=lambda blocks: quick[name, blocks]) for name in VARIANTS}
    kernels = {name: tried[name, blocks] for name, blocks in best.items()}  # each variant on the grid that suits it
    params = {"case": "norm_product", "rows": rows, "k": k, "dtype": "bfloat16"}
    times = _decode.take_turns(kernels, rotation, ctx.device, graph=True)
    settings = {name: {"blocks_per_sm": blocks} for name, blocks in best.items()}
    _decode.report(ctx, times, nbytes / read * 1e6, params, **settings)
    _rates(ctx, times, nbytes, params)
    disassembly(ctx, {name: kernel.code for name, kernel in kernels.items()}, k)


def disassembly(ctx: Context, codes: dict[str, bytes], k: int) -> None:
    from pdlab.kernels.nvrtc import count_instructions, sass

    for name, code in codes.items():
        found = count_instructions(sass(code))
        for metric in _COUNTED:
            ctx.record.add(metric, found[metric], "count", variant=name, params={"case": "norm_product", "k": k})


def hints(ctx: Context, rows: int, k: int, read: float) -> None:
    """Part 2 for one matrix alone."""
    from pdlab.bench import _decode
    from pdlab.kernels.hinted_product import HINTS, hinted_product

    w, x, _ = _weights(ctx, rows, k)
    truth = w.double() @ x.double()
    calls = {name: partial(hinted_product, hint=name) for name in HINTS}
    for name, call in calls.items():
        _decode.check(name, call(w, x), truth)
    nbytes = w.numel() * w.element_size()
    rotation = L2Rotation(lambda i: _weights(ctx, rows, k)[:2], nbytes)
    params = {"case": "hint_alone", "rows": rows, "k": k, "dtype": "bfloat16"}
    times = _decode.take_turns(calls, rotation, ctx.device, graph=True)
    _decode.report(ctx, times, nbytes / read * 1e6, params)
    _rates(ctx, times, nbytes, params)


def kept_beside_a_stream(ctx: Context, read: float) -> None:
    """Part 2 for a matrix that comes back in every step; the floor still counts every byte, so a kept matrix can beat it."""
    from pdlab.bench import _decode
    from pdlab.kernels.hinted_product import hinted_product

    sets = [_weights(ctx, *KEPT)[:2] for _ in range(1 + STREAM)]

    def step(kept: str, stream: str) -> None:
        hinted_product(*sets[0], hint=kept)
        for w, x in sets[1:]:
            hinted_product(w, x, hint=stream)

    pairs = {"none": ("none", "none"), "evict_first": ("none", "evict_first"), "evict_last": ("evict_last", "evict_first")}
    calls = {name: partial(step, *pair) for name, pair in pairs.items()}
    nbytes = sum(w.numel() * w.element_size() for w, _ in sets)
    params = {"case": "kept_beside_a_stream", "rows": KEPT[0], "k": KEPT[1], "matrices": 1 + STREAM, "dtype": "bfloat16"}
    rotation = L2Rotation(lambda i: (), nbytes, l2_bytes=0)
    times = _decode.take_turns(calls, rotation, ctx.device, graph=True, n=7)
    _decode.report(ctx, times, nbytes / read * 1e6, params)
    _rates(ctx, times, nbytes, params)


def run(ctx: Context) -> None:
    from pdlab.bench import _decode
    from pdlab.kernels import nvrtc
    from pdlab.kernels.cuda_norm_product import VARIANTS, cubin

    missing = nvrtc.why_not()
    capability = ctx.machine.capability or (0, 0)
    if not ctx.machine.is_gpu:
        if missing:
            ctx.record.skip("constant_loads", "count", missing, params={"case": "norm_product", "k": 4096})
        else:
            disassembly(ctx, {name: cubin(name, 4096, "sm_90") for name in VARIANTS}, 4096)
        return
    if capability < (8, 0):
        ctx.record.skip("latency", "us", "the kernels read bfloat16, from capability 8.0 on", params={})
        return
    read = _decode.read_ceiling(ctx)
    for i, (rows, k) in enumerate(SHAPES if ctx.full else SHAPES[:1]):
        if ctx.left() <= 0:
            ctx.record.skip("latency", "us", "the time budget ran out", params={"rows": rows, "k": k})
            continue
        if missing:
            ctx.record.skip("latency", "us", missing, params={"case": "norm_product", "rows": rows, "k": k})
        else:
            norm_products(ctx, rows, k, read)
        if i == 0:
            kept_beside_a_stream(ctx, read)
        hints(ctx, rows, k, read)
