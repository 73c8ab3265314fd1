"""An engine's learning estimator goes on from what the last one on this device knew."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdlab.core.config import SamplingParams
from pdlab.costs import calibration
from pdlab.costs.formulas import decode_shape
from pdlab.costs.learned import LearnedEstimator
from pdlab.costs.roofline import sheet_ceilings
from pdlab.llm import LLM, WORTH_KEEPING
from pdlab.models.catalogue import config_of
from pdlab.models.loading import load


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PDLAB_HOME", str(tmp_path))
    return tmp_path


def engine_of(steps: int, **config: Any) -> tuple[int, int]:
    """(steps known at the beginning, at the end) of an engine that decodes for so many steps."""
    settings = {"device": "cpu", "estimator": "learned", "kv_capacity_tokens": 1024, "max_model_len": 256}
    with LLM("random:llama-tiny", **settings | config) as llm:
        estimator = llm.engine.estimator
        assert isinstance(estimator, LearnedEstimator)
        before = estimator.seen
        if steps:
            llm.generate([1, 2, 3], SamplingParams(max_tokens=steps, ignore_eos=True))
        return before, estimator.seen


def files(home: Path) -> list[Path]:
    return [p for p in home.rglob("*") if p.is_file()]


def test_the_next_engine_goes_on_where_the_last_one_ended(home: Path) -> None:
    before, known = engine_of(2 * WORTH_KEEPING)
    assert before == 0
    assert known > WORTH_KEEPING
    assert [p.name for p in files(home)] == ["llama-tiny-float32.json"]
    assert engine_of(0) == (known, known)


def test_a_few_steps_are_not_worth_a_file(home: Path) -> None:
    engine_of(WORTH_KEEPING // 2)
    assert not files(home)


def test_a_damaged_file_is_named_and_the_engine_begins_with_nothing(home: Path) -> None:
    engine_of(2 * WORTH_KEEPING)
    path = files(home)[0]
    path.write_text(path.read_text()[:100])
    with pytest.warns(RuntimeWarning, match=path.name):
        before, _ = engine_of(0)
    assert before == 0


def test_steps_that_were_launched_in_another_way_teach_nothing(home: Path) -> None:
    engine_of(2 * WORTH_KEEPING)
    path = files(home)[0]
    path.write_text(path.read_text().replace('"padded":false', '"padded":true'))
    assert engine_of(0) == (0, 0)


def test_what_cannot_be_used_is_passed_over_for_what_is_shipped(home: Path, tmp_path_factory: Any, monkeypatch: Any) -> None:
    engine_of(2 * WORTH_KEEPING)
    own = files(home)[0]
    shipped = tmp_path_factory.mktemp("data")
    monkeypatch.setattr(calibration, "data_dir", lambda: shipped)
    good = own.read_text()
    (shipped / own.relative_to(home)).parent.mkdir(parents=True)
    (shipped / own.relative_to(home)).write_text(good)
    known = json.loads(good)["regimes"]["decode"]["seen"] + json.loads(good)["regimes"]["mixed"]["seen"]
    own.write_text(good.replace('"padded":false', '"padded":true'))
    assert engine_of(0) == (known, known)
    state = json.loads(good)
    state["regimes"]["mixed"]["weights"].append(1.0)  # of another version, with other features
    own.write_text(json.dumps(state))
    with pytest.warns(RuntimeWarning, match=own.name):
        assert engine_of(0) == (known, known)


DAMAGE: list[tuple[str, Any]] = [
    ("lengths", {"chat": [3, "many"]}), ("lengths", [3]), ("ceilings", {"read_bytes_per_s": 0.0}), ("host", {}),
    ("itemsize", 3), ("regimes", {}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), DAMAGE, ids=str)
def test_an_estimator_is_restored_whole_or_not_at_all(name: str, value: Any) -> None:
    config, ceilings = config_of("llama-tiny"), sheet_ceilings("cpu-x86-64")
    taught, other = LearnedEstimator(config, ceilings, 4, 128), LearnedEstimator(config, ceilings, 4, 128)
    for n in range(1, 90):
        taught.learn(decode_shape(n % 7 + 1, 20 * n), 1e-3 * n)
        other.learn(decode_shape(n % 5 + 1, 10 * n), 3e-3 * n)
    state = taught.state()
    state[name] = {**state[name], **value} if name == "ceilings" else value
    before, price = json.dumps(other.state()), other.step_seconds(decode_shape(3, 100))
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
        other.restore(state)
    assert json.dumps(other.state()) == before
    assert other.step_seconds(decode_shape(3, 100)) == price


def test_where_nothing_can_be_written_closing_says_so(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "estimators").write_text("a file where a folder is wanted")
    with pytest.warns(RuntimeWarning, match="not kept"):
        engine_of(2 * WORTH_KEEPING)


def test_a_model_whose_name_cannot_name_a_file_runs_and_nothing_is_kept(home: Path) -> None:
    loaded = load("random:llama-tiny", device="cpu", dtype="float32")
    loaded = replace(loaded, config=replace(loaded.config, name="my model (2)"))
    settings = {"device": "cpu", "estimator": "learned", "kv_capacity_tokens": 1024, "max_model_len": 256}
    with pytest.warns(RuntimeWarning, match="not kept"), LLM(loaded, **settings) as llm:
        assert len(llm.generate([1, 2, 3], SamplingParams(max_tokens=2 * WORTH_KEEPING, ignore_eos=True))[0].token_ids)
    assert not files(home)
