"""The attention kernels on a real GPU, in the dtypes that models use, against float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from attention_cases import contiguous_case, make_case, oracle, relative

from pdlab.core.config import EngineConfig
from pdlab.kernels.dispatch import make_ops
from pdlab.kernels.online_softmax import exact_attention, hard_cases
from pdlab.kernels.ops import ModelOps

pytestmark = pytest.mark.gpu
# p and the output are rounded to the dtype: relative 2^-9 and 2^-12 on average, each
TOLERANCE = {"bfloat16": 6e-3, "float16": 8e-4}


@dataclass(frozen=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    head_dim: int


@pytest.fixture(autouse=True)
def _tensor_cores() -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("the kernels are for compute capability 8.0 and above")


def kernels(heads: int, kv_heads: int, dim: int, dtype: str, requests: int = 64) -> ModelOps:
    config = EngineConfig(attention="triton", max_batch_requests=requests)
    return make_ops(config, Shape(heads, kv_heads, dim), "cuda", dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(32, 8, 128), (9, 3, 64), (8, 8, 64), (7, 1, 80), (4, 2, 256), (6, 6, 24)]
)
@pytest.mark.parametrize(("page", "paged"), [(16, True), (1, True), (7, True), (256, True), (1, False)])
def test_mixed_steps_match_float64(dtype: str, heads: int, kv_heads: int, dim: int, page: int, paged: bool) -> None:
    """Decodes, whole prompts and chunks after a prefix in one step; lengths that no tile divides."""
    case: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "page": page, "paged": paged, "dtype": dtype}
    q, view = make_case([1, 333, 700, 129, 64, 2048, 515], [1, 1, 300, 129, 64, 1, 3], device="cuda", **case)
    ops = kernels(heads, kv_heads, dim, dtype)
    for _ in range(2):
        assert relative(ops.attention(q, view), oracle(q, view)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("lens", [[1], [40000], [4096] * 8, [30000, *range(1, 100, 7)], list(range(0, 300))])
@pytest.mark.parametrize("paged", [True, False])
def test_decode_matches_float64_whatever_the_lengths(dtype: str, lens: list[int], paged: bool) -> None:
    q, view = make_case(lens, [1] * len(lens), heads=32, kv_heads=8, dim=128, page=16 if paged else 1, paged=paged, dtype=dtype,
                        device="cuda")  # fmt: skip
    ops = kernels(32, 8, 128, dtype, requests=len(lens))
    for _ in range(3):
        assert relative(ops.attention(q, view), oracle(q, view)) < TOLERANCE[dtype]


def test_the_last_of_the_programs_combines_every_time() -> None:
    """A lost partial result or a counter not reset shows in some of many launches."""
    q, view = make_case([9000, 17, 3000], [1, 1, 1], heads=32, kv_heads=8, dim=128, dtype="bfloat16", device="cuda")
    ops = kernels(32, 8, 128, "bfloat16")
    truth = oracle(q, view)
    first = ops.attention(q, view)
    assert relative(first, truth) < TOLERANCE["bfloat16"]
    assert all(torch.equal(ops.attention(q, view), first) for _ in range(500))


@pytest.mark.parametrize("queries", [2, 5, 16])
def test_a_few_queries_a_request_after_a_long_prefix(queries: int) -> None:
    q, view = make_case(
        [5000, 33, 800], [queries, 1, queries - 1], heads=8, kv_heads=2, dim=128, dtype="bfloat16", device="cuda"
    )
    assert relative(kernels(8, 2, 128, "bfloat16").attention(q, view), oracle(q, view)) < TOLERANCE["bfloat16"]


@pytest.mark.parametrize("prompt", [1, 2, 63, 128, 257, 1000, 3000])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 8, 128), (8, 2, 128), (8, 8, 64), (6, 2, 64)])
def test_prompts_of_any_length_match_float64(prompt: int, heads: int, kv_heads: int, dim: int) -> None:
    for paged in (True, False):
        q, view = make_case([prompt, 77], [prompt, 77], heads=heads, kv_heads=kv_heads, dim=dim, page=16 if paged else 1,
                            paged=paged, dtype="bfloat16", device="cuda")  # fmt: skip
        assert relative(kernels(heads, kv_heads, dim, "bfloat16").attention(q, view), oracle(q, view)) < TOLERANCE["bfloat16"]


def test_a_captured_graph_follows_lengths_and_tables_that_change() -> None:
    lens = [100, 2000, 31, 700]
    case: dict[str, Any] = {"heads": 32, "kv_heads": 8, "dim": 128, "dtype": "bfloat16", "device": "cuda"}
    q, view = make_case(lens, [1] * 4, **case)
    ops = kernels(32, 8, 128, "bfloat16")
    ops.attention(q, view)
    fixed = replace(view, host_lens=(), max_kv=4096)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.attention(q, fixed)
    for shorter in ([100, 2000, 31, 700], [1, 1999, 0, 650], [90, 16, 17, 1]):
        view.seq_lens.copy_(torch.tensor(shorter, dtype=torch.int32))
        graph.replay()
        now = replace(view, host_lens=tuple((1, n) for n in shorter))
        assert relative(out, oracle(q, now)) < TOLERANCE["bfloat16"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["large", "growing", "minus_infinity", "overflow"])
def test_kernels_survive_numerically_hard_inputs(name: str, dtype: str) -> None:
    case = {key: x.cuda() for key, x in hard_cases(getattr(torch, dtype), n=1, m=500)[name].items()}
    q, view = contiguous_case(case["q"], case["k"], case["v"])
    out = kernels(1, 1, 64, dtype).attention(q, view)
    truth = exact_attention(case["q"], case["k"], case["v"])
    assert relative(out[:, 0], truth) < TOLERANCE[dtype] + (4e-3 if name == "overflow" else 0)


@pytest.mark.parametrize("name", ["sdpa", "sdpa:math"])
def test_library_attention_matches_float64(name: str) -> None:
    from pdlab.kernels.library_attention import sdpa

    q, view = make_case([1, 333, 700, 129], [1, 1, 300, 129], heads=8, kv_heads=2, dim=64, dtype="bfloat16", device="cuda")
    out = sdpa(q, view, kernel=name.partition(":")[2] or None)
    assert relative(out, oracle(q, view)) < TOLERANCE["bfloat16"]
