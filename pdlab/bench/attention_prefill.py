"""Causal prefill attention: this project's kernel beside cuDNN, FA2, FA3 and plain attention (the n x n matrix), same run.

FLOPs: 4 * head size * heads * n (n + 1) / 2 a prompt; bytes: q, k, v and o once. `floor_throughput` is what the larger of
both floors allows, with the ceilings measured in the same run, and `share_of_floor` how much of it was reached. The article's
three lengths and those around its crossover at 512 tokens are among the cases, these also with one prompt at a time, where
plain attention has the best of chances; there `eager_latency` is a call launched by itself, as a program without graphs does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdlab.bench.suites import Context

NAME = "attention_prefill"
HELP = "causal prefill attention by length: throughput against cuDNN, FA2, FA3 and plain attention"

LENGTHS = {"full": (256, 512, 1024, 2048, 4096, 8192, 16384), "smoke": (32, 64, 128, 256)}
SHORT = {"full": (64, 128, 384), "smoke": ()}  # tokens a prompt, for the first shape only
TOKENS = {"full": 16384, "smoke": 256}
SHAPES = {"full": ((32, 32, 128), (32, 8, 128), (32, 32, 64), (32, 8, 64)), "smoke": ((6, 2, 64),)}
ALONE = {"full": (64, 128, 256, 384, 512, 1024, 2048), "smoke": (64,)}  # tokens of a prompt that runs by itself
_PLAIN_UP_TO = 2048  # beyond, the n x n matrices take more of the budget than they tell


def cases(profile: str) -> list[dict[str, Any]]:
    """Parameters of each case: the first shape, also with short and single prompts, then the others."""
    first, *others = SHAPES[profile]
    made = [(first, n, max(1, TOKENS[profile] // n)) for n in (*LENGTHS[profile], *SHORT[profile])]
    made += [(first, n, 1) for n in ALONE[profile]]
    made += [(shape, n, max(1, TOKENS[profile] // n)) for shape in others for n in LENGTHS[profile]]
    return [
        {"heads": h, "kv_heads": k, "head_dim": d, "seq_len": n, "batch": batch, "causal": True}
        for (h, k, d), n, batch in dict.fromkeys(made)
    ]


def flops_and_bytes(params: dict[str, Any], itemsize: int) -> tuple[float, float]:
    """Of one call."""
    n, pairs = params["seq_len"], params["batch"] * params["seq_len"] * (params["seq_len"] + 1) / 2
    moved = 2 * itemsize * params["head_dim"] * (params["heads"] + params["kv_heads"]) * params["batch"] * n
    return 4 * params["head_dim"] * params["heads"] * pairs, moved


def run(ctx: Context) -> None:
    from pdlab.bench import _attention as common
    from pdlab.bench import _attention_rivals as rivals

    top = common.record_ceilings(ctx)
    missing = rivals.prefill()[1] if ctx.machine.is_gpu else {}
    common.record_left_out(ctx, missing, "throughput", "TFLOP/s", {"dtype": ctx.dtype})
    for params in cases(ctx.profile):
        params |= {"dtype": ctx.dtype}
        if ctx.left() <= 0:
            ctx.record.skip("throughput", "TFLOP/s", "the time budget ran out", params=params)
            continue
        measure_case(ctx, params, top)
    common.insist(ctx)


def measure_case(ctx: Context, params: dict[str, Any], top: Any, *, eager: bool = True, turn_ms: float = 40) -> None:
    """Measures one case in turns of `turn_ms`; `top`: the ceilings of this run; `eager`: also single prompts by themselves."""
    from pdlab.bench import _attention as common
    from pdlab.bench import _attention_rivals as rivals

    n, batch = params["seq_len"], params["batch"]
    q, view = common.make_view(
        [n] * batch, [n] * batch, heads=params["heads"], kv_heads=params["kv_heads"], head_dim=params["head_dim"], page=0,
        dtype=ctx.dtype, device=ctx.device, seed=ctx.seed,
    )  # fmt: skip
    if ctx.machine.is_gpu:
        names: tuple[str, ...] = ("cudnn", "fa2")
        if n <= _PLAIN_UP_TO:
            names += ("article", "torch_math") if params["kv_heads"] == params["heads"] else ("article",)
        calls = {"ours": common.backend("auto", q, view, batch)} | rivals.prefill(names)[0]
    else:
        calls = {"article": rivals.plain} | {name: common.backend(name, q, view, batch) for name in ("plain", "sdpa")}
    flops, moved = flops_and_bytes(params, q.element_size())
    floor_s = max(flops / top.matmul_flops_per_s, moved / top.read_bytes_per_s)
    ctx.record.add("floor_throughput", flops / floor_s / 1e12, "TFLOP/s", kind="predicted", params=params)
    found = common.measure(calls, q, view, graph=True, budget_ms=turn_ms)
    common.record_left_out(ctx, found.left_out, "throughput", "TFLOP/s", params)
    for name, t in found.times.items():
        ctx.record.add("throughput", t.rate(flops / 1e9, "TFLOP/s"), variant=name, params=params)
        ctx.record.add("latency", t, variant=name, params=params)
        ctx.record.add("share_of_floor", t.rate(100e3 * floor_s, "percent"), variant=name, params=params)
    heads = f"{params['heads']}/{params['kv_heads']} x {params['head_dim']}"
    rates = ", ".join(f"{name} {flops / t.median / 1e9:.4g}" for name, t in found.times.items())
    ctx.say(f"  {heads}, {batch} x {n} tokens, TFLOP/s: {rates}")
    if eager and batch == 1 and n in ALONE[ctx.profile]:
        alone = common.measure({name: calls[name] for name in found.times}, q, view, graph=False, budget_ms=20)
        common.record_left_out(ctx, alone.left_out, "eager_latency", "ms", params)
        for name, t in alone.times.items():
            ctx.record.add("eager_latency", t, variant=name, params=params)
