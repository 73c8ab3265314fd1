"""What a user may set: one frozen EngineConfig per engine, one frozen SamplingParams per request.

Each optimization is one field of EngineConfig, so that a notebook is an ablation of one field. Values are validated
here, at construction, so that a typo is an error on the line that made it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any

from pdlab.core.errors import ConfigError, InvalidRequest, PdlabError

DTYPES = ("auto", "float32", "float16", "bfloat16")
ALLOCATORS = ("paged", "contiguous_pool", "per_request", "hybrid")
FITS = ("first", "best")
ATTENTION = ("auto", "plain", "sdpa", "sdpa:flash", "sdpa:cudnn", "sdpa:efficient", "triton", "flash_attn")
OPS = ("auto", "reference", "fused")
BATCHING = ("continuous_chunked", "continuous", "static", "one_at_a_time", "article", "article_mended")
POLICIES = (
    "fcfs", "sjf", "sjf_aging", "least_remaining", "priority", "deadline", "oracle", "article", "article_no_ties",
)  # fmt: skip
ESTIMATORS = ("roofline", "learned")
EXECUTORS = ("torch", "simulated")


def _check(ok: bool, name: str, value: object, right: str) -> None:
    if not ok:
        raise ConfigError(f"{name}={value!r} is not possible", right)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _refuse_unknown(cls: Any, given: Iterable[str], error: type[PdlabError]) -> None:
    """A misspelt field as an error of ours, which names the field that was meant."""
    known = [f.name for f in fields(cls)]
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"fields: {', '.join(known)}"
            raise error(f"{cls.__name__} has no field {name!r}", hint)


def _unwrap(settings: Any) -> None:
    """NumPy's numbers, which loops over arrays give, become plain ones."""
    for name, value in vars(settings).items():
        if getattr(value, "ndim", None) == 0:
            object.__setattr__(settings, name, value.item())


