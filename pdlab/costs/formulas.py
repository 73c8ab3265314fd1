"""FLOPs and bytes of every model operation, for any step: prefill chunks and decodes, mixed.

Symbols, as in kernels.ops: T rows of the step's matrix products, S rows that sample, H hidden, N query heads, K KV heads,
D head size, F FFN, V vocabulary, L layers; P the (query, key) pairs that causal attention scores (PlanShape.attention_pairs);
C the cached tokens that attention reads, each request's once.

    operation           calls  FLOPs                     bytes / itemsize (weights once, activations once)
    embedding             1    0                         2TH (+ TH for learned positions)
    norm_qkv_rope         L    2 T H (N + 2K) D          H (N + 2K) D + norms and biases + TH + T N D + 2 T K D
    attention             L    4 N D P                   2 T N D + 2 K D C
    out_residual          L    2 T N D H                 N D H (+ H) + T N D + 2 T H
    norm_mlp_up           L    2 T H U                   H U + norms and biases + TH + TF       U = 2F (SwiGLU) or F
    down_residual         L    2 T F H                   F H (+ H) + T F + 2 T H
    projection_sample     1    2 S H V                   V H + H + S H; logits are never written

A multiply-add is 2 FLOPs; only matrix products are counted, as torch.utils.flop_counter does: norms, rotary embedding,
softmax and activations run beside them on other units and are below one per cent. Bytes are the fewest that the operation
can move if every operation of contract 5 is one fused kernel: each input read once, each output written once, nothing in
between. So time computed from them is a floor.

Sources: the products follow from the weights' shapes in kernels.ops; 4 N D P is Q K^T and P V, 2 D each for every pair
(Dao et al., FlashAttention, 2022, section 3.1, counts the same); KV bytes a token 2 L K D itemsize (Kwon et al.,
PagedAttention, 2023, section 3).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from pdlab.core.errors import ConfigError
from pdlab.core.plan import PlanShape
from pdlab.models.config import ModelConfig

ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}


def itemsize_of(dtype: str) -> int:
    """Bytes of an element of `dtype`."""
    if dtype not in ITEMSIZE:
        raise ConfigError(f"dtype={dtype!r} has no known size", f"use one of: {', '.join(ITEMSIZE)}")
    return ITEMSIZE[dtype]


@dataclass(frozen=True)
class OpCosts:
    """One number (FLOPs, or bytes) an operation, summed over the layers."""

    embedding: float
    norm_qkv_rope: float
    attention: float
    out_residual: float
    norm_mlp_up: float
    down_residual: float
    projection_sample: float

    @property
    def total(self) -> float:
        here = self.embedding + self.norm_qkv_rope + self.attention + self.out_residual
        return here + self.norm_mlp_up + self.down_residual + self.projection_sample

    def items(self) -> Iterator[tuple[str, float]]:
        return ((name, getattr(self, name)) for name in OPERATIONS)

    def as_dict(self) -> dict[str, float]:
        return dict(self.items())


OPERATIONS = tuple(f.name for f in fields(OpCosts))


def prefill_shape(prompt: int, batch: int = 1, context: int = 0) -> PlanShape:
    """`batch` prompts of `prompt` new tokens each, after `context` cached ones, the last of each sampling."""
    return PlanShape(prefill=((prompt, context),) * batch, sampled=batch)


def decode_shape(batch: int, kv_tokens: int) -> PlanShape:
    """One new token for each of `batch` requests, each attending to `kv_tokens` tokens, its own included."""
    return PlanShape(decode_count=batch, decode_kv_tokens=batch * kv_tokens, sampled=batch)


def _up_rows(cfg: ModelConfig) -> int:
    return 2 * cfg.ffn_size if cfg.family == "llama" else cfg.ffn_size


def score_rectangle(shape: PlanShape) -> int:
    """(query, key) pairs of an implementation that computes whole rectangles and masks afterwards: n (c + n) a chunk."""
    return shape.decode_kv_tokens + sum(n * (c + n) for n, c in shape.prefill)


def step_flops(cfg: ModelConfig, shape: PlanShape, *, masked_too: bool = False) -> OpCosts:
    """FLOPs of one step. `masked_too` counts the pairs that the causal mask discards, as plain attention computes them."""
    t, layers = shape.new_tokens, cfg.num_layers
    pairs = score_rectangle(shape) if masked_too else shape.attention_pairs
    return OpCosts(
        embedding=0,
        norm_qkv_rope=2 * t * cfg.hidden_size * (cfg.q_size + 2 * cfg.kv_size) * layers,
        attention=4 * cfg.q_size * pairs * layers,
        out_residual=2 * t * cfg.q_size * cfg.hidden_size * layers,
        norm_mlp_up=2 * t * cfg.hidden_size * _up_rows(cfg) * layers,
        down_residual=2 * t * cfg.ffn_size * cfg.hidden_size * layers,
        projection_sample=2 * shape.sampled * cfg.hidden_size * cfg.vocab_size,
    )


def _weight_elements(cfg: ModelConfig) -> OpCosts:
    """Elements of the weights that a step reads whole, an operation; the embedding's rows are looked up, so not here."""
    h, f, qkv = cfg.hidden_size, cfg.ffn_size, cfg.q_size + 2 * cfg.kv_size
    norm = h if cfg.family == "llama" else 2 * h  # LayerNorm has a bias too
    qk_norm = 2 * cfg.head_dim if cfg.qk_norm else 0
    return OpCosts(
        embedding=0,
        norm_qkv_rope=cfg.num_layers * (h * qkv + norm + qk_norm + (qkv if cfg.qkv_bias else 0)),
        attention=0,
        out_residual=cfg.num_layers * (cfg.q_size * h + (h if cfg.out_bias else 0)),
        norm_mlp_up=cfg.num_layers * (h * _up_rows(cfg) + norm + (_up_rows(cfg) if cfg.mlp_bias else 0)),
        down_residual=cfg.num_layers * (f * h + (h if cfg.mlp_bias else 0)),
        projection_sample=cfg.vocab_size * h + norm,
    )


