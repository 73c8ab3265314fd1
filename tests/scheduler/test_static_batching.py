"""Static batches and the article's: what is padded, what overruns, what is mended."""

from itertools import pairwise

import pytest
from driving import add, make_engine, run
from hypothesis import given
from hypothesis import strategies as st

from pdlab.core.errors import PolicyError
from pdlab.core.plan import PlanShape
from pdlab.costs.formulas import step_flops
from pdlab.models.catalogue import config_of
from pdlab.scheduler.static_batching import ArticleBatching, article_batches, mended_batches, padding_flops


class Sized:
    def __init__(self, number, tokens):
        self.request_id, self.num_tokens = number, tokens

    def __repr__(self):
        return f"{self.num_tokens}"


def sized(lengths):
    return [Sized(i, n) for i, n in enumerate(lengths)]


def padded(batch):
    return len(batch) * max(r.num_tokens for r in batch)


def test_the_articles_batching_crashes_on_an_empty_list():
    with pytest.raises(IndexError):
        article_batches([], 100)
    with pytest.raises(PolicyError, match="no requests"):
        ArticleBatching().cut([], 100)
    assert mended_batches([], 100) == []


def test_the_articles_budget_is_tested_before_the_request_joins_so_a_batch_overruns_it():
    batch, *_ = article_batches(sized([50, 50, 50]), 201)
    assert len(batch) * 50 * 2 > 201  # two of 50: 100 · 2 < 201 held with one, so a third joined
    assert len(batch) == 3


def test_a_request_over_the_articles_budget_gets_a_batch_that_overruns_it():
    batches = article_batches(sized([500, 5]), 100)
    assert [b[0].num_tokens for b in batches] == [500, 5]
    assert padded(batches[0]) * 2 > 100


@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=40), budget=st.integers(1, 2000))
def test_both_ways_of_cutting_keep_every_request_and_sort_by_length(lengths, budget):
    requests = sized(lengths)
    for cut in (article_batches, mended_batches):
        batches = cut(requests, budget)
        flat = [r for b in batches for r in b]
        assert sorted(r.request_id for r in flat) == list(range(len(lengths)))
        sizes = [r.num_tokens for r in flat]
        assert sizes in (sorted(sizes), sorted(sizes, reverse=True))


@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=40), budget=st.integers(1, 2000))
def test_mended_batches_hold_the_budget_unless_a_request_alone_is_over_it(lengths, budget):
    for batch in mended_batches(sized(lengths), budget):
        assert padded(batch) <= budget or len(batch) == 1


def totals(engine):
    return sum(row.pad_tokens for row in engine.trace)


def test_static_padding_is_what_the_formula_says():
    prompts, outputs = [12, 5, 9], [2, 7, 4]
    engine = make_engine(batching="static", max_batch_tokens=64, static_batch_tokens=64)
    for p, o in zip(prompts, outputs, strict=True):
        add(engine, p, o)
    run(engine)
    n = len(prompts)
    # the prompt's step samples the first token, so decodes are one fewer than outputs
    decodes = [o - 1 for o in outputs]
    assert totals(engine) == n * max(prompts) - sum(prompts) + n * max(decodes) - sum(decodes)


def test_nobody_joins_a_static_batch_that_runs():
    engine = make_engine(batching="static", max_batch_tokens=64)
    first = add(engine, 4, 6)
    engine.step()
    second = add(engine, 4, 1)
    run(engine)
    assert second.first_scheduled_s >= first.finish_s


def test_one_at_a_time_pads_nothing_and_overlaps_nothing():
    engine = make_engine(batching="one_at_a_time")
    requests = [add(engine, p, o) for p, o in ((3, 4), (9, 2), (5, 5))]
    run(engine)
    assert totals(engine) == 0
    assert all(a.finish_s <= b.first_scheduled_s for a, b in pairwise(requests))


def test_sorting_by_length_pads_less_than_arrival_order():
    lengths = [4, 60, 5, 58, 3, 61, 6, 57]
    pads = {}
    for batching in ("static", "article", "article_mended"):
        engine = make_engine(
            batching=batching, max_batch_tokens=256, static_batch_tokens=250, max_batch_requests=8, capacity=8192
        )
        for n in lengths:
            add(engine, n, 1)
        run(engine)
        pads[batching] = totals(engine)
    assert pads["article_mended"] < pads["static"]
    assert pads["article"] < pads["static"]


def test_the_mended_batching_computes_an_over_long_prompt_in_chunks():
    engine = make_engine(batching="article_mended", max_batch_tokens=16, static_batch_tokens=16)
    request = add(engine, 50, 3)
    engine.step()
    assert request.num_scheduled == engine.allocator.stats().reserved == 16
    run(engine)
    assert len(request.output_token_ids) == 3
    assert max(row.prefill_tokens + row.pad_tokens for row in engine.trace) <= 16


def test_continuous_batching_pads_nothing():
    engine = make_engine(batching="continuous_chunked")
    for n in (3, 30, 7):
        add(engine, n, 5)
    run(engine)
    assert totals(engine) == 0


def test_padding_is_counted_in_flops_as_the_products_of_its_rows():
    model = config_of("llama-1b")
    shape = PlanShape(prefill=((10, 0), (30, 0)), pad_tokens=20, sampled=2)
    row = step_flops(model, PlanShape(pad_tokens=1)).total
    assert padding_flops(model, shape) == pytest.approx(20 * row)
    assert padding_flops(model, PlanShape(prefill=((10, 0),), sampled=1)) == 0
