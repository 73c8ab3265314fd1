"""Imitated programs' turns, and their shared memory: barriers, copies on their way, products that have not ended.

Who waits passes the turn on. Where everybody waits and nothing is on its way any more, that is a Deadlock.

A copy arrives at a turn drawn at random, so copies overtake one another. Until it has, its place holds NaN and may neither be
read nor copied to (Hazard); nor may a place be written from a product's beginning to the wait that covers it. What a product
gives is no value before that wait.
"""

from __future__ import annotations

import random
import threading
import types
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from imitated_values import LAYOUT, OutOfBounds, T

of_thread = threading.local()


class Deadlock(Exception):
    """Everybody waits, and nobody can end it."""


class Hazard(Exception):
    """A place of shared memory is read and written, or written and written, at the same time."""


class Turns:
    """Threads of which one runs at a time; and what arrives in its own time, `coming`."""

    def __init__(self, seed: int) -> None:
        self.rng, self.alive = random.Random(seed), dict[int, threading.Semaphore]()
        self.threads: list[threading.Thread] = []
        self.coming: list[Callable[[], None]] = []
        self.in_vain: set[int] = set()  # who has looked since anything changed, and gone on waiting
        self.failed: BaseException | None = None

    def begin(self, program: int, run: Callable[[], Any]) -> int:
        me = len(self.threads)
        self.alive[me] = threading.Semaphore(0)
        thread = threading.Thread(target=self._thread, args=(me, program, run))
        self.threads.append(thread)
        thread.start()
        return me

    def _thread(self, me: int, program: int, run: Callable[[], Any]) -> None:
        of_thread.me, of_thread.program, of_thread.groups = me, program, Groups()
        self.alive[me].acquire()
        try:
            if self.failed is None:
                run()
        except BaseException as error:
            self.failed = self.failed or error
        del self.alive[me]
        self.changed()
        self.next()

    def changed(self) -> None:
        self.in_vain.clear()

    def next(self) -> None:
        if self.alive:
            self.alive[self.rng.choice(sorted(self.alive))].release()

    def pass_on(self) -> None:
        if self.coming and self.rng.random() < 1 / 2:
            self.coming.pop(self.rng.randrange(len(self.coming)))()
            self.changed()
        own = self.alive[of_thread.me]
        self.next()
        own.acquire()
        if self.failed is not None:
            raise RuntimeError("another program failed") from self.failed

    def look_again(self) -> None:
        """The turn of a thread that waits: in vain so far."""
        self.in_vain.add(of_thread.me)
        if not self.coming and self.in_vain >= self.alive.keys():
            raise Deadlock(f"all {len(self.alive)} threads wait for one another")
        self.pass_on()

    def until(self, there: Callable[[], Any]) -> None:
        while not there():
            self.look_again()

    def run(self) -> None:
        self.next()
        for thread in self.threads:  # it grows while this goes on
            thread.join()
        if self.failed is not None:
            raise self.failed


class Places:
    """What reads and writes of a launch's shared memory have begun and not ended, by address."""

    def __init__(self) -> None:
        self.reading, self.writing = Counter[int](), set[int]()


class Shared:
    def __init__(self, v: torch.Tensor, places: Places) -> None:
        self.v, self.dtype, self.places = v, v.dtype, places

    at = property(lambda self: self.v.data_ptr())

    def index(self, i: Any) -> Shared:
        if not 0 <= int(i) < len(self.v):
            raise OutOfBounds(f"[{int(i)}] of {len(self.v)} in shared memory")
        return Shared(self.v[int(i)], self.places)

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.v.permute(order), self.places)

    def slice(self, start: int, length: int, dim: int) -> Shared:
        return Shared(self.v.narrow(dim, start, length), self.places)

    def may_be_written(self) -> None:
        if self.places.reading[self.at]:
            raise Hazard("a place is written whose products have not ended")
        if self.at in self.places.writing:
            raise Hazard("a place is written that a copy is on its way to")

    def store(self, value: T) -> None:
        assert value.v.dtype == self.dtype
        assert value.v.shape == self.v.shape
        self.may_be_written()
        self.v.copy_(value.v)

    def load(self, layout: Any = None) -> T:
        return T(self.v.clone())


