"""Products of several activation rows on Hopper: the first weights are in shared memory before the kernel before has ended.

What products.products computes for normed rows (P = W x), by tiles of two halves of 64 or 128 weight rows. The copy engine
brings W and x, 64 columns of both at a time, into STAGES places; the weights of the first STAGES are asked for before the wait
for the kernel launched before, x behind it. Tensor cores take the halves as their tall operand and x, 8 to 64 columns, as the
other. SPLIT programs share a tile's columns; the last to finish adds the parts, always in the same order.

The halves are partners: gates and values, rotary halves, or just rows (PARTNERS as in ring_product). So nothing is exchanged
between threads before an output is complete, but for one turn that makes stores whole.

No biases, K divisible by 64. Hopper only, compiled there and nowhere else. Oracle: reference.ReferenceOps. Twins for the
interpreter: norm_product, norm_qkv_rope, residual_product, which call these where a tile has `tma`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from pdlab.kernels.ring_product import barrier, launch_dependents, wait_for_the_kernel_before

if TYPE_CHECKING:
    from pdlab.kernels.kv_view import KVView
    from pdlab.kernels.ops import RopeTable
    from pdlab.kernels.product_tiles import ProductTile
    from pdlab.kernels.products import Workspace

COLUMNS = gl.constexpr(64)  # of W and x in one copy: 128 bytes, the widest swizzle


@gluon.constexpr_function
def result_layout(warps, columns):
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, columns, 16])


@gluon.constexpr_function
def store_layout(warps):
    """[weight rows, activation rows]: eight weight rows a thread, which lie side by side in the output."""
    return gl.BlockedLayout([8, 1], [8, 4], [1, warps], [0, 1])


@gluon.jit
def _ask_weights(places, full, WD, tile, column, stage, apart, HALF_ROWS: gl.constexpr, PARTNERS: gl.constexpr, ours):
    """Starts the copies of both halves of a tile, from `column` on, box by box."""
    BOX: gl.constexpr = WD.block_shape[0]
    BOXES: gl.constexpr = HALF_ROWS // BOX
    for i in gl.static_range(BOXES):
        pair = tile * HALF_ROWS + i * BOX
        if PARTNERS == 0:
            a = tile * (2 * HALF_ROWS) + i * BOX
            b = a + HALF_ROWS
        elif PARTNERS == -1:
            a = pair
            b = apart + pair
        else:
            a = pair // PARTNERS * (2 * PARTNERS) + pair % PARTNERS
            b = a + PARTNERS
        at = stage * (2 * BOXES) + i
        tma.async_copy_global_to_shared(WD, [a, column], full.index(stage), places.index(at), pred=ours)
        tma.async_copy_global_to_shared(WD, [b, column], full.index(stage), places.index(at + BOXES), pred=ours)


@gluon.jit
def begin_stages(
    WD, XD, tile, first, apart,
    PIECES: gl.constexpr, HALF_ROWS: gl.constexpr, STAGES: gl.constexpr, PARTNERS: gl.constexpr,
):  # fmt: skip
    """Fills the stages, x behind the wait; returns them and their barriers."""
    BOX: gl.constexpr = WD.block_shape[0]
    BM: gl.constexpr = XD.block_shape[0]
    places = gl.allocate_shared_memory(WD.dtype, [STAGES * 2 * (HALF_ROWS // BOX), BOX, COLUMNS], WD.layout)
    xs = gl.allocate_shared_memory(XD.dtype, [STAGES, BM, COLUMNS], XD.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
    fence_async_shared()
    for s in gl.static_range(STAGES):
        if s < PIECES:
            mbarrier.expect(full.index(s), (2 * HALF_ROWS + BM) * COLUMNS * 2)
            _ask_weights(places, full, WD, tile, (first + s) * COLUMNS, s, apart, HALF_ROWS, PARTNERS, True)
    launch_dependents()
    wait_for_the_kernel_before()
    for s in gl.static_range(STAGES):
        if s < PIECES:
            tma.async_copy_global_to_shared(XD, [0, (first + s) * COLUMNS], full.index(s), xs.index(s))
    return places, xs, full


@gluon.jit
def staged_products(
    places, xs, full, WD, XD, PART, COUNT, tile, first, apart,
    PIECES: gl.constexpr, HALF_ROWS: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr, PARTNERS: gl.constexpr,
):  # fmt: skip
    """(P of the first half, of the second, float32 [HALF_ROWS, BM] as result_layout has it; whether they are whole)."""
    BM: gl.constexpr = XD.block_shape[0]
    ACC: gl.constexpr = result_layout(gl.num_warps(), BM)
    halves = places._reinterpret(WD.dtype, [STAGES * 2, HALF_ROWS, COLUMNS], WD.layout)
    a = gl.zeros([HALF_ROWS, BM], gl.float32, ACC)
    b = gl.zeros([HALF_ROWS, BM], gl.float32, ACC)
    for i in range(PIECES):
        stage = i % STAGES
        mbarrier.wait(full.index(stage), i // STAGES & 1)
        x = xs.index(stage).permute((1, 0))
        a = warpgroup_mma(halves.index(2 * stage), x, a, is_async=True)
        b = warpgroup_mma(halves.index(2 * stage + 1), x, b, is_async=True)
        # two products stay on their way; those of the piece before are done, and its place is free when all warps say so
        a, b = warpgroup_mma_wait(2, deps=[a, b])
        barrier()
        later = i - 1 + STAGES
        ours = (i > 0) & (later < PIECES)
        free = later % STAGES
        mbarrier.expect(full.index(free), (2 * HALF_ROWS + BM) * COLUMNS * 2, pred=ours)
        _ask_weights(places, full, WD, tile, (first + later) * COLUMNS, free, apart, HALF_ROWS, PARTNERS, ours)
        tma.async_copy_global_to_shared(XD, [0, (first + later) * COLUMNS], full.index(free), xs.index(free), pred=ours)
    a, b = warpgroup_mma_wait(0, deps=[a, b])
    whole = True
    if SPLIT > 1:
        r = gl.expand_dims(gl.arange(0, HALF_ROWS, gl.SliceLayout(1, ACC)), 1)
        at = r * BM + gl.expand_dims(gl.arange(0, BM, gl.SliceLayout(0, ACC)), 0)
        mine = PART + tile * (SPLIT * 2 * HALF_ROWS * BM) + at
        gl.store(mine + gl.program_id(1) * (2 * HALF_ROWS * BM), a)
        gl.store(mine + gl.program_id(1) * (2 * HALF_ROWS * BM) + HALF_ROWS * BM, b)
        barrier()  # every thread's stores come before the release below
        whole = gl.atomic_add(COUNT + tile, 1, sem="acq_rel", scope="gpu") == SPLIT - 1
        if whole:
            a = gl.zeros([HALF_ROWS, BM], gl.float32, ACC)
            b = gl.zeros([HALF_ROWS, BM], gl.float32, ACC)
            for p in gl.static_range(SPLIT):  # .cg: written by other SMs meanwhile
                a += gl.load(mine + p * (2 * HALF_ROWS * BM), cache_modifier=".cg")
                b += gl.load(mine + p * (2 * HALF_ROWS * BM) + HALF_ROWS * BM, cache_modifier=".cg")
            gl.store(COUNT + tile, 0)  # for the next launch
    return a, b, whole


@gluon.jit
def staged_norm_product_kernel(
    WD, XD, OUT, PART, COUNT, batch,
    WIDTH: gl.constexpr,  # outputs
    GATED: gl.constexpr,
    PIECES: gl.constexpr, HALF_ROWS: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    PARTNERS: gl.constexpr = -1 if GATED else 0
    tile, first = gl.program_id(0), gl.program_id(1) * PIECES
    places, xs, full = begin_stages(WD, XD, tile, first, WIDTH, PIECES, HALF_ROWS, STAGES, PARTNERS)
    a, b, whole = staged_products(
        places, xs, full, WD, XD, PART, COUNT, tile, first, WIDTH, PIECES, HALF_ROWS, STAGES, SPLIT, PARTNERS
    )
    if whole:
        ROW: gl.constexpr = store_layout(gl.num_warps())
        n = gl.expand_dims(gl.arange(0, HALF_ROWS, gl.SliceLayout(1, ROW)), 1)
        m = gl.expand_dims(gl.arange(0, XD.block_shape[0], gl.SliceLayout(0, ROW)), 0)
        if GATED:
            out = gl.convert_layout((a / (1.0 + gl.exp(-a)) * b).to(OUT.dtype.element_ty), ROW)
            n += tile * HALF_ROWS
            gl.store(OUT + m * WIDTH + n, out, mask=(n < WIDTH) & (m < batch))
        else:
            n += tile * (2 * HALF_ROWS)
            gl.store(OUT + m * WIDTH + n, gl.convert_layout(a.to(OUT.dtype.element_ty), ROW), mask=(n < WIDTH) & (m < batch))
            n += HALF_ROWS
            gl.store(OUT + m * WIDTH + n, gl.convert_layout(b.to(OUT.dtype.element_ty), ROW), mask=(n < WIDTH) & (m < batch))


@gluon.jit
def staged_residual_product_kernel(
    WD, XD, X, OUT, PART, COUNT, batch,
    OUTPUTS: gl.constexpr,
    PIECES: gl.constexpr, HALF_ROWS: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    ROW: gl.constexpr = store_layout(gl.num_warps())
    tile, first = gl.program_id(0), gl.program_id(1) * PIECES
    places, xs, full = begin_stages(WD, XD, tile, first, 0, PIECES, HALF_ROWS, STAGES, 0)
    n = tile * (2 * HALF_ROWS) + gl.expand_dims(gl.arange(0, HALF_ROWS, gl.SliceLayout(1, ROW)), 1)
    m = gl.expand_dims(gl.arange(0, XD.block_shape[0], gl.SliceLayout(0, ROW)), 0)
    at = m * OUTPUTS + n
    keep_a = (n < OUTPUTS) & (m < batch)
    keep_b = (n + HALF_ROWS < OUTPUTS) & (m < batch)
    xa = gl.load(X + at, mask=keep_a, other=0.0)  # before the product, which takes longer than they to come
    xb = gl.load(X + at + HALF_ROWS, mask=keep_b, other=0.0)
    a, b, whole = staged_products(places, xs, full, WD, XD, PART, COUNT, tile, first, 0, PIECES, HALF_ROWS, STAGES, SPLIT, 0)
    if whole:
        sum_a = gl.convert_layout(a, ROW) + xa.to(gl.float32)
        sum_b = gl.convert_layout(b, ROW) + xb.to(gl.float32)
        gl.store(OUT + at, sum_a.to(OUT.dtype.element_ty), mask=keep_a)
        gl.store(OUT + at + HALF_ROWS, sum_b.to(OUT.dtype.element_ty), mask=keep_b)


@gluon.jit
def staged_qkv_rope_kernel(
    WD, XD, COS, SIN, POSITIONS, SLOTS, Q, KC, VC, PART, COUNT, batch,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, HALF: gl.constexpr, PAGE: gl.constexpr,
    PIECES: gl.constexpr, HALF_ROWS: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    ROW: gl.constexpr = store_layout(gl.num_warps())
    tile, first = gl.program_id(0), gl.program_id(1) * PIECES
    # a tile's heads are all of queries, all of keys or all of values
    pair = tile * HALF_ROWS + gl.expand_dims(gl.arange(0, HALF_ROWS, gl.SliceLayout(1, ROW)), 1)
    m = gl.expand_dims(gl.arange(0, XD.block_shape[0], gl.SliceLayout(0, ROW)), 0)
    head, d = pair // HALF, pair % HALF
    keep = (head < HEADS + 2 * KV_HEADS) & (m < batch)
    places, xs, full = begin_stages(WD, XD, tile, first, 0, PIECES, HALF_ROWS, STAGES, HALF)
    a, b, whole = staged_products(places, xs, full, WD, XD, PART, COUNT, tile, first, 0, PIECES, HALF_ROWS, STAGES, SPLIT, HALF)
    if whole:
        turned = tile * HALF_ROWS < (HEADS + KV_HEADS) * HALF
        position = gl.load(POSITIONS + m, mask=(m < batch) & turned, other=0).to(gl.int32)
        cos = gl.load(COS + position * HALF + d, mask=(m < batch) & turned, other=1.0)
        sin = gl.load(SIN + position * HALF + d, mask=(m < batch) & turned, other=0.0)
        pa, pb = gl.convert_layout(a, ROW), gl.convert_layout(b, ROW)
        ra = (pa * cos - pb * sin).to(Q.dtype.element_ty)
        rb = (pb * cos + pa * sin).to(Q.dtype.element_ty)
        if tile * HALF_ROWS < HEADS * HALF:
            to = Q + m * (HEADS * 2 * HALF) + (head * (2 * HALF) + d)
            gl.store(to, ra, mask=keep)
            gl.store(to + HALF, rb, mask=keep)
        else:
            slot = gl.load(SLOTS + m, mask=m < batch, other=0)
            row = (slot // PAGE * (KV_HEADS * PAGE) + slot % PAGE) * (2 * HALF)
            at = row + ((head - HEADS) % KV_HEADS * (PAGE * 2 * HALF) + d)
            if turned:
                gl.store(KC + at, ra, mask=keep)
                gl.store(KC + at + HALF, rb, mask=keep)
            else:
                gl.store(VC + at, ra, mask=keep)
                gl.store(VC + at + HALF, rb, mask=keep)


def fits(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tile: ProductTile) -> bool:
    """Whether these kernels can do the product that a tile with `tma` asks for."""
    k = weight.shape[1]
    return tile.tma and len(x) > 1 and bias is None and x.element_size() == 2 and k % (COLUMNS.value * tile.split) == 0


def _launch(
    x: torch.Tensor, weight: torch.Tensor, tile: ProductTile, columns: int, box: int
) -> tuple[Any, Any, dict[str, Any]]:
    """(what describes W and x to the copy engine, the compile-time arguments that all three kernels take)."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    wd = TensorDescriptor.from_tensor(weight, [box, COLUMNS.value], layout)
    xd = TensorDescriptor.from_tensor(x, [columns, COLUMNS.value], layout)
    return wd, xd, constants(tile, weight.shape[1])


