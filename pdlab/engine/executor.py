"""Runs plans with a model: one upload, one forward pass, one sampling, one download a step, and no wait in between.

plan (NumPy) --one pinned block--> persistent device buffers --> model --> sampled tokens --+--> host, read at result()
                                                                                            +--> last[row], read by the
                                                                                                 next step's decodes

The copy engine carries both ways, but for decode steps in a CUDA graph with fused operations: there the kernels at both ends
read and write the host's memory themselves, and nothing comes between two graphs but one small kernel. As many steps may be
unfinished as the block has turns, one more than the engine has; the next waits for the oldest and keeps its result.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import torch

from pdlab.core.clock import Clock, RealClock
from pdlab.core.config import EngineConfig
from pdlab.core.errors import EngineClosed
from pdlab.core.plan import IN_FLIGHT, KVCopy, Plan
from pdlab.engine.buffers import Block
from pdlab.engine.graphs import GREEDY, MODEL, RANDOM, Capture, CudaCapture, DecodeGraphs, StepShape
from pdlab.engine.interface import StepResult
from pdlab.engine.kv_memory import kv_capacity
from pdlab.engine.prefill_graphs import MOST_GRAPHS, MixedShape, PrefillGraphs
from pdlab.engine.sampling import SeenTokens, sampling_batch
from pdlab.kernels.kv_moves import run_copies
from pdlab.kernels.kv_view import KVView
from pdlab.kernels.ops import SampleResult
from pdlab.models.model import Model

EXTENT_ALLOCATORS = ("per_request", "contiguous_pool")  # their memory is cut in tokens, not in pages
WAKE_SECONDS = 2e-4  # the longest that a waiting host takes to notice that a step has ended
_SAMPLING: dict[str, Any] = {"temperature": np.float32, "top_k": np.int32, "top_p": np.float32, "min_p": np.float32}
_SAMPLING |= {"repetition_penalty": np.float32, "seed": np.int64, "position": np.int64}
Mark = torch.cuda.Event | float  # a moment on the device's time line; on a CPU, of the engine's clock


class TorchExecutor:
    """Contract 4 on a CPU or one GPU. `model` is loaded and its operations chosen; `max_len`: tokens of one request.

    `capture` records decode steps for replay; by default CUDA graphs on a GPU, unless the configuration turns them off.
    """

    def __init__(
        self, config: EngineConfig, model: Model, *, max_len: int, clock: Clock | None = None, capture: Capture | None = None
    ) -> None:
        self.config, self.model, self.clock = config, model, clock or RealClock()
        self.device = model.device
        self.on_gpu = self.overlaps = self.device.type == "cuda"
        self.page_size = 1 if config.kv_allocator in EXTENT_ALLOCATORS else config.page_size
        rows = min(config.max_batch_requests, config.max_batch_tokens)
        if capture is None and config.cuda_graphs and self.on_gpu:
            capture = CudaCapture(self.device)
        self._capacity = kv_capacity(config, model, max_len)
        self.max_len = max_len = min(max_len, self._capacity)
        pads = config.batching not in ("continuous", "continuous_chunked")
        padding = config.static_batch_tokens + rows if pads else 0  # most rows of zeros in a step
        tokens = config.max_batch_tokens  # most tokens of a step: only chunks keep the budget whatever the prompts
        if config.batching != "continuous_chunked":
            tokens = max(tokens, padding + max_len) + rows
        self.scratch = max(padding, int(capture is not None))  # slots that padding writes
        pages = -(-self._capacity // self.page_size)
        self.k, self.v = model.new_kv(pages + -(-self.scratch // self.page_size), self.page_size)
        self._scratch_page = pages
        width = 0 if config.kv_allocator in EXTENT_ALLOCATORS else -(-max(max_len, padding) // self.page_size) + 1
        batch = rows + 1  # one more than requests: padding is a request of its own
        sections: dict[str, tuple[Any, int]] = {
            **dict.fromkeys(("token_ids", "positions", "slots", "token_row"), (np.int64, tokens)),
            **dict.fromkeys(("base", "rows", "sample_at", "sample_rows"), (np.int64, batch)),
            "cu_q": (np.int32, batch + 1),
            "seq_lens": (np.int32, batch),
            **{name: (dtype, batch) for name, dtype in _SAMPLING.items()},
            "table": (np.int32, batch * max(width, 1)),
        }
        self.block = Block(sections, self.device, config.steps_in_flight + 1)
        self.block_table = torch.zeros((batch, width), dtype=torch.int32, device=self.device)
        self.last = torch.zeros(batch, dtype=torch.int64, device=self.device)  # the token each row sampled last
        self.seen = SeenTokens(rows, model.config.vocab_size, self.device)
        self.host_tokens = self._make_host_tokens() if capture is not None else None
        self.graphs = self._make_graphs(capture) if capture is not None else None
        self.prefill_graphs: PrefillGraphs | None = None
        if capture is not None and config.prefill_graphs and getattr(model.ops, "any_prefill", False):
            self.prefill_graphs = self._make_prefill_graphs(capture)
        self._anchor: tuple[torch.cuda.Event, float] | None = None  # an event and the engine time at which it happened
        self._closed = False

    def capacity(self) -> int:
        return self._capacity

    def submit(self, plan: Plan) -> StepHandle:
        if self._closed:
            raise EngineClosed("a step was submitted to a closed executor", "make a new LLM")
        try:
            with torch.inference_mode(), self._on_device():
                before = self._mark()
                parts = self._download(self._run(plan))
                after = self._mark()
        except Exception as error:  # out of memory, a kernel that cannot launch, a bug: this step fails, not the engine
            if self.on_gpu:
                with suppress(Exception):  # what was launched of it may still read the memory of its turn
                    torch.cuda.synchronize(self.device)
            now = self.clock.now()
            failed = StepResult(plan.step, np.zeros(0, np.int64), now, now, error=error)
            return StepHandle(lambda: failed)
        handle = StepHandle(self._finisher(plan, before, after, parts), after)
        self.block.keep_until(handle.result)
        return handle

    def _on_device(self) -> AbstractContextManager[Any]:
        """Kernels are launched on the current device, whatever their arguments say."""
        return torch.cuda.device(self.device) if self.on_gpu else nullcontext()

    # --- one step

    def _run(self, plan: Plan) -> SampleResult:
        # pieces of their own (KVAllocate, KVFree) are ranges of the one memory
        run_copies(self.k, self.v, [op for op in plan.kv_ops if isinstance(op, KVCopy)])
        self.seen.admit(plan)
        if self.graphs is not None and (shape := self.graphs.shape_of(plan)) is not None:
            return self._run_graph(self.graphs, shape, plan)
        if self.prefill_graphs is not None and (mixed := self.prefill_graphs.shape_of(plan)) is not None:
            return self._run_prefill_graph(self.prefill_graphs, mixed, plan)
        self.block.upload(self._arrays(plan), self.block_table)
        d = self.block.device
        t, s = plan.new_tokens + plan.pad_tokens, len(plan.sample_rows)
        ids = d["token_ids"][:t]
        ids = torch.where(ids == IN_FLIGHT, self.last[d["token_row"][:t]], ids)
        x = self.model.forward(ids, d["positions"][:t], self._view(plan))
        return self._sample(plan, x[d["sample_at"][:s]])

    def _run_graph(self, graphs: DecodeGraphs, shape: StepShape, plan: Plan) -> SampleResult:
        arrays = self._arrays(replace(plan, pad_tokens=0) if plan.pad_tokens else plan)
        arrays = graphs.padded(arrays, plan.batch, shape.size)
        if self.host_tokens is not None:
            self.block.take(arrays, self.block_table, shape.size)
        else:
            self.block.upload(arrays, self.block_table)
        out = graphs.run(shape)
        if shape.sampling == MODEL:
            return self._sample(plan, out[: plan.batch])
        if self.host_tokens is not None:
            return SampleResult(self.host_tokens[self.block.turn, : plan.batch])
        out = out[: plan.batch]
        return SampleResult(out if self.on_gpu else out.clone())  # a GPU copies it to the host before the next step begins

    def _run_prefill_graph(self, graphs: PrefillGraphs, shape: MixedShape, plan: Plan) -> SampleResult:
        self.block.upload(graphs.padded(self._arrays(plan), shape), self.block_table)
        return self._sample(plan, graphs.run(shape)[: len(plan.sample_rows)])

    def _sample(self, plan: Plan, x: torch.Tensor) -> SampleResult:
        d, s = self.block.device, len(plan.sample_rows)
        rows = d["sample_rows"][:s]
        on_device = {name: d[name][:s] for name in _SAMPLING}
        batch = sampling_batch(plan.sampling, on_device, self.seen.of(plan, rows))
        sampled = self.model.sample(x, batch)
        known = sampled.tokens.clamp(min=0)  # -1 says that a row had no finite logit; the host hears of it
        self.last[rows] = known
        self.seen.add(rows, known)
        return sampled

    def _arrays(self, plan: Plan) -> dict[str, np.ndarray]:
        """What the device must know. Padding is one more request, of zeros, which writes to slots that nobody owns."""
        new = np.diff(plan.q_start)
        arrays = {
            "token_ids": plan.token_ids,
            "positions": plan.positions,
            "slots": plan.slots,
            "token_row": plan.rows if plan.new_tokens == plan.batch else np.repeat(plan.rows, new),
            "base": plan.base,
            "rows": plan.rows,
            "sample_at": plan.q_start[plan.sample_rows + 1] - 1,
            "sample_rows": plan.rows[plan.sample_rows],
            "cu_q": plan.q_start,
            "seq_lens": plan.context_lens,
            **{name: getattr(plan.sampling, name) for name in _SAMPLING},
            "table": plan.page_table,
        }
        if plan.pad_tokens:
            n, first = plan.pad_tokens, self._scratch_page
            scratch = np.arange(n)
            zeros = np.zeros(n, np.int64)
            more: dict[str, Any] = {"token_ids": zeros, "token_row": zeros, "positions": scratch % self.max_len}
            more |= {"slots": first * self.page_size + scratch, "cu_q": [plan.new_tokens + n]}
            more |= {"base": [first * self.page_size], "rows": [0], "seq_lens": [n]}
            for name, extra in more.items():
                arrays[name] = np.append(arrays[name], extra)
            if self.block_table.shape[1]:
                pages = first + np.arange(-(-n // self.page_size))
                table = np.zeros((plan.batch + 1, max(plan.page_table.shape[1], len(pages))), np.int32)
                table[:-1, : plan.page_table.shape[1]] = plan.page_table
                table[-1, : len(pages)] = pages
                arrays["table"] = table
        return arrays

    def _view(self, plan: Plan) -> KVView:
        d, pad = self.block.device, plan.pad_tokens
        b, t = plan.batch + bool(pad), plan.new_tokens + pad
        lens = list(zip(np.diff(plan.q_start).tolist(), plan.context_lens.tolist(), strict=True)) + (
            [(pad, pad)] if pad else []
        )
        return KVView(
            kind=plan.kv_kind,
            page_size=self.page_size,
            k=self.k,
            v=self.v,
            block_table=self.block_table[:b],
            base=d["base"][:b],
            seq_lens=d["seq_lens"][:b],
            cu_q=d["cu_q"][: b + 1],
            slots=d["slots"][:t],
            positions=d["positions"][:t],
            max_q=max(n for n, _ in lens),
            max_kv=max(n for _, n in lens),
            host_lens=tuple(lens),
        )

    def _all_rows(self, tokens: int) -> KVView:
        """The persistent buffers, of whose rows a graph takes the first."""
        d = self.block.device
        return KVView(
            kind="paged", page_size=self.page_size, k=self.k, v=self.v, block_table=self.block_table, base=d["base"],
            seq_lens=d["seq_lens"], cu_q=d["cu_q"], slots=d["slots"][:tokens], positions=d["positions"][:tokens],
            max_q=1, max_kv=self.max_len,
        )  # fmt: skip

    def _make_host_tokens(self) -> torch.Tensor | None:
        """i64[turns, rows] of pinned memory, where the last kernel of a decode step in a graph leaves the tokens of its turn.
        None where steps copy both ways: on a CPU, with plain operations, or if kernels cannot reach the host's memory."""
        if not (self.on_gpu and getattr(self.model.ops, "fused", False)):
            return None
        try:
            with self._on_device():
                self.block.take({"table": np.zeros((0, 0), np.int32)}, self.block_table, rows=0)  # of no step: finds out
                return torch.zeros((self.block.turns, len(self.last)), dtype=torch.int64, pin_memory=True)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            warnings.warn(f"decode steps copy to and from the host: {why}", RuntimeWarning, stacklevel=2)
            return None

    def _make_graphs(self, capture: Capture) -> DecodeGraphs:
        return DecodeGraphs(
            self.model,
            self.block.device,
            self._all_rows(len(self.last)),
            self.last,
            scratch=self._scratch_page * self.page_size,
            longest=self.max_len,
            any_length=getattr(self.model.ops, "any_length", False),
            capture=capture,
            host=self.host_tokens,
        )

    def _make_prefill_graphs(self, capture: Capture) -> PrefillGraphs:
        view, scratch = self._all_rows(len(self.block.device["slots"])), self._scratch_page * self.page_size
        return PrefillGraphs(
            self.model, self.block.device, view, self.last, scratch=scratch, longest=self.max_len, capture=capture
        )

    def capture_graphs(self, sampling: Sequence[str] = (GREEDY, RANDOM), sizes: Sequence[int] | None = None) -> float:
        """Captures decode steps of every batch size (or of `sizes`), largest first, before a request waits for one; seconds.

        Without this, and where attention gathers keys up to a bound (so each length has graphs of its own), each is captured
        when it is first met. Must be called while nothing runs.
        """
        graphs = self.graphs
        if graphs is None or not graphs.any_length:
            return 0.0
        before = graphs.seconds
        kind, empty = self._kv_kind, self._no_requests()
        with torch.inference_mode(), self._on_device():
            for size in sorted(sizes or graphs.sizes, reverse=True):
                self.block.upload(graphs.padded(empty, 0, size))
                for stage, bound in product(sampling, graphs.bounds(size)):
                    graphs.run(StepShape(size, stage, kind, bound))
        return graphs.seconds - before

    def capture_prefill_graphs(self, wanted: Callable[[MixedShape], bool] = lambda shape: True) -> float:
        """The same of steps with prompts, for loads of prompts of all lengths beside decodes; seconds. Some hundred graphs (of
        the `wanted` ones the largest MOST_GRAPHS): without this each is captured when it was met twice."""
        graphs = self.prefill_graphs
        if graphs is None:
            return 0.0
        started, nothing = time.perf_counter(), self._no_requests() | {"cu_q": np.zeros(1, np.int64)}
        shapes = graphs.shapes(self._kv_kind)
        with torch.inference_mode(), self._on_device():
            self.block.upload(graphs.padded(nothing, shapes[0]))  # the largest: no token and no request in any of them
            graphs.make([shape for shape in shapes if wanted(shape)][:MOST_GRAPHS])
        return time.perf_counter() - started

    @property
    def _kv_kind(self) -> str:
        return "extent" if self.config.kv_allocator in EXTENT_ALLOCATORS else "paged"

    def _no_requests(self) -> dict[str, np.ndarray]:
        return {name: np.zeros(0, np.int64) for name in self.block.device}

    # --- results

    def _mark(self) -> Mark:
        """This moment on the device's time line."""
        if not self.on_gpu:
            return self.clock.now()
        event = torch.cuda.Event(enable_timing=True)
        if self._anchor is None:
            torch.cuda.synchronize(self.device)
            event.record()
            event.synchronize()
            self._anchor = event, self.clock.now()
            event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _download(self, sampled: SampleResult) -> list[torch.Tensor | None]:
        """Starts the copies to the host of what is not there. Log-probabilities travel only when a request asked for them."""
        return [
            p if p is None or p.is_cpu else torch.empty_like(p, device="cpu", pin_memory=True).copy_(p, non_blocking=True)
            for p in (sampled.tokens, sampled.logprob, sampled.top_ids, sampled.top_logprobs)
        ]

    def _finisher(self, plan: Plan, before: Mark, after: Mark, parts: list[torch.Tensor | None]) -> Callable[[], StepResult]:
        def finish() -> StepResult:
            try:
                start, end = self._times(before, after)
            except Exception as error:  # an asynchronous failure of the device shows at the first wait
                now = self.clock.now()
                return StepResult(plan.step, np.zeros(0, np.int64), now, now, error=error)
            tokens, logprob, top_ids, top_logprobs = (None if p is None else p.numpy() for p in parts)
            assert tokens is not None
            tokens = tokens.copy()  # where they lie a later step of the same turn writes its own
            bad = tuple(np.flatnonzero(tokens < 0).tolist())
            return StepResult(plan.step, tokens, start, end, logprob, top_ids, top_logprobs, bad_rows=bad)

        return finish

    def _times(self, before: Mark, after: Mark) -> tuple[float, float]:
        """Engine seconds of two marks, waiting for the second. Each step is timed from the end of the one before, so the
        float32 milliseconds that CUDA returns never grow large enough to lose digits. The two clocks drift apart by some
        parts in a million: where the host was waiting when the step ended, its own clock sets them right again."""
        if isinstance(before, float) or isinstance(after, float):
            return before, after  # type: ignore[return-value]
        waited = not after.query()
        after.synchronize()
        now = self.clock.now()
        assert self._anchor is not None
        anchor, at = self._anchor
        start = at + max(0.0, anchor.elapsed_time(before) / 1e3)
        end = min(start + before.elapsed_time(after) / 1e3, now)
        if waited:
            end = max(end, now - WAKE_SECONDS)
        self._anchor = after, end
        return min(start, end), end

    def reset(self) -> None:
        self.seen.clear()
        self.block.settle()  # by the time line that their steps began on
        self._anchor = None
        if self.on_gpu:
            with suppress(Exception):  # a device that is lost says so again at the next step, and fails that one
                torch.cuda.synchronize(self.device)
                torch.cuda.empty_cache()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.block.settle()  # what is pinned goes to others at once, whatever kernels still do there
        for name in ("graphs", "prefill_graphs", "k", "v", "model", "block", "block_table", "last", "seen", "host_tokens"):
            delattr(self, name)
        self._anchor = None
        gc.collect()
        if self.on_gpu:
            torch._C._cuda_clearCublasWorkspaces()  # those of the capture stream live in the graphs' pool
            torch.cuda.empty_cache()


class StepHandle:
    """A step that was launched; it ends at `end`, an event unless launching already was the whole step."""

    def __init__(self, finish: Callable[[], StepResult], end: Mark = 0.0) -> None:
        self._finish, self._end = finish, end
        self._result: StepResult | None = None

    def done(self) -> bool:
        return isinstance(self._end, float) or self._end.query()

    def result(self) -> StepResult:
        if self._result is None:
            self._result = self._finish()
            del self._finish  # and what it held: the plan, memory that the result was copied from
        return self._result
