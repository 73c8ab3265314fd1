"""Prompts: English from the standard library, and made-up tokens that are computed when read."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlab.core.errors import WorkloadError
from pdlab.workloads.prompts import MadeUpPrompt, library_text, prompt_of, text_prompts
from pdlab.workloads.workload import Item


def test_workloads_need_neither_torch_nor_pandas():
    code = (
        "import sys; from pdlab.workloads import generators, traces, prompts, replay;"
        "assert not {'torch', 'pandas', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_library_has_enough_english():
    assert len(library_text()) > 400_000


def test_text_prompts_are_reproducible_and_within_their_lengths():
    prompts = text_prompts(40, seed=3, characters=(20, 300))
    assert prompts == text_prompts(40, seed=3, characters=(20, 300))
    assert prompts != text_prompts(40, seed=4, characters=(20, 300))
    assert all(0 < len(p) <= 300 for p in prompts)
    with pytest.raises(WorkloadError):
        text_prompts(1, characters=(0, 5))


@given(
    pieces=st.lists(st.tuples(st.integers(-(2**50), 2**50), st.integers(1, 40)), min_size=1, max_size=5),
    lo=st.integers(-250, 250),
    hi=st.integers(-250, 250),
    step=st.sampled_from([1, 2, -1, -3]),
)
def test_made_up_prompts_slice_like_the_list_they_stand_for(pieces, lo, hi, step):
    prompt = MadeUpPrompt(pieces, 777)
    whole = list(prompt)
    assert len(whole) == len(prompt) == sum(n for _, n in pieces)
    assert all(isinstance(t, int) and 0 <= t < 777 for t in whole)
    assert prompt[lo:hi:step] == whole[lo:hi:step]
    assert prompt[-1] == whole[-1]
    with pytest.raises(IndexError):
        prompt[len(whole)]


def test_prompts_share_exactly_their_shared_pieces():
    a = prompt_of(Item(0, prompt_tokens=50, pieces=((4, 30),)), 0, 50_000)
    b = prompt_of(Item(0, prompt_tokens=70, pieces=((4, 30),)), 1, 50_000)
    c = prompt_of(Item(0, prompt_tokens=50, pieces=((4, 30),)), 0, 50_000, seed=1)
    assert a[:30] == b[:30] == c[:30]
    assert not np.array_equal(a[30:50], b[30:50])
    assert not np.array_equal(a[30:50], c[30:50])
    assert prompt_of(Item(0, prompt="hello"), 0, 10) == "hello"
