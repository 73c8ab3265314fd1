"""The façade: what it takes, what it gives, what it refuses, and that it leaves nothing behind."""

from __future__ import annotations

import gc
import sys
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "engine"))
import itertools

from tiny_engine import FAMILIES, GREEDY, alone, assert_nothing_leaked, prompts, tiny

from pdlab import LLM, EngineConfig, SamplingParams
from pdlab.core.errors import (
    CapacityError,
    ConfigError,
    ContextTooLong,
    DeviceUnavailable,
    EngineClosed,
    InvalidRequest,
    UnknownModel,
)
from pdlab.models.loading import load

SHORT = replace(GREEDY, max_tokens=5)


@pytest.fixture
def llm() -> Iterator[LLM]:
    with tiny(max_model_len=200) as llm:
        yield llm
        assert_nothing_leaked(llm)


# --- what it takes


def test_text_ids_and_lists_of_either_come_back_in_the_order_given(llm: LLM) -> None:
    [text] = llm.generate("hi", SHORT)
    [ids] = llm.generate([104, 105], SHORT)
    [array] = llm.generate(np.array([104, 105]), SHORT)
    mixed = llm.generate(["hi", [1, 2, 3], "hi", np.array([104, 105], np.int32)], SHORT)
    assert text.token_ids == ids.token_ids == array.token_ids == mixed[0].token_ids == mixed[2].token_ids == mixed[3].token_ids
    assert mixed[1].prompt_token_ids == [1, 2, 3]
    assert text.prompt_token_ids == [104, 105]
    assert [o.request_id for o in mixed] == sorted(o.request_id for o in mixed)
    each = llm.generate(["hi"] * 3, [replace(SHORT, max_tokens=n) for n in (2, 5, 3)])
    assert [o.token_ids for o in each] == [text.token_ids[:n] for n in (2, 5, 3)]
    assert len(llm.generate("hi")[0].token_ids) <= SamplingParams().max_tokens


BAD_PROMPTS = {
    "empty text": "",
    "empty list": [],
    "an empty list among others": [[1], []],
    "a number": 5,
    "nothing": None,
    "a mapping": {"a": 1},
    "bytes": b"abc",
    "bytes among others": [[1], b"abc"],
    "half of a surrogate pair": "a\ud800b",
    "an array of no dimension": np.array(3),
    "a boolean among tokens": [[1, True]],
    "a token that is a float": [1, 2.5],
    "a token that is text": [1, "a", 2],
    "booleans": [True, False],
    "lists in lists": [[[1, 2]], [[3]]],
    "a negative token": [3, -1],
    "a token past the vocabulary": [383, 384],
    "a token past 64 bits": [1 << 70],
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_a_prompt_that_is_none_is_refused_before_anything_runs(llm: LLM, name: str) -> None:
    for call in (llm.generate, llm.stream):
        with pytest.raises(InvalidRequest) as refused:
            call(BAD_PROMPTS[name], SHORT)
        assert refused.value.hint
    assert llm.engine.idle
    assert not llm.engine.trace


def test_the_error_names_the_prompt_and_its_neighbours_do_not_run(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="prompt 1: token id 999"):
        llm.generate(["fine", [1, 999], "fine"], SHORT)
    with pytest.raises(InvalidRequest, match="2 prompts and 3 SamplingParams"):
        llm.generate(["a", "b"], [SHORT] * 3)
    with pytest.raises(InvalidRequest, match="params is"):
        llm.generate("a", {"max_tokens": 3})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="stop_token_ids"):
        llm.generate("a", SamplingParams(stop_token_ids=(384,)))
    assert llm.engine.idle
    assert not llm.engine.trace


def test_a_prompt_past_the_context_says_what_would_fit_and_truncate_left_makes_it_fit(llm: LLM) -> None:
    long = prompts((250,))[0]
    with pytest.raises(ContextTooLong, match=r"250 tokens and llama-tiny can hold 200.*truncate=\"left\""):
        llm.generate(long, SHORT)
    [cut] = llm.generate(long, SHORT, truncate="left")
    assert cut.prompt_token_ids == long[-195:]
    assert len(cut.token_ids) == 5
    [half] = llm.generate(long, replace(SHORT, max_tokens=1000), truncate="left")
    assert half.prompt_token_ids == long[-100:]
    assert len(half.token_ids) == 100
    assert half.finish_reason == "length"
    assert llm.generate("short", SHORT, truncate="left")[0].prompt_token_ids == [*b"short"]
    with pytest.raises(InvalidRequest, match="truncate='right'"):
        llm.generate(long, SHORT, truncate="right")
    assert llm.generate(long[:199], SHORT)[0].finish_reason == "length"


def test_text_whose_tokens_the_model_does_not_know_is_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.tokenizer, "encode", lambda text: [5, 384])  # a tokenizer of another model
    with pytest.raises(InvalidRequest, match="prompt 1: token id 384"):
        llm.generate([[1], "a"], SHORT)


