"""KV-cache memory as integers: which slots hold which request's tokens. No torch; the executor owns the tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdlab.allocators.interface import Allocator
    from pdlab.core.config import EngineConfig


def make_allocator(config: EngineConfig, capacity: int, *, max_len: int) -> Allocator:
    """The allocator that `config.kv_allocator` names, over `capacity` slots, for requests of at most `max_len` tokens.

    CapacityError when not even one page, or extent, fits. The allocator's own `capacity` is that of its whole pages.
    """
    from pdlab.allocators.contiguous_pool import ContiguousPool
    from pdlab.allocators.hybrid import Hybrid
    from pdlab.allocators.paged import Paged
    from pdlab.allocators.per_request import PerRequest

    c = config
    if c.kv_allocator == "contiguous_pool":
        return ContiguousPool(capacity, quantum=c.page_size, fit=c.pool_fit, headroom=c.pool_headroom)
    if c.kv_allocator == "per_request":
        return PerRequest(capacity, max_len=max_len, quantum=c.page_size, promised=c.promised_output_tokens)
    if c.kv_allocator == "hybrid":
        return Hybrid(
            capacity,
            c.page_size,
            threshold=c.hybrid_threshold,
            waste=c.hybrid_waste,
            max_len=max_len,
            promised=c.promised_output_tokens,
            fit=c.pool_fit,
            prefix_reuse=c.prefix_reuse,
        )
    return Paged(capacity, c.page_size, prefix_reuse=c.prefix_reuse)
