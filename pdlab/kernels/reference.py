"""The operations of a model in plain PyTorch: slow, readable, and the oracle of every kernel.

    norm_qkv_rope     q, k, v = split(norm(x) W^T + b);  q, k = rope(norm(q)), rope(norm(k));  cache[slots] = k, v
    attention         softmax(q K^T / sqrt(D) + causal) V, per request, K and V read through the view
    out_residual      x + a W^T + b
    norm_mlp_up       silu(g) * u  with  [g, u] = norm(x) W^T + b,  or  gelu(norm(x) W^T + b)
    down_residual     x + u W^T + b

Matrix products run in the weights' dtype (which accumulate in float32); norms, rotary embedding, softmax and logits in
float32. Nothing here waits for the device: what decides control flow comes from the host copy of the lengths.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pdlab.kernels.kv_view import KVView
from pdlab.kernels.ops import HeadWeights, LayerWeights, NormWeights, RopeTable, SampleResult, SamplingBatch
from pdlab.kernels.reference_sampling import sample_from_logits

_SCORES = 1 << 26  # most float32 scores alive at once (256 MB); bounds the memory of long prompts, not the result
_MASKED = torch.finfo(torch.float32).min  # finite, so that a padding row without any key gives no NaN


def norm(x: torch.Tensor, w: NormWeights) -> torch.Tensor:
    """RMSNorm (no bias) or LayerNorm over the last dimension, computed in float32, returned in x's dtype."""
    y = x.float()
    if w.bias is not None:
        return F.layer_norm(y, y.shape[-1:], w.weight.float(), w.bias.float(), w.eps).to(x.dtype)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + w.eps)
    return (y * w.weight.float()).to(x.dtype)


