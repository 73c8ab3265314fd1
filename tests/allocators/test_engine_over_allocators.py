"""The whole engine over every allocator: the same tokens whatever the memory does, and nothing lost when it is full."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from memory_engine import assert_nothing_is_left, expected, make_engine, run

from pdlab.allocators.extents import FreeExtents
from pdlab.allocators.pages import Pages
from pdlab.core.request import FinishReason

ALLOCATORS: dict[str, dict[str, Any]] = {
    "paged": {"kv_allocator": "paged", "page_size": 7},
    "paged-reuse": {"kv_allocator": "paged", "page_size": 4, "prefix_reuse": True},
    "pool-first": {"kv_allocator": "contiguous_pool", "page_size": 1, "pool_headroom": 0.2},
    "pool-best": {"kv_allocator": "contiguous_pool", "page_size": 8, "pool_fit": "best", "pool_headroom": 0.0},
    "per_request": {"kv_allocator": "per_request", "page_size": 5},
    "hybrid": {"kv_allocator": "hybrid", "page_size": 4, "hybrid_threshold": 24, "prefix_reuse": True},
    "hybrid-learned": {"kv_allocator": "hybrid", "page_size": 3, "hybrid_waste": 0.6},
}
COMPACTION: dict[str, Any] = {"compact_every": 1, "compact_threshold": 1e-9, "compact_on_refusal": True}


def prompts(n: int = 20, seed: int = 5, longest: int = 60) -> tuple[list[list[int]], list[int]]:
    """Lengths of 1 to 40, some with a common beginning; outputs of 1 to `longest`."""
    rng = np.random.default_rng(seed)
    system = rng.integers(0, 1000, 17).tolist()
    made = [rng.integers(0, 1000, k).tolist() for k in rng.integers(1, 24, n).tolist()]
    return [system + p if i % 3 else p for i, p in enumerate(made)], rng.integers(1, longest + 1, n).tolist()


@pytest.mark.parametrize("flight", [1, 2])
@pytest.mark.parametrize("compaction", [{}, COMPACTION], ids=["still", "compacted"])
@pytest.mark.parametrize("name", ALLOCATORS)
def test_tokens_depend_on_the_prompt_alone(name: str, compaction: dict[str, Any], flight: int) -> None:
    asked, lengths = prompts()
    engine = make_engine(120, steps_in_flight=flight, max_batch_tokens=32, **ALLOCATORS[name], **compaction)
    done = run(engine, asked, lengths, arrive_every=2)
    for request, prompt, n in zip(done, asked, lengths, strict=True):
        assert request.output_token_ids == expected(prompt, n)
    assert_nothing_is_left(engine)
    if name != "per_request":
        assert sum(r.preempted for r in engine.trace) > 0, "memory was never short: nothing was proven"
    if compaction and name != "per_request":
        assert engine.scheduler.compactor.moved > 0, "nothing was ever moved"


@pytest.mark.parametrize("compaction", [{}, COMPACTION], ids=["still", "compacted"])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_threshold_that_moves_while_requests_run_changes_no_token(seed: int, compaction: dict[str, Any]) -> None:
    asked, lengths = prompts(seed=seed)
    engine = make_engine(120, steps_in_flight=2, max_batch_tokens=32, **ALLOCATORS["hybrid"], **compaction)
    rng, step, seen = np.random.default_rng(seed), engine.step, set()

    def moving() -> Any:
        engine.allocator.fixed_threshold = int(rng.integers(0, 90))  # type: ignore[attr-defined]
        seen.add(min(engine.allocator.split()))  # type: ignore[attr-defined]
        return step()

    engine.step = moving  # type: ignore[method-assign]
    done = run(engine, asked, lengths, arrive_every=2)
    assert [r.output_token_ids for r in done] == [expected(p, n) for p, n in zip(asked, lengths, strict=True)]
    assert max(seen) > 3, "pool and pages never lived side by side"
    assert_nothing_is_left(engine)


@pytest.mark.parametrize("name", ["paged-reuse", "hybrid"])
def test_equal_beginnings_are_computed_once(name: str) -> None:
    asked = [[*range(40), i] for i in range(6)]
    engine = make_engine(400, **ALLOCATORS[name])
    done = run(engine, asked, [3] * 6, arrive_every=8)
    assert [r.cached_prompt_tokens for r in done] == [0] + [40] * 5
    assert [r.output_token_ids for r in done] == [expected(p, 3) for p in asked]


def refusals(monkeypatch: pytest.MonkeyPatch, which: int) -> Callable[[], int]:
    """Makes the `which`-th time that room is looked for find none; returns how often it was looked for."""
    count = 0

    def refusing(real: Callable[..., Any], nothing: Any) -> Callable[..., Any]:
        def look(*args: Any) -> Any:
            nonlocal count
            count += 1
            return nothing if count - 1 == which else real(*args)

        return look

    monkeypatch.setattr(FreeExtents, "take", refusing(FreeExtents.take, None))
    monkeypatch.setattr(FreeExtents, "take_at", refusing(FreeExtents.take_at, False))
    monkeypatch.setattr(Pages, "available", refusing(Pages.available, 0))
    return lambda: count


@pytest.mark.parametrize("name", ["paged-reuse", "pool-best", "per_request", "hybrid"])
def test_running_out_of_memory_at_any_one_point_loses_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, lengths = prompts(4, seed=2, longest=23)
    answers = [expected(p, n) for p, n in zip(asked, lengths, strict=True)]

    def run_once(which: int) -> int:
        with monkeypatch.context() as patch:
            engine = make_engine(160, max_batch_tokens=64, **ALLOCATORS[name])
            counted = refusals(patch, which)
            done = run(engine, asked, lengths, arrive_every=1)
            points = counted()
        assert_nothing_is_left(engine)
        assert [r.output_token_ids for r in done] == answers, f"refused at point {which}"
        assert all(r.finish_reason is FinishReason.LENGTH for r in done)
        return points

    for which in range(run_once(-1)):
        run_once(which)


@pytest.mark.parametrize("name", ALLOCATORS)
def test_an_abort_gives_back_what_the_request_owned(name: str) -> None:
    engine = make_engine(300, steps_in_flight=2, **ALLOCATORS[name])
    asked, lengths = prompts(6, longest=9)
    requests = [engine.add(p, make_params(n + 20)) for p, n in zip(asked, lengths, strict=True)]
    for _ in range(4):
        engine.step()
    for request in requests[::2]:
        engine.abort(request.request_id)
        engine.allocator.check()
    rest = run(engine, [], [])
    assert rest == []
    assert_nothing_is_left(engine)
    for request, prompt, n in list(zip(requests, asked, lengths, strict=True))[1::2]:
        assert request.output_token_ids == expected(prompt, n + 20)


def make_params(n: int) -> Any:
    from pdlab.core.config import SamplingParams

    return SamplingParams(max_tokens=n, ignore_eos=True)
