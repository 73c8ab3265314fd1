"""A Plan says everything one step will do, in NumPy arrays, before anything runs.

It is frozen and picklable, so a step can be logged, replayed, sent to another process, or priced without a device.
Sizes: B requests in the step, T new tokens, S rows that sample.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

IN_FLIGHT = -1  # token id: "what this row sampled last step, still on the device"


@dataclass(frozen=True)
class PlanShape:
    """What the cost of a step depends on. Tokens throughout.

    `prefill` holds (new tokens, tokens already in the cache) for each prefill chunk; `decode_kv_tokens` is the sum over
    decodes of the tokens each attends to, its own included, and `decode_longest` the most that one attends to, 0 where that is
    not known.
    """

    prefill: tuple[tuple[int, int], ...] = ()
    decode_count: int = 0
    decode_kv_tokens: int = 0
    pad_tokens: int = 0
    sampled: int = 0
    decode_longest: int = 0

    @property
    def prefill_tokens(self) -> int:
        return sum(new for new, _ in self.prefill)

    @property
    def prefill_context(self) -> int:
        return sum(context for _, context in self.prefill)

    @property
    def new_tokens(self) -> int:
        """Rows of the step's matrix products, padding included."""
        return self.prefill_tokens + self.decode_count + self.pad_tokens

    @property
    def attention_pairs(self) -> int:
        """(query, key) pairs a causal attention must score; padding not counted."""
        return self.decode_kv_tokens + sum(n * c + n * (n + 1) // 2 for n, c in self.prefill)


@dataclass(frozen=True)
class KVAllocate:
    """A piece of KV memory of its own, at virtual slots [base, base + tokens) (per-request allocator)."""

    request_id: int
    base: int
    tokens: int


@dataclass(frozen=True)
class KVFree:
    """Gives back the piece made by KVAllocate; executed after every earlier step that reads it."""

    request_id: int
    base: int


@dataclass(frozen=True)
class KVCopy:
    """Copies KV of `tokens` consecutive slots (all layers) from `src` to `dst` before the step's model runs.

    Copies of one step act in order; a copy never overlaps its own source.
    """

    src: int
    dst: int
    tokens: int


KVOp = KVAllocate | KVFree | KVCopy


@dataclass(frozen=True)
class SamplingArrays:
    """Sampling parameters of the S rows that sample, aligned with Plan.sample_rows."""

    temperature: np.ndarray  # f32[S]; 0 is greedy
    top_k: np.ndarray  # i32[S]; 0 off
    top_p: np.ndarray  # f32[S]; 1 off
    min_p: np.ndarray  # f32[S]; 0 off
    repetition_penalty: np.ndarray  # f32[S]; 1 off
    seed: np.ndarray  # i64[S]
    position: np.ndarray  # i64[S]: index of the output token being sampled; noise is keyed by (seed, position, token)
    logprobs: np.ndarray  # i32[S]; -1 off, otherwise how many of the most likely to report


@dataclass(frozen=True)
class Plan:
    """One step: prefill chunks and decodes, mixed. Requests are concatenated along T in the order of `request_ids`."""

    step: int
    request_ids: np.ndarray  # i64[B]
    rows: np.ndarray  # i32[B]: persistent row of each request in the executor's buffers
    q_start: np.ndarray  # i32[B + 1]: request i's new tokens are [q_start[i], q_start[i + 1])
    context_lens: np.ndarray  # i32[B]: tokens in the cache after this step, its new ones included
    token_ids: np.ndarray  # i64[T]; IN_FLIGHT where the device still holds it
    positions: np.ndarray  # i32[T]: position of each new token in its sequence
    slots: np.ndarray  # i64[T]: where each new token's K and V go
    kv_kind: str  # paged | extent
    page_table: np.ndarray  # i32[B, P]; unused entries 0; [B, 0] when every request is an extent
    base: np.ndarray  # i64[B]: first slot of each request's extent; zeros when paged
    sample_rows: np.ndarray  # i32[S]: indices into B of the requests that sample a token this step
    sampling: SamplingArrays
    shape: PlanShape
    kv_ops: tuple[KVOp, ...] = ()
    # requests whose penalty needs the tokens seen before this step: (index into B, token ids), given at (re)admission
    seen: tuple[tuple[int, np.ndarray], ...] = ()
    pad_tokens: int = 0  # rows of zeros that static batching computes and throws away
    predicted_s: float = 0.0
    repeat: int = 1  # a simulated executor may run this many identical decode steps at once
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def batch(self) -> int:
        return len(self.request_ids)

    @property
    def new_tokens(self) -> int:
        return len(self.token_ids)
