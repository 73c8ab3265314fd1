"""Kernels compiled ahead: found without a launch, found again by the launch, and never in a notebook's way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pdlab import LLM, EngineConfig, SamplingParams
from pdlab.bench import compile_ahead as ahead
from pdlab.core.errors import DeviceUnavailable
from pdlab.lab.compiling import Compiling, compile_ahead

pytest.importorskip("triton")


def test_what_is_compiled_ahead_is_what_a_launch_looks_for(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(sys.path)}
    worker = [sys.executable, str(Path(__file__).with_name("unlaunched_worker.py"))]
    done = subprocess.run(worker, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert sorted(set(told["found"])) == ["embed_kernel", "remember_kernel", "silu_product_kernel"]
    n = len(told["found"])
    assert n == 4, "each once, however many steps share it; 300 rows need another remember_kernel"
    assert told["entries"] == [0, n, n, n + 1], "none before, none more where it is launched, one more for another dtype"


def test_an_engine_goes_on_with_token_0_where_nothing_is_launched() -> None:
    from pdlab.bench._kernels_ahead import unlaunched

    config = EngineConfig(device="cpu", dtype="float32", kv_capacity_tokens=512, max_model_len=128)
    ask: dict[str, Any] = {"params": SamplingParams(max_tokens=5, ignore_eos=True)}
    with unlaunched(pytest.fail), LLM("random:llama-tiny", config) as llm:
        assert llm.generate([[7, 8, 9]], **ask)[0].token_ids == [0] * 5
    with LLM("random:llama-tiny", config) as llm:
        assert set(llm.generate([[7, 8, 9]], **ask)[0].token_ids) != {0}, "and with its own afterwards"


@pytest.mark.skipif(torch.cuda.is_available(), reason="would compile")
@pytest.mark.parametrize("what", ahead.UNLAUNCHED)
def test_without_a_gpu_there_is_nothing_to_compile_for(what: str) -> None:
    with pytest.raises(DeviceUnavailable):
        ahead.main(["--what", what, "--seconds", "1"])


@pytest.mark.parametrize(("smoke", "capability"), [(True, (9, 0)), (False, (7, 5)), (False, None)])
def test_a_notebook_compiles_nothing_where_no_kernel_of_ours_will_run(
    smoke: bool, capability: tuple[int, int] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    lab: Any = SimpleNamespace(smoke=smoke, machine=SimpleNamespace(capability=capability))
    compile_ahead(lab, "serving").wait()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("said", "heard"), [("print('a'); print('51 of 51 kernels')", "51 of 51 kernels"), ("1 / 0", "division")]
)
def test_waiting_says_what_was_done_or_what_went_wrong_and_goes_on(
    said: str, heard: str, capsys: pytest.CaptureFixture[str]
) -> None:
    process = subprocess.Popen([sys.executable, "-c", said], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    compiling = Compiling(process)
    compiling.wait()
    compiling.wait()  # a cell that is run again
    out = capsys.readouterr().out
    assert heard in out
    assert out.count("waited here") == 1
