"""Prompts reserve their memory chunk by chunk: others use it meanwhile, and who was admitted is never thrown out for that."""

from __future__ import annotations

from driving import add, make_engine, run


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
