"""Decode steps as CUDA graphs: the launches of a whole step recorded once and repeated as one.

A decode step of a small batch reads its weights in less time than the host needs to launch its kernels one by one. Such a
step differs from the next only in what the executor's persistent buffers hold, so it is captured once for each padded batch
size and replayed over the same addresses:

    buffers: token ids, rows, slots, lengths, tables --> [ token in flight -> model -> sampling -> last[row] ] --> tokens

With fused operations the graph's last kernel writes the tokens to the host itself. The addresses of a graph are fixed while
several steps are in flight, so each writes to the row of its turn, which it reads from the buffers.

Rows that only fill up a batch have no cache (length 0), write their K and V to a slot that nobody owns, and leave their token
in a row that no request has. A step met for the first time runs as it is, launch by launch, and is captured behind that: so
a capture never needs made-up input, and never touches the cache. All graphs share one pool of memory, which is safe because
steps run one after the other on one stream.

Penalties, filters and log-probabilities are rare and come in many combinations: there the graph ends with the model.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from pdlab.core.plan import IN_FLIGHT, Plan, SamplingArrays
from pdlab.kernels.kv_view import KVView
from pdlab.kernels.ops import SamplingBatch
from pdlab.models.model import Model

GREEDY, RANDOM, MODEL = "greedy", "random", "model"
_GATHERED = 1 << 26  # most elements of K that a backend which gathers may gather for a step in a graph


class Replay(Protocol):
    def replay(self) -> None: ...


Capture = Callable[[Callable[[], torch.Tensor]], tuple[Replay, torch.Tensor]]


class CudaCapture:
    """Captures a step into a CUDA graph; all of them allocate from one pool."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.pool, self.stream = device, torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)

    def __call__(self, step: Callable[[], torch.Tensor]) -> tuple[Replay, torch.Tensor]:
        graph = torch.cuda.CUDAGraph()
        # the outer context restores the stream even where a capture fails half-way
        with (
            torch.cuda.device(self.device),
            torch.cuda.stream(torch.cuda.current_stream(self.device)),
            torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"),
        ):
            out = step()
        return graph, out

    def rehearse(self, step: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Runs a step on the stream of the captures, in the current stream's order: what operations make once a stream
        (workspaces, counters that begin at zero) must not be made during a capture, which only notes that it is to be done."""
        here = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            out = step()
        here.wait_stream(self.stream)
        return out


@dataclass(frozen=True)
class StepShape:
    """What tells one graph from another."""

    size: int  # rows, padding included
    sampling: str  # greedy | random | model: sampled outside
    kv_kind: str
    max_kv: int  # bound on the cached tokens of a row


def graph_sizes(most: int) -> tuple[int, ...]:
    """Batch sizes worth a graph of their own: 1, 2, 4, then every 8th to 256, every 32nd beyond, and the largest."""
    return tuple(sorted({n for n in (1, 2, 4, *range(8, 257, 8), *range(288, most, 32)) if n < most} | {most}))


def sampling_kind(s: SamplingArrays) -> str:
    """Which part of sampling a graph can hold for these requests."""
    if (s.repetition_penalty != 1).any() or (s.logprobs >= 0).any():
        return MODEL
    random = s.temperature > 0
    if not random.any():
        return GREEDY  # filters change nothing then
    filtered = (s.top_k > 0) | (s.top_p < 1) | (s.min_p > 0)
    return MODEL if (random & filtered).any() else RANDOM


def begin(model: Model, d: dict[str, torch.Tensor], last: torch.Tensor) -> torch.Tensor:
    """x [T, H] that goes into the layers: tokens in flight taken from `last`, then embedded."""
    ids, rows, positions, w = d["token_ids"], d["token_row"], d["positions"], model.weights
    if getattr(model.ops, "fused", False):
        from pdlab.kernels import step_ends

        return step_ends.embed(ids, rows, last, w.embed, positions, w.positions, pdl=getattr(model.ops, "pdl", False))
    x = w.embed[torch.where(ids == IN_FLIGHT, last[rows], ids)]
    return x if w.positions is None else x + w.positions[positions]


def remember(
    model: Model, tokens: torch.Tensor, rows: torch.Tensor, last: torch.Tensor, host: torch.Tensor | None, turn: torch.Tensor
) -> None:
    """`host`, which only fused operations write: see DecodeGraphs."""
    if getattr(model.ops, "fused", False):
        from pdlab.kernels import step_ends

        step_ends.remember(tokens, rows, last, host, turn, pdl=getattr(model.ops, "pdl", False))
    else:
        last[rows] = tokens.clamp(min=0)


def keep_weights(model: Model, read: dict[int, torch.Tensor]) -> None:
    """Adds a model's weights to those that a graph reads, by address: it goes on reading there when an engine that shares the
    layers lays them out otherwise, see FusedOps.prepare."""
    read.update({t.data_ptr(): t for t in model.tensors()})


class DecodeGraphs:
    """The captured decode steps of one executor.

    `buffers` are its persistent device arrays and `view` a KVView over all of their rows; `last[row]` is the token that each
    row sampled last, and its last entry belongs to no request. `scratch` is a slot nobody owns. `any_length`: attention's
    work depends on the lengths that the device reads, so one graph serves every length up to its bound, see `bounds`. `host`
    i64[turns, rows], pinned, or None: where steps that sample in their graph leave their tokens, in row buffers["turn"].
    """

    def __init__(
        self,
        model: Model,
        buffers: dict[str, torch.Tensor],
        view: KVView,
        last: torch.Tensor,
        *,
        scratch: int,
        longest: int,
        any_length: bool,
        capture: Capture,
        host: torch.Tensor | None = None,
    ) -> None:
        self.model, self.buffers, self.view, self.last, self.host = model, buffers, view, last, host
        self.scratch, self.longest, self.any_length = scratch, longest, any_length
        self.sizes = graph_sizes(len(last) - 1)
        self.seconds = 0.0  # spent on capturing
        self._bounds: dict[int, tuple[int, ...]] = {}  # by size, see bounds
        self.refused: str | None = None  # why no further step is captured
        self._capture = capture
        self._made: dict[StepShape, tuple[Replay, torch.Tensor]] = {}
        self._read: dict[int, torch.Tensor] = {}  # the weights that captured steps read

    def __len__(self) -> int:
        return len(self._made)

    # --- which graph

    def shape_of(self, plan: Plan) -> StepShape | None:
        """The graph that can run this plan; None for a step that holds a prompt, or more than a graph should."""
        b = plan.batch
        rows = b + plan.pad_tokens
        if not 0 < b == plan.new_tokens == len(plan.sample_rows) or rows > self.sizes[-1]:
            return None
        if b > 1 and not (plan.sample_rows == np.arange(b)).all():
            return None
        size = next(n for n in self.sizes if n >= rows)
        shape = StepShape(size, sampling_kind(plan.sampling), plan.kv_kind, self._bound(size, int(plan.context_lens.max())))
        heads, dim = self.view.k.shape[2], self.view.k.shape[4]
        if not self.any_length and size * shape.max_kv * heads * dim > _GATHERED:
            return None
        return shape if self.refused is None or shape in self._made else None

    def bounds(self, size: int) -> tuple[int, ...]:
        """Longest caches of the graphs that serve every length between them: one, unless the model's operations have other
        kernels for short caches than for long ones."""
        if size not in self._bounds:
            ask = getattr(self.model.ops, "decode_bounds", None)
            short = ask(self.model.layers, size) if ask is not None else ()
            self._bounds[size] = (*(n for n in short if n < self.longest), self.longest)
        return self._bounds[size]

    def _bound(self, size: int, longest: int) -> int:
        """Backends that gather keys up to the bound get a power of two above the longest, so that graphs stay few."""
        if self.any_length:
            return next((n for n in self.bounds(size) if longest <= n), self.longest)
        return min(self.longest, max(64, 1 << (longest - 1).bit_length()))

    def padded(self, arrays: dict[str, np.ndarray], batch: int, size: int) -> dict[str, Any]:
        """The step's arrays with `size - batch` rows more, which change nothing that a request could see."""
        n = size - batch
        if n == 0:
            return arrays
        nobody = len(self.last) - 1
        rows: dict[str, float] = dict.fromkeys(("token_row", "sample_rows", "rows"), nobody)
        rows |= dict.fromkeys(("slots", "base"), self.scratch)
        rows |= dict.fromkeys(("token_ids", "positions", "seq_lens", "temperature", "seed", "position"), 0)
        more = {name: np.concatenate([arrays[name], np.full(n, value)]) for name, value in rows.items()}
        return arrays | more | {"cu_q": np.arange(size + 1)}

    # --- one step

    def run(self, shape: StepShape) -> torch.Tensor:
        """Runs the step that the buffers describe: tokens i64[size], or the residual stream [size, H] for MODEL.

        What is returned is overwritten by the next step of the same shape.
        """
        if (made := self._made.get(shape)) is not None:
            made[0].replay()
            return made[1]
        out = self._step(shape)
        if self.refused is None:
            started = time.perf_counter()
            try:
                self._made[shape] = self._capture(lambda: self._step(shape))
                keep_weights(self.model, self._read)
            except Exception as error:  # memory, or an operation that cannot be captured: steps go on without
                self.refused = f"{type(error).__name__}: {error}"
                warnings.warn(f"decode steps run without further CUDA graphs: {self.refused}", RuntimeWarning, stacklevel=2)
            self.seconds += time.perf_counter() - started
        return out

    def _step(self, shape: StepShape) -> torch.Tensor:
        n, d = shape.size, {name: buffer[: shape.size] for name, buffer in self.buffers.items()}
        x = self.model.through_layers(begin(self.model, d, self.last), self._rows(n, shape))
        if shape.sampling == MODEL:
            return x
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "position")
        sampling = SamplingBatch(
            **{name: d[name] for name in names},
            seen=None,
            any_random=shape.sampling == RANDOM,
            any_filter=False,
            num_logprobs=-1,
        )
        tokens = self.model.sample(x, sampling).tokens
        remember(self.model, tokens, d["sample_rows"], self.last, self.host, d["turn"])
        return tokens

    def _rows(self, n: int, shape: StepShape) -> KVView:
        v = self.view
        return replace(
            v,
            kind=shape.kv_kind,
            block_table=v.block_table[:n],
            base=v.base[:n],
            seq_lens=v.seq_lens[:n],
            cu_q=v.cu_q[: n + 1],
            slots=v.slots[:n],
            positions=v.positions[:n],
            max_q=1,
            max_kv=shape.max_kv,
            host_lens=(),
        )

    def close(self) -> None:
        self._made.clear()
        self._read.clear()
