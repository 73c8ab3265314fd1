"""Compiles (never runs) the warp-specialized prefill kernels for compute capability 9.0, and prints what each takes, as JSON.

    python prefill_compile_worker.py '[[{"consumers": 2, "block_n": 128, ...}, 128, 16], ...]'

A job is a HopperTile's fields, the head size and the page size (0: extents). Run in a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from compile_worker import ahead_of_time, resources
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout

from pdlab.kernels.flash_prefill_tasks import flash_prefill_tasks_kernel
from pdlab.kernels.flash_prefill_turns import flash_prefill_turns_kernel
from pdlab.kernels.tuning import HopperTile


def compile_job(tile: HopperTile, head: int, page: int) -> dict[str, Any]:
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    box = [min(page, tile.block_n), 64] if page else [tile.block_n, head]
    rows = [64, head] if tile.pack == 1 else [64 // tile.pack, 64]
    shapes = {"qd": rows, "kd": box, "vd": box, "od": rows}
    types = {name: f"tensordesc<bf16{shape},{layout!r}>" for name, shape in shapes.items()}
    types |= dict.fromkeys(("CU_Q", "LENS", "TABLE", "COUNTER"), "*i32") | {"OUT": "*bf16", "BASE": "*i64", "scale": "fp32"}
    fixed = {
        "HEAD": head, "BLOCK_N": tile.block_n, "STAGES": tile.stages, "CONSUMERS": tile.consumers,
        "CAUSAL": True, "TURNS": 0 if tile.blocks else int(tile.turns),
        "POLYNOMIAL": tile.polynomial, "PAGE": page, "KV_HEADS": 8 if page else 0, "PACK": tile.pack,
        "PLACES": tile.places, "OVERLAP": 0 if tile.blocks else tile.overlap,
    }  # fmt: skip
    kernel = flash_prefill_tasks_kernel if tile.blocks else flash_prefill_turns_kernel
    built = ahead_of_time(kernel, GluonASTSource, fixed, types, (9, 0), 4)
    return {"shared": built.metadata.shared} | resources(built.asm["cubin"])


if __name__ == "__main__":
    for tile, head, page in json.loads(sys.argv[1]):
        print(json.dumps(compile_job(HopperTile(**tile), head, page)), flush=True)
