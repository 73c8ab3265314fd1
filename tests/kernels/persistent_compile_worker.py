"""Compiles (never runs) the persistent decode kernel for catalogue models, and prints what each takes, as JSON.

    python persistent_compile_worker.py '[["llama-1b", true, {}], ...]'      true: pages, false: extents; fields of StackTile

"group of 8, 64" and "group of 8, 128" are models of that many query heads for each of 8 KV heads, of that size.
`ahead` is what touches global memory before griddepcontrol.wait, but for the copies of weights.

Run in a process without TRITON_INTERPRET, under which nothing would be compiled.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from types import SimpleNamespace
from typing import Any

from compile_worker import POINTERS, TOOLS, ahead_of_time, copies, resources
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
GROUPS_OF_8 = {
    f"group of 8, {dim}": SimpleNamespace(hidden_size=64 * dim, ffn_size=14336, num_heads=64, num_kv_heads=8, head_dim=dim)
    for dim in (64, 128)
}


def ahead(ptx: str, cubin: bytes) -> list[str]:
    """What touches global memory before griddepcontrol.wait, in the order of the text, as the compilers leave it: copies by the
    copy engine bring weights. Nothing moves accesses across the wait unless a compiler takes it for an ordinary instruction."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        disassemble = [str(TOOLS / "nvdisasm"), "-c", file.name]
        sass = subprocess.run(disassemble, capture_output=True, text=True, check=True).stdout
    before, wait, _ = ptx.partition("griddepcontrol.wait")
    sass_before, sass_wait, _ = sass.partition("ACQBULK")
    if not wait or not sass_wait:
        return ["no wait"]
    found = re.findall(r"\b(?:ld|st|atom|red|prefetch)\b[.\w]*\.global\S*", before)
    return found + re.findall(r"\b(?:LDG|STG|LD|ST|ATOM|ATOMG|RED|REDG|CCTL)\b[.\w]*", sass_before)


def compile_for(model: str, paged: bool, tile: dict[str, Any]) -> dict[str, Any]:
    c = GROUPS_OF_8.get(model) or config_of(model)
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    fixed = kernel_constants(StackTile(**tile), c.hidden_size, c.ffn_size, c.num_heads, c.num_kv_heads, c.head_dim, 16)
    fixed = fixed | {"PAGED": paged, "PAGE": 16 if paged else 1}
    types = {name: f"tensordesc<bf16{[64, 64]},{layout!r}>" for name in WEIGHTS}
    types |= dict.fromkeys(BF16, "*bf16") | dict.fromkeys(FP32, "*fp32") | dict.fromkeys(FLOATS, "fp32")
    types |= dict.fromkeys(INT64, "*i64") | dict.fromkeys(INT32, "*i32") | {"kv_stride": "i64"}
    how = {"launch_pdl": True} if fixed["PDL"] else {"launch_cooperative_grid": True}
    built = ahead_of_time(persistent_decode_kernel, GluonASTSource, fixed, types, (9, 0), 4, **how)
    ptx = built.asm["ptx"]
    return (
        {
            "shared": built.metadata.shared,
            "acquires": ptx.count("ld.acquire.gpu.global"),
            "words": ptx.count("ld.relaxed.gpu.global.v2.b64"),
            "ahead": ahead(ptx, built.asm["cubin"]),
        }
        | resources(built.asm["cubin"])
        | copies(ptx)
    )


if __name__ == "__main__":
    for model, paged, tile in json.loads(sys.argv[1]):
        print(json.dumps(compile_for(model, paged, tile)), flush=True)
