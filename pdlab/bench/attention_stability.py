"""How far attention is from float64 on inputs that are numerically hard, with each care taken and with each left out.

`relative_error` over the finite outputs and `not_finite`, the percentage of outputs that are NaN or infinite, for each case of
kernels.online_softmax, dtype and tile. `careful` and `no_…` are the kernels' arithmetic tile by tile in PyTorch on this
device, with the care named missing; `ours_decode` and `ours_prefill` are the kernels themselves, on a GPU that runs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from pdlab.bench.records import Recorder
    from pdlab.bench.suites import Context
    from pdlab.kernels.kv_view import KVView

NAME = "attention_stability"
HELP = "errors of attention against float64 on hard inputs, by dtype, tile and missing care"

TILES = (16, 64, 128)
KEYS = 256


def cares() -> dict[str, Any]:
    from pdlab.kernels.online_softmax import Care

    missing = ("wide_scores", "subtract_max", "rescale", "guard_empty")
    return {"careful": Care()} | {f"no_{name}": Care(**{name: False}) for name in missing}


def errors(out: torch.Tensor, truth: torch.Tensor) -> tuple[float | None, float]:
    """(relative error of the finite outputs or None if there is none, percent that are not finite)."""
    import torch

    good = torch.isfinite(out)
    share = 100.0 * (1.0 - float(good.double().mean()))
    if not good.any():
        return None, share
    return float((out.double() - truth)[good].norm() / truth[good].norm().clamp_min(1e-300)), share


def one_head(case: dict[str, torch.Tensor], device: str, together: bool) -> tuple[torch.Tensor, KVView]:
    """The case's queries over its keys as q and a view: one prompt whose queries see all keys, or a request for each query."""
    from pdlab.bench import _attention as common

    n, m, dim = len(case["q"]), len(case["k"]), case["q"].shape[1]
    dtype = str(case["q"].dtype).removeprefix("torch.")
    lens, queries, copies = ([m], [n], 1) if together else ([m] * n, [1] * n, n)
    q, view = common.make_view(lens, queries, heads=1, kv_heads=1, head_dim=dim, page=0, dtype=dtype, device=device, seed=0)
    q.copy_(case["q"].unsqueeze(1))
    for cache, values in ((view.k, case["k"]), (view.v, case["v"])):
        cache.copy_(values.to(device).repeat(copies, 1).view(cache.shape))
    return q, view


def kernels(tile: int, case: dict[str, torch.Tensor], device: str) -> dict[str, torch.Tensor]:
    """What the kernels make of a case without a mask when they take `tile` keys at a time: [n, D] each, by variant."""
    from dataclasses import replace

    from pdlab.bench.attention_tiles import call_of
    from pdlab.kernels.flash_prefill import flash_prefill
    from pdlab.kernels.tuning import Tuning, decode_rule, prefill_rule

    tuning, dim = Tuning.of_device(), case["q"].shape[1]
    q, view = one_head(case, device, together=False)
    decode = replace(decode_rule(tuning.shared_bytes, dim, 1), block_n=tile, stages=2)
    found = {"ours_decode": call_of(decode, tuning)(q, view)[:, 0]}
    q, view = one_head(case, device, together=True)
    prefill = replace(prefill_rule(tuning.capability, dim, len(q)), block_n=tile, stages=2)
    return found | {"ours_prefill": flash_prefill(q, view, prefill, causal=False)[:, 0]}


def run(ctx: Context) -> None:
    import torch

    from pdlab.kernels.dispatch import why_not
    from pdlab.kernels.online_softmax import exact_attention, hard_cases, tiled_attention

    can_run = ctx.machine.is_gpu and why_not("triton", ctx.machine.capability) is None
    for dtype in ("float16", "bfloat16", "float32"):
        for name, drawn in hard_cases(getattr(torch, dtype), m=KEYS, seed=ctx.seed).items():
            case = {key: x.to(ctx.device) for key, x in drawn.items()}
            truth = exact_attention(**case)
            for tile in TILES:
                params = {"case": name, "dtype": dtype, "tile": tile}
                if ctx.left() <= 0:
                    ctx.record.skip("relative_error", "ratio", "the time budget ran out", variant="careful", params=params)
                    continue
                for variant, care in cares().items():
                    write(ctx.record, variant, tiled_attention(**case, tile=tile, care=care), truth, params)
                if can_run and "mask" not in case and dtype != "float32":
                    for variant, out in kernels(tile, case, ctx.device).items():
                        write(ctx.record, variant, out, truth, params)


def write(record: Recorder, variant: str, out: torch.Tensor, truth: torch.Tensor, params: dict[str, Any]) -> None:
    """The two rows of one output."""
    error, share = errors(out, truth)
    record.add("not_finite", share, "percent", variant=variant, params=params)
    if error is None:
        record.skip("relative_error", "ratio", "no output is finite", variant=variant, params=params)
    else:
        record.add("relative_error", error, "ratio", variant=variant, params=params)
