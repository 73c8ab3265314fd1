"""How decode attention's work is cut among programs, by the kernel's own code on a CPU: all of it, once, in pieces that meet.

What a program does with its piece is tried on a GPU alone (test_decode_ring).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
from imitated_gluon import Imitation
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from pdlab.kernels.decode_line import line_of, piece_of

BLOCK = 64  # cached tokens of a tile
MOST = 64  # pieces of a program
PER_PIECE = gl.constexpr(6)


@gluon.jit
def cut_kernel(
    LENS, CU_Q, PIECES, SHARE, batch, few, least,
    KV_HEADS: gl.constexpr, BLOCK_N: gl.constexpr, BATCH_PAD: gl.constexpr, EARLY: gl.constexpr, ROOM: gl.constexpr,
):  # fmt: skip
    """PIECES [programs, ROOM, PER_PIECE], as the kernel walks its stretch."""
    line, _q_first, cut = line_of(LENS, CU_Q, batch, few, least, KV_HEADS, BLOCK_N, BATCH_PAD, EARLY, 4)
    tile, stop, share = cut
    gl.store(SHARE, share)
    to = PIECES + gl.program_id(0) * (ROOM * PER_PIECE)
    while tile < stop:
        request, head, first, take, count, held, _length, _limit = piece_of(tile, stop, line, KV_HEADS, BLOCK_N, EARLY)
        gl.store(to, request)
        gl.store(to + 1, head)
        gl.store(to + 2, first)
        gl.store(to + 3, count)
        gl.store(to + 4, held)
        gl.store(to + 5, tile)
        to += PER_PIECE
        tile += take


@dataclass
class Piece:
    program: int
    request: int
    head: int
    first: int
    count: int
    held: int
    tile: int


def cut(
    lens: list[int], queries: list[int], kv_heads: int, programs: int, few: int, least: int, early: bool = True
) -> tuple[list[Piece], int]:
    """Every program's pieces, and the share of each on the line."""
    found, share = torch.full((programs, MOST, 6), -1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    first = torch.tensor([0, *queries]).cumsum(0).int()
    constants: dict[str, Any] = {"KV_HEADS": kv_heads, "BLOCK_N": BLOCK, "BATCH_PAD": 32, "EARLY": early, "ROOM": MOST}
    Imitation(cut_kernel)[(programs,)](
        torch.tensor(lens, dtype=torch.int32), first, found, share, len(lens), few, least, **constants
    )
    return [Piece(p, *row) for p in range(programs) for row in found[p].tolist() if row[0] >= 0], int(share)


LENGTHS = st.sampled_from([0, 1, 64, 65, 66, 700, 3000, 20000])
QUERIES = st.sampled_from([1, 1, 1, 0, 5])


@settings(deadline=None, max_examples=40)
@given(
    requests=st.lists(st.tuples(LENGTHS, QUERIES), min_size=1, max_size=8)
    | st.builds(lambda length, n: [(length, 1)] * n, LENGTHS, st.integers(1, 8)),
    kv_heads=st.sampled_from([1, 2, 8]),
    programs=st.sampled_from([1, 2, 5, 33]),
    few=st.sampled_from([1, 5, 33]),
    least=st.sampled_from([2, 8]),
    early=st.booleans(),
)
@example(requests=[(700, 1)] * 7, kv_heads=1, programs=5, few=5, least=8, early=True)  # two segments for some
def test_every_tile_of_every_single_query_is_taken_once_and_parts_find_one_another(
    requests: list[tuple[int, int]], kv_heads: int, programs: int, few: int, least: int, early: bool
) -> None:
    lens, queries = [n for n, _ in requests], [q for _, q in requests]
    pieces, share = cut(lens, queries, kv_heads, programs, few, least, early)
    segments: dict[tuple[int, int], list[Piece]] = defaultdict(list)
    for piece in pieces:
        segments[piece.request, piece.head].append(piece)
    single = [b for b, n in enumerate(queries) if n == 1]
    assert set(segments) == {(b, head) for b in single for head in range(kv_heads)}
    for (b, _), parts in segments.items():
        tiles = max(1, -(-(lens[b] - early) // BLOCK))
        assert [t for p in parts for t in range(p.first, p.first + p.count)] == list(range(tiles))
        assert all(p.held == tiles for p in parts)
        if len(parts) > 1:  # the last to arrive looks for the others where it reckons them to be, see _finish
            for p in parts:
                began = p.tile - p.first
                first, last = began // share, (began + tiles - 1) // share
                assert [part.program for part in parts] == list(range(first, last + 1))
    for program in range(programs):  # whose partial results have two places
        assert sum(p.count < p.held for p in pieces if p.program == program) <= 2


def test_where_no_request_has_a_single_query_nobody_has_work() -> None:
    assert cut([700, 64], [5, 0], 2, 5, 5, 8)[0] == []