@dataclass(frozen=True)
class EngineConfig:
    """How one engine runs. Frozen; `with_(field=value)` gives a changed copy.

    Units are in the field's name or comment. `None` means "chosen from the model and the machine".
    """

    device: str = "auto"  # auto | cpu | cuda | cuda:N
    dtype: str = "auto"  # auto follows the dtype rule of hardware.probe
    executor: str = "torch"  # torch | simulated (virtual clock, cost model)
    simulated_device: str = "nvidia-h200"  # slug of hardware.specs that the simulated executor imitates

    # KV-cache memory
    kv_allocator: str = "paged"
    page_size: int = 16  # tokens a page, 1...256; extents come in multiples of it
    kv_capacity_tokens: int | None = None  # explicit; otherwise from free memory and utilization
    kv_memory_utilization: float = 0.9  # share of the free device memory given to KV, (0, 1]
    prefix_reuse: bool = False  # full pages of equal prompts are shared (paged, hybrid)
    pool_fit: str = "first"  # which free extent a request is given: the first or the best that fits
    pool_headroom: float = 0.25  # contiguous_pool: room to grow that an extent starts with, as a share of its length
    promised_output_tokens: int | None = None  # output that per_request and hybrid make room for; None: max_tokens
    hybrid_threshold: int | None = None  # tokens: requests that cannot exceed it go to the pool; None learns it
    hybrid_waste: float = 0.02  # share of memory that the learned threshold lets the pool waste, [0, 1)
    compact_every: int | None = None  # compact after so many ended requests
    compact_threshold: float | None = None  # compact when this share of what is free cannot be used in one piece, (0, 1]
    compact_on_refusal: bool = False  # compact after an allocation that failed
    compact_budget: int = 32768  # slots moved between two steps, at most

    # attention and model operations
    attention: str = "auto"
    ops: str = "auto"  # model operations: plain PyTorch (reference), or fused kernels; auto: fused from capability 8.0 on
    cuda_graphs: bool = True  # decode steps replay captured graphs; only where there is a CUDA device
    prefill_graphs: bool = True  # steps with prompts too, padded; needs cuda_graphs and this project's attention
    # techniques of the fused operations, each where the device has it
    dependent_launch: bool = True  # a kernel begins under the tail of the one before: programmatic dependent launch
    weight_ring: bool = True  # single rows: weights wait in a ring in shared memory for their turn
    weight_hints: bool = True  # weights that the copy engine brings are the first to leave the L2 cache
    weight_prefetch: bool = False  # rings ask for the next product's weights, into the L2 cache
    measured_tiles: bool = True  # tiles from the device's tuning table, else by rules
    persistent_decode: bool | None = None  # single rows: all layers as one kernel; None: where the tuning table says so

    # batching and scheduling
    batching: str = "continuous_chunked"
    policy: str = "fcfs"
    max_batch_requests: int = 256  # requests running at once
    max_batch_tokens: int = 2048  # token budget of one step, decodes first
    static_batch_tokens: int = 8192  # padded prompt tokens of one static batch
    max_model_len: int | None = None  # tokens of prompt + output; at most the model's context
    steps_in_flight: int = 1  # 1 or 2: two overlap the host with the device
    estimator: str = "roofline"  # learned: goes on from what was saved for this device, and saves when the engine is closed
    aging_factor: float = 10.0  # sjf_aging, oracle: headstart for others, in multiples of a request's own seconds alone
    patience_s: float = 30.0  # sjf_aging, oracle, deadline: the longest headstart others may get
    priority_ratio: float = 4.0  # priority: a class's weight over that of the class below
    article_budget_s: float = 2.0  # article: estimated seconds that a batch may add up to
    ttft_objective_s: float = 1.0  # deadline: for requests that state none of their own
    per_token_objective_s: float = 0.1

    seed: int = 0  # requests without a seed of their own derive one from this and their number

    def __new__(cls, *args: Any, **given: Any) -> EngineConfig:
        _refuse_unknown(cls, given, ConfigError)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        _unwrap(self)
        for name, choices in (
            ("dtype", DTYPES),
            ("executor", EXECUTORS),
            ("kv_allocator", ALLOCATORS),
            ("pool_fit", FITS),
            ("attention", ATTENTION),
            ("ops", OPS),
            ("batching", BATCHING),
            ("policy", POLICIES),
            ("estimator", ESTIMATORS),
        ):
            value = getattr(self, name)
            _check(value in choices, name, value, f"choose one of: {', '.join(choices)}")
        device = isinstance(self.device, str) and re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device) is not None
        _check(device, "device", self.device, "use auto, cpu, cuda or cuda:N")
        _check(isinstance(self.simulated_device, str), "simulated_device", self.simulated_device, "use a device's slug")
        _check(_is_int(self.page_size) and 1 <= self.page_size <= 256, "page_size", self.page_size, "use 1 to 256 tokens")
        for name in ("kv_capacity_tokens", "max_model_len", "promised_output_tokens", "hybrid_threshold", "compact_every"):
            value = getattr(self, name)
            _check(
                value is None or (_is_int(value) and value >= 1),
                name,
                value,
                "use a whole number, 1 or more, or None",
            )
        share = self.kv_memory_utilization
        _check(_finite(share) and 0 < share <= 1, "kv_memory_utilization", share, "use a share in (0, 1]")
        for name in ("pool_headroom", "hybrid_waste"):
            value = getattr(self, name)
            _check(_finite(value) and 0 <= value < 1, name, value, "use a share in [0, 1)")
        threshold = self.compact_threshold
        right = threshold is None or (_finite(threshold) and 0 < threshold <= 1)
        _check(right, "compact_threshold", threshold, "use a share in (0, 1], or None")
        for name in ("max_batch_requests", "max_batch_tokens", "static_batch_tokens", "compact_budget"):
            value = getattr(self, name)
            _check(_is_int(value) and value >= 1, name, value, "use a whole number, 1 or more")
        for name in (
            "aging_factor", "patience_s", "priority_ratio", "article_budget_s", "ttft_objective_s", "per_token_objective_s",
        ):  # fmt: skip
            value = getattr(self, name)
            _check(_finite(value) and value > 0, name, value, "use a finite number above 0")
        for name in (
            "prefix_reuse", "compact_on_refusal", "cuda_graphs", "prefill_graphs", "dependent_launch", "weight_ring",
            "weight_hints", "weight_prefetch", "measured_tiles",
        ):  # fmt: skip
            _check(isinstance(getattr(self, name), bool), name, getattr(self, name), "use True or False")
        wanted = self.persistent_decode
        _check(wanted is None or isinstance(wanted, bool), "persistent_decode", wanted, "use True, False or None")
        steps = self.steps_in_flight
        _check(_is_int(steps) and steps in (1, 2), "steps_in_flight", steps, "use 1 or 2")
        _check(_is_int(self.seed), "seed", self.seed, "use a whole number")

    def with_(self, **changes: Any) -> EngineConfig:
        """A copy with some fields changed."""
        return replace(self, **changes)


