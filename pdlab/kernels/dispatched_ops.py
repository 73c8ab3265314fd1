"""ReferenceOps with its attention chosen step by step among the backends of `dispatch`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pdlab.kernels.dispatch import HeadShape, choose
from pdlab.kernels.kv_view import KVView
from pdlab.kernels.reference import ReferenceOps
from pdlab.kernels.tuning import Tuning

Attention = Callable[[torch.Tensor, KVView], torch.Tensor]


class DispatchedOps(ReferenceOps):
    """`rules` and `default` as dispatch.choose takes them. A backend is made when a step first needs it."""

    def __init__(
        self,
        rules: list[dict[str, Any]],
        default: str,
        model: HeadShape,
        max_requests: int,
        device: torch.device,
        dtype: str,
        tuning: Tuning,
    ) -> None:
        self.rules, self.default, self.model, self.max_requests = rules, default, model, max_requests
        self.device, self.dtype, self.tuning = device, dtype, tuning
        self.made: dict[str, Attention] = {}
        self._last: tuple[tuple[int, ...], str] | None = None  # a step asks the same of every layer
        self.backend(default)  # buffers exist before a graph is captured

    def backend(self, name: str) -> Attention:
        if name not in self.made:
            self.made[name] = self._make(name)
        return self.made[name]

    @property
    def any_length(self) -> bool:
        """Whether decode attention follows the lengths on the device alone, so that one captured graph serves every length."""
        return {self.default, *(rule["backend"] for rule in self.rules if rule.get("phase") != "prefill")} == {"triton"}

    @property
    def any_prefill(self) -> bool:
        """The same of steps with prompts, whatever the numbers of requests and of their tokens."""
        return {self.default, *(rule["backend"] for rule in self.rules)} == {"triton"}

    def _make(self, name: str) -> Attention:
        if name == "triton":
            from pdlab.kernels.triton_attention import TritonAttention

            return TritonAttention(
                heads=self.model.num_heads,
                kv_heads=self.model.num_kv_heads,
                head_dim=self.model.head_dim,
                max_requests=self.max_requests,
                device=self.device,
                tuning=self.tuning,
            )
        if name == "plain":
            return super().attention
        from pdlab.kernels import library_attention

        if name == "flash_attn":
            return library_attention.flash_attn
        kernel = name.partition(":")[2] or None
        return lambda q, view: library_attention.sdpa(q, view, kernel=kernel)

    def attention(self, q: torch.Tensor, view: KVView) -> torch.Tensor:
        return self.backend(self._chosen(q.shape[2], view) if self.rules else self.default)(q, view)

    def _chosen(self, head_dim: int, view: KVView) -> str:
        page = view.page_size if view.kind == "paged" else 0
        key = (head_dim, view.max_q, view.max_kv, len(view.seq_lens), page)
        if self._last is None or self._last[0] != key:
            facts = {"q": view.max_q, "kv": view.max_kv, "batch": len(view.seq_lens), "page": page}
            self._last = (key, choose(self.rules, self.default, dtype=self.dtype, head_dim=head_dim, **facts))
        return self._last[1]
