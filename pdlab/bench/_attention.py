"""What the attention suites share: random caches behind a view, a float64 check in the same run, rivals, tables of tiles."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pdlab.hardware.timing import L2Rotation, Timings, alternate, graph_time_us, time_ms

if TYPE_CHECKING:
    import torch

    from pdlab.bench.suites import Context
    from pdlab.kernels.kv_view import KVView

Call = Callable[..., Any]
# p and the output are rounded to the dtype: relative 2^-9 (bfloat16) and 2^-12 (float16) on average, each
TOLERANCE = {"bfloat16": 8e-3, "float16": 1e-3, "float32": 1e-5}


def make_view(
    lens: list[int],
    queries: list[int],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    page: int,
    dtype: str,
    device: str,
    seed: int,
) -> tuple[torch.Tensor, KVView]:
    """q [T, N, D] and a view of random K and V: scattered pages, or one extent after the other for page 0."""
    import torch

    from pdlab.kernels.kv_view import KVView

    g = torch.Generator(device).manual_seed(seed)
    kind, size = getattr(torch, dtype), max(1, page)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, device=device).to(kind)

    def whole(values: Any, as_type: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=as_type, device=device)

    counts = [-(-n // size) for n in lens]
    order = torch.randperm(sum(counts), generator=g, device=device).to(torch.int32)
    table = torch.zeros(len(lens), max(counts) if page else 0, dtype=torch.int32, device=device)
    if page:
        for b, part in enumerate(order.split(counts)):
            table[b, : len(part)] = part
    starts = [sum(lens[:b]) for b in range(len(lens))]
    k, v = (draw(sum(counts), kv_heads, size, head_dim) for _ in range(2))
    first = [sum(queries[:b]) for b in range(len(lens) + 1)]
    nowhere = torch.zeros(sum(queries), dtype=torch.int64, device=device)
    view = KVView("paged" if page else "extent", size, k, v, table, whole(starts, torch.int64), whole(lens), whole(first),
                  nowhere, nowhere, max(queries), max(lens), tuple(zip(queries, lens)))  # fmt: skip
    return draw(sum(queries), heads, head_dim), view


def last_request(q: torch.Tensor, view: KVView, most: int = 256) -> tuple[torch.Tensor, int]:
    """Attention in float64 of the last request's last queries, at most `most`, and how many they are."""
    import torch

    b, (n, length) = len(view.host_lens) - 1, view.host_lens[-1]
    rows = min(n, most)
    t = torch.arange(length, device=q.device)
    size = view.page_size
    slots = view.block_table[b, t // size].long() * size + t % size if view.kind == "paged" else view.base[b] + t
    k, v = (c[slots // size, :, slots % size].double().transpose(0, 1) for c in (view.k, view.v))
    grouped = q[-rows:].double().view(rows, k.shape[0], -1, q.shape[2])
    late = t > torch.arange(length - rows, length, device=q.device)[:, None]
    out = torch.empty_like(grouped)
    for head in range(k.shape[0]):
        scores = torch.einsum("qgd,td->gqt", grouped[:, head], k[head]) * q.shape[2] ** -0.5
        out[:, head] = (scores.masked_fill(late, -torch.inf).softmax(-1) @ v[head]).transpose(0, 1)
    return out.view(rows, q.shape[1], q.shape[2]), rows


def check(name: str, call: Call, q: torch.Tensor, view: KVView) -> None:
    """Raises AssertionError unless call(q, view) is attention to within rounding."""
    truth, rows = last_request(q, view)
    out = call(q, view)[-rows:].double()
    error = float((out - truth).norm() / truth.norm())
    if not error < TOLERANCE[str(q.dtype).removeprefix("torch.")]:
        raise AssertionError(f"{name} is wrong: relative error {error:.2e}")


def backend(name: str, q: torch.Tensor, view: KVView, requests: int) -> Call:
    """attention(q, view) of a dispatch backend for this shape of heads."""
    from types import SimpleNamespace

    from pdlab.core.config import EngineConfig
    from pdlab.kernels.dispatch import make_ops

    heads = SimpleNamespace(num_heads=q.shape[1], num_kv_heads=view.k.shape[1], head_dim=q.shape[2])
    config = EngineConfig(attention=name, max_batch_requests=requests, page_size=view.page_size)
    return make_ops(config, heads, q.device, q.dtype).attention


def prefill_rivals(kernels: tuple[str, ...] = ("cudnn", "flash", "math")) -> dict[str, Call]:
    """Kernels over packed prompts of one length that lie in extents, by the names that the tables use for rivals."""
    import torch.nn.functional as F
    from torch.nn.attention import sdpa_kernel

    from pdlab.kernels.library_attention import SDPA_KERNELS

    def run(kernel: str, q: torch.Tensor, view: KVView) -> torch.Tensor:
        n, batch = view.max_q, len(view.host_lens)
        rows, k, v = (x.reshape(batch, n, -1, q.shape[2]).transpose(1, 2) for x in (q, view.k, view.v))
        with sdpa_kernel(SDPA_KERNELS[kernel]):
            out = F.scaled_dot_product_attention(rows, k, v, is_causal=True, enable_gqa=q.shape[1] != view.k.shape[1])
        return out.transpose(1, 2).reshape(q.shape)

    def fa3(q: torch.Tensor, view: KVView) -> torch.Tensor:
        k, v = view.k.flatten(1, 2), view.v.flatten(1, 2)
        return interface.flash_attn_varlen_func(q, k, v, view.cu_q, view.cu_q, view.max_q, view.max_kv, causal=True)

    names = {"cudnn": "cudnn", "flash": "fa2", "math": "torch_math"}
    found: dict[str, Call] = {names[kernel]: partial(run, kernel) for kernel in kernels}
    try:
        import flash_attn_interface as interface
    except ImportError:
        return found
    return found | {"fa3": fa3}


def decode_rivals(q: torch.Tensor, view: KVView) -> dict[str, Call]:
    """FlashInfer where it can be imported, planned for these lengths; it reads the same per-head pages."""
    import torch

    try:
        import flashinfer
    except Exception:  # a build for another CUDA raises more than ImportError
        return {}
    if view.kind != "paged":
        return {}
    lens, size = view.seq_lens.cpu(), view.page_size
    pages = (lens + size - 1) // size
    first = torch.cat((torch.zeros(1, dtype=torch.int64), pages.cumsum(0))).int().to(q.device)
    flat = torch.cat([view.block_table[b, : int(n)] for b, n in enumerate(pages)])
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(256 << 20, dtype=torch.uint8, device=q.device), "HND", use_tensor_cores=True
    )
    wrapper.plan(first, flat, ((lens - 1) % size + 1).int().to(q.device), q.shape[1], view.k.shape[1], q.shape[2], size,
                 q_data_type=q.dtype, kv_data_type=q.dtype)  # fmt: skip
    return {"flashinfer": lambda q, view: wrapper.run(q, (view.k, view.v))}


def measure(calls: dict[str, Call], q: torch.Tensor, view: KVView, *, graph: bool, rounds: int = 3) -> dict[str, Timings]:
    """Milliseconds of each call, in turns, over caches rotated past L2; what cannot run here is left out with a word."""
    import torch

    def copy(i: int) -> tuple[Any, ...]:
        return (q, view if i == 0 else replace(view, k=torch.randn_like(view.k), v=torch.randn_like(view.v)))

    usable = {}
    for name, call in calls.items():
        try:
            check(name, call, q, view)
            usable[name] = call
        except RuntimeError as error:
            print(f"  {name} left out: {str(error).splitlines()[0][:120]}")
    rotation = L2Rotation(copy, 2 * view.k.numel() * view.k.element_size(), l2_bytes=None if q.is_cuda else 0)

    def once(call: Call) -> Timings:
        if graph and q.is_cuda:
            return graph_time_us(call, rotation=rotation, n=15, budget_ms=100).scaled(1e-3, "ms")
        return time_ms(call, rotation=rotation, device=str(q.device), n=15, warmup=1, budget_ms=150)

    return alternate({name: partial(once, call) for name, call in usable.items()}, rounds)


def write_table(ctx: Context, key: str, entries: list[dict[str, Any]], replaced: dict[str, Any]) -> None:
    """Puts entries into tuning/<device>.json beside the measurements being written, in place of those with these values."""
    from pdlab.kernels.tuning import table

    for root in ctx.record.roots:
        path = (root.parent if root.name == "measurements" else root) / "tuning" / f"{ctx.machine.slug}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        content[key] = entries + [e for e in content.get(key, []) if any(e.get(k) != v for k, v in replaced.items())]
        path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        ctx.say(f"  wrote {path}")
    table.cache_clear()
