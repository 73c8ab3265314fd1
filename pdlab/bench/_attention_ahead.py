"""What there is to compile for the attention suites, one kernel a job, for pdlab.bench.compile_ahead.

    python -m pdlab.bench.compile_ahead --what attention --processes 14 --seconds 45
    pdlab bench attention_tiles attention_prefill attention_decode attention_dispatch attention_stability --record --budget 50

The first pass over tiles that were never run here is also where one that hangs would show: each job says its name when it is
done, and a process that never ends can be stopped without losing a recording.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdlab.bench.attention_tiles import Work
    from pdlab.bench.suites import Context
    from pdlab.kernels.tuning import Tuning

RUNTIME = {"by_request", "share", "caches", "least", "blocks_per_sm"}  # settings of a tile that no kernel is compiled anew for


def compiled_for(kind: str, tile: Any) -> tuple[Any, ...]:
    """What of a tile decides which kernel it is."""
    sizes = {name: value for name, value in asdict(tile).items() if name not in RUNTIME or kind in ("decode", "prefill")}
    if "blocks" in sizes:
        sizes["blocks"] = bool(sizes["blocks"])
    return (kind, *sorted(sizes.items()))


def _tile(ctx: Context, work: Work, head_dim: int, page: int, tile: Any) -> None:
    from pdlab.bench import _attention as common
    from pdlab.bench import attention_tiles as suite
    from pdlab.kernels.tuning import Tuning

    new = 1 if work.phase == "decode" else work.length
    q, view = common.make_view(
        [work.length] * work.batch, [new] * work.batch, heads=suite.HEADS, kv_heads=suite.HEADS // work.group, page=page,
        head_dim=head_dim, dtype=ctx.dtype, device=ctx.device, seed=ctx.seed,
    )  # fmt: skip
    common.check("the tile", suite.call_of(tile, Tuning.of_device()), q, view)


def _chosen(ctx: Context, lens: list[int], queries: list[int], params: dict[str, Any], page: int) -> None:
    """What the table or the rule chooses for these requests; single queries also without dependent launch."""
    from pdlab.bench import _attention as common

    heads = {name: params[name] for name in ("heads", "kv_heads", "head_dim")}
    q, view = common.make_view(lens, queries, **heads, page=page, dtype=ctx.dtype, device=ctx.device, seed=ctx.seed)
    common.check("attention", common.backend("auto", q, view, len(lens)), q, view)
    if max(queries) == 1 and ctx.machine.is_gpu:
        common.check("attention alone", common.decode_alone(q, view, len(lens)), q, view)


def _hard(ctx: Context, dtype: str, tile: int) -> None:
    import torch

    from pdlab.bench.attention_stability import KEYS, kernels
    from pdlab.kernels.online_softmax import hard_cases

    case = hard_cases(getattr(torch, dtype), m=KEYS, seed=ctx.seed)["ordinary"]
    kernels(tile, {name: x.to(ctx.device) for name, x in case.items()}, ctx.device)


def jobs(tuning: Tuning) -> dict[str, Callable[[Context], None]]:
    """Jobs by name, the kernels that take longest to compile first."""
    from pdlab.bench import attention_decode, attention_dispatch, attention_prefill, attention_stability, attention_tiles
    from pdlab.kernels.addressing import padded_batch

    found: dict[str, Callable[[Context], None]] = {}
    seen = set()
    for first in ("prefill_hopper", "decode_ring", "prefill", "decode"):
        for dim in (128, 64):
            for work in attention_tiles.works(tuning.capability):
                for kind, tile in attention_tiles.sweep(work, tuning, dim):
                    for page in (
                        (16,) if work.phase == "decode" else (0, 16) if kind == "prefill_hopper" and dim == 128 else (0,)
                    ):
                        key = (dim, page, padded_batch(work.batch), compiled_for(kind, tile))
                        if kind == first and key not in seen:
                            seen.add(key)
                            found[f"{kind} {dim} page {page} {work.batch} x {work.length} {tile}"] = partial(
                                _tile, work=work, head_dim=dim, page=page, tile=tile
                            )
    for lens, p in attention_decode.cases(True):
        name = f"decode {p['heads']}/{p['kv_heads']} x {p['head_dim']} {len(lens)} x {max(lens)} page {p['page']}"
        found[name] = partial(_chosen, lens=lens, queries=[1] * len(lens), params=p, page=p["page"])
    for p in attention_prefill.cases("full"):
        lens = [p["seq_len"]] * p["batch"]
        name = f"prefill {p['heads']}/{p['kv_heads']} x {p['head_dim']} {len(lens)} x {max(lens)}"
        found[name] = partial(_chosen, lens=lens, queries=lens, params=p, page=0)
    for phase, n, batch in attention_dispatch._CELLS["full"]:
        for heads, kv_heads, dim in attention_dispatch._SHAPES["full"]:
            p = {"heads": heads, "kv_heads": kv_heads, "head_dim": dim}
            queries = [n if phase == "prefill" else 1] * batch
            found[f"dispatch {dim} {phase} {batch} x {n}"] = partial(
                _chosen, lens=[n] * batch, queries=queries, params=p, page=16
            )
    for dtype in ("float16", "bfloat16"):
        for tile in attention_stability.TILES:
            found[f"stability {dtype} {tile}"] = partial(_hard, dtype=dtype, tile=tile)
    return found
