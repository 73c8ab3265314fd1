"""How a step's token budget is spent: who decodes, whose prompt is computed, and how much of it.

A batching composes each step from a handful of verbs (see draft.Draft): `decode_all`, `candidates`,
`admit`, `prefill`, `pad`. Order and memory are not its concern: candidates come in the policy's order, and `admit` says
whether memory had room.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from pdlab.core.config import EngineConfig
from pdlab.core.errors import ConfigError

if TYPE_CHECKING:
    from pdlab.scheduler.draft import Draft


class Batching(ABC):
    name: str

    @abstractmethod
    def compose(self, step: Draft) -> None:
        """Fills `step`; leaves it empty when there is nothing to do."""


class ContinuousChunked(Batching):
    """Every running request decodes in every step; what is left of the budget goes to prompts, in chunks.

    Promise: a step has at most `max_batch_tokens` tokens, and no prompt, however long, makes a decode wait.
    """

    name = "continuous_chunked"

    def compose(self, step: Draft) -> None:
        step.decode_all()
        for request in step.candidates():
            if step.left <= 0:
                return
            if (tokens := step.chunk(request)) > 0 and step.admit(request):
                step.prefill(request, tokens)


class Continuous(Batching):
    """As ContinuousChunked, but a prompt is computed whole, in the step that admits it.

    Promise: a step exceeds the budget only by one prompt that does not fit beside the decodes; that one has no other
    prompt beside it. Decodes run in every step, which takes as long as its prompts make it.
    """

    name = "continuous"

    def compose(self, step: Draft) -> None:
        step.decode_all()
        for request in step.candidates():
            todo = step.to_compute(request)
            if todo > step.left and step.chunks:
                return
            if step.admit(request):
                step.prefill(request, todo)


BATCHING_CLASSES: dict[str, type[Batching]] = {c.name: c for c in (ContinuousChunked, Continuous)}


def make_batching(config: EngineConfig) -> Batching:
    """The batching that `config.batching` names."""
    from pdlab.scheduler.static_batching import STATIC_CLASSES

    classes = BATCHING_CLASSES | STATIC_CLASSES
    if config.batching not in classes:
        raise ConfigError(f"batching={config.batching!r} is not built", f"choose one of: {', '.join(classes)}")
    return classes[config.batching]()
