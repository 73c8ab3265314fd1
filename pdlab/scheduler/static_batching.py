"""Batches that run together to the end: what serving looked like before continuous batching, and the article's variant.

A batch is admitted when nothing runs. Its prompts are computed side by side, each padded to the longest; then all decode
until the last one ends, and the rows of those that ended earlier are computed all the same. Both kinds of padding are
counted in the plan's `pad_tokens`.

    one_at_a_time    batches of one
    static           in the policy's order, as many as fit the padded budget
    article          sorted by length, longest first, under a token budget; as the article has it, flaws included
    article_mended   sorted by length; the budget holds; what is longer than the budget is computed in chunks

Padding of a batch with prompts p_1 … p_n: n · max(p) - sum(p) tokens; of its decodes: n · max(o) - sum(o).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from pdlab.core.errors import PolicyError
from pdlab.core.plan import PlanShape
from pdlab.core.request import Request
from pdlab.costs.formulas import step_flops
from pdlab.models.config import ModelConfig
from pdlab.scheduler.batching import Batching
from pdlab.scheduler.draft import Draft


class Static(Batching):
    """Padded batches in the policy's order. Promise: none on latency; a batch's padded prompts fit `static_batch_tokens`
    unless it is a batch of one."""

    name = "static"
    holds_batch = True  # nobody joins while a batch runs
    chunked = False  # whether a prompt alone that is over the step's budget is computed in chunks

    def __init__(self) -> None:
        self._rows = 0  # requests that the running batch began with

    def next_batch(self, candidates: Sequence[Request], budget: int) -> list[Request]:
        """Who forms the next batch, not empty; `budget` is in padded prompt tokens."""
        batch: list[Request] = []
        longest = 0
        for r in candidates:
            longest = max(longest, r.num_tokens)
            if batch and (len(batch) + 1) * longest > budget:
                break
            batch.append(r)
        return batch

    def compose(self, step: Draft) -> None:
        if step.running:
            self._go_on(step)
            return
        candidates = [r for r in step.candidates() if r.row < 0]
        batch: list[Request] = []
        for r in self.next_batch(candidates, step.scheduler.config.static_batch_tokens):
            if not step.admit(r):
                break
            batch.append(r)
        self._rows = len(batch)
        longest = max((step.to_compute(r) for r in batch), default=0)
        for r in batch:
            own = step.to_compute(r)
            step.prefill(r, min(own, step.left) if self.chunked and len(batch) == 1 else own)
            step.pad(longest - own)

    def _go_on(self, step: Draft) -> None:
        prefilling = step.scheduler.prefilling
        if prefilling:
            for r in list(prefilling.values()):
                step.prefill(r, step.left)
            return
        step.decode_all()
        if step.decodes:
            step.pad(max(0, self._rows - step.decodes))


class OneAtATime(Static):
    """Each request alone, from its prompt to its last token."""

    name = "one_at_a_time"

    def next_batch(self, candidates: Sequence[Request], budget: int) -> list[Request]:
        return list(candidates[:1])


def article_batches(requests: Sequence[Request], budget: int) -> list[list[Request]]:
    """The article's dynamic batching, as described. Flaws kept: an empty list is an IndexError; the budget is tested with
    the batch as it is before the next request joins, so a batch can overrun it; a request longer than the budget gets a
    batch that overruns it too; and the very first test passes on an empty batch whatever the budget."""
    by_length = sorted(requests, key=lambda r: r.num_tokens, reverse=True)
    batches: list[list[Request]] = []
    batch: list[Request] = []
    longest = by_length[0].num_tokens
    for r in by_length:
        if len(batch) * longest * 2 < budget:
            batch.append(r)
            longest = max(longest, r.num_tokens)
        else:
            batches.append(batch)
            batch, longest = [r], r.num_tokens
    if batch:
        batches.append(batch)
    return batches


def mended_batches(requests: Sequence[Request], budget: int) -> list[list[Request]]:
    """Sorted by length, grouped so that every batch's padded tokens fit `budget`, a longer request alone; shortest first,
    since the direction changes no padding and lets more requests end early. No requests, no batches."""
    batches: list[list[Request]] = []
    for r in sorted(requests, key=lambda r: (r.num_tokens, r.request_id)):
        if batches and (len(batches[-1]) + 1) * r.num_tokens <= budget:
            batches[-1].append(r)
        else:
            batches.append([r])
    return batches


class ArticleBatching(Static):
    """Cuts everything that waits into batches (article_batches) and runs them one after another before it looks again."""

    name = "article"

    def __init__(self) -> None:
        super().__init__()
        self._batches: deque[list[Request]] = deque()

    def cut(self, requests: Sequence[Request], budget: int) -> list[list[Request]]:
        try:
            return article_batches(
                requests, 2 * budget
            )  # it counts every token twice; so the budget means what it does elsewhere
        except IndexError as e:
            raise PolicyError(
                "the article's batching was asked for a batch of no requests", 'batching="article_mended" gives none'
            ) from e

    def next_batch(self, candidates: Sequence[Request], budget: int) -> list[Request]:
        there = {r.request_id for r in candidates}
        while self._batches:
            batch = [r for r in self._batches.popleft() if r.request_id in there]
            if batch:
                return batch
        self._batches.extend(self.cut(candidates, budget))
        return self._batches.popleft() if self._batches else []


class ArticleMended(ArticleBatching):
    """As ArticleBatching with mended_batches; a prompt over the step's budget is computed in chunks."""

    name = "article_mended"
    chunked = True

    def cut(self, requests: Sequence[Request], budget: int) -> list[list[Request]]:
        return mended_batches(requests, budget)


def padding_flops(model: ModelConfig, shape: PlanShape) -> float:
    """FLOPs of a step that its padding rows cost: the matrix products of `pad_tokens` rows."""
    own = PlanShape(shape.prefill, shape.decode_count, shape.decode_kv_tokens, 0, shape.sampled)
    return step_flops(model, shape).total - step_flops(model, own).total


STATIC_CLASSES: dict[str, type[Batching]] = {c.name: c for c in (OneAtATime, Static, ArticleBatching, ArticleMended)}
