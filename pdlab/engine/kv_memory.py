"""How much KV memory a model gets on a device: what weights and a step's activations leave."""

from __future__ import annotations

import torch

from pdlab.core.config import EngineConfig
from pdlab.core.errors import CapacityError
from pdlab.models.model import Model

CPU_KV_BYTES = 1 << 28  # without a setting: this much on a CPU, or one request of full length, if a quarter of RAM is free


def kv_capacity(config: EngineConfig, model: Model, max_len: int) -> int:
    """KV slots: the setting, or what memory and utilization leave, and never more than all requests could fill.

    CapacityError says what would fit.
    """
    per_token = model.config.kv_bytes_per_token(torch.empty(0, dtype=model.dtype).element_size())
    page = config.page_size
    most = min(config.max_batch_requests, config.max_batch_tokens) * (-(-max_len // page) * page)
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # what loading and laying out weights left behind would count as taken
        free = torch.cuda.mem_get_info(model.device)[0] - _workspace_bytes(config, model)
        fits = int(free * config.kv_memory_utilization) // per_token
    else:
        import psutil

        available = psutil.virtual_memory().available
        fits = available // 4 // per_token
        most = min(most, max(CPU_KV_BYTES // per_token, -(-max_len // page) * page))
    if config.kv_capacity_tokens is not None:
        if config.kv_capacity_tokens > fits:
            raise CapacityError(
                f"kv_capacity_tokens={config.kv_capacity_tokens:,} needs {config.kv_capacity_tokens * per_token / 1e9:.1f} GB",
                f"{max(fits, 0):,} tokens would fit beside the model",
            )
        return config.kv_capacity_tokens
    tokens = min(fits, most) // page * page
    if tokens < page:
        raise CapacityError(
            f"{model.config.name} leaves no room for a page of {page} tokens", "use a smaller model, or a dtype of two bytes"
        )
    return tokens


def _workspace_bytes(config: EngineConfig, model: Model) -> int:
    """A step's largest activations, twice over, and float32 logits with their sorted copy."""
    c, size = model.config, torch.empty(0, dtype=model.dtype).element_size()
    widest = max(2 * c.ffn_size, c.q_size + 2 * c.kv_size, 4 * c.hidden_size)
    rows = min(config.max_batch_requests, config.max_batch_tokens)
    return 2 * config.max_batch_tokens * (widest + 4 * c.hidden_size) * size + 12 * rows * c.vocab_size
