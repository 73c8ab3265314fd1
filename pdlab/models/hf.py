"""A Hugging Face folder: config.json, safetensors (one file, or shards with an index), tokenizer.json.

`pytorch_model.bin` is read where there is no safetensors file (old GPT-2 exports), by torch's unpickler that admits
tensors only. Any way of attention or rotary scaling that this package does not compute is an error, never ignored.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdlab.core.errors import UnknownModel, WeightsError
from pdlab.models.config import ModelConfig, RopeScaling

if TYPE_CHECKING:
    import torch

    from pdlab.models.tokenizer import TrainedTokenizer

LLAMA_TYPES = ("llama", "mistral", "qwen2", "qwen3")


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} cannot be read as JSON: {error}", "fetch the file again") from error
    if not isinstance(content, dict):
        raise WeightsError(f"{path} holds a {type(content).__name__}", "it should be a JSON object")
    return content


def read_config(folder: Path) -> ModelConfig:
    """ModelConfig of the folder's config.json; generation_config.json adds end tokens. Reads no weights."""
    path = folder / "config.json"
    if not path.is_file():
        raise UnknownModel(f"{folder} has no config.json", "use a folder as transformers' save_pretrained writes it")
    raw = read_json(path)
    generation = folder / "generation_config.json"
    more = read_json(generation) if generation.is_file() else {}
    try:
        tokens = {
            "bos_token_id": raw.get("bos_token_id"),
            "eos_token_ids": tuple(dict.fromkeys(_ids(raw.get("eos_token_id")) + _ids(more.get("eos_token_id")))),
            "pad_token_id": raw.get("pad_token_id"),
        }
        kind = raw["model_type"]
        if kind in LLAMA_TYPES:
            return _llama_config(folder, kind, raw, tokens)
        if kind == "gpt2":
            return _gpt2_config(folder, raw, tokens)
    except KeyError as error:
        raise WeightsError(f"{path} lacks {error.args[0]!r}", "it should say every size of the model") from error
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise WeightsError(f"{path} describes no model: {error}", "one of its values has the wrong type or size") from error
    raise UnknownModel(f"{path} describes a {kind!r} model", f"supported: {', '.join((*LLAMA_TYPES, 'gpt2'))}")


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    return () if value is None else (value,) if isinstance(value, int) else tuple(value)


def _refuse(folder: Path, raw: dict[str, Any], **wanted: Any) -> None:
    """WeightsError if a key that changes the computation has a value other than these; an absent key is the first one."""
    for key, values in wanted.items():
        if (value := raw.get(key, values[0])) not in values:
            raise WeightsError(f"{folder / 'config.json'}: {key}={value!r} is not supported", f"supported: {values}")


def _llama_config(folder: Path, kind: str, raw: dict[str, Any], tokens: dict[str, Any]) -> ModelConfig:
    _refuse(folder, raw, hidden_act=("silu", "swish"))
    heads = raw["num_attention_heads"]
    rope = raw.get("rope_parameters") or {}  # transformers 5; before: rope_theta and rope_scaling
    scaling = rope or raw.get("rope_scaling") or {}
    rule = scaling.get("rope_type", scaling.get("type", "default"))
    if rule not in ("default", "llama3"):
        raise WeightsError(f"{folder / 'config.json'}: rotary scaling {rule!r} is not supported", "supported: default, llama3")
    context = raw["max_position_embeddings"]
    if raw.get("sliding_window") and raw.get("use_sliding_window", kind == "mistral"):
        context = min(context, raw["sliding_window"])  # within one window, full attention is what the model does
    biased = bool(raw.get("attention_bias", False))
    return ModelConfig(
        name=folder.name,
        family="llama",
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        ffn_size=raw["intermediate_size"],
        max_context=context,
        norm_eps=raw["rms_norm_eps"],
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        rope_theta=float(rope.get("rope_theta", raw.get("rope_theta", 10000.0))),
        rope_scaling=None
        if rule == "default"
        else RopeScaling(
            float(scaling["factor"]),
            float(scaling["low_freq_factor"]),
            float(scaling["high_freq_factor"]),
            scaling["original_max_position_embeddings"],
        ),
        qkv_bias=biased or kind == "qwen2",
        out_bias=biased and kind != "qwen2",
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=kind == "qwen3",
        **tokens,
    )


