"""Decode steps in graphs whose kernels read and write the host's memory: a step's tokens reach whoever asks for them, late too.

On a CPU both kernels are imitated, each by what it does in PyTorch: that shows whose turn it is, and who waits for whom. The
gpu tests show the rest; tests/kernels/test_step_ends.py has the kernels themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from imitated_graphs import ImitatedCapture, mixed, outputs

from pdlab.bench.prefill_vs_decode import Step, make_plan
from pdlab.core.config import EngineConfig, SamplingParams
from pdlab.core.plan import Plan
from pdlab.engine import graphs as graphs_module
from pdlab.engine.buffers import Block
from pdlab.engine.executor import TorchExecutor
from pdlab.engine.interface import StepResult
from pdlab.kernels.ops import SampleResult
from pdlab.llm import LLM
from pdlab.models.loading import load

BATCHES = (3, 1, 4, 2, 2, 5, 1, 3, 3, 1)  # of steps in turn: padded and not, met before and not


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A CPU goes the way of a GPU's fused operations; the rows of each step that was taken in by `take`."""
    rows_taken: list[int] = []

    def take(self: Block, arrays: dict[str, np.ndarray], pages: torch.Tensor, rows: int) -> None:
        rows_taken.append(rows)
        self.upload(arrays, pages)

    def remember(
        model: Any, tokens: torch.Tensor, rows: torch.Tensor, last: torch.Tensor, host: torch.Tensor, turn: torch.Tensor
    ) -> None:
        host[int(turn), : len(tokens)] = tokens
        last[rows] = tokens.clamp(min=0)

    monkeypatch.setattr(Block, "take", take)
    monkeypatch.setattr(graphs_module, "remember", remember)
    monkeypatch.setattr(
        TorchExecutor,
        "_make_host_tokens",
        lambda self: torch.zeros((self.block.turns, len(self.last)), dtype=torch.int64),
    )
    return rows_taken


def make_executor(device: str = "cpu", steps_in_flight: int = 2) -> TorchExecutor:
    loaded = load("random:llama-tiny", device=device, dtype="float32" if device == "cpu" else "bfloat16", seed=3)
    config = EngineConfig(
        device=device, kv_capacity_tokens=4096, max_batch_requests=8, max_batch_tokens=64, steps_in_flight=steps_in_flight
    )
    if device != "cpu":
        from pdlab.kernels.dispatch import make_ops

        loaded.model.ops = make_ops(config, loaded.config, loaded.model.device, loaded.model.dtype)
        return TorchExecutor(config, loaded.model, max_len=256)
    capture = ImitatedCapture()
    capture.executor = TorchExecutor(config, loaded.model, max_len=256, capture=capture)
    return capture.executor


def plans(batches: tuple[int, ...] = BATCHES) -> list[Plan]:
    rng = np.random.default_rng(8)
    return [make_plan(Step("decode", b, 40 + 7 * i), i, 250, 4096, rng) for i, b in enumerate(batches)]


def tokens_of(result: StepResult) -> list[int]:
    assert result.error is None, result.error
    return result.tokens.tolist()


def read_late(executor: TorchExecutor, between: Callable[[int], object] = lambda step: None) -> list[list[int]]:
    """Every step is submitted before any result is asked for."""
    handles = []
    for i, plan in enumerate(plans()):
        handles.append(executor.submit(plan))
        between(i)
    return [tokens_of(handle.result()) for handle in handles]


