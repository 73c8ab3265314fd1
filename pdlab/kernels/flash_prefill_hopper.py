"""Prefill attention on Hopper: which of the warp-specialized kernels runs, and its launch. Head sizes 64 and 128.

    flash_prefill_turns   long prompts: two or three warpgroups that take turns at the tensor cores
    flash_prefill_tasks   short ones: warpgroups for themselves, K and V of a prompt fetched once

One launch a call; what each block does is found out on the device (prefill_schedule). A model calls this once a layer, so the
launch matters: going through triton.jit takes longer than a short prompt's attention. The compiled kernel is looked up once for
what it is compiled for, and then launched as it is.

Oracle: reference.ReferenceOps.attention. Twin for the interpreter: flash_prefill.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver

from pdlab.kernels.flash_prefill import LOG2E

if TYPE_CHECKING:
    from pdlab.kernels.kv_view import KVView
    from pdlab.kernels.tuning import HopperTile

IN_REGISTERS = 32  # requests that prefill_items orders by length
SPARE = 1.125  # what K and V of the heads of a round may take of the room for them
SHORT = 512  # tokens of prompts of which all heads run at once, request by request, where they are more than that


def fits(q: torch.Tensor, view: KVView) -> bool:
    """Whether these kernels can do it: a head size and a dtype they have, the heads of q side by side, rows at 16 bytes.

    Extents of single-token slots, or pages that a tile of keys divides or is divided by (8, 16, 32, 64 or a multiple of 128).
    """
    size = view.page_size
    return (
        (size == 1 if view.kind == "extent" else size >= 8 and (128 % size == 0 or size % 128 == 0))
        and q.shape[2] in (64, 128)
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.stride(1) == q.shape[2]
        and q.stride(0) % 8 == 0
        and view.k.is_contiguous()
        and view.v.is_contiguous()
    )


class Rows:
    """A two-dimensional array as the copy engine's descriptor needs it, in place of Triton's TensorDescriptor.

    That one holds the tensor, and checks again what `fits` has checked.
    """

    __slots__ = ("address", "padding", "round_f32_to_tf32", "shape", "strides")

    def __init__(self, address: int, rows: int, columns: int, stride: int):
        self.address, self.shape, self.strides = address, (rows, columns), (stride, 1)
        self.padding, self.round_f32_to_tf32 = "zero", False

    @property
    def base(self) -> Rows:
        return self

    def data_ptr(self) -> int:
        return self.address


def _arrays(q: torch.Tensor, view: KVView, out: torch.Tensor) -> tuple[Rows, Rows, Rows, Rows]:
    """q, K, V and out as the copy engine sees them: a row is a token's heads, for pages a token of one head."""
    tokens, heads, dim = q.shape
    k, v = view.k, view.v
    slots, columns = (k.numel() // dim, dim) if view.kind == "paged" else (k.shape[0], k.numel() // k.shape[0])
    return (
        Rows(q.data_ptr(), tokens, heads * dim, q.stride(0)),
        Rows(k.data_ptr(), slots, columns, columns),
        Rows(v.data_ptr(), slots, columns, columns),
        Rows(out.data_ptr(), tokens, heads * dim, out.stride(0)),
    )


@cache
def _own_counter(device: torch.device) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int32, device=device)


