"""Device code that both attention kernels share: where a position's K and V lie."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pages_of(positions, request, TABLE, BASE, table_stride, PAGED: tl.constexpr, PAGE: tl.constexpr):
    """The pages (int32, from the table) or slots (int64, base + position) that hold these positions of a request.

    Apart from `offsets_of` so that a loop can fetch a tile's pages while the tile before it is being loaded.
    """
    if PAGED:
        return tl.load(TABLE + request * table_stride + positions // PAGE)
    else:
        return tl.load(BASE + request) + positions  # a base may be a distance between two allocations


@triton.jit
def offsets_of(pages, positions, page_stride, row_stride, PAGED: tl.constexpr, PAGE: tl.constexpr):
    """int64 offsets, in elements, of the positions' rows of K (or V) within one KV head.

    Callers clamp positions to the last valid one instead of masking loads: a clamped row holds finite numbers that the
    score mask then discards, whereas memory past the end may hold NaN, and 0 * NaN would reach the output.
    """
    if PAGED:
        return pages.to(tl.int64) * page_stride + (positions % PAGE) * row_stride
    elif PAGE == 1:
        return pages * page_stride
    else:
        return pages // PAGE * page_stride + pages % PAGE * row_stride


@triton.jit
def pick(values, index, lanes):
    """values[index] of a block held in registers."""
    return tl.sum(tl.where(lanes == index, values, 0), 0)


def padded_head(head_dim: int) -> int:
    """Head size as the kernels hold it: a power of two, at least the 16 that a matrix product needs."""
    return max(16, triton.next_power_of_2(head_dim))


def padded_batch(batch: int) -> int:
    """Lanes that hold a batch's lengths. Few values, because each is a kernel compiled of its own."""
    return 1 if batch == 1 else max(32, triton.next_power_of_2(batch)) if batch <= 32 or batch > 256 else 256
