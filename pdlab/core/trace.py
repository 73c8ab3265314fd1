"""One row a step, written by the engine; the columns are a format that tables, notebooks and estimators rely on."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class TraceRow:
    """Seconds and tokens. `t_submit <= t_start <= t_end` on the engine's clock."""

    step: int
    clock: str  # real | virtual
    t_submit: float
    t_start: float
    t_end: float
    prefill_tokens: int
    prefill_context: int  # tokens already cached before the step's prefill chunks, summed
    decode_count: int
    kv_tokens: int  # tokens that the step's decodes attend to, summed
    pad_tokens: int
    waiting: int
    running: int
    preempted: int
    pages_used: int
    waste_internal: float  # reserved, holding no token, as a share of what is reserved: 0...1
    waste_external: float  # free, but in no piece large enough for the next request, as a share of what is free: 0...1
    host_s: float  # host work of the step: planning and committing
    predicted_s: float


TRACE_COLUMNS = tuple(f.name for f in fields(TraceRow))
