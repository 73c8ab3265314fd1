"""The tile sizes of the attention kernels, swept: which is fastest depends on the architecture, the head size and the length.

One row a tile; the fastest right one of each kind and head size goes to tuning/<device>.json, where kernels.tuning finds it.
A GPU of capability 8.0 or above is needed: elsewhere the kernels are never chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdlab.bench.suites import Context
    from pdlab.kernels.tuning import DecodeTile, PrefillTile

NAME = "attention_tiles"
HELP = "sweep of the attention kernels' tile sizes; writes the device's tuning table"

QUERIES = (256, 4096)  # tokens a prompt: one length for the bandwidth-bound tiles, one for the compute-bound


def decode_tiles(shared_bytes: int, head_dim: int, pdl: bool) -> Iterator[DecodeTile]:
    from pdlab.kernels.tuning import DecodeTile

    for block_n in (32, 64, 128):
        for warps in (2, 4, 8):
            for stages in (2, 3, 4):
                for blocks in (1, 2, 3):
                    loads = 2 * (stages - 1) * block_n * head_dim * 2
                    if blocks * loads >= 48 << 10 and blocks * (loads + (10 << 10)) <= shared_bytes and blocks * warps <= 16:
                        yield DecodeTile(block_n, warps, stages, blocks, pdl)


def prefill_tiles(shared_bytes: int, head_dim: int) -> Iterator[PrefillTile]:
    from pdlab.kernels.tuning import PrefillTile

    for block_m, warps in ((64, 4), (128, 4), (128, 8)):
        for block_n in (32, 64, 128):
            for stages in (2, 3, 4):
                if (block_m + 2 * stages * block_n) * head_dim * 2 <= shared_bytes - (2 << 10):
                    yield PrefillTile(block_m, block_n, warps, stages)


def run(ctx: Context) -> None:
    from dataclasses import asdict

    from pdlab.bench import _attention as common
    from pdlab.kernels.dispatch import why_not
    from pdlab.kernels.tuning import Tuning

    if reason := why_not("triton", ctx.machine.capability) or (None if ctx.machine.is_gpu else "tiles are timed on a GPU"):
        ctx.record.skip("latency", "us", reason, params={})
        return
    tuning = Tuning.of_device()
    best: dict[tuple[str, int, int], tuple[float, dict[str, Any]]] = {}
    for dim in (128, 64):
        for kind, n, batch in (("decode", 4096, 32), *(("prefill", n, 16384 // n) for n in QUERIES)):
            new = n if kind == "prefill" else 1
            q, view = common.make_view(
                [n] * batch, [new] * batch, heads=32, kv_heads=8, head_dim=dim, page=16 if kind == "decode" else 0,
                dtype=ctx.dtype, device=ctx.device, seed=ctx.seed,
            )  # fmt: skip
            for tile in sweep(kind, tuning, dim):
                sizes = asdict(tile)
                params = {"kind": kind, "head_dim": dim, "length": n, "dtype": ctx.dtype, **sizes}
                if ctx.left() <= 0:
                    ctx.record.skip("latency", "us", "the time budget ran out", params=params)
                    continue
                try:
                    times = common.measure({"ours": call_of(tile, tuning)}, q, view, graph=True, rounds=1)
                except Exception as error:  # out of shared memory or registers: not a tile for this device
                    ctx.record.skip("latency", "us", f"{type(error).__name__}: {error}"[:200], params=params)
                    continue
                for t in times.values():
                    ctx.record.add("latency", t.scaled(1e3, "us"), params=params)
                    if t.median < best.get((kind, dim, n), (float("inf"), {}))[0]:
                        best[kind, dim, n] = (t.median, sizes)
            if (kind, dim, n) in best:
                ctx.say(f"  {kind} {dim} {n}: {best[kind, dim, n][1]} {best[kind, dim, n][0] * 1e3:.1f} us")
    made = [entry(kind, dim, n, sizes) for (kind, dim, n), (_, sizes) in sorted(best.items())]
    for dim in {e["head_dim"] for e in made}:
        common.write_table(ctx, "attention_tiles", [e for e in made if e["head_dim"] == dim], {"head_dim": dim})


def entry(kind: str, head_dim: int, length: int, sizes: dict[str, Any]) -> dict[str, Any]:
    """A table entry; only the shorter of the two prompt lengths bounds its own."""
    bounds = {"max_rows": 16} if kind == "decode" else ({"max_queries": length} if length == min(QUERIES) else {})
    return {"kind": kind, "head_dim": head_dim, **bounds, **sizes}


def sweep(kind: str, tuning: Any, head_dim: int) -> Iterator[Any]:
    if kind == "decode":
        return decode_tiles(tuning.shared_bytes, head_dim, tuning.capability >= (9, 0))
    return prefill_tiles(tuning.shared_bytes, head_dim)


def call_of(tile: Any, tuning: Any) -> Any:
    """attention(q, view) with this tile."""
    from pdlab.kernels.flash_decode import Workspace, flash_decode
    from pdlab.kernels.flash_prefill import flash_prefill

    if not hasattr(tile, "blocks_per_sm"):
        return partial(_swap(flash_prefill), tile)
    programs = tile.blocks_per_sm * tuning.multiprocessors
    work = Workspace.create("cuda", programs=programs, rows=16, head_dim=256, segments=64 * 32)
    return lambda q, view: flash_decode(q, view, work, tile, programs)


def _swap(kernel: Any) -> Any:
    return lambda tile, q, view: kernel(q, view, tile)
