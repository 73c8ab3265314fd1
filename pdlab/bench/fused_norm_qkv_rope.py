"""Norm, QKV product, rotary embedding and the cache write of one layer: one kernel beside the operations one by one.

    latency        us a call; `graph` true: inside a CUDA graph of 20 calls, false: launched one by one from Python
    floor_latency  us: weights and activations once / read bandwidth of the same run

Variants `ours`, `unfused` (the same operations apart, as one writes them in PyTorch) and `torch_compile` (those compiled by
Inductor). Decode batches of 1 to 64 rows on the layers of published shapes; weights are rotated past L2, the variants take
turns, and each is checked against float64 first.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pdlab.core.errors import PdlabError
from pdlab.costs.formulas import decode_shape, itemsize_of, step_bytes
from pdlab.hardware.timing import L2Rotation
from pdlab.models.catalogue import config_of
from pdlab.models.config import ModelConfig

if TYPE_CHECKING:
    import torch

    from pdlab.bench.suites import Context
    from pdlab.kernels.kv_view import KVView
    from pdlab.kernels.ops import LayerWeights, RopeTable

NAME = "fused_norm_qkv_rope"
HELP = "norm + QKV + rotary embedding + cache write, fused and apart, by batch"

MODELS = {"full": ("llama-3-8b", "llama-1b", "llama-2-7b", "gpt2-xl"), "smoke": ("llama-tiny", "gpt2-tiny")}
BATCHES = {"full": (1, 8, 32, 64, 16, 4, 2), "smoke": (1, 4)}
COMPILED = {"llama-3-8b": (1, 32)}  # torch.compile takes seconds a case
PAGE, POSITIONS = 16, 2048

# what a step makes once and not in each layer: page and row of each slot, cos and sin at each position [T, 1, D]
Once = tuple["torch.Tensor", "torch.Tensor", "torch.Tensor | None", "torch.Tensor | None"]
Arguments = tuple["torch.Tensor", "LayerWeights", "RopeTable | None", "KVView", Once]


def make_layer(config: ModelConfig, ctx: Context, seed: int) -> LayerWeights:
    """Random weights of one layer; what this operation does not read is left tiny."""
    import torch

    from pdlab.kernels.ops import LayerWeights, NormWeights

    g = torch.Generator(ctx.device).manual_seed(seed)
    dtype = getattr(torch, ctx.dtype)

    def rand(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (scale * torch.randn(shape, generator=g, device=ctx.device)).to(dtype)

    h, rows = config.hidden_size, config.q_size + 2 * config.kv_size
    bias = rand(h, scale=0.2) if config.family == "gpt2" else None
    norm = NormWeights(1 + rand(h, scale=0.2), bias, config.norm_eps)
    qkv_bias = rand(rows) if config.qkv_bias else None
    unread = rand(1, 1)
    return LayerWeights(
        norm, rand(rows, h, scale=h**-0.5), qkv_bias, None, None, unread, None, norm, unread, None, unread, None
    )


def make_arguments(config: ModelConfig, ctx: Context, batch: int, seed: int) -> Arguments:
    """x, a layer, a rotary table, a view whose slots lie in scattered pages, and what follows from it."""
    import torch

    from pdlab.kernels.kv_view import KVView
    from pdlab.models.model import rope_table

    device, dtype = ctx.device, getattr(torch, ctx.dtype)
    g = torch.Generator(device).manual_seed(seed + 1)
    x = torch.randn((batch, config.hidden_size), generator=g, device=device).to(dtype)
    rope = None if config.family == "gpt2" else rope_table(replace(config, max_context=POSITIONS), device)
    shape = (2 * batch, config.num_kv_heads, PAGE, config.head_dim)
    k, v = (torch.zeros(shape, dtype=dtype, device=device) for _ in "kv")
    slots = torch.randperm(2 * batch * PAGE, generator=g, device=device)[:batch]
    positions = torch.randint(0, POSITIONS, (batch,), generator=g, device=device)
    none = torch.zeros(0, dtype=torch.int32, device=device)
    view = KVView("paged", PAGE, k, v, none, none.long(), none, none, slots, positions, 1, 1)
    cos = sin = None
    if rope is not None:
        cos, sin = (torch.cat((t[positions],) * 2, -1).unsqueeze(1).to(dtype) for t in (rope.cos, rope.sin))
    return x, make_layer(config, ctx, seed), rope, view, (slots // PAGE, slots % PAGE, cos, sin)


def in_float64(x: torch.Tensor, w: LayerWeights, rope: RopeTable | None, view: KVView) -> tuple[torch.Tensor, ...]:
    """q, and the new K and V, each [T, heads, D], from the formulas."""
    import torch

    y = x.double()
    norm = w.attn_norm
    if norm.bias is not None:
        y = y - y.mean(-1, keepdim=True)
    y = y / (y.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()
    y = y if norm.bias is None else y + norm.bias.double()
    packed = y @ w.qkv.double().T + (0.0 if w.qkv_bias is None else w.qkv_bias.double())
    kv_heads, dim = view.k.shape[1], view.k.shape[3]
    parts = packed.view(len(x), -1, dim).split((w.qkv.shape[0] // dim - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    if rope is None:
        return parts
    cos, sin = (table[view.positions][:, None].double() for table in (rope.cos, rope.sin))

    def turn(t: torch.Tensor) -> torch.Tensor:
        a, b = t.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    return turn(parts[0]), turn(parts[1]), parts[2]


def check(name: str, call: Any, arguments: Arguments) -> None:
    """AssertionError unless q and what was written to the cache are right."""
    import torch

    from pdlab.bench import _decode

    x, w, rope, view, _ = arguments
    view.k.zero_()
    view.v.zero_()
    q = call(*arguments)
    at = view.slots // PAGE, slice(None), view.slots % PAGE
    truth = in_float64(x, w, rope, view)
    for what, got, true in zip(("q", "K", "V"), (q, view.k[at], view.v[at]), truth):
        _decode.check(f"{name}'s {what}", got, true)
    written = int((view.k.abs().amax((1, 3)) > 0).sum())
    if written != len(x) or not torch.isfinite(q).all():
        raise AssertionError(f"{name} wrote {written} slots of the cache instead of {len(x)}")


def apart(x: torch.Tensor, w: LayerWeights, rope: RopeTable | None, view: KVView, once: Once) -> torch.Tensor:
    """The operations one by one, as one writes them in PyTorch: its own norm, one product, half-rotations, two writes."""
    import torch
    import torch.nn.functional as F

    norm, kv_heads, dim = w.attn_norm, view.k.shape[1], view.k.shape[3]
    shape = norm.weight.shape
    if norm.bias is None:
        y = F.rms_norm(x, shape, norm.weight, norm.eps)
    else:
        y = F.layer_norm(x, shape, norm.weight, norm.bias, norm.eps)
    packed = F.linear(y, w.qkv, w.qkv_bias).view(len(x), -1, dim)
    q, k, v = packed.split((w.qkv.shape[0] // dim - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    page, row, cos, sin = once
    if cos is not None and sin is not None:
        q, k = (t * cos + torch.cat((-t[..., dim // 2 :], t[..., : dim // 2]), -1) * sin for t in (q, k))
    view.k[page, :, row] = k
    view.v[page, :, row] = v
    return q


def operations(config: ModelConfig, ctx: Context) -> dict[str, Any]:
    """`unfused`, and `ours` where the fused kernels run."""
    from pdlab.core.config import EngineConfig
    from pdlab.kernels.dispatch import make_ops

    # there is no next product here whose weights could be asked for
    engine = EngineConfig(max_batch_requests=max(BATCHES[ctx.profile]), page_size=PAGE, weight_prefetch=False)
    ours = make_ops(engine, config, ctx.device, ctx.dtype)
    fused: dict[str, Any] = {"ours": lambda x, w, rope, view, _: ours.norm_qkv_rope(x, w, rope, view)}
    return (fused if getattr(ours, "fused", False) else {}) | {"unfused": apart}


def measure(ctx: Context, config: ModelConfig, batch: int, read: float) -> None:
    """Rows of one shape and batch, launched and in a graph."""
    import torch

    from pdlab.bench import _attention, _decode

    calls = operations(config, ctx)
    if ctx.machine.is_gpu and batch in COMPILED.get(config.name, ()) and ctx.left() > 20:
        calls["torch_compile"] = torch.compile(calls["unfused"], dynamic=False, options={"coordinate_descent_tuning": True})
    for name, call in list(calls.items()):
        check(name, call, make_arguments(config, ctx, batch, ctx.seed))
    weights = config.hidden_size * (config.q_size + 2 * config.kv_size) * itemsize_of(ctx.dtype)
    rotation = L2Rotation(partial(make_arguments, config, ctx, batch), weights)
    nbytes = step_bytes(config, decode_shape(batch, 1), itemsize_of(ctx.dtype)).norm_qkv_rope / config.num_layers
    for graph in (True, False) if ctx.machine.is_gpu else (False,):
        params = {"model": config.name, "batch": batch, "dtype": ctx.dtype, "graph": graph}
        out: dict[str, str] = {}
        times = _decode.take_turns(calls, rotation, ctx.device, graph=graph, rounds=3 if ctx.full else 1, left_out=out)
        _attention.record_left_out(ctx, out, "latency", "us", params)
        _decode.report(ctx, times, nbytes / read * 1e6, params)


def run(ctx: Context) -> None:
    from pdlab.bench import _decode

    read = _decode.read_ceiling(ctx)
    for batch in BATCHES[ctx.profile]:  # every model at the first batch, then at the next: a short budget sees all models
        for name in MODELS[ctx.profile]:
            config = config_of(name)
            if ctx.left() <= 0:
                params = {"model": config.name, "batch": batch, "dtype": ctx.dtype}
                ctx.record.skip("latency", "us", "the time budget ran out", params=params)
                continue
            try:
                measure(ctx, config, batch, read)
            except PdlabError as error:
                ctx.record.skip("latency", "us", str(error), params={"model": config.name, "batch": batch})
