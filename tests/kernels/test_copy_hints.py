"""Copies that carry a cache policy: which lines of PTX are completed, and which stay as they are."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from pdlab.kernels.copy_hints import hinted

BEGIN = """
\tmov.b64 \t%rd7, kernel_param_1;
\tmov.b64 \t%rd8, kernel_param_11;
\tcvta.param.u64 \t%rd5, %rd8;
\tcvta.param.u64 \t%rd4, %rd7;
"""
COPY = "cp.async.bulk.tensor.2d.shared::{space}.global.mbarrier::complete_tx::bytes"
POLICY = "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;"


def ptx(*marks: int, space: str = "cluster") -> str:
    copy = COPY.format(space=space)
    marked = "".join(f"\t// copies by parameter {n} leave L2 first\n" for n in marks)
    weights = f"\t@%p2 {copy} [%r15], [%rd4, {{%r16, %r4}}], [%r6];\n\t{copy} [%r15], [%rd4, {{%r16, 0}}], [%r6];\n"
    return f"{BEGIN}{marked}{weights}\t@%p3 {copy} [%r17], [%rd5, {{%r16, %r4}}], [%r6];\n"


@pytest.mark.parametrize("space", ["cluster", "cta"])  # what Triton 3.6 and 3.7 write
def test_copies_of_the_marked_tensor_carry_the_policy(space: str) -> None:
    copy, lines = COPY.format(space=space), hinted(ptx(1, space=space)).splitlines()
    assert lines[-3] == (
        f"\t{{ .reg .b64 policy; {POLICY} @%p2 {copy}.L2::cache_hint [%r15], [%rd4, {{%r16, %r4}}], [%r6], policy; }}"
    )
    assert lines[-2].count("policy") == 4
    assert "@" not in lines[-2], "an unguarded copy stays unguarded"
    assert lines[-1] == ptx(1, space=space).splitlines()[-1], "the other tensor's stay"


def test_parameter_1_is_not_parameter_11() -> None:
    lines = hinted(ptx(11)).splitlines()
    assert [line.count("L2::cache_hint") for line in lines[-3:]] == [0, 0, 1]


def test_several_tensors_may_be_marked() -> None:
    assert hinted(ptx(1, 11)).count("L2::cache_hint") == 3


def test_ptx_without_marks_stays_as_it_is() -> None:
    assert hinted(ptx()) == ptx()
