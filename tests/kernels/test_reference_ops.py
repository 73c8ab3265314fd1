"""The plain operations against definitions written out in float64, element by element where that is readable."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from pdlab.kernels import reference
from pdlab.kernels.kv_view import KVView
from pdlab.kernels.ops import HeadWeights, NormWeights, RopeTable
from pdlab.kernels.reference import ReferenceOps


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def make_view(lens: list[tuple[int, int]], kind: str, page: int, kv_heads: int, dim: int) -> KVView:
    """Random KV for requests of (queries, keys), in pages handed out backwards, or in extents with gaps."""
    longest = max(kv for _, kv in lens)
    each = -(-longest // page)
    total = each * len(lens) + 2
    table = torch.arange(total - 1, total - 1 - each * len(lens), -1, dtype=torch.int32).view(len(lens), each)
    starts = torch.tensor([0, *(n for n, _ in lens)]).cumsum(0).int()
    return KVView(
        kind=kind,
        page_size=page,
        k=rand(total, kv_heads, page, dim, seed=1),
        v=rand(total, kv_heads, page, dim, seed=2),
        block_table=table,
        base=torch.arange(len(lens)) * each * page + 1,
        seq_lens=torch.tensor([kv for _, kv in lens], dtype=torch.int32),
        cu_q=starts,
        slots=torch.zeros(int(starts[-1]), dtype=torch.int64),
        positions=torch.zeros(int(starts[-1]), dtype=torch.int64),
        max_q=max(n for n, _ in lens),
        max_kv=longest,
        host_lens=tuple(lens),
    )


def slow_attention(q: torch.Tensor, view: KVView) -> torch.Tensor:
    """One query at a time in float64, keys found one by one through the documented slot formula."""
    out = torch.zeros_like(q, dtype=torch.float64)
    group = q.shape[1] // view.k.shape[1]
    t = 0
    for b, (n, length) in enumerate(view.host_lens):
        for i in range(n):
            keys = range(length - n + i + 1)
            for h in range(q.shape[1]):
                rows = []
                for p in keys:
                    page, row = divmod(p, view.page_size)
                    slot = view.block_table[b, page] * view.page_size + row if view.kind == "paged" else view.base[b] + p
                    rows.append((int(slot) // view.page_size, h // group, int(slot) % view.page_size))
                k = torch.stack([view.k[r] for r in rows]).double()
                v = torch.stack([view.v[r] for r in rows]).double()
                out[t, h] = (k @ q[t, h].double() / math.sqrt(q.shape[2])).softmax(0) @ v
            t += 1
    return out


@pytest.mark.parametrize(("kind", "page"), [("paged", 1), ("paged", 3), ("paged", 16), ("extent", 1), ("extent", 4)])
@pytest.mark.parametrize(
    "lens",
    [[(1, 13), (1, 1), (1, 29)], [(5, 17), (1, 9), (1, 30), (3, 3), (1, 2)], [(23, 23)]],
    ids=["decodes", "mixed", "one prompt"],
)
def test_attention_matches_float64(lens: list[tuple[int, int]], kind: str, page: int) -> None:
    view = make_view(lens, kind, page, kv_heads=2, dim=24)
    q = rand(sum(n for n, _ in lens), 6, 24)
    got = ReferenceOps().attention(q, view)
    torch.testing.assert_close(got.double(), slow_attention(q, view), atol=2e-6, rtol=0)  # float32 over 30 keys


def test_attention_in_small_blocks_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    view = make_view([(19, 26), (1, 7), (1, 26), (1, 3)], "paged", 4, kv_heads=1, dim=16)
    q = rand(22, 4, 16)
    whole = ReferenceOps().attention(q, view)
    monkeypatch.setattr(reference, "_SCORES", 150)
    torch.testing.assert_close(ReferenceOps().attention(q, view), whole, atol=1e-6, rtol=0)


def test_padding_rows_come_out_zero_and_a_view_without_host_lengths_decodes() -> None:
    view = make_view([(1, 13), (1, 5)], "paged", 4, kv_heads=2, dim=16)
    q = rand(4, 4, 16)
    got = ReferenceOps().attention(q, view)
    assert (got[2:] == 0).all()
    captured = dataclasses.replace(view, host_lens=(), seq_lens=torch.tensor([13, 5], dtype=torch.int32))
    torch.testing.assert_close(ReferenceOps().attention(q[:2], captured), got[:2], atol=1e-6, rtol=0)


def test_norms_and_rotation_match_their_definitions() -> None:
    x, w, b = rand(5, 30), rand(30, seed=1), rand(30, seed=2)
    exact = x.double()
    rms = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w.double()
    centred = exact - exact.mean(-1, keepdim=True)
    layer = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w.double() + b.double()
    torch.testing.assert_close(reference.norm(x, NormWeights(w, None, 1e-5)).double(), rms, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(reference.norm(x, NormWeights(w, b, 1e-5)).double(), layer, atol=1e-6, rtol=1e-6)
    angle = rand(9, 4)
    rope, positions = RopeTable(angle.cos(), angle.sin()), torch.tensor([8, 0, 3, 3, 1])
    heads = rand(5, 3, 8)
    turned = torch.view_as_complex(torch.stack(heads.double().chunk(2, -1), -1).contiguous())
    turned = turned * torch.polar(torch.ones(5, 1, 4, dtype=torch.float64), angle.double()[positions].unsqueeze(1))
    want = torch.cat((turned.real, turned.imag), -1)
    torch.testing.assert_close(reference.rotate(heads, rope, positions).double(), want, atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_are_not_rounded_to_16_bits(dtype: torch.dtype) -> None:
    head = HeadWeights(NormWeights(torch.ones(40, dtype=dtype), None, 1e-5), rand(33, 40).to(dtype))
    x = rand(3, 40, seed=4).to(dtype)
    got = reference.project_logits(x, head)
    want = reference.norm(x, head.norm).double() @ head.proj.double().T
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=0)  # products of 16-bit numbers are exact in float32
