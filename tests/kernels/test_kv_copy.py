"""Moving KV between slots: the kernel equals plain PyTorch, and splitting a list of copies into sets keeps their order."""

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
pytest.importorskip("triton")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from pdlab.core.plan import KVCopy  # noqa: E402
from pdlab.kernels.kv_moves import run_copies, waves  # noqa: E402

INTERPRETED: list[dict[str, Any]] = [
    {"layers": 3, "pages": 11, "heads": 2, "size": 16, "dim": 64, "count": 37, "dtype": "float32"},
    {"layers": 1, "pages": 90, "heads": 3, "size": 1, "dim": 24, "count": 33, "dtype": "float16"},
    {"layers": 2, "pages": 7, "heads": 1, "size": 5, "dim": 80, "count": 1, "dtype": "float32"},
]
BUILT = [{"capability": c, "heads": 8, "size": size, "dim": 128} for c in (75, 80, 90) for size in (1, 16)]


def worker(mode: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    here = Path(__file__).parent
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(here.parent.parent)
    command = [sys.executable, str(here / "kv_copy_worker.py"), mode, json.dumps(cases)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout)


def test_the_kernel_moves_exactly_what_plain_pytorch_moves() -> None:
    for case, found in zip(INTERPRETED, worker("interpret", INTERPRETED), strict=True):
        assert found["equal"], case
        assert found["moved"], case


@pytest.mark.skipif(sys.platform != "linux", reason="the compiler that comes with triton is Linux only")
def test_the_kernel_compiles_for_each_generation_with_16_byte_loads() -> None:
    for case, found in zip(BUILT, worker("build", BUILT), strict=True):
        assert found["wide_loads"] > 0, case
        assert not found["local"], f"registers spill: {case}"


COPIES = st.lists(st.tuples(st.integers(0, 25), st.integers(0, 25), st.integers(1, 7)), max_size=25)


def as_copies(triples: list[tuple[int, int, int]]) -> list[KVCopy]:
    return [KVCopy(src, dst, n) for src, dst, n in triples if abs(src - dst) >= n]


@given(COPIES)
@settings(deadline=None, max_examples=200)
def test_copies_of_one_set_may_run_in_any_order(triples: list[tuple[int, int, int]]) -> None:
    copies = as_copies(triples)
    sets = waves(copies)
    assert [op for wave in sets for op in wave] == copies
    for wave in sets:
        writes = [slot for op in wave for slot in range(op.dst, op.dst + op.tokens)]
        reads = {slot for op in wave for slot in range(op.src, op.src + op.tokens)}
        assert len(writes) == len(set(writes))
        assert not reads & set(writes)


def test_copies_that_touch_nothing_in_common_share_a_launch() -> None:
    assert len(waves([KVCopy(16 * i, 16 * (i + 100), 16) for i in range(50)])) == 1


@given(COPIES, st.sampled_from([1, 4]))
@settings(deadline=None, max_examples=60)
def test_a_list_of_copies_acts_in_its_order(triples: list[tuple[int, int, int]], size: int) -> None:
    copies = as_copies(triples)
    slots = np.arange(32)
    for op in copies:
        slots[op.dst : op.dst + op.tokens] = slots[op.src : op.src + op.tokens]
    k = torch.arange(32.0).view(1, 32 // size, 1, size, 1).repeat(2, 1, 1, 1, 1)
    v = -k
    run_copies(k, v, copies)
    assert k[0].flatten().tolist() == k[1].flatten().tolist() == slots.tolist()
    assert v[1].flatten().tolist() == (-slots).tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 16])
def test_copies_on_the_gpu_equal_those_on_the_cpu(size: int) -> None:
    torch.manual_seed(0)
    k, v = torch.randn(2, 3, 512 // size, 2, size, 64)
    on_gpu = k.cuda(), v.cuda()
    copies = [KVCopy(0, 64, 37), KVCopy(64, 200, 16), KVCopy(300, 0, 50), KVCopy(316, 300, 16), KVCopy(332, 316, 16)]
    run_copies(k, v, copies)
    run_copies(*on_gpu, copies)
    assert torch.equal(k, on_gpu[0].cpu())
    assert torch.equal(v, on_gpu[1].cpu())
