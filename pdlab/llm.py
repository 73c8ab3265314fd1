"""LLM: the façade that notebooks use.

with LLM("smollm2-135m") as llm:
    outputs = llm.generate(["Hello", "The sea is"], SamplingParams(max_tokens=32))
    for event in llm.stream("Once upon a time"): print(event.text, end="")
    tables = llm.serve(workload)
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pdlab.core.config import EngineConfig, SamplingParams
from pdlab.core.errors import ConfigError, EngineClosed, MeasurementError, PdlabError, WorkloadError
from pdlab.core.request import Request, Timing, TokenEvent, TokenLogprob
from pdlab.core.trace import TraceRow
from pdlab.engine.door import Door, Prompt, params_for
from pdlab.engine.engine import Engine, longest_request
from pdlab.engine.tables import RequestTable, steps_frame
from pdlab.models.config import ModelConfig

if TYPE_CHECKING:
    import pandas as pd

    from pdlab.costs.learned import LearnedEstimator
    from pdlab.models.model import Model
    from pdlab.models.tokenizer import Tokenizer
    from pdlab.workloads.workload import Item, Workload

WORTH_KEEPING = 64  # steps learned from


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
        if not isinstance(config, EngineConfig | None):
            raise ConfigError(f"config is {config!r}", "use an EngineConfig, or its fields by name: LLM(model, policy='sjf')")
        self.config = config = (config or EngineConfig()).with_(**overrides)
        self.model: Model | None = None
        self.tokenizer: Tokenizer | None = None
        self._mail: dict[int, deque[TokenEvent]] = {}  # events of streams that another caller's step produced
        self._engine: Engine | None = None
        self._learns: tuple[LearnedEstimator, str, str, int] | None = (
            None  # on which device, in which dtype; steps known before
        )
        build = self._simulated if config.executor == "simulated" else self._loaded
        self._engine = build(model)

    def _loaded(self, source: Any) -> Engine:
        from pdlab.costs.calibration import recall
        from pdlab.costs.estimator import make_estimator
        from pdlab.costs.learned import LearnedEstimator
        from pdlab.costs.roofline import ceilings_for
        from pdlab.engine.executor import TorchExecutor
        from pdlab.hardware.probe import resolve_device
        from pdlab.kernels.dispatch import make_ops
        from pdlab.models.loading import Loaded, load

        loaded = source if isinstance(source, Loaded) else None
        machine = resolve_device(str(loaded.model.device) if loaded is not None else self.config.device)
        dtype = machine.dtype if self.config.dtype == "auto" else self.config.dtype
        if loaded is None:  # what cannot run is refused before its weights are read
            check = partial(longest_request, self.config)
            loaded = load(source, device=machine.device, dtype=dtype, seed=self.config.seed, check=check)
        self.model_config, self.tokenizer = loaded.config, loaded.tokenizer
        self.model = model = copy(loaded.model)  # the weights may be shared, the operations are this engine's own
        dtype = str(model.dtype).removeprefix("torch.")
        if self.config.dtype not in ("auto", dtype):
            raise ConfigError(f"dtype={self.config.dtype!r}, and the model was loaded in {dtype}", "load it in that dtype")
        model.ops = make_ops(self.config, loaded.config, model.device, model.dtype)
        if (
            prepare := getattr(model.ops, "prepare", None)
        ) is not None:  # operations that want their weights laid out otherwise
            prepare(model.layers)
        executor = TorchExecutor(self.config, model, max_len=longest_request(self.config, loaded.config))
        itemsize = model.weights.embed.element_size()
        padded = executor.prefill_graphs is not None
        estimator = make_estimator(self.config, loaded.config, ceilings_for(machine.slug, dtype), itemsize, padded=padded)
        if isinstance(estimator, LearnedEstimator):
            try:
                recall(estimator, machine.slug, dtype)
                self._learns = estimator, machine.slug, dtype, estimator.seen
            except MeasurementError as error:  # a folder may have a name that cannot name a file of ours
                warnings.warn(f"what the estimator learns is not kept: {error}", RuntimeWarning, stacklevel=4)
        decoder = self.tokenizer.stream if self.tokenizer is not None else None
        return Engine(self.config, loaded.config, executor, estimator, decoder=decoder, end_tokens=loaded.config.eos_token_ids)

    def _simulated(self, source: Any) -> Engine:
        from pdlab.costs.estimator import make_estimator
        from pdlab.costs.formulas import itemsize_of
        from pdlab.costs.roofline import ceilings_for
        from pdlab.engine.coalescing import CoalescingEngine
        from pdlab.engine.simulated import make_simulated, simulated_dtype
        from pdlab.models.catalogue import config_of

        config, device = self.config, self.config.simulated_device
        self.model_config = source if isinstance(source, ModelConfig) else config_of(source)
        dtype = simulated_dtype(config)
        estimator = make_estimator(config, self.model_config, ceilings_for(device, dtype), itemsize_of(dtype))
        return CoalescingEngine(config, self.model_config, make_simulated(config, self.model_config), estimator)

    # --- use

    @property
    def engine(self) -> Engine:
        """The engine underneath: trace, allocator, scheduler, clock. Raises EngineClosed after close()."""
        if self._engine is None:
            raise EngineClosed("this LLM was closed", "make a new one; its memory was given back")
        return self._engine

    @property
    def door(self) -> Door:
        """What checks prompts; raises EngineClosed after close()."""
        return Door(self.engine, self.tokenizer)

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
        checked = self.door.admissible(prompts, params, truncate)
        requests: list[Request] = []
        with self._none_left_running(requests):
            for ids, p in checked:
                requests.append(self.engine.add(ids, p))
            while not all(r.finished for r in requests):
                self._turn(None)
        return [self._output(r) for r in requests]

    def chat(self, messages: list[dict[str, str]], params: SamplingParams | None = None, **options: Any) -> RequestOutput:
        """Generates the assistant's next message, through the model's chat template."""
        return self.generate(self.chat_prompt(messages), params, **options)[0]

    def chat_prompt(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation, up to where the assistant's message begins."""
        return self.door.need_tokenizer("a conversation").chat(messages)

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
        return self._events(self.door.admissible(prompts, params, truncate))

    def _events(self, checked: list[tuple[Sequence[int], SamplingParams]]) -> Iterator[TokenEvent]:
        mail: deque[TokenEvent] = deque()
        requests: list[Request] = []
        with self._none_left_running(requests):
            for ids, p in checked:
                requests.append(request := self.engine.add(ids, p, stream=True))
                self._mail[request.request_id] = mail
            while mail or not all(r.finished for r in requests):
                if mail:
                    yield mail.popleft()
                else:
                    self._turn(None)

    def abort(self, request_id: int) -> bool:
        """Ends a request; False if it is unknown or has ended. Its stream gets a last event with "aborted"."""
        events = self.engine.abort(request_id)
        self._deliver(events)
        return bool(events)

    def serve(self, workload: Workload | Iterable[Item], *, truncate: str | None = None) -> ServeResult:
        """Replays a workload on the engine's clock, open loop (or closed: see Workload.clients), to its end.

        An item that is invalid becomes a row with finish_reason "error" and its error; the others are not affected.
        """
        import pandas  # noqa: F401  loaded before the clock is read: it takes longer than a request

        return _Serving(self, workload, truncate).run()

    def close(self) -> None:
        """Ends what runs as aborted and gives weights and KV memory back. May be called twice."""
        if self._engine is None:
            return
        self._abort([live.request for live in self._engine.live.values()])
        engine, self._engine = self._engine, None
        self.model = self.tokenizer = None
        engine.close()
        self._keep_what_was_learned()

    def _keep_what_was_learned(self) -> None:
        """For the next engine with this model on this device, and for its simulator; under home_dir()."""
        from pdlab.costs.calibration import save_for_device

        if self._learns is None:
            return
        estimator, device, dtype, before = self._learns
        self._learns = None
        if estimator.seen - before >= WORTH_KEEPING:
            try:
                save_for_device(estimator, device, dtype)
            except OSError as error:
                warnings.warn(f"what the estimator learned is not kept: {error}", RuntimeWarning, stacklevel=3)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- the loop's callers

    @contextmanager
    def _none_left_running(self, requests: Collection[Request]) -> Iterator[None]:
        """However the block is left (an error, Ctrl-C, a stream that nobody reads on), `requests` end with it."""
        try:
            yield
        finally:
            self._abort(requests)
            for request in requests:
                self._mail.pop(request.request_id, None)

    def _abort(self, requests: Iterable[Request]) -> None:
        if self._engine is not None:
            self._deliver([event for r in requests for event in self._engine.abort(r.request_id)])

    def _turn(self, wake: float | None) -> None:
        """One step. When nothing can run, waits for the next timeout or for `wake`, whichever is first; with neither,
        what waits would wait for ever, so it ends with an error."""
        engine = self.engine
        engine.quiet_until = math.inf if wake is None else wake
        events = engine.step()
        if engine.stuck:
            times = [t for t in (wake, engine.next_timeout) if t is not None]
            if times:
                engine.clock.sleep_until(min(times))
            else:
                events += engine.give_up()
        self._deliver(events)

    def _deliver(self, events: list[TokenEvent]) -> None:
        for event in events:
            if (mail := self._mail.get(event.request_id)) is not None:
                mail.append(event)

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


