"""GPT-2 style: LayerNorm, learned positions, full heads, tanh-GELU, biases everywhere, tied embedding."""

from __future__ import annotations

import torch

from pdlab.kernels.ops import HeadWeights, LayerWeights, NormWeights
from pdlab.models.config import ModelConfig
from pdlab.models.model import Weights
from pdlab.models.source import WeightSource


def build(config: ModelConfig, source: WeightSource) -> Weights:
    """Packed weights. Hugging Face stores GPT-2's linear weights [in, out], so each is transposed once here."""
    c, h = config, config.hidden_size

    def layer_norm(name: str) -> NormWeights:
        weight, bias = (source.take([f"{name}.{part}"], [(h,)]) for part in ("weight", "bias"))
        return NormWeights(weight, bias, c.norm_eps)

    def linear(name: str, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        weight = source.take([f"{name}.weight"], [(columns, rows)], transpose=True)
        return weight, source.take([f"{name}.bias"], [(rows,)])

    embed = source.take(["transformer.wte.weight"], [(c.vocab_size, h)])
    positions = source.take(["transformer.wpe.weight"], [(c.max_context, h)])
    layers = []
    for i in range(c.num_layers):
        layer = f"transformer.h.{i}"
        qkv = linear(f"{layer}.attn.c_attn", 3 * h, h)
        out = linear(f"{layer}.attn.c_proj", h, h)
        up = linear(f"{layer}.mlp.c_fc", c.ffn_size, h)
        down = linear(f"{layer}.mlp.c_proj", h, c.ffn_size)
        norms = layer_norm(f"{layer}.ln_1"), layer_norm(f"{layer}.ln_2")
        layers.append(
            LayerWeights(norms[0], qkv[0], qkv[1], None, None, out[0], out[1], norms[1], up[0], up[1], down[0], down[1])
        )
    proj = embed if c.tie_embeddings else source.take(["lm_head.weight"], [(c.vocab_size, h)])
    return Weights(embed, positions, layers, HeadWeights(layer_norm("transformer.ln_f"), proj))
