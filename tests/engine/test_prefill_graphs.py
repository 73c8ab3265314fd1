"""Steps with prompts replayed from captured graphs give what the same steps give launch by launch.

On a CPU a capture is imitated, and attention takes the lengths from the device's tensors as this project's kernels do. That
shows padding, tokens in flight, and which steps qualify; the gpu tests show the rest.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from imitated_graphs import ImitatedCapture, mixed, outputs

from pdlab.core.config import EngineConfig, SamplingParams
from pdlab.engine import executor as executor_module
from pdlab.engine import prefill_graphs
from pdlab.engine.executor import TorchExecutor
from pdlab.engine.prefill_graphs import MixedShape, PrefillGraphs, request_sizes, token_sizes
from pdlab.kernels.dispatched_ops import DispatchedOps
from pdlab.kernels.kv_view import KVView
from pdlab.kernels.ops import SampleResult, SamplingBatch
from pdlab.kernels.reference import ReferenceOps
from pdlab.llm import LLM
from pdlab.models.loading import load as load_model


@pytest.fixture
def lengths_from_the_device(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Attention that reads no length on the host; what it was given: tokens, requests, requests that are padding."""
    seen: list[tuple[int, int, int]] = []
    real = ReferenceOps.attention

    def attention(self: Any, q: torch.Tensor, view: KVView) -> torch.Tensor:
        if sum(n for n, _ in view.host_lens) == len(q) or view.max_q == 1:
            return real(self, q, view)  # launched, with lengths from the host
        new = np.diff(view.cu_q.numpy())
        lens = [(int(n), int(kv)) for n, kv in zip(new, view.seq_lens.numpy()) if n]
        assert not new[len(lens) :].any()
        assert max(n for n, _ in lens) <= view.max_q
        assert max(kv for _, kv in lens) <= view.max_kv
        seen.append((len(q), len(new), len(new) - len(lens)))
        return real(self, q, replace(view, host_lens=tuple(lens)))

    monkeypatch.setattr(ReferenceOps, "attention", attention)
    monkeypatch.setattr(DispatchedOps, "any_prefill", True)
    monkeypatch.setattr(prefill_graphs, "CAPTURE_AFTER", 1)
    return seen


def load(n: int = 14, **more: Any) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of 1 to 150 tokens in chunks of 48 at most, beside decodes."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, 250, int(k)).tolist() for k in rng.integers(1, 150, n)]
    return prompts, [SamplingParams(max_tokens=2 + i % 7, ignore_eos=True, **more) for i in range(n)]