class _Serving:
    """One run of serve(): who comes next, who is there, and the rows of those who left."""

    def __init__(self, llm: LLM, workload: Workload | Iterable[Item], truncate: str | None) -> None:
        from pdlab.workloads.prompts import prompt_of

        if isinstance(workload, str) or not isinstance(workload, Iterable):
            raise WorkloadError(f"there is nothing to serve in {workload!r}", "give a Workload, or Items in order of arrival")
        self.llm, self.engine, self.truncate, self.prompt_of = llm, llm.engine, truncate, prompt_of
        self.clients: int | None = getattr(workload, "clients", None)
        self.seed: int = getattr(workload, "seed", None) or 0
        items = map(_item, workload)
        self.items = enumerate(sorted(items, key=lambda i: i.arrival_s) if isinstance(workload, Sequence) else items)
        self.next = next(self.items, None)
        self.start = self.engine.clock.now()
        self.table = RequestTable(self.start)
        self.live: dict[int, Request] = {}
        self.mail: deque[TokenEvent] = deque()

    def run(self) -> ServeResult:
        steps: list[TraceRow] = []
        before, self.engine.trace = self.engine.trace, steps
        try:
            with self.llm._none_left_running(self.live.values()):
                while self.next is not None or self.live:
                    self.turn()
        finally:
            before.extend(steps)
            self.engine.trace = before
        return ServeResult(self.table.frame(), steps_frame(steps, self.start))

    def turn(self) -> None:
        self.admit(self.engine.clock.now())
        if self.live:
            self.llm._turn(self.next_arrival())
        elif (due := self.next_arrival()) is not None:
            self.engine.clock.sleep_until(due)
        while self.mail:
            event = self.mail.popleft()
            if event.finish_reason is not None:
                del self.llm._mail[event.request_id]
                self.table.add(self.live.pop(event.request_id))

    def next_arrival(self) -> float | None:
        """When the next item comes; None when none does, or when all clients are waiting for an answer."""
        if self.next is None or (self.clients is not None and len(self.live) >= self.clients):
            return None
        return self.start + self.next[1].arrival_s

    def admit(self, now: float) -> None:
        while (due := self.next_arrival()) is not None and due <= now and self.next is not None:
            (number, item), self.next = self.next, next(self.items, None)
            self.arrive(number, item, now if self.clients else due)

    def arrive(self, number: int, item: Item, arrival: float) -> None:
        llm, tokens = self.llm, item.prompt_tokens
        try:
            [params] = params_for(item.sampling(), 1)
            prompt = self.prompt_of(item, number, llm.model_config.vocab_size, self.seed)
            ids = prompt[:] if item.prompt is None and not isinstance(prompt, str) else llm.door.ids(prompt)
            tokens = len(ids)
            request = self.engine.add(
                llm.door.fit(ids, params, self.truncate),
                params,
                arrival_s=arrival,
                priority=item.priority,
                ttft_deadline_s=item.ttft_deadline_s,
                per_token_deadline_s=item.per_token_deadline_s,
                kind=item.kind,
            )
        except PdlabError as error:
            self.table.refuse(arrival, tokens, item.priority, error)
        else:
            self.live[request.request_id] = request
            llm._mail[request.request_id] = self.mail


def _item(item: Any) -> Item:
    if not hasattr(item, "arrival_s"):
        raise WorkloadError(f"{item!r} is no Item of a workload", "use pdlab.workloads.workload.Item(arrival_s, prompt=...)")
    return item
