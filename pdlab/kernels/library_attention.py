"""Attention by other people's kernels: torch's scaled_dot_product_attention, and flash-attn where it is installed.

SDPA reads contiguous K and V, so they are first gathered from pages or extents: 2 * kv_heads * head_dim * itemsize bytes a
cached token read and written once more than a kernel that follows the page table moves. flash-attn follows page tables whose
pages are a multiple of 256 tokens.

Oracle: reference.ReferenceOps.attention.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from pdlab.kernels.kv_view import KVView
from pdlab.kernels.reference import read_kv

SDPA_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_GATHERED = 1 << 28  # most elements of K gathered at once for a batch of decodes


def sdpa(q: torch.Tensor, view: KVView, *, kernel: str | None = None) -> torch.Tensor:
    """attention(q, view) with SDPA; `kernel` (flash, cudnn, efficient, math) forces one of its kernels for whole prompts.

    Runs of decodes go together, padded to the longest; each prefill chunk goes alone. Both come with a mask, which not every
    kernel takes: there the forced one is only the first that is asked. Rows of no request come out zero.
    """
    return _sdpa(q, view, kernel)


def _forced(kernel: str | None, masked: bool) -> AbstractContextManager[None]:
    if kernel is None:
        return nullcontext()
    first = SDPA_KERNELS[kernel]
    return sdpa_kernel([first, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH] if masked else [first])


def _sdpa(q: torch.Tensor, view: KVView, kernel: str | None) -> torch.Tensor:
    lens = view.host_lens
    out = torch.zeros_like(q)
    if not lens:  # a captured graph: decodes only, lengths known to the device
        rows = min(len(q), len(view.seq_lens))
        out[:rows] = _decodes(q[:rows], view, 0, rows, view.max_kv, kernel)
        return out
    b = token = 0
    while b < len(lens):
        n, length = lens[b]
        if n != 1:
            if n and length:
                out[token : token + n] = _prefill(q[token : token + n], view, b, length, kernel)
            b, token = b + 1, token + n
            continue
        end, longest = b + 1, length
        per_key = view.k.shape[1] * view.k.shape[3]
        while end < len(lens) and lens[end][0] == 1:
            wider = max(longest, lens[end][1])
            if (end + 1 - b) * wider * per_key > _GATHERED:
                break
            end, longest = end + 1, wider
        if longest:
            out[token : token + end - b] = _decodes(q[token : token + end - b], view, b, end, longest, kernel)
        b, token = end, token + end - b
    return out


def _decodes(q: torch.Tensor, view: KVView, b0: int, b1: int, length: int, kernel: str | None) -> torch.Tensor:
    """One query a request: the heads of a group are the query rows of their KV head, so no K or V is repeated."""
    n, heads, dim = q.shape
    k, v = read_kv(view, view.k, b0, b1, length), read_kv(view, view.v, b0, b1, length)
    valid = (torch.arange(length, device=q.device) < view.seq_lens[b0:b1, None])[:, None, :, None]
    k, v = k.masked_fill(~valid, 0.0), v.masked_fill(~valid, 0.0)  # memory past the end may hold NaN
    mask = valid.transpose(2, 3).expand(n, k.shape[1], heads // k.shape[1], length)
    with _forced(kernel, masked=True):
        out = F.scaled_dot_product_attention(q.view(n, k.shape[1], -1, dim), k, v, attn_mask=mask)
    return out.reshape(n, heads, dim)


def _prefill(q: torch.Tensor, view: KVView, b: int, length: int, kernel: str | None) -> torch.Tensor:
    n, heads, _ = q.shape
    k, v = (read_kv(view, cache, b, b + 1, length) for cache in (view.k, view.v))
    grouped = heads != k.shape[1]
    old = q.is_cuda and torch.cuda.get_device_capability(q.device) < (8, 0)
    if grouped and (old or kernel == "efficient"):
        # only flash, cuDNN and math know grouped heads; below 8.0 there is neither of the first two, and math makes the matrix
        k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
        grouped = False
    rows = q.transpose(0, 1).unsqueeze(0)
    with _forced(kernel, masked=n != length):
        if n == length:
            out = F.scaled_dot_product_attention(rows, k, v, is_causal=True, enable_gqa=grouped)
        else:
            mask = causal_lower_right(n, length)  # after a prefix, query i sees keys up to length - n + i
            out = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, enable_gqa=grouped)
    return out[0].transpose(0, 1)


def flash_attn(q: torch.Tensor, view: KVView) -> torch.Tensor:
    """attention(q, view) with the flash-attn package, on pages of a multiple of 256 tokens."""
    from flash_attn import flash_attn_varlen_func

    cu_kv = F.pad(view.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
    k, v = (cache.transpose(1, 2) for cache in (view.k, view.v))  # [pages, page_size, K, D]
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=view.cu_q, cu_seqlens_k=cu_kv, max_seqlen_q=view.max_q, max_seqlen_k=view.max_kv,
        causal=True, block_table=view.block_table,
    )  # fmt: skip
