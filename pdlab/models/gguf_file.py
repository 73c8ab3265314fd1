"""GGUF files of the LLaMA architecture (and Qwen3's): weights dequantized, configuration and tokenizer from the metadata.

Two things to undo. The writer reorders the rows of q and k so that rotary pairs are neighbours (2 i, 2 i + 1); this
package rotates halves (i, i + D/2), so within each head the rows go back: [D/2, 2] -> [2, D/2]. Left out, the model still
answers easy questions, while its loss doubles. And what is not quantized is a read-only view of the file: it is copied.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pdlab.core.errors import UnknownModel, WeightsError
from pdlab.models.config import ModelConfig

if TYPE_CHECKING:
    import torch

    from pdlab.models.tokenizer import TrainedTokenizer

ARCHITECTURES = ("llama", "qwen3")
PERMUTED = ("llama",)
_CONTROL = 3  # token type of special tokens

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; an unknown name stays."""
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if block and block[2] in _NAMES:
        return f"model.layers.{block[1]}.{_NAMES[block[2]]}.{block[3]}"
    stem, _, part = name.rpartition(".")
    return f"{_NAMES[stem]}.{part}" if stem in _NAMES else name


@dataclass(frozen=True)
class Stored:
    """One tensor in the file: dimensions outermost first, the ggml type's number, and its bytes."""

    shape: tuple[int, ...]
    kind: int
    data: np.ndarray


_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class _Header:
    """Reads the metadata one value after the other. (The gguf package's reader makes three NumPy views a value: seconds
    for a vocabulary; this takes a tenth of one. Its dequantization is used as it is.)"""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def take(self, form: str) -> Any:
        value = struct.unpack_from("<" + form, self.data, self.at)
        self.at += struct.calcsize("<" + form)
        return value[0] if len(value) == 1 else value

    def string(self) -> str:
        (size,) = struct.unpack_from("<Q", self.data, self.at)
        start, self.at = self.at + 8, self.at + 8 + size
        if self.at > len(self.data):
            raise ValueError("a name runs past the end of the file")
        return self.data[start : self.at].decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.take(_SCALARS[kind])
        kind, count = self.take("IQ")
        if kind in _SCALARS:
            values = self.take(f"{count}{_SCALARS[kind]}")
            return list(values) if count != 1 else [values]
        return [self.value(kind) for _ in range(count)]


def parse(data: mmap.mmap) -> tuple[dict[str, Any], dict[str, Stored]]:
    """(metadata, tensors) of a GGUF file, version 2 or 3; ValueError, struct.error or KeyError where it makes no sense."""
    import gguf

    header = _Header(data)
    magic, version, tensors, values = header.take("4sIQQ")
    if magic != b"GGUF" or version not in (2, 3):
        raise ValueError(f"it begins with {magic!r}, version {version}, instead of GGUF 2 or 3")
    fields = {}
    for _ in range(values):
        key = header.string()
        fields[key] = header.value(header.take("I"))
    infos = []
    for _ in range(tensors):
        name, rank = header.string(), header.take("I")
        shape = tuple(header.take("Q") for _ in range(rank))[::-1]
        infos.append((name, shape, *header.take("IQ")))
    start = -(-header.at // (align := fields.get("general.alignment", 32))) * align
    stored = {}
    for name, shape, kind, offset in infos:
        block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        size = math.prod(shape) // block * block_bytes
        if (end := start + offset + size) > len(data):
            raise ValueError(f"tensor {name!r} should end at byte {end:,}")
        stored[name] = Stored(shape, kind, np.frombuffer(data, np.uint8, size, start + offset))
    return fields, stored


def dequantize(stored: Stored) -> np.ndarray:
    """Float values in a writable array of the tensor's shape."""
    import gguf

    kind = gguf.GGMLQuantizationType(stored.kind)
    if kind in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16):
        values = stored.data.view(np.float32 if kind == gguf.GGMLQuantizationType.F32 else np.float16)
        return values.reshape(stored.shape).copy()
    rows, row_bytes = stored.shape[0], stored.data.size // stored.shape[0]
    while rows % 2 == 0 and row_bytes < 1 << 15:  # gguf works on 16 rows at a time: fewer, longer rows are 4 times faster
        rows, row_bytes = rows // 2, row_bytes * 2
    return gguf.quants.dequantize(stored.data.reshape(rows, row_bytes), kind).reshape(stored.shape)


