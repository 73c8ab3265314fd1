"""Runs the fused kernels in Triton's interpreter: one JSON request a line in, one JSON answer a line out.

A process of its own, because TRITON_INTERPRET must be set before triton is first imported, and other tests import it without.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl
from fused_cases import Case, errors, sampling_case
from interleaved import interleave
from triton.runtime import interpreter

from pdlab.kernels import step_ends
from pdlab.kernels.filtered_sample import Meeting, filtered_sample
from pdlab.kernels.product_tiles import ProductTile
from pdlab.kernels.projection_sample import (
    GREEDY,
    LOGITS,
    RANDOM,
    Race,
    contest,
    hash_gumbel,
    noise_key,
    project,
    race_key,
    room,
)
from pdlab.kernels.projection_sample import gumbel as gumbel_noise
from pdlab.kernels.reference import project_logits
from pdlab.kernels.reference_sampling import gumbel, sample_from_logits
from pdlab.kernels.row_kernels import norm_rows


def operations(case: dict[str, Any], tile: dict[str, Any]) -> dict[str, float]:
    return errors(Case(**case), lambda *_: ProductTile(**tile))


def rows(case: dict[str, Any]) -> dict[str, float]:
    """The operations as a prompt takes them: products apart, one pass a row around them."""
    return errors(Case(**case), None)


def sampled(seed: int, rows: int, vocab: int, hidden: int, tile: dict[str, Any], bad: bool, repeat: int = 2) -> dict[str, Any]:
    """Tokens of the one-pass kernel and of the oracle on the kernel's own logits, greedy and random; launched twice."""
    x, head, sampling = sampling_case(seed, rows, vocab, hidden)
    if bad:
        x[1] = float("nan")
        x[2, 0] = float("inf")
    race = Race("cpu")
    t = ProductTile(**tile)
    exact = project_logits(x, head)
    normed = rows > 1
    x = norm_rows(x, head.norm) if normed else x
    logits = project(x, head, LOGITS, sampling, t, race, normed=normed)
    answer: dict[str, Any] = {"logits": float((logits - exact).nan_to_num(0, 0, 0).abs().max())}
    for name, want in (("random", RANDOM), ("greedy", GREEDY)):
        sampling.any_random = want == RANDOM
        for _ in range(repeat):
            got = project(x, head, want, sampling, t, race, normed=normed)
        answer[name] = [got.tolist(), sample_from_logits(logits, sampling).tokens.tolist()]
    return answer


def filtered(
    seed: int, rows: int, vocab: int, ties: bool, meeting: Meeting | None = None, bad: bool = False, share: int = 64,
    most: int | None = None, **filters: Any,
) -> list[list[int]]:  # fmt: skip
    """Tokens of the filter kernels and of the oracle. `bad`: rows 1 to 3 have NaN, nothing, and infinity; row 4 is banned
    almost everywhere, rows 5 and 6 have zeros of both signs and nothing else. `most`: rows of a launch."""
    _, _, sampling = sampling_case(seed, rows, vocab, 8)
    for name, values in filters.items():
        column = getattr(sampling, name)
        setattr(sampling, name, torch.tensor([values[i % len(values)] for i in range(rows)], dtype=column.dtype))
    sampling.any_random = sampling.any_filter = True
    logits = 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))
    if ties:
        logits = logits.round()
    if bad:
        logits[1, 20], logits[2], logits[3, 5] = torch.nan, -torch.inf, torch.inf
        logits[4, 7:] = -torch.inf
        logits[5:7], logits[5:7, :100] = 0.0, -0.0
    module = sys.modules[filtered_sample.__module__]
    plain, module.MOST_ROWS = module.MOST_ROWS, most or module.MOST_ROWS
    try:
        mine = filtered_sample(logits, sampling, meeting, share)
    finally:
        module.MOST_ROWS = plain
    return [mine.tolist(), sample_from_logits(logits, sampling).tokens.tolist()]


