"""One request's life: what it asked for, where it is, and when each phase happened.

WAITING -> RUNNING -> FINISHED          preemption: RUNNING -> WAITING, its KV is given back and recomputed
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from pdlab.core.config import SamplingParams


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    TIMEOUT = "timeout"
    ABORTED = "aborted"
    ERROR = "error"


@dataclass(frozen=True)
class TokenEvent:
    """One step of a stream. `token_id` is -1 and `text` holds what was still buffered when an event only ends a request."""

    request_id: int
    token_id: int
    text: str
    finish_reason: str | None = None
    error: str | None = None  # the cause where finish_reason is "error"


@dataclass(frozen=True)
class TokenLogprob:
    """Natural-log probabilities after all of the request's sampling filters are ignored (the model's own distribution)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first


@dataclass(frozen=True)
class Timing:
    """Seconds. Prefill ends when the first token is out; decode is the rest. None where a phase did not happen."""

    queue_s: float | None = None
    ttft_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    e2e_s: float | None = None
    itl_s: tuple[float, ...] = ()


@dataclass(eq=False)
class Request:
    """Mutable state of one admitted request; identity is `request_id`, never equality of contents.

    Token positions are 0-based over prompt + output. `num_computed` counts the tokens whose KV the retired steps wrote;
    `num_scheduled >= num_computed` also counts steps in flight. A preempted request sets both to 0 and computes prompt
    and output again. While it decodes only its row counts (scheduler.rows), for all of a step's requests at once: the KV
    of all its tokens but the last is there, `num_computed` stays where its prompt ended, and the fields for what is
    scheduled and sampled follow when it gives the row back.
    """

    request_id: int
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    arrival_s: float
    seed: int = 0
    priority: int = 0  # larger is more urgent
    ttft_deadline_s: float | None = None  # objective: seconds from arrival to the first token
    per_token_deadline_s: float | None = None  # objective: seconds between tokens
    kind: str = ""  # class of request; the estimator learns output lengths per class

    status: Status = Status.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_scheduled: int = 0
    num_sampled: int = 0  # tokens sampled or being sampled: len(output_token_ids) + those in flight
    row: int = -1  # persistent row in the executor's buffers while running
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    text: str = ""
    preemptions: int = 0
    cached_prompt_tokens: int = 0  # prompt tokens taken from the prefix cache at the last admission

    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    finish_s: float | None = None
    token_times: list[float] = field(default_factory=list)

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens known on the host: prompt + output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    def tokens(self, lo: int, hi: int) -> list[int]:
        """Token ids at positions [lo, hi); -1 at a position sampled by a step in flight."""
        n = self.prompt_len
        prompt = self.prompt_token_ids[lo : min(hi, n)] if lo < n else []
        out = list(prompt) if isinstance(prompt, list) else [int(t) for t in prompt]
        if hi > n:
            out += self.output_token_ids[max(lo, n) - n : hi - n]
        return out + [-1] * (hi - lo - len(out))

    def timing(self) -> Timing:
        """Phase times so far; see Timing."""
        first, last = self.first_token_s, self.last_token_s
        since = self.arrival_s
        return Timing(
            queue_s=None if self.first_scheduled_s is None else self.first_scheduled_s - since,
            ttft_s=None if first is None else first - since,
            prefill_s=None if first is None or self.first_scheduled_s is None else first - self.first_scheduled_s,
            decode_s=None if first is None or last is None else last - first,
            e2e_s=None if self.finish_s is None else self.finish_s - since,
            itl_s=tuple(b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)),
        )
