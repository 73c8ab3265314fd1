"""Compiles (never runs) the persistent decode kernel for catalogue models, and prints what each takes, as JSON.

    python persistent_compile_worker.py '[["llama-1b", true, {}], ...]'      true: pages, false: extents; fields of StackTile

Run in a process without TRITON_INTERPRET, under which nothing would be compiled.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from compile_worker import POINTERS, ahead_of_time, copies, resources
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout

from pdlab.kernels.decode_stack import StackTile, kernel_constants
from pdlab.kernels.persistent_decode import persistent_decode_kernel
from pdlab.models.catalogue import config_of

FLOATS = ("eps_attn", "eps_mlp", "scale_log2")
WEIGHTS = ("QKV", "OUT", "UP", "DOWN")
BF16 = ("X", "OUT_X", "ATTN_NORM", "MLP_NORM", "KC", "VC", "U")
FP32 = ("COS", "SIN")
INT64 = ("POSITIONS", "SLOTS", "BASE", "WORDS", "TRACE")
INT32 = ("LENGTHS", "TABLE", "EPOCH", "COUNT", "FAILED")
POINTERS.update(dict.fromkeys((*BF16, *FP32, *INT64, *INT32, "kv_stride"), ""))  # all of them multiples of 16 bytes or elements


def compile_for(model: str, paged: bool, tile: dict[str, Any]) -> dict[str, Any]:
    c = config_of(model)
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    fixed = kernel_constants(StackTile(**tile), c.hidden_size, c.ffn_size, c.num_heads, c.num_kv_heads, c.head_dim, 16)
    fixed = fixed | {"PAGED": paged, "PAGE": 16 if paged else 1}
    types = {name: f"tensordesc<bf16{[64, 64]},{layout!r}>" for name in WEIGHTS}
    types |= dict.fromkeys(BF16, "*bf16") | dict.fromkeys(FP32, "*fp32") | dict.fromkeys(FLOATS, "fp32")
    types |= dict.fromkeys(INT64, "*i64") | dict.fromkeys(INT32, "*i32") | {"kv_stride": "i64"}
    built = ahead_of_time(persistent_decode_kernel, GluonASTSource, fixed, types, (9, 0), 4, launch_cooperative_grid=True)
    ptx = built.asm["ptx"]
    return (
        {
            "shared": built.metadata.shared,
            "acquires": ptx.count("ld.acquire.gpu.global"),
            "words": ptx.count("ld.relaxed.gpu.global.v2.b64"),
        }
        | resources(built.asm["cubin"])
        | copies(ptx)
    )


if __name__ == "__main__":
    for model, paged, tile in json.loads(sys.argv[1]):
        print(json.dumps(compile_for(model, paged, tile)), flush=True)
