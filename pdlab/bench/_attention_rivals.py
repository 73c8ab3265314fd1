"""Other people's attention kernels, by the names that the tables use for them, each as attention(q, view).

    cudnn, fa2    torch's scaled_dot_product_attention with that kernel forced
    torch_math    the same with its plain products in float32
    article       plain attention as one writes it: two products in the inputs' dtype around a softmax of the n x n scores
    fa3           FlashAttention 3, where flash_attn_interface or vLLM's copy of it can be imported
    flashinfer    FlashInfer's paged decode with tensor cores, where it can be imported

None is needed. What cannot be imported is named with its reason, and a suite writes that into its table.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from pdlab.kernels.kv_view import KVView

Call = Callable[..., Any]
Found = tuple[dict[str, Call], dict[str, str]]  # what there is, and why the others are not

_SDPA = {"cudnn": "cudnn", "fa2": "flash", "torch_math": "math"}
# FlashAttention's own interface, then vLLM's, whose function takes its arguments in another order
_FA3 = ("flash_attn_interface", "vllm.vllm_flash_attn.flash_attn_interface")


def _sdpa(kernel: str, q: torch.Tensor, view: KVView) -> torch.Tensor:
    import torch.nn.functional as F
    from torch.nn.attention import sdpa_kernel

    from pdlab.kernels.library_attention import SDPA_KERNELS

    rows, k, v = _batched(q, view)
    with sdpa_kernel(SDPA_KERNELS[kernel]):
        out = F.scaled_dot_product_attention(rows, k, v, is_causal=True, enable_gqa=q.shape[1] != view.k.shape[1])
    return out.transpose(1, 2).reshape(q.shape)


def _batched(q: torch.Tensor, view: KVView) -> tuple[torch.Tensor, ...]:
    """[batch, heads, n, D] views of packed prompts of one length that lie in extents."""
    n, batch = view.max_q, len(view.host_lens)
    return tuple(x.reshape(batch, n, -1, q.shape[2]).transpose(1, 2) for x in (q, view.k, view.v))


def plain(q: torch.Tensor, view: KVView) -> torch.Tensor:
    """softmax(q k^T / sqrt(D) + mask) v, every step an operation of its own, scores in the inputs' dtype."""
    import torch

    rows, k, v = _batched(q, view)
    group, n = rows.shape[1] // k.shape[1], rows.shape[2]
    if group > 1:
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    late = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
    scores = (rows @ k.transpose(2, 3) * q.shape[2] ** -0.5).masked_fill(late, -torch.inf)
    out: torch.Tensor = (scores.softmax(-1) @ v).transpose(1, 2).reshape(q.shape)
    return out


def _fa3() -> tuple[Any, str]:
    """(module, "") or (None, why)."""
    why = []
    for name in _FA3:
        try:
            module = importlib.import_module(name)
        except Exception as error:  # a build for another CUDA raises more than ImportError
            why.append(f"{name}: {type(error).__name__}: {error}")
            continue
        if getattr(module, "FA3_AVAILABLE", True):
            return module, ""
        why.append(f"{name}: {getattr(module, 'FA3_UNAVAILABLE_REASON', 'no reason given')}")
    return None, "; ".join(why)


def _is_vllms(module: Any) -> bool:
    return hasattr(module, "FA3_AVAILABLE")


def _fa3_prefill(module: Any, q: torch.Tensor, view: KVView) -> torch.Tensor:
    k, v = view.k.flatten(1, 2), view.v.flatten(1, 2)
    run, n = module.flash_attn_varlen_func, view.max_q
    if _is_vllms(module):
        return run(q, k, v, n, view.cu_q, view.max_kv, view.cu_q, causal=True, fa_version=3)
    out = run(q, k, v, view.cu_q, view.cu_q, n, view.max_kv, causal=True)
    return out[0] if isinstance(out, tuple) else out


def _fa3_decode(module: Any, q: torch.Tensor, view: KVView) -> torch.Tensor:
    k, v = (cache.transpose(1, 2) for cache in (view.k, view.v))  # [pages, page, heads, D] by strides
    if _is_vllms(module):
        return module.flash_attn_varlen_func(
            q, k, v, 1, view.cu_q, view.max_kv, seqused_k=view.seq_lens, block_table=view.block_table, causal=True, fa_version=3
        )
    out = module.flash_attn_with_kvcache(
        q.unsqueeze(1), k, v, cache_seqlens=view.seq_lens, page_table=view.block_table, causal=True
    )
    return (out[0] if isinstance(out, tuple) else out).squeeze(1)


def prefill(names: tuple[str, ...] = ("cudnn", "fa2", "torch_math", "article")) -> Found:
    """Causal attention over packed prompts of one length that lie in extents, first query at the first key."""
    calls: dict[str, Call] = {name: partial(_sdpa, _SDPA[name]) for name in names if name in _SDPA}
    if "article" in names:
        calls["article"] = plain
    module, why = _fa3()
    return (calls, {"fa3": why}) if module is None else (calls | {"fa3": partial(_fa3_prefill, module)}, {})


def decode(q: torch.Tensor, view: KVView) -> Found:
    """One query a request over pages; FlashInfer is planned for these lengths."""
    if view.kind != "paged":
        return {}, {}
    calls: dict[str, Call] = {}
    missing: dict[str, str] = {}
    module, why = _fa3()
    if module is None:
        missing["fa3"] = why
    else:
        calls["fa3"] = partial(_fa3_decode, module)
    try:
        import flashinfer
    except Exception as error:  # see _fa3
        missing["flashinfer"] = f"{type(error).__name__}: {error}"
    else:
        try:
            calls["flashinfer"] = _flashinfer(flashinfer, q, view)
        except Exception as error:  # it compiles kernels when it plans, and its compiler may be missing
            missing["flashinfer"] = f"{type(error).__name__}: {error}"
    return calls, missing


def _flashinfer(package: Any, q: torch.Tensor, view: KVView) -> Call:
    """It reads the same per-head pages; only whole pages of a request's own are listed."""
    import torch

    lens, size = view.seq_lens.cpu(), view.page_size
    pages = (lens + size - 1) // size
    first = torch.cat((torch.zeros(1, dtype=torch.int64), pages.cumsum(0))).int().to(q.device)
    flat = torch.cat([view.block_table[b, : int(n)] for b, n in enumerate(pages)])
    scratch = torch.empty(256 << 20, dtype=torch.uint8, device=q.device)
    wrapper = package.BatchDecodeWithPagedKVCacheWrapper(scratch, "HND", use_tensor_cores=True)
    last = ((lens - 1) % size + 1).int().to(q.device)
    wrapper.plan(first, flat, last, q.shape[1], view.k.shape[1], q.shape[2], size, q_data_type=q.dtype, kv_data_type=q.dtype)
    return lambda q, view: wrapper.run(q, (view.k, view.v))
