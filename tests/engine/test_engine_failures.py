"""What goes wrong stays with the requests it concerns, and nothing is left behind."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_engine import FAMILIES, GREEDY, alone, assert_nothing_leaked, prompts, tiny

from pdlab import LLM, SamplingParams
from pdlab.allocators.paged import Paged
from pdlab.core.errors import PdlabError
from pdlab.models.loading import load
from pdlab.scheduler.draft import Draft
from pdlab.scheduler.policies import FirstComeFirstServed
from pdlab.scheduler.rows import Rows
from pdlab.scheduler.scheduler import Scheduler
from pdlab.workloads.workload import Item

FLIGHTS = pytest.mark.parametrize("flights", [1, 2])


class FailsOnce:
    """A model's forward pass that raises in its n-th call."""

    def __init__(self, llm: LLM, nth: int, error: BaseException) -> None:
        self.model = llm.engine.executor.model  # type: ignore[attr-defined]
        self.forward, self.calls, self.nth, self.error = self.model.forward, 0, nth, error

    def __call__(self, *args: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.nth:
            raise self.error
        return self.forward(*args)

    def __enter__(self) -> FailsOnce:
        self.model.forward = self
        return self

    def __exit__(self, *exc: object) -> None:
        del self.model.forward


@FLIGHTS
@pytest.mark.parametrize("nth", [1, 2, 9])
def test_a_failing_step_fails_the_requests_it_carried_and_the_engine_goes_on(flights: int, nth: int) -> None:
    with tiny(steps_in_flight=flights, max_batch_requests=3, prefix_reuse=True) as llm:
        with FailsOnce(llm, nth, RuntimeError("the kernel exploded")):
            outputs = llm.generate(prompts(), GREEDY)
        failed = [o for o in outputs if o.finish_reason == "error"]
        assert 1 <= len(failed) <= 3  # three run at once: nobody else can have been in the step
        assert all("the kernel exploded" in str(o.error) and "RuntimeError" in str(o.error) for o in failed)
        for output, expected in zip(outputs, alone(FAMILIES[0]), strict=True):
            if output.finish_reason != "error":
                assert tuple(output.token_ids) == expected
        assert_nothing_leaked(llm)
        assert tuple(llm.generate(prompts()[3], GREEDY)[0].token_ids) == alone(FAMILIES[0])[3]


def test_requests_that_a_failing_step_did_not_carry_are_computed_again() -> None:
    with tiny(max_batch_tokens=20) as llm:
        engine = llm.engine
        first = engine.add(prompts()[3], GREEDY)
        engine.step()
        second = engine.add(prompts()[6], GREEDY)  # 64 tokens: several chunks
        engine.step()
        engine.abort(first.request_id)
        third = engine.add(prompts()[2], GREEDY)
        with FailsOnce(llm, 1, RuntimeError("no")):
            engine.step()  # carries a chunk of the second only: the budget has no room for the third
        while not engine.idle:
            engine.step()
        assert second.finish_reason == "error"
        assert third.finish_reason == "length"
        assert tuple(third.output_token_ids) == alone(FAMILIES[0])[2]
        assert_nothing_leaked(llm)


@FLIGHTS
def test_an_interrupt_in_the_middle_of_a_step_ends_what_was_asked_for_and_harms_no_other_stream(flights: int) -> None:
    with tiny(steps_in_flight=flights) as llm:
        stream = llm.stream(prompts()[3], GREEDY)
        first = next(stream)
        with FailsOnce(llm, 4, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
            llm.generate(prompts(), GREEDY)
        assert len(llm.engine.live) == 1
        tokens = (first.token_id, *(e.token_id for e in stream))
        assert tokens == alone(FAMILIES[0])[3]
        assert tuple(tuple(o.token_ids) for o in llm.generate(prompts(), GREEDY)) == alone(FAMILIES[0])
        assert_nothing_leaked(llm)


def test_running_out_of_memory_in_a_step_is_an_error_of_its_requests_not_a_crash() -> None:
    with tiny() as llm, FailsOnce(llm, 3, torch.OutOfMemoryError("CUDA out of memory")):
        outputs = llm.generate(prompts()[:2], GREEDY)
        assert [o.finish_reason for o in outputs] == ["error", "error"]
        assert "OutOfMemoryError" in str(outputs[0].error)
        assert len(llm.generate(prompts()[0], GREEDY)[0].token_ids) == 23


@pytest.mark.parametrize("family", FAMILIES)
@FLIGHTS
def test_logits_that_are_nan_fail_that_request_only(family: str, flights: int) -> None:
    poisoned = load(family, device="cpu", dtype="float32", seed=3)
    expected = alone(family)
    bad = 301
    assert bad not in {t for tokens in expected for t in tokens}
    poisoned.model.weights.embed[bad] = float("nan")
    if poisoned.model.head.proj is poisoned.model.weights.embed:  # tied: only the prompt is to be poisoned
        poisoned.model.head.proj = poisoned.model.head.proj.clone()
        poisoned.model.head.proj[bad] = 0.0
    with LLM(poisoned, kv_capacity_tokens=256, steps_in_flight=flights, max_batch_requests=4, prefix_reuse=True) as llm:
        good = prompts()
        outputs = llm.generate([good[0], [5, bad, 9], *good[1:]], GREEDY)
        assert outputs[1].finish_reason == "error"
        assert "finite" in str(outputs[1].error)
        assert not outputs[1].token_ids
        # its pages, full of NaN, were handed to others: masked rows of a page must not leak into them
        assert [tuple(o.token_ids) for o in (outputs[0], *outputs[2:])] == list(expected)
        assert_nothing_leaked(llm)


@FLIGHTS
def test_an_abort_in_flight_ends_the_request_and_frees_its_memory(flights: int) -> None:
    with tiny(steps_in_flight=flights) as llm:
        engine = llm.engine
        requests = [engine.add(p, GREEDY) for p in prompts()]
        for _ in range(6):
            engine.step()
        events = engine.abort(requests[3].request_id)
        assert [e.finish_reason for e in events] == ["aborted"]
        assert engine.abort(requests[3].request_id) == []
        while not engine.idle:
            engine.step()
            engine.allocator.check()
        for request, expected in zip(requests, alone(FAMILIES[0]), strict=True):
            tokens = tuple(request.output_token_ids)
            assert tokens == (expected[: len(tokens)] if request is requests[3] else expected)
        assert len(requests[3].output_token_ids) < 23
        assert_nothing_leaked(llm)


def test_a_timeout_ends_a_waiting_and_a_running_request_and_keeps_what_there_was() -> None:
    with tiny(max_batch_requests=1) as llm:
        slow = replace(GREEDY, max_tokens=1500, timeout_s=0.3)
        outputs = llm.generate([[1, 2, 3], [4, 5, 6], [7, 8]], [slow, slow, GREEDY])
        assert [o.finish_reason for o in outputs] == ["timeout", "timeout", "length"]
        assert outputs[0].token_ids
        assert not outputs[1].token_ids
        assert outputs[1].timing.queue_s is None
        assert outputs[1].timing.ttft_s is None
        assert outputs[0].timing.e2e_s >= 0.3
        assert_nothing_leaked(llm)


def test_what_a_policy_would_never_run_ends_with_an_error_instead_of_waiting_for_ever() -> None:
    with tiny() as llm:
        policy = llm.engine.scheduler.policy
        order = policy.order
        policy.order = lambda waiting, running, now, estimator: ([], order(waiting, running, now, estimator)[1])
        [output] = llm.generate([1, 2, 3], GREEDY)
        assert output.finish_reason == "error"
        assert "never" in str(output.error)
        policy.order = order
        assert llm.generate([1, 2, 3], GREEDY)[0].finish_reason == "length"


def test_with_no_room_for_two_both_still_finish() -> None:
    with tiny(kv_capacity_tokens=64, steps_in_flight=2) as llm:
        outputs = llm.generate([[1] * 30, [2] * 30, [3] * 30], SamplingParams(max_tokens=34, ignore_eos=True))
        assert [len(o.token_ids) for o in outputs] == [34, 34, 34]
        assert_nothing_leaked(llm)


def test_a_request_that_could_never_fit_is_refused_alone() -> None:
    with tiny(kv_capacity_tokens=64) as llm:
        with pytest.raises(PdlabError, match="64") as refused:
            llm.generate([1] * 64, GREEDY)
        assert "truncate" in refused.value.hint
        full = llm.generate([1] * 63, SamplingParams(max_tokens=9, ignore_eos=True))[0]
        assert full.finish_reason == "length"
        assert len(full.token_ids) == 1
        assert_nothing_leaked(llm)


PLANNING = [(Rows, "take"), (Rows, "locate"), (Rows, "sampling"), (Paged, "reserve"), (Paged, "submitted"), (Draft, "prefill")]
PLANNING += [(Draft, "freeze"), (Scheduler, "admit"), (Scheduler, "commit"), (FirstComeFirstServed, "order")]


@FLIGHTS
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("owner", "name"), PLANNING, ids=lambda v: v if isinstance(v, str) else v.__name__)
def test_planning_may_be_interrupted_anywhere(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, after: bool, flights: int
) -> None:
    real, calls = getattr(owner, name), itertools.count()

    def interrupted(*args: Any, **named: Any) -> Any:
        strike = next(calls) == 2
        if strike and not after:
            raise KeyboardInterrupt
        result = real(*args, **named)
        if strike:
            raise KeyboardInterrupt
        return result

    brief = replace(GREEDY, max_tokens=5)
    expected = [tokens[:5] for tokens in alone(FAMILIES[0])]
    with tiny(steps_in_flight=flights, max_batch_requests=3, kv_capacity_tokens=256) as llm:
        stream = llm.stream(prompts()[3], brief)
        first = next(stream)
        monkeypatch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts(), brief)
        assert (first.token_id, *(e.token_id for e in stream)) == expected[3]
        assert [tuple(o.token_ids) for o in llm.generate(prompts(), brief)] == expected
        assert_nothing_leaked(llm)


@pytest.mark.parametrize("name", ["commit", "skip_steps", "plan"])
def test_an_interrupted_simulation_can_be_run_again(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    items = [Item(i * 0.01, prompt_tokens=50, max_tokens=90) for i in range(9)]

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with LLM("llama-1b", executor="simulated", max_batch_requests=4) as llm:
        expected = llm.serve(items).requests
        with monkeypatch.context() as patch:
            patch.setattr(Scheduler, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.serve(items)
        assert llm.engine.idle
        again = llm.serve(items).requests
        assert again.output_tokens.tolist() == expected.output_tokens.tolist() == [90] * 9
        assert again.e2e_s.tolist() == pytest.approx(expected.e2e_s.tolist())
        assert_nothing_leaked(llm)


def test_a_long_run_keeps_the_newest_trace_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdlab.engine.engine.TRACE_ROWS", 10)
    with tiny() as llm:
        llm.generate(prompts()[2], GREEDY)
        assert [row.step for row in llm.engine.trace] == list(range(13, 23))
        steps = llm.serve([Item(0.0, prompt_tokens=5, max_tokens=30)]).steps
        assert len(steps) == 30  # a served workload has all of its own
        assert len(llm.engine.trace) == 10
