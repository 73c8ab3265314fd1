"""Finds the kernels of a small model's steps without launching, compiles them, and looks whether a run would find them.

    python unlaunched_worker.py      (without TRITON_INTERPRET, with TRITON_CACHE_DIR on an empty folder)

Prints JSON: the kernels found, the cache's entries before they were compiled, after that, after the same steps and after one of
another dtype asked for them, and the seconds of each.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from pdlab.bench import _kernels_ahead as ahead
from pdlab.kernels.row_kernels import silu_product
from pdlab.kernels.step_ends import embed, remember

TARGET = GPUTarget("cuda", 90, 32)


def steps(rows: int, dtype: torch.dtype = torch.bfloat16) -> None:
    """Some kernels that a step launches, on a CPU's tensors: nothing reads them. Sizes 5 and 7 share their kernels."""
    ids, last, table = torch.zeros(rows, dtype=torch.int64), torch.zeros(9, dtype=torch.int64), torch.zeros(16, 96)
    embed(ids, ids, last, table, ids, pdl=True)
    remember(ids, ids, last, pdl=True)
    silu_product(torch.zeros(rows, 256, dtype=dtype))


def entries() -> int:
    if not Path(os.environ["TRITON_CACHE_DIR"]).is_dir():
        return 0
    return len([p for p in Path(os.environ["TRITON_CACHE_DIR"]).iterdir() if p.is_dir()])


def launch(rows: int, dtype: torch.dtype = torch.bfloat16) -> None:
    """`steps` up to where a launch has its compiled kernel, by Triton's own way to it."""
    run = JITFunction.run
    with patch.object(JITFunction, "run", lambda self, *args, warmup, **more: run(self, *args, warmup=True, **more)):
        steps(rows, dtype)


if __name__ == "__main__":
    driver.set_active(ahead._Known(TARGET))
    found: list[ahead.Wanted] = []
    with ahead.unlaunched(found.append):
        for rows in (5, 7, 300):
            steps(rows)
    none = entries()
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        seconds = [future.result() for future in [pool.submit(ahead.compile_for, TARGET, w) for w in found]]
    counts = [none, entries()]
    for rows in (5, 7, 300):
        launch(rows)
    counts.append(entries())
    launch(5, torch.float16)
    print(json.dumps({"found": [w.name for w in found], "entries": [*counts, entries()], "seconds": seconds}))
