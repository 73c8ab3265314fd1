"""Causal prefill attention: this project's kernel beside cuDNN, FA2 and plain attention (the n x n matrix), same run.

FLOPs: 4 * head size * heads * n (n + 1) / 2 a prompt; bytes: q, k, v and o once. `floor_throughput` is what the larger of
both floors allows, with the ceilings measured in the same run. The article's three lengths and those around its crossover at
512 tokens are among the cases.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdlab.bench.suites import Context

NAME = "attention_prefill"
HELP = "causal prefill attention by length: throughput against cuDNN, FA2 and plain attention"

LENGTHS = {"full": (64, 128, 256, 384, 512, 1024, 2048, 4096, 8192, 16384), "smoke": (32, 64, 128, 256)}
TOKENS = {"full": 16384, "smoke": 256}
_PLAIN_UP_TO = 4096  # the matrix of scores of a longer prompt does not fit


def run(ctx: Context) -> None:
    from pdlab.bench import _attention as common
    from pdlab.bench import ceilings

    top = ceilings.measure(ctx.device, ctx.dtype)
    shapes = [(32, 32, 128), (32, 8, 128), (32, 32, 64), (32, 8, 64)] if ctx.full else [(6, 2, 64)]
    for (heads, kv_heads, dim), n in [(shape, n) for shape in shapes for n in LENGTHS[ctx.profile]]:
        batch = max(1, TOKENS[ctx.profile] // n)
        params: dict[str, Any] = {
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": dim,
            "seq_len": n,
            "batch": batch,
            "causal": True,
        }
        params |= {"dtype": ctx.dtype}
        if ctx.left() <= 0:
            ctx.record.skip("throughput", "TFLOP/s", "the time budget ran out", params=params)
            continue
        q, view = common.make_view(
            [n] * batch, [n] * batch, heads=heads, kv_heads=kv_heads, head_dim=dim, page=0, dtype=ctx.dtype, device=ctx.device,
            seed=ctx.seed,
        )  # fmt: skip
        if ctx.machine.is_gpu:
            kernels = ("cudnn", "flash", "math") if n <= _PLAIN_UP_TO else ("cudnn", "flash")
            calls = {"ours": common.backend("auto", q, view, batch)} | common.prefill_rivals(kernels)
        else:
            calls = {name: common.backend(name, q, view, batch) for name in ("plain", "sdpa")}
        flops = 4 * dim * heads * batch * n * (n + 1) / 2
        nbytes = 2 * q.element_size() * dim * (heads + kv_heads) * batch * n
        floor = max(flops / top.matmul_flops_per_s, nbytes / top.read_bytes_per_s)
        ctx.record.add("floor_throughput", flops / floor / 1e12, "TFLOP/s", kind="predicted", params=params)
        for name, t in common.measure(calls, q, view, graph=True).items():
            ctx.record.add("throughput", t.rate(flops / 1e9, "TFLOP/s"), variant=name, params=params)
            ctx.record.add("latency", t, variant=name, params=params)
            ctx.say(f"  {heads}/{kv_heads} x {dim}, {n} tokens, {name}: {flops / t.median / 1e9:.4g} TFLOP/s")