def _tuple(value: Any) -> tuple[Any, ...]:
    """None, one value or several, as several."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str | bytes) else (value,)


@dataclass(frozen=True)
class SamplingParams:
    """How one request samples and stops. Temperature 0 is greedy.

    A seed makes a request reproducible whatever else is in its batch: the noise of output token i depends on
    (seed, i) and the token's id only.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off; otherwise the least share of the most likely token's probability
    repetition_penalty: float = 1.0  # 1: off; > 1 makes tokens of prompt and output less likely
    stop: tuple[str, ...] = ()  # the text ends before the first of these
    stop_token_ids: tuple[int, ...] = ()  # besides the model's own end-of-sequence tokens
    ignore_eos: bool = False  # the model's own end tokens do not stop it (for benches)
    seed: int | None = None  # counts modulo 2**63
    logprobs: int | None = None  # None: off; n: log-probability of the chosen token and the n most likely
    timeout_s: float | None = None  # from arrival; then finish_reason "timeout"

    def __new__(cls, *args: Any, **given: Any) -> SamplingParams:
        _refuse_unknown(cls, given, InvalidRequest)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _tuple(self.stop))
        ids = _tuple(self.stop_token_ids)
        object.__setattr__(self, "stop_token_ids", tuple(t.item() if hasattr(t, "item") else t for t in ids))
        _unwrap(self)
        penalty = self.repetition_penalty
        rules = (
            ("max_tokens", _is_int(self.max_tokens) and self.max_tokens >= 1, "use a whole number, 1 or more"),
            ("temperature", _finite(self.temperature) and self.temperature >= 0, "use 0 (greedy) or more"),
            ("top_k", _is_int(self.top_k) and self.top_k >= 0, "use 0 (off) or a whole number of tokens"),
            ("top_p", _finite(self.top_p) and 0 < self.top_p <= 1, "use a share in (0, 1]"),
            ("min_p", _finite(self.min_p) and 0 <= self.min_p <= 1, "use a share in [0, 1]"),
            # beyond, a product with a logit leaves float32
            ("repetition_penalty", _finite(penalty) and 1e-12 <= penalty <= 1e12, "use 1e-12 to 1e12; 1 is off"),
            ("stop", all(isinstance(s, str) and s for s in self.stop), "use strings that are not empty"),
            ("stop_token_ids", all(_is_int(t) and t >= 0 for t in self.stop_token_ids), "use token ids, 0 or more"),
            ("ignore_eos", isinstance(self.ignore_eos, bool), "use True or False"),
            ("seed", self.seed is None or _is_int(self.seed), "use a whole number or None"),
            ("logprobs", self.logprobs is None or (_is_int(self.logprobs) and 0 <= self.logprobs <= 20), "use None or 0 to 20"),
            (
                "timeout_s",
                self.timeout_s is None or (_finite(self.timeout_s) and self.timeout_s > 0),
                "use seconds, more than 0, or None",
            ),
        )
        for name, ok, right in rules:
            if not ok:
                raise InvalidRequest(f"SamplingParams.{name}={getattr(self, name)!r} is out of range", right)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0
