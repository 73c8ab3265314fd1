"""Moves K and V of slots to other slots, all layers at once: compaction, copy on write, growth by move.

    k[l, page(dst_i), :, row(dst_i)] = k[l, page(src_i), :, row(src_i)]    for every layer l and slot i, and the same for v

Bytes a slot: read and write K and V, 4 * layers * kv_heads * head_dim * itemsize (512 KB a token of the 8B shape in bf16).
Bound: bandwidth. Compaction of 32768 slots of it: 17 GB, 4.0 ms at 4.26 TB/s of copying.

A program takes BLOCK slots of one layer and walks over the heads. A slot's row of one head is head_dim elements and the
slots of one page lie side by side, so whole pages move in long runs. One launch copies slots that do not depend on each other:
see kv_moves.waves.

Oracle: kv_moves.kv_copy_reference. Twin for the interpreter: this kernel itself.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 32  # slots a program


@triton.jit
def kv_copy_kernel(
    K,
    V,
    SRC,
    DST,
    count,
    layer_stride,
    page_stride,
    head_stride,
    row_stride,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    layer = tl.program_id(1).to(tl.int64) * layer_stride
    src = tl.load(SRC + i, mask=i < count, other=0)
    dst = tl.load(DST + i, mask=i < count, other=0)
    d = tl.arange(0, HEAD_PAD)
    mask = (i < count)[:, None] & (d < HEAD)[None, :]
    from_ = (layer + src // PAGE * page_stride + src % PAGE * row_stride)[:, None] + d[None, :]
    to = (layer + dst // PAGE * page_stride + dst % PAGE * row_stride)[:, None] + d[None, :]
    for head in range(HEADS):  # both loads before both stores, so that two are in flight
        k = tl.load(K + from_ + head * head_stride, mask=mask)
        v = tl.load(V + from_ + head * head_stride, mask=mask)
        tl.store(K + to + head * head_stride, k, mask=mask)
        tl.store(V + to + head * head_stride, v, mask=mask)


def kv_copy(k: torch.Tensor, v: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    """k, v [layers, pages, kv_heads, page_size, head_dim] of equal strides, rows contiguous; src, dst i64[n] on the same
    device. No slot of `dst` may be in `src` or twice in `dst`."""
    layers, _, heads, size, dim = k.shape
    if k.stride() != v.stride() or k.stride(4) != 1:
        raise ValueError(f"K and V must have equal strides and contiguous rows, not {k.stride()} and {v.stride()}")
    if not len(src):
        return
    kv_copy_kernel[(triton.cdiv(len(src), BLOCK), layers)](
        k,
        v,
        src,
        dst,
        len(src),
        *k.stride()[:4],
        HEADS=heads,
        HEAD=dim,
        HEAD_PAD=triton.next_power_of_2(dim),
        PAGE=size,
        BLOCK=BLOCK,
        num_warps=4,
    )