def read_at_once(executor: TorchExecutor) -> list[list[int]]:
    return [tokens_of(executor.submit(plan).result()) for plan in plans()]


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("allocator", ["paged", "contiguous_pool"])
@pytest.mark.parametrize("batching", ["continuous_chunked", "static"])
def test_an_engine_gives_the_tokens_of_launched_steps(
    steps_in_flight: int, allocator: str, batching: str, reached: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, params = mixed()
    params[4] = SamplingParams(max_tokens=25, repetition_penalty=1.4, ignore_eos=True)  # sampled outside the graph
    params[5] = SamplingParams(max_tokens=33, temperature=0.9, seed=4, ignore_eos=True)
    how = {"steps_in_flight": steps_in_flight, "kv_allocator": allocator, "batching": batching}
    with_graphs = outputs(ImitatedCapture(), prompts, params, monkeypatch, **how)
    assert len(set(reached)) > (3 if batching != "static" else 0), "the batch passed several sizes"
    monkeypatch.undo()
    assert with_graphs == outputs(None, prompts, params, monkeypatch, **how)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_late_reader_gets_the_tokens_of_its_own_step(steps_in_flight: int, reached: list[int]) -> None:
    right = read_at_once(make_executor(steps_in_flight=steps_in_flight))
    assert len({tuple(tokens) for tokens in right}) > 7, "steps that can be told apart"
    assert [len(tokens) for tokens in right] == list(BATCHES)
    reached.clear()
    assert read_late(make_executor(steps_in_flight=steps_in_flight)) == right
    assert reached == [4, 1, 4, 2, 2, 8, 1, 4, 4, 1]


def test_a_result_stays_what_it_was(reached: list[int]) -> None:
    executor = make_executor()
    results = [executor.submit(plan).result() for plan in plans()]
    then = [result.tokens.copy() for result in results]
    executor.host_tokens.fill_(-5)  # type: ignore[union-attr]
    assert all((result.tokens == tokens).all() for result, tokens in zip(results, then))


def test_capturing_ahead_harms_no_result_that_nobody_asked_for_yet(reached: list[int]) -> None:
    right, executor = read_at_once(make_executor()), make_executor()
    executor.graphs.any_length = True  # type: ignore[union-attr]
    assert read_late(executor, lambda i: executor.capture_graphs(sizes=(4, 2)) if i in (2, 5) else None) == right


def test_a_step_that_fails_costs_no_other_its_tokens(reached: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    right, executor = read_at_once(make_executor()), make_executor()
    handles = []
    for i, plan in enumerate(plans()):
        if i == 3:  # twice, first in vain
            with monkeypatch.context() as m:
                m.setattr(executor.graphs, "run", lambda shape: 1 / 0)
                failed = executor.submit(plan)
        handles.append(executor.submit(plan))
    assert isinstance(failed.result().error, ZeroDivisionError)
    executor.reset()
    assert [tokens_of(handle.result()) for handle in handles] == right


def test_the_host_hears_of_a_row_without_a_finite_logit(reached: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    executor = make_executor()
    monkeypatch.setattr(executor.model, "sample", lambda x, sampling: SampleResult(torch.arange(len(x)) * 5 - 1))
    result = executor.submit(plans()[0]).result()
    assert result.tokens.tolist() == [-1, 4, 9]
    assert result.bad_rows == (0,)
    assert executor.last[:3].tolist() == [0, 4, 9]


def test_where_kernels_cannot_reach_the_host_steps_copy() -> None:
    def take(*args: Any, **kwargs: Any) -> None:
        raise ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)")

    here: Any = SimpleNamespace(on_gpu=True, _on_device=nullcontext, block=SimpleNamespace(take=take), block_table=None)
    here.model = SimpleNamespace(ops=SimpleNamespace(fused=True))
    with pytest.warns(RuntimeWarning, match="copy to and from the host: ValueError: Pointer"):
        assert TorchExecutor._make_host_tokens(here) is None
    here.model.ops.fused = False
    assert TorchExecutor._make_host_tokens(here) is None


# --- on a GPU


def on_gpu(batch: int, **config: Any) -> tuple[list[list[int]], bool]:
    """Greedy tokens of `batch` requests that end one after the other, and whether kernels reached the host's memory."""
    rng = np.random.default_rng(batch)
    prompts = [rng.integers(0, 250, int(n)).tolist() for n in rng.integers(1, 300, batch)]
    params = [SamplingParams(max_tokens=20 + 3 * i, ignore_eos=True) for i in range(batch)]
    settings = {"dtype": "float32", "max_batch_requests": 32, "kv_capacity_tokens": 16384, "max_model_len": 512}
    with LLM("random:llama-tiny", EngineConfig(ops="fused").with_(**settings | config)) as llm:
        tokens = [r.token_ids for r in llm.generate(prompts, params)]
        return tokens, llm.engine.executor.host_tokens is not None  # type: ignore[attr-defined]


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 2, 5, 21])
@pytest.mark.parametrize("how", [{"page_size": 16}, {"page_size": 1}, {"kv_allocator": "contiguous_pool"}], ids=str)
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_steps_that_reach_the_host_give_the_tokens_of_launched_steps(
    batch: int, how: dict[str, Any], steps_in_flight: int
) -> None:
    reaching, reached = on_gpu(batch, steps_in_flight=steps_in_flight, **how)
    launched, launched_reached = on_gpu(batch, steps_in_flight=steps_in_flight, cuda_graphs=False, **how)
    assert reached
    assert not launched_reached
    assert reaching == launched


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 3, 21])
def test_steps_that_reach_the_host_give_the_tokens_of_steps_that_copy(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 too, to the bit: the kernels between are the same."""
    reaching, reached = on_gpu(batch, dtype="bfloat16", steps_in_flight=2)
    monkeypatch.setattr(TorchExecutor, "_make_host_tokens", lambda self: None)
    copying, copied_reached = on_gpu(batch, dtype="bfloat16", steps_in_flight=2)
    assert (reached, copied_reached) == (True, False)
    assert reaching == copying


@pytest.mark.gpu
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_late_reader_gets_the_tokens_of_its_own_step_on_a_gpu(steps_in_flight: int) -> None:
    executor = make_executor("cuda", steps_in_flight)
    assert executor.host_tokens is not None
    assert len(BATCHES) >= executor.block.turns + 2
    read_at_once(executor)  # captures
    kept = executor.k.clone(), executor.v.clone()
    right = read_at_once(executor)
    for memory, before in zip((executor.k, executor.v), kept):
        memory.copy_(before)
    assert read_late(executor) == right
    for memory, before in zip((executor.k, executor.v), kept):
        memory.copy_(before)
    assert read_late(executor, lambda i: executor.capture_graphs(sizes=(4, 2)) if i == 5 else None) == right
    executor.close()


@pytest.mark.gpu
@pytest.mark.parametrize("requests", [1, 4])
def test_between_two_replays_the_device_copies_nothing(requests: int) -> None:
    settings = {"steps_in_flight": 2, "max_batch_requests": 8, "kv_capacity_tokens": 8192, "max_model_len": 512}
    with LLM("random:llama-tiny", EngineConfig(dtype="bfloat16").with_(**settings)) as llm:
        events = llm.stream([[1, 2, 3]] * requests, SamplingParams(max_tokens=200, ignore_eos=True))
        for _ in range(requests * 20):
            next(events)
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(requests * 30):
                next(events)
            torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    timeline = sorted((e.time_range.start, e.name) for e in profile.events() if e.device_type == cuda)
    names = [name for _, name in timeline]
    takes = [i for i, name in enumerate(names) if name.startswith("take_kernel")]
    assert len(takes) >= 28
    steady = names[takes[0] : takes[-1]]
    assert not [name for name in steady if name.startswith("Memcpy")]
    assert sum(name.startswith("remember_kernel") for name in steady) == len(takes) - 1, "a graph behind each"
