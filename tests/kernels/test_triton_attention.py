"""What this project's attention asks once a step, and which of its kernels a step needs; no kernel is launched here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import make_case

pytest.importorskip("triton")

from pdlab.kernels.triton_attention import Step, TritonAttention
from pdlab.kernels.tuning import Tuning

SHAPE = {"heads": 8, "kv_heads": 2, "dim": 64}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What would have been launched: ("decode", most queries) or ("prefill", fewest)."""
    made: list[tuple[str, Any]] = []

    def decode(self: TritonAttention, q: Any, view: Any, max_q: int, out: Any, prefetch: Any) -> None:
        made.append(("decode", max_q))

    def prefill(self: TritonAttention, q: Any, view: Any, step: Step, out: Any) -> None:
        made.append(("prefill", step.short + 1))

    monkeypatch.setattr(TritonAttention, "_decode", decode)
    monkeypatch.setattr(TritonAttention, "_prefill", prefill)
    return made


def attention() -> TritonAttention:
    tuning = Tuning("no-such-device", (9, 0), 132, 50 << 20)
    return TritonAttention(heads=8, kv_heads=2, head_dim=64, max_requests=4, device=torch.device("cpu"), tuning=tuning)


@pytest.mark.parametrize(
    ("queries", "kernels"),
    [
        ([1, 1, 1], [("decode", 1)]),
        ([1, 130, 1], [("decode", 1), ("prefill", 2)]),
        ([200, 130, 30], [("prefill", 1)]),
        ([5, 3, 9], [("decode", 16)]),
    ],
)
def test_single_queries_and_chunks_get_their_own_kernel(
    launched: list[tuple[str, Any]], queries: list[int], kernels: list[tuple[str, Any]]
) -> None:
    q, view = make_case([300, 140, 60], queries, **SHAPE)
    attention()(q, view)
    assert launched == kernels


@pytest.mark.parametrize(
    ("lens", "queries", "kernel"),
    [([9, 9], [9, 9], "prefill"), ([8, 9], [8, 8], "decode"), ([257, 9], [9, 9], "decode"), ([16, 16], [16, 16], "prefill")],
)
def test_short_prompts_that_fill_half_a_tile_are_the_prefill_kernels(
    launched: list[tuple[str, Any]], lens: list[int], queries: list[int], kernel: str
) -> None:
    q, view = make_case(lens, queries, **SHAPE)
    attention()(q, view)
    assert [name for name, _ in launched] == [kernel]


def test_the_layers_of_a_step_share_what_it_asks_and_the_next_step_asks_again(launched: list[tuple[str, Any]]) -> None:
    call = attention()
    q, view = make_case([300, 140, 60], [1, 130, 1], **SHAPE)
    call(q, view)
    first = call._step
    call(q, replace(view, k=view.k.clone()))
    assert call._step is first
    other, later = make_case([300, 140, 60], [65, 2, 65], **SHAPE)  # as many rows, the same longest cache
    call(other, replace(later, max_q=view.max_q))
    assert call._step is not first
    assert launched[-1] == ("prefill", 1)


def test_rows_of_no_request_come_out_as_zeros(launched: list[tuple[str, Any]]) -> None:
    q, view = make_case([300, 140], [1, 130], **SHAPE)
    padded = torch.cat((q, q[:3]))
    assert not bool(attention()(padded, view).any())
