"""Persistent device buffers that one upload a step refills.

All of a step's small arrays are sections of one block of bytes: written on the host through NumPy views (pinned memory
under CUDA), sent in one non-blocking copy, read on the device through views whose addresses never change.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

_ALIGN = 16  # bytes; what vector loads of kernels want


class Block:
    """`sections`: name -> (NumPy dtype, elements), in order. The last one may be sent only in part, so the long and often
    short-filled one goes there. `copies` host blocks take turns, so that writing a step's arrays never waits for the
    upload of the step before."""

    def __init__(self, sections: dict[str, tuple[Any, int]], device: torch.device, copies: int) -> None:
        self._at: dict[str, tuple[int, np.dtype, int]] = {}
        size = 0
        for name, (dtype, count) in sections.items():
            self._at[name] = size, np.dtype(dtype), count
            size += -(-np.dtype(dtype).itemsize * count // _ALIGN) * _ALIGN
        self._last = next(reversed(sections))
        pinned = device.type == "cuda"
        self._blocks = [torch.zeros(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(copies)]
        self._views = [self._cut(block) for block in self._blocks]
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        self._turn = 0
        self.device = {
            name: self._device[at : at + dtype.itemsize * count].view(_TORCH[dtype.name])
            for name, (at, dtype, count) in self._at.items()
        }

    def _cut(self, block: torch.Tensor) -> dict[str, np.ndarray]:
        raw = block.numpy()
        return {name: raw[at : at + dt.itemsize * count].view(dt) for name, (at, dt, count) in self._at.items()}

    def upload(self, arrays: dict[str, np.ndarray]) -> None:
        """Fills the beginning of each named section and sends the block; sections not named keep an older turn's values."""
        self._turn = (self._turn + 1) % len(self._blocks)
        views = self._views[self._turn]
        for name, array in arrays.items():
            views[name][: array.size] = array.ravel()
        at, dtype, _ = self._at[self._last]
        end = at + arrays[self._last].size * dtype.itemsize
        self._device[:end].copy_(self._blocks[self._turn][:end], non_blocking=True)


_TORCH = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32}