def rotate(x: torch.Tensor, rope: RopeTable, positions: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [T, heads, D] at `positions` [T]; pairs (d, d + D/2)."""
    cos, sin = rope.cos[positions].unsqueeze(1), rope.sin[positions].unsqueeze(1)
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def write_kv(view: KVView, k: torch.Tensor, v: torch.Tensor) -> None:
    """Stores k, v [T, K, D] at view.slots of one layer's cache."""
    page, row = view.slots // view.page_size, view.slots % view.page_size
    view.k[page, :, row] = k.to(view.k.dtype)
    view.v[page, :, row] = v.to(view.v.dtype)


def read_kv(view: KVView, cache: torch.Tensor, b0: int, b1: int, length: int) -> torch.Tensor:
    """The first `length` positions of requests [b0, b1) from one layer's `cache`: [b1 - b0, K, length, D].

    Rows past a request's own length are whatever the memory holds; the caller masks them.
    """
    if view.kind == "paged":
        pages = view.block_table[b0:b1, : -(-length // view.page_size)].long()
        return cache[pages].transpose(1, 2).flatten(2, 3)[:, :, :length]
    last = cache.shape[0] * view.page_size - 1
    slots = view.base[b0:b1, None] + torch.arange(length, device=cache.device)
    slots = slots.clamp(0, last)  # a short neighbour of a long request would be read past the end of the memory
    return cache[slots // view.page_size, :, slots % view.page_size].transpose(1, 2)


def decode_attention(q: torch.Tensor, view: KVView, b0: int, b1: int, length: int) -> torch.Tensor:
    """Attention of requests [b0, b1) with one query each, q [b1 - b0, N, D], at most `length` keys; all at once."""
    n, heads, dim = q.shape
    k, v = (read_kv(view, cache, b0, b1, length).float() for cache in (view.k, view.v))
    valid = torch.arange(k.shape[2], device=q.device) < view.seq_lens[b0:b1, None]
    grouped = q.float().view(n, k.shape[1], -1, dim) * dim**-0.5
    scores = (grouped @ k.transpose(-1, -2)).masked_fill(~valid[:, None, None], _MASKED)
    # zero, not only weightless: freed memory may hold another request's NaN, and 0 * NaN is NaN
    v = v.masked_fill(~valid[:, None, :, None], 0.0)
    return (scores.softmax(-1) @ v).view(n, heads, dim).to(q.dtype)


def prefill_attention(q: torch.Tensor, view: KVView, b: int, length: int) -> torch.Tensor:
    """Causal attention of request b's last queries, q [n, N, D], over its `length` keys; scores are materialized."""
    n, heads, dim = q.shape
    k, v = (read_kv(view, cache, b, b + 1, length)[0].float() for cache in (view.k, view.v))  # [K, length, D]
    grouped = q.float().view(n, k.shape[0], -1, dim).permute(1, 2, 0, 3) * dim**-0.5  # [K, G, n, D]
    keys = torch.arange(length, device=q.device)
    out = []
    block = max(1, _SCORES // (heads * length))
    for lo in range(0, n, block):
        hi = min(n, lo + block)
        last = keys[length - n + lo : length - n + hi, None]  # the last key each query may see: its own position
        scores = (grouped[:, :, lo:hi] @ k.transpose(-1, -2).unsqueeze(1)).masked_fill(keys > last, _MASKED)
        out.append((scores.softmax(-1) @ v.unsqueeze(1)).permute(2, 0, 1, 3).reshape(hi - lo, heads, dim))
    return torch.cat(out).to(q.dtype)


def _decodes_from(lens: tuple[tuple[int, int], ...], b: int, floats_per_key: int) -> tuple[int, int]:
    """(end, longest): the consecutive decodes [b, end) whose gathered keys, padded to the longest, stay within bounds."""
    end, longest = b, 0
    while end < len(lens) and lens[end][0] == 1:
        wider = max(longest, lens[end][1])
        if end > b and (end + 1 - b) * wider * floats_per_key > _SCORES:
            break
        end, longest = end + 1, wider
    return end, longest


def project_logits(x: torch.Tensor, head: HeadWeights) -> torch.Tensor:
    """Float32 logits [S, V] of x [S, H]: final norm, then a product that is not rounded to 16 bits on the way out."""
    y = norm(x, head.norm)
    if y.dtype == torch.float32:
        return y @ head.proj.T
    if y.is_cuda:
        return torch.mm(y, head.proj.T, out_dtype=torch.float32)
    block = max(1, (1 << 24) // head.proj.shape[1])  # the CPU upcasts a slice of the vocabulary at a time
    return torch.cat([y.float() @ head.proj[i : i + block].float().T for i in range(0, len(head.proj), block)], dim=1)


class ReferenceOps:
    """kernels.ops.ModelOps in plain PyTorch, on any device and in any float dtype."""

    def norm_qkv_rope(self, x: torch.Tensor, w: LayerWeights, rope: RopeTable | None, view: KVView) -> torch.Tensor:
        kv_heads, dim = view.k.shape[1], view.k.shape[3]
        heads = w.qkv.shape[0] // dim - 2 * kv_heads
        packed = F.linear(norm(x, w.attn_norm), w.qkv, w.qkv_bias).view(len(x), -1, dim)
        q, k, v = packed.split((heads, kv_heads, kv_heads), dim=1)
        if w.q_norm is not None and w.k_norm is not None:
            q, k = norm(q, w.q_norm), norm(k, w.k_norm)
        if rope is not None:
            q, k = rotate(q, rope, view.positions), rotate(k, rope, view.positions)
        write_kv(view, k, v)
        return q.contiguous()

    def attention(self, q: torch.Tensor, view: KVView) -> torch.Tensor:
        """Consecutive decodes go together, each prefill chunk alone. Rows past the last request (padding) come out zero."""
        out = torch.zeros_like(q)
        lens = view.host_lens
        if not lens:  # a captured graph: one query a row, lengths known to the device only
            if view.max_q != 1:
                raise ValueError("a view without host_lens must hold decodes only (max_q 1)")
            rows = min(len(q), len(view.seq_lens))
            out[:rows] = decode_attention(q[:rows], view, 0, rows, view.max_kv)
            return out
        b = t = 0
        while b < len(lens):
            rows, longest = lens[b]
            end = b + 1
            if rows == 1:
                end, longest = _decodes_from(lens, b, floats_per_key=q.shape[1] * q.shape[2])
                rows = end - b
                out[t : t + rows] = decode_attention(q[t : t + rows], view, b, end, longest)
            else:
                out[t : t + rows] = prefill_attention(q[t : t + rows], view, b, longest)
            b, t = end, t + rows
        return out

    def out_residual(self, attn: torch.Tensor, x: torch.Tensor, w: LayerWeights) -> torch.Tensor:
        return x + F.linear(attn.reshape(len(x), -1), w.out, w.out_bias)

    def norm_mlp_up(self, x: torch.Tensor, w: LayerWeights) -> torch.Tensor:
        up = F.linear(norm(x, w.mlp_norm), w.up, w.up_bias)
        if w.up.shape[0] == w.down.shape[1]:
            return F.gelu(up, approximate="tanh")
        gate, value = up.chunk(2, dim=-1)
        return F.silu(gate) * value

    def down_residual(self, u: torch.Tensor, x: torch.Tensor, w: LayerWeights) -> torch.Tensor:
        return x + F.linear(u, w.down, w.down_bias)

    def projection_sample(self, x: torch.Tensor, head: HeadWeights, sampling: SamplingBatch) -> SampleResult:
        return sample_from_logits(project_logits(x, head), sampling)
