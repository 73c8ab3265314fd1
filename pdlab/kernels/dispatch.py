"""Which attention runs: the backends there are, why one is missing, and the choice for a step.

    plain       reference.ReferenceOps.attention, on any device; the oracle
    sdpa        K and V gathered, then torch's scaled_dot_product_attention; sdpa:flash, sdpa:cudnn and sdpa:efficient force
                one of its kernels
    triton      this project's kernels, from compute capability 8.0 on
    flash_attn  the flash-attn package where it is installed; pages must be a multiple of 256 tokens

`EngineConfig.attention` forces one. "auto" follows the device's measured table (see tuning) where an entry fits, else this
rule: CPU plain, below 8.0 SDPA (tl.dot compiles without tensor cores there and spills), from 8.0 on Triton; float32 on a GPU
is SDPA's, since the kernels' tiles are sized for 16 bits. Importing this module imports neither torch nor triton.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from pdlab.core.errors import DeviceUnavailable
from pdlab.kernels.tuning import Tuning, first_match, table

if TYPE_CHECKING:
    import torch

    from pdlab.core.config import EngineConfig
    from pdlab.kernels.kv_view import KVView
    from pdlab.kernels.ops import ModelOps

    Attention = Callable[[torch.Tensor, KVView], torch.Tensor]


class HeadShape(Protocol):
    """What attention needs of a ModelConfig (a room below this one, so not imported)."""

    @property
    def num_heads(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...


BACKENDS = ("plain", "sdpa", "triton", "flash_attn")
MAX_HEAD_DIM = 256


def _missing(module: str) -> str | None:
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError) as error:
        return f"{module} is broken: {error}"
    return None if found else f"{module} is not installed"


def why_not(backend: str, capability: tuple[int, int] | None) -> str | None:
    """Why `backend` cannot run on a device of this capability (None: a CPU), or None if it can."""
    backend, _, kernel = backend.partition(":")
    if backend in ("plain", "sdpa"):
        return _missing("torch") or (f"sdpa:{kernel} needs a CUDA device" if kernel and capability is None else None)
    if problem := _missing(backend):
        return problem
    if backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1":
        return None  # the interpreter runs on anything, slowly
    if capability is None:
        return f"{backend} needs a CUDA device"
    if capability < (8, 0):
        return f"{backend} needs compute capability 8.0, this device has {capability[0]}.{capability[1]}"
    return None


def backends() -> dict[str, tuple[bool, str]]:
    """{name: (usable here, reason or remark)}; for `pdlab doctor`. Never raises, works without torch."""
    from pdlab.hardware.probe import probe

    machine = probe()
    remarks = {
        "plain": "the oracle; slow, on any device",
        "sdpa": "gathers K and V first",
        "triton": "follows page tables and extents",
        "flash_attn": "pages must be a multiple of 256 tokens",
    }
    result = {}
    for name in BACKENDS:
        reason = why_not(name, machine.capability)
        result[name] = (reason is None, reason or remarks[name])
    return result


def default_backend(capability: tuple[int, int] | None, dtype: str) -> str:
    """The rule of this module's docstring."""
    if capability is None:
        return "plain"
    return "triton" if capability >= (8, 0) and dtype != "float32" and why_not("triton", capability) is None else "sdpa"


def choose(
    rules: list[dict[str, Any]], default: str, *, dtype: str, head_dim: int, q: int, kv: int, batch: int, page: int = 0
) -> str:
    """Backend for a step: the first rule that fits it; `q` and `kv` are its longest lengths, `page` 0 means extents."""
    phase = "decode" if q <= 1 else "prefill"
    entry = first_match(rules, phase=phase, dtype=dtype, head_dim=head_dim, q=q, kv=kv, batch=batch, page=page)
    return entry["backend"] if entry else default


def make_ops(config: EngineConfig, model_config: HeadShape, device: Any, dtype: Any) -> ModelOps:
    """Model operations with the attention that `config.attention` asks for on this device.

    `device` and `dtype` as torch takes them ("cuda:0", torch.bfloat16). Raises DeviceUnavailable when a forced backend cannot
    run here, with the reason.
    """
    import torch

    from pdlab.hardware.probe import cpu_slug
    from pdlab.kernels.dispatched_ops import DispatchedOps

    device, dtype = torch.device(device), dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(dtype))
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    tuning = Tuning.of_device(device.index or 0) if device.type == "cuda" else Tuning(cpu_slug(), (8, 0), 4, 32 << 20)
    name = str(dtype).removeprefix("torch.")
    rules: list[dict[str, Any]] = []
    if config.attention != "auto":
        default = config.attention
        reason = why_not(default, capability) or _unfit(default, config, model_config)
        if reason:
            raise DeviceUnavailable(f"attention={default!r} is not possible here: {reason}", "use attention='auto'")
    else:
        default = default_backend(capability, name)
        if default == "triton" and model_config.head_dim > MAX_HEAD_DIM:
            default = "sdpa"
        rules = [
            rule
            for rule in table(tuning.device).get("attention_dispatch", [])
            if not (why_not(b := rule["backend"], capability) or _unfit(b, config, model_config))
        ]
    if all(rule["backend"] == default for rule in rules):
        rules = []
    arguments = (rules, default, model_config, max(1, config.max_batch_requests), device, name, tuning)
    if _fused(config.ops, capability, name, model_config):
        from pdlab.kernels.fused_ops import FusedOps

        return FusedOps(
            *arguments,
            pdl=config.dependent_launch,
            ring=config.weight_ring,
            prefetch=config.weight_prefetch,
            measured=config.measured_tiles,
            hints=config.weight_hints,
            persistent=config.persistent_decode,
        )
    return DispatchedOps(*arguments)


def _fused(ops: str, capability: tuple[int, int] | None, dtype: str, model: HeadShape) -> bool:
    """Whether the operations around attention are the fused kernels."""
    if ops == "reference":
        return False
    reason = why_not("triton", capability) or ("the model's head size is odd" if model.head_dim % 2 else None)
    if ops == "fused" and reason:
        raise DeviceUnavailable(f"ops='fused' is not possible here: {reason}", "use ops='auto'")
    return reason is None and (ops == "fused" or (capability is not None and dtype != "float32"))


def _unfit(backend: str, config: EngineConfig, model: HeadShape) -> str | None:
    """Why a backend that this device has does not fit this model or cache."""
    if backend in ("triton", "flash_attn") and model.head_dim > MAX_HEAD_DIM:
        return f"{backend} takes head sizes up to {MAX_HEAD_DIM}, the model has {model.head_dim}"
    if backend == "flash_attn" and (config.kv_allocator != "paged" or config.page_size % 256):
        return f"flash_attn needs pages of a multiple of 256 tokens, not {config.kv_allocator} with {config.page_size}"
    return None
