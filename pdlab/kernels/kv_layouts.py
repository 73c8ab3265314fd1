"""Decode attention over caches that differ only in the order of their bytes: an experiment, not a part of the engine.

One request has a capacity of T tokens, H KV heads and D elements a head; element (t, h, d) of its K or V lies at

    per_token      (t H + h) D + d                all heads of a token together
    per_head       (h T + t) D + d                all tokens of a head together
    z_token_head   z(t, h) D + d                  rows of D elements in Z-order over token x head
    z_token_dim    h T D + z(t, d)                elements in Z-order over token x element, head by head

z(a, b) interleaves the low bits of a with the B = log2(size of b) bits of b, b's lowest first (Morton, 1966):
z = (a >> B) << 2B | sum over i < B of  b_i << 2i | a_i << (2i + 1).  So H and D are powers of two, and T a multiple of both.

Bytes are the same in every layout: 2 H D itemsize a cached token, read once. What may differ is how many of them a memory
transaction brings that nobody wants, and what finding them costs. A program takes one KV head and one stretch of tokens; its
query heads are the rows of one product. Partial results are merged by a second kernel.

Oracle: reference.decode_attention, through `arrange`. Twin for the interpreter: these kernels (fp16, fp32).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LAYOUTS = ("per_token", "per_head", "z_token_head", "z_token_dim")
LOG2E = 1.4426950408889634


@triton.jit
def _interleave(a, b, BITS: tl.constexpr):
    z = (a >> BITS) << (2 * BITS)
    for i in tl.static_range(BITS):
        z = z | (((b >> i) & 1) << (2 * i)) | (((a >> i) & 1) << (2 * i + 1))
    return z


@triton.jit
def _offsets(t, h, d, T, LAYOUT: tl.constexpr, H: tl.constexpr, H_BITS: tl.constexpr, D: tl.constexpr, D_BITS: tl.constexpr):
    """Of elements (t, h, d) within a request, [tokens, D]."""
    if LAYOUT == 0:
        at = (t[:, None] * H + h) * D + d[None, :]
    elif LAYOUT == 1:
        at = (h * T + t[:, None]) * D + d[None, :]
    elif LAYOUT == 2:
        at = _interleave(t, h, H_BITS)[:, None] * D + d[None, :]
    else:
        at = h * T * D + _interleave(t[:, None], d[None, :], D_BITS)
    return at


@triton.jit
def layout_decode_kernel(
    Q, K, V, PART_O, PART_LSE, length, capacity, stretch, scale_log2,
    LAYOUT: tl.constexpr,
    H: tl.constexpr, H_BITS: tl.constexpr, D: tl.constexpr, D_BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,  # query heads of a group, padded to what a matrix product takes
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    pair, part = tl.program_id(0), tl.program_id(1)
    request, h = pair // H, pair % H
    rows, d = tl.arange(0, ROWS), tl.arange(0, D)
    mine = rows < GROUP
    q = tl.load(Q + (pair * GROUP + rows)[:, None] * D + d[None, :], mask=mine[:, None], other=0.0)
    start_of = request.to(tl.int64) * capacity * (H * D)
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    denominator = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, D), tl.float32)
    first = part * stretch
    for start in tl.range(first, tl.minimum(first + stretch, length), BLOCK_N, num_stages=STAGES):
        t = start + tl.arange(0, BLOCK_N)
        there = t < length
        at = _offsets(tl.minimum(t, length - 1), h, d, capacity, LAYOUT, H, H_BITS, D, D_BITS)
        k = tl.load(K + start_of + at)
        scores = tl.dot(q, k.T, input_precision="ieee")
        scores = tl.where(there[None, :], scores * scale_log2, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, 1))
        p = tl.exp2(scores - m_new[:, None])
        rescale = tl.exp2(m - m_new)
        denominator = denominator * rescale + tl.sum(p, 1)
        v = tl.load(V + start_of + at)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
        m = m_new
    slot = (pair * tl.num_programs(1) + part) * GROUP + rows
    empty = denominator == 0.0
    lse = tl.where(empty, float("-inf"), m + tl.log2(denominator))
    tl.store(PART_LSE + slot, lse, mask=mine)
    out = acc / tl.where(empty, 1.0, denominator)[:, None]
    tl.store(PART_O + slot[:, None] * D + d[None, :], out, mask=mine[:, None])


@triton.jit
def merge_kernel(PART_O, PART_LSE, OUT, parts, GROUP: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr):
    """One query head a program: the parts' results weighted by exp(lse)."""
    pair, g = tl.program_id(0), tl.program_id(1)
    i, d = tl.arange(0, PARTS), tl.arange(0, D)
    slot = (pair * parts + i) * GROUP + g
    lse = tl.load(PART_LSE + slot, mask=i < parts, other=float("-inf"))
    weight = tl.exp2(lse - tl.max(lse, 0))
    part = tl.load(PART_O + slot[:, None] * D + d[None, :], mask=(i < parts)[:, None], other=0.0)
    out = tl.sum(part * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(OUT + (pair * GROUP + g) * D + d, out.to(OUT.dtype.element_ty))


def interleave(a: torch.Tensor, b: torch.Tensor, bits: int) -> torch.Tensor:
    """z(a, b) of the module's formula, int64; a and b broadcast."""
    z = (a >> bits) << (2 * bits)
    for i in range(bits):
        z = z | (((b >> i) & 1) << (2 * i)) | (((a >> i) & 1) << (2 * i + 1))
    return z


def offsets(layout: str, capacity: int, heads: int, dim: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Where element (t, h, d) of a request lies: int64 [capacity, heads, dim], each number below their product once."""
    t = torch.arange(capacity, device=device)[:, None, None]
    h = torch.arange(heads, device=device)[None, :, None]
    d = torch.arange(dim, device=device)[None, None, :]
    if layout == "per_token":
        return (t * heads + h) * dim + d
    if layout == "per_head":
        return (h * capacity + t) * dim + d
    if layout == "z_token_head":
        return interleave(t, h, _bits(heads, capacity)) * dim + d
    return h * capacity * dim + interleave(t, d, _bits(dim, capacity))


def _bits(size: int, capacity: int) -> int:
    if size & (size - 1) or capacity % size:
        raise ValueError(f"Z-order needs a power of two that divides the capacity, not {size} in {capacity}")
    return size.bit_length() - 1


def arrange(x: torch.Tensor, layout: str) -> torch.Tensor:
    """x [B, T, H, D] as a flat tensor [B, T H D] in the layout's order."""
    batch, capacity, heads, dim = x.shape
    at = offsets(layout, capacity, heads, dim, x.device).view(1, -1).expand(batch, -1)
    return torch.empty_like(x).view(batch, -1).scatter_(1, at, x.reshape(batch, -1))


def layout_decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str, length: int, kv_heads: int,
    *, programs: int, block_n: int = 64, warps: int = 4, stages: int = 3,
) -> torch.Tensor:  # fmt: skip
    """Attention of q [B, N, D] over the first `length` tokens of each request; k, v [B, T H D] in `layout`. Returns [B, N, D].

    `programs`: about how many the grid should have; D and H as the layout wants them, D at least 16.
    """
    batch, heads, dim = q.shape
    capacity = k.shape[1] // (kv_heads * dim)
    group = heads // kv_heads
    pairs = batch * kv_heads
    parts = max(1, min(triton.cdiv(programs, pairs), triton.cdiv(length, block_n)))
    stretch = triton.cdiv(triton.cdiv(length, parts), block_n) * block_n
    parts = triton.cdiv(length, stretch)
    part_o = torch.empty((pairs * parts * group, dim), dtype=torch.float32, device=q.device)
    part_lse = torch.empty(pairs * parts * group, dtype=torch.float32, device=q.device)
    out = torch.empty_like(q)
    bits = {"H_BITS": kv_heads.bit_length() - 1, "D_BITS": dim.bit_length() - 1}
    layout_decode_kernel[(pairs, parts)](
        q, k, v, part_o, part_lse, length, capacity, stretch, dim**-0.5 * LOG2E, LAYOUT=LAYOUTS.index(layout),
        H=kv_heads, D=dim, GROUP=group, ROWS=max(16, triton.next_power_of_2(group)), BLOCK_N=block_n, STAGES=stages,
        num_warps=warps, **bits,
    )  # fmt: skip
    merge_kernel[(pairs, group)](part_o, part_lse, out, parts, GROUP=group, D=dim, PARTS=triton.next_power_of_2(parts))
    return out
