"""The fused kernels on a GPU: bfloat16, real sizes, programmatic launches, and the tokens of whole models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pdlab.core.config import EngineConfig, SamplingParams

pytest.importorskip("triton")
from fused_cases import Case, errors, make_ops, sampling_case

from pdlab.kernels.projection_sample import LOGITS
from pdlab.kernels.reference_sampling import sample_from_logits
from pdlab.llm import LLM

pytestmark = pytest.mark.gpu

SHAPES: dict[str, dict[str, Any]] = {
    "llama-1b": {"hidden": 2048, "heads": 32, "kv_heads": 8, "dim": 64, "ffn": 8192},
    "llama-2-7b": {"hidden": 4096, "heads": 32, "kv_heads": 32, "dim": 128, "ffn": 11008},
    "qwen3-0.6b": {"hidden": 1024, "heads": 16, "kv_heads": 8, "dim": 128, "ffn": 3072, "qk_norm": True},
    "smollm2-135m": {"hidden": 576, "heads": 9, "kv_heads": 3, "dim": 64, "ffn": 1536},
    "gpt2-xl": {"hidden": 1600, "heads": 25, "kv_heads": 25, "dim": 64, "ffn": 6400, "layer_norm": True, "gated": False}
    | {"rope": False, "biases": True},
}
# bfloat16 rounds x, y and the result to 8 bits; errors are shares of the largest value, a few of them meet in a sum
TOLERANCE = {"bfloat16": 1.2e-2, "float16": 1.5e-3}


@pytest.mark.parametrize("tokens", [1, 7, 32, 64, 100])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_operation_matches_float64(shape: str, tokens: int) -> None:
    found = errors(Case(tokens=tokens, page=16, dtype="bfloat16", device="cuda", **SHAPES[shape]), None)
    assert max(found.values()) < TOLERANCE["bfloat16"], found


@pytest.mark.parametrize(
    "changed",
    [{"pdl": False}, {"ring": False}, {"hints": False}, {"prefetch": True}, {"measured": False}],
    ids=lambda c: next(iter(c)),
)
@pytest.mark.parametrize("tokens", [1, 13])
def test_with_any_one_technique_changed_the_results_are_the_same(tokens: int, changed: dict[str, bool]) -> None:
    case = Case(tokens=tokens, page=16, dtype="float16", device="cuda", **SHAPES["llama-1b"])
    found = errors(case, None, **changed)
    assert max(found.values()) < TOLERANCE["float16"], found


def test_one_row_by_a_ring_samples_the_tokens_of_the_oracle() -> None:
    x, head, sampling = sampling_case(0, 1, 50257, 1024, torch.bfloat16, "cuda")
    ops = make_ops(Case(tokens=1, dtype="bfloat16", device="cuda", **SHAPES["qwen3-0.6b"]))
    assert ops.ring_tile("projection_sample", head.proj, 1, None) is not None or torch.cuda.get_device_capability() != (9, 0)
    for seed in range(20):
        here = replace(sampling, seed=sampling.seed + 77 * seed, temperature=torch.full_like(sampling.temperature, 0.9))
        row = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).to(x)
        oracle = sample_from_logits(ops._project(row, head, LOGITS, here), here).tokens
        assert torch.equal(ops.projection_sample(row, head, here).tokens, oracle)


@pytest.mark.parametrize("rows", [1, 5, 64, 100, 128, 200, 300])
@pytest.mark.parametrize(
    "filters", [{}, {"top_p": 0.9}, {"top_k": 40, "top_p": 0.8}, {"min_p": 0.05}], ids=lambda f: "+".join(f) or "none"
)
def test_tokens_are_the_oracles_on_the_same_logits(rows: int, filters: dict[str, float]) -> None:
    """Scores that differ in the last bits decide near ties, so one row in a hundred may differ."""
    x, head, sampling = sampling_case(0, rows, 50257, 1024, torch.bfloat16, "cuda")
    ops = make_ops(Case(tokens=1, dtype="bfloat16", device="cuda", **SHAPES["qwen3-0.6b"]))
    columns = {name: torch.full_like(getattr(sampling, name), value) for name, value in filters.items()}
    sampling = replace(sampling, any_filter=bool(filters), **columns)
    mine = ops.projection_sample(x, head, sampling).tokens
    assert torch.equal(mine, ops.projection_sample(x, head, sampling).tokens), "a second launch samples the same"
    oracle = sample_from_logits(ops._project(x, head, LOGITS, sampling), sampling).tokens
    assert int((mine != oracle).sum()) <= rows // 100


def greedy(prompts: list[list[int]], model: str, **config: Any) -> list[list[int]]:
    settings = {
        "dtype": "float32",
        "attention": "plain",
        "kv_capacity_tokens": 4096,
        "max_model_len": 256,
        "max_batch_requests": 8,
    }
    with LLM(model, EngineConfig().with_(**settings, **config)) as llm:
        return [r.token_ids for r in llm.generate(prompts, SamplingParams(max_tokens=24, ignore_eos=True))]


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("model", ["random:llama-tiny", "random:gpt2-tiny"])
def test_a_model_gives_the_same_greedy_tokens_with_fused_operations(model: str, graphs: bool) -> None:
    prompts = [list(range(1, n)) for n in (2, 9, 70, 33, 5)]
    fused = greedy(prompts, model, ops="fused", cuda_graphs=graphs)
    assert fused == greedy(prompts, model, ops="reference", cuda_graphs=False)
