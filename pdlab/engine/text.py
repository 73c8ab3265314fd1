"""Text of one request as its tokens come: whole characters only, and never a character past a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Decoder(Protocol):
    """What models.tokenizer.StreamDecoder offers."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class TextStream:
    """Holds back the end of the text while it could still become a stop string.

    text so far:   T h e   e n d . \\n \\n
    stop "\\n\\n#":                 ^^^^^ held back until the next character decides
    """

    def __init__(self, decoder: Decoder, stop: Sequence[str] = ()) -> None:
        self._decoder, self._stop = decoder, tuple(stop)
        self._held = ""
        self._pieces: list[str] = []
        self.stopped = False  # a stop string was found: the text is complete

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def push(self, token_id: int) -> str:
        """Text that this token made certain."""
        return self._emit(self._decoder.push(token_id))

    def end(self) -> str:
        """No token follows: what was held back comes out, half a character as the replacement character."""
        rest = self._emit(self._decoder.flush())
        if self.stopped:
            return rest
        held, self._held = self._held, ""
        self._pieces.append(held)
        return rest + held

    def _emit(self, more: str) -> str:
        if self.stopped or not more:
            return ""
        text = self._held + more
        found = [at for s in self._stop if (at := text.find(s)) >= 0]
        if found:
            self.stopped = True
            out, self._held = text[: min(found)], ""
        else:
            keep = max((_overlap(text, s) for s in self._stop), default=0)
            out, self._held = text[: len(text) - keep], text[len(text) - keep :]
        self._pieces.append(out)
        return out


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
