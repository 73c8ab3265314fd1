"""The attention kernels in Triton's interpreter, against float64, on small odd shapes.

bfloat16 is silently wrong there: the gpu tests have it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")
import numpy  # noqa: E402


def version(module: Any) -> tuple[int, ...]:
    return tuple(int(part) for part in module.__version__.split(".")[:2])


Ask = Callable[..., dict[str, Any]]
# float32 sums of up to 200 terms in another order; float16 rounds p and the output to 11 bits, each a relative 2^-11 at most
TOLERANCE = {"float32": 2e-6, "float16": 1e-3}

pytestmark = [
    pytest.mark.xdist_group("interpreter"),
    pytest.mark.skipif(
        version(triton) < (3, 7) and version(numpy) >= (2, 4),
        reason="triton before 3.7 interprets nothing with numpy 2.4 or newer",
    ),
]


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """Sends a call to the worker process and returns its answer."""
    here = Path(__file__).parent
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(here), str(here.parent.parent)])}
    worker = subprocess.Popen(
        [sys.executable, str(here / "interpreter_worker.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert worker.stdin is not None
    assert worker.stdout is not None

    def call(what: str, /, **arguments: Any) -> dict[str, Any]:
        worker.stdin.write(json.dumps({"call": what, "arguments": arguments}) + "\n")
        worker.stdin.flush()
        answer = json.loads(worker.stdout.readline() or '{"failed": "the worker died"}')
        assert "failed" not in answer, answer["failed"]
        return answer

    yield call
    worker.stdin.close()
    worker.wait(timeout=30)


def case(lens: list[int], queries: list[int], heads: int, kv_heads: int, dim: int, **more: Any) -> dict[str, Any]:
    return {"lens": lens, "queries": queries, "heads": heads, "kv_heads": kv_heads, "dim": dim, **more}


@pytest.mark.parametrize(
    ("shape", "programs"),
    [
        pytest.param(case([133, 5, 0, 64, 1], [1] * 5, 6, 2, 24, page=7), 4, id="paged-page=7-gqa=3-hd=24-one empty"),
        pytest.param(case([65, 130], [1, 1], 3, 3, 16, page=1), 25, id="paged-page=1-mha-more programs than tiles"),
        pytest.param(case([200, 31], [1, 1], 8, 2, 64, page=256, dtype="float16"), 3, id="paged-page=256-gqa=4-float16"),
        pytest.param(case([70, 9, 33], [1, 1, 1], 5, 1, 40, page=1, paged=False), 5, id="extent-mqa=5-hd=40"),
        pytest.param(
            case([70, 9], [1, 1], 2, 2, 128, page=4, paged=False, dtype="float16"), 2, id="extent-pages of 4-hd=128-float16"
        ),
    ],
)
def test_decode_matches_float64_on_ragged_lengths(ask: Ask, shape: dict[str, Any], programs: int) -> None:
    answer = ask("decode", case=shape, programs=programs)
    assert answer["error"] < TOLERANCE[shape.get("dtype", "float32")]
    assert answer["counters"] == 0, "the next launch would combine too early"


@pytest.mark.parametrize("programs", [1, 2, 7, 19])
def test_decode_does_not_depend_on_how_many_programs_share_the_work(ask: Ask, programs: int) -> None:
    """One long request beside short ones, so that segments are cut at every kind of place."""
    shape = case([300, 20, 3, 40], [1] * 4, 4, 2, 16, page=16)
    answer = ask("decode", case=shape, programs=programs, block_n=16)
    assert answer["error"] < TOLERANCE["float32"]
    assert answer["counters"] == 0


def test_several_queries_a_request_are_causal_among_themselves_and_longer_requests_are_left_alone(ask: Ask) -> None:
    shape = case([90, 40, 31, 20], [4, 17, 3, 1], 6, 2, 32, page=16)
    answer = ask("decode", case=shape, programs=5, max_q=4)
    assert answer["error"] < TOLERANCE["float32"]
    assert answer["others_untouched"]
    assert answer["counters"] == 0


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(case([133, 64, 37], [20, 64, 1], 6, 2, 24, page=16), id="paged-hd=24-gqa=3-after a prefix"),
        pytest.param(
            case([100, 0, 50], [70, 0, 3], 2, 2, 64, page=7, dtype="float16"), id="paged-page=7-mha-float16-one empty"
        ),
        pytest.param(case([90, 70], [90, 33], 7, 1, 16, page=1, paged=False), id="extent-mqa=7"),
        pytest.param(case([80], [45], 3, 3, 40, page=4, paged=False, dtype="float16"), id="extent-pages of 4-hd=40-float16"),
        pytest.param(case([97], [97], 4, 2, 32, page=64), id="paged-tiles within a page"),
    ],
)
def test_causal_prefill_after_a_cached_prefix_matches_float64(ask: Ask, shape: dict[str, Any]) -> None:
    assert ask("prefill", case=shape)["error"] < TOLERANCE[shape.get("dtype", "float32")]


def test_full_prefill_sees_the_whole_cache(ask: Ask) -> None:
    shape = case([75, 20, 41], [20, 20, 41], 4, 2, 32, page=16)
    assert ask("prefill", case=shape, causal=False)["error"] < TOLERANCE["float32"]


def test_prefill_leaves_the_decodes_of_a_mixed_step_alone(ask: Ask) -> None:
    shape = case([60, 40, 90], [1, 21, 1], 4, 4, 16, page=16)
    answer = ask("prefill", case=shape, min_q=2)
    assert answer["error"] < TOLERANCE["float32"]
    assert answer["others_untouched"]


@pytest.mark.parametrize("heads_at_once", [1, 2, 5])
def test_prefill_does_not_depend_on_how_many_heads_share_the_cache(ask: Ask, heads_at_once: int) -> None:
    shape = case([40, 25], [40, 20], 5, 5, 16, page=16)
    assert ask("prefill", case=shape, heads_at_once=heads_at_once)["error"] < TOLERANCE["float32"]


@pytest.mark.parametrize(
    ("tiles", "done"),
    [([3, 1, 0, 5], [0, 4, 0, 2]), ([2, 2, 2, 2, 2, 2, 2, 2], [0] * 8), ([1, 1, 0, 0], [100, 3, 0, 7]), ([6], [9])],
)
def test_tiles_are_handed_out_longest_first_and_each_once(ask: Ask, tiles: list[int], done: list[int]) -> None:
    order = [tuple(pair) for pair in ask("ranks", tiles=tiles, done=done)["order"]]
    assert sorted(order) == [(b, m) for b, count in enumerate(tiles) for m in range(count)]
    costs = [done[b] + m + 1 for b, m in order]
    assert costs == sorted(costs, reverse=True)


@pytest.mark.parametrize("item_rows", [64, 128, 256])
@pytest.mark.parametrize("by_request", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_the_schedule_covers_every_query_once_with_all_the_keys_it_sees(
    ask: Ask, causal: bool, by_request: bool, item_rows: int
) -> None:
    lens, queries = [700, 64, 300, 5], [300, 64, 1, 5]
    found = ask("schedule", lens=lens, queries=queries, causal=causal, min_q=2, item_rows=item_rows, by_request=by_request)
    starts = [sum(queries[:b]) for b in range(5)]
    rows = []
    for first, count, key_row, newest, length, request in found["entries"]:
        assert starts[request] <= first
        assert first + count <= starts[request + 1]
        assert (key_row, length) == (1000 * request, lens[request])
        assert newest == (length - queries[request] + first - starts[request] if causal else length - 1)
        rows += range(first, first + count)
    assert sorted(rows) == [r for b in range(4) if queries[b] >= 2 for r in range(starts[b], starts[b + 1])]
    seen = [min(newest + count, length) if causal else length for _, count, _, newest, length, _ in found["entries"]]
    requests = [entry[5] for entry in found["entries"]]
    if by_request:
        assert requests == sorted(requests)
        assert all(late <= early for early, late, a, b in zip(seen, seen[1:], requests, requests[1:]) if a == b)
    else:
        assert max(seen[1:]) <= seen[0]


def test_the_schedule_of_more_requests_than_a_warp_has_lanes_covers_each_query_once(ask: Ask) -> None:
    queries = [1, 3, 0, 130, 64, 1, 2] * 11
    lens = [max(n, 1) + 7 * b for b, n in enumerate(queries)]
    found = ask("schedule", lens=lens, queries=queries, causal=True, min_q=2, item_rows=64, by_request=True)
    starts = [sum(queries[:b]) for b in range(len(queries) + 1)]
    rows = [row for first, count, *_ in found["entries"] for row in range(first, first + count)]
    assert sorted(rows) == [r for b, n in enumerate(queries) if n >= 2 for r in range(starts[b], starts[b + 1])]
    assert all(starts[request] <= first < starts[request + 1] for first, *_, request in found["entries"])


@pytest.mark.parametrize(("units", "at_once"), [(8, 8), (10, 4), (7, 4), (5, 1), (12, 5)])
def test_every_unit_of_heads_gets_every_item_once_some_units_at_a_time(ask: Ask, units: int, at_once: int) -> None:
    order = ask("item_numbers", total=6, units=units, units_at_once=at_once)["order"]
    rounds = [range(first, min(first + at_once, units)) for first in range(0, units, at_once)]
    assert order == [[rank, unit] for together in rounds for rank in range(6) for unit in together]


@pytest.mark.parametrize("kernel", ["decode", "prefill"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", ["large", "growing", "minus_infinity", "overflow"])
def test_kernels_survive_numerically_hard_inputs(ask: Ask, kernel: str, dtype: str, name: str) -> None:
    # scores near 1e4 are only known to 1e4 * 2^-24 in float32, which the exponential turns into a relative error of that size
    tolerance = 3e-3 if name == "overflow" or dtype == "float16" else 5e-5
    assert ask("hard", kernel=kernel, name=name, dtype=dtype, tile=32)["error"] < tolerance


@pytest.mark.parametrize("kernel", ["decode", "prefill"])
def test_pages_beyond_two_billion_elements_are_addressed(ask: Ask, kernel: str) -> None:
    answer = ask("far_pages", kernel=kernel)
    if "skip" in answer:
        pytest.skip(f"this machine cannot reserve 17 GB of address space: {answer['skip']}")
    assert answer["error"] < TOLERANCE["float32"]
