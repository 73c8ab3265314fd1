"""What the host does for a step, told apart from what the device does, and what a regression refuses to learn."""

from types import SimpleNamespace

import numpy as np
import pytest

from pdlab.core.plan import PlanShape
from pdlab.costs.formulas import decode_shape, prefill_shape
from pdlab.costs.host_times import HostTimes
from pdlab.costs.learned import GROUPS, MIXED_GROUPS, LearnedEstimator
from pdlab.costs.regression import INSIST, Regression
from pdlab.costs.roofline import sheet_ceilings
from pdlab.engine.graphs import graph_sizes
from pdlab.engine.prefill_graphs import token_sizes
from pdlab.models.catalogue import config_of

MODEL, CEILINGS = config_of("qwen3-8b"), sheet_ceilings("nvidia-h200")
MIXED = PlanShape(((100, 0),), 5, 500, 0, 6)


def row(submitted, start, end):
    return SimpleNamespace(t_submit=submitted, t_start=start, t_end=end, host_s=3e-4)


def test_launching_is_known_by_its_middle_whatever_a_few_launches_took():
    host, rng = HostTimes(), np.random.default_rng(0)
    for i in range(300):
        host.learn_launch(MIXED, float(rng.normal(16e-3, 1e-3)) * (20 if i % 10 == 3 else 1))
        host.learn_launch(decode_shape(8, 100), 4e-4)
    assert host.launch(MIXED) == pytest.approx(16e-3, rel=0.06)
    assert host.launch(decode_shape(200, 100)) == pytest.approx(4e-4)
    assert HostTimes().launch(MIXED) == 0.0


def test_planning_is_known_by_how_many_decode_and_elsewhere_by_the_nearest_that_was_seen():
    host = HostTimes(between_s=1e-3)
    assert host.between(decode_shape(7, 10)) == 1e-3
    for _ in range(60):
        host.learn_between(decode_shape(8, 10), 2e-4)
        host.learn_between(decode_shape(500, 10), 9e-4)
    assert host.between(decode_shape(20, 10)) == pytest.approx(2e-4)
    assert host.between(decode_shape(400, 10)) == pytest.approx(9e-4)
    assert host.between(MIXED) == 1e-3, "steps with prompts are another matter"
    for i in range(2000):  # one in five takes twice as long, one in fifty finds nothing to do before it
        host.learn_between(MIXED, 5.0 if i % 50 == 7 else 2e-3 if i % 5 == 0 else 1e-3)
    assert host.between(MIXED) == pytest.approx(1.2e-3, rel=0.08), "the mean: it adds up"
    again = HostTimes()
    again.restore(host.state())
    assert again.state() == host.state()
    with pytest.raises(ValueError, match="no time"):
        again.restore({"between": [[False, 0, float("nan"), 3]], "launch": host.state()["launch"]})
    assert again.state() == host.state()
    older = {**host.state(), "between": [row[:4] for row in host.state()["between"]]}
    again.restore(older)
    assert again.between(decode_shape(20, 10)) == pytest.approx(2e-4)


def test_a_step_that_waited_for_its_launches_says_nothing_of_the_device():
    e = LearnedEstimator(MODEL, CEILINGS, 2)
    device = e.device_seconds(MIXED)
    for i in range(50):
        t = float(i)
        e.observe(row(t, t, t + 0.0205), MIXED, 0.020)  # ended as its last kernel was launched
    assert e.device_seconds(MIXED) == device
    assert e.step_seconds(MIXED) == pytest.approx(0.020)
    for i in range(50):
        t = 100.0 + i
        e.observe(row(t, t + 0.050, t + 0.060), MIXED, 0.020)  # launched while another step ran
    assert e.device_seconds(MIXED) == pytest.approx(0.010, rel=0.05)
    assert e.step_seconds(decode_shape(5, 100)) < 0.020, "decodes alone are launched at once"


def test_times_may_jump_between_batch_sizes():
    def device(n):
        return {8: 9e-3, 16: 9e-3, 24: 6e-3, 32: 7e-3}[-(-n // 8) * 8]

    e, rng = LearnedEstimator(MODEL, CEILINGS, 2), np.random.default_rng(1)
    for _ in range(600):
        n = int(rng.integers(5, 33))
        e.learn(decode_shape(n, 400), device(n) * float(np.exp(rng.normal(0, 0.01))))
    for n in (6, 13, 22, 30):
        assert e.step_seconds(decode_shape(n, 400)) == pytest.approx(device(n), rel=0.03)


def test_the_groups_are_the_batch_sizes_that_decode_steps_are_padded_to():
    assert set(GROUPS) == set(graph_sizes(1024))


def test_the_groups_of_steps_with_prompts_are_what_their_graphs_are_padded_to():
    assert token_sizes(MIXED_GROUPS[-1]) == MIXED_GROUPS


def padded_device(shape):
    """Attention apart, nothing counts but the group that the rows fall into."""
    groups = MIXED_GROUPS if shape.prefill else GROUPS
    rows = next(n for n in groups if n >= shape.new_tokens)
    return 4e-3 + 3e-5 * rows + 1e-9 * shape.attention_pairs


def test_steps_that_are_filled_up_are_priced_by_what_they_are_filled_up_to():
    e, rng = LearnedEstimator(MODEL, CEILINGS, 2, padded=True), np.random.default_rng(4)
    for _ in range(400):
        decodes, n = int(rng.integers(1, 60)), int(rng.integers(1, 1900))
        shape = PlanShape(((n, 0),), decodes, 500 * decodes, 0, decodes)
        e.learn(shape, padded_device(shape))
    for n in (130, 200, 250, 900, 1020):
        shape = PlanShape(((n, 0),), 4, 2000, 0, 4)
        assert e.device_seconds(shape) == pytest.approx(padded_device(shape), rel=0.03)
    again = LearnedEstimator(MODEL, CEILINGS, 2)
    again.restore(e.state())
    assert again.padded
    assert again.device_seconds(shape) == e.device_seconds(shape)
    old = LearnedEstimator(MODEL, CEILINGS, 2).state()
    del old["padded"]
    again.restore(old)
    assert not again.padded, "what was saved before steps with prompts were filled up"


def test_a_first_step_that_compiled_is_refused_but_a_slow_machine_is_believed():
    e, shape = LearnedEstimator(MODEL, CEILINGS, 2), prefill_shape(512)
    guess = e.device_seconds(shape)
    e.learn(shape, 100 * guess)
    assert e.device_seconds(shape) == guess
    for _ in range(INSIST + 20):
        e.learn(shape, 40 * guess)
    assert e.device_seconds(shape) == pytest.approx(40 * guess, rel=0.05)


def test_a_regression_takes_only_a_state_that_fits():
    one = Regression([1.0, 1.0], [1.0, 1.0], groups=3)
    for i in range(20):
        one.learn([1e-3, 1e-4 * i], 2e-3 + 1e-4 * i, group=i % 3)
    two = Regression([1.0, 1.0], [1.0, 1.0], groups=3)
    two.restore(one.state())
    assert two.predict([1e-3, 5e-4], 1) == one.predict([1e-3, 5e-4], 1)
    for damage in ({"weights": [1.0]}, {"offsets": [float("inf")] * 3}, {"variance": [1.0]}):
        with pytest.raises(ValueError, match="expected"):
            two.restore({**one.state(), **damage})
    assert two.state() == one.state()
