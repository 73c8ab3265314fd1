"""Counted FLOPs and bytes against torch's own counter and against the tensors of real models."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlab.core.errors import ConfigError
from pdlab.core.plan import PlanShape
from pdlab.costs import formulas as f
from pdlab.models.catalogue import CATALOGUE, config_of, parameter_count
from pdlab.models.config import ModelConfig

LLAMA = ModelConfig("odd-llama", "llama", 97, 72, 2, 9, 3, 24, 40, 512, tie_embeddings=False)
ODD = {
    "gqa 9/3, head 24, untied": LLAMA,
    "biases, tied": replace(LLAMA, tie_embeddings=True, qkv_bias=True, out_bias=True, mlp_bias=True),
    "q and k norms, heads wider than hidden": replace(LLAMA, num_heads=6, num_kv_heads=2, head_dim=20, qk_norm=True),
    "gpt2": ModelConfig("odd-gpt2", "gpt2", 89, 60, 3, 5, 5, 12, 77, 300, qkv_bias=True, out_bias=True, mlp_bias=True),
}
SHAPES = {
    "prefill": PlanShape(prefill=((7, 0),), sampled=1),
    "two prompts": PlanShape(prefill=((5, 0), (5, 0)), sampled=2),
    "chunk after a cached prefix": PlanShape(prefill=((6, 19),), sampled=1),
    "decodes of one length": PlanShape(decode_count=3, decode_kv_tokens=3 * 21, sampled=3),
    "a chunk that samples nothing": PlanShape(prefill=((9, 3),), sampled=0),
}


def _counted(cfg: ModelConfig, shape: PlanShape) -> int:
    """FLOPs that torch counts in the model's forward pass and projection, run by the plain operations."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from pdlab.kernels.kv_view import KVView
    from pdlab.models.loading import build
    from pdlab.models.source import RandomSource

    model = build(cfg, RandomSource(cfg, "cpu", torch.float32, 0))
    lens = [(n, n + c) for n, c in shape.prefill]
    lens += [(1, shape.decode_kv_tokens // shape.decode_count)] * shape.decode_count if shape.decode_count else []
    new, kv = [n for n, _ in lens], [t for _, t in lens]
    pages = max(kv)  # pages of one token: slot = page
    table = torch.arange(len(lens) * pages, dtype=torch.int32).view(len(lens), pages)
    positions = torch.cat([torch.arange(t - n, t) for n, t in lens])
    slots = torch.cat([table[b, t - n : t].long() for b, (n, t) in enumerate(lens)])
    k, v = model.new_kv(len(lens) * pages, 1)
    view = KVView(
        "paged", 1, k, v, table, torch.zeros(len(lens), dtype=torch.int64), torch.tensor(kv, dtype=torch.int32),
        torch.tensor([0, *np.cumsum(new)], dtype=torch.int32), slots, positions, max(new), max(kv), tuple(lens),
    )  # fmt: skip
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        x = model.forward(torch.randint(0, cfg.vocab_size, (sum(new),)), positions.int(), view)
        if shape.sampled:
            model.logits(x[: shape.sampled])
    return counter.get_total_flops()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
@pytest.mark.parametrize("cfg", ODD.values(), ids=list(ODD))
def test_flops_are_those_that_torch_counts(cfg: ModelConfig, shape: PlanShape) -> None:
    # plain attention computes what the causal mask discards, so it is compared with the rectangle
    assert f.step_flops(cfg, shape, masked_too=True).total == _counted(cfg, shape)


@pytest.mark.parametrize("name", ["llama-tiny", "gpt2-tiny"])
def test_the_catalogues_tiny_models_are_counted_right(name: str) -> None:
    shape = PlanShape(prefill=((11, 0), (4, 9)), sampled=2)
    assert f.step_flops(config_of(name), shape, masked_too=True).total == _counted(config_of(name), shape)


@pytest.mark.parametrize("cfg", [*ODD.values(), config_of("llama-tiny"), config_of("gpt2-tiny")], ids=lambda c: c.name)
def test_weight_bytes_are_those_of_the_models_tensors(cfg: ModelConfig) -> None:
    import torch

    from pdlab.models.loading import build
    from pdlab.models.source import RandomSource

    model = build(cfg, RandomSource(cfg, "cpu", torch.float32, 0))
    assert f.weights_bytes(cfg, 4) == model.weight_bytes()


@pytest.mark.parametrize("cfg", CATALOGUE.values(), ids=list(CATALOGUE))
def test_weight_bytes_agree_with_the_catalogues_parameter_count(cfg: ModelConfig) -> None:
    assert f.weights_bytes(cfg, 2) == 2 * parameter_count(cfg)


def test_causal_pairs_are_counted_one_by_one() -> None:
    shape = PlanShape(prefill=((5, 0), (3, 7)), decode_count=2, decode_kv_tokens=30, sampled=4)
    pairs = sum(q + 1 for q in range(5)) + sum(7 + q + 1 for q in range(3)) + 30
    cfg = ODD["gqa 9/3, head 24, untied"]
    assert f.step_flops(cfg, shape).attention == 4 * 9 * 24 * pairs * cfg.num_layers


chunks = st.lists(st.tuples(st.integers(1, 400), st.integers(0, 400)), max_size=4).map(tuple)
shapes = st.builds(
    lambda prefill, decodes, kv, pad: PlanShape(prefill, decodes, decodes * kv, pad, len(prefill) + decodes),
    chunks, st.integers(0, 64), st.integers(1, 5000), st.integers(0, 50),
)  # fmt: skip


@given(shapes, st.sampled_from(list(ODD.values())))
def test_the_masked_half_is_never_counted_twice(shape: PlanShape, cfg: ModelConfig) -> None:
    causal, whole = f.step_flops(cfg, shape), f.step_flops(cfg, shape, masked_too=True)
    assert causal.attention <= whole.attention <= 2 * causal.attention
    assert replace(causal, attention=0) == replace(whole, attention=0)


@given(shapes, st.sampled_from(list(ODD.values())))
def test_a_step_costs_at_most_what_its_parts_cost_apart(shape: PlanShape, cfg: ModelConfig) -> None:
    """Batching saves weight traffic and nothing else: FLOPs add up exactly, bytes exceed no sum, and stay above the KV."""
    prefill = PlanShape(shape.prefill, 0, 0, 0, len(shape.prefill))
    decode = PlanShape((), shape.decode_count, shape.decode_kv_tokens, shape.pad_tokens, shape.decode_count)
    apart = [f.step_flops(cfg, s).total for s in (prefill, decode)]
    assert f.step_flops(cfg, shape).total == sum(apart)
    moved = f.step_bytes(cfg, shape, 2).total
    assert moved <= sum(f.step_bytes(cfg, s, 2).total for s in (prefill, decode))
    kv = f.kv_bytes(cfg, f.cache_tokens_read(shape), 2)
    assert moved >= kv


@given(shapes, st.sampled_from(list(ODD.values())))
def test_bytes_scale_with_the_element(shape: PlanShape, cfg: ModelConfig) -> None:
    assert f.step_bytes(cfg, shape, 4).total == 2 * f.step_bytes(cfg, shape, 2).total


def test_an_empty_step_costs_nothing() -> None:
    cfg = config_of("llama-3-8b")
    assert f.step_flops(cfg, PlanShape()).total == 0
    assert f.step_bytes(cfg, PlanShape(), 2).total == 0


def test_a_chunk_that_samples_nothing_reads_no_output_projection() -> None:
    cfg = config_of("llama-3-8b")
    silent = f.step_bytes(cfg, PlanShape(prefill=((512, 0),)), 2)
    assert silent.projection_sample == 0
    assert f.step_flops(cfg, PlanShape(prefill=((512, 0),))).projection_sample == 0


def test_single_stream_decode_reads_the_published_sizes() -> None:
    # weights read a token, without the embedding's unread rows: 2.47, 13.2 and 15.0 GB for the three usual shapes
    sizes = {"llama-1b": 2.47e9, "llama-2-7b": 13.2e9, "llama-3-8b": 15.0e9}
    for name, expected in sizes.items():
        assert f.weights_read_bytes(config_of(name), 2) == pytest.approx(expected, rel=0.005)


def test_attention_alone_agrees_with_the_step() -> None:
    cfg = config_of("llama-3-8b")
    step = f.step_flops(cfg, f.prefill_shape(300, batch=2, context=50)).attention
    assert f.attention_flops(2, 32, 300, 350, 128) * cfg.num_layers == step
    assert f.attention_flops(1, 1, 4, 4, 1, causal=False) == 4 * 16


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="float16"):
        f.itemsize_of("int3")
