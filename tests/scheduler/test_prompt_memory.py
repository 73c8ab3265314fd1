"""Prompts reserve their memory chunk by chunk: others use it meanwhile, and who was admitted is not thrown out for that."""

from __future__ import annotations

import numpy as np
import pytest
from driving import add, make_engine, run

from pdlab.engine.engine import Engine


def test_a_prompt_waits_for_memory_that_decodes_took_instead_of_being_computed_twice() -> None:
    engine = make_engine(capacity=32, page_size=4, max_batch_tokens=3)
    short, long = add(engine, 7, 10), add(engine, 20, 4)
    held = []
    while not short.finished:
        engine.step()
        held.append(long.num_scheduled)
    assert 0 < held[-1] < 20, "memory was never short: nothing was proven"
    assert held[-1] == held[-3]
    run(engine)
    assert (short.preemptions, long.preemptions) == (0, 0)
    assert len(long.output_token_ids) == 4


def test_two_prompts_are_not_admitted_into_the_same_room() -> None:
    engine = make_engine(capacity=48, page_size=4, max_batch_tokens=8)
    first, second, third = add(engine, 28, 1), add(engine, 20, 1), add(engine, 3, 1)
    engine.step()
    assert first.num_scheduled == 8
    assert engine.allocator.stats().reserved == 8
    assert second.row < 0
    while second.row < 0:
        engine.step()
        assert third.num_scheduled == 0, "whoever is refused is not overtaken"
    assert first.finished
    run(engine)
    assert [r.preemptions for r in (first, second, third)] == [0, 0, 0]


class Watch:
    """Looks at an engine's books after every plan; counts how often a prompt that was short of memory stayed."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.kept = engine, 0
        s = engine.scheduler
        real_plan, real_grow = s.plan, s.grow_prompt

        def grow(request, end, draft):  # type: ignore[no-untyped-def]
            upto = real_grow(request, end, draft)
            self.kept += upto < end and request.row >= 0
            return upto

        def plan(now):  # type: ignore[no-untyped-def]
            made = real_plan(now)
            self.check()
            return made

        s.plan, s.grow_prompt = plan, grow  # type: ignore[method-assign]

    def check(self) -> None:
        s, memory = self.engine.scheduler, self.engine.allocator
        size, lacking = memory.page_size, 0
        for rid, r in s.running.items():
            assert 0 <= memory.room(rid) - s.rows.scheduled[r.row] < size, "reserved for what nobody writes yet"
            if rid in s.prefilling:
                lacking += -(-r.num_tokens // size) * size - memory.room(rid)
        assert s.unreserved == lacking
        stats = memory.stats()
        assert len(s.prefilling) < len(s.running) or lacking <= stats.free + stats.retired, "nothing will ever give way"
        memory.check()


@pytest.mark.parametrize("flights", [1, 2])
@pytest.mark.parametrize("policy", ["fcfs", "sjf", "priority"])
def test_everybody_ends_however_often_decodes_take_what_prompts_were_to_have(policy: str, flights: int) -> None:
    rng = np.random.default_rng(7)
    kept = 0
    for _ in range(8):
        budget = int(rng.integers(6, 9))
        engine = make_engine(
            capacity=320, page_size=16, max_batch_tokens=budget, max_batch_requests=6, policy=policy, steps_in_flight=flights
        )
        watch = Watch(engine)
        requests = []
        for i in range(9):  # two that decode for long, then a long prompt
            prompt, output = rng.integers((100, 1), (220, 9)) if i % 3 == 2 else rng.integers((1, 20), (20, 80))
            requests.append(add(engine, int(prompt), int(output), priority=int(rng.integers(3))))
            for _ in range(int(rng.integers(6))):
                engine.step()
        run(engine)
        assert all(r.finish_reason == "length" for r in requests)
        kept += watch.kept
    assert kept > 0, "memory was never short: nothing was proven"
