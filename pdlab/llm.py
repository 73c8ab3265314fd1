"""LLM: the façade that notebooks use.

with LLM("smollm2-135m") as llm:
    outputs = llm.generate(["Hello", "The sea is"], SamplingParams(max_tokens=32))
    for event in llm.stream("Once upon a time"): print(event.text, end="")
    tables = llm.serve(workload)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from pdlab.core.config import EngineConfig, SamplingParams
from pdlab.core.errors import EngineClosed, InvalidRequest, PdlabError
from pdlab.core.request import Request, Timing, TokenEvent, TokenLogprob
from pdlab.engine.engine import Engine
from pdlab.engine.tables import RequestTable, steps_frame

if TYPE_CHECKING:
    import pandas as pd

    from pdlab.models.tokenizer import Tokenizer
    from pdlab.workloads.workload import Item, Workload

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class RequestOutput:
    """One finished request. `error` is the cause where finish_reason is "error", else None."""

    request_id: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    logprobs: list[TokenLogprob] | None
    timing: Timing
    error: str | None = None


@dataclass(frozen=True)
class ServeResult:
    """Two tables, seconds throughout, counted from the beginning of serve(): one row a request, one row a step."""

    requests: pd.DataFrame
    steps: pd.DataFrame


class LLM:
    """A model with its memory and its queue. Used by one thread; several streams may be read in turn.

    `model`: a catalogue name, a folder, a GGUF file, `random:NAME`, or what models.loading.load returned. `overrides` are
    fields of EngineConfig. With executor="simulated" nothing is loaded: a virtual clock advances by what each step would
    take on `simulated_device`, and tokens are made up.
    """

    def __init__(self, model: Any = "smollm2-135m", config: EngineConfig | None = None, **overrides: Any) -> None:
        config = (config or EngineConfig()).with_(**overrides)
        self.config = config
        self.tokenizer: Tokenizer | None = None
        self._mail: dict[int, deque[TokenEvent]] = {}  # events of streams that another caller's step produced
        self._engine: Engine | None = None
        build = self._simulated if config.executor == "simulated" else self._loaded
        self._engine = build(model)

    def _loaded(self, source: Any) -> Engine:
        from pdlab.costs.estimator import make_estimator
        from pdlab.costs.roofline import ceilings_for
        from pdlab.engine.executor import TorchExecutor
        from pdlab.hardware.probe import resolve_device
        from pdlab.models.loading import Loaded, load

        machine = resolve_device(self.config.device)
        dtype = machine.dtype if self.config.dtype == "auto" else self.config.dtype
        loaded = (
            source if isinstance(source, Loaded) else load(source, device=machine.device, dtype=dtype, seed=self.config.seed)
        )
        model = loaded.model
        self.model_config, self.tokenizer, self.model = loaded.config, loaded.tokenizer, model
        if find_spec("pdlab.kernels.dispatch"):
            from pdlab.kernels.dispatch import make_ops

            model.ops = make_ops(self.config, loaded.config, model.device, model.dtype)
        max_len = self.config.max_model_len or loaded.config.max_context
        executor = TorchExecutor(self.config, model, max_len=min(max_len, loaded.config.max_context))
        itemsize = model.weights.embed.element_size()
        dtype = str(model.dtype).removeprefix("torch.")
        estimator = make_estimator(self.config, loaded.config, ceilings_for(machine.slug, dtype), itemsize)
        decoder = self.tokenizer.stream if self.tokenizer is not None else None
        return Engine(self.config, loaded.config, executor, estimator, decoder=decoder, end_tokens=loaded.config.eos_token_ids)

    def _simulated(self, source: Any) -> Engine:
        from pdlab.costs.calibration import cost_model
        from pdlab.costs.estimator import make_estimator
        from pdlab.costs.formulas import itemsize_of
        from pdlab.costs.roofline import ceilings_for
        from pdlab.engine.simulated import SimulatedExecutor, kv_capacity
        from pdlab.hardware.probe import default_dtype
        from pdlab.hardware.specs import spec
        from pdlab.models.catalogue import config_of, parameter_count

        model = source if hasattr(source, "kv_bytes_per_token") else config_of(source)
        device = spec(self.config.simulated_device)
        dtype = default_dtype(device.capability) if self.config.dtype == "auto" else self.config.dtype
        itemsize = itemsize_of(dtype)
        cost = cost_model(model, self.config.simulated_device, dtype)
        capacity = kv_capacity(self.config, model, device.memory_bytes, parameter_count(model) * itemsize, itemsize)
        executor = SimulatedExecutor(
            model,
            cost.step_seconds,
            capacity,
            steps_in_flight=self.config.steps_in_flight,
            host_s=cost.host_s,
            copy_s_per_token=2 * model.kv_bytes_per_token(itemsize) / device.bandwidth,
            calibration=cost.source,
        )
        self.model_config, self.model = model, None
        estimator = make_estimator(self.config, model, ceilings_for(self.config.simulated_device, dtype), itemsize)
        return Engine(self.config, model, executor, estimator)

    # --- use

    @property
    def engine(self) -> Engine:
        """The engine underneath: trace, allocator, scheduler, clock. Raises EngineClosed after close()."""
        if self._engine is None:
            raise EngineClosed("this LLM was closed", "make a new one; its memory was given back")
        return self._engine

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt + output that one request may have here."""
        return self.engine.max_len

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        truncate: str | None = None,
    ) -> list[RequestOutput]:
        """Runs all prompts together and returns their outputs in the order given.

        A prompt is text or token ids. Raises InvalidRequest, naming the prompt, before anything runs. `truncate="left"`
        drops the beginning of a prompt that does not fit. A request that fails later has finish_reason "error" and its
        cause in `error`; the others are not affected.
        """
        requests = [self.engine.add(ids, p) for ids, p in self._door(prompts, params, truncate)]
        self._until(lambda: all(r.finished for r in requests), requests)
        return [self._output(r) for r in requests]

    def chat(self, messages: list[dict[str, str]], params: SamplingParams | None = None, **options: Any) -> RequestOutput:
        """Generates the assistant's next message, through the model's chat template."""
        return self.generate(self.chat_prompt(messages), params, **options)[0]

    def chat_prompt(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation, up to where the assistant's message begins."""
        return self._need_tokenizer("a conversation").chat(messages)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        truncate: str | None = None,
    ) -> Iterator[TokenEvent]:
        """An event for each token, the last one of a request with its finish_reason.

        Bad input raises here, at the call; the requests are admitted when the first event is asked for. Leaving the loop
        early aborts what has not ended and gives its memory back.
        """
        return self._events(self._door(prompts, params, truncate))

    def _events(self, checked: list[tuple[Sequence[int], SamplingParams]]) -> Iterator[TokenEvent]:
        requests = [self.engine.add(ids, p, stream=True) for ids, p in checked]
        mail: deque[TokenEvent] = deque()
        try:
            self._mail |= {r.request_id: mail for r in requests}
            while mail or not all(r.finished for r in requests):
                if not mail:
                    self._until(lambda: bool(mail), requests)
                yield mail.popleft()
        finally:
            for request in requests:
                self._mail.pop(request.request_id, None)
                if self._engine is not None and not request.finished:
                    self._engine.abort(request.request_id)

    def abort(self, request_id: int) -> bool:
        """Ends a request; False if it is unknown or has ended. Its stream gets a last event with "aborted"."""
        events = self.engine.abort(request_id)
        self._deliver(events)
        return bool(events)

    def serve(self, workload: Workload | Iterable[Item], *, truncate: str | None = None) -> ServeResult:
        """Replays a workload on the engine's clock, open loop (or closed: see Workload.clients), to its end.

        An item that is invalid becomes a row with finish_reason "error" and its error; the others are not affected.
        """
        import pandas as pd  # noqa: F401  loaded before the clock is read: it takes longer than a request

        import pdlab.workloads.prompts  # noqa: F401

        engine, seed = self.engine, getattr(workload, "seed", None) or 0
        clients: int | None = getattr(workload, "clients", None)
        start, first_row = engine.clock.now(), len(engine.trace)
        table = RequestTable(start)
        items = enumerate(iter(workload))
        upcoming = next(items, None)
        live: dict[int, Request] = {}
        while upcoming is not None or live:
            now = engine.clock.now()
            while upcoming is not None and self._is_due(upcoming[1], start, now, clients, len(live)):
                arrival = now if clients else start + upcoming[1].arrival_s
                request = self._arrive(*upcoming, arrival, seed, truncate, table)
                if request is not None:
                    live[request.request_id] = request
                upcoming = next(items, None)
            if not live:
                if upcoming is not None and clients is None:
                    engine.clock.sleep_until(start + upcoming[1].arrival_s)
                continue
            wake = None if upcoming is None or clients else start + upcoming[1].arrival_s
            for event in self._turn(wake):
                if event.finish_reason is not None and event.request_id in live:
                    table.add(live.pop(event.request_id))
        return ServeResult(table.frame(), steps_frame(engine.trace[first_row:], start))

    def close(self) -> None:
        """Ends what runs as aborted and gives weights and KV memory back. May be called twice."""
        engine, self._engine = self._engine, None
        if engine is not None:
            self.model = self.tokenizer = None
            engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- the loop's callers

    def _until(self, done: Callable[[], bool], requests: list[Request]) -> None:
        """Steps until `done`; an interrupt (Ctrl-C) on the way ends `requests`, so that nothing runs on unseen."""
        try:
            while not done():
                self._turn(None)
        except BaseException:
            for request in requests:
                if self._engine is not None and not request.finished:
                    self._deliver(self._engine.abort(request.request_id))
            raise

    def _turn(self, wake: float | None) -> list[TokenEvent]:
        """One step. When nothing can run, waits for the next timeout or for `wake`, whichever is first; with neither,
        what waits would wait for ever, so it ends with an error."""
        engine = self.engine
        events = engine.step()
        if engine.stuck:
            times = [t for t in (wake, engine.next_timeout) if t is not None]
            if times:
                engine.clock.sleep_until(min(times))
            else:
                events += engine.give_up()
        self._deliver(events)
        return events

    def _deliver(self, events: list[TokenEvent]) -> None:
        for event in events:
            if (mail := self._mail.get(event.request_id)) is not None:
                mail.append(event)

    @staticmethod
    def _is_due(item: Item, start: float, now: float, clients: int | None, live: int) -> bool:
        return live < clients if clients else start + item.arrival_s <= now

    def _arrive(
        self, number: int, item: Item, arrival: float, seed: int, truncate: str | None, table: RequestTable
    ) -> Request | None:
        from pdlab.workloads.prompts import prompt_of

        try:
            params = item.sampling()
            prompt = prompt_of(item, number, self.model_config.vocab_size, seed)
            ids = self._ids(prompt, trusted=item.prompt is None)
            ids = self._fit(ids, params, truncate)
            return self.engine.add(
                ids,
                params,
                arrival_s=arrival,
                priority=item.priority,
                ttft_deadline_s=item.ttft_deadline_s,
                per_token_deadline_s=item.per_token_deadline_s,
                kind=item.kind,
            )
        except PdlabError as error:
            table.refuse(arrival, item.prompt_tokens, item.priority, error)
            return None

    # --- the door

    def _door(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None, truncate: str | None
    ) -> list[tuple[Sequence[int], SamplingParams]]:
        """Prompts and parameters, checked, or InvalidRequest before any of them was admitted."""
        engine = self.engine
        many = _as_list(prompts)
        each = _params_for(params, len(many))
        checked = []
        for i, (prompt, p) in enumerate(zip(many, each, strict=True)):
            try:
                ids = self._fit(self._ids(prompt), p, truncate)
                engine.check(ids, p)
            except InvalidRequest as error:
                if len(many) == 1:
                    raise
                raise type(error)(f"prompt {i}: {error.message}", error.hint) from error
            checked.append((ids, p))
        return checked

    def _ids(self, prompt: Any, trusted: bool = False) -> Sequence[int]:
        if trusted:
            return prompt
        if isinstance(prompt, str):
            if not prompt:
                raise InvalidRequest("the prompt is empty", "give at least one character or token id")
            return self._need_tokenizer("a text prompt").encode(prompt)
        try:
            ids = np.asarray(prompt if isinstance(prompt, np.ndarray) else list(prompt))
        except TypeError:
            ids = np.zeros(0, object)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise InvalidRequest(f"the prompt is neither text nor token ids: {_short(prompt)}", "give a str or a list of int")
        if ids.size and not (ids.min() >= 0 and ids.max() < self.model_config.vocab_size):
            wrong = int(ids[(ids < 0) | (ids >= self.model_config.vocab_size)][0])
            raise InvalidRequest(
                f"token id {wrong} is outside the vocabulary of {self.model_config.name}",
                f"use ids from 0 to {self.model_config.vocab_size - 1:,}",
            )
        return ids.tolist()

    def _fit(self, ids: Sequence[int], params: SamplingParams, truncate: str | None) -> Sequence[int]:
        """With truncate="left", a prompt that does not fit loses its beginning: it keeps what leaves room for max_tokens,
        and at least half of what the model can hold."""
        if truncate not in (None, "left"):
            raise InvalidRequest(f"truncate={truncate!r} is not possible", 'use "left" or None')
        longest = self.engine.max_len
        if truncate is None or len(ids) < longest:
            return ids
        keep = min(max(longest - params.max_tokens, longest // 2), longest - 1)
        return ids[len(ids) - keep :]

    def _need_tokenizer(self, what: str) -> Tokenizer:
        self.engine  # noqa: B018  raises after close()
        if self.tokenizer is None:
            raise InvalidRequest(f"{what} needs a tokenizer and {self.model_config.name} has none here", "pass token ids")
        return self.tokenizer

    def _output(self, r: Request) -> RequestOutput:
        assert r.finish_reason is not None
        text = r.text
        if not text and self.tokenizer is not None and not r.params.stop:
            ended = r.output_token_ids and r.finish_reason == "stop"
            text = self.tokenizer.decode(r.output_token_ids[:-1] if ended else r.output_token_ids)
        return RequestOutput(
            r.request_id,
            [int(t) for t in r.prompt_token_ids],
            r.output_token_ids,
            text,
            r.finish_reason.value,
            r.logprobs if r.params.logprobs is not None else None,
            r.timing(),
            r.error,
        )


def _as_list(prompts: Any) -> list[Any]:
    """One prompt or several, as several."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, np.ndarray):
        return [prompts] if prompts.ndim == 1 and prompts.dtype.kind in "iu" else list(prompts)
    if not isinstance(prompts, Sequence):
        raise InvalidRequest(f"prompts is a {type(prompts).__name__}", "give text, token ids, or a list of either")
    if len(prompts) == 0:
        raise InvalidRequest("the prompt is empty", "give text, token ids, or a list of either")
    if all(isinstance(t, int | np.integer) and not isinstance(t, bool) for t in prompts):
        return [prompts]
    return list(prompts)


def _params_for(params: Any, n: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * n
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        raise InvalidRequest(f"params is {_short(params)}", "give one SamplingParams, or one for each prompt")
    if len(params) != n:
        raise InvalidRequest(f"there are {n} prompts and {len(params)} SamplingParams", "give one, or one for each prompt")
    return list(params)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
