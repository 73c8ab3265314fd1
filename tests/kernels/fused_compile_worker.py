"""Compiles (never runs) the fused kernels with the tiles that a device gets, and prints what each takes, as JSON.

    python fused_compile_worker.py '[["norm_qkv_rope", [9, 0], "llama-1b", 1], ...]'

A job is kernel, capability, catalogue model, and activation rows. Run in a process without TRITON_INTERPRET, under which
nothing would be compiled.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
from compile_worker import copies, resources
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pdlab.kernels.filtered_sample import (
    DECIDING,
    LOOKING,
    RESIDENT,
    filtered_sample_kernel,
    row_tops_kernel,
    sample_tile,
    search_tile,
)
from pdlab.kernels.filtered_search import filtered_search_kernel
from pdlab.kernels.norm_product import GELU, SWIGLU, norm_product_kernel
from pdlab.kernels.norm_qkv_rope import norm_qkv_rope_kernel
from pdlab.kernels.product_tiles import ProductTile, columns_of, product_tile, ring_rule
from pdlab.kernels.products import LAYER, PLAIN, RMS, constants
from pdlab.kernels.projection_sample import RANDOM, projection_sample_kernel
from pdlab.kernels.residual_product import residual_product_kernel
from pdlab.kernels.row_kernels import norm_rows_kernel, rope_rows_kernel, silu_product_kernel
from pdlab.kernels.tuning import Tuning
from pdlab.models.catalogue import config_of

POINTERS = dict.fromkeys(
    ("X", "NORM_W", "NORM_B", "W", "BIAS", "Q", "KC", "VC", "U", "OUT", "GU", "QKV", "Q_NORM", "K_NORM", "B", "Y", "LOGITS"),
    "*bf16",
)
POINTERS |= dict.fromkeys(("NEXT", "XD", "WD"), "*bf16")
POINTERS |= dict.fromkeys(("COS", "SIN", "PART", "TEMPERATURE", "TOP_P", "MIN_P"), "*fp32")
POINTERS |= dict.fromkeys(("POSITIONS", "SLOTS", "SEED", "POSITION", "BEST", "TOKENS"), "*i64")
POINTERS |= dict.fromkeys(("COUNT", "DONE", "FACTS", "TOP_K"), "*i32")


def job(kernel: str, c: Any, batch: int, tile_of: Any) -> tuple[Any, dict[str, Any], dict[str, str]]:
    """(the kernel, its compile-time arguments and options, pointer types that differ from POINTERS)."""
    norm = LAYER if c.family == "gpt2" else RMS
    columns = columns_of(batch)

    def product(op: str, outputs: int, k: int, kind: int) -> dict[str, Any]:
        tile: ProductTile = tile_of(op, outputs, k, batch)
        return constants(tile, columns, k, kind if batch == 1 else PLAIN)

    rope = c.family != "gpt2"
    shape = {"HEADS": c.num_heads, "KV_HEADS": c.num_kv_heads, "HALF": c.head_dim // 2, "PAGE": 16, "ROPE": rope}
    up = (1 if c.family == "gpt2" else 2) * c.ffn_size
    if kernel == "norm_qkv_rope":
        fixed = product(kernel, c.q_size + 2 * c.kv_size, c.hidden_size, norm) | shape | {"BIASED": c.qkv_bias}
        return norm_qkv_rope_kernel, fixed, {}
    if kernel in ("out_residual", "down_residual"):
        k = c.q_size if kernel == "out_residual" else c.ffn_size
        fixed = product(kernel, c.hidden_size, k, PLAIN) | {"OUTPUTS": c.hidden_size, "BIASED": c.out_bias}
        return residual_product_kernel, fixed, {}
    if kernel == "norm_mlp_up":
        more = {"WIDTH": c.ffn_size, "ACTIVATION": SWIGLU if rope else GELU, "BIASED": c.mlp_bias}
        return norm_product_kernel, product(kernel, up, c.hidden_size, norm) | more, {}
    if kernel == "projection_sample":
        fixed = product(kernel, c.vocab_size, c.hidden_size, norm) | {"VOCAB": c.vocab_size, "WANT": RANDOM}
        return projection_sample_kernel, fixed, {"OUT": "*i64"}
    if kernel == "norm_rows":
        fixed = {"K": c.hidden_size, "BLOCK": triton.next_power_of_2(c.hidden_size), "CENTRE": not rope, "PDL": False}
        return norm_rows_kernel, fixed | {"num_warps": 8}, {}
    if kernel == "rope_rows":
        half = triton.next_power_of_2(c.head_dim // 2)
        return rope_rows_kernel, shape | {"HALF_PAD": half, "BLOCK": 16, "NORMED": c.qk_norm, "PDL": False, "num_warps": 4}, {}
    if kernel == "silu_product":
        return silu_product_kernel, {"F": c.ffn_size, "BLOCK": 2048, "num_warps": 4}, {}
    return filter_job(kernel, c.vocab_size)


def filter_job(kernel: str, vocab: int) -> tuple[Any, dict[str, Any], dict[str, str]]:
    """As `job`, for the filters on float32 logits: without programmatic dependent launch, which all generations compile."""
    if kernel in ("row_tops", "filtered_sample"):
        types = {"LOGITS": "*fp32", "ROOM": "*i32", "OPEN": "*i32"}
        if kernel == "row_tops":
            return row_tops_kernel, sample_tile(vocab) | LOOKING, types
        return filtered_sample_kernel, sample_tile(vocab) | DECIDING, types
    tile, launch = search_tile(vocab, 0 if kernel == "filtered_search_alone" else 100 * RESIDENT)
    return filtered_search_kernel, {"VOCAB": vocab} | tile | launch, {"LOGITS": "*fp32", "ROOM": "*i64", "OPEN": "*i32"}


def wide_job(c: Any, batch: int) -> tuple[Any, dict[str, Any], dict[str, str]]:
    """As `job`, for the output projection of wide batches on Hopper."""
    from pdlab.kernels.projection_sample_hopper import STEP, projection_sample_hopper_kernel, stages_of

    columns = columns_of(batch)
    fixed = {
        "VOCAB": c.vocab_size,
        "WANT": RANDOM,
        "K": c.hidden_size,
        "BM": columns,
        "STEP": STEP,
        "HINT": True,
        "num_warps": 8,
    }
    return projection_sample_hopper_kernel, fixed | {"STAGES": stages_of(columns), "launch_pdl": True}, {"OUT": "*i64"}


def ring_job(kernel: str, c: Any) -> tuple[Any, dict[str, Any], dict[str, str]]:
    """As `job`, for the kernels of one row on Hopper."""
    from pdlab.kernels import ring_kernels as rings

    k = c.ffn_size if kernel == "ring_residual_product" else c.hidden_size
    tile = ring_rule(k)
    fixed: dict[str, Any] = {"K": k, "PANELS": tile.panels, "STAGES": tile.stages, "num_warps": rings.WARPS, "launch_pdl": True}
    fixed |= {"AHEAD": 2, "NEXT_SIZE": 1 << 24, "NEXT_APART": 1 << 23, "HINT": True}
    if kernel == "ring_norm_product":
        return rings.ring_norm_product_kernel, fixed | {"WIDTH": c.ffn_size, "GATED": True}, {}
    if kernel == "ring_residual_product":
        return rings.ring_residual_product_kernel, fixed | {"OUTPUTS": c.hidden_size}, {}
    if kernel == "ring_norm_qkv_rope":
        heads = {"HEADS": c.num_heads, "KV_HEADS": c.num_kv_heads, "HALF": c.head_dim // 2, "PAGE": 16}
        return rings.ring_norm_qkv_rope_kernel, fixed | heads, {}
    return rings.ring_project_kernel, fixed | {"VOCAB": c.vocab_size, "WANT": RANDOM}, {"OUT": "*i64"}


def compile_kernel(kernel: Any, fixed: dict[str, Any], types: dict[str, str], capability: tuple[int, int]) -> Any:
    options = {name: fixed[name] for name in ("num_warps", "launch_pdl", "maxnreg", "launch_cooperative_grid") if name in fixed}
    names = kernel.arg_names
    constant = {name: value for name, value in fixed.items() if name in names}
    kinds = POINTERS | types
    if fixed.get("TMA"):
        kinds |= dict.fromkeys(("XD", "UD"), f"tensordesc<bf16[{fixed['BM']}, {fixed['BK']}]>")
        kinds["WD"] = f"tensordesc<bf16[{fixed['ROWS']}, {fixed['BK']}]>"
    signature = {n: "constexpr" if n in constant else kinds.get(n, "fp32" if n == "eps" else "i32") for n in names}
    source_of = ASTSource
    if getattr(kernel, "is_gluon", lambda: False)():
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon._runtime import GluonASTSource

        source_of = GluonASTSource
        layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        signature["WD"] = f"tensordesc<bf16[64, 64],{layout!r}>"
        if "XD" in names:
            signature["WD"] = f"tensordesc<bf16[256, {fixed['STEP']}],{layout!r}>"
            signature["XD"] = f"tensordesc<bf16[{fixed['BM']}, {fixed['STEP']}],{layout!r}>"
    source = source_of(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(n),): value for n, value in constant.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n].startswith("*")},
    )
    return triton.compile(source, target=GPUTarget("cuda", 10 * capability[0] + capability[1], 32), options=options)


def compile_job(kernel: str, capability: tuple[int, int], model: str, batch: int) -> dict[str, Any]:
    tuning = Tuning("no-such-device", capability, 132, 50 << 20)
    if kernel.startswith("ring_"):
        parts = ring_job(kernel, config_of(model))
    elif kernel == "projection_sample_hopper":
        parts = wide_job(config_of(model), batch)
    else:
        parts = job(kernel, config_of(model), batch, lambda *facts: product_tile(tuning, *facts))
    built = compile_kernel(*parts, capability)
    answer = {"shared": built.metadata.shared, "warps": built.metadata.num_warps, "room": tuning.shared_bytes}
    return answer | resources(built.asm["cubin"]) | copies(built.asm["ptx"])


if __name__ == "__main__":
    for name, capability, model, batch in json.loads(sys.argv[1]):
        print(json.dumps(compile_job(name, tuple(capability), model, batch)), flush=True)
