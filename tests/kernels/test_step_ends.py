"""The ends of a step that reach the host's memory: against NumPy in Triton's interpreter, compiled, and on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from pdlab.engine.buffers import Block  # noqa: E402

TOO_OLD = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7) and tuple(map(int, np.__version__.split(".")[:2])) >= (
    2,
    4,
)


def worker(mode: str) -> Any:
    here = Path(__file__).parent
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(here.parent.parent), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "ignore", str(here / "step_ends_worker.py"), mode]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    return json.loads(run.stdout)


@pytest.mark.skipif(TOO_OLD, reason="triton before 3.7 interprets nothing with numpy 2.4 or newer")
def test_a_step_is_taken_in_and_told_exactly_as_numpy_would() -> None:
    counts = worker("interpret")
    assert counts["take"] >= 50
    assert counts["remember"] >= 40


@pytest.mark.skipif(sys.platform != "linux", reason="the compiler that comes with triton is Linux only")
def test_both_kernels_compile_for_each_generation_and_write_nothing_before_they_have_waited() -> None:
    for capability, found in worker("build").items():
        assert not found["local"], f"sm_{capability}: registers spill"
        assert found["loads"] > 0
        if capability == "90":
            (loads, stores), (more, told) = found["told"]
            assert loads > found["untold"][0][0], "the turn is known before the wait"
            assert stores == 0
            assert more > 0
            assert told == 2 * found["untold"][1][1] > 0, "as many tokens to the host as to `last`"


def test_a_turn_begins_when_the_step_that_had_it_was_read() -> None:
    block = Block({"ids": (np.int64, 3), "table": (np.int32, 4)}, torch.device("cpu"), 2)
    asked: list[int] = []
    for step in range(5):
        block.upload({"ids": np.full(3, step), "table": np.zeros((0, 0), np.int32)})
        assert block.device["turn"].tolist() == [block.turn] == [(step + 1) % 2]
        block.keep_until(lambda step=step: asked.append(step))  # type: ignore[misc]
        assert asked == list(range(step - 1)), "the step before the last, and each only once"
    for _ in range(4):  # of no step
        block.upload({"table": np.zeros(0, np.int32)})
    assert asked == [0, 1, 2, 3, 4]


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "batch", "width"), [(1, 1, 1), (4, 3, 700), (8, 8, 0), (256, 250, 129)])
def test_a_kernel_takes_in_what_a_copy_would(rows: int, batch: int, width: int) -> None:
    device, g = torch.device("cuda"), np.random.default_rng(rows)
    sections: dict[str, Any] = {"ids": (np.int64, rows + 70), "slots": (np.int64, rows + 70), "cu_q": (np.int32, rows + 1)}
    sections |= {"seed": (np.int64, rows), "table": (np.int32, max(1, batch * width))}
    blocks = [Block(sections, device, 3) for _ in range(2)]
    pages = [torch.zeros((rows, width + 5), dtype=torch.int32, device=device) for _ in range(2)]
    for _ in range(7):
        arrays = {"ids": g.integers(0, 1 << 40, rows), "slots": g.integers(0, 1 << 40, rows), "cu_q": np.arange(rows + 1)}
        arrays |= {"seed": g.integers(0, 1 << 62, rows), "table": g.integers(0, 1 << 20, (batch, width)).astype(np.int32)}
        blocks[0].upload(arrays, pages[0])
        blocks[1].take(arrays, pages[1], rows)
        for name in ("ids", "slots", "cu_q", "seed", "turn"):
            n = min(rows + 1, len(arrays[name])) if name in arrays else 1
            assert torch.equal(blocks[1].device[name][:n], blocks[0].device[name][:n]), name
        assert torch.equal(pages[0], pages[1])
