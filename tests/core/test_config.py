"""Settings: what cannot work is refused on the line that made it, by name, with what would be right."""

from __future__ import annotations

import copy
import pickle
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from pdlab import EngineConfig, SamplingParams
from pdlab.core.errors import ConfigError, InvalidRequest

NAN, INFINITY = float("nan"), float("inf")

BAD_CONFIG: dict[str, list[Any]] = {
    "device": ["", "tpu", "7", "cuda:", "cuda:x", 5, None],
    "dtype": ["fp32", None, float],
    "policy": ["FCFS", None, ["fcfs"]],
    "simulated_device": [5, None],
    "page_size": [0, 257, 16.0, "16", True, NAN],
    "kv_capacity_tokens": [0, -1, 1.5, "100", False],
    "kv_memory_utilization": [0, 1.1, "0.9", NAN, None, True],
    "compact_threshold": [0, 1.5, "x", NAN],
    "pool_headroom": [1, -0.1, "x", NAN],
    "max_batch_tokens": [0, NAN, INFINITY, None, "2048"],
    "steps_in_flight": [0, 3, 1.0, True, "1", None],
    "prefix_reuse": ["no", 1, None],
    "compact_on_refusal": ["", 0],
    "cuda_graphs": ["yes", 1],
    "prefill_graphs": ["yes", 1],
    "dependent_launch": ["no", 0],
    "weight_ring": ["off", None],
    "weight_hints": ["first", 0],
    "weight_prefetch": [1],
    "measured_tiles": [None],
    "persistent_decode": ["auto", 1],
    "patience_s": [0, NAN, INFINITY, "30", None],
    "seed": [1.0, None, "0", True],
}
BAD_PARAMS: dict[str, list[Any]] = {
    "max_tokens": [0, -1, 5.0, "5", True, None, NAN],
    "temperature": [-1e-9, NAN, INFINITY, "1", None, True],
    "top_k": [-1, 1.0, None, True],
    "top_p": [0, 1.0001, NAN, None, True],
    "min_p": [-0.1, 1.0001, NAN, None],
    "repetition_penalty": [0, -1, 1e-30, 1e30, NAN, None],
    "stop": [5, [5], b"ab", "", ["a", ""]],
    "stop_token_ids": [-1, [-1], ["a"], "ab", [1.0], [True]],
    "ignore_eos": ["no", None, 1],
    "seed": [1.0, "1", True],
    "logprobs": [-1, 21, True, 1.0],
    "timeout_s": [0, -1, INFINITY, NAN, "1"],
}


@pytest.mark.parametrize("name", BAD_CONFIG)
def test_an_engine_setting_that_cannot_work_is_named_with_its_value(name: str) -> None:
    for value in BAD_CONFIG[name]:
        for make in (EngineConfig, EngineConfig().with_):
            with pytest.raises(ConfigError, match=name) as refused:
                make(**{name: value})
            assert repr(value) in refused.value.message
            assert refused.value.hint


@pytest.mark.parametrize("name", BAD_PARAMS)
def test_a_sampling_parameter_that_cannot_work_is_named(name: str) -> None:
    for value in BAD_PARAMS[name]:
        with pytest.raises(InvalidRequest, match=name) as refused:
            SamplingParams(**{name: value})
        assert refused.value.hint


def test_a_misspelt_field_is_an_error_that_names_the_one_that_was_meant() -> None:
    with pytest.raises(ConfigError, match=r"no field 'pagesize'; did you mean page_size\?"):
        EngineConfig(pagesize=16)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="page_size"):
        EngineConfig().with_(page_sise=16)
    with pytest.raises(InvalidRequest, match="max_tokens"):
        SamplingParams(max_token=16)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="fields: device, dtype"):
        EngineConfig(zzz=1)  # type: ignore[call-arg]


def test_numbers_of_numpy_are_taken_and_become_plain_ones() -> None:
    config = EngineConfig(page_size=np.int64(32), kv_memory_utilization=np.float32(0.5), steps_in_flight=np.int8(2))
    params = SamplingParams(max_tokens=np.int32(5), temperature=np.float32(0.5), seed=np.int64(7), stop_token_ids=np.arange(3))
    assert config == EngineConfig(page_size=32, kv_memory_utilization=0.5, steps_in_flight=2)
    assert params == SamplingParams(max_tokens=5, temperature=0.5, seed=7, stop_token_ids=(0, 1, 2))
    for values in (asdict(config), asdict(params)):
        assert {type(v) for v in values.values()} <= {int, float, str, bool, tuple, type(None)}


def test_one_stop_may_be_given_without_a_list() -> None:
    assert SamplingParams(stop="END", stop_token_ids=7) == SamplingParams(stop=("END",), stop_token_ids=[7])
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams()


def test_settings_survive_pickling_and_copying() -> None:
    for value in (EngineConfig(page_size=32), SamplingParams(stop="a", seed=3)):
        assert pickle.loads(pickle.dumps(value)) == copy.deepcopy(value) == value
