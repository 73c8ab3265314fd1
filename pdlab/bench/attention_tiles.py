"""The tile sizes of the attention kernels, swept: which is fastest depends on the architecture, the head size and the length.

One row a tile, its sizes as parameters named tile_…; the fastest right one of each kind and head size goes to
tuning/<device>.json, where kernels.tuning finds it. A GPU of capability 8.0 or above is needed: elsewhere the kernels are
never chosen. Most of the time goes into compiling (a few seconds a tile); what the budget does not reach is marked as skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdlab.bench.suites import Context
    from pdlab.kernels.tuning import DecodeRing, DecodeTile, HopperTile, PrefillTile, Tuning

NAME = "attention_tiles"
HELP = "sweep of the attention kernels' tile sizes; writes the device's tuning table"

QUERIES = (256, 4096)  # tokens a prompt, for the plain kernel: one length bound by bandwidth, one by compute
HOPPER_QUERIES = (256, 512, 1024, 2048, 4096, 8192, 16384)  # the same, for the warp-specialized kernels
MORE_CACHE = 4096  # tokens a prompt, from which on tiles are also timed with more heads running together
DECODES = ((1, 4096), (1, 65536), (8, 4096), (32, 4096))  # requests, tokens a request; the last stands for all larger ones
GROUPS = (4, 1)  # query heads of a KV head; what holds for 1 is taken for groups that were not measured
HEADS, TOKENS = 32, 16384  # query heads; tokens of all prompts together


@dataclass(frozen=True)
class Work:
    """What tiles are compared on: so many requests of so many tokens, `group` query heads a KV head."""

    phase: str  # decode | prefill
    batch: int
    length: int
    group: int


def works(capability: tuple[int, int]) -> list[Work]:
    """Every kind of work that has an entry of its own in the table."""
    made = [Work("decode", batch, length, GROUPS[0]) for batch, length in DECODES]
    lengths = HOPPER_QUERIES if capability == (9, 0) else QUERIES
    return made + [Work("prefill", TOKENS // n, n, group) for group in GROUPS for n in lengths]


def decode_tiles(shared_bytes: int, head_dim: int, pdl: bool) -> Iterator[DecodeTile]:
    """Each size and number of blocks with as many tiles on their way as fit; registers allow eight warps altogether."""
    from pdlab.kernels.tuning import DecodeTile

    for block_n in (32, 64, 128):
        for warps, blocks in ((2, 4), (4, 2), (8, 1)):
            stages = min(5, (shared_bytes // blocks - (10 << 10)) // (2 * block_n * head_dim * 2) + 1)
            if stages >= 2 and block_n <= 32 * warps:
                yield DecodeTile(block_n, warps, stages, blocks, pdl)


def ring_tiles(shared_bytes: int, head_dim: int, pdl: bool, small: bool = True) -> Iterator[DecodeRing]:
    """What can win: one or two resident blocks for small work, where it matters how little a program may get (`least`), as many
    as fit of two and three for more, with as many tiles in the ring as fit. None for head sizes that the kernel has not.

    A single block gets two tiles only: under dependent launch the rest of its multiprocessor is for the kernels around it.
    """
    from pdlab.kernels.tuning import DecodeRing

    def stages(blocks: int) -> int:
        return min(2 if blocks == 1 else 6, (shared_bytes // blocks - 64 * head_dim - (1 << 10)) // (256 * head_dim))

    fitting = [blocks for blocks in (1, 2, 3) if head_dim in (64, 128) and stages(blocks) >= 2]
    for blocks in fitting[:2] if small else fitting[-2:]:
        for least in (2, 4, 8) if small else (4,):
            yield DecodeRing(4, stages(blocks), blocks, least, pdl)


def prefill_tiles(shared_bytes: int, head_dim: int, depths: tuple[int, ...] = (2, 3)) -> Iterator[PrefillTile]:
    """Squares from 32 x 16 to 128 x 128, each with these many tiles of keys on the chip."""
    from pdlab.kernels.tuning import PrefillTile

    for block_m, warps in ((32, 4), (64, 4), (128, 8)):
        for block_n in (16, 32, 64, 128):
            for stages in depths:
                tile = PrefillTile(block_m, block_n, warps, stages)
                if tile.shared_bytes(head_dim) <= shared_bytes - (2 << 10):
                    yield tile


def hopper_tiles(head_dim: int, length: int, group: int) -> Iterator[HopperTile]:
    """Consumers that take turns over tiles of 128 keys, and for short prompts independent ones whose items' K and V stay in the
    ring. Packing heads, or sharing an item among them, is for groups."""
    from pdlab.kernels.tuning import HopperTile

    pairs = HopperTile(2, 128, 2 if head_dim == 128 else 4)
    if length <= HOPPER_QUERIES[0]:
        alone = (
            HopperTile(2, 64, 4, turns=0, blocks=4, places=3) if head_dim == 128 else HopperTile(3, 64, 9, turns=0, blocks=4)
        )
        yield from (replace(alone, share=share) for share in ((4, 2) if group > 1 else (1,)))
        return
    if head_dim == 64 and length <= HOPPER_QUERIES[1]:
        yield HopperTile(3, 64, 9, turns=0, blocks=8)
        return
    yield pairs
    if head_dim == 128 and length <= HOPPER_QUERIES[3]:
        yield replace(pairs, by_request=4096)
    if group > 1 and (head_dim == 64 or length > HOPPER_QUERIES[3]):
        yield replace(pairs, pack=4)
    if head_dim == 128 and length > HOPPER_QUERIES[3]:
        yield replace(pairs, overlap=1)
    if head_dim == 64 and length > HOPPER_QUERIES[2]:
        packed = replace(pairs, pack=4 if group > 1 else 1)
        yield replace(packed, overlap=1)
        yield from (replace(packed, consumers=3, overlap=overlap) for overlap in (0, 1))


def with_more_cache(work: Work, best: HopperTile, tuning: Tuning, head_dim: int) -> list[HopperTile]:
    """What is timed once the best tile of some work is known: the same with K and V of the heads that run together in twice the
    cache. For long prompts, and only where more heads than before would then run together."""
    from pdlab.kernels.flash_prefill_hopper import heads_at_once, heads_that_fit

    if best.blocks or work.length < MORE_CACHE:
        return []
    one, two = (
        heads_at_once(HEADS // work.group, heads_that_fit(tuning.l2_bytes // 2, caches, work.batch * work.length, head_dim))
        for caches in (1, 2)
    )
    return [replace(best, caches=2)] if two > one else []


def sweep(work: Work, tuning: Any, head_dim: int) -> Iterator[tuple[str, Any]]:
    """(kind of table entry, tile) of everything worth timing for some work."""
    if work.phase == "decode":
        pdl, small = tuning.capability >= (9, 0), work.batch * work.length <= 8192
        yield from (("decode_ring", tile) for tile in ring_tiles(tuning.shared_bytes, head_dim, pdl, small))
        if (work.batch, work.length) == DECODES[-1]:
            yield from (("decode", tile) for tile in decode_tiles(tuning.shared_bytes, head_dim, pdl))
        return
    hopper = tuning.capability == (9, 0)
    if work.length in QUERIES and work.group == GROUPS[0] and not (hopper and head_dim == 64):
        depths = (2,) if hopper else (2, 3)  # on Hopper the plain kernel is only what the others are compared with
        yield from (("prefill", tile) for tile in prefill_tiles(tuning.shared_bytes, head_dim, depths))
    if hopper:
        yield from (("prefill_hopper", tile) for tile in hopper_tiles(head_dim, work.length, work.group))


Best = dict[tuple[str, Work], tuple[float, dict[str, Any]]]  # (kind, work) -> milliseconds, sizes


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
        for work in works(tuning.capability):
            _work(ctx, work, tuning, dim, best)
        if best:
            common.write_table(ctx, "attention_tiles", entries(best, dim), {"head_dim": dim})
    common.insist(ctx)


def _work(ctx: Context, work: Work, tuning: Any, head_dim: int, best: Best) -> None:
    """Times every tile of some work and notes the fastest of each kind."""
    from pdlab.bench import _attention as common
    from pdlab.kernels.tuning import HopperTile

    n, batch, decodes = work.length, work.batch, work.phase == "decode"
    q, view = common.make_view(
        [n] * batch, [1 if decodes else n] * batch, heads=HEADS, kv_heads=HEADS // work.group, head_dim=head_dim,
        page=16 if decodes else 0, dtype=ctx.dtype, device=ctx.device, seed=ctx.seed,
    )  # fmt: skip
    truth = common.last_request(q, view)

    def compete(kind: str, tile: Any) -> None:
        ms = _one(ctx, kind, tile, tuning, q, view, truth)
        if ms is not None and ms < best.get((kind, work), (float("inf"), {}))[0]:
            best[kind, work] = (ms, asdict(tile))
            ctx.say(f"  {kind} {head_dim} {batch} x {n}, group {work.group}: {asdict(tile)} {ms * 1e3:.1f} us")

    for kind, tile in sweep(work, tuning, head_dim):
        compete(kind, tile)
    if ("prefill_hopper", work) in best:
        for tile in with_more_cache(work, HopperTile(**best["prefill_hopper", work][1]), tuning, head_dim):
            compete("prefill_hopper", tile)


def _one(ctx: Context, kind: str, tile: Any, tuning: Any, q: Any, view: Any, truth: Any) -> float | None:
    """Milliseconds of one tile, also written as a row; None where it has none."""
    from pdlab.bench import _attention as common

    params = {"kernel": kind, "head_dim": q.shape[2], "length": view.max_kv, "batch": len(view.host_lens), "dtype": ctx.dtype}
    params |= {"heads": q.shape[1], "kv_heads": view.k.shape[1]}
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
    none: tuple[float, dict[str, Any]] = (float("inf"), {})
    made = []
    last = Work("decode", *DECODES[-1], GROUPS[0])
    for batch, length in DECODES:
        work = Work("decode", batch, length, GROUPS[0])
        ms, sizes = best.get(("decode_ring", work), none)
        if sizes and (work != last or ms <= best.get(("decode", last), none)[0]):
            bounds = {} if work == last else {"max_batch": batch, "max_kv": length}
            made.append({"kind": "decode_ring", "head_dim": head_dim, **bounds, **sizes})
    if ("decode", last) in best:
        made.append({"kind": "decode", "head_dim": head_dim, "max_rows": 16, **best["decode", last][1]})
    for kind, group in (("prefill", GROUPS[0]), *(("prefill_hopper", group) for group in GROUPS)):
        known = {work.length: found for (k, work), found in best.items() if k == kind and work.group == group}
        shortest = 0
        for length in sorted(known):
            ms, sizes = known[length]
            bounds = {"max_queries": length} if length != max(known) else {}
            if kind == "prefill_hopper":
                bounds |= {"min_queries": shortest + 1} | ({"group": group} if group > 1 else {})
            shortest = length
            plain = best.get(("prefill", Work("prefill", TOKENS // length, length, group)), none)[0]
            if kind == "prefill_hopper" and plain <= ms:
                sizes = {"consumers": 0, "block_n": 0, "stages": 0}  # says that there is none, which other entries may not
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

        return lambda q, view: flash_prefill_hopper(q, view, tile, l2_bytes=tuning.l2_bytes // 2)
    return lambda q, view: flash_prefill(q, view, tile)
