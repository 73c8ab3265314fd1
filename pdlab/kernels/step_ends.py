"""The two ends of a step on the device: what goes into the layers, and remembering what came out.

    id[t]     ids[t] >= 0 ? ids[t] : last[row[t]]          a negative id: what the row sampled last, not yet on the host
    embed     x[t] = E[id[t]] + P[position[t]]             P: learned positions, where the model has them
    remember  last[row[s]] = max(token[s], 0)              -1, a bad row, is remembered as a token that exists

Bytes: a row of E (and P) read, a row of x written; a few kilobytes, so bound by the launch: each end is one kernel where plain
PyTorch launches two to four. With `pdl` the first layer's weights stream in beside the beginning, and the end is launched
before the sampling kernel has ended.

Oracle: the formulas above, in a test. Twin for the interpreter: these kernels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def embed_kernel(
    IDS, ROWS, LAST, E, POSITIONS, P, X, H: tl.constexpr, BLOCK: tl.constexpr, LEARNED: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()  # the first of a step, so it has nothing to wait for itself
    t = tl.program_id(0)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(IDS + t)
    if token < 0:
        token = tl.load(LAST + tl.load(ROWS + t))
    x = tl.load(E + token * H + h, mask=h < H, other=0.0)
    if LEARNED:
        x = x.to(tl.float32) + tl.load(P + tl.load(POSITIONS + t) * H + h, mask=h < H, other=0.0).to(tl.float32)
    tl.store(X + t.to(tl.int64) * H + h, x.to(X.dtype.element_ty), mask=h < H)


@triton.jit(do_not_specialize=["count"])
def remember_kernel(TOKENS, ROWS, LAST, count, BLOCK: tl.constexpr, PDL: tl.constexpr):
    i = tl.arange(0, BLOCK)
    row = tl.load(ROWS + i, mask=i < count, other=0)  # uploaded before the step began
    if PDL:
        tl.extra.cuda.gdc_wait()
    tokens = tl.load(TOKENS + i, mask=i < count, other=0)
    tl.store(LAST + row, tl.maximum(tokens, 0), mask=i < count)


def embed(
    ids: torch.Tensor, rows: torch.Tensor, last: torch.Tensor, table: torch.Tensor, positions: torch.Tensor,
    learned: torch.Tensor | None = None, *, pdl: bool = False,
) -> torch.Tensor:  # fmt: skip
    """x [T, H] of token ids, rows and positions i64[T], last i64[rows], table [V, H] and learned positions [max, H]."""
    width = table.shape[1]
    x = torch.empty((len(ids), width), dtype=table.dtype, device=table.device)
    block = min(1024, triton.next_power_of_2(width))
    embed_kernel[(len(ids), triton.cdiv(width, block))](
        ids, rows, last, table, positions, table if learned is None else learned, x,
        H=width, BLOCK=block, LEARNED=learned is not None, PDL=pdl, num_warps=4,
    )  # fmt: skip
    return x


def remember(tokens: torch.Tensor, rows: torch.Tensor, last: torch.Tensor, *, pdl: bool = False) -> None:
    """Writes tokens i64[S] to last[rows]; where rows repeat, one of them."""
    remember_kernel[(1,)](
        tokens, rows, last, len(tokens), BLOCK=triton.next_power_of_2(len(tokens)), PDL=pdl, num_warps=1,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
