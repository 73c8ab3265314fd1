"""Persistent device buffers that one upload a step refills.

All of a step's small arrays are sections of one block of bytes: written on the host through NumPy views (pinned memory
under CUDA), sent at once, read on the device through views whose addresses never change.

    upload    one non-blocking copy by the copy engine: any step
    take      one kernel that reads the host's block itself, and no more of it than the step uses: what a step in a CUDA graph
              wants, since the device loses microseconds at each change between kernels and its copy engine
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from typing import Any

import numpy as np
import torch

_ALIGN = 16  # bytes; what vector loads of kernels want


class Block:
    """`sections`: name -> (NumPy dtype, elements), in order. The last one may be sent only in part, so the long and often
    short-filled one goes there. The first ones of equal size lie side by side, those behind them lie as far apart as the
    largest of them wants: two distances say where each begins.

    `copies` host blocks take turns, so that writing a step's arrays never waits for the upload of the step before. The device
    knows whose turn it is by a section of the block itself, `turn` i64[1], the last but one. What belongs to a turn is used
    again only when the step that had it was read, see `keep_until`.
    """

    def __init__(self, sections: dict[str, tuple[Any, int]], device: torch.device, copies: int) -> None:
        *others, self._last = sections
        sections = {name: sections[name] for name in others} | {"turn": (np.int64, 1), self._last: sections[self._last]}
        sizes = [-(-np.dtype(dtype).itemsize * count // _ALIGN) * _ALIGN for dtype, count in sections.values()]
        longs = len(list(takewhile(lambda size: size == sizes[0], sizes[:-1])))
        shorts, long, short = len(sizes) - 1 - longs, sizes[0], max(sizes[longs:-1], default=0)
        self._layout = {"longs": longs, "long": long // 4, "shorts": shorts, "short": short // 4}  # distances in words
        starts = [min(i, longs) * long + max(i - longs, 0) * short for i in range(len(sizes))]
        self._at = {name: (at, np.dtype(dtype), n) for at, (name, (dtype, n)) in zip(starts, sections.items(), strict=True)}
        pinned = device.type == "cuda"
        self._blocks = [torch.zeros(starts[-1] + sizes[-1], dtype=torch.uint8, pin_memory=pinned) for _ in range(copies)]
        self._views = [self._cut(block) for block in self._blocks]
        for turn, views in enumerate(self._views):
            views["turn"][:] = turn
        self._device = torch.zeros(starts[-1] + sizes[-1], dtype=torch.uint8, device=device)
        self._words = [block.view(torch.int32) for block in (*self._blocks, self._device)]
        self._readers: list[Callable[[], object] | None] = [None] * copies
        self.turn = 0
        self.device = {
            name: self._device[at : at + dtype.itemsize * count].view(_TORCH[dtype.name])
            for name, (at, dtype, count) in self._at.items()
        }

    @property
    def turns(self) -> int:
        return len(self._blocks)

    def _cut(self, block: torch.Tensor) -> dict[str, np.ndarray]:
        raw = block.numpy()
        return {name: raw[at : at + dt.itemsize * count].view(dt) for name, (at, dt, count) in self._at.items()}

    def keep_until(self, read: Callable[[], object]) -> None:
        """What belongs to the turn stays as it is until `read` was called, which waits for the turn's step and takes what it
        left; its next turn calls it."""
        self._readers[self.turn] = read

    def settle(self) -> None:
        """Has every turn read that was not: its step's end is waited for, and what it left is taken."""
        for turn, read in enumerate(self._readers):
            if read is not None:
                read()
                self._readers[turn] = None

    def _fill(self, arrays: dict[str, np.ndarray]) -> None:
        """Begins the next turn: fills the beginning of each named section; others keep an older turn's values."""
        turn = (self.turn + 1) % len(self._blocks)
        if (read := self._readers[turn]) is not None:
            read()
            self._readers[turn] = None
        self.turn, views = turn, self._views[turn]
        for name, array in arrays.items():
            views[name][: array.size] = array.ravel()

    def upload(self, arrays: dict[str, np.ndarray], pages: torch.Tensor | None = None) -> None:
        """Fills the beginning of each named section and sends the block. With `pages` the last section is a table i32[batch,
        width] that is spread over pages[:batch, :width]: kernels find each row at the same place whatever the step's width."""
        self._fill(arrays)
        table = arrays[self._last]
        at, dtype, _ = self._at[self._last]
        end = at + table.size * dtype.itemsize
        self._device[:end].copy_(self._blocks[self.turn][:end], non_blocking=True)
        if pages is not None and table.size and pages.shape[1]:
            batch, width = table.shape
            pages[:batch, :width] = self.device[self._last][: table.size].view(batch, width)

    def take(self, arrays: dict[str, np.ndarray], pages: torch.Tensor, rows: int) -> None:
        """The same by one kernel, for a step of `rows` rows: of each section but the table go the first rows + 1 elements, or
        all there are. The table goes to `pages` alone. Raises what the kernel's launch raises."""
        from pdlab.kernels import step_ends

        self._fill(arrays)
        batch, width = arrays[self._last].shape
        step_ends.take(self._words[self.turn], self._words[-1], pages, rows=rows, table=(batch, width), **self._layout)


_TORCH = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32}
