"""Output projection and sampling for 33 to 128 rows on Hopper: warps that bring weights, warps that multiply and sample.

What projection_sample computes, by as many programs as the device has multiprocessors:

    loading     one warp keeps a ring of tiles full: 256 weight rows and all activation rows, STEP elements of each
    consumers   eight warps multiply, products in registers, and work out the scores

Why not projection_sample itself: wide batches take their x along for each tile of weights, so what L2 has to give is
(1 + rows / weight rows of a tile) times the weights; 256 weight rows at once make that 1.5 instead of 2 at 128 rows. And while
a tile's scores are worked out its successor's weights come in, the whole ring of them.

The race is projection_sample's: where it is known that a score cannot win, its noise is not worked out. The bar is the best of
all programs a little before a tile is done.

Bytes and bound: as projection_sample. Hopper only (compute capability 9.0), compiled there and nowhere else.
Oracle: reference.ReferenceOps.projection_sample. Twin for the interpreter: projection_sample.
"""

from __future__ import annotations

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
from pdlab.kernels.ops import SamplingBatch
from pdlab.kernels.projection_sample import (
    EMPTY,
    LOGITS,
    RANDOM,
    Race,
    any_room,
    contest,
    hash_gumbel,
    noise_hash,
    noise_key,
    race_key,
    room,
    score_of,
    winner,
)
from pdlab.kernels.ring_product import barrier, launch_dependents, wait_for_the_kernel_before

ROWS = gl.constexpr(256)  # of weights that a program holds at once
WARPS = gl.constexpr(8)
LEAF = gl.constexpr(32)  # activation rows whose scores are worked out at once
_LOGITS, _RANDOM, _EMPTY = gl.constexpr(LOGITS), gl.constexpr(RANDOM), gl.constexpr(EMPTY)
STEP = 64  # elements of each row that a stage of the ring holds: 128 bytes, the widest swizzle
LAST = gl.constexpr(8)  # steps of a tile after the bar is read


@gluon.jit
def _ask(descriptors, rings, full, tile, stage, column):
    """Weights of one step."""
    wd, xd = descriptors
    ws, _xs = rings
    mbarrier.expect(full.index(stage), wd.block_type.nbytes + xd.block_type.nbytes)
    tma.async_copy_global_to_shared(wd, [tile * ROWS, column], full.index(stage), ws.index(stage))


