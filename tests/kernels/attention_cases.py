"""Requests with K and V scattered over pages or extents, and attention of them in float64."""

from __future__ import annotations

from typing import Any

import torch

from pdlab.kernels.kv_view import KVView


def make_case(
    lens: list[int],
    queries: list[int],
    *,
    heads: int,
    kv_heads: int,
    dim: int,
    page: int = 16,
    paged: bool = True,
    dtype: str = "float32",
    device: str = "cpu",
    seed: int = 0,
    unused: float = float("nan"),
) -> tuple[torch.Tensor, KVView]:
    """q [T, N, D] and the view. Memory that no request owns holds `unused`: what reads it cannot stay unnoticed."""
    g = torch.Generator().manual_seed(seed)
    kind = getattr(torch, dtype)
    q = torch.randn(sum(queries), heads, dim, generator=g).to(kind)
    table = torch.zeros(len(lens), 0, dtype=torch.int32)
    base = torch.zeros(len(lens), dtype=torch.int64)
    if paged:
        counts = [-(-n // page) for n in lens]
        pages = sum(counts) + 2
        order = torch.randperm(pages, generator=g).to(torch.int32)
        table = torch.zeros(len(lens), max(1, *counts) + 1, dtype=torch.int32)
        for b, count in enumerate(counts):
            table[b, :count], order = order[:count], order[count:]
    else:
        starts = [5 + sum(n + 3 for n in lens[:b]) for b in range(len(lens))]
        base = torch.tensor(starts, dtype=torch.int64)
        pages = -(-(starts[-1] + lens[-1] + 3) // page)
    k = torch.full((pages, kv_heads, page, dim), unused, dtype=kind)
    v = k.clone()
    for b, length in enumerate(lens):
        t = torch.arange(length)
        slots = table[b, t // page].long() * page + t % page if paged else base[b] + t
        for cache in (k, v):
            cache[slots // page, :, slots % page] = torch.randn(length, kv_heads, dim, generator=g).to(kind)
    starts = [sum(queries[:b]) for b in range(len(queries) + 1)]
    nowhere = torch.zeros(len(q), dtype=torch.int64)
    tensors = (
        k,
        v,
        table,
        base,
        torch.tensor(lens, dtype=torch.int32),
        torch.tensor(starts, dtype=torch.int32),
        nowhere,
        nowhere,
    )
    view = KVView("paged" if paged else "extent", page, *(x.to(device) for x in tensors), max(queries), max(lens),
                  tuple(zip(queries, lens)))  # fmt: skip
    return q.to(device), view


def keys_and_values(view: KVView, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of one request in order of position: [K, length, D] each."""
    t = torch.arange(view.host_lens[b][1], device=view.k.device)
    page = view.page_size
    slots = view.block_table[b, t // page].long() * page + t % page if view.kind == "paged" else view.base[b] + t
    return view.k[slots // page, :, slots % page].transpose(0, 1), view.v[slots // page, :, slots % page].transpose(0, 1)


def oracle(q: torch.Tensor, view: KVView, causal: bool = True) -> torch.Tensor:
    """Attention in float64; rows of requests without keys are zero."""
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    row = 0
    for b, (n, length) in enumerate(view.host_lens):
        if n and length:
            k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[0], 0) for x in keys_and_values(view, b))
            scores = q[row : row + n].double().transpose(0, 1) @ k.transpose(1, 2) * q.shape[2] ** -0.5
            if causal:
                newest = torch.arange(length - n, length, device=q.device)
                late = torch.arange(length, device=q.device) > newest[:, None]
                scores = scores.masked_fill(late, -torch.inf)
            top = scores.amax(-1, keepdim=True)
            p = torch.exp(scores - torch.where(top == -torch.inf, 0.0, top))
            total = p.sum(-1, keepdim=True)
            out[row : row + n] = ((p / torch.where(total == 0, 1.0, total)) @ v).transpose(0, 1)
        row += n
    return out


def relative(out: torch.Tensor, truth: torch.Tensor) -> float:
    """|out - truth| / |truth|; NaN and unwritten rows poison it."""
    return float((out.double() - truth).norm() / truth.norm())


def contiguous_case(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, KVView]:
    """One request of one head: q [n, D] over the whole of k, v [m, D] (not causal unless n = m)."""
    n, m = len(q), len(k)
    empty = torch.zeros(0, dtype=torch.int64, device=q.device)

    def ints(values: list[int], dtype: Any = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=q.device)

    view = KVView("extent", 1, k.view(m, 1, 1, -1), v.view(m, 1, 1, -1), ints([]).view(1, 0), ints([0], torch.int64), ints([m]),
                  ints([0, n]), empty, empty, n, m, ((n, m),))  # fmt: skip
    return q.unsqueeze(1), view
