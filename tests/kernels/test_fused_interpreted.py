"""The fused kernels in Triton's interpreter, against float64 and the sampling oracle, on small odd shapes.

bfloat16 is wrong in the interpreter: see the gpu tests.
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

Ask = Callable[..., Any]
# float32 sums of tens of terms in another order; float16 rounds y and the output to 11 bits, a relative 2^-11 each at most
TOLERANCE = {"float32": 2e-6, "float16": 2e-3}
TILE = {"rows": 16, "k": 16, "split": 1, "ahead": 1, "fetch": 0, "warps": 4, "stages": 1}
SHAPE = {"tokens": 1, "hidden": 40, "heads": 3, "kv_heads": 1, "dim": 12, "ffn": 21}
GPT2 = {"layer_norm": True, "gated": False, "rope": False, "biases": True}

pytestmark = [
    pytest.mark.xdist_group("interpreter"),
    pytest.mark.skipif(
        tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
        and tuple(map(int, numpy.__version__.split(".")[:2])) >= (2, 4),
        reason="triton before 3.7 interprets nothing with numpy 2.4 or newer",
    ),
]


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """Sends a call to the worker process and returns its answer."""
    here = Path(__file__).parent
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(here), str(here.parent.parent)])}
    worker = subprocess.Popen(
        [sys.executable, "-W", "ignore", str(here / "fused_worker.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert worker.stdin is not None
    assert worker.stdout is not None

    def call(what: str, /, **arguments: Any) -> Any:
        worker.stdin.write(json.dumps({"call": what, "arguments": arguments}) + "\n")
        worker.stdin.flush()
        answer = json.loads(worker.stdout.readline() or '{"failed": "the worker died"}')
        assert "failed" not in answer, answer["failed"]
        return answer["answer"]

    yield call
    worker.stdin.close()
    worker.wait(timeout=30)


@pytest.mark.parametrize(
    ("shape", "tile"),
    [
        pytest.param({}, {"rows": 8, "ahead": 2}, id="one row-gqa=3-hd=12"),
        pytest.param(GPT2 | {"hidden": 24}, {"split": 2}, id="one row-gpt2-two programs a row"),
        pytest.param({"tokens": 5, "biases": True}, {"split": 3}, id="five rows-biases-three programs a row"),
        pytest.param(GPT2 | {"tokens": 17, "hidden": 32, "dtype": "float16"}, {}, id="seventeen rows-gpt2-float16"),
        pytest.param({"tokens": 3, "qk_norm": True}, {}, id="three rows-q and k norms"),
    ],
)
def test_every_operation_matches_float64(ask: Ask, shape: dict[str, Any], tile: dict[str, Any]) -> None:
    found = ask("operations", case=SHAPE | shape, tile=TILE | tile)
    assert max(found.values()) < TOLERANCE[shape.get("dtype", "float32")], found


@pytest.mark.parametrize("shape", [{"qk_norm": True, "biases": True}, GPT2], ids=["q and k norms-biases", "gpt2"])
def test_prompts_match_float64_too(ask: Ask, shape: dict[str, Any]) -> None:
    found = ask("rows", case=SHAPE | {"tokens": 9} | shape)
    assert max(found.values()) < TOLERANCE["float32"], found


@pytest.mark.parametrize(
    ("rows", "bad", "tma"),
    [(1, False, False), (5, False, False), (5, True, False), (37, False, True)],
    ids=["one row", "five rows", "rows of NaN and infinity", "many rows-tiles by the copy engine"],
)
def test_one_pass_samples_the_tokens_that_the_oracle_samples(ask: Ask, rows: int, bad: bool, tma: bool) -> None:
    found = ask("sampled", seed=1, rows=rows, vocab=211, hidden=24, tile=TILE | {"rows": 32, "tma": tma}, bad=bad)
    assert found["logits"] < 1e-5
    for name in ("random", "greedy"):
        mine, oracle = found[name]
        assert mine == oracle
        assert [i for i, token in enumerate(mine) if token < 0] == ([1, 2] if bad else [])


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "many equal"])
@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": [5, 0, 1]},
        {"top_p": [0.5, 0.9, 1.0, 1e-6]},
        {"min_p": [0.1, 0.0, 1.0]},
        {"top_k": [20, 7, 0], "top_p": [0.8, 0.3], "min_p": [0.0, 0.02]},
    ],
    ids=lambda f: "+".join(f),
)
def test_filters_keep_what_the_oracle_keeps(ask: Ask, filters: dict[str, list[float]], ties: bool) -> None:
    mine, oracle = ask("filtered", seed=4, rows=12, vocab=301, ties=ties, **filters)
    assert mine == oracle


@pytest.mark.parametrize(("ties", "groups"), [(False, 1), (True, 2)], ids=["distinct-one group", "many equal-two groups"])
def test_programs_that_share_a_row_keep_what_the_oracle_keeps(ask: Ask, ties: bool, groups: int) -> None:
    filters = {"top_k": [20, 7, 0, 1, 0, 300], "top_p": [0.8, 0.3, 0.9, 1.0, 1e-6], "min_p": [0.0, 0.02, 0.0]}
    mine, oracle, again, _, left = ask("filtered_together", seed=4, rows=5, vocab=301, ties=ties, groups=groups, **filters)
    assert mine == again == oracle
    assert not any(left), "nothing is left of a launch that the next would take for its own"


def test_rows_without_a_finite_maximum_are_marked_and_banned_tokens_never_drawn(ask: Ask) -> None:
    filters = {"top_k": [5, 0], "top_p": [0.9, 1.0, 0.5], "temperature": [0.8, 0.0]}
    for rows_open in (0, 1):  # settled at once, and by whole passes: k beyond what is laid aside
        more = {"top_k": [290]} if rows_open else {}
        mine, oracle = ask("filtered", seed=6, rows=7, vocab=301, ties=False, bad=True, **filters | more)
        assert mine == oracle
        assert [i for i, token in enumerate(mine) if token < 0] == [1, 2, 3]


@pytest.mark.parametrize(
    ("filters", "opened"),
    [
        pytest.param({"top_k": [1, 40, 300, 640], "top_p": [1.0, 0.9], "min_p": [0.0, 0.0, 0.2]}, [], id="k of all sizes"),
        pytest.param({"top_k": [0], "top_p": [0.7, 0.5], "temperature": [0.4]}, [], id="p of peaked rows"),
        pytest.param({"min_p": [0.05, 0.3]}, [], id="min-p"),
        pytest.param({"temperature": [0.05, 0.0]}, [], id="no filter-so cold that few can win"),
        pytest.param({"top_k": [50, 900], "top_p": [0.9], "temperature": [0.02]}, [], id="fewer than k that can win"),
        pytest.param({"bad": True, "top_k": [50, 0], "top_p": [0.9], "temperature": [0.8]}, [5], id="few allowed-all equal"),
        pytest.param(
            {"top_k": [0], "top_p": [0.99], "temperature": [9.0]}, [0, 1, 2, 3, 4, 5], id="p of flat rows-whole passes"
        ),
        pytest.param({"top_k": [50, 900], "top_p": [0.9], "temperature": [0.8]}, [1, 3, 5], id="large k-whole passes"),
    ],
)
def test_only_long_beginnings_take_passes_over_whole_rows(ask: Ask, filters: dict[str, list[float]], opened: list[int]) -> None:
    mine, oracle, found = ask("left_open", seed=2, rows=6, vocab=5003, ties=False, share=1024, **filters)
    assert mine == oracle
    assert found == opened


def test_more_rows_than_a_launch_takes(ask: Ask) -> None:
    filters = {"top_k": [9, 0, 3], "top_p": [0.6, 1.0], "min_p": [0.0, 0.0, 0.1, 0.0]}
    mine, oracle = ask("filtered", seed=8, rows=11, vocab=137, ties=False, most=4, **filters)
    assert mine == oracle


@pytest.mark.parametrize("temperature", [0.0, 1e-7, 0.05, 0.8, 3.0, 1e4])
@pytest.mark.parametrize("scale", [0.1, 3.0, 1000.0])
def test_no_score_that_reaches_the_best_is_ruled_out_by_its_bound(ask: Ask, temperature: float, scale: float) -> None:
    missed, let_in, over = ask("contested", temperature=temperature, scale=scale)
    assert missed == 0
    if (temperature, scale) == (0.8, 3.0):
        assert let_in < 1.1 * over, "a bound that lets in much more rules out too little"


def test_noise_is_the_oracles(ask: Ask) -> None:
    assert ask("noise", vocab=512) < 1e-6  # the last digit of a logarithm


@pytest.mark.parametrize("learned", [False, True], ids=["rotary", "learned positions"])
def test_tokens_in_flight_are_taken_from_their_rows_and_new_ones_remembered(ask: Ask, learned: bool) -> None:
    more = {"ids": [5, -1, -1], "rows": [2, 0, 3], "last": [10, 11, 12, 13], "tokens": [7, -1, 9]}
    taken, last = ask("ends", learned=learned, **more)
    assert taken == ([305, 410, 513] if learned else [5, 10, 13])
    assert last == [0, 11, 7, 9], "a bad row is remembered as token 0, a row not in the step keeps its own"
