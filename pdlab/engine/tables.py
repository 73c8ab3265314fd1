"""What happened, as the two tables that notebooks, benches and readers share (their columns are a fixed format)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

import numpy as np

from pdlab.core.request import Request
from pdlab.core.trace import TRACE_COLUMNS, TraceRow

if TYPE_CHECKING:
    import pandas as pd

REQUEST_COLUMNS = (
    "request_id",
    "arrival_s",
    "prompt_tokens",
    "output_tokens",
    "finish_reason",
    "error",
    "queue_s",
    "ttft_s",
    "prefill_s",
    "decode_s",
    "e2e_s",
    "itl_mean_s",
    "itl_p99_s",
    "preemptions",
    "priority",
)
_TIMES = ("t_submit", "t_start", "t_end")


class RequestTable:
    """Rows are taken when a request ends, so a long run keeps numbers, not requests. Times count from `origin`."""

    def __init__(self, origin: float) -> None:
        self._origin = origin
        self._rows: list[tuple[Any, ...]] = []

    def add(self, r: Request) -> None:
        t = r.timing()
        gaps = np.array(t.itl_s)
        self._rows.append(
            (
                r.request_id,
                r.arrival_s - self._origin,
                r.prompt_len,
                len(r.output_token_ids),
                r.finish_reason.value if r.finish_reason else "",
                r.error,
                t.queue_s,
                t.ttft_s,
                t.prefill_s,
                t.decode_s,
                t.e2e_s,
                float(gaps.mean()) if len(gaps) else None,
                float(np.quantile(gaps, 0.99)) if len(gaps) else None,
                r.preemptions,
                r.priority,
            )
        )

    def refuse(self, arrival_s: float, prompt_tokens: int, priority: int, error: Exception) -> None:
        """A request that was refused at the door: a row without a number or times."""
        cause = f"{type(error).__name__}: {error}"
        self._rows.append((-1, arrival_s - self._origin, prompt_tokens, 0, "error", cause, *[None] * 7, 0, priority))

    def frame(self) -> pd.DataFrame:
        """In order of arrival."""
        import pandas as pd

        frame = pd.DataFrame(self._rows, columns=list(REQUEST_COLUMNS))
        for name in REQUEST_COLUMNS[6:13]:
            frame[name] = pd.to_numeric(frame[name])
        return frame.sort_values(["arrival_s", "request_id"], kind="stable", ignore_index=True)


def steps_frame(rows: Sequence[TraceRow], origin: float) -> pd.DataFrame:
    """Trace rows as a table, times counted from `origin`."""
    import pandas as pd

    frame = pd.DataFrame([astuple(row) for row in rows], columns=list(TRACE_COLUMNS))
    for name in _TIMES:
        frame[name] = frame[name].astype(float) - origin
    return frame
