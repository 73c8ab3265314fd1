"""The arithmetic of the attention kernels stays right on hard inputs with every care, and fails without each."""

from __future__ import annotations

import pytest
import torch

from pdlab.kernels.online_softmax import Care, exact_attention, hard_cases, tiled_attention

# p and the output are rounded to the dtype: a relative 2^-11 and 2^-8 each at most; float32 scores near 1e4 carry 1e-3
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 6e-3, torch.float32: 1e-5}
CASES = ["ordinary", "large", "growing", "masked", "minus_infinity", "overflow"]


def error(name: str, dtype: torch.dtype, tile: int, care: Care | None = None) -> float:
    case = hard_cases(dtype)[name]
    truth = exact_attention(**case)
    return float((tiled_attention(**case, tile=tile, care=care).double() - truth).norm() / truth.norm())


@pytest.mark.parametrize("tile", [1, 7, 32, 96, 200])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_with_every_care_the_error_is_rounding_whatever_the_tile(name: str, dtype: torch.dtype, tile: int) -> None:
    scores_of_1e5 = 4e-3 if name == "overflow" else 0.0
    assert error(name, dtype, tile) < TOLERANCE[dtype] + scores_of_1e5


@pytest.mark.parametrize(
    ("name", "dtype", "care"),
    [
        ("overflow", torch.float16, Care(wide_scores=False)),
        ("large", torch.float16, Care(wide_scores=False)),
        ("large", torch.bfloat16, Care(subtract_max=False)),
        ("large", torch.float32, Care(subtract_max=False)),
        ("growing", torch.float32, Care(rescale=False)),
        ("growing", torch.bfloat16, Care(rescale=False)),
        ("masked", torch.float32, Care(guard_empty=False)),
        ("minus_infinity", torch.float16, Care(guard_empty=False)),
    ],
)
def test_without_a_care_the_same_input_fails(name: str, dtype: torch.dtype, care: Care) -> None:
    assert not error(name, dtype, 32, care) < 0.1  # NaN, or wrong in the first digit


def test_a_row_that_sees_nothing_is_zero() -> None:
    case = hard_cases(torch.float16)["masked"]
    blind = ~case["mask"].any(1)
    assert blind.any()
    assert (tiled_attention(**case, tile=32)[blind] == 0).all()


def test_the_large_case_reaches_ten_thousand_on_both_sides() -> None:
    case = hard_cases(torch.float32)["large"]
    scores = case["q"] @ case["k"].T * case["q"].shape[1] ** -0.5
    assert scores.max() > 1e4
    assert scores.min() < -1e4
