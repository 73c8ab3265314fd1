"""The tile sizes of the attention kernels, swept: which is fastest depends on the architecture, the head size and the length.

One row a tile, its sizes as parameters named tile_…; the fastest right one of each kind and head size goes to
tuning/<device>.json, where kernels.tuning finds it. A GPU of capability 8.0 or above is needed: elsewhere the kernels are
never chosen. Most of the time goes into compiling (a few seconds a tile); what the budget does not reach is marked as skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdlab.bench.suites import Context
    from pdlab.kernels.tuning import DecodeRing, DecodeTile, HopperTile, PrefillTile

NAME = "attention_tiles"
HELP = "sweep of the attention kernels' tile sizes; writes the device's tuning table"

QUERIES = (256, 4096)  # tokens a prompt: one length for the bandwidth-bound tiles, one for the compute-bound
DECODES = ((1, 4096), (1, 65536), (8, 4096), (32, 4096))  # requests, tokens a request; the last stands for all larger ones
HEADS, KV_HEADS, TOKENS = 32, 8, 16384  # query and KV heads; tokens of all prompts together


def decode_tiles(shared_bytes: int, head_dim: int, pdl: bool) -> Iterator[DecodeTile]:
    """Each size and number of blocks with as many tiles on their way as fit; registers allow eight warps altogether."""
    from pdlab.kernels.tuning import DecodeTile

    for block_n in (32, 64, 128):
        for warps, blocks in ((1, 4), (2, 3), (2, 4), (4, 1), (4, 2), (8, 1)):
            stages = min(5, (shared_bytes // blocks - (10 << 10)) // (2 * block_n * head_dim * 2) + 1)
            if stages >= 2 and block_n <= 32 * warps:
                yield DecodeTile(block_n, warps, stages, blocks, pdl)


def ring_tiles(shared_bytes: int, head_dim: int, pdl: bool, small: bool = True) -> Iterator[DecodeRing]:
    """One to three resident blocks, each with as many tiles in its ring as fit, or one less; none for other head sizes.

    How little a program may get (`least`) matters for small work alone."""
    from pdlab.kernels.tuning import DecodeRing

    for blocks in (1, 2, 3) if head_dim in (64, 128) else ():
        fit = min(6, (shared_bytes // blocks - 64 * head_dim - (1 << 10)) // (256 * head_dim))
        for stages in (fit, fit - 1):
            for least in (2, 4, 8) if small else (4,):
                if stages >= 2:
                    yield DecodeRing(4, stages, blocks, least, pdl)


def prefill_tiles(shared_bytes: int, head_dim: int) -> Iterator[PrefillTile]:
    from pdlab.kernels.tuning import PrefillTile

    for block_m, warps in ((32, 4), (64, 4), (128, 8)):
        for block_n in (16, 32, 64, 128):
            for stages in (2, 3):
                tile = PrefillTile(block_m, block_n, warps, stages)
                if tile.shared_bytes(head_dim) <= shared_bytes - (2 << 10):
                    yield tile


def hopper_tiles(head_dim: int) -> Iterator[HopperTile]:
    from pdlab.kernels.tuning import HopperTile

    for consumers, block_n, stages in ((2, 128, 2), (2, 64, 4)) if head_dim == 128 else ((3, 128, 4), (3, 64, 6), (2, 128, 4)):
        for turns in (True, False):
            yield HopperTile(consumers, block_n, stages, turns)


def sweep(phase: str, tuning: Any, head_dim: int, batch: int, length: int) -> Iterator[tuple[str, Any]]:
    """(kind of table entry, tile) of everything worth timing in a phase."""
    if phase == "decode":
        pdl = tuning.capability >= (9, 0)
        yield from (
            ("decode_ring", tile) for tile in ring_tiles(tuning.shared_bytes, head_dim, pdl, small=batch * length <= 8192)
        )
        if (batch, length) == DECODES[-1]:
            yield from (("decode", tile) for tile in decode_tiles(tuning.shared_bytes, head_dim, pdl))
        return
    yield from (("prefill", tile) for tile in prefill_tiles(tuning.shared_bytes, head_dim))
    if tuning.capability == (9, 0):
        yield from (("prefill_hopper", tile) for tile in hopper_tiles(head_dim))


Best = dict[tuple[str, int, int], tuple[float, dict[str, Any]]]  # (kind, requests, tokens) -> milliseconds, sizes


def run(ctx: Context) -> None:
    from pdlab.bench import _attention as common
    from pdlab.kernels.dispatch import why_not
    from pdlab.kernels.tuning import Tuning

    if reason := why_not("triton", ctx.machine.capability) or (None if ctx.machine.is_gpu else "tiles are timed on a GPU"):
        ctx.record.skip("latency", "us", reason, params={})
        return
    tuning = Tuning.of_device()
    for dim in (128, 64):
        best: Best = {}
        for phase, batch, n in (*(("decode", *cell) for cell in DECODES), *(("prefill", TOKENS // n, n) for n in QUERIES)):
            new = n if phase == "prefill" else 1
            q, view = common.make_view(
                [n] * batch, [new] * batch, heads=HEADS, kv_heads=KV_HEADS, head_dim=dim, page=16 if phase == "decode" else 0,
                dtype=ctx.dtype, device=ctx.device, seed=ctx.seed,
            )  # fmt: skip
            truth = common.last_request(q, view)
            for kind, tile in sweep(phase, tuning, dim, batch, n):
                ms = _one(ctx, kind, tile, tuning, q, view, truth)
                if ms is not None and ms < best.get((kind, batch, n), (float("inf"), {}))[0]:
                    best[kind, batch, n] = (ms, asdict(tile))
                    ctx.say(f"  {kind} {dim} {batch} x {n}: {asdict(tile)} {ms * 1e3:.1f} us")
        if best:
            common.write_table(ctx, "attention_tiles", entries(best, dim), {"head_dim": dim})
    common.insist(ctx)


def _one(ctx: Context, kind: str, tile: Any, tuning: Any, q: Any, view: Any, truth: Any) -> float | None:
    """Milliseconds of one tile, also written as a row; None where it has none."""
    from pdlab.bench import _attention as common

    params = {"kernel": kind, "head_dim": q.shape[2], "length": view.max_kv, "batch": len(view.host_lens), "dtype": ctx.dtype}
    params |= {f"tile_{name}": value for name, value in asdict(tile).items()}
    if ctx.left() <= 0:
        ctx.record.skip("latency", "us", "the time budget ran out", params=params)
        return None
    try:
        found = common.measure({"ours": call_of(tile, tuning)}, q, view, graph=True, rounds=1, budget_ms=20, truth=truth)
    except Exception as error:  # out of shared memory or registers: not a tile for this device
        ctx.record.skip("latency", "us", f"{type(error).__name__}: {error}"[:200], params=params)
        return None
    common.record_left_out(ctx, found.left_out, "latency", "us", params)
    for t in found.times.values():
        ctx.record.add("latency", t.scaled(1e3, "us"), params=params)
        return t.median
    return None


def entries(best: Best, head_dim: int) -> list[dict[str, Any]]:
    """Table entries of the fastest tiles, smallest work first; of two kernels for the same work only the faster one's."""
    made = []
    decode = ("decode", *DECODES[-1])
    for (kind, batch, length), (ms, sizes) in sorted((x for x in best.items() if x[0][0] == "decode_ring"), key=lambda x: x[0]):
        last = (batch, length) == DECODES[-1]
        if not last or ms <= best.get(decode, (float("inf"), {}))[0]:
            bounds = {} if last else {"max_batch": batch, "max_kv": length}
            made.append({"kind": kind, "head_dim": head_dim, **bounds, **sizes})
    if decode in best:
        made.append({"kind": "decode", "head_dim": head_dim, "max_rows": 16, **best[decode][1]})
    for (kind, batch, length), (ms, sizes) in sorted(best.items(), key=lambda x: (x[0][0], x[0][2])):
        if not kind.startswith("prefill"):
            continue
        bounds = {"max_queries": length} if length == min(QUERIES) else {}
        if kind == "prefill_hopper" and not bounds:
            bounds = {"min_queries": min(QUERIES) + 1}  # a shorter prompt must not fall through to here
        if kind == "prefill" or ms < best.get(("prefill", batch, length), (float("inf"), {}))[0]:
            made.append({"kind": kind, "head_dim": head_dim, **bounds, **sizes})
    return made


def call_of(tile: Any, tuning: Any, device: str = "cuda") -> Any:
    """attention(q, view) with this tile."""
    from pdlab.kernels.flash_decode import Workspace, flash_decode
    from pdlab.kernels.flash_prefill import flash_prefill

    if hasattr(tile, "blocks_per_sm"):
        programs = tile.blocks_per_sm * tuning.multiprocessors
        work = Workspace.create(device, programs=programs, rows=16, head_dim=256, segments=64 * 32)
        if hasattr(tile, "least"):
            from pdlab.kernels.flash_decode_ring import flash_decode_ring

            return lambda q, view: flash_decode_ring(q, view, work, tile, programs)
        return lambda q, view: flash_decode(q, view, work, tile, programs)
    if hasattr(tile, "consumers"):
        from pdlab.kernels.flash_prefill_hopper import flash_prefill_hopper

        return lambda q, view: flash_prefill_hopper(q, view, tile)
    return lambda q, view: flash_prefill(q, view, tile)
