"""The fused operations of a decode step with 2 to 64 activation rows on Hopper, by a ring of weights and of activations.

    ring_rows_up        what norm_product computes (SwiGLU)
    ring_rows_qkv_rope  what norm_qkv_rope computes
    ring_rows_residual  what residual_product computes

All tiles of 64 + 64 weight rows, cut into pieces of 64 columns, form one line, and each program takes an equal stretch of it:
every multiprocessor reads its share whatever the shape. As in ring_product a ring of STAGES pieces is filled before the wait
for the kernel launched before; the activations of a piece, [BM, 64], follow behind the wait. A tile that several programs share
is added up by the last of them to finish, always in the same order.

The halves of a tile are partners: gates and values, rotary halves (a head of 128, or two of 64), or just rows. RMSNorm by
products.Scaled, no biases.

Bytes: the weights once, and x once a tile, BM / 128 as much, from L2. Bound: bandwidth. Hopper only, compiled there and nowhere
else. Oracle: reference.ReferenceOps. Twins for the interpreter: the kernels named on the right.
"""

from __future__ import annotations

from typing import Any

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

from pdlab.kernels.kv_view import KVView
from pdlab.kernels.ops import LayerWeights, NormWeights, RopeTable
from pdlab.kernels.product_tiles import RingTile, columns_of
from pdlab.kernels.products import Following, Scaled, Workspace
from pdlab.kernels.ring_product import barrier, following_into_l2, launch_dependents, wait_for_the_kernel_before

HALF_TILE = gl.constexpr(64)
PANEL = gl.constexpr(64)
# results of a half go out through a layout in which a thread holds eight neighbours of one activation row
OUTPUT = gl.constexpr(gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1]))


