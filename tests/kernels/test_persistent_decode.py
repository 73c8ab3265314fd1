"""The persistent decode kernel without a GPU: interpreted against the plain operations, compiled, and which layers it takes.

Several programs, which wait for one another, are interpreted in turns drawn at random (see interleaved). bfloat16 is wrong in
the interpreter: see the gpu tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
import numpy  # noqa: E402
from persistent_cases import StackCase  # noqa: E402

from pdlab.core.config import EngineConfig  # noqa: E402
from pdlab.core.errors import ConfigError  # noqa: E402
from pdlab.kernels.fused_ops import FusedOps  # noqa: E402
from pdlab.kernels.ops import NormWeights  # noqa: E402
from pdlab.kernels.persistent_decode import StackTile, stack_fits  # noqa: E402
from pdlab.kernels.reference import ReferenceOps  # noqa: E402
from pdlab.kernels.tuning import Tuning  # noqa: E402
from pdlab.models.loading import load  # noqa: E402

HERE = Path(__file__).parent
Ask = Callable[..., Any]
# float32 sums of tens of terms in another order; float16 rounds y, q, u and x of every layer to 11 bits
TOLERANCE = {"float32": 2e-6, "float16": 4e-3}
interpreted = [
    pytest.mark.xdist_group("interpreter"),
    pytest.mark.skipif(
        tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
        and tuple(map(int, numpy.__version__.split(".")[:2])) >= (2, 4),
        reason="triton before 3.7 interprets nothing with numpy 2.4 or newer",
    ),
]


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """Sends a case to the worker process and returns its answer."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent.parent)])}
    command = [sys.executable, "-W", "ignore", str(HERE / "persistent_worker.py")]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert worker.stdin is not None
    assert worker.stdout is not None

    def call(what: str, **case: Any) -> Any:
        worker.stdin.write(json.dumps({"call": what, "case": case}) + "\n")
        worker.stdin.flush()
        answer = json.loads(worker.stdout.readline() or '{"failed": "the worker died"}')
        assert "failed" not in answer, answer["failed"]
        return answer["answer"]

    yield call
    worker.stdin.close()
    worker.wait()


CASES: dict[str, dict[str, Any]] = {
    "one program": {},
    "one program, three parts of the cache": {"parts": 3, "length": 40},
    "fewer programs than heads": {"programs": 3, "kv_heads": 4, "layers": 1},
    "more programs than pieces of a product": {"programs": 9, "parts": 2, "layers": 1},
    "extents": {"programs": 5, "parts": 3, "kind": "extent", "page": 1, "length": 70},
    "sizes that pieces do not divide": {"programs": 4, "hidden": 48, "heads": 3, "kv_heads": 1, "ffn": 112, "length": 1},
    "half precision": {"programs": 3, "parts": 2, "dtype": "float16"},
}


@pytest.mark.parametrize("case", CASES)
def test_a_stack_of_layers_matches_the_plain_operations_launch_after_launch(ask: Ask, case: str) -> None:
    found = ask("errors", **CASES[case])
    assert found.pop("counters") == 0, "the next launch would not wait"
    assert found.pop("input") == 0
    assert max(found.values()) < TOLERANCE[CASES[case].get("dtype", "float32")], found


@pytest.mark.parametrize("programs", [1, 3])
def test_a_wait_for_nobody_ends_with_nan_and_the_next_launch_is_right(ask: Ask, programs: int) -> None:
    assert ask("given_up", programs=programs, parts=2) == {"lost": True, "failed": 1, "after": 0.0, "left": 0}


for test in (
    test_a_stack_of_layers_matches_the_plain_operations_launch_after_launch,
    test_a_wait_for_nobody_ends_with_nan_and_the_next_launch_is_right,
):
    for mark in interpreted:
        mark(test)


