"""What the serving suites show a machine before anything is measured: every kind of step there is, so that nothing is compiled
later, and what its estimator learns from.

Training covers what a load may meet: batches of every size, prompts of every size beside few and beside many decodes, one as
long as the longest in chunks of several sizes, and loads of chats of both sizes, some of them with a queue that never empties.
None has the seed of a measured load.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from pdlab.core.config import EngineConfig
from pdlab.costs.learned import GROUPS, MIXED_GROUPS
from pdlab.workloads.workload import Item, Workload

LADDER_STEPS = 8  # decode steps of each batch size that the estimator sees first


@dataclass(frozen=True)
class Load:
    """One to learn from: chats, their rate as a share of what a queue that never empties let in (None: such a queue), and
    its share of the time for loads."""

    chats: str
    load: float | None
    share: float


LOADS = (
    Load("chat_with_long", None, 0.24), Load("short_chat_with_long", None, 0.12), Load("chat_with_long", 0.9, 0.24),
    Load("short_chat_with_long", 0.85, 0.14), Load("chat_with_long", 0.6, 0.12), Load("short_chat_with_long", 0.5, 0.07),
    Load("chat_with_long", 0.35, 0.07),
)  # fmt: skip


def warm_up(config: EngineConfig, longest: int) -> tuple[Workload, ...]:
    """Requests that meet every kind of step there is, so that no kernel is compiled and no library initialised later.

    Kernels differ by how long the longest chunk is, how many rows a step has and how many of them sample: prompts of all
    sizes alone and among others, short ones (the ends of chunked prompts are such) beside a few decodes and beside many, and
    a crowd.
    """
    budget, rows = config.max_batch_tokens, config.max_batch_requests
    short = (1, 2, 3, 5, 9, 16, 17, 33)
    sizes = {*short, 24, 48, 64, 65, 100, 129, 200, 257, 300, 400, 513, 700, 900, 1100, 1500, budget - 1}
    prompts = [budget, *sorted(n for n in sizes if n < budget), budget + 5, 2 * budget + 100]
    prompts = [min(n, longest - 32) for n in prompts]

    def closed(name: str, items: Iterable[tuple[int, int]], clients: int) -> Workload:
        return Workload(name, (Item(0.0, prompt_tokens=n, max_tokens=out) for n, out in items), 0, clients)

    def tails(decodes: int) -> Workload:
        return closed(f"beside {decodes}", [*[(24, 6 * len(short))] * decodes, *[(n, 1) for n in short]], decodes + 1)

    few, many = min(2, rows - 1), min(70, rows - 1)
    crowd = [(24, 8), (40, 8)] * (rows // 2 + rows // 8)
    alone, among = [(n, 2) for n in prompts], [(n, 16) for n in prompts]
    return closed("alone", alone, 1), closed("among", among, 4), tails(few), tails(many), closed("crowd", crowd, rows)


def ladder(config: EngineConfig) -> Workload:
    """A crowd that leaves batch size by batch size, so that a few decode steps of each are seen."""
    sizes = [n for n in (*GROUPS, config.max_batch_requests) if n <= config.max_batch_requests]
    items = [
        Item(0.0, prompt_tokens=48, max_tokens=LADDER_STEPS * (len(sizes) - i) + 1)
        for i, (below, size) in enumerate(pairwise((0, *sizes)))
        for _ in range(size - below)
    ]
    return Workload("ladder", items, 0)


def prompt_ladder(config: EngineConfig) -> Workload:
    """Beside a few decodes prompts of every size that steps with prompts are padded to, and of a little less, twice."""
    decodes = min(24, config.max_batch_requests // 2)
    sizes = [n - decodes for n in MIXED_GROUPS if decodes + 16 < n <= config.max_batch_tokens]
    prompts = [k for n in sizes for k in (n, n - min(32, n // 4))] * 2
    items = [Item(0.0, prompt_tokens=24, max_tokens=len(prompts) + 8)] * decodes
    items += [Item(0.0, prompt_tokens=n, max_tokens=1) for n in prompts]
    return Workload("prompt ladder", items, 0, decodes + 1)


def small_prompts(config: EngineConfig) -> Workload:
    """Beside many decodes small prompts, one at a time: what a load of short chats is made of."""
    decodes = min(96, config.max_batch_requests // 2)
    sizes = [n for n in (20, 36, 50, 64, 90, 110, 130, 160, 200, 256, 330, 420) if decodes + n <= config.max_batch_tokens]
    items = [Item(0.0, prompt_tokens=300 if i % 3 else 40, max_tokens=3 * len(sizes) + 8) for i in range(decodes)]
    items += [Item(0.0, prompt_tokens=n, max_tokens=1) for n in sizes * 3]
    return Workload("small prompts", items, 0, decodes + 1)


def deep_prompt(config: EngineConfig, tokens: int) -> Workload:
    """Beside a few decodes one prompt of so many tokens, without which the price of a deep context is a guess. A policy that
    limits chunks computes it in more steps, of other sizes."""
    steps = -(-tokens // config.max_batch_tokens)
    decodes = [Item(0.0, prompt_tokens=24, max_tokens=4 * steps)] * min(8, config.max_batch_requests - 1)
    return Workload("deep prompt", [*decodes, Item(0.0, prompt_tokens=tokens, max_tokens=1)], 0)
