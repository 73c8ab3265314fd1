"""The ledger's claims about KV memory: which rows their verdicts come from, and that other rows give another verdict."""

from __future__ import annotations

from pathlib import Path

import pytest
from ledger import GPU, of, recorder

pytestmark = pytest.mark.usefixtures("places")


def _memory(places: Path, throughput: dict[str, dict[int, float]]) -> None:
    with recorder(places, "kv_allocators") as record:
        for variant, by_load in throughput.items():
            for concurrency, value in by_load.items():
                params = {"concurrency": concurrency, "model": "m", "workload": "azure_conversation"}
                record.add("throughput", value, "req/s", variant=variant, params=params)
                record.add("waste_internal", 12.5, "percent", variant=variant, params=params)
                equal = params | {"workload": "equal_requests"}  # another load, which no claim is about
                record.add("throughput", 1 / value, "req/s", variant=variant, params=equal)


def test_the_crossover_in_concurrency_must_lie_near_the_claimed_one(places: Path) -> None:
    pool = {10: 5.0, 50: 10.0, 100: 10.0, 400: 10.0}
    _memory(places, {"contiguous_pool": pool, "paged": {10: 5.0, 50: 10.5, 100: 12.0, 400: 15.0}})
    assert of("C4").verdict == "reproduced"
    _memory(places, {"contiguous_pool": pool, "paged": {10: 6.0, 50: 12.0, 100: 12.0, 400: 15.0}})
    assert of("C4").verdict == "partly"  # it wins everywhere: there is no crossover
    _memory(places, {"contiguous_pool": pool, "paged": {10: 4.0, 50: 9.0, 100: 9.0, 400: 9.9}})
    assert of("C4").verdict == "not_reproduced"


def test_a_crossover_is_one_models(places: Path) -> None:
    _memory(places, {"contiguous_pool": {10: 5.0, 50: 10.0, 100: 10.0}, "paged": {10: 5.0, 50: 10.0, 100: 10.0}})
    with recorder(places, "kv_allocators") as record:
        for variant, value in (("paged", 90.0), ("contiguous_pool", 10.0)):
            params = {"concurrency": 100, "model": "another", "workload": "azure_conversation"}
            record.add("throughput", value, "req/s", variant=variant, params=params)
    assert of("C4").verdict == "not_reproduced"


def test_what_is_impossible_stays_so_whatever_is_measured_but_shows_it(places: Path) -> None:
    _memory(places, {"per_request": {100: 10.0}, "paged": {100: 16.0}})
    v = of("C3")
    assert v.verdict == "impossible"
    assert v.ours is not None
    assert (v.ours["value"], v.ours["unit"]) == (12.5, "percent")
    assert "1.60x of per_request" in v.reason


@pytest.mark.parametrize(("hybrid", "verdict"), [(20.0, "reproduced"), (12.1, "partly"), (9.0, "not_reproduced")])
def test_the_hybrid_is_held_against_the_better_of_both(places: Path, hybrid: float, verdict: str) -> None:
    _memory(places, {"contiguous_pool": {100: 10.0}, "paged": {100: 12.0}, "hybrid": {100: hybrid}})
    assert of("C5").verdict == verdict


@pytest.mark.parametrize(
    ("none", "article", "compaction", "verdict"),
    [
        (0, 0, 0, "not_reproduced"),
        (100, 40, 30, "reproduced"),
        (100, 99, 30, "partly"),  # the trouble shows; a cure there is, but not the article's
        (100, 101, 80, "partly"),
        (100, 90, 101, "partly"),
        (100, 99, 98, "not_reproduced"),
    ],
)
def test_compaction_is_judged_by_the_rhythm_that_was_claimed(
    places: Path, none: float, article: float, compaction: float, verdict: str
) -> None:
    with recorder(places, "kv_compaction") as record:
        for variant, count in (("none", none), ("article", article), ("compaction", compaction)):
            record.add("refused", count, "count", variant=variant, kind="simulated")
    v = of("G1")
    assert v.verdict == verdict
    assert v.ours is not None
    assert v.ours["value"] == (article if none else 0)
    assert "simulated" in v.reason


def test_the_crossover_of_the_articles_card_is_told_beside_another_cards(places: Path) -> None:
    for device, gain in ((GPU, 1.0), ("nvidia-a100-sxm4-40gb", 1.5)):
        with recorder(places, "kv_allocators", device) as record:
            for concurrency in (10, 100):
                for variant, factor in (("paged", gain if concurrency == 100 else 1.0), ("contiguous_pool", 1.0)):
                    params = {"concurrency": concurrency, "model": "m", "workload": "azure_conversation"}
                    record.add("throughput", 5 * factor, "req/s", variant=variant, kind="simulated", params=params)
    v = of("C4")
    assert v.verdict == "partly"  # a crossover is a card's own: it is there on the article's, and not on this one
    assert "nvidia-a100-sxm4-40gb, simulated: paged wins from 100 requests on" in v.reason
    assert "preempted" not in v.reason
    with recorder(places, "kv_allocators") as record:
        for variant in ("paged", "contiguous_pool"):
            record.add("preemptions", 0, "count", variant=variant, concurrency=100, model="m", workload="azure_conversation")
    assert "no request was preempted on nvidia-h200" in of("C4").reason
    assert of("C4", "nvidia-a100-sxm4-40gb").verdict == "reproduced"