@cache
def _multiprocessors(device: int) -> int:
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def item_of(
    tile: HopperTile, view: KVView, heads: int, group: int, head_dim: int, blocks_at_once: int
) -> tuple[HopperTile, int, int]:
    """The tile to use, and the query rows of one head and the heads of an item.

    Items of more blocks than consumers need their K and V to stay in the ring; where the longest cache is longer (a chunk after
    a prefix), pairs of consumers walk it in turns. Items are as long, and shared by as many heads, as leaves one for each of
    the `blocks_at_once` blocks of the grid. Packed heads share a tile's rows.
    """
    if tile.blocks and view.max_kv <= tile.stages * tile.block_n:
        blocks, prompts = tile.blocks, view.seq_lens.shape[0] * heads
        while blocks > tile.consumers and prompts * -(-view.max_q // (64 * blocks)) < blocks_at_once:
            blocks = max(tile.consumers, blocks // 2)
        share = math.gcd(tile.share, group)
        return tile, 64 * blocks, share if prompts >= share * blocks_at_once else 1
    if tile.blocks > tile.consumers:
        tile = replace(tile, consumers=2, block_n=128, stages=256 // head_dim, turns=True, blocks=0, places=2)
    pack = 1 if tile.blocks else math.gcd(tile.pack, group)
    return tile, 64 * tile.consumers // pack, pack


def heads_at_once(kv_heads: int, fit: float) -> int:
    """KV heads whose items run before those of the next: divided evenly, into as few rounds as have room.

    `fit`: how many heads' K and V have room in L2 together, a fraction too; an eighth more counts as room, since caches are of
    a little less than a power of two. The last round gets half of the heads of the others at least: the longest items of a few
    heads left over would begin when everybody else is done.
    """
    most = max(1, min(kv_heads, int(fit * SPARE)))
    for rounds in range(-(-kv_heads // most), kv_heads):
        at_once = -(-kv_heads // rounds)
        if 2 * ((kv_heads - 1) % at_once + 1) >= at_once:
            return at_once
    return 1


def heads_that_fit(l2_bytes: int, caches: int, tokens: int, head_dim: int, itemsize: int = 2) -> float:
    """Heads whose K and V of so many tokens have room in `caches` times `l2_bytes`, a fraction too."""
    return l2_bytes * caches / (2 * max(tokens, 1) * head_dim * itemsize)


@dataclass(frozen=True)
class Launch:
    """What a call is besides its tensors: the same for all layers of a step, so a model makes it once for all of them."""

    kernel: Any
    programs: int
    boxes: tuple[tuple[int, int], ...]  # what one copy takes of q, K, V and out
    numbers: tuple[float, ...]
    constants: tuple[Any, ...]  # what the kernel is compiled for


def plan(
    q: torch.Tensor,
    view: KVView,
    tile: HopperTile,
    *,
    causal: bool = True,
    min_q: int = 1,
    scale: float | None = None,
    l2_bytes: int = 32 << 20,
    out_stride: int | None = None,
) -> Launch:
    """The launch for tensors of these shapes and strides; `out_stride`: elements from token to token of the output.

    `l2_bytes`: half of L2, of which heads that run together may take `tile.caches`.
    """
    tokens, heads, dim = q.shape
    kv_heads, batch, paged = view.k.shape[1], view.seq_lens.shape[0], view.kind == "paged"
    group, multiprocessors = heads // kv_heads, _multiprocessors(q.device.index)
    tile, item_rows, share = item_of(tile, view, heads, group, dim, multiprocessors)
    units = heads // share
    most = -(-tokens // item_rows) + min(batch, tokens)  # items of a head; every request may waste part of one
    in_order = bool(tile.blocks) or view.max_q <= tile.by_request or batch == 1 or batch > IN_REGISTERS
    at_once = units
    if not (tile.blocks or view.max_q <= tile.by_request or (batch > IN_REGISTERS and view.max_q <= SHORT)):
        held = sum(kv for _, kv in view.host_lens) or batch * view.max_kv
        fit = heads_that_fit(l2_bytes, tile.caches, held, dim, q.element_size())
        at_once = group // share * heads_at_once(kv_heads, fit)
    if tile.blocks:
        from pdlab.kernels.flash_prefill_tasks import flash_prefill_tasks_kernel as kernel
    else:
        from pdlab.kernels.flash_prefill_turns import flash_prefill_turns_kernel as kernel
    pack = 1 if tile.blocks else share
    keys = (min(view.page_size, tile.block_n), 64) if paged else (tile.block_n, dim)
    rows = (64, dim) if pack == 1 else (64 // pack, 64)
    return Launch(
        kernel,
        min(multiprocessors, most * units),
        (rows, keys, keys, rows),
        ((dim**-0.5 if scale is None else scale) * LOG2E, batch, item_rows, min_q, int(in_order), units, share, group, at_once,
         (heads * dim if out_stride is None else out_stride) // 8),
        (dim, tile.block_n, tile.stages, tile.consumers, causal,
         0 if tile.blocks else int(tile.turns), tile.polynomial, view.page_size if paged else 0,
         kv_heads if paged else 0, pack, tile.places if tile.blocks else 2, 0 if tile.blocks else tile.overlap),
    )  # fmt: skip


class _Typed:
    """An address with a dtype: what a TensorDescriptor asks of its tensor."""

    def __init__(self, rows: Rows, dtype: torch.dtype):
        self.data_ptr, self.dtype = rows.data_ptr, dtype


_compiled: dict[tuple[Any, ...], Any] = {}


def launch(planned: Launch, q: torch.Tensor, view: KVView, out: torch.Tensor, counter: torch.Tensor) -> None:
    """Writes `out` on the current stream.

    `counter`, i32[1], is what blocks draw their items from: zero before and after. Launches that share one must not overlap.
    Make it before a graph is captured: what fills it must not be a part of the graph.
    """
    device = q.device.index
    stream = driver.active.get_current_stream(device)
    arrays = _arrays(q, view, out)
    table = view.block_table
    rest = (out, view.cu_q, view.seq_lens, view.base, table, counter, table.stride(0), *planned.numbers)
    key = (id(planned.kernel), planned.constants, planned.boxes, q.dtype, device)
    compiled = _compiled.get(key)
    if compiled is not None:
        compiled[planned.programs, 1, 1](*arrays, *rest, *planned.constants, stream=stream)
        return
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    descriptors = [
        TensorDescriptor(_Typed(x, q.dtype), list(x.shape), list(x.strides), list(box), layout)
        for x, box in zip(arrays, planned.boxes, strict=True)
    ]
    kernel = planned.kernel[(planned.programs,)]
    _compiled[key] = kernel(*descriptors, *rest, *planned.constants, num_warps=4, launch_pdl=True)


def flash_prefill_hopper(
    q: torch.Tensor, view: KVView, tile: HopperTile, *, out: torch.Tensor | None = None, **settings: Any
) -> torch.Tensor:
    """As flash_prefill, for views that `fits` accepts and heads of `out` side by side; `settings`: as plan.

    A request with queries must have a cache, its own tokens at least. All such calls on a device share a counter, so they must
    not overlap on two streams.

    With `tile.blocks` the kernel of flash_prefill_tasks runs, see item_of.
    """
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    launch(plan(q, view, tile, out_stride=out.stride(0), **settings), q, view, out, _own_counter(q.device))
    return out
