"""Read-only bandwidth: every program sums its share of a long vector and writes one number.

    out[p] = sum of x[i] over the blocks i = p, p + P, p + 2P, ...        P programs

Bytes: n * itemsize read, 4 P written. Bound: bandwidth, by construction: one add a load. A copy reads as much as it writes
and pays for turning the bus round, so it understates what a kernel that only reads (decode) can reach.
Oracle: torch.sum in float64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def read_sum_kernel(x, out, n, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0)
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(program * BLOCK, n, programs * BLOCK):  # strided, so that neighbours read neighbouring blocks
        total += tl.load(x + start + offsets, mask=start + offsets < n, other=0.0)
    tl.store(out + program, tl.sum(total))


def read_sum(x: torch.Tensor, out: torch.Tensor, block: int, warps: int) -> torch.Tensor:
    """Partial sums of float32 `x` [n] into `out` [programs] float32, one program an element of `out`; returns `out`."""
    read_sum_kernel[(out.numel(),)](x, out, x.numel(), BLOCK=block, num_warps=warps)
    return out
