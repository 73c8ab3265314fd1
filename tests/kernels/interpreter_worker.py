"""Runs the attention kernels in Triton's interpreter: one JSON request a line in, one JSON answer a line out.

A process of its own, because TRITON_INTERPRET must be set before triton is first imported, and other tests import it without.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
import tempfile
import traceback
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl
from attention_cases import contiguous_case, make_case, oracle, relative

from pdlab.kernels.flash_decode import Workspace, flash_decode
from pdlab.kernels.flash_prefill import flash_prefill, tile_of_rank
from pdlab.kernels.online_softmax import exact_attention, hard_cases
from pdlab.kernels.tuning import DecodeTile, PrefillTile

NAN = float("nan")


def decode(case: dict[str, Any], programs: int, max_q: int = 1, block_n: int = 32, times: int = 2) -> dict[str, Any]:
    """Errors, whether rows of longer requests were left alone, and what the counters hold after the launches."""
    q, view = make_case(**case)
    rows = max_q * case["heads"] // case["kv_heads"]
    segments = len(case["lens"]) * case["kv_heads"]
    work = Workspace.create("cpu", programs=programs, rows=rows, head_dim=case["dim"], segments=segments)
    for _ in range(times):
        out = torch.full_like(q, NAN)
        flash_decode(q, view, work, DecodeTile(block_n, 4, 2, 1), programs, max_q=max_q, out=out)
    return judge(out, oracle(q, view), case, lambda n: 0 < n <= max_q) | {"counters": int(work.counters.abs().sum())}


def prefill(
    case: dict[str, Any], causal: bool = True, min_q: int = 1, heads_at_once: int = 8, block_m: int = 32
) -> dict[str, Any]:
    q, view = make_case(**case)
    out = torch.full_like(q, NAN)
    l2 = heads_at_once * 2 * sum(case["lens"]) * case["dim"] * q.element_size()
    flash_prefill(q, view, PrefillTile(block_m, 32, 4, 2), causal=causal, min_q=min_q, l2_bytes=l2, out=out)
    return judge(out, oracle(q, view, causal), case, lambda n: n >= min_q)


def judge(out: torch.Tensor, truth: torch.Tensor, case: dict[str, Any], ours: Any) -> dict[str, Any]:
    keep = torch.cat([torch.full((n,), bool(ours(n))) for n in case["queries"]])
    return {"error": relative(out[keep], truth[keep]), "others_untouched": bool(out[~keep].isnan().all())}


def hard(kernel: str, name: str, dtype: str, tile: int) -> dict[str, Any]:
    """Error of one head on a numerically hard case, without its mask."""
    case = hard_cases(getattr(torch, dtype), n=8)[name]
    q, view = contiguous_case(case["q"], case["k"], case["v"])
    if kernel == "decode":
        work = Workspace.create("cpu", programs=2, rows=8, head_dim=64, segments=1)
        view, each = replace(view, cu_q=torch.tensor([0, 1], dtype=torch.int32)), DecodeTile(tile, 4, 2, 1)
        out = torch.cat([flash_decode(q[i : i + 1], view, work, each, 2) for i in range(len(q))])
    else:
        out = flash_prefill(q, view, PrefillTile(16, tile, 4, 1), causal=False)
    return {"error": relative(out[:, 0], exact_attention(case["q"], case["k"], case["v"]))}


def far_pages(kernel: str) -> dict[str, Any]:
    """Pages that lie more than 2^31 elements into the memory; the memory is reserved, but only touched where used."""
    q, view = make_case([40], [1 if kernel == "decode" else 40], heads=2, kv_heads=2, dim=16, page=16)
    pages = 2**31 // view.k[0].numel() + 8
    try:
        caches = [torch.empty((pages, *view.k.shape[1:])) for _ in range(2)]
    except RuntimeError as error:
        return {"skip": str(error)[:100]}
    for far, near in zip(caches, (view.k, view.v)):
        far[pages - len(near) :] = near
    moved = replace(view, k=caches[0], v=caches[1], block_table=view.block_table + (pages - len(view.k)))
    if kernel == "decode":
        work = Workspace.create("cpu", programs=2, rows=1, head_dim=16, segments=2)
        out = flash_decode(q, moved, work, DecodeTile(32, 4, 2, 1), 2)
    else:
        out = flash_prefill(q, moved, PrefillTile(32, 32, 4, 1))
    return {"error": relative(out, oracle(q, view))}


@triton.jit
def ranks_kernel(TILES, DONE, OUT, total, LANES: tl.constexpr):
    lanes = tl.arange(0, LANES)
    tiles, done = tl.load(TILES + lanes), tl.load(DONE + lanes)
    for rank in range(0, total):
        request, tile = tile_of_rank(rank, tiles, done, lanes, LANES)
        tl.store(OUT + 2 * rank, request)
        tl.store(OUT + 2 * rank + 1, tile)


def ranks(tiles: list[int], done: list[int]) -> dict[str, Any]:
    out = torch.zeros(sum(tiles), 2, dtype=torch.int32)
    counts, costs = (torch.tensor(x, dtype=torch.int32) for x in (tiles, done))
    ranks_kernel[(1,)](counts, costs, out, sum(tiles), LANES=len(tiles))
    return {"order": out.tolist()}


@cache
def items_twin() -> Any:
    """Kernels that write down what the warp-specialized kernels find: their text, with Triton's language in Gluon's place."""
    from pdlab.kernels import prefill_items

    text = Path(prefill_items.__file__).read_text(encoding="utf-8")
    text = re.sub(r"^from triton.*$", "", text, flags=re.MULTILINE).replace("@gluon.jit", "@triton.jit")
    text = re.sub(r"\bgl\.", "tl.", text)
    text = text.replace("from __future__ import annotations", "import triton\nimport triton.language as tl")
    path = Path(tempfile.mkdtemp()) / "items_twin.py"
    path.write_text(text + _ITEMS_KERNEL)
    spec = importlib.util.spec_from_file_location("items_twin", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_ITEMS_KERNEL = """

