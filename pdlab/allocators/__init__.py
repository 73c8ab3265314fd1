"""KV-cache memory as integers: which slots hold which request's tokens. No torch; the executor owns the tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdlab.allocators.interface import Allocator
    from pdlab.core.config import EngineConfig


def make_allocator(config: EngineConfig, capacity: int, *, max_len: int) -> Allocator:
    """The allocator that `config.kv_allocator` names, over `capacity` slots, for requests of at most `max_len` tokens.

    CapacityError when not even one page, or one request of the scheme's smallest reservation, would fit.
    """
    from pdlab.allocators.paged import Paged

    return Paged(capacity, config.page_size, prefix_reuse=config.prefix_reuse)
