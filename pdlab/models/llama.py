"""LLaMA style: RMSNorm, rotary positions, grouped queries, SwiGLU. Also Mistral, Qwen2 (biases) and Qwen3 (q/k norms)."""

from __future__ import annotations

import torch

from pdlab.kernels.ops import HeadWeights, LayerWeights, NormWeights
from pdlab.models.config import ModelConfig
from pdlab.models.model import Weights
from pdlab.models.source import WeightSource


def build(config: ModelConfig, source: WeightSource) -> Weights:
    """Packed weights, asked for by their Hugging Face names."""
    c, h, d = config, config.hidden_size, config.head_dim

    def rms(name: str, size: int = h) -> NormWeights:
        return NormWeights(source.take([name + ".weight"], [(size,)]), None, c.norm_eps)

    def linear(
        prefix: str, names: list[str], rows: list[int], columns: int, bias: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        weight = source.take([f"{prefix}.{n}.weight" for n in names], [(r, columns) for r in rows])
        return weight, source.take([f"{prefix}.{n}.bias" for n in names], [(r,) for r in rows]) if bias else None

    embed = source.take(["model.embed_tokens.weight"], [(c.vocab_size, h)])
    layers = []
    for i in range(c.num_layers):
        layer = f"model.layers.{i}"
        attn, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        qkv = linear(attn, ["q_proj", "k_proj", "v_proj"], [c.q_size, c.kv_size, c.kv_size], h, c.qkv_bias)
        out = linear(attn, ["o_proj"], [h], c.q_size, c.out_bias)
        up = linear(mlp, ["gate_proj", "up_proj"], [c.ffn_size, c.ffn_size], h, c.mlp_bias)
        down = linear(mlp, ["down_proj"], [h], c.ffn_size, c.mlp_bias)
        q_norm, k_norm = (rms(f"{attn}.{n}", d) if c.qk_norm else None for n in ("q_norm", "k_norm"))
        norms = rms(f"{layer}.input_layernorm"), rms(f"{layer}.post_attention_layernorm")
        layers.append(
            LayerWeights(norms[0], qkv[0], qkv[1], q_norm, k_norm, out[0], out[1], norms[1], up[0], up[1], down[0], down[1])
        )
    proj = embed if c.tie_embeddings else source.take(["lm_head.weight"], [(c.vocab_size, h)])
    return Weights(embed, None, layers, HeadWeights(rms("model.norm"), proj))
