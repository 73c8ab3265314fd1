"""Standard output as commands need it: one JSON document and nothing else, and a clean end whatever becomes of it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def stdout_kept_clean(active: bool) -> Iterator[None]:
    """While active, what anything prints, subprocesses included, goes to standard error."""
    if not active:
        yield
        return
    saved = None
    with contextlib.suppress(OSError, ValueError):  # a notebook's or a test's streams may have no descriptor
        sys.stdout.flush()
        saved = os.dup(1)
        os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        if saved is not None:
            os.dup2(saved, 1)
            os.close(saved)


def usable_streams() -> None:
    """Streams that were closed before the start become empty ones; a character that the terminal cannot show becomes `?`."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: PTH123, SIM115  takes the free descriptor, for as long as we run
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def to_json(document: Any) -> str:
    plain = not (getattr(sys.stdout, "encoding", None) or "utf-8").lower().startswith("utf")
    return json.dumps(document, ensure_ascii=plain, indent=1, allow_nan=False)


def finish(code: int, text: str) -> int:
    """Prints the answer; the exit code."""
    try:
        if text:
            print(text)
        sys.stdout.flush()
        return code
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still buffered has to go somewhere
        if isinstance(error, BrokenPipeError):  # the reader of the pipe has seen enough
            return code
        print(f"pdlab: the answer cannot be written: {error}", file=sys.stderr)
        return max(code, 1)