class GgufCheckpoint:
    """source.Checkpoint over a GGUF file; `config` is what its metadata says."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._fields, stored = parse(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except (ValueError, KeyError, ArithmeticError, MemoryError, RecursionError, struct.error) as error:
            size = path.stat().st_size
            raise WeightsError(f"{path} ({size:,} bytes) is no whole GGUF file: {error}", "fetch it again") from error
        self._tensors = {hf_name(name): tensor for name, tensor in stored.items()}
        self.architecture = self._field("general.architecture")
        if self.architecture not in ARCHITECTURES:
            raise UnknownModel(f"{path} holds a {self.architecture!r} model", f"supported in GGUF: {', '.join(ARCHITECTURES)}")
        try:
            self.config = self._config()
        except (TypeError, ValueError, ArithmeticError) as error:
            raise WeightsError(f"{path} describes no model: {error}", "its metadata are damaged: fetch it again") from error

    def _field(self, key: str, default: Any = None) -> Any:
        return self._fields.get(key, default)

    def _size(self, key: str) -> Any:
        value = self._field(f"{self.architecture}.{key}")
        if value is None:
            raise WeightsError(
                f"{self.path} lacks {self.architecture}.{key}", "its metadata should say every size of the model"
            )
        return value

    def _config(self) -> ModelConfig:
        hidden, heads = self._size("embedding_length"), self._size("attention.head_count")
        scaling = self._field(f"{self.architecture}.rope.scaling.type", "none")
        if scaling != "none" or "rope_freqs.weight" in self._tensors:
            hint = "use the model's Hugging Face folder, whose config.json says how"
            raise WeightsError(f"{self.path} scales its rotary embedding, which is not read from GGUF", hint)
        eos = self._field("tokenizer.ggml.eos_token_id")
        embed = self._tensors.get("model.embed_tokens.weight")
        if embed is None:
            raise WeightsError(f"{self.path} has no tensor 'token_embd.weight'", "the file is incomplete: fetch it again")
        return ModelConfig(
            name=self.path.stem,
            family="llama",
            vocab_size=embed.shape[0],
            hidden_size=hidden,
            num_layers=self._size("block_count"),
            num_heads=heads,
            num_kv_heads=self._field(f"{self.architecture}.attention.head_count_kv", heads),
            head_dim=self._field(f"{self.architecture}.attention.key_length", hidden // heads),
            ffn_size=self._size("feed_forward_length"),
            max_context=self._size("context_length"),
            # stored as float32: 9.9999997e-06 means 1e-5
            norm_eps=float(f"{self._size('attention.layer_norm_rms_epsilon'):.6g}"),
            tie_embeddings="lm_head.weight" not in self._tensors,
            rope_theta=float(self._field(f"{self.architecture}.rope.freq_base", 10000.0)),
            qkv_bias="model.layers.0.self_attn.q_proj.bias" in self._tensors,
            out_bias="model.layers.0.self_attn.o_proj.bias" in self._tensors,
            qk_norm=self.architecture == "qwen3",
            bos_token_id=self._field("tokenizer.ggml.bos_token_id"),
            eos_token_ids=() if eos is None else (eos,),
            pad_token_id=self._field("tokenizer.ggml.padding_token_id"),
        )

    def names(self) -> set[str]:
        return set(self._tensors)

    def where(self, name: str) -> str:
        return str(self.path)

    def read(self, name: str) -> torch.Tensor:
        import torch

        out = torch.from_numpy(dequantize(self._tensors[name]))
        if self.architecture in PERMUTED and (".q_proj." in name or ".k_proj." in name):
            half = self.config.head_dim // 2
            if out.numel() and len(out) % (2 * half) == 0:  # a wrong size is for whoever takes it to refuse
                out = out.view(-1, half, 2, *out.shape[1:]).transpose(1, 2).reshape(out.shape)
        return out

    def tokenizer(self) -> TrainedTokenizer | None:
        """A byte-level BPE tokenizer from the metadata; None for kinds other than `smollm` and `gpt-2`."""
        kind = self._field("tokenizer.ggml.pre")
        if self._field("tokenizer.ggml.model") != "gpt2" or kind not in ("smollm", "gpt-2"):
            return None
        from tokenizers import AddedToken, decoders, models, pre_tokenizers
        from tokenizers import Tokenizer as Inner

        from pdlab.models.tokenizer import TrainedTokenizer

        tokens: list[str] = self._field("tokenizer.ggml.tokens")
        merges = [tuple(m.split(" ")) for m in self._field("tokenizer.ggml.merges")]
        inner = Inner(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
        steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
        if kind == "smollm":
            steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
        inner.pre_tokenizer = pre_tokenizers.Sequence(steps)
        inner.decoder = decoders.ByteLevel()
        types = self._field("tokenizer.ggml.token_type", [])
        special = [AddedToken(t, special=True, normalized=False) for t, kind in zip(tokens, types) if kind == _CONTROL]
        inner.add_special_tokens(special)
        bos = self.config.bos_token_id
        names = {"bos_token": bos, "eos_token": next(iter(self.config.eos_token_ids), None)}
        return TrainedTokenizer(
            inner,
            bos=bos,
            add_bos=bool(self._field("tokenizer.ggml.add_bos_token", False)),
            template=self._field("tokenizer.chat_template"),
            variables={key: tokens[i] for key, i in names.items() if i is not None},
        )


def read_config(path: Path) -> ModelConfig:
    """Configuration of a GGUF file from its metadata."""
    return GgufCheckpoint(path).config
