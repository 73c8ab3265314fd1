"""The experiments' kernels: `run` in Triton's interpreter, or `compile` for a GPU that need not be here. Prints JSON.

python experiment_worker.py run | compile
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

if sys.argv[1] == "run":
    os.environ["TRITON_INTERPRET"] = "1"

import torch

from pdlab.kernels.hinted_product import HINTS, hinted_product, hinted_product_kernel
from pdlab.kernels.kv_layouts import LAYOUTS, arrange, layout_decode, layout_decode_kernel, merge_kernel

# batch, KV heads, query heads a KV head, head size, capacity, tokens
SHAPES = ((2, 4, 3, 32, 128, 101), (1, 8, 2, 16, 64, 64), (3, 2, 1, 64, 192, 70), (1, 1, 5, 16, 16, 1))


def errors() -> dict[str, float]:
    """Largest error of each layout over SHAPES, and of each hint, against float64."""
    g = torch.Generator().manual_seed(0)
    found = dict.fromkeys((*LAYOUTS, *HINTS), 0.0)
    for batch, h, group, d, capacity, n in SHAPES:
        q, k, v = (torch.randn(batch, *s, d, generator=g) for s in ((h * group,), (capacity, h), (capacity, h)))
        k[:, n:], v[:, n:] = float("nan"), float("nan")  # beyond the length: whatever the memory holds
        keys, values = (x[:, :n].double().transpose(1, 2) for x in (k, v))
        scores = q.double().view(batch, h, group, d) @ keys.transpose(-1, -2) * d**-0.5
        truth = (scores.softmax(-1) @ values).view(batch, h * group, d)
        for layout in LAYOUTS:
            out = layout_decode(q, arrange(k, layout), arrange(v, layout), layout, n, h, programs=12, block_n=32)
            found[layout] = max(found[layout], float((out - truth).abs().max()))
    w, x = torch.randn(13, 70, generator=g), torch.randn(70, generator=g)
    for hint in HINTS:
        found[hint] = float((hinted_product(w, x, hint, rows=4, block=32) - w.double() @ x.double()).abs().max())
    return found


def stacks() -> dict[str, int]:
    """Stack bytes of the configurations that the suites time, by name and capability."""
    from compile_worker import ahead_of_time, resources
    from triton.compiler import ASTSource

    from pdlab.bench.kv_layout import _TILES

    heads = {"H": 8, "H_BITS": 3, "D": 128, "D_BITS": 7, "GROUP": 4, "ROWS": 16}
    types = dict.fromkeys(("Q", "K", "V", "W", "X", "Y", "OUT"), "*bf16") | dict.fromkeys(("PART_O", "PART_LSE"), "*fp32")
    jobs: dict[str, tuple[Any, dict[str, Any], int]] = {}
    for i, layout in enumerate(LAYOUTS):
        for block_n, warps, stages in _TILES:
            fixed = heads | {"LAYOUT": i, "BLOCK_N": block_n, "STAGES": stages}
            jobs[f"{layout}/{block_n}"] = layout_decode_kernel, fixed, warps
    jobs["merge"] = merge_kernel, {"GROUP": 4, "D": 128, "PARTS": 128}, 4
    for hint, (evict, cache) in HINTS.items():
        jobs[hint] = hinted_product_kernel, {"COLUMNS": 4096, "ROWS": 4, "BLOCK": 1024, "EVICT": evict, "CACHE": cache}, 8
    found = {}
    for name, (kernel, fixed, warps) in jobs.items():
        mine = {k: v for k, v in (types | {"scale_log2": "fp32"}).items() if k in kernel.arg_names}
        built = ahead_of_time(kernel, ASTSource, fixed, mine, (9, 0), warps)
        found[name] = resources(built.asm["cubin"])["STACK"]
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(errors() if sys.argv[1] == "run" else stacks()))