def compiled(jobs: list[tuple[str, bool]], environment: dict[str, str]) -> list[dict[str, Any]]:
    environment = environment | {"PYTHONPATH": os.pathsep.join([str(HERE.parent.parent), str(HERE)])}
    command = [sys.executable, str(HERE / "persistent_compile_worker.py"), json.dumps(jobs)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


def check(found: dict[str, Any]) -> None:
    assert found["STACK"] == found["LOCAL"] == 0, f"registers spill: {found}"
    assert found["shared"] + 1024 <= 228 << 10, f"a program does not fit on a multiprocessor: {found}"
    assert found["REG"] * 32 * StackTile().warps <= 1 << 16, "not one program would be resident"
    assert found["HGMMA"] > 0, "products by whole groups of warps"
    # of four products with three pieces in front of their loops, eight copies a thread each; pointers from the table of offsets
    # must be known to be aligned, or copies are two bytes wide
    assert found["wide copies"] >= 4 * 4 * 8, found
    assert found["prefetches"] >= 5, "before the layers and in each product"
    assert found["acquires"] >= 5, "a wait in front of every phase"


def test_the_shipped_tile_compiles_without_spills_and_fits(compile_environment: dict[str, str]) -> None:
    for found in compiled([("llama-1b", True)], compile_environment):
        check(found)


@pytest.mark.slow
def test_other_models_and_extents_compile_without_spills_and_fit(compile_environment: dict[str, str]) -> None:
    for found in compiled([("llama-1b", False), ("llama-2-7b", True), ("llama-3-8b", True)], compile_environment):
        check(found)


def test_layers_that_the_kernel_does_not_take_are_left_to_the_other_kernels() -> None:
    tile = StackTile()
    case = StackCase(hidden=256, heads=4, kv_heads=2, dim=64, ffn=512, dtype="bfloat16")
    _, layers, _, _ = case.make()
    assert stack_fits(layers, 64, tile)
    assert not stack_fits(layers, 96, tile)
    first = layers[0]
    for changed in (
        replace(first, qkv_bias=torch.zeros(len(first.qkv), dtype=torch.bfloat16)),
        replace(first, q_norm=NormWeights(torch.ones(64, dtype=torch.bfloat16), None, 1e-5)),
        replace(first, attn_norm=replace(first.attn_norm, eps=1e-6)),
        replace(first, down=first.down.float()),
        replace(first, up=first.up[:512].contiguous()),
    ):
        assert not stack_fits([changed, *layers[1:]], 64, tile)
    _, odd, _, _ = StackCase(hidden=192, heads=3, kv_heads=1, dim=64, ffn=512, dtype="bfloat16").make()
    assert not stack_fits(odd, 64, tile)


def test_the_switch_is_off_unless_asked_for_and_needs_hopper() -> None:
    assert EngineConfig().persistent_decode is False
    with pytest.raises(ConfigError):
        EngineConfig(persistent_decode=1)  # type: ignore[arg-type]
    x, layers, rope, view = StackCase().make()
    for capability, wanted in (((9, 0), True), ((8, 0), False)):
        ops = FusedOps(
            [], "plain", StackCase(), 1, torch.device("cpu"), "float32", Tuning("cpu", capability, 4, 32 << 20), persistent=True
        )
        assert ops.persistent is wanted
        # float32 layers do not fit either way
        assert ops.layer_stack(x, layers, rope, view) is None


def test_a_model_leaves_its_layers_to_operations_that_take_them_and_to_no_others() -> None:
    model = load("random:llama-tiny", dtype="float32").model
    k, v = model.new_kv(2, 16)
    here = replace(StackCase(length=3, page=16).make()[3], k=k, v=v)
    here = replace(here, block_table=torch.tensor([[0]], dtype=torch.int32), slots=torch.tensor([2]))
    x = torch.randn(1, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    right = model.through_layers(x, here)
    asked: list[int] = []

    class Ops(ReferenceOps):
        takes = False

        def layer_stack(self, x: torch.Tensor, layers: list[Any], rope: Any, view: Any) -> torch.Tensor | None:
            asked.append(len(layers))
            return x + 1 if self.takes else None

    model.ops = ops = Ops()
    assert torch.equal(model.through_layers(x, here), right)
    ops.takes = True
    assert torch.equal(model.through_layers(x, here), x + 1)
    assert asked == [model.config.num_layers] * 2
