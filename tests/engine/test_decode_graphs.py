"""Decode steps replayed from captured graphs give what the same steps give launch by launch.

On a CPU a capture is imitated: it keeps the step and runs it again at each replay over the same buffers. That shows all but
the capture itself: padding, tokens still in flight, which steps qualify. The gpu tests show the rest.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from imitated_graphs import ImitatedCapture, mixed, outputs

from pdlab.core.config import EngineConfig, SamplingParams
from pdlab.core.plan import SamplingArrays
from pdlab.engine.graphs import GREEDY, MODEL, RANDOM, graph_sizes, sampling_kind
from pdlab.llm import LLM


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("allocator", ["paged", "contiguous_pool"])
def test_replayed_steps_give_the_same_tokens(steps_in_flight: int, allocator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, params = mixed()
    how = {"steps_in_flight": steps_in_flight, "kv_allocator": allocator}
    capture = ImitatedCapture()
    with_graphs = outputs(capture, prompts, params, monkeypatch, **how)
    monkeypatch.undo()
    assert with_graphs == outputs(None, prompts, params, monkeypatch, **how)
    assert len(capture.captures) >= 4, "the batch passed several sizes"


def test_random_filtered_penalized_and_greedy_requests_side_by_side_sample_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, params = mixed(8, temperature=0.8, seed=11)
    params[2] = SamplingParams(max_tokens=9, temperature=0.7, top_p=0.8, seed=2, ignore_eos=True)
    params[3] = SamplingParams(max_tokens=14, repetition_penalty=1.4, ignore_eos=True)
    params[6] = SamplingParams(max_tokens=30, ignore_eos=True)
    capture = ImitatedCapture()
    with_graphs = outputs(capture, prompts, params, monkeypatch)
    monkeypatch.undo()
    assert with_graphs == outputs(None, prompts, params, monkeypatch)


def test_static_batches_replay_too(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, params = mixed(7)
    capture = ImitatedCapture()
    with_graphs = outputs(capture, prompts, params, monkeypatch, batching="static")
    monkeypatch.undo()
    assert with_graphs == outputs(None, prompts, params, monkeypatch, batching="static")
    assert capture.captures


def test_learned_positions_replay_too(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, params = mixed(5)
    with_graphs = outputs(ImitatedCapture(), prompts, params, monkeypatch, model="random:gpt2-tiny")
    monkeypatch.undo()
    assert with_graphs == outputs(None, prompts, params, monkeypatch, model="random:gpt2-tiny")


def test_after_a_capture_that_fails_steps_go_on_without(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, params = mixed()
    with pytest.warns(RuntimeWarning, match="out of memory, say"):
        with_graphs = outputs(ImitatedCapture(fail_after=2), prompts, params, monkeypatch)
    monkeypatch.undo()
    assert with_graphs == outputs(None, prompts, params, monkeypatch)


def test_sizes_cover_every_batch_with_little_padding() -> None:
    for most in (1, 3, 7, 16, 100, 256, 300, 1000):
        sizes = graph_sizes(most)
        assert sizes[-1] == most
        assert list(sizes) == sorted(set(sizes))
        worst = max(next(s for s in sizes if s >= n) / n for n in range(1, most + 1))
        assert worst <= 16 / 9


def arrays(**columns: list[float]) -> SamplingArrays:
    n = len(next(iter(columns.values())))
    off = {
        "temperature": 0,
        "top_k": 0,
        "top_p": 1,
        "min_p": 0,
        "repetition_penalty": 1,
        "seed": 0,
        "position": 0,
        "logprobs": -1,
    }
    return SamplingArrays(**{name: np.array(columns.get(name, [value] * n)) for name, value in off.items()})


def test_only_what_a_graph_cannot_hold_is_sampled_outside_it() -> None:
    assert sampling_kind(arrays(temperature=[0, 0])) == GREEDY
    assert sampling_kind(arrays(temperature=[0, 0.5])) == RANDOM
    assert sampling_kind(arrays(temperature=[0, 0.5], top_k=[5, 0])) == RANDOM, "a filter on a greedy row filters nothing"
    assert sampling_kind(arrays(temperature=[0, 0.5], top_k=[0, 5])) == MODEL
    assert sampling_kind(arrays(temperature=[0.5], min_p=[0.1])) == MODEL
    assert sampling_kind(arrays(repetition_penalty=[1.1])) == MODEL
    assert sampling_kind(arrays(logprobs=[0])) == MODEL


def test_a_setting_turns_graphs_off() -> None:
    assert EngineConfig().cuda_graphs
    assert not EngineConfig(cuda_graphs=False).cuda_graphs


# --- on a GPU


def on_gpu(prompts: list[list[int]], params: list[SamplingParams], **config: Any) -> tuple[list[list[int]], int]:
    """Token ids, and how many graphs were captured."""
    settings = {"dtype": "float32", "max_batch_requests": 32, "kv_capacity_tokens": 16384, "max_model_len": 512} | config
    with LLM("random:llama-tiny", EngineConfig().with_(**settings)) as llm:
        tokens = [r.token_ids for r in llm.generate(prompts, params)]
        graphs = llm.engine.executor.graphs  # type: ignore[attr-defined]
        return tokens, 0 if graphs is None else len(graphs)


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["triton", "sdpa", "plain"])
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_captured_steps_give_the_same_greedy_tokens(attention: str, steps_in_flight: int) -> None:
    prompts, params = mixed(21)
    how = {"attention": attention, "steps_in_flight": steps_in_flight}
    captured, made = on_gpu(prompts, params, **how)
    launched, none = on_gpu(prompts, params, cuda_graphs=False, **how)
    assert captured == launched
    assert made > 0
    assert none == 0


@pytest.mark.gpu
def test_captured_steps_give_the_same_random_tokens() -> None:
    prompts, params = mixed(21, temperature=0.9, seed=5)
    assert on_gpu(prompts, params)[0] == on_gpu(prompts, params, cuda_graphs=False)[0]


@pytest.mark.gpu
def test_closing_gives_the_memory_of_the_graphs_back() -> None:
    prompts, params = mixed(5)
    on_gpu(prompts, params)  # what the libraries keep for themselves
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    on_gpu(prompts, params)
    torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() <= before


@pytest.mark.gpu
def test_no_decode_step_waits_for_the_device_but_for_the_tokens_of_the_step_before() -> None:
    """In steady state a step is a kernel and one graph; the only wait is on the event behind an older step."""
    settings = {"steps_in_flight": 2, "max_batch_requests": 8, "kv_capacity_tokens": 8192, "max_model_len": 512}
    with LLM("random:llama-tiny", EngineConfig().with_(**settings)) as llm:
        events = llm.stream([[1, 2, 3]] * 4, SamplingParams(max_tokens=200, ignore_eos=True))
        for _ in range(4 * 20):
            next(events)
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        ) as profile:
            for _ in range(4 * 30):
                next(events)
    count = {e.key: e.count for e in profile.key_averages()}
    assert count.get("cudaGraphLaunch", 0) >= 28
    assert not {"cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaMemcpy", "cudaMalloc"} & {
        k for k, n in count.items() if n > 1
    }
    assert (
        sum(n for k, n in count.items() if k.startswith(("cudaLaunchKernel", "cuLaunchKernel"))) <= 4 * count["cudaGraphLaunch"]
    )
