"""What a plan is priced by is the roofline of its step, to the bit."""

from __future__ import annotations

import pytest

from pdlab.core.plan import PlanShape
from pdlab.costs.estimator import RooflineEstimator
from pdlab.costs.formulas import decode_shape, prefill_shape
from pdlab.costs.roofline import sheet_ceilings, step_time
from pdlab.models.catalogue import config_of

SHAPES = [
    PlanShape(),
    decode_shape(1, 700),
    decode_shape(64, 31),
    prefill_shape(777, 3, 40),
    PlanShape(((5, 0), (9, 77)), 4, 999, 3, 6),
]


@pytest.mark.parametrize("model", ["llama-1b", "gpt2-xl"])
@pytest.mark.parametrize("shape", SHAPES, ids=range(len(SHAPES)))
def test_a_step_is_priced_by_its_roofline(model: str, shape: PlanShape) -> None:
    card = sheet_ceilings("nvidia-h200")
    estimator = RooflineEstimator(config_of(model), card, 2)
    assert estimator.step_seconds(shape) == step_time(config_of(model), shape, card, 2).seconds
