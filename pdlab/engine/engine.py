"""The step loop: expire what is late, plan, submit, commit the oldest step in flight.

        step 1   plan submit |------ device ------| commit
        step 2               plan submit .........|------ device ------| commit         (steps_in_flight = 2)

With two steps in flight the host plans and commits in the shadow of the device. A request's last token is then seen one
step late: the step behind it computed one token too many, which is dropped.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pdlab.allocators import make_allocator
from pdlab.allocators.interface import Allocator
from pdlab.core.config import EngineConfig, SamplingParams
from pdlab.core.errors import CapacityError, ConfigError, ContextTooLong, InvalidRequest, StepFailed
from pdlab.core.plan import Plan
from pdlab.core.request import FinishReason, Request, TokenEvent, TokenLogprob
from pdlab.core.trace import TraceRow
from pdlab.costs.interface import Estimator
from pdlab.engine.interface import Executor, Handle, StepResult
from pdlab.engine.sampling import request_seed
from pdlab.engine.text import Decoder, TextStream
from pdlab.models.config import ModelConfig
from pdlab.scheduler.batching import make_batching
from pdlab.scheduler.policies import make_policy
from pdlab.scheduler.scheduler import Scheduler

TRACE_ROWS = 1 << 15  # of the newest steps: about 30 MB; who needs every row of a longer run puts a list in `trace`


@dataclass
class Live:
    """A request that has not ended, and how its tokens become text."""

    request: Request
    limit: int  # output tokens after which it ends
    end_tokens: frozenset[int]
    text: TextStream | None  # None: nobody reads the text before the end
    streamed: bool  # each token is an event


@dataclass
class Flight:
    """A step between submit and commit. `then`: what the trace row says of the moment when it was submitted."""

    plan: Plan
    handle: Handle
    plan_s: float
    launch_s: float  # of handing it to a device that works beside the host; 0 where there is none
    then: dict[str, Any]


class Engine:
    """One model, one memory, one queue. Not thread-safe: whoever calls `step` owns it.

    `decoder()` makes a fresh token-to-text decoder, None for a model without a tokenizer. `end_tokens` are the model's own.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        executor: Executor,
        estimator: Estimator,
        *,
        decoder: Callable[[], Decoder] | None = None,
        end_tokens: Sequence[int] = (),
    ) -> None:
        self.config, self.model, self.executor, self.estimator = config, model, executor, estimator
        self.clock = executor.clock
        self.max_len, self.allocator = _memory(config, model, executor.capacity())
        self.scheduler = Scheduler(config, self.allocator, make_policy(config), make_batching(config), estimator, self.max_len)
        self.trace: deque[TraceRow] | list[TraceRow] = deque(maxlen=TRACE_ROWS)
        self.live: dict[int, Live] = {}
        self.in_flight: deque[Flight] = deque()
        self.quiet_until = 0.0  # the caller's word that no request is added before this time; lets a simulation skip ahead
        self.stuck = False  # requests wait, nothing runs, and only time or an arrival can change that
        self._decoder = decoder
        self._end_tokens = frozenset(end_tokens)
        self._late: list[tuple[float, int]] = []  # heap of (when it times out, request id)
        self._number = 0

    # --- requests

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        arrival_s: float | None = None,
        priority: int = 0,
        ttft_deadline_s: float | None = None,
        per_token_deadline_s: float | None = None,
        kind: str = "",
        stream: bool = False,
    ) -> Request:
        """Admits a request or raises InvalidRequest. `arrival_s`: on the engine's clock, now by default."""
        self.check(prompt, params)
        number, self._number = self._number, self._number + 1
        request = Request(
            number,
            prompt,
            params,
            self.clock.now() if arrival_s is None else arrival_s,
            seed=request_seed(params, self.config.seed, number),
            priority=priority,
            ttft_deadline_s=ttft_deadline_s,
            per_token_deadline_s=per_token_deadline_s,
            kind=kind,
        )
        text = None
        if self._decoder is not None and (stream or params.stop):
            text = TextStream(self._decoder(), params.stop)
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._end_tokens)
        self.live[number] = Live(request, self.scheduler.output_limit(request), ends, text, stream)
        if params.timeout_s is not None:
            heapq.heappush(self._late, (request.arrival_s + params.timeout_s, number))
        self.scheduler.add(request)
        return request

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Raises InvalidRequest for a request that could never run here."""
        if len(prompt) == 0:
            raise InvalidRequest("the prompt is empty", "give at least one token")
        if len(prompt) >= self.max_len:
            raise ContextTooLong(
                f"the prompt has {len(prompt):,} tokens and {self.model.name} can hold {self.max_len:,} here, output included",
                'shorten it, or pass truncate="left"',
            )
        if params.stop and self._decoder is None:
            raise InvalidRequest(f"stop={params.stop!r} needs text and this engine has no tokenizer", "use stop_token_ids")
        if any(t >= self.model.vocab_size for t in params.stop_token_ids):
            raise InvalidRequest(
                f"stop_token_ids={params.stop_token_ids} is outside the vocabulary", f"use ids below {self.model.vocab_size:,}"
            )

    def abort(self, request_id: int) -> list[TokenEvent]:
        """Ends a request now, wherever it is; a token of it that is in flight is dropped. Unknown or ended: nothing."""
        live = self.live.get(request_id)
        return [] if live is None else [self.finish(live, FinishReason.ABORTED, self.clock.now())]

    @property
    def idle(self) -> bool:
        return not self.live and not self.in_flight

    # --- the loop

    def step(self) -> list[TokenEvent]:
        """One turn: events are the tokens of streamed requests, and the end of every request."""
        try:
            return self.turn()
        except BaseException:  # an interrupt (Ctrl-C) or a bug: nobody knows how far the step came
            self.recover()
            raise

    def turn(self) -> list[TokenEvent]:
        started = time.perf_counter()
        now = self.clock.now()
        events = self.expire(now)
        plan = self.scheduler.plan(now)
        self.stuck = plan is None and not self.in_flight and bool(self.live)
        if plan is not None:
            self.in_flight.append(self.submit(plan, started))
        if self.in_flight and (plan is None or len(self.in_flight) >= self.config.steps_in_flight):
            events += self.commit_oldest()
        return events

    def expire(self, now: float) -> list[TokenEvent]:
        """Ends the requests whose timeout has passed."""
        events = []
        while self._late and self._late[0][0] <= now:
            _, number = heapq.heappop(self._late)
            if (live := self.live.get(number)) is not None:
                events.append(self.finish(live, FinishReason.TIMEOUT, now))
        return events

    def submit(self, plan: Plan, started: float) -> Flight:
        s, memory = self.scheduler, self.allocator.stats()
        arriving = sum(p.new_tokens * p.repeat for p in (plan, *(f.plan for f in self.in_flight)))
        then: dict[str, Any] = {
            "waiting": len(s.waiting),
            "running": len(s.running),
            "preempted": s.preempted_last,
            "pages_used": memory.pages_used,
            "waste_internal": memory.waste_internal_with(arriving),
            "waste_external": memory.waste_external,
        }
        planned, then["t_submit"] = time.perf_counter(), self.clock.now()
        handle = self.executor.submit(plan)
        launch_s = time.perf_counter() - planned if self.executor.overlaps else 0.0
        return Flight(plan, handle, planned - started, launch_s, then)

    def commit_oldest(self) -> list[TokenEvent]:
        """Waits for the oldest step, takes in its tokens, ends what is complete, writes the trace row."""
        flight = self.in_flight.popleft()
        result = flight.handle.result()
        started = time.perf_counter()
        if result.error is not None:
            return self.fail(result.error)
        requests = self.scheduler.commit(flight.plan)
        events: list[TokenEvent] = []
        bad = {i for i, token in enumerate(result.tokens.tolist()) if token < 0} | set(result.bad_rows)
        for i, (b, token) in enumerate(zip(flight.plan.sample_rows.tolist(), result.tokens.tolist(), strict=True)):
            live = self.live.get(requests[b].request_id)
            if live is None:
                continue  # it ended while this step was in flight
            if i in bad:
                events.append(self.refuse_row(live, result.t_end))
                continue
            if live.request.params.logprobs is not None:
                live.request.logprobs.append(_logprob(result, i, token, live.request.params.logprobs))
            event = self.accept(live, token, result.t_end)
            if event is not None:
                events.append(event)
        if bad:
            self.allocator.drop_prefixes()
        self.record(flight, result, time.perf_counter() - started)
        return events

    def accept(self, live: Live, token: int, t: float) -> TokenEvent | None:
        """Appends one output token and decides whether it was the last."""
        request = live.request
        request.output_token_ids.append(token)
        request.token_times.append(t)
        request.last_token_s = t
        if request.first_token_s is None:
            request.first_token_s = t
        reason, text = None, ""
        if token in live.end_tokens:
            reason = FinishReason.STOP
        elif live.text is not None:
            text = live.text.push(token)
            if live.text.stopped:
                reason = FinishReason.STOP
        if reason is None and len(request.output_token_ids) >= live.limit:
            reason = FinishReason.LENGTH
        if reason is not None:
            end = self.finish(live, reason, t)
            return TokenEvent(request.request_id, token, text + end.text, end.finish_reason)
        return TokenEvent(request.request_id, token, text) if live.streamed else None

    def finish(self, live: Live, reason: FinishReason, t: float, error: str | None = None) -> TokenEvent:
        """Ends a request: memory and row are given back, what was held of its text comes out."""
        request = live.request
        del self.live[request.request_id]
        self.scheduler.remove(request)
        rest = ""
        if live.text is not None:
            rest = live.text.end()
            request.text = live.text.text
            if live.text.stopped and reason is FinishReason.LENGTH:
                reason = FinishReason.STOP
        request.finish_reason, request.finish_s, request.error = reason, t, error
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.estimator.finished(request)
        return TokenEvent(request.request_id, -1, rest, reason.value, error)

    def refuse_row(self, live: Live, t: float) -> TokenEvent:
        error = StepFailed(
            "the model's logits for this request hold no finite value",
            "check the weights, or use a dtype with more range (bfloat16, float32)",
        )
        return self.finish(live, FinishReason.ERROR, t, f"StepFailed: {error}")

    def fail(self, cause: BaseException) -> list[TokenEvent]:
        """The oldest step failed: the requests it carried end with the cause."""
        carried = [self.live[r.request_id] for r in self.recover() if r.request_id in self.live]
        now = self.clock.now()
        error = f"StepFailed: the step that carried this request failed: {type(cause).__name__}: {cause}"
        return [self.finish(live, FinishReason.ERROR, now, error) for live in carried]

    def recover(self) -> list[Request]:
        """Back to a state that is known: steps in flight are dropped, the executor forgets everything, what runs is computed
        again. Returns the requests of the oldest step that was not committed."""
        for flight in self.in_flight:
            flight.handle.result()
        self.in_flight.clear()
        self.executor.reset()
        return self.scheduler.restart([live.request for live in self.live.values()])

    def give_up(self) -> list[TokenEvent]:
        """For a caller that expects no more arrivals: ends what the policy would never admit. Only when stuck."""
        now = self.clock.now()
        error = f"StepFailed: the policy {self.config.policy!r} with batching {self.config.batching!r} never runs this request"
        return [self.finish(live, FinishReason.ERROR, now, error) for live in list(self.live.values())]

    @property
    def next_timeout(self) -> float | None:
        """When the next request that still lives times out."""
        while self._late and self._late[0][1] not in self.live:
            heapq.heappop(self._late)
        return self._late[0][0] if self._late else None

    def record(self, flight: Flight, result: StepResult, commit_s: float) -> None:
        shape = flight.plan.shape
        row = TraceRow(
            step=flight.plan.step,
            clock=self.clock.kind,
            t_start=result.t_start,
            t_end=result.t_end,
            prefill_tokens=shape.prefill_tokens,
            prefill_context=shape.prefill_context,
            decode_count=shape.decode_count,
            kv_tokens=shape.decode_kv_tokens,
            pad_tokens=flight.plan.pad_tokens,
            host_s=flight.plan_s + commit_s,
            predicted_s=flight.plan.predicted_s,
            **flight.then,
        )
        self.trace.append(row)
        self.estimator.observe(row, shape, flight.launch_s)

    def close(self) -> None:
        """Ends what lives as aborted and gives the memory back."""
        for flight in self.in_flight:
            flight.handle.result()
        self.in_flight.clear()
        for live in list(self.live.values()):
            self.finish(live, FinishReason.ABORTED, self.clock.now())
        self.executor.close()


def _memory(config: EngineConfig, model: ModelConfig, capacity: int) -> tuple[int, Allocator]:
    """(tokens one request may have, the allocator): a request must fit the context, the setting, and the memory alone."""
    longest = min(longest_request(config, model), capacity)
    allocator = make_allocator(config, capacity, max_len=longest)
    longest = min(longest, allocator.stats().largest_free)
    if longest < 2:
        raise CapacityError(
            f"a request can have {longest} tokens in a KV memory of {capacity:,} with pages of {config.page_size}",
            "a prompt and one output token need 2: raise max_model_len or kv_capacity_tokens, or use a smaller page_size",
        )
    return longest, allocator


def longest_request(config: EngineConfig, model: ModelConfig) -> int:
    """Tokens of prompt + output that the setting and the model's context allow; ConfigError where they contradict."""
    longest = config.max_model_len or model.max_context
    if longest > model.max_context:
        raise ConfigError(
            f"max_model_len={longest} is more than {model.name} can attend to", f"use at most {model.max_context}, or None"
        )
    return longest


def _logprob(result: StepResult, i: int, token: int, count: int) -> TokenLogprob:
    if result.logprob is None:
        return TokenLogprob(token, float("nan"))
    top: tuple[tuple[int, float], ...] = ()
    if count and result.top_ids is not None and result.top_logprobs is not None:
        top = tuple(zip(result.top_ids[i, :count].tolist(), result.top_logprobs[i, :count].tolist(), strict=True))
    return TokenLogprob(token, float(result.logprob[i]), top)
