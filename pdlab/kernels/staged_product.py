"""Products of several activation rows on Hopper: the first weights are in shared memory before the kernel before has ended.

What products.products computes for normed rows (P = W x), by tiles of two halves of 64 or 128 weight rows. The copy engine
brings W and x, 64 columns of both at a time, into STAGES places; the weights of the first STAGES are asked for before the wait
for the kernel launched before, x behind it. Tensor cores take the halves as their tall operand and x, 8 to 64 columns, as the
other. FETCH pieces of each weight row at a time go to L2 before the copy engine asks for them one by one: the memory reads 128
bytes of a row more slowly than 512.

The halves are partners: gates and values, rotary halves, or just rows (PARTNERS as in ring_product). So nothing is exchanged
between threads before an output is complete, but for one turn that makes stores whole.

SPLIT programs share a tile's columns. Each writes its products, waits for the others, and adds up its own share of the rows, in
the same order always. They wait for each other, so all programs must be resident at once: `fits` sees to it. A program that
is resident has all that it needs to finish: the kernels before it end without it, and those behind it begin when the last of
its own has begun.

No biases, K divisible by 64. Hopper only, compiled there and nowhere else. Oracle: reference.ReferenceOps. Twins for the
interpreter: norm_product, norm_qkv_rope, residual_product, which call these where a tile has `tma`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
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

from pdlab.kernels.copy_hints import leave_l2_first
from pdlab.kernels.product_tiles import ProductTile, product_rule
from pdlab.kernels.ring_product import barrier, launch_dependents, wait_for_the_kernel_before
from pdlab.kernels.tuning import Tuning

if TYPE_CHECKING:
    from pdlab.kernels.kv_view import KVView
    from pdlab.kernels.ops import LayerWeights, RopeTable
    from pdlab.kernels.products import Workspace

COLUMNS = gl.constexpr(64)  # of W and x in one copy: 128 bytes, the widest swizzle
LOOKS = gl.constexpr(1 << 17)  # at a counter, about 0.1 s, before a program gives up: then its outputs are NaN


@gluon.constexpr_function
def result_layout(warps, columns):
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, columns, 16])


@gluon.constexpr_function
def share_layout(rows, warps):
    """[weight rows, activation rows] of what a program adds up: a thread's weight rows lie side by side in the output."""
    each = min(8, rows // 4)
    return gl.BlockedLayout([each, 1], [min(8, rows // each), 32 // min(8, rows // each)], [1, warps], [0, 1])


@gluon.jit
def ask_into_l2(at, index, count, BYTES: gl.constexpr):
    """Asks for BYTES at each address to be brought into L2, where index < count; each thread its own."""
    gl.inline_asm_elementwise(
        f"{{ .reg .pred p; setp.lt.s32 p, $2, $3; @p cp.async.bulk.prefetch.L2.global [$1], {BYTES}; mov.u32 $0, 0; }}",
        "=r,l,r,r", [at.to(gl.int64), index, index * 0 + count],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _first_rows(tile, apart, at, HALF_ROWS: gl.constexpr, PARTNERS: gl.constexpr):
    """The weight rows of row `at` of each half of a tile."""
    pair = tile * HALF_ROWS + at
    if PARTNERS == 0:
        a = pair + tile * HALF_ROWS
        b = a + HALF_ROWS
    elif PARTNERS == -1:
        a = pair
        b = apart + pair
    else:
        a = pair // PARTNERS * (2 * PARTNERS) + pair % PARTNERS
        b = a + PARTNERS
    return a, b


@gluon.jit
def _ask_weights(places, full, WD, tile, column, stage, apart, HALF_ROWS: gl.constexpr, PARTNERS: gl.constexpr, ours):
    """Starts the copies of both halves of a tile, from `column` on, box by box."""
    BOX: gl.constexpr = WD.block_shape[0]
    BOXES: gl.constexpr = HALF_ROWS // BOX
    for i in gl.static_range(BOXES):
        a, b = _first_rows(tile, apart, i * BOX, HALF_ROWS, PARTNERS)
        at = stage * (2 * BOXES) + i
        tma.async_copy_global_to_shared(WD, [a, column], full.index(stage), places.index(at), pred=ours)
        tma.async_copy_global_to_shared(WD, [b, column], full.index(stage), places.index(at + BOXES), pred=ours)


@gluon.jit
def _fetch_rows(W, tile, apart, column, last, ours, K: gl.constexpr, HALF_ROWS: gl.constexpr, PARTNERS: gl.constexpr,
                FETCH: gl.constexpr):  # fmt: skip
    """Asks for FETCH pieces of all rows of a tile, from `column` on, into L2: a row a thread."""
    THREADS: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    lane = gl.arange(0, 2 * HALF_ROWS, THREADS)
    a, b = _first_rows(tile, apart, lane % HALF_ROWS, HALF_ROWS, PARTNERS)
    row = gl.where(lane < HALF_ROWS, a, b)
    ask_into_l2(W + column + row.to(gl.int64) * K, row, gl.where(ours, last + 1, 0), FETCH * COLUMNS * 2)


@gluon.jit
def begin_stages(
    W, WD, XD, tile, first, apart, last,
    K: gl.constexpr, PIECES: gl.constexpr, HALF_ROWS: gl.constexpr, STAGES: gl.constexpr, PARTNERS: gl.constexpr,
    FETCH: gl.constexpr, HINT: gl.constexpr,
):  # fmt: skip
    """Fills the stages, x behind the wait; returns them and their barriers."""
    if HINT:
        leave_l2_first(1)
    BOX: gl.constexpr = WD.block_shape[0]
    BM: gl.constexpr = XD.block_shape[0]
    places = gl.allocate_shared_memory(WD.dtype, [STAGES * 2 * (HALF_ROWS // BOX), BOX, COLUMNS], WD.layout)
    xs = gl.allocate_shared_memory(XD.dtype, [STAGES, BM, COLUMNS], XD.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
    fence_async_shared()
    if FETCH:
        for c in gl.static_range((STAGES + FETCH - 1) // FETCH):
            _fetch_rows(W, tile, apart, (first + c * FETCH) * COLUMNS, last, True, K, HALF_ROWS, PARTNERS, FETCH)
    for s in gl.static_range(STAGES):
        mbarrier.expect(full.index(s), (2 * HALF_ROWS + BM) * COLUMNS * 2)
        _ask_weights(places, full, WD, tile, (first + s) * COLUMNS, s, apart, HALF_ROWS, PARTNERS, True)
    launch_dependents()
    wait_for_the_kernel_before()
    for s in gl.static_range(STAGES):
        tma.async_copy_global_to_shared(XD, [0, (first + s) * COLUMNS], full.index(s), xs.index(s))
    return places, xs, full


@gluon.jit
def staged_products(
    W, places, xs, full, WD, XD, tile, first, apart, last,
    K: gl.constexpr, PIECES: gl.constexpr, HALF_ROWS: gl.constexpr, STAGES: gl.constexpr, PARTNERS: gl.constexpr,
    FETCH: gl.constexpr,
):  # fmt: skip
    """P of the first half and of the second over this program's columns, float32 [HALF_ROWS, BM] as result_layout has it."""
    BM: gl.constexpr = XD.block_shape[0]
    ACC: gl.constexpr = result_layout(gl.num_warps(), BM)
    halves = places._reinterpret(WD.dtype, [STAGES * 2, HALF_ROWS, COLUMNS], WD.layout)
    a = gl.zeros([HALF_ROWS, BM], gl.float32, ACC)
    b = gl.zeros([HALF_ROWS, BM], gl.float32, ACC)
    for i in range(PIECES):
        if FETCH:  # noqa: SIM102 - known when compiling, the other is not
            if i % FETCH == 0:
                ahead = i + (STAGES + FETCH - 1) // FETCH * FETCH
                ours = ahead < PIECES
                _fetch_rows(W, tile, apart, (first + ahead) * COLUMNS, last, ours, K, HALF_ROWS, PARTNERS, FETCH)
        stage = i % STAGES
        mbarrier.wait(full.index(stage), i // STAGES & 1)
        x = xs.index(stage).permute((1, 0))
        a = warpgroup_mma(halves.index(2 * stage), x, a, is_async=True)
        b = warpgroup_mma(halves.index(2 * stage + 1), x, b, is_async=True)
        # two products stay on their way; those of the piece before are done, and its place is free when all warps say so
        a, b = warpgroup_mma_wait(2, deps=[a, b])
        barrier()
        later = i - 1 + STAGES
        more = (i > 0) & (later < PIECES)
        free = later % STAGES
        mbarrier.expect(full.index(free), (2 * HALF_ROWS + BM) * COLUMNS * 2, pred=more)
        _ask_weights(places, full, WD, tile, (first + later) * COLUMNS, free, apart, HALF_ROWS, PARTNERS, more)
        tma.async_copy_global_to_shared(XD, [0, (first + later) * COLUMNS], full.index(free), xs.index(free), pred=more)
    a, b = warpgroup_mma_wait(0, deps=[a, b])
    return a, b


@gluon.jit
def add_parts(a, b, PART, COUNT, tile, HALF_ROWS: gl.constexpr, SPLIT: gl.constexpr, ROW: gl.constexpr):
    """P of this program's share of the rows of both halves, [HALF_ROWS / SPLIT, BM] in layout ROW."""
    if SPLIT == 1:
        return gl.convert_layout(a, ROW), gl.convert_layout(b, ROW)
    else:
        BM: gl.constexpr = a.shape[1]
        ACC: gl.constexpr = a.type.layout
        SIZE: gl.constexpr = 2 * HALF_ROWS * BM  # of a part: weight rows lie side by side
        r = gl.expand_dims(gl.arange(0, HALF_ROWS, gl.SliceLayout(1, ACC)), 1)
        at = gl.expand_dims(gl.arange(0, BM, gl.SliceLayout(0, ACC)), 0) * HALF_ROWS + r
        mine = PART + tile * (SPLIT * SIZE)
        gl.store(mine + gl.program_id(1) * SIZE + at, a)
        gl.store(mine + gl.program_id(1) * SIZE + HALF_ROWS * BM + at, b)
        barrier()  # every thread's stores come before the release below
        # each launch adds SPLIT, so the next multiple of it is when all have come
        arrived = gl.atomic_add(COUNT + tile, 1, sem="acq_rel", scope="gpu") + 1
        all_there = ((arrived - 1) | (SPLIT - 1)) + 1
        looks = 0
        while (arrived - all_there < 0) & (looks < LOOKS):
            arrived = gl.atomic_add(COUNT + tile, 0, sem="acquire", scope="gpu")
            looks += 1
        n = gl.program_id(1) * (HALF_ROWS // SPLIT) + gl.arange(0, HALF_ROWS // SPLIT, gl.SliceLayout(1, ROW))
        here = gl.expand_dims(gl.arange(0, BM, gl.SliceLayout(0, ROW)), 0) * HALF_ROWS + gl.expand_dims(n, 1)
        pa = gl.load(mine + here, cache_modifier=".cg")  # written by other SMs during this launch, so read from L2
        pb = gl.load(mine + HALF_ROWS * BM + here, cache_modifier=".cg")
        for p in gl.static_range(1, SPLIT):
            pa += gl.load(mine + p * SIZE + here, cache_modifier=".cg")
            pb += gl.load(mine + p * SIZE + HALF_ROWS * BM + here, cache_modifier=".cg")
        missing = gl.where(arrived - all_there < 0, float("nan"), 0.0)  # shows in every result
        return pa + missing, pb + missing


@gluon.jit(do_not_specialize=["batch"])
def staged_norm_product_kernel(
    W, WD, XD, OUT, PART, COUNT, batch,
    WIDTH: gl.constexpr,  # outputs
    GATED: gl.constexpr,
    K: gl.constexpr, PIECES: gl.constexpr, HALF_ROWS: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr,
    FETCH: gl.constexpr, HINT: gl.constexpr,
):  # fmt: skip
    PARTNERS: gl.constexpr = -1 if GATED else 0
    LAST: gl.constexpr = (2 * WIDTH if GATED else WIDTH) - 1
    SHARE: gl.constexpr = HALF_ROWS // SPLIT
    ROW: gl.constexpr = share_layout(SHARE, gl.num_warps())
    tile, first = gl.program_id(0), gl.program_id(1) * PIECES
    places, xs, full = begin_stages(W, WD, XD, tile, first, WIDTH, LAST, K, PIECES, HALF_ROWS, STAGES, PARTNERS, FETCH, HINT)
    a, b = staged_products(W, places, xs, full, WD, XD, tile, first, WIDTH, LAST, K, PIECES, HALF_ROWS, STAGES, PARTNERS, FETCH)
    pa, pb = add_parts(a, b, PART, COUNT, tile, HALF_ROWS, SPLIT, ROW)
    n = gl.program_id(1) * SHARE + gl.expand_dims(gl.arange(0, SHARE, gl.SliceLayout(1, ROW)), 1)
    m = gl.expand_dims(gl.arange(0, XD.block_shape[0], gl.SliceLayout(0, ROW)), 0)
    if GATED:
        n += tile * HALF_ROWS
        out = (pa / (1.0 + gl.exp(-pa)) * pb).to(OUT.dtype.element_ty)
        gl.store(OUT + m * WIDTH + n, out, mask=(n < WIDTH) & (m < batch))
    else:
        n += tile * (2 * HALF_ROWS)
        gl.store(OUT + m * WIDTH + n, pa.to(OUT.dtype.element_ty), mask=(n < WIDTH) & (m < batch))
        n += HALF_ROWS
        gl.store(OUT + m * WIDTH + n, pb.to(OUT.dtype.element_ty), mask=(n < WIDTH) & (m < batch))


@gluon.jit(do_not_specialize=["batch"])
def staged_residual_product_kernel(
    W, WD, XD, X, OUT, PART, COUNT, batch,
    OUTPUTS: gl.constexpr,
    K: gl.constexpr, PIECES: gl.constexpr, HALF_ROWS: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr,
    FETCH: gl.constexpr, HINT: gl.constexpr,
):  # fmt: skip
    SHARE: gl.constexpr = HALF_ROWS // SPLIT
    ROW: gl.constexpr = share_layout(SHARE, gl.num_warps())
    tile, first = gl.program_id(0), gl.program_id(1) * PIECES
    places, xs, full = begin_stages(W, WD, XD, tile, first, 0, OUTPUTS - 1, K, PIECES, HALF_ROWS, STAGES, 0, FETCH, HINT)
    n = gl.program_id(1) * SHARE + gl.expand_dims(gl.arange(0, SHARE, gl.SliceLayout(1, ROW)), 1) + tile * (2 * HALF_ROWS)
    m = gl.expand_dims(gl.arange(0, XD.block_shape[0], gl.SliceLayout(0, ROW)), 0)
    at = m * OUTPUTS + n
    keep_a = (n < OUTPUTS) & (m < batch)
    keep_b = (n + HALF_ROWS < OUTPUTS) & (m < batch)
    xa = gl.load(X + at, mask=keep_a, other=0.0)  # before the product, which takes longer than they to come
    xb = gl.load(X + at + HALF_ROWS, mask=keep_b, other=0.0)
    a, b = staged_products(W, places, xs, full, WD, XD, tile, first, 0, OUTPUTS - 1, K, PIECES, HALF_ROWS, STAGES, 0, FETCH)
    pa, pb = add_parts(a, b, PART, COUNT, tile, HALF_ROWS, SPLIT, ROW)
    gl.store(OUT + at, (pa + xa.to(gl.float32)).to(OUT.dtype.element_ty), mask=keep_a)
    gl.store(OUT + at + HALF_ROWS, (pb + xb.to(gl.float32)).to(OUT.dtype.element_ty), mask=keep_b)


@gluon.jit(do_not_specialize=["batch"])
def staged_qkv_rope_kernel(
    W, WD, XD, COS, SIN, POSITIONS, SLOTS, Q, KC, VC, PART, COUNT, batch,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, HALF: gl.constexpr, PAGE: gl.constexpr,
    K: gl.constexpr, PIECES: gl.constexpr, HALF_ROWS: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr,
    FETCH: gl.constexpr, HINT: gl.constexpr,
):  # fmt: skip
    LAST: gl.constexpr = (HEADS + 2 * KV_HEADS) * 2 * HALF - 1
    SHARE: gl.constexpr = HALF_ROWS // SPLIT
    ROW: gl.constexpr = share_layout(SHARE, gl.num_warps())
    tile, first = gl.program_id(0), gl.program_id(1) * PIECES
    places, xs, full = begin_stages(W, WD, XD, tile, first, 0, LAST, K, PIECES, HALF_ROWS, STAGES, HALF, FETCH, HINT)
    a, b = staged_products(W, places, xs, full, WD, XD, tile, first, 0, LAST, K, PIECES, HALF_ROWS, STAGES, HALF, FETCH)
    pa, pb = add_parts(a, b, PART, COUNT, tile, HALF_ROWS, SPLIT, ROW)
    # a tile's heads are all of queries, all of keys or all of values
    of_share = gl.expand_dims(gl.arange(0, SHARE, gl.SliceLayout(1, ROW)), 1)
    pair = tile * HALF_ROWS + gl.program_id(1) * SHARE + of_share
    m = gl.expand_dims(gl.arange(0, XD.block_shape[0], gl.SliceLayout(0, ROW)), 0)
    head, d = pair // HALF, pair % HALF
    keep = (head < HEADS + 2 * KV_HEADS) & (m < batch)
    turned = tile * HALF_ROWS < (HEADS + KV_HEADS) * HALF
    position = gl.load(POSITIONS + m, mask=(m < batch) & turned, other=0).to(gl.int32)
    cos = gl.load(COS + position * HALF + d, mask=(m < batch) & turned, other=1.0)
    sin = gl.load(SIN + position * HALF + d, mask=(m < batch) & turned, other=0.0)
    ra = (pa * cos - pb * sin).to(Q.dtype.element_ty)
    rb = (pb * cos + pa * sin).to(Q.dtype.element_ty)
    if tile * HALF_ROWS < HEADS * HALF:
        to = Q + m * (HEADS * 2 * HALF) + (head * (2 * HALF) + d)
        gl.store(to, ra, mask=keep)
        gl.store(to + HALF, rb, mask=keep)
    else:
        slot = gl.load(SLOTS + m, mask=m < batch, other=0)
        row = (slot // PAGE * (KV_HEADS * PAGE) + slot % PAGE) * (2 * HALF)
        cell = row + ((head - HEADS) % KV_HEADS * (PAGE * 2 * HALF) + d)
        if turned:
            gl.store(KC + cell, ra, mask=keep)
            gl.store(KC + cell + HALF, rb, mask=keep)
        else:
            gl.store(VC + cell, ra, mask=keep)
            gl.store(VC + cell + HALF, rb, mask=keep)


def columns_of(tokens: int) -> int:
    """Activation rows as these kernels hold them: a power of two from 8 on."""
    return max(8, 1 << (tokens - 1).bit_length())


def resident(tile: ProductTile, columns: int, multiprocessors: int) -> int:
    """Programs of a tile that are certain to be resident at once, by the most shared memory and registers they can take."""
    held = tile.stages * (tile.rows + columns) * 2 * COLUMNS.value + 2048
    return multiprocessors * min((227 << 10) // held, 8 // tile.warps)


def fits(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tile: ProductTile) -> bool:
    """Whether these kernels can do the product that a tile with `tma` asks for."""
    outputs, k = weight.shape
    able = tile.tma and len(x) > 1 and bias is None and x.element_size() == 2 and k % (COLUMNS.value * tile.split) == 0
    if not able or tile.split == 1 or not x.is_cuda:
        return able
    multiprocessors = torch.cuda.get_device_properties(x.device).multi_processor_count
    programs = triton.cdiv(outputs, tile.rows) * tile.split
    even = tile.split & (tile.split - 1) == 0 and tile.rows // 2 // tile.split >= 4
    return even and programs <= resident(tile, columns_of(len(x)), multiprocessors)


def plain_tile(op: str, x: torch.Tensor, weight: torch.Tensor, tile: ProductTile) -> ProductTile:
    """For the plain kernel that takes a product which `fits` refuses: its stages would not find room there, so the rule's."""
    if not x.is_cuda:
        return replace(tile, tma=False)
    rule = _rule(op, *weight.shape, len(x), x.device.index)
    return replace(rule, pdl=tile.pdl, tma=False)


@cache
def _rule(op: str, outputs: int, k: int, batch: int, device: int) -> ProductTile:
    return product_rule(Tuning.of_device(device), op, outputs, k, batch)


def constants(tile: ProductTile, k: int) -> dict[str, Any]:
    """The compile-time arguments that all three kernels take, and the launch's own."""
    pieces, fetch = k // COLUMNS.value // tile.split, tile.fetch
    while fetch > 1 and pieces % fetch:
        fetch //= 2
    sizes = {"PIECES": pieces, "HALF_ROWS": tile.rows // 2, "STAGES": min(tile.stages, pieces), "SPLIT": tile.split}
    launch = {"num_warps": tile.warps, **({"launch_pdl": True} if tile.pdl else {})}
    return {"K": k, "FETCH": fetch if fetch > 1 else 0, "HINT": tile.hint, **sizes, **launch}


def _launch(x: torch.Tensor, weight: torch.Tensor, tile: ProductTile, box: int, workspace: Workspace) -> tuple[Any, ...]:
    """(the grid; what describes W and x to the copy engine; parts; arrivals)."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    columns, tiles = columns_of(len(x)), triton.cdiv(len(weight), tile.rows)
    wd = TensorDescriptor.from_tensor(weight, [box, COLUMNS.value], layout)
    xd = TensorDescriptor.from_tensor(x, [columns, COLUMNS.value], layout)
    part, _ = workspace.fit(tiles, tile, columns)
    return (tiles, tile.split), wd, xd, part, workspace.arrivals(tiles, tile.split)


def staged_norm_product(
    x: torch.Tensor, weight: torch.Tensor, gated: bool, tile: ProductTile, workspace: Workspace
) -> torch.Tensor:
    """[T, width] of normed x [T, K]: silu(g) * u of [g, u] = x W^T where `gated`, else x W^T."""
    width = len(weight) // 2 if gated else len(weight)
    grid, wd, xd, part, count = _launch(x, weight, tile, tile.rows // 2, workspace)
    out = torch.empty((len(x), width), dtype=x.dtype, device=x.device)
    fixed = constants(tile, weight.shape[1])
    staged_norm_product_kernel[grid](weight, wd, xd, out, part, count, len(x), WIDTH=width, GATED=gated, **fixed)
    return out


def staged_residual_product(
    u: torch.Tensor, weight: torch.Tensor, x: torch.Tensor, tile: ProductTile, workspace: Workspace
) -> torch.Tensor:
    """x [T, H] + u [T, K] @ weight [H, K]^T."""
    grid, wd, xd, part, count = _launch(u, weight, tile, tile.rows // 2, workspace)
    out = torch.empty_like(x)
    fixed = constants(tile, weight.shape[1])
    staged_residual_product_kernel[grid](weight, wd, xd, x, out, part, count, len(x), OUTPUTS=len(weight), **fixed)
    return out


def staged_qkv_rope(
    x: torch.Tensor, w: LayerWeights, rope: RopeTable, view: KVView, tile: ProductTile, workspace: Workspace
) -> torch.Tensor:
    """q [T, N, D] of normed x [T, H]; writes view.k and view.v at view.slots. A tile holds whole heads of one kind."""
    kv_heads, page, dim = view.k.shape[1:]
    heads = len(w.qkv) // dim - 2 * kv_heads
    grid, wd, xd, part, count = _launch(x, w.qkv, tile, min(dim, tile.rows) // 2, workspace)
    q = torch.empty((len(x), heads, dim), dtype=x.dtype, device=x.device)
    staged_qkv_rope_kernel[grid](
        w.qkv, wd, xd, rope.cos, rope.sin, view.positions, view.slots, q, view.k, view.v, part, count, len(x),
        HEADS=heads, KV_HEADS=kv_heads, HALF=dim // 2, PAGE=page, **constants(tile, x.shape[1]),
    )  # fmt: skip
    return q
