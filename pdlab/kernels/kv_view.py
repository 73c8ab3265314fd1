"""What attention reads: where each request's K and V lie in the cache.

Storage of one layer is `k, v: [pages, kv_heads, page_size, head_dim]` (a page is contiguous per head), for every
allocator. Slot s is page s // page_size, row s % page_size. With page_size 1 this is [slots, kv_heads, 1, head_dim]: the
token-major layout of pools and per-request tensors. Position t of request b lies at slot

    paged:   block_table[b, t // page_size] * page_size + t % page_size
    extent:  base[b] + t

The buffers are made once and refilled, so that a captured CUDA graph finds them at the same address each step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class KVView:
    """The step's requests are rows 0...B-1; sizes as in core.plan."""

    kind: str  # paged | extent
    page_size: int
    k: torch.Tensor  # [layers, pages, kv_heads, page_size, head_dim] for the whole model; [pages, ...] after layer(i)
    v: torch.Tensor
    block_table: torch.Tensor  # i32[B, P]
    base: torch.Tensor  # i64[B]
    seq_lens: torch.Tensor  # i32[B]: tokens in the cache, this step's included
    cu_q: torch.Tensor  # i32[B + 1]: request b's queries are rows [cu_q[b], cu_q[b + 1]); they are its last positions
    slots: torch.Tensor  # i64[T]: where the new tokens' K and V go
    positions: torch.Tensor  # i64[T]
    max_q: int  # largest number of queries of one request (host value; decides prefill or decode kernels)
    max_kv: int  # largest seq_len (host value; an upper bound under CUDA graphs)
    # the same on the host, for backends that loop over requests: (queries, kv tokens) a request
    host_lens: tuple[tuple[int, int], ...] = ()

    def layer(self, i: int) -> KVView:
        return replace(self, k=self.k[i], v=self.v[i])