def weights_read_bytes(cfg: ModelConfig, itemsize: int) -> int:
    """Weights that every step reads, whatever its batch: all but the embedding's rows that aren't looked up."""
    return int(_weight_elements(cfg).total) * itemsize


def weights_bytes(cfg: ModelConfig, itemsize: int) -> int:
    """All weights as stored: a tied embedding counts once."""
    positions = cfg.max_context * cfg.hidden_size if cfg.family == "gpt2" else 0
    embedding = 0 if cfg.tie_embeddings else cfg.vocab_size * cfg.hidden_size
    return weights_read_bytes(cfg, itemsize) + (embedding + positions) * itemsize


def kv_bytes(cfg: ModelConfig, tokens: int, itemsize: int) -> int:
    """K and V of `tokens` tokens over all layers."""
    return cfg.kv_bytes_per_token(itemsize) * tokens


def cache_tokens_read(shape: PlanShape) -> int:
    """C: tokens of K and V that attention reads, each request's once."""
    return shape.decode_kv_tokens + sum(n + c for n, c in shape.prefill)


def step_bytes(cfg: ModelConfig, shape: PlanShape, itemsize: int) -> OpCosts:
    """Fewest bytes that one step moves through the device's memory."""
    t, s, h, f, layers = shape.new_tokens, shape.sampled, cfg.hidden_size, cfg.ffn_size, cfg.num_layers
    q, kv = cfg.q_size, cfg.kv_size
    weights = _weight_elements(cfg)
    active = 1 if t else 0  # an empty step reads no weights

    def total(weight_elements: float, activations: int) -> float:
        return (active * weight_elements + activations) * itemsize

    return OpCosts(
        embedding=total(0, t * h * (3 if cfg.family == "gpt2" else 2)),
        norm_qkv_rope=total(weights.norm_qkv_rope, layers * t * (h + q + 2 * kv)),
        attention=total(0, layers * (2 * t * q + 2 * kv * cache_tokens_read(shape))),
        out_residual=total(weights.out_residual, layers * t * (q + 2 * h)),
        norm_mlp_up=total(weights.norm_mlp_up, layers * t * (h + f)),
        down_residual=total(weights.down_residual, layers * t * (f + 2 * h)),
        projection_sample=total(weights.projection_sample if s else 0, s * h),
    )


def attention_flops(batch: int, heads: int, queries: int, keys: int, head_dim: int, *, causal: bool = True) -> float:
    """FLOPs of one attention call. Causal: the queries are the last `queries` of `keys` positions."""
    pairs = queries * keys - queries * (queries - 1) // 2 if causal else queries * keys
    return 4.0 * batch * heads * head_dim * pairs


def plain_attention_bytes(batch: int, heads: int, tokens: int, head_dim: int, itemsize: int = 2, passes: int = 8) -> float:
    """Bytes of plain attention over whole prompts: the n x n scores pass through memory `passes` times, q, k, v and o once.

    Eight passes: the product writes them, scaling, masking and softmax read and write them, the second product reads them.
    """
    return 1.0 * itemsize * batch * heads * (passes * tokens * tokens + 4 * tokens * head_dim)
