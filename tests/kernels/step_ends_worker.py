"""Runs the kernels that reach host memory in Triton's interpreter, or compiles them; prints one JSON answer.

    python step_ends_worker.py interpret|build

A process of its own, because TRITON_INTERPRET must be set, or not be set, before triton is first imported.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

if sys.argv[1] == "interpret":
    os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton
from hypothesis import example, given, settings
from hypothesis import strategies as st
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pdlab.engine.buffers import Block
from pdlab.kernels.step_ends import PIECE, remember, remember_kernel, take_kernel

SECTIONS = {
    "token_ids": np.int64, "slots": np.int64, "base": np.int64, "cu_q": np.int32, "seq_lens": np.int32,
    "temperature": np.float32, "seed": np.int64,
}  # fmt: skip
LONG = ("token_ids", "slots")  # a token's; the others are a row's
DEVICE, HOST, PAGES = 0x5A, 0x33, -7  # what lies there before
counts = {"take": 0, "remember": 0}


@st.composite
def steps(draw: st.DrawFn) -> dict[str, int]:
    """Rows of a step (padding included) and of the buffers, requests, pages a request, tokens that the buffers hold."""
    rows = draw(st.integers(1, 40))
    most = rows + draw(st.integers(0, 9))
    batch, width = draw(st.integers(0, rows)), draw(st.sampled_from([0, 1, 2, 3, 17, 130]))
    return {"rows": rows, "most": most, "batch": batch, "width": width, "tokens": most + draw(st.sampled_from([0, 1, 2, 900]))}


@settings(deadline=None, max_examples=60, derandomize=True, database=None)
@given(steps())
@example({"rows": 1, "most": 1, "batch": 1, "width": 1, "tokens": 1})  # no section has rows + 1 elements but cu_q
@example({"rows": 4, "most": 4, "batch": 3, "width": 0, "tokens": 900})
@example({"rows": 256, "most": 256, "batch": 255, "width": 9, "tokens": 256})  # two pieces of a section, five of the table
@example({"rows": 1, "most": 3, "batch": 1, "width": 2 * PIECE + 1, "tokens": 8})
@example({"rows": 600, "most": 700, "batch": 2, "width": PIECE // 2, "tokens": 5000})
def take_copies_what_the_step_uses(s: dict[str, int]) -> None:
    g = np.random.default_rng(s["rows"] + 7 * s["width"])
    room = {n: s["tokens"] if n in LONG else s["most"] + (1 if n == "cu_q" else 0) for n in SECTIONS}
    cells = s["batch"] * s["width"]
    sections: dict[str, tuple[Any, int]] = {n: (dtype, room[n]) for n, dtype in SECTIONS.items()}
    block = Block(sections | {"table": (np.int32, max(cells, 1) + 5)}, torch.device("cpu"), 2)
    arrays = {n: g.integers(0, 1 << 20, min(s["rows"] + 1, room[n])).astype(dtype) for n, dtype in SECTIONS.items()}
    arrays["table"] = g.integers(0, 1 << 20, (s["batch"], s["width"])).astype(np.int32)
    for name, view in block._views[1].items():
        if name != "turn":
            view.view(np.uint8)[:] = HOST
    block._device.fill_(DEVICE)
    wide = torch.full((s["batch"] + 2, s["width"] + 3), PAGES, dtype=torch.int32)
    pages = wide[:, : s["width"] + 1]
    block.take(arrays, pages, s["rows"])
    for name in SECTIONS:
        got, n = block.device[name].numpy(), len(arrays[name])
        np.testing.assert_array_equal(got[:n], arrays[name], err_msg=name)
        behind = got.view(np.uint8)[8 * (s["rows"] + 1) :]
        assert (behind == DEVICE).all(), f"{name}: more than the step uses"
    assert block.device["turn"].tolist() == [1]
    assert (block.device["table"].numpy().view(np.uint8) == DEVICE).all()
    expected = np.full(tuple(wide.shape), PAGES)
    expected[: s["batch"], : s["width"]] = arrays["table"]
    np.testing.assert_array_equal(wide.numpy(), expected)
    counts["take"] += 1


@settings(deadline=None, max_examples=40, derandomize=True, database=None)
@given(st.integers(1, 70), st.integers(2, 4), st.integers(0, 3), st.booleans())
def remember_tells_the_host_what_it_sampled(count: int, turns: int, turn: int, tell: bool) -> None:
    g = np.random.default_rng(count)
    tokens, rows = g.integers(-1, 50, count), g.permutation(count + 5)[:count]
    tokens[count // 2] = -1
    last, host = torch.full((count + 5,), 99), torch.full((turns, count + 2), 77)
    turn %= turns
    told = (host, torch.tensor([turn])) if tell else ()
    remember(torch.from_numpy(tokens), torch.from_numpy(rows), last, *told)
    wanted = np.full((turns, count + 2), 77)
    if tell:
        wanted[turn, :count] = tokens
    np.testing.assert_array_equal(host.numpy(), wanted)
    kept = np.full(count + 5, 99)
    kept[rows] = np.maximum(tokens, 0)
    np.testing.assert_array_equal(last.numpy(), kept)
    counts["remember"] += 1


def build(kernel: Any, capability: int, fixed: dict[str, Any], types: dict[str, str], **options: Any) -> str:
    """The kernel's PTX."""
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in fixed else types.get(name, "i32") for name in names},
        constexprs={(names.index(name),): value for name, value in fixed.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in types},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]


def built(capability: int) -> dict[str, Any]:
    take = build(take_kernel, capability, {"PIECE": PIECE}, dict.fromkeys(("HOST", "DEVICE", "PAGES"), "*i32"), num_warps=4)
    answer: dict[str, Any] = {"local": ".local" in take, "loads": take.count("ld.global")}
    for tell in (False, True):
        fixed = {"BLOCK": 64, "TELL": tell, "PDL": capability >= 90}
        types = dict.fromkeys(("TOKENS", "ROWS", "LAST", "HOST", "TURN"), "*i64")
        ptx = build(remember_kernel, capability, fixed, types, num_warps=1, launch_pdl=capability >= 90)
        before, wait, behind = ptx.partition("griddepcontrol.wait")
        answer["local"] |= ".local" in ptx
        counted = [[part.count("ld.global"), part.count("st.global")] for part in (before, behind)]
        answer["told" if tell else "untold"] = counted if wait else []
    return answer


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "interpret":
        take_copies_what_the_step_uses()
        remember_tells_the_host_what_it_sampled()
        print(json.dumps(counts))
    else:
        print(json.dumps({c: built(c) for c in (80, 89, 90)}))
