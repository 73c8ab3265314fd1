"""`LLM.serve`: the two tables, bad items as rows, open and closed loops, and the virtual clock."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "engine"))

from tiny_engine import GREEDY, assert_nothing_leaked, tiny

from pdlab import LLM, SamplingParams
from pdlab.core.errors import (
    InvalidRequest,
    WorkloadError,
)
from pdlab.core.trace import TRACE_COLUMNS
from pdlab.workloads.workload import Item, Workload

SHORT = replace(GREEDY, max_tokens=5)


@pytest.fixture
def llm() -> Iterator[LLM]:
    with tiny(max_model_len=200) as llm:
        yield llm
        assert_nothing_leaked(llm)


# --- serve

COLUMNS = [
    *("request_id", "arrival_s", "prompt_tokens", "output_tokens", "finish_reason", "error", "queue_s", "ttft_s"),
    *("prefill_s", "decode_s", "e2e_s", "itl_mean_s", "itl_p99_s", "preemptions", "priority"),
]


def test_serve_gives_the_two_tables_and_bad_items_are_rows_with_their_error(llm: LLM) -> None:
    items = [
        Item(0.0, prompt="abc", max_tokens=4, priority=2),
        Item(0.02, prompt=[5, 999], max_tokens=4),
        Item(0.01, prompt_tokens=30, max_tokens=6),
        Item(0.03, prompt_tokens=500, max_tokens=6),
        Item(0.03, prompt="xyz", params=SamplingParams(max_tokens=3, ignore_eos=True)),
    ]
    result = llm.serve(items)
    requests, steps = result.requests, result.steps
    assert list(requests.columns) == COLUMNS
    assert tuple(steps.columns) == TRACE_COLUMNS
    assert requests.arrival_s.tolist() == pytest.approx([0.0, 0.01, 0.02, 0.03, 0.03])
    assert requests.finish_reason.tolist().count("error") == 2
    bad = requests[requests.finish_reason == "error"]
    assert bad.error.str.contains("outside the vocabulary|500 tokens").all()
    assert bad.ttft_s.isna().all()
    good = requests[requests.finish_reason == "length"]
    assert good.error.isna().all()
    assert good.output_tokens.tolist() == [4, 6, 3]
    assert good.prompt_tokens.tolist() == [3, 30, 3]
    assert (good.e2e_s >= good.ttft_s).all()
    assert (good.ttft_s >= good.queue_s).all()
    assert good.priority.tolist() == [2, 0, 0]
    assert good.itl_mean_s.gt(0).all()
    assert (good.itl_p99_s >= good.itl_mean_s * 0.99).all()
    assert (steps.t_end >= steps.t_start).all()
    assert (steps.t_start >= steps.t_submit).all()
    assert steps.t_submit.min() >= 0
    assert (steps.host_s > 0).all()
    assert (steps.predicted_s > 0).all()
    assert steps.clock.eq("real").all()
    assert steps.prefill_tokens.sum() == 36
    assert steps.decode_count.sum() == 3 + 5 + 2
    # a request can be no quicker than the steps that it was in
    assert good.e2e_s.max() <= steps.t_end.max()
    assert len(llm.serve([]).requests) == 0


@pytest.mark.parametrize("nothing", [None, 5, "text", [5], ["text"], [Item(0.0, prompt="a"), None]], ids=repr)
def test_what_is_no_workload_is_refused_and_nothing_runs(llm: LLM, nothing: object) -> None:
    with pytest.raises(WorkloadError) as refused:
        llm.serve(nothing)  # type: ignore[arg-type]
    assert refused.value.hint
    assert llm.engine.idle


def test_items_that_are_wrong_in_any_way_leave_their_neighbours_alone(llm: LLM) -> None:
    wrong = [{"prompt": 5}, {"prompt": b"ab"}, {"prompt": "\ud800"}, {"prompt": [None]}, {"prompt": ""}]
    wrong += [{"prompt": "a", "params": "greedy"}, {"prompt": "a", "max_tokens": 0}, {"prompt_tokens": 10**6}]
    requests = llm.serve([Item(0.0, **w) for w in wrong] + [Item(0.0, prompt="good", max_tokens=2)]).requests
    assert requests.finish_reason.tolist().count("error") == len(wrong)
    assert requests[requests.finish_reason == "length"].output_tokens.tolist() == [2]


def test_a_workload_may_use_the_engine_while_it_is_served(llm: LLM) -> None:
    def items() -> Iterator[Item]:
        yield Item(0.0, prompt_tokens=9, max_tokens=3)
        yield Item(0.0, prompt_tokens=9, max_tokens=150)
        yield Item(0.001, prompt_tokens=9, max_tokens=150)
        yield Item(0.002, prompt_tokens=9, max_tokens=2)
        assert len(llm.generate("abc", SHORT)[0].token_ids) == 5  # its steps also end a request of the workload
        assert all(llm.abort(rid) for rid in list(llm.engine.live))

    result = llm.serve(items())
    assert sorted(result.requests.finish_reason) == ["aborted", "aborted", "length", "length"]
    assert len(result.steps) == len(llm.engine.trace)


def test_a_closed_loop_keeps_as_many_requests_as_it_has_clients(llm: LLM) -> None:
    items = [Item(0.0, prompt_tokens=9, max_tokens=n) for n in (3, 9, 4, 6, 5, 2)]
    result = llm.serve(Workload("loop", items, seed=1, clients=2))
    assert result.requests.output_tokens.sum() == 29
    assert result.requests.finish_reason.eq("length").all()
    assert (result.steps.running + result.steps.waiting).max() == 2
    assert result.requests.arrival_s.max() > 0


def test_arrivals_are_on_the_engines_clock(llm: LLM) -> None:
    result = llm.serve([Item(0.0, prompt_tokens=4, max_tokens=2), Item(0.25, prompt_tokens=4, max_tokens=2)])
    assert result.steps.t_submit.max() >= 0.25
    assert result.requests.arrival_s.tolist() == pytest.approx([0.0, 0.25])


# --- simulated


def test_the_simulated_executor_serves_without_torch_or_weights() -> None:
    code = """
import sys
from pdlab import LLM
from pdlab.workloads.workload import Item
with LLM("random:llama-3-8b", executor="simulated") as llm:
    r = llm.serve([Item(i * 0.01, prompt_tokens=500, max_tokens=100) for i in range(40)])
    assert (r.requests.output_tokens == 100).all() and (r.steps.clock == "virtual").all(), r.requests
    assert r.requests.ttft_s.max() < 10 and r.steps.t_end.max() < 60
    out = llm.generate([[1, 2, 3]] * 2)[0]
    assert len(out.token_ids) == 64 and out.finish_reason == "length" and out.text == ""
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_text_has_no_meaning_to_a_simulated_model() -> None:
    with LLM("llama-1b", executor="simulated") as llm, pytest.raises(InvalidRequest, match="tokenizer"):
        llm.generate("text")
