"""Programs of an interpreted kernel that wait for one another, run in turns: the interpreter alone ends one before the next.

Each program is a thread, of which one runs at a time. At every atomic operation the turn goes to a program drawn at random, so
a seed is one interleaving: stores between two atomics of a program are seen by others as a whole, which is weaker than a GPU.
"""

from __future__ import annotations

import inspect
import random
import threading
from collections.abc import Callable
from typing import Any

import triton.language as tl  # noqa: F401 - the interpreter patches what a kernel's module calls tl
from triton.runtime import interpreter

builder = interpreter.interpreter_builder
_atomic = builder.create_atomic_rmw
_turns: Turns | None = None


class Turns:
    def __init__(self, programs: int, seed: int) -> None:
        self.alive, self.rng = set(range(programs)), random.Random(seed)
        self.changed, self.turn = threading.Condition(), 0
        self.failed: BaseException | None = None

    def wait(self, me: int) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.turn == me)
        builder.set_grid_idx(me, 0, 0)

    def pass_on(self) -> None:
        with self.changed:
            self.turn = self.rng.choice(sorted(self.alive)) if self.alive else -1
            self.changed.notify_all()

    def program(self, me: int, fn: Callable[..., Any], arguments: dict[str, Any]) -> None:
        self.wait(me)
        try:
            fn(**arguments)
        except BaseException as error:
            self.failed = error
        self.alive.discard(me)
        self.pass_on()


def _atomic_in_turns(*arguments: Any) -> Any:
    done = _atomic(*arguments)
    if _turns is not None:
        me = builder.grid_idx[0]
        _turns.pass_on()
        _turns.wait(me)
    return done


def _together(fn: Callable[..., Any], programs: int, seed: int) -> Callable[..., Any]:
    def run(**arguments: Any) -> None:
        global _turns
        if builder.grid_idx[0]:
            return  # the first has run them all
        _turns = Turns(programs, seed)
        threads = [threading.Thread(target=_turns.program, args=(i, fn, arguments)) for i in range(programs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        failed, _turns = _turns.failed, None
        if failed is not None:
            raise failed

    run.__signature__ = inspect.signature(fn)  # type: ignore[attr-defined]
    run.__annotations__ = fn.__annotations__  # which say what is a constant
    return run


def interleave(seed: int) -> None:
    """From now on interpreted kernels with several programs run so."""
    builder.create_atomic_rmw = _atomic_in_turns
    plain = interpreter.GridExecutor.__init__

    def init(self: Any, fn: Any, arg_names: Any, grid: Any, *more: Any) -> None:
        several = not callable(grid) and grid[0] > 1
        plain(self, _together(fn, grid[0], seed) if several else fn, arg_names, grid, *more)

    interpreter.GridExecutor.__init__ = init