@pytest.mark.parametrize("model", ["random:llama-tiny", "random:gpt2-tiny"])
@pytest.mark.parametrize("how", [{}, {"steps_in_flight": 2}, {"kv_allocator": "contiguous_pool"}], ids=str)
def test_replayed_steps_with_prompts_give_the_same_tokens(
    model: str, how: dict[str, Any], lengths_from_the_device: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, params = load()
    settings = {"model": model, "max_batch_tokens": 48, "prefill_graphs": True, **how}
    capture = ImitatedCapture()
    with monkeypatch.context() as m:
        with_graphs = outputs(capture, prompts, params, m, **settings)
    padded = [s for s in lengths_from_the_device if s[2]]
    assert len(padded) > 10, "steps ran with requests that only fill up"
    assert {s[0] for s in padded} <= {16, 32, 48}
    lengths_from_the_device.clear()
    with monkeypatch.context() as m:
        assert with_graphs == outputs(None, prompts, params, m, **settings)
    assert not lengths_from_the_device


def test_random_and_filtered_requests_sample_the_same(
    lengths_from_the_device: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, params = load(8, temperature=0.8, seed=11)
    params[1] = SamplingParams(max_tokens=9, temperature=0.7, top_p=0.8, seed=2, ignore_eos=True)
    params[3] = SamplingParams(max_tokens=8, repetition_penalty=1.4, ignore_eos=True)
    settings = {"max_batch_tokens": 48, "prefill_graphs": True}
    with monkeypatch.context() as m:
        with_graphs = outputs(ImitatedCapture(), prompts, params, m, **settings)
    assert lengths_from_the_device
    with monkeypatch.context() as m:
        assert with_graphs == outputs(None, prompts, params, m, **settings)


def test_after_a_capture_that_fails_steps_go_on_without(
    lengths_from_the_device: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, params = load()
    settings = {"max_batch_tokens": 48, "prefill_graphs": True}
    with monkeypatch.context() as m, pytest.warns(RuntimeWarning, match="out of memory, say"):
        with_graphs = outputs(ImitatedCapture(fail_after=1), prompts, params, m, **settings)
    with monkeypatch.context() as m:
        assert with_graphs == outputs(None, prompts, params, m, **settings)


def test_the_weights_that_graphs_read_stay_where_they_are_when_the_model_gets_others(
    lengths_from_the_device: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that shares the layers may lay them out otherwise while this one goes on replaying."""
    prompts, params = load()
    loaded, capture = load_model("random:llama-tiny", device="cpu", dtype="float32"), ImitatedCapture()
    monkeypatch.setattr(executor_module, "TorchExecutor", partial(TorchExecutor, capture=capture))
    settings = {"device": "cpu", "max_batch_requests": 12, "kv_capacity_tokens": 4096, "max_model_len": 256}
    with LLM(loaded, max_batch_tokens=48, **settings) as llm:
        capture.executor = executor = llm.engine.executor
        llm.generate(prompts, params)
        layer = loaded.model.layers[0]
        read = weakref.ref(layer.down)
        layer.down = layer.down.clone()
        assert read() is not None
        executor.graphs.close()  # type: ignore[attr-defined]
        assert read() is not None, "steps with prompts read it too"
        executor.prefill_graphs.close()  # type: ignore[attr-defined]
        assert read() is None


def test_attention_that_reads_lengths_on_the_host_keeps_its_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(TorchExecutor, "_make_prefill_graphs", lambda self, capture: made.append(self))
    prompts, params = mixed(4)
    outputs(ImitatedCapture(), prompts, params, monkeypatch, prefill_graphs=True)
    assert not made


def test_few_sizes_cover_every_step_with_little_padding() -> None:
    for most in (48, 128, 500, 2048, 32768):
        sizes = token_sizes(most)
        assert sizes[-1] == min(most, prefill_graphs.LARGEST)
        assert list(sizes) == sorted(set(sizes))
        assert all(b - a <= 128 for a, b in pairwise(sizes))
    assert request_sizes(512) == (32, 256, 512)
    assert request_sizes(12) == (12,)


def graphs_of(tokens: int, requests: int, longest: int = 4096) -> PrefillGraphs:
    """With buffers of a step, and no model: for questions about shapes."""
    made = object.__new__(PrefillGraphs)
    made.sizes, made.requests, made.longest = token_sizes(tokens), request_sizes(requests), longest
    return made


@pytest.mark.parametrize("tokens", [17, 300, 2048])
@pytest.mark.parametrize("max_q", [2, 16, 17, 256, 257, 2000])
@pytest.mark.parametrize("max_kv", [2, 200, 4000])
def test_a_shape_holds_what_it_is_made_for(tokens: int, max_q: int, max_kv: int) -> None:
    max_q, max_kv = min(tokens, max_q), max(max_q, max_kv)
    shape = graphs_of(2048, 512).shape(tokens, 9, max_q, max_kv, "paged")
    assert shape.tokens >= tokens
    assert shape.requests >= 9
    assert shape.max_q >= max_q
    assert shape.max_kv >= max_kv


def test_the_shapes_captured_ahead_are_those_that_a_load_meets() -> None:
    graphs = graphs_of(2048, 512)
    ahead = graphs.shapes("paged")
    assert len(ahead) == len(set(ahead)) < prefill_graphs.MOST_GRAPHS
    assert ahead[0] == MixedShape(2048, 512, 2048, 4096, "paged"), "the largest first, in whose memory the others find room"
    rng = np.random.default_rng(0)
    for _ in range(200):
        decodes, chunks = int(rng.integers(0, 500)), rng.integers(17, 2048, int(rng.integers(1, 5)))
        tokens = decodes + int(chunks.sum())
        if tokens <= 2048:
            assert graphs.shape(tokens, decodes + len(chunks), int(chunks.max()), 3000, "paged") in ahead
    for decodes in (0, 1, 15, 16, 17, 31, 32, 60, 126, 200, 255, 256, 300, 500, 511):
        for chunk in range(2, 17):  # what is left of a prompt
            assert graphs.shape(decodes + chunk, decodes + 1, chunk, 3000, "paged") in ahead


def test_a_shape_whose_kernels_cannot_run_is_left_out_and_named() -> None:
    graphs = graphs_of(48, 12)
    shapes, made = graphs.shapes("paged"), []
    graphs.model, graphs._made = SimpleNamespace(layers=[0, 1]), {}  # type: ignore[assignment]

    def rehearse(step: Any) -> None:
        if step.args[0] == shapes[1]:
            raise RuntimeError("too many registers")

    graphs._rehearse, graphs._make = rehearse, made.append  # type: ignore[method-assign,assignment]
    with pytest.warns(RuntimeWarning, match="too many registers"):
        graphs.make(shapes)
    assert made == [shapes[0], *shapes[2:]]


# --- on a GPU


def on_gpu(prompts: list[list[int]], params: list[SamplingParams], **config: Any) -> tuple[list[list[int]], int]:
    """Token ids, and how many steps with prompts were captured."""
    settings = {"max_batch_requests": 40, "max_batch_tokens": 512, "kv_capacity_tokens": 32768, "max_model_len": 1024}
    model = config.pop("model", "random:llama-tiny")
    with LLM(model, EngineConfig(attention="triton").with_(**settings | config)) as llm:
        tokens = []
        for i in (0, 3, 7, 14, 28) * 2:  # steps of many sizes, met twice
            tokens += [r.token_ids for r in llm.generate(prompts[i : 2 * i + 3], params[i : 2 * i + 3])]
        graphs = llm.engine.executor.prefill_graphs  # type: ignore[attr-defined]
        return tokens, 0 if graphs is None else len(graphs)


def long_load(n: int = 40) -> tuple[list[list[int]], list[SamplingParams]]:
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, 250, int(k)).tolist() for k in rng.integers(1, 700, n)]
    return prompts, [SamplingParams(max_tokens=2 + i % 23, ignore_eos=True) for i in range(n)]


@pytest.mark.gpu
@pytest.mark.parametrize("ops", ["reference", "fused"])
@pytest.mark.parametrize("how", [{}, {"steps_in_flight": 2}, {"kv_allocator": "contiguous_pool"}], ids=str)
def test_captured_steps_with_prompts_give_the_same_tokens(ops: str, how: dict[str, Any]) -> None:
    prompts, params = long_load()
    captured, made = on_gpu(prompts, params, dtype="float32", ops=ops, prefill_graphs=True, **how)
    launched, none = on_gpu(prompts, params, dtype="float32", ops=ops, prefill_graphs=False, **how)
    assert captured == launched
    assert made > 3
    assert none == 0


def what_is_sampled(model: str, prefill_graphs: bool) -> list[torch.Tensor]:
    """The rows of the residual stream that every launched sampling was given. Its tokens are made up from their position, so
    that two runs go through the same steps whatever the last bits say."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, 250, int(k)).tolist() for k in rng.integers(1, 900, 24)]
    params = [SamplingParams(max_tokens=1 + i % 9, ignore_eos=True) for i in range(len(prompts))]
    rows: list[torch.Tensor] = []

    def sample(x: torch.Tensor, sampling: SamplingBatch) -> SampleResult:
        if not torch.cuda.is_current_stream_capturing():
            rows.append(x.float().cpu())
        return SampleResult((sampling.position * 7 + 3) % 250)

    settings = {"max_batch_requests": 40, "max_batch_tokens": 640, "kv_capacity_tokens": 32768, "max_model_len": 1024}
    with LLM(model, EngineConfig(prefill_graphs=prefill_graphs).with_(**settings)) as llm:
        executor: Any = llm.engine.executor
        executor.model.sample = sample
        for _ in range(2):
            llm.generate(prompts, params)
        assert not prefill_graphs or len(executor.prefill_graphs) > 1
    return rows


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["random:llama-1b", "random:qwen3-0.6b"], ids=["heads of 64", "heads of 128"])
def test_captured_steps_in_bfloat16_give_nearly_the_same_rows(model: str) -> None:
    """Products of padded steps may be cut into other tiles, so the last bits differ."""
    captured, launched = what_is_sampled(model, True), what_is_sampled(model, False)
    assert len(captured) == len(launched)
    worst = max(float(((a - b).abs().amax(1) / b.abs().amax(1)).max()) for a, b in zip(captured, launched) if len(a))
    assert worst < 0.05, "of the largest element of a row"


@pytest.mark.gpu
def test_capturing_ahead_leaves_nothing_to_capture() -> None:
    settings = {"max_batch_requests": 40, "max_batch_tokens": 512, "kv_capacity_tokens": 32768, "max_model_len": 1024}
    with LLM("random:llama-tiny", EngineConfig(attention="triton", prefill_graphs=True).with_(**settings)) as llm:
        executor: Any = llm.engine.executor
        assert executor.capture_prefill_graphs() > 0
        made = len(executor.prefill_graphs)
        assert made == len(executor.prefill_graphs.shapes("paged"))
        llm.generate([list(range(300)), list(range(40))], SamplingParams(max_tokens=4, ignore_eos=True))
        llm.generate([list(range(300)), list(range(40))], SamplingParams(max_tokens=4, ignore_eos=True))
        assert len(executor.prefill_graphs) == made
