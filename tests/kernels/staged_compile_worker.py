"""Compiles staged_product's kernels for capability 9.0 without a GPU: a list of jobs in, a line of JSON for each out.

A process of its own, because TRITON_INTERPRET must not be set in it.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
from compile_worker import copies, resources
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from pdlab.kernels import staged_product
from pdlab.kernels.product_tiles import ProductTile

TYPES = dict.fromkeys(("W", "OUT", "X", "Q", "KC", "VC"), "*bf16") | dict.fromkeys(("PART", "COS", "SIN"), "*fp32")
TYPES |= {"POSITIONS": "*i64", "SLOTS": "*i64", "COUNT": "*i32", "batch": "i32"}


def compile_job(name: str, k: int, columns: int, tile: dict[str, Any], box: int, fixed: dict[str, Any]) -> dict[str, Any]:
    kernel, t = getattr(staged_product, name), ProductTile(k=64, ahead=0, pdl=True, tma=True, **tile)
    names = kernel.arg_names
    constant = {n: v for n, v in (fixed | staged_product.constants(t, k)).items() if n in names}
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    boxes = {"WD": box, "XD": columns}
    kinds = TYPES | {n: f"tensordesc<bf16[{rows}, 64],{layout!r}>" for n, rows in boxes.items()}
    signature = {n: "constexpr" if n in constant else kinds[n] for n in names}
    source = GluonASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(n),): value for n, value in constant.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n].startswith("*")},
    )
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": t.warps, "launch_pdl": True})
    return {"shared": built.metadata.shared, **resources(built.asm["cubin"]), **copies(built.asm["ptx"])}


if __name__ == "__main__":
    for job in json.loads(sys.argv[1]):
        print(json.dumps(compile_job(*job)), flush=True)
