"""The door: a prompt in any of its forms becomes token ids that can run here, or an error that says what would be right."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from pdlab.core.config import SamplingParams
from pdlab.core.errors import InvalidRequest

if TYPE_CHECKING:
    from pdlab.engine.engine import Engine
    from pdlab.models.tokenizer import Tokenizer

Prompt = str | Sequence[int]


class Door:
    """Checks for one engine; `tokenizer` is None where only token ids can be taken."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None) -> None:
        self.engine, self.tokenizer = engine, tokenizer

    def admissible(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None, truncate: str | None
    ) -> list[tuple[Sequence[int], SamplingParams]]:
        """(token ids, parameters) of each prompt. InvalidRequest, naming the prompt, if one of them cannot run."""
        many = as_list(prompts)
        each = params_for(params, len(many))
        checked = []
        for i, (prompt, p) in enumerate(zip(many, each, strict=True)):
            try:
                ids = self.fit(self.ids(prompt), p, truncate)
                self.engine.check(ids, p)
            except InvalidRequest as error:
                if len(many) == 1:
                    raise
                raise type(error)(f"prompt {i}: {error.message}", error.hint) from error
            checked.append((ids, p))
        return checked

    def ids(self, prompt: Any) -> Sequence[int]:
        """Token ids of text, or ids that were checked to be some."""
        model = self.engine.model
        if isinstance(prompt, str):
            if not prompt:
                raise InvalidRequest("the prompt is empty", "give at least one character or token id")
            try:
                prompt.encode()
            except UnicodeEncodeError as error:
                what = f"character {error.start} of the prompt is a surrogate, which no text holds"
                raise InvalidRequest(what, "decode its bytes by the encoding they are in") from error
            prompt = self.need_tokenizer("a text prompt").encode(prompt)
        ids = np.zeros((), object)
        with suppress(TypeError, ValueError, OverflowError):
            if isinstance(prompt, np.ndarray) or not (isinstance(prompt, bytes | bytearray) or bool in set(map(type, prompt))):
                ids = np.asarray(prompt)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise InvalidRequest(f"the prompt is neither text nor token ids: {short(prompt)}", "give a str or a list of int")
        wrong = ids[(ids < 0) | (ids >= model.vocab_size)]
        if wrong.size:
            raise InvalidRequest(
                f"token id {wrong[0]} is outside the vocabulary of {model.name}", f"use ids from 0 to {model.vocab_size - 1:,}"
            )
        return ids.tolist()

    def fit(self, ids: Sequence[int], params: SamplingParams, truncate: str | None) -> Sequence[int]:
        """With truncate="left", a prompt that does not fit loses its beginning: it keeps what leaves room for max_tokens,
        and at least half of what the model can hold here."""
        if truncate not in (None, "left"):
            raise InvalidRequest(f"truncate={truncate!r} is not possible", 'use "left" or None')
        longest = self.engine.max_len
        if truncate is None or len(ids) < longest:
            return ids
        keep = min(max(longest - params.max_tokens, longest // 2), longest - 1)
        return ids[len(ids) - keep :]

    def need_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequest(f"{what} needs a tokenizer and {self.engine.model.name} has none here", "pass token ids")
        return self.tokenizer


def as_list(prompts: Any) -> list[Any]:
    """One prompt or several, as several."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, np.ndarray):
        one = prompts.ndim == 0 or (prompts.ndim == 1 and prompts.dtype.kind in "iu")
        return [prompts] if one else list(prompts)
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray):
        raise InvalidRequest(f"prompts is a {type(prompts).__name__}", "give text, token ids, or a list of either")
    if len(prompts) == 0:
        raise InvalidRequest("the prompt is empty", "give text, token ids, or a list of either")
    if all(isinstance(t, int | np.integer) and not isinstance(t, bool) for t in prompts):
        return [prompts]
    return list(prompts)


def params_for(params: Any, n: int) -> list[SamplingParams]:
    """One SamplingParams a prompt; None is the default ones."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * n
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        raise InvalidRequest(f"params is {short(params)}", "give one SamplingParams, or one for each prompt")
    if len(params) != n:
        raise InvalidRequest(f"there are {n} prompts and {len(params)} SamplingParams", "give one, or one for each prompt")
    return list(params)


def short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
