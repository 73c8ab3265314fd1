"""From a name to a model ready to run: catalogue name, Hugging Face folder or hub id, GGUF file, or `random:NAME`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from pdlab.core.errors import DeviceUnavailable
from pdlab.models import gpt2, llama
from pdlab.models.catalogue import CATALOGUE, RANDOM, config_of, unknown_model
from pdlab.models.config import ModelConfig
from pdlab.models.model import Model
from pdlab.models.source import RandomSource, WeightSource
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


def load(name: str | Path, *, device: str | torch.device = "cpu", dtype: str = "float32", seed: int = 0) -> Loaded:
    """Loads a model onto `device` in `dtype` (float32, float16, bfloat16). `seed` matters for `random:` only."""
    if dtype not in DTYPES:
        raise DeviceUnavailable(f"dtype={dtype!r} is not possible for a model", f"choose one of: {', '.join(DTYPES)}")
    if str(device).startswith("cuda") and not torch.cuda.is_available():
        raise DeviceUnavailable(f"device={str(device)!r} is not on this machine", 'use device="cpu"')
    if str(name).startswith(RANDOM):
        config = config_of(name)
        model = build(config, RandomSource(config, device, DTYPES[dtype], seed))
        return Loaded(config, model, ByteTokenizer(config), "random")
    raise unknown_model(str(name), "" if str(name) not in CATALOGUE else f"for random weights use {RANDOM}{name}")
