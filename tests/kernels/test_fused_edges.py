"""Fused operations at the edges of what a step may hold; needs no GPU, since no kernel has anything to do there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
from fused_cases import Case, make_ops, sampling_case


@pytest.mark.parametrize("stage", ["greedy", "random", "filter", "logprobs"])
def test_a_step_in_which_nobody_samples_gives_no_tokens(stage: str) -> None:
    x, head, sampling = sampling_case(0, 3, 17, 8)
    case = Case(tokens=1, hidden=8, heads=2, kv_heads=1, dim=4, ffn=8)
    none = replace(
        sampling,
        **{name: getattr(sampling, name)[:0] for name in ("temperature", "top_k", "top_p", "min_p", "seed", "position")},
        repetition_penalty=sampling.repetition_penalty[:0],
        any_random=stage != "greedy",
        any_filter=stage == "filter",
        num_logprobs=2 if stage == "logprobs" else -1,
    )
    result = make_ops(case).projection_sample(x[:0], head, none)
    assert result.tokens.shape == (0,)
    assert result.tokens.dtype == torch.int64
