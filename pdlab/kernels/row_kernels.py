"""What stands between a layer's matrix products when they are not fused with it: one pass over the rows each.

    norm_rows     y = x / rms(x) * w,   or   (x - mean) / deviation * w + b
    rope_rows     [q, k, v] of one token: q/k norm, rotary embedding, K and V into the cache, q out
    silu_product  silu(g) * u  of [g, u]

Bytes a row: each element read and written once. Bound: bandwidth; for a prompt of 2048 tokens and H = 4096 in bf16 a norm moves
34 MB, 7 us at 4.63 TB/s, where plain PyTorch makes six passes of it, some in float32.

Oracles: reference.norm, ReferenceOps.norm_qkv_rope and norm_mlp_up. Twin for the interpreter: these kernels (fp16, fp32).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pdlab.kernels.kv_view import KVView
from pdlab.kernels.ops import LayerWeights, NormWeights, RopeTable

_HEADS = 16  # heads a program of rope_rows holds


@triton.jit
def norm_rows_kernel(
    X, W, B, Y, eps, K: tl.constexpr, BLOCK: tl.constexpr, CENTRE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    k = tl.arange(0, BLOCK)
    inside = k < K
    w = tl.load(W + k, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64) * K
    x = tl.load(X + row + k, mask=inside, other=0.0).to(tl.float32)
    if CENTRE:
        x = tl.where(inside, x - tl.sum(x, 0) / K, 0.0)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / K + eps) * w
    if CENTRE:
        y += tl.load(B + k, mask=inside, other=0.0).to(tl.float32)
    tl.store(Y + row + k, y.to(Y.dtype.element_ty), mask=inside)


def norm_rows(x: torch.Tensor, w: NormWeights, *, pdl: bool = False) -> torch.Tensor:
    """RMSNorm (no bias) or LayerNorm of contiguous x [T, H], in float32, returned in x's dtype."""
    rows, k = x.shape
    y = torch.empty_like(x)
    block = triton.next_power_of_2(k)
    norm_rows_kernel[(rows,)](
        x, w.weight, w.weight if w.bias is None else w.bias, y, w.eps, K=k, BLOCK=block, CENTRE=w.bias is not None, PDL=pdl,
        num_warps=min(16, max(1, block // 512)), **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return y


@triton.jit
def _head_norm(a, b, W, d, eps, HALF: tl.constexpr, keep):
    """RMSNorm over heads cut in halves a, b [heads, HALF_PAD]."""
    scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
    wa = tl.load(W + d, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
    wb = tl.load(W + HALF + d, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
    return tl.where(keep, a * scale * wa, a), tl.where(keep, b * scale * wb, b)


@triton.jit
def rope_rows_kernel(
    QKV, Q_NORM, K_NORM, COS, SIN, POSITIONS, SLOTS, Q, KC, VC, eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,  # heads a program
    ROPE: tl.constexpr,
    NORMED: tl.constexpr,  # heads of q and k have norms of their own
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, HALF_PAD)
    keep = (head < HEADS + 2 * KV_HEADS)[:, None] & (d < HALF)[None, :]
    is_q, is_v = (head < HEADS)[:, None], (head >= HEADS + KV_HEADS)[:, None]
    at = QKV + token * ((HEADS + 2 * KV_HEADS) * 2 * HALF) + head[:, None] * (2 * HALF) + d[None, :]
    a = tl.load(at, mask=keep, other=0.0).to(tl.float32)
    b = tl.load(at + HALF, mask=keep, other=0.0).to(tl.float32)
    if NORMED:
        a, b = _head_norm(a, b, Q_NORM, d, eps, HALF, is_q)
        a, b = _head_norm(a, b, K_NORM, d, eps, HALF, (is_q == 0) & (is_v == 0))
    if ROPE:
        angle = tl.load(POSITIONS + token) * HALF + d
        cos = tl.load(COS + angle, mask=d < HALF, other=1.0)[None, :]
        sin = tl.load(SIN + angle, mask=d < HALF, other=0.0)[None, :]
        ra, rb = a * cos - b * sin, b * cos + a * sin
        a, b = tl.where(is_v, a, ra), tl.where(is_v, b, rb)
    to = Q + (token * HEADS + head[:, None]) * (2 * HALF) + d[None, :]
    tl.store(to, a.to(Q.dtype.element_ty), mask=keep & is_q)
    tl.store(to + HALF, b.to(Q.dtype.element_ty), mask=keep & is_q)
    slot = tl.load(SLOTS + token)
    kv_head = (head - HEADS + KV_HEADS) % KV_HEADS
    row = slot // PAGE * (KV_HEADS * PAGE) + kv_head * PAGE + slot % PAGE
    cell = row[:, None] * (2 * HALF) + d[None, :]
    is_k = (is_q == 0) & (is_v == 0)
    tl.store(KC + cell, a.to(KC.dtype.element_ty), mask=keep & is_k)
    tl.store(KC + cell + HALF, b.to(KC.dtype.element_ty), mask=keep & is_k)
    tl.store(VC + cell, a.to(VC.dtype.element_ty), mask=keep & is_v)
    tl.store(VC + cell + HALF, b.to(VC.dtype.element_ty), mask=keep & is_v)


def rope_rows(qkv: torch.Tensor, w: LayerWeights, rope: RopeTable | None, view: KVView, *, pdl: bool = False) -> torch.Tensor:
    """q [T, N, D] of packed qkv [T, (N + 2K) D], contiguous; writes view.k and view.v [pages, K, page_size, D] (contiguous)."""
    kv_heads, page, dim = view.k.shape[1:]
    tokens = len(qkv)
    heads = qkv.shape[1] // dim - 2 * kv_heads
    q = torch.empty((tokens, heads, dim), dtype=qkv.dtype, device=qkv.device)
    cos, sin = (rope.cos, rope.sin) if rope is not None else (qkv, qkv)
    norms = (w.q_norm, w.k_norm) if w.q_norm is not None and w.k_norm is not None else None
    q_norm, k_norm, eps = (norms[0].weight, norms[1].weight, norms[0].eps) if norms else (qkv, qkv, 0.0)
    rope_rows_kernel[(tokens, triton.cdiv(heads + 2 * kv_heads, _HEADS))](
        qkv, q_norm, k_norm, cos, sin, view.positions, view.slots, q, view.k, view.v, eps,
        HEADS=heads, KV_HEADS=kv_heads, HALF=dim // 2, HALF_PAD=triton.next_power_of_2(dim // 2), PAGE=page, BLOCK=_HEADS,
        ROPE=rope is not None, NORMED=norms is not None, PDL=pdl, num_warps=4, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return q


@triton.jit
def silu_product_kernel(GU, OUT, F: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(GU + token * (2 * F) + f, mask=f < F, other=0.0).to(tl.float32)
    value = tl.load(GU + token * (2 * F) + F + f, mask=f < F, other=0.0).to(tl.float32)
    tl.store(OUT + token * F + f, (gate * tl.sigmoid(gate) * value).to(OUT.dtype.element_ty), mask=f < F)


def silu_product(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(g) * u, [T, F], of [g, u] [T, 2F], contiguous."""
    tokens, width = gate_up.shape
    out = torch.empty((tokens, width // 2), dtype=gate_up.dtype, device=gate_up.device)
    block = min(2048, triton.next_power_of_2(width // 2))
    silu_product_kernel[(tokens, triton.cdiv(width // 2, block))](gate_up, out, F=width // 2, BLOCK=block)
    return out
