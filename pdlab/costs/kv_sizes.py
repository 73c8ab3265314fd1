"""Which model, batch and dtype give a KV cache of a stated size? For claims that leave the shape out.

Besides the catalogue, published shapes too large to run here, as (layers, KV heads, head size, parameters):
each from its paper's model table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pdlab.costs.formulas import ITEMSIZE, itemsize_of


@dataclass(frozen=True)
class KvShape:
    """What a KV cache's size depends on, and how many weights come with it."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    parameters: float
    source: str

    def bytes_per_token(self, itemsize: int) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize


PUBLISHED = (
    KvShape("llama-2-13b", 40, 40, 128, 13.0e9, "Touvron et al., Llama 2, 2023"),
    KvShape("llama-65b", 80, 64, 128, 65.2e9, "Touvron et al., LLaMA, 2023, table 2"),
    KvShape("llama-2-70b", 80, 8, 128, 69.0e9, "Touvron et al., Llama 2, 2023"),
    KvShape("opt-66b", 64, 72, 128, 65.7e9, "Zhang et al., OPT, 2022, table 1"),
    KvShape("gpt-3-175b", 96, 96, 128, 174.6e9, "Brown et al., GPT-3, 2020, table 2.1"),
    KvShape("bloom-176b", 70, 112, 128, 176.2e9, "BigScience, BLOOM, 2022, table 3"),
)


@dataclass(frozen=True)
class KvSolution:
    """One way to reach the size. `fits`: weights and cache in the memory asked about (None: not asked)."""

    model: str
    batch: int
    dtype: str
    kv_bytes: int
    weights_bytes: float
    fits: bool | None


def known_shapes() -> list[KvShape]:
    """The catalogue's shapes and the published ones."""
    from pdlab.models.catalogue import config_of, list_entries

    shapes = []
    for entry in list_entries():
        c = config_of(entry.name)
        shapes.append(KvShape(entry.name, c.num_layers, c.num_kv_heads, c.head_dim, entry.parameters, entry.source))
    return shapes + list(PUBLISHED)


def kv_table(
    tokens: int,
    *,
    batches: Sequence[int] = (1,),
    dtypes: Iterable[str] = ("float16",),
    memory_bytes: float | None = None,
    shapes: Sequence[KvShape] | None = None,
) -> list[KvSolution]:
    """KV bytes of `batch` sequences of `tokens` tokens for every shape, batch and dtype; weights in the same dtype."""
    rows = []
    for shape in known_shapes() if shapes is None else shapes:
        for dtype in dtypes:
            size = itemsize_of(dtype)
            for batch in batches:
                cache, weights = batch * tokens * shape.bytes_per_token(size), shape.parameters * size
                fits = None if memory_bytes is None else cache + weights <= memory_bytes
                rows.append(KvSolution(shape.name, batch, dtype, cache, weights, fits))
    return rows


def solve_kv_models(
    target_bytes: float,
    tokens: int,
    *,
    tolerance: float = 0.125,
    batches: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
    dtypes: Iterable[str] = tuple(ITEMSIZE),
    memory_bytes: float | None = None,
    shapes: Sequence[KvShape] | None = None,
) -> list[KvSolution]:
    """The rows of kv_table within `tolerance` of `target_bytes`, smallest batch first.

    The default tolerance lets "nearly 8 GB" be anything from 7 GB to 9 GB, GiB included.
    """
    rows = kv_table(tokens, batches=batches, dtypes=dtypes, memory_bytes=memory_bytes, shapes=shapes)
    close = [r for r in rows if abs(r.kv_bytes - target_bytes) <= tolerance * target_bytes]
    return sorted(close, key=lambda r: (r.batch, r.weights_bytes, r.model, r.dtype))


def widest_multi_head_model(bytes_per_token: float, memory_bytes: float, itemsize: int) -> tuple[float, float]:
    """(hidden, layers) of the widest usual multi-head model with this much KV a token whose weights fit `memory_bytes`.

    With as many KV heads as query heads, KV a token is 2 L H itemsize and weights are about 12 L H^2 itemsize (4 H^2 for
    attention, 8 H^2 for the MLP). So L H is given, and H <= memory / (12 L H itemsize).
    """
    layers_times_hidden = bytes_per_token / (2 * itemsize)
    hidden = memory_bytes / (12 * layers_times_hidden * itemsize)
    return hidden, layers_times_hidden / hidden