@gluon.jit
def _bring(descriptors, rings, full, empty, tiles, STEPS: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr):
    _wd, xd = descriptors
    _ws, xs = rings
    mine = (tiles - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)
    for s in gl.static_range(STAGES):  # weights do not depend on the kernel launched before
        _ask(descriptors, rings, full, gl.program_id(0), s, s * STEP)
    wait_for_the_kernel_before()
    for s in gl.static_range(STAGES):
        tma.async_copy_global_to_shared(xd, [0, s * STEP], full.index(s), xs.index(s))
    for i in range(STAGES, mine * STEPS):
        stage = i % STAGES
        column = i % STEPS * STEP
        mbarrier.wait(empty.index(stage), (i // STAGES & 1) ^ 1)
        _ask(descriptors, rings, full, gl.program_id(0) + i // STEPS * gl.num_programs(0), stage, column)
        tma.async_copy_global_to_shared(xd, [0, column], full.index(stage), xs.index(stage))


@gluon.jit
def _better(score, token, other, its_token):
    other_wins = (other > score) | ((other == score) & (its_token < token))
    return gl.where(other_wins, other, score), gl.where(other_wins, its_token, token)


@gluon.jit
def _send_best(score, tokens, best_at, real):
    score = gl.where(score == score, score, float("inf"))  # NaN must show, and no comparison finds it
    best, token = gl.reduce((score, tokens), 0, _better)
    gl.atomic_max(best_at, race_key(best, token), mask=real, sem="relaxed")


@gluon.jit
def _leaf(logits, q, first_token, batch, TEMPERATURE, OUT, BEST, facts, VOCAB: gl.constexpr, WANT: gl.constexpr):
    """Sends the best of logits [rows of weights, LEAF] for the q-th LEAF activation rows; or writes the logits."""
    HERE: gl.constexpr = logits.type.layout
    COLUMN: gl.constexpr = gl.SliceLayout(0, HERE)
    key1, key2, slope, offset = facts
    m = q * LEAF + gl.arange(0, LEAF, COLUMN)
    real = m < batch
    tokens = gl.expand_dims(first_token + gl.arange(0, logits.shape[0], gl.SliceLayout(1, HERE)), 1)
    if WANT == _LOGITS:
        at = gl.expand_dims(m.to(gl.int64) * VOCAB, 0) + tokens
        gl.store(OUT + at, logits, mask=(tokens < VOCAB) & gl.expand_dims(real, 0))
    elif WANT == _RANDOM:
        k1 = gl.expand_dims(key1.index(q).load(COLUMN), 0).to(gl.uint32, bitcast=True)
        k2 = gl.expand_dims(key2.index(q).load(COLUMN), 0).to(gl.uint32, bitcast=True)
        h = noise_hash(tokens, k1, k2)
        steep = gl.expand_dims(slope.index(q).load(COLUMN), 0)
        if any_room(room(logits, h, steep, gl.expand_dims(offset.index(q).load(COLUMN), 0))):
            temperature = gl.load(TEMPERATURE + m, mask=real, other=0.0)
            # below 1e-6 the noise is lost in rounding anyway, and the quotient must stay finite
            hot = logits * gl.expand_dims(1.0 / gl.maximum(temperature, 1e-6), 0) + hash_gumbel(h)
            score = gl.where(gl.expand_dims(temperature > 0, 0), hot, logits)
            _send_best(score, tokens + gl.zeros(logits.shape, gl.int32, HERE), BEST + m, real)
    elif any_room(logits + gl.expand_dims(offset.index(q).load(COLUMN), 0)):
        _send_best(logits, tokens + gl.zeros(logits.shape, gl.int32, HERE), BEST + m, real)


@gluon.jit
def _halves(x):
    return gl.split(gl.permute(gl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@gluon.jit
def _enter_race(
    logits, first_token, batch, TEMPERATURE, OUT, BEST, facts, BM: gl.constexpr, VOCAB: gl.constexpr, WANT: gl.constexpr
):
    """Leaf after leaf in a loop, by passing the registers on: written out, the code is longer than its cache, and the few warps
    of a program wait for most of it to come."""
    if BM == 32:
        _leaf(logits, 0, first_token, batch, TEMPERATURE, OUT, BEST, facts, VOCAB, WANT)
    elif BM == 64:
        a, b = _halves(logits)
        for q in range((batch + LEAF - 1) // LEAF):
            _leaf(a, q, first_token, batch, TEMPERATURE, OUT, BEST, facts, VOCAB, WANT)
            a, b = b, a
    else:
        left, right = _halves(logits)
        a, b = _halves(left)
        c, d = _halves(right)
        for q in range((batch + LEAF - 1) // LEAF):
            _leaf(a, q, first_token, batch, TEMPERATURE, OUT, BEST, facts, VOCAB, WANT)
            a, b, c, d = b, c, d, a


@gluon.jit
def _multiply(acc, first, rings, full, empty, i, COUNT: gl.constexpr, STAGES: gl.constexpr):
    """Adds the products of COUNT steps from i on; the last of them is still under way. `first`: they begin a tile."""
    ws, xs = rings
    for j in range(COUNT):
        stage = (i + j) % STAGES
        mbarrier.wait(full.index(stage), (i + j) // STAGES & 1)
        acc = warpgroup_mma(ws.index(stage), xs.index(stage).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(empty.index((i + j + STAGES - 1) % STAGES), count=1, pred=(first == 0) | (j > 0))
    return acc


@gluon.jit
def _consume(
    pointers, rings, full, empty, facts, tiles, batch,
    BM: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr, VOCAB: gl.constexpr, WANT: gl.constexpr,
):  # fmt: skip
    TEMPERATURE, SEED, POSITION, OUT, BEST, DONE = pointers
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, BM, 16])
    THREADS: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    key1, key2, slope, offset = facts
    wait_for_the_kernel_before()
    m = gl.arange(0, 128, THREADS)
    real = m < batch
    temperature = gl.load(TEMPERATURE + m, mask=real, other=0.0)
    if WANT == _RANDOM:
        k1, k2 = noise_key(gl.load(SEED + m, mask=real, other=0), gl.load(POSITION + m, mask=real, other=0))
        key1._reinterpret(gl.int32, [128], LINE).store(k1.to(gl.int32, bitcast=True))
        key2._reinterpret(gl.int32, [128], LINE).store(k2.to(gl.int32, bitcast=True))
    mine = (tiles - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)
    for t in range(mine):
        first_token = (gl.program_id(0) + t * gl.num_programs(0)) * ROWS
        i = t * STEPS
        acc = gl.zeros([ROWS, BM], gl.float32, ACC)  # the last tile's registers have been passed around
        acc = _multiply(acc, 1, rings, full, empty, i, STEPS - LAST, STAGES)
        best = gl.load(BEST + m, mask=real, other=0, cache_modifier=".cg")
        acc = _multiply(acc, 0, rings, full, empty, i + STEPS - LAST, LAST, STAGES)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index((i + STEPS - 1) % STAGES), count=1)
        if WANT != _LOGITS:
            steep, bar = contest(temperature, best, real)
            if WANT != _RANDOM:
                bar = gl.where(real, -score_of(best), float("-inf"))
            slope._reinterpret(gl.float32, [128], LINE).store(steep)
            offset._reinterpret(gl.float32, [128], LINE).store(bar)
            if VOCAB % ROWS:  # noqa: SIM102 - known when compiling, the other is not
                if first_token + ROWS > VOCAB:
                    token = first_token + gl.arange(0, ROWS, gl.SliceLayout(1, ACC))
                    acc = gl.where(gl.expand_dims(token < VOCAB, 1), acc, float("-inf"))
        _enter_race(acc, first_token, batch, TEMPERATURE, OUT, BEST, facts, BM, VOCAB, WANT)
    if WANT != _LOGITS:
        barrier()  # every thread's maximum comes before the release below
        if gl.atomic_add(DONE, 1, sem="acq_rel", scope="gpu") == gl.num_programs(0) - 1:
            won = gl.load(BEST + m, mask=real, other=0, cache_modifier=".cg")
            gl.store(OUT + m, winner(won), mask=real)
            gl.store(BEST + m, gl.full([128], _EMPTY, gl.int64, THREADS), mask=real)  # for the next launch
            gl.store(DONE, 0)


@gluon.jit
def _room_for_facts():
    """Of the rows: both keys, slope, offset; LEAF rows a line."""
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return (
        gl.allocate_shared_memory(gl.int32, [4, LEAF], LINE), gl.allocate_shared_memory(gl.int32, [4, LEAF], LINE),
        gl.allocate_shared_memory(gl.float32, [4, LEAF], LINE), gl.allocate_shared_memory(gl.float32, [4, LEAF], LINE),
    )  # fmt: skip


@gluon.jit(do_not_specialize=["batch", "tiles"])
def projection_sample_hopper_kernel(
    WD, XD, TEMPERATURE, SEED, POSITION, OUT, BEST, DONE, batch, tiles,
    VOCAB: gl.constexpr, WANT: gl.constexpr, K: gl.constexpr, BM: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr,
    HINT: gl.constexpr,
):  # fmt: skip
    if HINT:
        leave_l2_first(0)
    STEPS: gl.constexpr = K // STEP
    ws = gl.allocate_shared_memory(WD.dtype, [STAGES, ROWS, STEP], WD.layout)
    xs = gl.allocate_shared_memory(XD.dtype, [STAGES, BM, STEP], XD.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    facts = _room_for_facts()
    fence_async_shared()
    launch_dependents()
    pointers = (TEMPERATURE, SEED, POSITION, OUT, BEST, DONE)
    rings = (ws, xs)
    gl.warp_specialize(
        [
            # constants stay constants only where they are written in the call itself
            (_consume, (pointers, rings, full, empty, facts, tiles, batch, BM, STEPS, STAGES, VOCAB, WANT)),
            (_bring, ((WD, XD), rings, full, empty, tiles, STEPS, STEP, STAGES)),
        ],
        [1],
        [40],
    )


def stages_of(columns: int) -> int:
    """Of the ring, as shared memory allows."""
    return min(8, (220 << 10) // ((ROWS.value + columns) * STEP * 2))


def projects(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether this kernel can do it: rows, elements and addresses as it wants them."""
    k = weight.shape[1]
    placed = weight.is_contiguous() and weight.data_ptr() % 16 == 0
    return 32 < len(x) <= 128 and weight.element_size() == 2 and k % STEP == 0 and k >= 16 * STEP and placed


def project_hopper(
    x: torch.Tensor,
    weight: torch.Tensor,
    want: int,
    sampling: SamplingBatch,
    race: Race,
    *,
    pdl: bool = True,
    hint: bool = True,
) -> torch.Tensor:
    """As projection_sample.project, of normed x [S, H] and weight [V, H], for what `projects` accepts. `hint`: as a tile's."""
    rows, k = x.shape
    vocab = len(weight)
    columns = max(LEAF.value, 1 << (rows - 1).bit_length())
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    tiles = triton.cdiv(vocab, ROWS.value)
    shape, dtype = ((rows, vocab), torch.float32) if want == LOGITS else ((rows,), torch.int64)
    out = torch.empty(shape, dtype=dtype, device=x.device)
    programs = min(torch.cuda.get_device_properties(x.device).multi_processor_count, tiles)
    projection_sample_hopper_kernel[(programs,)](
        TensorDescriptor.from_tensor(weight, [ROWS.value, STEP], layout),
        TensorDescriptor.from_tensor(x, [columns, STEP], layout),
        sampling.temperature, sampling.seed, sampling.position, out, race.best, race.done, rows, tiles,
        VOCAB=vocab, WANT=want, K=k, BM=columns, STEP=STEP, STAGES=stages_of(columns), HINT=hint,
        num_warps=WARPS.value,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return out
