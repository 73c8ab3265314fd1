"""Steps with prompts as CUDA graphs: some hundreds of launches repeated as one.

Launching a step with prompts kernel by kernel takes the host longer than the device needs for a few hundred tokens, and the
host is never at rest. All that such a step's kernels read of it lies in the executor's persistent buffers; what decides the
launches themselves is padded, so that few graphs serve all steps:

    tokens     to 16, 32, 64, then to multiples of 128, which is what tiles of matrix products do anyhow
    requests   to 32, 256 or all: lanes that hold lengths
    queries    of the longest chunk, to what attention tells apart: 4, 16, up to 256 (with a short cache or any), more

Tokens that only fill up belong to no request and write their K and V to a slot that nobody owns; requests that only fill up
have no query and no cache. The work of attention follows the lengths that the device reads, so decodes and chunks of any
number and length share a graph. It ends with the rows that sample; sampling is launched behind it, in its shadow.

A shape that was met often enough is captured behind a step that ran so padded. More tokens than LARGEST keep the device busy
for longer than their launches take. Graphs share one pool of memory with those of decodes, see engine.graphs.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from pdlab.core.plan import Plan
from pdlab.engine.graphs import Capture, Replay, begin, keep_weights
from pdlab.kernels.kv_view import KVView
from pdlab.models.model import Model

LARGEST = 4096  # tokens of a step in a graph
MOST_GRAPHS = 192  # each holds some hundred kernels' arguments; what comes later runs launch by launch
CAPTURE_AFTER = 2  # times that a shape is met before it is worth a capture, which takes as long as two or three launched steps
SHORT = 256  # tokens: chunks and caches for which attention has kernels of their own
ENDS = (4, 16)  # the same of chunks that run as decodes of several queries: what is left of a chunked prompt, most of all


@dataclass(frozen=True)
class MixedShape:
    """What tells one graph from another; numbers are padded ones."""

    tokens: int
    requests: int
    max_q: int
    max_kv: int
    kv_kind: str


def token_sizes(most: int) -> tuple[int, ...]:
    """Padded tokens of a step with at most `most` of them: 16, 32, 64, then multiples of 128, up to LARGEST."""
    most = min(most, LARGEST)
    return tuple(sorted({n for n in (16, 32, 64, *range(128, most, 128)) if n < most} | {most}))


def request_sizes(most: int) -> tuple[int, ...]:
    return tuple(sorted({n for n in (32, 256) if n < most} | {most}))


class PrefillGraphs:
    """The captured steps with prompts of one executor. Arguments as DecodeGraphs takes them; `view` is over all requests and
    all tokens of a step. Attention must follow the lengths on the device (`ops.any_prefill`)."""

    def __init__(
        self,
        model: Model,
        buffers: dict[str, torch.Tensor],
        view: KVView,
        last: torch.Tensor,
        *,
        scratch: int,
        longest: int,
        capture: Capture,
    ) -> None:
        self.model, self.buffers, self.view, self.last = model, buffers, view, last
        self.scratch, self.longest = scratch, longest
        self.sizes, self.requests = token_sizes(len(view.slots)), request_sizes(len(last) - 1)
        self.seconds = 0.0  # spent on capturing
        self.refused: str | None = None  # why no further step is captured
        self.sampled = torch.zeros((self.requests[-1], model.config.hidden_size), dtype=model.dtype, device=last.device)
        self._capture = capture
        self._made: dict[MixedShape, Replay] = {}
        self._met: dict[MixedShape, int] = {}
        self._read: dict[int, torch.Tensor] = {}  # the weights that captured steps read

    def __len__(self) -> int:
        return len(self._made)

    # --- which graph

    def shape_of(self, plan: Plan) -> MixedShape | None:
        """The graph that can run this plan, made or to be made now; None for a step to be launched kernel by kernel."""
        t, b = plan.new_tokens, plan.batch
        if plan.pad_tokens or not b < t <= self.sizes[-1]:
            return None
        longest = int(np.diff(plan.q_start).max())
        shape = self.shape(t, b, longest, int(plan.context_lens.max()), plan.kv_kind)
        if shape in self._made:
            return shape
        met = self._met[shape] = self._met.get(shape, 0) + 1
        return shape if met >= CAPTURE_AFTER and self.refused is None and len(self) < MOST_GRAPHS else None

    def shape(self, tokens: int, requests: int, max_q: int, max_kv: int, kv_kind: str) -> MixedShape:
        t = next(n for n in self.sizes if n >= tokens)
        kv = self.longest
        if max_q <= ENDS[-1]:
            q = next(n for n in ENDS if n >= max_q)
        elif max_q <= SHORT:
            q, kv = SHORT, SHORT if max_kv <= SHORT else kv
        else:
            q = max(t, SHORT + 1)
        return MixedShape(t, next(n for n in self.requests if n >= requests), q, min(kv, self.longest), kv_kind)

    def shapes(self, kv_kind: str) -> list[MixedShape]:
        """Those that a load of prompts of all lengths beside decodes meets, largest first."""
        found = {
            self.shape(t, fewer + 1, q, self.longest, kv_kind)
            for t in self.sizes
            for fewer in (0, *self.requests[:-1])  # requests of the next smaller size; each has a token at least
            if fewer < t
            for q in (min(SHORT, t), t)
        } | self._ends(kv_kind)
        return sorted(found, key=lambda s: (s.tokens, s.requests, s.max_q), reverse=True)

    def _ends(self, kv_kind: str) -> set[MixedShape]:
        """Those of steps of decodes and one chunk of at most 16 tokens."""
        found = set()
        for fewer, t in pairwise((0, *self.sizes)):
            for q in ENDS:
                if fewer >= self.requests[-1] + q or t < 2:
                    continue
                least = max(1, fewer + 2 - q)  # requests of the smallest such step that is filled up to t tokens
                most = min(t - 1, self.requests[-1])
                found |= {
                    self.shape(t, b, min(q, t), self.longest, kv_kind)
                    for b in {least, most, *self.requests}
                    if least <= b <= most
                }
        return found

    def padded(self, arrays: dict[str, np.ndarray], shape: MixedShape) -> dict[str, Any]:
        """The step's arrays, filled up with tokens of no request and requests without tokens."""
        t, b, s = (len(arrays[name]) for name in ("token_ids", "seq_lens", "sample_at"))
        more = {
            **dict.fromkeys(("token_ids", "positions"), (shape.tokens - t, 0)),
            "token_row": (shape.tokens - t, len(self.last) - 1),
            "slots": (shape.tokens - t, self.scratch),
            "base": (shape.requests - b, self.scratch),
            "seq_lens": (shape.requests - b, 0),
            "cu_q": (shape.requests + 1 - len(arrays["cu_q"]), t),
            "sample_at": (shape.requests - s, 0),
        }
        return arrays | {name: np.concatenate([arrays[name], np.full(n, value)]) for name, (n, value) in more.items()}

    # --- one step

    def run(self, shape: MixedShape) -> torch.Tensor:
        """Runs the step that the buffers describe: the residual stream [requests, H] of the rows that sample, in their order,
        and of the first token behind. What is returned is overwritten by the next step."""
        if (made := self._made.get(shape)) is not None:
            made.replay()
            return self.sampled
        self._rehearse(partial(self._step, shape, self.model))
        self._make(shape)
        return self.sampled

    def make(self, shapes: Sequence[MixedShape]) -> None:
        """Captures steps that nobody waits for; the buffers must describe no request. One layer has every kernel there is; a
        shape for which one cannot run is left out, and named in a warning."""
        one_layer = copy(self.model)
        one_layer.layers = self.model.layers[:1]
        for shape in shapes:
            if shape in self._made:
                continue
            try:
                self._rehearse(partial(self._step, shape, one_layer))
            except Exception as error:
                warnings.warn(f"no graph of {shape}: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=2)
                continue
            self._make(shape)

    def _rehearse(self, step: Callable[[], torch.Tensor]) -> None:
        on_its_stream = getattr(self._capture, "rehearse", None)  # an imitated capture has none
        step() if on_its_stream is None else on_its_stream(step)

    def _make(self, shape: MixedShape) -> None:
        if self.refused is not None:
            return
        started = time.perf_counter()
        try:
            self._made[shape] = self._capture(partial(self._step, shape, self.model))[0]
            keep_weights(self.model, self._read)
        except Exception as error:  # memory, or an operation that cannot be captured: steps go on without
            self.refused = f"{type(error).__name__}: {error}"
            warnings.warn(f"steps with prompts run without further CUDA graphs: {self.refused}", RuntimeWarning, stacklevel=3)
        self.seconds += time.perf_counter() - started

    def _step(self, shape: MixedShape, model: Model) -> torch.Tensor:
        d = {name: self.buffers[name][: shape.tokens] for name in ("token_ids", "token_row", "positions")}
        x = model.through_layers(begin(model, d, self.last), self._rows(shape))
        n = shape.requests
        return torch.index_select(x, 0, self.buffers["sample_at"][:n], out=self.sampled[:n])

    def _rows(self, shape: MixedShape) -> KVView:
        """What attention reads. All that the host says of lengths is that there may be single queries, and how long a cache may
        be, by which attention decides how many heads' K and V it keeps in L2."""
        v, n, t = self.view, shape.requests, shape.tokens
        return replace(
            v, kind=shape.kv_kind, block_table=v.block_table[:n], base=v.base[:n], seq_lens=v.seq_lens[:n],
            cu_q=v.cu_q[: n + 1], slots=v.slots[:t], positions=v.positions[:t], max_q=shape.max_q, max_kv=shape.max_kv,
            host_lens=((1, shape.max_kv),),
        )  # fmt: skip

    def close(self) -> None:
        self._made.clear()
        self._read.clear()