def constants(tile: ProductTile, k: int) -> dict[str, Any]:
    pieces = k // COLUMNS.value // tile.split
    sizes = {"PIECES": pieces, "HALF_ROWS": tile.rows // 2, "STAGES": min(tile.stages, pieces), "SPLIT": tile.split}
    return {**sizes, "num_warps": tile.warps, **({"launch_pdl": True} if tile.pdl else {})}


def staged_norm_product(
    x: torch.Tensor, weight: torch.Tensor, gated: bool, tile: ProductTile, columns: int, workspace: Workspace
) -> torch.Tensor:
    """[T, width] of normed x [T, K]: silu(g) * u of [g, u] = x W^T where `gated`, else x W^T."""
    width = len(weight) // 2 if gated else len(weight)
    tiles = triton.cdiv(len(weight), tile.rows)
    part, count = workspace.fit(tiles, tile, columns)
    wd, xd, fixed = _launch(x, weight, tile, columns, tile.rows // 2)
    out = torch.empty((len(x), width), dtype=x.dtype, device=x.device)
    staged_norm_product_kernel[(tiles, tile.split)](wd, xd, out, part, count, len(x), WIDTH=width, GATED=gated, **fixed)
    return out


def staged_residual_product(
    u: torch.Tensor, weight: torch.Tensor, x: torch.Tensor, tile: ProductTile, columns: int, workspace: Workspace
) -> torch.Tensor:
    """x [T, H] + u [T, K] @ weight [H, K]^T."""
    tiles = triton.cdiv(len(weight), tile.rows)
    part, count = workspace.fit(tiles, tile, columns)
    wd, xd, fixed = _launch(u, weight, tile, columns, tile.rows // 2)
    out = torch.empty_like(x)
    staged_residual_product_kernel[(tiles, tile.split)](
        wd, xd, x, out, part, count, len(x), OUTPUTS=len(weight), **fixed
    )  # fmt: skip
    return out


def staged_qkv_rope(
    x: torch.Tensor, weight: torch.Tensor, rope: RopeTable, view: KVView, tile: ProductTile, columns: int, workspace: Workspace
) -> torch.Tensor:
    """q [T, N, D] of normed x [T, H]; writes view.k and view.v at view.slots. Half a head divides half a tile."""
    kv_heads, page, dim = view.k.shape[1:]
    heads = len(weight) // dim - 2 * kv_heads
    tiles = triton.cdiv(len(weight), tile.rows)
    part, count = workspace.fit(tiles, tile, columns)
    wd, xd, fixed = _launch(x, weight, tile, columns, min(dim, tile.rows) // 2)
    q = torch.empty((len(x), heads, dim), dtype=x.dtype, device=x.device)
    staged_qkv_rope_kernel[(tiles, tile.split)](
        wd, xd, rope.cos, rope.sin, view.positions, view.slots, q, view.k, view.v, part, count, len(x),
        HEADS=heads, KV_HEADS=kv_heads, HALF=dim // 2, PAGE=page, **fixed,
    )  # fmt: skip
    return q
