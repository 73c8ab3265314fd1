"""Runs the copy kernel in Triton's interpreter, or compiles it; prints one JSON answer.

A process of its own, because TRITON_INTERPRET must be set, or not be set, before triton is first imported.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

if sys.argv[1] == "interpret":
    os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pdlab.kernels.kv_copy import kv_copy, kv_copy_kernel
from pdlab.kernels.kv_moves import kv_copy_reference


def interpret(layers: int, pages: int, heads: int, size: int, dim: int, count: int, dtype: str) -> dict[str, Any]:
    """Whether the kernel did exactly what the reference does, on slots drawn at random, layers apart by more than a layer."""
    torch.manual_seed(count)
    full = torch.randn(2, layers, pages + 2, heads, size, dim).to(getattr(torch, dtype))
    k, v = full[0, :, 1:-1], full[1, :, 1:-1]
    ours, theirs = full.clone(), full.clone()
    slots = torch.randperm(pages * size)[: 2 * count].view(2, count)
    kv_copy(ours[0, :, 1:-1], ours[1, :, 1:-1], *slots)
    kv_copy_reference(theirs[0, :, 1:-1], theirs[1, :, 1:-1], *slots)
    moved = not torch.equal(full, ours)
    return {"equal": torch.equal(ours, theirs), "moved": moved, "shape": [*k.shape, *v.shape]}


def build(capability: int, heads: int, size: int, dim: int) -> dict[str, Any]:
    fixed = {"HEADS": heads, "HEAD": dim, "HEAD_PAD": triton.next_power_of_2(dim), "PAGE": size, "BLOCK": 32}
    types = {"K": "*bf16", "V": "*bf16", "SRC": "*i64", "DST": "*i64", "layer_stride": "i64"}
    names = kv_copy_kernel.arg_names
    aligned = ("K", "V", "SRC", "DST", "layer_stride", "page_stride", "head_stride", "row_stride")
    source = ASTSource(
        fn=kv_copy_kernel,
        signature={name: "constexpr" if name in fixed else types.get(name, "i32") for name in names},
        constexprs={(names.index(name),): value for name, value in fixed.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
    return {"wide_loads": built.asm["ptx"].count("ld.global.v4"), "local": ".local" in built.asm["ptx"]}


if __name__ == "__main__":
    call = interpret if sys.argv[1] == "interpret" else build
    print(json.dumps([call(**case) for case in json.loads(sys.argv[2])]))