@gluon.jit
def _ask_weights(
    ring, full, WD, i, begin, count, apart, K: gl.constexpr, STAGES: gl.constexpr, PARTNERS: gl.constexpr, BOX: gl.constexpr
):  # fmt: skip
    """Starts the copy of the weights of this program's piece i, in boxes of BOX rows."""
    PIECES: gl.constexpr = K // PANEL
    stage = i % STAGES
    ours = i < count
    tile, column = (begin + i) // PIECES, (begin + i) % PIECES * PANEL
    mbarrier.expect(full.index(stage), 2 * HALF_TILE * PANEL * 2, pred=ours)
    for half in gl.static_range(2):
        for box in gl.static_range(HALF_TILE // BOX):
            row = tile * (2 * HALF_TILE) + half * HALF_TILE + box * BOX
            if PARTNERS == -1:
                row = tile * HALF_TILE + half * apart + box * BOX
            if PARTNERS > 0:
                row = tile * (2 * HALF_TILE) + half * PARTNERS + box * (2 * PARTNERS)
            to = ring.index(stage * 2 + half).slice(box * BOX, BOX, 0)
            tma.async_copy_global_to_shared(WD, [row, column], full.index(stage), to, pred=ours)


@gluon.jit
def _ask_rows(xring, full, XD, i, begin, count, K: gl.constexpr, STAGES: gl.constexpr):
    stage = i % STAGES
    ours = i < count
    mbarrier.expect(full.index(stage), XD.block_type.nbytes, pred=ours)
    column = (begin + i) % (K // PANEL) * PANEL
    tma.async_copy_global_to_shared(XD, [0, column], full.index(stage), xring.index(stage), pred=ours)


@gluon.jit
def _stretch(tiles, K: gl.constexpr):
    """(pieces a program, programs with one more, first piece and number of pieces of this one)."""
    total = tiles * (K // PANEL)
    share, extra = total // gl.num_programs(0), total % gl.num_programs(0)
    p = gl.program_id(0)
    return share, extra, p * share + gl.minimum(p, extra), share + (p < extra).to(gl.int32)


@gluon.jit
def _program_of(piece, share, extra):
    wide = extra * (share + 1)
    return gl.where(piece < wide, piece // (share + 1), extra + (piece - wide) // gl.maximum(share, 1))


@gluon.jit
def _begin(
    WD, XD, NEXT, tiles, apart,
    BM: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr, PARTNERS: gl.constexpr, BOX: gl.constexpr,
    NEXT_EACH: gl.constexpr, NEXT_SIZE: gl.constexpr, NEXT_APART: gl.constexpr,
):  # fmt: skip
    """(rings, barriers): both on their way. Waits for the kernel before."""
    ring = gl.allocate_shared_memory(WD.dtype, [STAGES * 2, HALF_TILE, PANEL], WD.layout)
    xring = gl.allocate_shared_memory(WD.dtype, [STAGES, BM, PANEL], XD.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    xfull = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(xfull.index(s), count=1)
    fence_async_shared()
    _share, _extra, begin, count = _stretch(tiles, K)
    for i in gl.static_range(STAGES):
        _ask_weights(ring, full, WD, i, begin, count, apart, K, STAGES, PARTNERS, BOX)
    if NEXT_EACH:
        following_into_l2(NEXT, NEXT_EACH, NEXT_SIZE, NEXT_APART)
    launch_dependents()
    wait_for_the_kernel_before()
    for i in gl.static_range(STAGES):
        _ask_rows(xring, xfull, XD, i, begin, count, K, STAGES)
    return ring, xring, full, xfull


@gluon.jit
def _next_tile(
    rings, WD, XD, PART, COUNT, i, tile, tiles, apart,
    BM: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr, PARTNERS: gl.constexpr, BOX: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """(products float32 [64, BM] of the tile's halves, the next piece, whether they are whole): this program's part of `tile`,
    or all of it where it is the last to finish its part."""
    PIECES: gl.constexpr = K // PANEL
    SIZE: gl.constexpr = 2 * HALF_TILE * BM
    ring, xring, full, xfull = rings
    share, extra, begin, count = _stretch(tiles, K)
    pieces = gl.minimum((tile + 1) * PIECES - (begin + i), count - i)
    a = gl.zeros([HALF_TILE, BM], gl.float32, ACC)
    b = gl.zeros([HALF_TILE, BM], gl.float32, ACC)
    for _ in range(pieces):
        stage = i % STAGES
        mbarrier.wait(full.index(stage), i // STAGES & 1)
        mbarrier.wait(xfull.index(stage), i // STAGES & 1)
        x = xring.index(stage).permute((1, 0))
        a = warpgroup_mma(ring.index(stage * 2), x, a, is_async=True)
        b = warpgroup_mma(ring.index(stage * 2 + 1), x, b, is_async=True)
        a, b = warpgroup_mma_wait(0, deps=[a, b])
        barrier()  # all warps have read the stage
        _ask_weights(ring, full, WD, i + STAGES, begin, count, apart, K, STAGES, PARTNERS, BOX)
        _ask_rows(xring, xfull, XD, i + STAGES, begin, count, K, STAGES)
        i += 1
    whole = pieces == PIECES
    if pieces < PIECES:
        # a stretch cuts at most two tiles: the one it begins in and the one it ends in
        line = gl.expand_dims(gl.arange(0, HALF_TILE, gl.SliceLayout(1, ACC)), 1)
        at = line * BM + gl.expand_dims(gl.arange(0, BM, gl.SliceLayout(0, ACC)), 0)
        mine = PART + (2 * gl.program_id(0) + (tile > begin // PIECES).to(gl.int32)) * SIZE
        gl.store(mine + at, a)
        gl.store(mine + SIZE // 2 + at, b)
        first, last = _program_of(tile * PIECES, share, extra), _program_of(tile * PIECES + PIECES - 1, share, extra)
        barrier()  # every thread's stores come before the release below
        if gl.atomic_add(COUNT + tile, 1, sem="acq_rel", scope="gpu") == last - first:
            a = gl.zeros([HALF_TILE, BM], gl.float32, ACC)
            b = gl.zeros([HALF_TILE, BM], gl.float32, ACC)
            for p in range(first, last + 1):  # .cg: written by other SMs during this launch
                theirs = PART + (2 * p + (tile > (p * share + gl.minimum(p, extra)) // PIECES).to(gl.int32)) * SIZE
                a += gl.load(theirs + at, cache_modifier=".cg")
                b += gl.load(theirs + SIZE // 2 + at, cache_modifier=".cg")
            gl.store(COUNT + tile, 0)  # for the next launch
            whole = True
    return a, b, i, whole


@gluon.jit
def _tiles_here(tiles, K: gl.constexpr):
    """(the first tile that this program works on, how many)."""
    _share, _extra, begin, count = _stretch(tiles, K)
    first = begin // (K // PANEL)
    return first, gl.where(count > 0, (begin + count - 1) // (K // PANEL) - first + 1, 0)


@gluon.jit
def _scale(SUMS_OF, eps, SUMS: gl.constexpr, BM: gl.constexpr, K: gl.constexpr, ACC: gl.constexpr):
    """1/rms [BM] from the sums of squares that came with y."""
    squares = gl.zeros([BM], gl.float32, gl.SliceLayout(0, ACC))
    m = gl.arange(0, BM, gl.SliceLayout(0, ACC))
    for part in gl.static_range(SUMS):
        squares += gl.load(SUMS_OF + part * BM + m)
    return gl.rsqrt(squares / K + eps)


@gluon.jit
def ring_rows_up_kernel(
    XD, SUMS_OF, WD, NEXT, OUT, PART, COUNT, eps, tiles, batch,
    WIDTH: gl.constexpr, SUMS: gl.constexpr,
    BM: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr,
    NEXT_EACH: gl.constexpr, NEXT_SIZE: gl.constexpr, NEXT_APART: gl.constexpr,
):  # fmt: skip
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16])
    rings = _begin(WD, XD, NEXT, tiles, WIDTH, BM, K, STAGES, -1, 64, NEXT_EACH, NEXT_SIZE, NEXT_APART)
    first, number = _tiles_here(tiles, K)
    line, m = gl.arange(0, HALF_TILE, gl.SliceLayout(1, OUTPUT)), gl.arange(0, BM, gl.SliceLayout(0, OUTPUT))
    i = 0
    for tile in range(first, first + number):
        a, b, i, whole = _next_tile(rings, WD, XD, PART, COUNT, i, tile, tiles, WIDTH, BM, K, STAGES, -1, 64, ACC)
        if whole:
            if SUMS:
                scale = gl.expand_dims(_scale(SUMS_OF, eps, SUMS, BM, K, ACC), 0)
                a *= scale
                b *= scale
            out = gl.convert_layout((a / (1.0 + gl.exp(-a)) * b).to(OUT.dtype.element_ty), OUTPUT)
            n = tile * HALF_TILE + line
            keep = gl.expand_dims(n < WIDTH, 1) & gl.expand_dims(m < batch, 0)
            gl.store(OUT + gl.expand_dims(n, 1) + gl.expand_dims(m * WIDTH, 0), out, mask=keep)


@gluon.jit
def _add_residual(acc, X, OUT, NORM_W, Y, first, batch, OUTPUTS: gl.constexpr, BM: gl.constexpr, SCALES: gl.constexpr):
    """Writes x' = x + acc of 64 columns of the residual stream (and y), returns the sums of squares of x' [BM]."""
    n = first + gl.arange(0, HALF_TILE, gl.SliceLayout(1, OUTPUT))
    m = gl.arange(0, BM, gl.SliceLayout(0, OUTPUT))
    keep = gl.expand_dims(n < OUTPUTS, 1) & gl.expand_dims(m < batch, 0)
    at = gl.expand_dims(n, 1) + gl.expand_dims(m * OUTPUTS, 0)
    out = gl.convert_layout(acc, OUTPUT) + gl.load(X + at, mask=keep, other=0.0).to(gl.float32)
    rounded = out.to(OUT.dtype.element_ty)
    gl.store(OUT + at, rounded, mask=keep)
    x = gl.where(keep, rounded.to(gl.float32), 0.0)
    if SCALES:
        g = gl.load(NORM_W + n, mask=n < OUTPUTS, other=0.0).to(gl.float32)
        gl.store(Y + at, (x * gl.expand_dims(g, 1)).to(Y.dtype.element_ty), mask=keep)
    return gl.sum(x * x, 0)


@gluon.jit
def ring_rows_residual_kernel(
    UD, WD, NEXT, X, OUT, NORM_W, Y, SUMS_OF, PART, COUNT, tiles, batch,
    OUTPUTS: gl.constexpr, SCALES: gl.constexpr,
    BM: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr,
    NEXT_EACH: gl.constexpr, NEXT_SIZE: gl.constexpr, NEXT_APART: gl.constexpr,
):  # fmt: skip
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16])
    rings = _begin(WD, UD, NEXT, tiles, 0, BM, K, STAGES, 0, 64, NEXT_EACH, NEXT_SIZE, NEXT_APART)
    first, number = _tiles_here(tiles, K)
    i = 0
    for tile in range(first, first + number):
        a, b, i, whole = _next_tile(rings, WD, UD, PART, COUNT, i, tile, tiles, 0, BM, K, STAGES, 0, 64, ACC)
        if whole:
            n = tile * (2 * HALF_TILE)
            squares = _add_residual(a, X, OUT, NORM_W, Y, n, batch, OUTPUTS, BM, SCALES)
            squares += _add_residual(b, X, OUT, NORM_W, Y, n + HALF_TILE, batch, OUTPUTS, BM, SCALES)
            if SCALES:
                gl.store(SUMS_OF + tile * BM + gl.arange(0, BM, gl.SliceLayout(0, OUTPUT)), squares)


@gluon.jit
def ring_rows_qkv_rope_kernel(
    XD, SUMS_OF, WD, NEXT, COS, SIN, POSITIONS, SLOTS, Q, KC, VC, PART, COUNT, eps, tiles, batch,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, HALF: gl.constexpr, PAGE: gl.constexpr, SUMS: gl.constexpr,
    BM: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr,
    NEXT_EACH: gl.constexpr, NEXT_SIZE: gl.constexpr, NEXT_APART: gl.constexpr,
):  # fmt: skip
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16])
    rings = _begin(WD, XD, NEXT, tiles, 0, BM, K, STAGES, HALF, HALF, NEXT_EACH, NEXT_SIZE, NEXT_APART)
    first, number = _tiles_here(tiles, K)
    line, m = gl.arange(0, HALF_TILE, gl.SliceLayout(1, OUTPUT)), gl.arange(0, BM, gl.SliceLayout(0, OUTPUT))
    slot = gl.expand_dims(gl.load(SLOTS + m, mask=m < batch, other=0), 0)
    position = gl.expand_dims(gl.load(POSITIONS + m, mask=m < batch, other=0), 0)
    i = 0
    for tile in range(first, first + number):
        a, b, i, whole = _next_tile(rings, WD, XD, PART, COUNT, i, tile, tiles, 0, BM, K, STAGES, HALF, HALF, ACC)
        if whole:
            if SUMS:
                scale = gl.expand_dims(_scale(SUMS_OF, eps, SUMS, BM, K, ACC), 0)
                a *= scale
                b *= scale
            first_half, second_half = gl.convert_layout(a, OUTPUT), gl.convert_layout(b, OUTPUT)
            head = gl.expand_dims(tile * (HALF_TILE // HALF) + line // HALF, 1)
            d = gl.expand_dims(line % HALF, 1)
            there = (head < HEADS + 2 * KV_HEADS) & gl.expand_dims(m < batch, 0)
            turned = (head < HEADS + KV_HEADS) & gl.expand_dims(m < batch, 0)
            cos = gl.load(COS + position * HALF + d, mask=turned, other=1.0)
            sin = gl.load(SIN + position * HALF + d, mask=turned, other=0.0)
            ra = (first_half * cos - second_half * sin).to(Q.dtype.element_ty)
            rb = (second_half * cos + first_half * sin).to(Q.dtype.element_ty)
            is_q = head < HEADS
            to = Q + (gl.expand_dims(m, 0) * HEADS + head) * (2 * HALF) + d
            gl.store(to, ra, mask=there & is_q)
            gl.store(to + HALF, rb, mask=there & is_q)
            kv_head = (head - HEADS) % KV_HEADS
            at = (slot // PAGE * (KV_HEADS * PAGE) + kv_head * PAGE + slot % PAGE) * (2 * HALF) + d
            is_k = turned & (head >= HEADS)
            is_v = there & (head >= HEADS + KV_HEADS)
            gl.store(KC + at, ra, mask=is_k)
            gl.store(KC + at + HALF, rb, mask=is_k)
            gl.store(VC + at, ra, mask=is_v)
            gl.store(VC + at + HALF, rb, mask=is_v)


def _descriptors(x: torch.Tensor, weight: torch.Tensor, box: int) -> tuple[TensorDescriptor, TensorDescriptor]:
    """x [T, K] in copies of all rows, missing ones zero, and weight [N, K] in copies of `box` rows, by a panel of columns."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    rows = columns_of(len(x))
    return (
        TensorDescriptor.from_tensor(x, [rows, PANEL.value], layout),
        TensorDescriptor.from_tensor(weight, [box, PANEL.value], layout),
    )


def _launch(
    x: torch.Tensor, weight: torch.Tensor, tile: RingTile, workspace: Workspace, following: Following | None
) -> tuple[int, int, tuple[torch.Tensor, torch.Tensor], dict[str, Any]]:
    """(programs, tiles, where programs meet, compile-time arguments and options)."""
    tiles, columns = triton.cdiv(len(weight), 2 * HALF_TILE.value), columns_of(len(x))
    programs = torch.cuda.get_device_properties(x.device).multi_processor_count
    meeting = workspace.room(programs * 4 * HALF_TILE.value * columns, tiles)
    each = 0 if following is None else following.each(programs, tile.following)
    fixed: dict[str, Any] = {"BM": columns, "K": weight.shape[1], "STAGES": tile.stages, "num_warps": 4, "NEXT_EACH": each}
    fixed["NEXT_SIZE"] = following.weight.numel() if each and following is not None else 0
    fixed["NEXT_APART"] = following.apart if each and following is not None else 0
    return programs, tiles, meeting, fixed | ({"launch_pdl": True} if tile.pdl else {})


def _half_normed(x: torch.Tensor, done: Scaled | None) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(what is multiplied, its sums of squares, how many parts those have); `done` None: x is behind the norm."""
    return (x, x, 0) if done is None else (done.y, done.sums, len(done.sums))


def ring_rows_up(
    x: torch.Tensor, eps: float, weight: torch.Tensor, tile: RingTile, workspace: Workspace, *,
    done: Scaled | None, following: Following | None,
) -> torch.Tensor:  # fmt: skip
    """silu(gates) * values [T, F] of x [T, K] behind its norm and weight [2F, K] (gates first), T from 2 to 64; contiguous."""
    width = len(weight) // 2
    y, sums, parts = _half_normed(x, done)
    programs, tiles, meeting, fixed = _launch(x, weight, tile, workspace, following)
    out = torch.empty((len(x), width), dtype=x.dtype, device=x.device)
    yd, wd = _descriptors(y, weight, HALF_TILE.value)
    ring_rows_up_kernel[(programs,)](
        yd, sums, wd, weight if following is None else following.weight, out, *meeting, eps, tiles, len(x),
        WIDTH=width, SUMS=parts, **fixed,
    )  # fmt: skip
    return out


def ring_rows_residual(
    u: torch.Tensor, weight: torch.Tensor, x: torch.Tensor, tile: RingTile, workspace: Workspace, *,
    norm: NormWeights | None, following: Following | None,
) -> tuple[torch.Tensor, Scaled | None]:  # fmt: skip
    """As residual_product.residual_product, without a bias, T from 2 to 64."""
    programs, tiles, meeting, fixed = _launch(u, weight, tile, workspace, following)
    out, scaled = torch.empty_like(x), None
    if norm is not None:
        sums = torch.empty((tiles, columns_of(len(x))), dtype=torch.float32, device=x.device)
        scaled = Scaled(torch.empty_like(x), sums)
    y, sums = (x, x) if scaled is None else (scaled.y, scaled.sums)
    ud, wd = _descriptors(u, weight, HALF_TILE.value)
    ring_rows_residual_kernel[(programs,)](
        ud, wd, weight if following is None else following.weight, x, out, x if norm is None else norm.weight, y, sums,
        *meeting, tiles, len(x), OUTPUTS=len(weight), SCALES=norm is not None, **fixed,
    )  # fmt: skip
    return out, scaled


def ring_rows_qkv_rope(
    x: torch.Tensor, w: LayerWeights, rope: RopeTable, view: KVView, tile: RingTile, workspace: Workspace, *,
    done: Scaled | None, following: Following | None,
) -> torch.Tensor:  # fmt: skip
    """q [T, N, D] of x [T, H] behind its norm, T from 2 to 64, D 64 or 128; writes view.k and view.v at view.slots."""
    kv_heads, page, dim = view.k.shape[1:]
    heads = w.qkv.shape[0] // dim - 2 * kv_heads
    y, sums, parts = _half_normed(x, done)
    programs, tiles, meeting, fixed = _launch(x, w.qkv, tile, workspace, following)
    q = torch.empty((len(x), heads, dim), dtype=x.dtype, device=x.device)
    yd, wd = _descriptors(y, w.qkv, dim // 2)
    ring_rows_qkv_rope_kernel[(programs,)](
        yd, sums, wd, w.qkv if following is None else following.weight, rope.cos, rope.sin, view.positions, view.slots,
        q, view.k, view.v, *meeting, w.attn_norm.eps, tiles, len(x),
        HEADS=heads, KV_HEADS=kv_heads, HALF=dim // 2, PAGE=page, SUMS=parts, **fixed,
    )  # fmt: skip
    return q
