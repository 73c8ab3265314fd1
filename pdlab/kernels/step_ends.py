"""The two ends of a step on the device: what goes into the layers, and remembering what came out.

    take      block[section][:n] = host[section][:n]       what the host wrote of the step, of each section what the step uses
              pages[b, w] = host[table][b * width + w]     the table, packed, to rows that every step finds at the same place
    id[t]     ids[t] >= 0 ? ids[t] : last[row[t]]          a negative id: what the row sampled last, not yet on the host
    embed     x[t] = E[id[t]] + P[position[t]]             P: learned positions, where the model has them
    remember  last[row[s]] = max(token[s], 0)              -1, a bad row, is remembered as a token that exists
              host[turn, s] = token[s]                     where the host is told by the kernel itself: -1 as well

Bytes: a row of E (and P) read, a row of x written; a few kilobytes, so bound by the launch: each end is one kernel where plain
PyTorch launches two to four. With `pdl` the first layer's weights stream in beside the beginning, and the end is launched
before the sampling kernel has ended.

take reads and remember writes pinned host memory at its own addresses. That takes one trip over the bus, as a copy does, but
the device does not change between kernels and its copy engine, which costs more than the trip: several microseconds each time.

Oracle: the formulas above, in tests. Twin for the interpreter: these kernels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PIECE = 512  # words that a program of take_kernel reads at once: a section of up to 255 rows in one trip


@triton.jit(do_not_specialize=["words", "longs", "long", "shorts", "short", "cells", "width", "stride"])
def take_kernel(HOST, DEVICE, PAGES, words, longs, long, shorts, short, cells, width, stride, PIECE: tl.constexpr):
    # sections lie apart by one of two distances, so that where they are needs no load before the one over the bus
    p = tl.program_id(0)
    i = tl.arange(0, PIECE)
    if p < longs + shorts:
        at = tl.minimum(p, longs) * long + tl.maximum(p - longs, 0) * short
        end = tl.minimum(words, tl.where(p < longs, long, short))
        for first in range(0, end, PIECE):
            mask = first + i < end
            tl.store(DEVICE + at + first + i, tl.load(HOST + at + first + i, mask=mask), mask=mask)
    else:
        cell = (p - longs - shorts) * PIECE + i
        page = tl.load(HOST + longs * long + shorts * short + cell, mask=cell < cells)
        tl.store(PAGES + (cell // width).to(tl.int64) * stride + cell % width, page, mask=cell < cells)


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


@triton.jit(do_not_specialize=["count", "stride"])
def remember_kernel(
    TOKENS, ROWS, LAST, HOST, TURN, count, stride, BLOCK: tl.constexpr, TELL: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    i = tl.arange(0, BLOCK)
    row = tl.load(ROWS + i, mask=i < count, other=0)  # uploaded before the step began, like the turn
    turn = tl.load(TURN) if TELL else 0
    if PDL:
        tl.extra.cuda.gdc_wait()
    tokens = tl.load(TOKENS + i, mask=i < count, other=0)
    if TELL:
        tl.store(HOST + turn * stride + i, tokens, mask=i < count)
    tl.store(LAST + row, tl.maximum(tokens, 0), mask=i < count)


def take(
    host: torch.Tensor, block: torch.Tensor, pages: torch.Tensor, *, rows: int, table: tuple[int, int],
    longs: int, long: int, shorts: int, short: int,
) -> None:  # fmt: skip
    """Copies what a step of `rows` rows uses of a block of sections, and spreads its table over pages[:batch, :width].

    `host` (pinned) and `block` (on the device) are i32 words of equal layout: `longs` sections that lie `long` words apart,
    then `shorts` that lie `short` apart, then `table` = (batch, width) of i32, packed. Of each section the first rows + 1
    elements of 8 bytes are copied, or all there are; behind those the block keeps what it had. `pages` i32[>= batch, >= width]
    has rows that lie anywhere. Raises ValueError where the device cannot reach `host`.
    """
    cells = table[0] * table[1]
    take_kernel[(longs + shorts - (-cells // PIECE),)](
        host, block, pages, 2 * (rows + 1), longs, long, shorts, short, cells, table[1], pages.stride(0),
        PIECE=PIECE, num_warps=4,
    )  # fmt: skip


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


def remember(
    tokens: torch.Tensor, rows: torch.Tensor, last: torch.Tensor, host: torch.Tensor | None = None,
    turn: torch.Tensor | None = None, *, pdl: bool = False,
) -> None:  # fmt: skip
    """Writes tokens i64[S] to last[rows]; where rows repeat, one of them. With pinned `host` i64[turns, >= S] and `turn` i64[1]
    on the device also to host[turn, :S], as they are; the host sees them behind an event that follows."""
    tell = host is not None and turn is not None
    remember_kernel[(1,)](
        tokens, rows, last, host if tell else last, turn if tell else rows, len(tokens),
        host.stride(0) if host is not None else 0,
        BLOCK=triton.next_power_of_2(len(tokens)), TELL=tell, PDL=pdl, num_warps=1,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
