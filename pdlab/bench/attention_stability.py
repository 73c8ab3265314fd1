"""How far attention is from float64 on inputs that are numerically hard, with each care taken and with each left out.

`relative_error` over the finite outputs and `not_finite`, the percentage of outputs that are NaN or infinite, for each
case of kernels.online_softmax, dtype and tile; the variants are the care that is missing, and on a GPU the kernel itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from pdlab.bench.suites import Context

NAME = "attention_stability"
HELP = "errors of attention against float64 on hard inputs, by dtype, tile and missing care"

TILES = (16, 64)
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


def _kernel(case: dict[str, torch.Tensor], device: str) -> torch.Tensor:
    """The decode kernel on one head: every query row a request of its own over the same keys."""

    from pdlab.bench import _attention as common

    n, m, dim = len(case["q"]), len(case["k"]), case["q"].shape[1]
    dtype = str(case["q"].dtype).removeprefix("torch.")
    q, view = common.make_view([m] * n, [1] * n, heads=1, kv_heads=1, head_dim=dim, page=0, dtype=dtype, device=device, seed=0)
    q.copy_(case["q"].unsqueeze(1))
    for cache, values in ((view.k, case["k"]), (view.v, case["v"])):
        cache.copy_(values.to(device).repeat(n, 1).view(cache.shape))
    out: torch.Tensor = common.backend("triton", q, view, n)(q, view)
    return out[:, 0].cpu()


def run(ctx: Context) -> None:
    import torch

    from pdlab.kernels.online_softmax import exact_attention, hard_cases, tiled_attention

    tensor_cores = ctx.machine.is_gpu and (ctx.machine.capability or (0, 0)) >= (8, 0)
    for dtype in ("float16", "bfloat16", "float32"):
        for name, case in hard_cases(getattr(torch, dtype), m=KEYS, seed=ctx.seed).items():
            truth = exact_attention(**case)
            for tile in TILES:
                for variant, care in cares().items():
                    out = tiled_attention(**case, tile=tile, care=care)
                    _record(ctx, variant, out, truth, case=name, dtype=dtype, tile=tile)
            if tensor_cores and "mask" not in case and dtype != "float32":
                _record(ctx, "ours", _kernel(case, ctx.device), truth, case=name, dtype=dtype, tile=0)


def _record(ctx: Context, variant: str, out: torch.Tensor, truth: torch.Tensor, **params: Any) -> None:
    error, share = errors(out, truth)
    ctx.record.add("not_finite", share, "percent", variant=variant, params=params)
    if error is None:
        ctx.record.skip("relative_error", "ratio", "no output is finite", variant=variant, params=params)
    else:
        ctx.record.add("relative_error", error, "ratio", variant=variant, params=params)
