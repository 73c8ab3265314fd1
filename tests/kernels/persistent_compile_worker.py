"""Compiles (never runs) the persistent decode kernel for catalogue models, and prints what each takes, as JSON.

    python persistent_compile_worker.py '["llama-1b", ...]'

Run in a process without TRITON_INTERPRET, under which nothing would be compiled.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
from compile_worker import resources
from fused_compile_worker import POINTERS
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pdlab.kernels.persistent_decode import StackTile, kernel_constants, most_parts, persistent_decode_kernel
from pdlab.models.catalogue import config_of

PROGRAMS = 132
TYPES = POINTERS | dict.fromkeys(("OUT_X", "ATTN"), "*bf16") | dict.fromkeys(("OFFSETS", "BASE"), "*i64")
TYPES |= dict.fromkeys(("TABLE", "LENGTHS", "FAILED"), "*i32") | dict.fromkeys(("PART_O", "PART_M", "PART_L"), "*fp32")
TYPES |= dict.fromkeys(("eps_attn", "eps_mlp", "scale_log2"), "fp32")


def compile_for(model: str, paged: bool) -> dict[str, Any]:
    c, tile = config_of(model), StackTile()
    shape = (c.hidden_size, c.ffn_size, c.num_heads, c.num_kv_heads, c.head_dim)
    parts = most_parts(PROGRAMS, *shape[2:])
    fixed = kernel_constants(tile, *shape, parts) | {"PAGED": paged, "PAGE": 16 if paged else 1}
    names = persistent_decode_kernel.arg_names
    signature = {n: "constexpr" if n in fixed else TYPES.get(n, "i32") for n in names}
    aligned = [i for i, n in enumerate(names) if signature[n].startswith("*") or n == "kv_stride"]
    source = ASTSource(
        fn=persistent_decode_kernel,
        signature=signature,
        constexprs={(names.index(n),): value for n, value in fixed.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    options = {"num_warps": tile.warps, "launch_cooperative_grid": True}
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = built.asm["ptx"]
    return {
        "shared": built.metadata.shared,
        "wide copies": ptx.count("cp.async.cg.shared.global"),
        "acquires": ptx.count("global.gpu.acquire"),
        "prefetches": ptx.count("prefetch.global.L2"),
    } | resources(built.asm["cubin"])


if __name__ == "__main__":
    for model, paged in json.loads(sys.argv[1]):
        print(json.dumps(compile_for(model, paged)), flush=True)