@pytest.mark.parametrize(
    "extreme",
    [
        {"temperature": 1e-46},
        {"temperature": 1e300},
        {"temperature": 1.0, "top_k": 1 << 40},
        {"temperature": 1.0, "min_p": 1.0},
        {"temperature": 1.0, "top_p": 1e-50},
        {"repetition_penalty": 1e-12},
        {"repetition_penalty": 1e12},
        {"temperature": 1.0, "seed": -(1 << 100)},
        {"max_tokens": 1 << 70},
        {"timeout_s": 1e300},
    ],
    ids=str,
)
def test_an_extreme_parameter_harms_nobody(llm: LLM, extreme: dict) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outputs = llm.generate([*prompts()[2:4], "ab"], [replace(GREEDY, **extreme), GREEDY, replace(SHORT, **extreme)])
    assert [o.finish_reason for o in outputs] == ["length"] * 3
    assert tuple(outputs[1].token_ids) == alone(FAMILIES[0])[3]


def test_what_cannot_run_is_refused_before_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from pdlab.models import loading

    monkeypatch.setattr(loading, "build", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(ConfigError, match="max_model_len=5000"):
        LLM(FAMILIES[0], device="cpu", max_model_len=5000)
    with pytest.raises(ConfigError, match="config is 'paged'"):
        LLM(FAMILIES[0], "paged")  # type: ignore[arg-type]
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": 30e9}))
    with pytest.raises(CapacityError, match=r"llama-3-8b in float32 needs 32.1 GB, and 30.0 GB"):
        LLM("random:llama-3-8b", device="cpu")


def test_two_engines_over_one_loaded_model_keep_their_own_operations() -> None:
    with tiny(attention="plain") as one, tiny(attention="sdpa") as two:
        assert (one.model.ops.default, two.model.ops.default) == ("plain", "sdpa")  # type: ignore[union-attr]
        assert one.model.weights is two.model.weights  # type: ignore[union-attr]
        a, b = one.stream(prompts()[3], GREEDY), two.stream(prompts()[4], GREEDY)
        pairs = list(zip(a, b, strict=True))
    expected = alone(FAMILIES[0])
    assert tuple(e.token_id for e, _ in pairs) == expected[3]
    assert tuple(e.token_id for _, e in pairs) == expected[4]
    with pytest.raises(ConfigError, match="bfloat16"):
        tiny(dtype="bfloat16")


def test_what_cannot_be_built_says_what_would_be_right(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pagesize"):
        tiny(pagesize=3)
    with pytest.raises(ConfigError, match="max_model_len=5000"):
        tiny(max_model_len=5000)
    with pytest.raises(CapacityError, match="would fit"):
        tiny(kv_capacity_tokens=1 << 40)
    with pytest.raises(UnknownModel, match="no-such-model"):
        LLM("no-such-model", device="cpu")
    with pytest.raises(UnknownModel):
        LLM("random:no-such-model", device="cpu")
    if not torch.cuda.is_available():
        with pytest.raises(DeviceUnavailable, match="cuda"):
            LLM(FAMILIES[0], device="cuda")
        with pytest.raises(DeviceUnavailable):
            tiny(attention="triton", device="cpu")


# --- what it gives


def test_an_output_has_consistent_phase_times(llm: LLM) -> None:
    for output in llm.generate(prompts()[:4], GREEDY):
        t = output.timing
        assert None not in (t.queue_s, t.ttft_s, t.prefill_s, t.decode_s, t.e2e_s)
        assert t.ttft_s == pytest.approx(t.queue_s + t.prefill_s)
        assert t.e2e_s == pytest.approx(t.ttft_s + t.decode_s)
        assert len(t.itl_s) == 22
        assert sum(t.itl_s) == pytest.approx(t.decode_s)
        assert min(t.itl_s) > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_the_models_own_whoever_else_is_in_the_batch(family: str) -> None:
    asked = replace(GREEDY, logprobs=3)
    with tiny(family) as llm:
        [single] = llm.generate(prompts()[3], asked)
        batch = llm.generate(prompts(), [GREEDY, asked, GREEDY, asked, replace(GREEDY, logprobs=0), GREEDY, asked])
        assert [o.logprobs is None for o in batch] == [True, False, True, False, False, True, False]
        # teacher forcing: the whole sequence as a prompt predicts the last token with the same probability
        [forced] = llm.generate(single.prompt_token_ids + single.token_ids[:-1], replace(asked, max_tokens=1))
    assert len(single.logprobs) == 23
    assert all(not p.top for p in batch[4].logprobs)
    for p, q in zip(single.logprobs, batch[3].logprobs, strict=True):
        assert p.token_id == q.token_id == p.top[0][0]
        assert [t for t, _ in p.top] == [t for t, _ in q.top]
        assert p.logprob == pytest.approx(q.logprob, abs=1e-4)
        assert p.top[0][1] == pytest.approx(p.logprob, abs=1e-5)
        values = [v for _, v in p.top]
        assert values == sorted(values, reverse=True)
        assert sum(map(np.exp, values)) <= 1 + 1e-5
    # float32 over two layers of another shape of batch: 1e-4 is about twenty units in the last place of a logit of 10
    assert forced.logprobs[0].logprob == pytest.approx(single.logprobs[-1].logprob, abs=1e-4)
    assert [o.token_ids for o in batch] == [list(t) for t in alone(family)]


def test_chat_goes_through_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    ids = llm.chat_prompt(messages)
    assert b"<|im_start|>user\nhi<|im_end|>" in bytes(ids)
    assert llm.chat(messages, SHORT).token_ids == llm.generate(ids, SHORT)[0].token_ids
    with pytest.raises(InvalidRequest):
        llm.chat([], SHORT)


# --- streams


def test_leaving_a_stream_early_aborts_its_requests_and_frees_their_memory(llm: LLM) -> None:
    stream = llm.stream(prompts(), GREEDY)
    assert llm.engine.idle  # nothing is admitted before the first event is asked for
    for i, _ in enumerate(stream):
        if i == 4:
            break
    assert not llm.engine.idle
    stream.close()  # type: ignore[attr-defined]
    assert not llm.engine.live
    assert [o.finish_reason for o in llm.generate(prompts(), SHORT)] == ["length"] * 7


def test_streams_and_generate_may_be_read_in_turn(llm: LLM) -> None:
    a, b = llm.stream(prompts()[3], GREEDY), llm.stream(prompts()[4], GREEDY)
    first = [next(a), next(b), next(a)]
    [whole] = llm.generate(prompts()[5], GREEDY)
    rest_b, rest_a = list(b), list(a)
    expected = alone(FAMILIES[0])
    assert tuple(e.token_id for e in (first[0], first[2], *rest_a)) == expected[3]
    assert tuple(e.token_id for e in (first[1], *rest_b)) == expected[4]
    assert tuple(whole.token_ids) == expected[5]


def test_an_abort_ends_a_stream_with_an_event_of_its_own(llm: LLM) -> None:
    events = []
    for event in llm.stream(prompts()[3], GREEDY):
        events.append(event)
        if len(events) == 3:
            assert llm.abort(event.request_id)
            assert not llm.abort(event.request_id)
    assert events[-1].finish_reason == "aborted"
    assert events[-1].token_id == -1
    assert not llm.abort(12345)


def test_an_interrupt_ends_what_ran_and_the_engine_goes_on(llm: LLM) -> None:
    step, calls = llm.engine.step, iter(range(100))

    def interrupted() -> list:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return step()

    llm.engine.step = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts(), GREEDY)
    assert not llm.engine.live
    llm.generate(prompts(), SHORT)


# --- closing


def test_close_gives_the_memory_back_and_later_use_says_so() -> None:
    llm = LLM(FAMILIES[0], EngineConfig(device="cpu", kv_capacity_tokens=512))
    stream = llm.stream("ab", GREEDY)
    next(stream)
    executor = llm.engine.executor
    watched = [weakref.ref(t) for t in (executor.k, executor.v, *executor.model.tensors())]  # type: ignore[attr-defined]
    del executor
    llm.close()
    llm.close()
    assert [e.finish_reason for e in stream] == ["aborted"] or list(stream) == []
    gc.collect()
    assert all(ref() is None for ref in watched)
    for use in (
        lambda: llm.generate("a"),
        lambda: llm.stream("a"),
        lambda: llm.serve([]),
        lambda: llm.abort(0),
        lambda: llm.engine,
    ):
        with pytest.raises(EngineClosed):
            use()


@pytest.mark.gpu
def test_close_gives_device_memory_back() -> None:
    gc.collect()  # what tests before this one left in cycles must not be given back in the middle of it
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with LLM("random:llama-tiny", device="cuda", kv_capacity_tokens=4096) as llm:
        llm.generate(["abc", "de"], GREEDY)
        assert torch.cuda.memory_allocated() > before
    assert torch.cuda.memory_allocated() <= before  # less where a library's workspace, made by other tests, went too


@pytest.mark.gpu
def test_two_steps_in_flight_give_one_steps_tokens_on_a_device() -> None:
    with LLM(load("random:llama-tiny", device="cuda", dtype="float32", seed=3), kv_capacity_tokens=2048) as llm:
        one = [o.token_ids for o in llm.generate(prompts(), GREEDY)]
    with LLM(
        load("random:llama-tiny", device="cuda", dtype="float32", seed=3), kv_capacity_tokens=2048, steps_in_flight=2
    ) as llm:
        two = llm.generate(prompts(), GREEDY)
        assert [o.token_ids for o in two] == one
        times = [(r.t_start, r.t_end) for r in llm.engine.trace]
    assert all(a <= b for a, b in times)
    assert all(x[1] <= y[0] + 1e-4 for x, y in itertools.pairwise(times))
