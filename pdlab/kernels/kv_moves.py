"""An ordered list of KV copies, cut into sets that may run in any order, and run.

    a set     no copy reads or writes what another one of it writes: one launch of kv_copy, or one gather and scatter

Works without triton; the kernel is imported when there is a GPU to run it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from pdlab.core.plan import KVCopy


def kv_copy_reference(k: torch.Tensor, v: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    """The same in plain PyTorch, on any device; gathers everything before it writes."""
    size = k.shape[3]
    for cache in (k, v):
        cache[:, dst // size, :, dst % size] = cache[:, src // size, :, src % size]


class _Ranges:
    """A set of integers kept as disjoint, sorted, half-open ranges."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []

    def meets(self, lo: int, hi: int) -> bool:
        i = bisect_right(self.ends, lo)
        return i < len(self.starts) and self.starts[i] < hi

    def add(self, lo: int, hi: int) -> None:
        a, b = bisect_left(self.ends, lo), bisect_right(self.starts, hi)
        if a < b:
            lo, hi = min(lo, self.starts[a]), max(hi, self.ends[b - 1])
        self.starts[a:b], self.ends[a:b] = [lo], [hi]


def waves(copies: Iterable[KVCopy]) -> list[list[KVCopy]]:
    """The copies in order, cut wherever one reads or writes what an earlier one of its set writes, or writes what it reads."""
    out: list[list[KVCopy]] = []
    read, written = _Ranges(), _Ranges()
    for op in copies:
        src, dst = (op.src, op.src + op.tokens), (op.dst, op.dst + op.tokens)
        if not out or written.meets(*src) or written.meets(*dst) or read.meets(*dst):
            out.append([])
            read, written = _Ranges(), _Ranges()
        out[-1].append(op)
        read.add(*src)
        written.add(*dst)
    return out


def slot_lists(wave: Sequence[KVCopy], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(source slots, destination slots) of one set of copies, i64 on the device."""
    lens = np.array([op.tokens for op in wave])
    within = np.arange(lens.sum()) - np.repeat(np.cumsum(lens) - lens, lens)
    both = np.stack([np.repeat([op.src for op in wave], lens), np.repeat([op.dst for op in wave], lens)]) + within
    src, dst = torch.from_numpy(both).to(device, non_blocking=True)
    return src, dst


def run_copies(k: torch.Tensor, v: torch.Tensor, copies: Sequence[KVCopy]) -> None:
    """Does what the copies say, in their order, on the current stream: by the kernel on a GPU, else in plain PyTorch."""
    if not copies:
        return
    copy = kv_copy_reference
    if k.is_cuda:
        from pdlab.kernels.kv_copy import kv_copy as copy
    for wave in waves(copies):
        copy(k, v, *slot_lists(wave, k.device))
