"""Tiny models of transformers in odd shapes, every weight and bias random."""

from __future__ import annotations

from typing import Any

import pytest
import torch

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 5000.0,
}
_ODD: dict[str, Any] = {"vocab_size": 301, "intermediate_size": 130, "max_position_embeddings": 160, "num_hidden_layers": 2}
_GPT2: dict[str, Any] = {"vocab_size": 211, "n_positions": 150, "n_layer": 2}

# name -> (transformers' configuration class, its arguments)
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa9to3-head24-untied-biases-llama3": (
        "LlamaConfig",
        {
            **_ODD,
            "hidden_size": 72,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 24,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": LLAMA3,
        },
    ),
    "llama-mha-tied": ("LlamaConfig", {**_ODD, "hidden_size": 48, "num_attention_heads": 4, "tie_word_embeddings": True}),
    "mistral-mqa": (
        "MistralConfig",
        {**_ODD, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 1, "sliding_window": None},
    ),
    "qwen2-qkv-biases": ("Qwen2Config", {**_ODD, "hidden_size": 60, "num_attention_heads": 6, "num_key_value_heads": 2}),
    "qwen3-qk-norm-head24": (
        "Qwen3Config",
        {**_ODD, "hidden_size": 40, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 24, "rms_norm_eps": 1e-6},
    ),
    "gpt2-tied": ("GPT2Config", {**_GPT2, "n_embd": 72, "n_head": 3}),
    "gpt2-untied-ffn130": ("GPT2Config", {**_GPT2, "n_embd": 50, "n_head": 5, "n_inner": 130, "tie_word_embeddings": False}),
}


def make(shape: str) -> Any:
    """transformers' model of this shape, seeded, in float32, weights large enough that logits differ by several units."""
    transformers = pytest.importorskip("transformers")
    kind, arguments = SHAPES[shape]
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**arguments)).float().eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            around, spread = (1.0, 0.2) if parameter.dim() == 1 and name.endswith("weight") else (0.0, 0.2)
            parameter.copy_(around + spread * torch.randn(parameter.shape, generator=generator))
    return model
