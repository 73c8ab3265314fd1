"""The two ends of a step on the device: which tokens go in, and remembering those that came out.

    take        ids[t] >= 0 ? ids[t] : last[row[t]]       a negative id: what the row sampled last, not yet on the host
    remember    last[row[s]] = max(token[s], 0)            -1, a bad row, is remembered as a token that exists

A few hundred bytes: bound by the launch, so each is one kernel where plain PyTorch launches two or three.

Oracle: the formulas above, in a test. Twin for the interpreter: these kernels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count"])
def take_kernel(IDS, ROWS, LAST, OUT, count, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    ids = tl.load(IDS + i, mask=i < count, other=0)
    sampled = tl.load(LAST + tl.load(ROWS + i, mask=i < count, other=0), mask=ids < 0, other=0)
    tl.store(OUT + i, tl.where(ids < 0, sampled, ids), mask=i < count)


@triton.jit(do_not_specialize=["count"])
def remember_kernel(TOKENS, ROWS, LAST, count, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tokens = tl.load(TOKENS + i, mask=i < count, other=0)
    tl.store(LAST + tl.load(ROWS + i, mask=i < count, other=0), tl.maximum(tokens, 0), mask=i < count)


def take(ids: torch.Tensor, rows: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Token ids i64[T] to run, in a new tensor. All i64, contiguous."""
    out = torch.empty_like(ids)
    take_kernel[(1,)](ids, rows, last, out, len(ids), BLOCK=triton.next_power_of_2(len(ids)), num_warps=1)
    return out


def remember(tokens: torch.Tensor, rows: torch.Tensor, last: torch.Tensor) -> None:
    """Writes tokens i64[S] to last[rows]; where rows repeat, one of them."""
    remember_kernel[(1,)](tokens, rows, last, len(tokens), BLOCK=triton.next_power_of_2(len(tokens)), num_warps=1)