def _gpt2_config(folder: Path, raw: dict[str, Any], tokens: dict[str, Any]) -> ModelConfig:
    _refuse(
        folder,
        raw,
        activation_function=("gelu_new", "gelu_pytorch_tanh"),
        scale_attn_weights=(True,),
        scale_attn_by_inverse_layer_idx=(False,),
        add_cross_attention=(False,),
    )
    hidden, heads = raw["n_embd"], raw["n_head"]
    return ModelConfig(
        name=folder.name,
        family="gpt2",
        vocab_size=raw["vocab_size"],
        hidden_size=hidden,
        num_layers=raw["n_layer"],
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        ffn_size=raw.get("n_inner") or 4 * hidden,
        max_context=raw["n_positions"],
        norm_eps=raw["layer_norm_epsilon"],
        tie_embeddings=bool(raw.get("tie_word_embeddings", True)),
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        **tokens,
    )


def safetensors_names(path: Path) -> set[str]:
    """Names in a safetensors file; raises WeightsError where the file is shorter or longer than its header says."""
    size = path.stat().st_size
    with path.open("rb") as file:
        try:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length)) if length < size else None
        except (struct.error, ValueError):
            header = None
    if not isinstance(header, dict):
        raise WeightsError(f"{path} ({size:,} bytes) is no whole safetensors file", "its header is cut off: fetch it again")
    header.pop("__metadata__", None)
    try:
        right = 8 + length + max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
    except (LookupError, TypeError, ValueError) as error:
        raise WeightsError(f"{path} has a header that says of a tensor no place", "fetch the file again") from error
    if size != right:
        raise WeightsError(f"{path} has {size:,} bytes", f"its header describes {right:,}: it is half-written, fetch it again")
    return set(header)


class FolderCheckpoint:
    """The weights of a Hugging Face folder, read tensor by tensor from memory-mapped files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file_of: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        index, single, pickled = (
            folder / n for n in ("model.safetensors.index.json", "model.safetensors", "pytorch_model.bin")
        )
        if index.is_file():
            where = read_json(index).get("weight_map")
            if not isinstance(where, dict) or not all(isinstance(shard, str) for shard in where.values()):
                raise WeightsError(f"{index} has no 'weight_map' of tensors and their files", "fetch the file again")
            shards = {name: folder / shard for name, shard in where.items()}
            for path in dict.fromkeys(shards.values()):
                if not path.is_file():
                    raise WeightsError(f"{path} is missing", f"{index.name} names it: the download is incomplete")
                there = safetensors_names(path)
                if lost := sorted(n for n, p in shards.items() if p == path and n not in there):
                    raise WeightsError(f"{path} has no tensor {lost[0]!r}", f"{index.name} says it is there: fetch both again")
            self._file_of = shards
        elif single.is_file():
            self._file_of = dict.fromkeys(safetensors_names(single), single)
        elif pickled.is_file():
            self._file_of = dict.fromkeys(self._unpickle(pickled), pickled)
        else:
            raise WeightsError(f"{folder} has no weights", f"it should hold {single.name}, or {index.name} and its shards")

    def _unpickle(self, path: Path) -> Any:
        import torch

        try:
            self._open[path] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # the unpickler raises many kinds
            raise WeightsError(
                f"{path} cannot be read as torch weights: {error}", "fetch it again, or use safetensors"
            ) from error
        return self._open[path]

    def names(self) -> set[str]:
        return set(self._file_of)

    def read(self, name: str) -> torch.Tensor:
        path = self._file_of[name]
        if path.suffix == ".bin":
            return self._open[path][name]
        from safetensors import SafetensorError, safe_open

        try:
            if path not in self._open:
                self._open[path] = safe_open(str(path), framework="pt", device="cpu")
            return self._open[path].get_tensor(name)
        except SafetensorError as error:
            raise WeightsError(f"{path} is no whole safetensors file: {error}", "fetch it again") from error

    def where(self, name: str) -> str:
        files = set(self._file_of.values())
        return str(self._file_of.get(name) or (files.pop() if len(files) == 1 else self.folder))


def read_tokenizer(folder: Path) -> TrainedTokenizer | None:
    """The folder's tokenizer.json with the special tokens and chat template beside it; None if there is none."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    from tokenizers import Tokenizer as Inner

    from pdlab.models.tokenizer import TrainedTokenizer

    try:
        inner = Inner.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise WeightsError(f"{path} cannot be read as a tokenizer: {error}", "fetch the file again") from error
    settings = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    special = {}
    for key in ("bos_token", "eos_token"):
        value = settings.get(key)
        special[key] = value.get("content") if isinstance(value, dict) else value
    template = settings.get("chat_template")
    if isinstance(template, list):  # several by name
        template = {t["name"]: t["template"] for t in template}.get("default")
    if (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    bos = inner.token_to_id(special["bos_token"]) if special["bos_token"] else None
    variables = {key: value for key, value in special.items() if value}
    return TrainedTokenizer(inner, bos=bos, add_bos=settings.get("add_bos_token"), template=template, variables=variables)
