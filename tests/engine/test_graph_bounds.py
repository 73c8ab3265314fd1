"""Where operations have other kernels for short caches than for long ones, steps of either kind have graphs of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from imitated_graphs import ImitatedCapture

from pdlab.core.config import EngineConfig, SamplingParams
from pdlab.engine import executor as executor_module
from pdlab.engine.graphs import GREEDY
from pdlab.kernels import decode_stack
from pdlab.kernels.decode_stack import recorded_bounds, stack_key
from pdlab.kernels.fused_ops import FusedOps
from pdlab.kernels.ops import LayerWeights, NormWeights
from pdlab.kernels.tuning import Tuning
from pdlab.llm import LLM
from pdlab.models.loading import load


def llm(monkeypatch: pytest.MonkeyPatch, bounds: tuple[int, ...] | None, **config: Any) -> tuple[LLM, Any]:
    """llama-tiny, whose operations serve every length by one graph, or say where others begin."""
    real, capture = executor_module.TorchExecutor, ImitatedCapture()
    loaded = load("random:llama-tiny", dtype="float32")
    ops = loaded.model.ops

    def make(config: Any, model: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(type(model.ops), "any_length", True, raising=False)
        if bounds is not None:
            more = lambda self, layers, rows: bounds if rows == 1 else ()  # noqa: E731
            monkeypatch.setattr(type(model.ops), "decode_bounds", more, raising=False)
        made = capture.executor = real(config, model, **kwargs, capture=capture)
        return made

    assert ops is not None
    monkeypatch.setattr(executor_module, "TorchExecutor", make)
    settings = {"device": "cpu", "dtype": "float32", "max_batch_requests": 2, "kv_capacity_tokens": 512, "max_model_len": 128}
    made = LLM(loaded, EngineConfig(**(settings | config)))
    return made, made.engine.executor


@pytest.mark.parametrize(("bounds", "used"), [(None, {128}), ((), {128}), ((20, 40), {20, 40, 128}), ((40, 999), {40, 128})])
def test_a_growing_cache_goes_from_graph_to_graph(
    monkeypatch: pytest.MonkeyPatch, bounds: tuple[int, ...] | None, used: set[int]
) -> None:
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    made, executor = llm(monkeypatch, bounds)
    with made:
        tokens = made.generate([[3, 1, 4, 1, 5]], params)[0].token_ids
        assert {shape.max_kv for shape in executor.graphs._made} == used
        assert executor.graphs.bounds(2) == (128,)
    monkeypatch.undo()
    with LLM(load("random:llama-tiny", dtype="float32"), EngineConfig(device="cpu", dtype="float32")) as plain:
        assert plain.generate([[3, 1, 4, 1, 5]], params)[0].token_ids == tokens


def test_graphs_captured_ahead_are_those_that_steps_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made, executor = llm(monkeypatch, (20, 40))
    with made:
        executor.capture_graphs((GREEDY,))
        ahead = set(executor.graphs._made)
        assert {(shape.size, shape.max_kv) for shape in ahead} == {(1, 20), (1, 40), (1, 128), (2, 128)}
        made.generate([[3, 1, 4], [1, 5]], SamplingParams(max_tokens=50, ignore_eos=True))
        assert set(executor.graphs._made) == ahead


def test_the_table_says_where_other_kernels_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = NormWeights(torch.ones(8), None, 1e-5)
    qkv, out, up, down = (torch.zeros(n, 8) for n in (12, 8, 32, 8))
    layers = [LayerWeights(norm, qkv, None, None, None, out, None, norm, up, None, down, None) for _ in range(2)]
    tuning = Tuning("some-gpu", (9, 0), 132, 50 << 20)
    entries = [stack_key(layers) | {"max_kv": n} for n in (513, 2049)] + [stack_key(layers) | {"layers": 3, "max_kv": 9}]
    monkeypatch.setattr(decode_stack, "table", lambda device: {"persistent_decode": entries})
    assert recorded_bounds(tuning, layers) == (513, 2049)

    def bounds(rows: int = 1, capability: tuple[int, int] = (9, 0), **options: Any) -> tuple[int, ...]:
        of = Tuning("some-gpu", capability, 132, 50 << 20)
        return FusedOps([], "plain", None, 1, torch.device("cpu"), "bfloat16", of, **options).decode_bounds(layers, rows)

    assert bounds() == (513, 2049)
    assert bounds(2) == ()
    assert bounds(persistent=True) == bounds(persistent=False) == bounds(measured=False) == ()
    assert bounds(capability=(8, 0)) == ()
