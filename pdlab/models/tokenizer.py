"""Text to token ids and back: trained tokenizers (through `tokenizers`), and a byte-level one for random models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from pdlab.core.errors import InvalidRequest
from pdlab.models.config import ModelConfig

if TYPE_CHECKING:
    import tokenizers

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what decoding gives for half a UTF-8 character

# ChatML; used where a model brings no template of its own
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Tokenizer(Protocol):
    """`vocab_size` counts the ids it can decode; the model's own vocabulary may be padded beyond that."""

    vocab_size: int

    def encode(self, text: str, add_bos: bool | None = None) -> list[int]:
        """Token ids. `add_bos` None: as the model was trained."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        ...

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation, ready for the model's next answer."""
        ...

    def stream(self) -> StreamDecoder:
        """A decoder that takes one id at a time."""
        ...


class StreamDecoder:
    """Ids one at a time to text, never half a UTF-8 character; all pieces joined equal `decode` of all ids.

    Decodes a window of the newest ids, because a token's text can depend on its neighbours. Bytes that make no character
    yet are replacement characters at its end: those are held back until the next ids decide.
    """

    _LONGEST, _KEPT = 32, 16  # ids of the window; held characters come from fewer than it keeps

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._given = 0  # characters of the window's text that were given out

    def push(self, token_id: int) -> str:
        """Text that became certain with this id; empty while a character is incomplete."""
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids)
        held = min(3, len(text) - len(text.rstrip(UNFINISHED)))  # three of four bytes, where each is shown by itself
        return self._give(text, len(text) - held)

    def flush(self) -> str:
        """What is left at the end, half a character shown as the replacement character."""
        text = self._tokenizer.decode(self._ids)
        return self._give(text, len(text))

    def _give(self, text: str, end: int) -> str:
        piece = text[self._given : end]
        self._given = max(self._given, end)
        if len(self._ids) == self._LONGEST:
            held = len(text) - self._given
            self._ids = self._ids[-self._KEPT :]
            self._given = len(self._tokenizer.decode(self._ids)) - held
        return piece


class ByteTokenizer:
    """UTF-8 bytes as ids 0...255, for random models whose vocabulary means nothing.

    Other ids decode to `⟨id⟩`, so that their text is visible and streams can be compared; the model's begin and end
    tokens decode to nothing.
    """

    def __init__(self, config: ModelConfig) -> None:
        if config.vocab_size < 256:
            raise InvalidRequest(f"{config.name} has {config.vocab_size} tokens", "text needs 256 or more; pass token ids")
        self.vocab_size = config.vocab_size
        self.bos = config.bos_token_id
        self._special = {config.bos_token_id, config.pad_token_id, *config.eos_token_ids}

    def encode(self, text: str, add_bos: bool | None = None) -> list[int]:
        bos = [self.bos] if add_bos and self.bos is not None else []
        return bos + list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        parts = bytearray()
        for i in ids:
            if 0 <= i < 256:
                parts.append(i)
            elif i not in self._special:
                parts += f"⟨{i}⟩".encode()
        return parts.decode(errors="replace")

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        return self.encode(render_chat(CHATML, messages))

    def stream(self) -> StreamDecoder:
        return StreamDecoder(self)


class TrainedTokenizer:
    """A `tokenizers.Tokenizer` with the model's special tokens and chat template."""

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        *,
        bos: int | None = None,
        add_bos: bool | None = None,
        template: str | None = None,
        variables: dict[str, Any] | None = None,
    ) -> None:
        self._inner = inner
        self.vocab_size = inner.get_vocab_size(with_added_tokens=True)
        self.bos = bos
        self.add_bos = add_bos
        self.template = template
        self._variables = variables or {}  # bos_token and eos_token, which templates may print

    def encode(self, text: str, add_bos: bool | None = None) -> list[int]:
        wanted = self.add_bos if add_bos is None else add_bos
        ids: list[int] = self._inner.encode(text, add_special_tokens=wanted is None).ids  # None: tokenizer.json knows
        return [self.bos, *ids] if wanted and self.bos is not None else ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._inner.decode([int(i) for i in ids], skip_special_tokens=True)

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        if self.template is None:
            raise InvalidRequest("this model has no chat template", "pass plain text, or a model trained for chat")
        return self.encode(render_chat(self.template, messages, **self._variables), add_bos=False)

    def stream(self) -> StreamDecoder:
        return StreamDecoder(self)


def render_chat(template: str, messages: list[dict[str, str]], **variables: Any) -> str:
    """A chat template (Jinja, as in tokenizer_config.json) filled with messages, up to where the assistant begins.

    Templates come with downloaded models, so they run in a sandbox. Raises InvalidRequest for messages that are
    malformed or that the template refuses.
    """
    import json

    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def whole(m: object) -> bool:
        return isinstance(m, dict) and isinstance(m.get("role"), str) and m.get("content") is not None

    if not isinstance(messages, list) or not messages or not all(map(whole, messages)):
        raise InvalidRequest(f"messages={messages!r} is no conversation", 'use [{"role": "user", "content": "..."}]')

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.globals["raise_exception"] = refuse
    environment.filters["tojson"] = lambda value, **kw: json.dumps(value, ensure_ascii=False, **kw)
    try:
        return environment.from_string(template).render(messages=messages, add_generation_prompt=True, **variables)
    except Exception as error:  # a template is somebody's program, and messages may hold what it cannot add or join
        raise InvalidRequest(f"the chat template refused these messages: {error}", "check roles and their order") from error
