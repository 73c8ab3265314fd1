"""What planning must know of each running request, as arrays indexed by row, so that a decode step costs a few array
operations whatever its batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pdlab.core.plan import SamplingArrays
from pdlab.core.request import Request, Status

if TYPE_CHECKING:
    from pdlab.allocators.interface import Allocator

_SAMPLING = {
    "temperature": np.float32,
    "top_k": np.int32,
    "top_p": np.float32,
    "min_p": np.float32,
    "repetition_penalty": np.float32,
}
_MOST = {np.float32: float(np.finfo(np.float32).max), np.int32: int(np.iinfo(np.int32).max)}  # more means the same


class Rows:
    """Persistent rows, one a running request; the executor keeps device state (last token, seen tokens) under the same
    numbers. What the allocator said of a request is mirrored here. `scheduled` and `sampled` are the truth while it has a
    row: a step counts them up for all its decodes at once, and `release` sets the request's own fields right."""

    def __init__(self, count: int, pages: int) -> None:
        self.clear(count)
        self.id = np.zeros(count, np.int64)
        self.scheduled = np.zeros(count, np.int64)  # tokens whose KV is written, or will be by the steps in flight
        self.sampled = np.zeros(count, np.int64)  # output tokens, those in flight included
        self.limit = np.zeros(count, np.int64)  # output tokens the request may have
        self.room = np.zeros(count, np.int64)  # positions that reserve() is known to have granted
        self.most_pages = pages
        self.table = np.zeros((count, min(pages, 64)), np.int32)  # widened when a request is longer: gathering rows is quick
        self.pages = np.zeros(count, np.int64)  # entries of `table` in use
        self.base = np.zeros(count, np.int64)
        self.seed = np.zeros(count, np.int64)
        self.logprobs = np.zeros(count, np.int32)
        self.columns = {name: np.zeros(count, dtype) for name, dtype in _SAMPLING.items()}
        self._sampling: tuple[np.ndarray, dict[str, np.ndarray]] | None = None  # of the rows asked for last

    def clear(self, count: int) -> None:
        """No row is in use."""
        self.request: list[Request | None] = [None] * count
        self._unused = list(range(count - 1, -1, -1))

    def __bool__(self) -> bool:
        """Whether a row is unused."""
        return bool(self._unused)

    def take(self, request: Request, limit: int) -> None:
        row = request.row = self._unused.pop()
        request.status = Status.RUNNING
        self.request[row] = request
        self.id[row] = request.request_id
        self.scheduled[row] = request.num_scheduled
        self.sampled[row] = request.num_sampled
        self.limit[row] = limit
        params = request.params
        for name, dtype in _SAMPLING.items():
            self.columns[name][row] = min(getattr(params, name), _MOST[dtype])
        self.seed[row] = request.seed
        self.logprobs[row] = -1 if params.logprobs is None else params.logprobs
        self._sampling = None

    def release(self, request: Request) -> None:
        request.num_scheduled, request.num_sampled = int(self.scheduled[request.row]), int(self.sampled[request.row])
        self.request[request.row] = None
        self._unused.append(request.row)
        request.row = -1

    def locate(self, request: Request, allocator: Allocator) -> None:
        """Takes down where the request's memory is, after it grew or moved."""
        rid, row = request.request_id, request.row
        pages = allocator.page_table(rid)
        self._widen(len(pages))
        self.table[row, : len(pages)] = pages
        self.pages[row] = len(pages)
        self.base[row] = allocator.base(rid)
        self.room[row] = allocator.room(rid)

    def locate_all(self, rows: np.ndarray, ids: list[int], lens: np.ndarray, allocator: Allocator) -> None:
        """`locate` for several at once, which were just granted room for `lens` tokens."""
        if allocator.kind != "paged":
            self.base[rows] = allocator.bases(ids)
            self.room[rows] = [allocator.room(rid) for rid in ids]
            return
        tables = allocator.page_tables(ids)
        self._widen(tables.shape[1])
        self.table[rows, : tables.shape[1]] = tables
        self.pages[rows] = pages = -(-lens // allocator.page_size)  # whole pages are granted
        self.room[rows] = pages * allocator.page_size

    def _widen(self, pages: int) -> None:
        have = self.table.shape[1]
        if pages > have:
            wider = np.zeros((len(self.table), min(self.most_pages, max(pages, 2 * have))), np.int32)
            wider[:, :have] = self.table
            self.table = wider

    def addresses(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(page_table i32[B, P], base i64[B]); entries past a request's own pages are 0, or stale and never read."""
        return self.table[:, : int(self.pages[rows].max(initial=0))].take(rows, axis=0), self.base[rows]

    def sampling(self, rows: np.ndarray) -> SamplingArrays:
        """Parameters for `rows`, each about to sample its output token number `sampled`. Remembered while the very same
        array of rows comes back: a long run of decode steps gathers only the positions."""
        if self._sampling is None or self._sampling[0] is not rows:
            gathered = {name: column[rows] for name, column in self.columns.items()}
            gathered |= {"seed": self.seed[rows], "logprobs": self.logprobs[rows]}
            self._sampling = rows, gathered
        return SamplingArrays(position=self.sampled[rows], **self._sampling[1])
