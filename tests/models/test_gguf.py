"""GGUF files: the folder's logits, quantized ones near them, and damage of every kind refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from feeding import cut, whole_logits

from pdlab.core.errors import PdlabError, WeightsError
from pdlab.models.catalogue import config_of
from pdlab.models.loading import load

Folder = Callable[..., tuple[Path, Any]]
TOKENS = list(range(3, 50))


def write_gguf(path: Path, theirs: Any, architecture: str, quantize: bool = False) -> None:
    """A GGUF file of transformers' model by the gguf package's own writer, q and k reordered as converters do."""
    import gguf

    c = theirs.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    writer.add_key_length(c.head_dim)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], c.num_hidden_layers)
    for name, tensor in theirs.state_dict().items():
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = c.num_attention_heads if "q_proj" in name else c.num_key_value_heads
            tensor = tensor.view(heads, 2, c.head_dim // 2, -1).transpose(1, 2).reshape(tensor.shape)
        values = tensor.numpy().astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q8_0 if quantize and values.ndim == 2 and values.shape[1] % 32 == 0 else None
        stem, _, part = name.rpartition(".")
        data = values if kind is None else gguf.quants.quantize(values, kind)
        writer.add_tensor(f"{names.get_name(stem)}.{part}", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(("shape", "architecture"), [("llama-mha-tied", "llama"), ("qwen3-qk-norm-head24", "qwen3")])
def test_gguf_gives_the_logits_of_the_folder(folder: Folder, tmp_path: Path, shape: str, architecture: str) -> None:
    path, theirs = folder(shape)
    write_gguf(file := tmp_path / "m.gguf", theirs, architecture)
    loaded = load(file)
    assert torch.equal(whole_logits(loaded.model, TOKENS), whole_logits(load(path).model, TOKENS))
    assert loaded.tokenizer is None
    want = {**vars(config_of(path)), "name": "m", "bos_token_id": None, "eos_token_ids": (), "pad_token_id": None}
    assert vars(config_of(file)) == want


def test_quantized_gguf_is_near_the_folder(folder: Folder, tmp_path: Path) -> None:
    path, theirs = folder("mistral-mqa")
    write_gguf(file := tmp_path / "m.gguf", theirs, "llama", quantize=True)
    exact = whole_logits(load(path).model, TOKENS)
    error = (whole_logits(load(file).model, TOKENS) - exact).square().mean().sqrt() / exact.std()
    assert 1e-4 < error < 0.05  # 8 bits a weight


@pytest.mark.parametrize("keep", [0.0, 0.00005, 0.002, 0.3, 0.9999])
def test_a_cut_gguf_is_refused(folder: Folder, tmp_path: Path, keep: float) -> None:
    write_gguf(file := tmp_path / "m.gguf", folder("llama-mha-tied")[1], "llama")
    cut(file, keep)
    with pytest.raises(WeightsError, match=r"m\.gguf .*no whole GGUF file"):
        load(file)


def test_a_gguf_with_altered_bytes_is_read_or_refused_but_never_crashes(folder: Folder, tmp_path: Path) -> None:
    write_gguf(file := tmp_path / "m.gguf", folder("llama-mha-tied")[1], "llama")
    good, rng = file.read_bytes(), np.random.default_rng(0)
    refused = 0
    for _ in range(250):
        altered = bytearray(good)
        for at in rng.integers(0, 4000, 3):  # metadata and the list of tensors
            altered[at] = rng.integers(0, 256)
        file.write_bytes(altered)
        try:
            load(file)
        except PdlabError:
            refused += 1
    assert refused > 50


def test_a_gguf_of_another_architecture_is_refused(folder: Folder, tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(file := tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(PdlabError, match="'mamba'"):
        load(file)