class Barrier:
    def __init__(self, turns: Turns) -> None:
        self.count = self.left = self.bytes = self.phases = 0
        self.turns = turns

    def expect(self, size: int, pred: Any = True) -> None:
        if pred:
            self.step(1, size)

    def arrive(self, count: int, pred: Any = True) -> None:
        if pred:
            self.step(count, 0)
            if self.turns.rng.random() < 1 / 4:
                self.turns.pass_on()

    def step(self, arrivals: int, more_bytes: int) -> None:
        self.left, self.bytes = self.left - arrivals, self.bytes + more_bytes
        assert self.left >= 0
        if self.left == self.bytes == 0:
            self.phases, self.left = self.phases + 1, self.count
            self.turns.changed()

    def wait(self, parity: Any) -> None:
        """Passes where the phase of this parity is over: the one before the one that goes on, or any an even number before."""
        self.turns.until(lambda: self.phases & 1 != int(parity))

    def init(self, count: int) -> None:
        self.count = self.left = count


class Barriers(list):
    def index(self, i: Any) -> Barrier:  # type: ignore[override]
        if not 0 <= int(i) < len(self):
            raise OutOfBounds(f"[{int(i)}] of {len(self)} barriers")
        return self[int(i)]


class Descriptor:
    """A two-dimensional tensor, copied in blocks; zeros behind the last column."""

    layout = LAYOUT

    def __init__(self, made: Any) -> None:
        self.v, self.block, self.dtype = made.base, made.block_shape, made.base.dtype
        self.block_type = types.SimpleNamespace(nbytes=self.block[0] * self.block[1] * self.dtype.itemsize)

    def copy(self, at: list[Any], barrier: Barrier, to: Shared, pred: Any = True) -> None:
        if not pred:
            return
        row, column = (int(i) for i in at)
        if not (0 <= row <= self.v.shape[0] - self.block[0] and 0 <= column < self.v.shape[1]):
            raise OutOfBounds(f"a block at {row}, {column} of {tuple(self.v.shape)}")
        to.may_be_written()
        to.places.writing.add(to.at)
        to.v.fill_(float("nan"))

        def arrived() -> None:
            block = self.v[row : row + self.block[0], column : column + self.block[1]]
            to.v.zero_()
            to.v[:, : block.shape[1]] = block
            to.places.writing.remove(to.at)
            barrier.step(0, -self.block_type.nbytes)

        barrier.turns.coming.append(arrived)


class Product:
    """A sum of products that may not have ended; no operation takes it but another product and the wait."""

    def __init__(self, v: torch.Tensor, number: int) -> None:
        self.v, self.number = v, number  # of the last one of this thread that belongs to it


class Groups:
    """A thread's products that nobody has waited for, in order."""

    def __init__(self) -> None:
        self.begun, self.going_on = 0, list[tuple[Shared, Shared]]()

    @staticmethod
    def mma(a: Shared, b: Shared, acc: T | Product, is_async: bool = True) -> Product:
        groups: Groups = of_thread.groups
        for place in (a, b):
            if place.at in place.places.writing:
                raise Hazard("a product of a place that a copy is on its way to")
            place.places.reading[place.at] += 1
        groups.begun += 1
        groups.going_on.append((a, b))
        return Product(acc.v + a.v.float() @ b.v.float(), groups.begun)

    @staticmethod
    def wait(most: int, deps: Any) -> list[T | Product]:
        """No more than `most` go on behind it; of `deps` those that have ended are values."""
        groups: Groups = of_thread.groups
        keep = min(most, len(groups.going_on))
        for place in (place for pair in groups.going_on[: len(groups.going_on) - keep] for place in pair):
            place.places.reading[place.at] -= 1
        groups.going_on = groups.going_on[len(groups.going_on) - keep :]
        ended = groups.begun - keep
        return [T(d.v) if isinstance(d, Product) and d.number <= ended else d for d in deps]
