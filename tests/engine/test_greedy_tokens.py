"""The same greedy tokens whatever the engine does around a request: batch, chunk, preempt, share, overlap."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny_engine import FAMILIES, GREEDY, alone, assert_nothing_leaked, prompts, tiny

VARIANTS = {
    "batched": {},
    "chunks-of-7": {"max_batch_tokens": 7},
    "three-at-a-time": {"max_batch_tokens": 9, "max_batch_requests": 3},
    "whole-prompts": {"batching": "continuous", "max_batch_tokens": 20},
    "padded": {"batching": "static", "static_batch_tokens": 150},
    "padded-extents": {"batching": "article_mended", "static_batch_tokens": 150, "kv_allocator": "contiguous_pool"},
    "own-pieces": {"kv_allocator": "per_request", "steps_in_flight": 2, "kv_capacity_tokens": 400},
    "page-of-1": {"page_size": 1},
    "page-of-5-prefix": {"page_size": 5, "prefix_reuse": True},
    "two-in-flight": {"steps_in_flight": 2},
    "two-in-flight-chunks": {"steps_in_flight": 2, "max_batch_tokens": 7},
    "preempted": {"kv_capacity_tokens": 112},
    "preempted-two-in-flight": {"kv_capacity_tokens": 112, "steps_in_flight": 2, "max_batch_tokens": 11},
    "preempted-prefix-two-in-flight": {"kv_capacity_tokens": 112, "steps_in_flight": 2, "prefix_reuse": True},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_do_not_depend_on_what_happens_around_a_request(family: str, variant: str) -> None:
    config = VARIANTS[variant]
    with tiny(family, **config) as llm:
        outputs = llm.generate(prompts(), GREEDY)
        assert not any(o.error for o in outputs)
        assert tuple(tuple(o.token_ids) for o in outputs) == alone(family)
        assert all(o.finish_reason == "length" for o in outputs)
        if variant.startswith("preempted"):
            assert sum(row.preempted for row in llm.engine.trace) > 0  # else this tests nothing
        if config.get("batching", "continuous_chunked") == "continuous_chunked":
            assert max(r.prefill_tokens + r.decode_count for r in llm.engine.trace) <= config.get("max_batch_tokens", 2048)
        assert_nothing_leaked(llm)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_found_in_memory_gives_the_same_tokens(family: str) -> None:
    shared = prompts((40,), seed=5)[0]
    tails = prompts((1, 6, 24), seed=6)
    with tiny(family) as llm:
        fresh = [llm.generate(shared + tail, GREEDY)[0].token_ids for tail in tails]
    with tiny(family, prefix_reuse=True, max_batch_tokens=31) as llm:
        llm.generate(shared, GREEDY)
        again = llm.generate([shared + tail for tail in tails], GREEDY)
        assert [o.token_ids for o in again] == fresh
        computed = sum(row.prefill_tokens for row in llm.engine.trace)
        assert computed <= 40 + sum(40 + len(t) - 32 for t in tails)  # two pages of 16 were found, three times
        continued = llm.generate(shared + fresh[0][:0] + tails[0] + fresh[0], GREEDY)[0]
        assert_nothing_leaked(llm)
    with tiny(family) as llm:
        assert llm.generate(shared + tails[0] + fresh[0], GREEDY)[0].token_ids == continued.token_ids


def test_sampled_tokens_with_a_seed_do_not_depend_on_the_batch() -> None:
    sampled = [replace(GREEDY, temperature=0.9, top_k=40, seed=s) for s in range(7)]
    with tiny() as llm:
        one_by_one = [llm.generate(p, s)[0].token_ids for p, s in zip(prompts(), sampled, strict=True)]
        together = [o.token_ids for o in llm.generate(prompts(), sampled)]
    with tiny(kv_capacity_tokens=112, steps_in_flight=2) as llm:
        preempted = [o.token_ids for o in llm.generate(prompts(), sampled)]
    assert one_by_one == together == preempted
    assert len({tuple(t) for t in together}) == 7


def test_requests_without_a_seed_differ_and_follow_the_seed_of_the_engine() -> None:
    params = replace(GREEDY, temperature=1.0)
    runs = []
    for seed in (0, 0, 1):
        with tiny(seed=seed) as llm:
            runs.append([o.token_ids for o in llm.generate([[1, 2, 3]] * 3, params)])
    assert runs[0] == runs[1] != runs[2]
    assert len({tuple(t) for t in runs[0]}) == 3


@pytest.mark.parametrize("config", [{}, {"steps_in_flight": 2}, {"kv_capacity_tokens": 112}, {"max_batch_tokens": 7}])
def test_a_repetition_penalty_counts_prompt_and_output_and_nobody_elses(config: dict) -> None:
    penalized = replace(GREEDY, repetition_penalty=1e9, max_tokens=40)  # a token once seen has no chance again
    mixed = [penalized, GREEDY, penalized, GREEDY, penalized, GREEDY, penalized]
    with tiny(**config) as llm:
        outputs = llm.generate(prompts(), mixed)
    for output, params, expected in zip(outputs, mixed, alone(FAMILIES[0]), strict=True):
        if params is penalized:
            assert len(set(output.token_ids)) == 40
            assert not set(output.token_ids) & set(output.prompt_token_ids)
        else:
            assert tuple(output.token_ids) == expected
