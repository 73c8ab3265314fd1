"""The experiments' kernels: layouts of the cache, hints on loads, CUDA C++ by NVRTC."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
import numpy  # noqa: E402

from pdlab.kernels import nvrtc  # noqa: E402
from pdlab.kernels.cuda_norm_product import VARIANTS, cubin  # noqa: E402
from pdlab.kernels.kv_layouts import LAYOUTS, arrange, offsets  # noqa: E402

HERE = Path(__file__).parent


def worker(what: str, environment: dict[str, str]) -> Any:
    environment = environment | {"PYTHONPATH": os.pathsep.join([str(HERE.parent.parent), str(HERE)])}
    command = [sys.executable, "-W", "ignore", str(HERE / "experiment_worker.py"), what]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout)


@pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7) and tuple(map(int, numpy.__version__.split(".")[:2])) >= (2, 4),
    reason="triton before 3.7 interprets nothing with numpy 2.4 or newer",
)
def test_every_layout_and_hint_gives_the_result_of_float64() -> None:
    for name, error in worker("run", dict(os.environ)).items():
        assert error < 5e-6, name  # float32 sums of a hundred terms of size 1


def test_the_timed_configurations_do_not_spill(compile_environment: dict[str, str]) -> None:
    assert {name: stack for name, stack in worker("compile", compile_environment).items() if stack} == {}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_gives_every_element_a_place_of_its_own(layout: str) -> None:
    at = offsets(layout, capacity=24, heads=4, dim=8)
    assert sorted(at.flatten().tolist()) == list(range(24 * 4 * 8))
    x = torch.randn(2, 24, 4, 8)
    assert torch.equal(arrange(x, layout)[1][at[7, 3, 5]], x[1, 7, 3, 5])


def test_z_order_takes_neighbours_in_both_directions_together() -> None:
    at = offsets("z_token_head", capacity=8, heads=4, dim=1)[:, :, 0]
    assert at[:2, :2].flatten().sort().values.tolist() == [0, 1, 2, 3]
    assert at[4:, :].flatten().min() == 16
    with pytest.raises(ValueError, match="power of two"):
        offsets("z_token_head", capacity=9, heads=3, dim=1)


def test_instructions_are_counted_by_what_they_read() -> None:
    lines = ["LDG.E.128.CONSTANT R4, desc[UR8][R26.64] ;", "@!P0 LDG.E.U16 R6, desc[UR8][R6.64] ;", "LDS.128 R8, [R2] ;",
             "STS [R2], R3 ;", "LDGSTS.E [R2], desc[UR8][R26.64] ;"]  # fmt: skip
    text = ".headerflags @EF\n" + "\n".join(f"        /*00{i}0*/                   {line}" for i, line in enumerate(lines))
    counted = {"instructions": 5, "global_loads": 2, "constant_loads": 1, "shared_loads": 1, "shared_stores": 1}
    assert nvrtc.count_instructions(text) == counted


@pytest.mark.skipif(nvrtc.why_not() is not None, reason="NVRTC is not here: it comes with torch's CUDA builds")
def test_restrict_changes_how_loads_are_made_and_nothing_else() -> None:
    counts = {name: nvrtc.count_instructions(nvrtc.sass(cubin(name, 4096, "sm_90"))) for name in VARIANTS}
    assert counts["none"]["constant_loads"] == 0 < counts["restrict"]["constant_loads"]
    assert counts["restrict"]["constant_loads"] == counts["restrict"]["global_loads"] == counts["none"]["global_loads"]
    assert counts["shared_norm"]["shared_loads"] > 0 == counts["none"]["shared_loads"]
    with pytest.raises(RuntimeError, match="error"):
        nvrtc.compile_cubin("__global__ void broken( {", "sm_90")


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("rows", "k"), [(37, 264), (4096, 14336)])
def test_the_cuda_kernel_is_a_norm_and_a_product(variant: str, rows: int, k: int) -> None:
    from pdlab.kernels.cuda_norm_product import NormProduct

    torch.manual_seed(0)
    w, x, g = ((torch.randn(*s, device="cuda") / d).bfloat16() for s, d in (((rows, k), k**0.5), ((k,), 1), ((k,), 1)))
    y = x.double()
    truth = w.double() @ (y * g.double() / (y.square().mean() + 1e-5).sqrt())
    out = NormProduct(variant, k)(w, x, g)
    assert float((out.double() - truth).norm() / truth.norm()) < 4e-3  # bfloat16 output: relative 2^-9 each


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("batch", "length"), [(3, 1000), (1, 5)])
def test_a_layout_is_attention_in_bfloat16_too(layout: str, batch: int, length: int) -> None:
    from pdlab.kernels.kv_layouts import layout_decode

    torch.manual_seed(0)
    h, group, d, capacity = 4, 5, 64, 1024
    q, k, v = (torch.randn(batch, *s, d, device="cuda").bfloat16() for s in ((h * group,), (capacity, h), (capacity, h)))
    keys, values = (x[:, :length].double().transpose(1, 2) for x in (k, v))
    scores = q.double().view(batch, h, group, d) @ keys.transpose(-1, -2) * d**-0.5
    truth = (scores.softmax(-1) @ values).view(batch, h * group, d)
    out = layout_decode(q, arrange(k, layout), arrange(v, layout), layout, length, h, programs=200)
    # p and the output are rounded to 8 bits: relative 2^-9 each on average
    assert float((out.double() - truth).norm() / truth.norm()) < 8e-3