class Watched:
    """A kernel whose launches are seen: which rows filtered_sample leaves open for it."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.open: list[int] = []

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(*given: Any, **fixed: Any) -> None:
            held = given[8]
            self.open += sorted(held[2 : 2 + 2 * int(held[0]) : 2].tolist())
            self.kernel[grid](*given, **fixed)

        return launch


def left_open(**arguments: Any) -> list[list[int]]:
    """As `filtered`, and the rows that whole passes were needed for."""
    module = sys.modules[filtered_sample.__module__]
    watched = Watched(module.filtered_search_kernel)
    module.filtered_search_kernel = watched
    try:
        return [*filtered(**arguments), watched.open]
    finally:
        module.filtered_search_kernel = watched.kernel


def left(meeting: Meeting) -> list[int]:
    """What a call leaves for the next, where that matters."""
    return [*meeting.count.tolist(), *meeting.open[:2].tolist()]


def filtered_together(seed: int, rows: int, vocab: int, ties: bool, groups: int, **filters: Any) -> list[list[int]]:
    """As `filtered`, by programs of 64 tokens that take turns at random; launched twice, and what they left in the meeting."""
    plain = interpreter.interpreter_builder.create_atomic_rmw, interpreter.GridExecutor.__init__
    interleave(seed)
    try:
        parts = -(-vocab // 64)
        meeting = Meeting("cpu", groups * parts)
        answers = filtered(seed, rows, vocab, ties, meeting=meeting, **filters)
        return [*answers, *filtered(seed, rows, vocab, ties, meeting=meeting, **filters), left(meeting)]
    finally:
        interpreter.interpreter_builder.create_atomic_rmw, interpreter.GridExecutor.__init__ = plain


@triton.jit
def contest_kernel(LOGITS, HASHES, TEMPERATURE, BEST, SCORES, ROOM, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    logits, h = tl.load(LOGITS + i), tl.load(HASHES + i).to(tl.uint32)
    temperature = tl.load(TEMPERATURE)
    slope, offset = contest(temperature, race_key(tl.load(BEST), tl.full((), 5, tl.int32)), temperature == temperature)
    tl.store(ROOM + i, room(logits, h, slope, offset))
    tl.store(SCORES + i, tl.where(temperature > 0, logits * (1.0 / tl.maximum(temperature, 1e-6)) + hash_gumbel(h), logits))


def contested(temperature: float, scale: float) -> list[int]:
    """Of 2^16 scores, bars at the highest ones in turn: (wrongly ruled out, let in, not below the bar)."""
    g = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(1 << 16, generator=g)
    hashes = torch.randint(0, 1 << 32, (1 << 16,), generator=g)
    hashes[:8] = torch.tensor([0, 1, 2, 255, (1 << 32) - 1, (1 << 32) - 2, 1 << 31, (1 << 28) - 1])
    scores, left = torch.empty(1 << 16), torch.empty(1 << 16)
    missed = let_in = over = 0
    t, bar = torch.tensor([temperature]), torch.zeros(1)
    contest_kernel[(1,)](logits, hashes, t, bar, scores, left, COUNT=1 << 16)
    for value in scores.sort(descending=True).values[[0, 1, 2, 10, 100, 1000, -1]]:
        bar[0] = value
        contest_kernel[(1,)](logits, hashes, t, bar, scores, left, COUNT=1 << 16)
        missed += int(((left < 0) & (scores >= value)).sum())
        let_in, over = let_in + int((left >= 0).sum()), over + int((scores >= value).sum())
    return [missed, let_in, over]


@triton.jit
def noise_kernel(SEED, POSITION, OUT, VOCAB: tl.constexpr):
    v = tl.arange(0, VOCAB)
    key1, key2 = noise_key(tl.load(SEED), tl.load(POSITION))
    tl.store(OUT + v, gumbel_noise(v, key1, key2))


def noise(vocab: int) -> float:
    """Largest difference between the kernels' noise and the oracle's."""
    worst = 0.0
    for seed, position in ((0, 0), (1, 2), ((1 << 63) - 1, 77), (123456789012345, 1 << 40)):
        s, p = torch.tensor([seed]), torch.tensor([position])
        out = torch.empty(vocab)
        noise_kernel[(1,)](s, p, out, VOCAB=vocab)
        worst = max(worst, float((out - gumbel(s, p, vocab)[0]).abs().max()))
    return worst


def ends(ids: list[int], rows: list[int], last: list[int], tokens: list[int], learned: bool) -> list[Any]:
    """Which row of the table goes in, plus 100 times the position where positions are learned; what is remembered then."""
    memory, positions = torch.tensor(last), torch.arange(len(ids)) + 3
    table = torch.arange(32.0)[:, None].repeat(1, 24)
    taken = step_ends.embed(torch.tensor(ids), torch.tensor(rows), memory, table, positions, 100 * table if learned else None)
    step_ends.remember(torch.tensor(tokens), torch.tensor(rows), memory)
    assert bool((taken == taken[:, :1]).all()), "every element of a row"
    return [taken[:, 0].tolist(), memory.tolist()]


if __name__ == "__main__":
    torch.set_num_threads(1)
    calls = {f.__name__: f for f in (operations, rows, sampled, filtered, filtered_together, left_open, contested, noise, ends)}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"answer": calls[request["call"]](**request["arguments"])}
        except Exception:
            answer = {"failed": traceback.format_exc()}
        print(json.dumps(answer), flush=True)
