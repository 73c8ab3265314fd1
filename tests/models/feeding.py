"""Runs a model over a small KV memory the way an executor would: scattered pages or extents, several requests a step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch

from pdlab.kernels.kv_view import KVView
from pdlab.models.model import Model


class Feeder:
    """`page_size` None: extents. Memory starts as NaN, so a read of anything never written shows up in the logits."""

    def __init__(self, model: Model, page_size: int | None, requests: int, longest: int, seed: int = 0) -> None:
        self.model = model
        self.kind = "extent" if page_size is None else "paged"
        self.page_size = page_size or 1
        self.pages_each = -(-longest // self.page_size)
        total = requests * self.pages_each + 3
        self.k, self.v = (torch.full_like(t, torch.nan) for t in model.new_kv(total, self.page_size))
        pages = list(range(total))
        if self.kind == "paged":
            random.Random(seed).shuffle(pages)
        table = torch.tensor(pages[: requests * self.pages_each], dtype=torch.int32)
        self.table = table.view(requests, self.pages_each)
        self.base = torch.arange(requests) * self.pages_each + 2
        self.lengths = [0] * requests

    def slots(self, rid: int, positions: torch.Tensor) -> torch.Tensor:
        if self.kind == "extent":
            return self.base[rid] + positions
        return self.table[rid, positions // self.page_size].long() * self.page_size + positions % self.page_size

    def step(self, work: Sequence[tuple[int, Sequence[int]]]) -> list[torch.Tensor]:
        """One step: for each (request, its next tokens) the logits [tokens, V]."""
        lens, positions, slots, starts = [], [], [], [0]
        for rid, tokens in work:
            lo = self.lengths[rid]
            self.lengths[rid] = hi = lo + len(tokens)
            lens.append((len(tokens), hi))
            positions.append(torch.arange(lo, hi))
            slots.append(self.slots(rid, positions[-1]))
            starts.append(starts[-1] + len(tokens))
        rids = torch.tensor([rid for rid, _ in work])
        view = KVView(
            kind=self.kind,
            page_size=self.page_size,
            k=self.k,
            v=self.v,
            block_table=self.table[rids],
            base=self.base[rids],
            seq_lens=torch.tensor([kv for _, kv in lens], dtype=torch.int32),
            cu_q=torch.tensor(starts, dtype=torch.int32),
            slots=torch.cat(slots),
            positions=torch.cat(positions),
            max_q=max(n for n, _ in lens),
            max_kv=max(kv for _, kv in lens),
            host_lens=tuple(lens),
        )
        tokens = torch.tensor([t for _, part in work for t in part])
        x = self.model.forward(tokens, view.positions.int(), view)
        return list(self.model.logits(x).split([n for n, _ in lens]))


def whole_logits(model: Model, tokens: Sequence[int]) -> torch.Tensor:
    """Logits [tokens, V] of one prompt in one step."""
    return Feeder(model, 16, 1, len(tokens)).step([(0, tokens)])[0]


def cut(file: Path, keep: float) -> None:
    """Leave only the first `keep` of a file, as an interrupted copy would."""
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * keep)])