@triton.jit
def items_kernel(OUT, CU_Q, LENS, BASE, batch, item_rows, min_q, in_order, CAUSAL: tl.constexpr):
    lanes = tl.arange(0, 32)
    total = count_items(CU_Q, lanes, batch, item_rows, min_q)
    counts = items_of(CU_Q, 0, lanes, batch, item_rows, min_q)
    done = rows_done(CU_Q, LENS, lanes, batch, item_rows, CAUSAL)
    tl.store(OUT, total)
    for rank in range(0, total):
        if in_order:
            request, index = item_in_order(rank, CU_Q, lanes, batch, item_rows, min_q)
        else:
            request, index = item_by_length(rank, counts, done, lanes)
        row, rows, base, newest, length = entry_of(request, index, CU_Q, LENS, BASE, item_rows, CAUSAL)
        entry = OUT + 8 + 8 * rank
        tl.store(entry, row)
        tl.store(entry + 1, rows)
        tl.store(entry + 2, base)
        tl.store(entry + 3, newest)
        tl.store(entry + 4, length)
        tl.store(entry + 5, request)


@triton.jit
def units_kernel(OUT, total, units, units_at_once):
    for number in range(0, total * units):
        rank, unit = rank_and_unit(number, total, units, units_at_once)
        tl.store(OUT + 2 * number, rank)
        tl.store(OUT + 2 * number + 1, unit)
"""


def item_numbers(total: int, units: int, units_at_once: int) -> dict[str, Any]:
    """[[rank among the items of a unit, unit], ...] in the order in which the warp-specialized kernels hand them out."""
    out = torch.full((total * units, 2), -1, dtype=torch.int32)
    items_twin().units_kernel[(1,)](out, total, units, units_at_once)
    return {"order": out.tolist()}


def schedule(
    lens: list[int], queries: list[int], causal: bool, min_q: int = 1, item_rows: int = 128, by_request: bool = False
) -> dict[str, Any]:
    """Items of the warp-specialized kernels: [[first row, rows, K row, newest key of the first row, keys, request], ...]."""
    starts = torch.tensor([sum(queries[:b]) for b in range(len(queries) + 1)], dtype=torch.int32)
    made = torch.full(((sum(-(-n // item_rows) for n in queries) + 2) * 8,), -1, dtype=torch.int32)
    bases = torch.tensor([1000 * b for b in range(len(lens))])
    items_twin().items_kernel[(1,)](
        made, starts, torch.tensor(lens, dtype=torch.int32), bases, len(lens), item_rows, min_q, int(by_request), CAUSAL=causal
    )
    return {"total": int(made[0]), "entries": made.view(-1, 8)[1 : 1 + int(made[0]), :6].tolist()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    calls = {f.__name__: f for f in (decode, prefill, hard, far_pages, ranks, schedule, item_numbers)}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = calls[request["call"]](**request["arguments"])
        except Exception:
            answer = {"failed": traceback.format_exc()}
        print(json.dumps(answer), flush=True)
