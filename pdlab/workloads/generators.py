"""Workloads made from a seed: when requests arrive, how long they are, and mixes of both.

An arrival process is a function (rng, n) -> f64[n] of rising times; a length is a function (rng, n) -> i64[n] of tokens,
1 or more. `make` joins them. The same seed gives the same items, arrival by arrival.

The Azure 2023 traces are imitated from their published moments alone (mean, median, 90th and 99th percentile of prompt
and output length; rate and coefficient of variation of the gaps): `azure_conversation`, `azure_code`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from pdlab.core.errors import WorkloadError
from pdlab.workloads.workload import Item, Workload

Arrivals = Callable[[np.random.Generator, int], np.ndarray]
Lengths = Callable[[np.random.Generator, int], np.ndarray]


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise WorkloadError(f"{name}={value}", "use a finite number above 0")


# ---- arrivals -------------------------------------------------------------------------------------------------------


def poisson(rate: float) -> Arrivals:
    """Independent arrivals, `rate` a second; the gaps' coefficient of variation is 1."""
    _positive(rate=rate)
    return lambda rng, n: np.cumsum(rng.exponential(1 / rate, n))


def gamma(rate: float, cv: float) -> Arrivals:
    """Gamma gaps of mean 1/rate and coefficient of variation `cv`: above 1 bursty, below 1 steadier than Poisson."""
    _positive(rate=rate, cv=cv)
    return lambda rng, n: np.cumsum(rng.gamma(1 / cv**2, cv**2 / rate, n))


def steady(rate: float) -> Arrivals:
    """One arrival every 1/rate seconds."""
    _positive(rate=rate)
    return lambda rng, n: np.arange(n) / rate


def all_at_once() -> Arrivals:
    return lambda rng, n: np.zeros(n)


def on_off(rate: float, on_s: float, off_s: float) -> Arrivals:
    """Poisson arrivals, `rate` a second, during exponential on-times of mean `on_s`, nothing during off-times of `off_s`."""
    _positive(rate=rate, on_s=on_s, off_s=off_s)

    def draw(rng: np.random.Generator, n: int) -> np.ndarray:
        busy = np.cumsum(rng.exponential(1 / rate, n))  # time that counts only while on
        switches = np.cumsum(rng.exponential(on_s, max(8, int(2 * busy[-1] / on_s) + 8) if n else 0))
        while n and switches[-1] < busy[-1]:
            switches = np.append(switches, switches[-1] + np.cumsum(rng.exponential(on_s, len(switches))))
        pauses = np.concatenate(([0.0], np.cumsum(rng.exponential(off_s, len(switches)))))
        return busy + pauses[np.searchsorted(switches, busy)]

    return draw


def hyperexponential(rate: float, cv: float, short_gap_s: float) -> Arrivals:
    """Mostly gaps of mean `short_gap_s`, rarely a long pause, so that the mean gap is 1/rate and its variation `cv` > 1.

    With p the share of pauses and m their mean: p m + (1 - p) s = 1/rate and 2 (p m² + (1 - p) s²) = (cv² + 1)/rate².
    """
    _positive(rate=rate, cv=cv, short_gap_s=short_gap_s)
    mean, s = 1 / rate, short_gap_s
    if not (cv > 1 and s < mean):
        raise WorkloadError(f"cv={cv}, short_gap_s={s}", f"use cv above 1 and short gaps under the mean gap, {mean:.4g} s")
    second = (cv**2 + 1) * mean**2 / 2  # p m² + (1 - p) s²; with p = (mean - s) / (m - s) it is linear in m
    m = (second - s * mean) / (mean - s)
    p = (mean - s) / (m - s)
    return lambda rng, n: np.cumsum(rng.exponential(np.where(rng.random(n) < p, m, s)))


# ---- lengths --------------------------------------------------------------------------------------------------------


def fixed(tokens: int) -> Lengths:
    _positive(tokens=tokens)
    return lambda rng, n: np.full(n, tokens, np.int64)


def uniform(lo: int, hi: int) -> Lengths:
    """Every whole number in [lo, hi] equally likely."""
    if not 1 <= lo <= hi:
        raise WorkloadError(f"lengths {lo} to {hi}", "use 1 <= lo <= hi")
    return lambda rng, n: rng.integers(lo, hi + 1, n)


def lognormal(median: float, sigma: float, most: int) -> Lengths:
    """exp(N(log median, sigma²)), rounded, within [1, most]. sigma 0 is no spread at all."""
    _positive(median=median, most=most)
    return lambda rng, n: np.clip(np.rint(median * np.exp(sigma * rng.standard_normal(n))), 1, most).astype(np.int64)


def quantiles(mean: float, p50: float, p90: float, p99: float, most: float, least: float = 1) -> Lengths:
    """Lengths whose mean, median, 90th and 99th percentile are the given ones (before rounding, exactly).

    The quantile function passes through (0, least), (.5, p50), (.9, p90), (.99, p99), (1, most); between knots i and i+1
    it is q_i + (q_{i+1} - q_i) t^g. The one exponent g gives the mean: sum w_i (q_i + (q_{i+1} - q_i) / (g + 1)) = mean.
    """
    u = np.array([0.0, 0.5, 0.9, 0.99, 1.0])
    q = np.array([least, p50, p90, p99, most], float)
    if not (least >= 1 and np.all(np.diff(q) >= 0)):
        raise WorkloadError(f"quantiles {q.tolist()}", "use rising ones, 1 or more")
    floor, spread = float(np.diff(u) @ q[:-1]), float(np.diff(u) @ np.diff(q))
    if not floor < mean < floor + spread:
        raise WorkloadError(
            f"mean={mean} with quantiles {q.tolist()}", f"use a mean between {floor:.4g} and {floor + spread:.4g}"
        )
    g = spread / (mean - floor) - 1

    def draw(rng: np.random.Generator, n: int) -> np.ndarray:
        x = rng.random(n)
        i = np.searchsorted(u, x, side="right") - 1
        t = (x - u[i]) / (u[i + 1] - u[i])
        return np.maximum(1, np.rint(q[i] + (q[i + 1] - q[i]) * t**g)).astype(np.int64)

    return draw


# ---- workloads ------------------------------------------------------------------------------------------------------


def stream(
    n: int,
    arrivals: Arrivals,
    prompts: Lengths,
    outputs: Lengths,
    *,
    seed: int = 0,
    longest: int | None = None,
    kind: str = "",
    block: int = 4096,
) -> Iterator[Item]:
    """n items, `block` drawn at a time: a million need no memory. `longest` bounds prompt + output; the prompt gives way."""
    rng = np.random.default_rng(seed)
    start = 0.0
    for first in range(0, n, block):
        size = min(block, n - first)
        times, p, o = start + arrivals(rng, size), prompts(rng, size), outputs(rng, size)
        start = float(times[-1])
        if longest is not None:
            o = np.minimum(o, longest - 1)
            p = np.minimum(p, longest - o)
        for t, a, b in zip(times.tolist(), p.tolist(), o.tolist(), strict=True):
            yield Item(t, prompt_tokens=a, max_tokens=b, kind=kind)


def make(
    name: str,
    n: int,
    arrivals: Arrivals,
    prompts: Lengths,
    outputs: Lengths,
    *,
    seed: int = 0,
    longest: int | None = None,
    kind: str = "",
) -> Workload:
    """n items as one workload; see `stream`."""
    if n < 1:
        raise WorkloadError(f"n={n} requests", "use 1 or more")
    return Workload(name, stream(n, arrivals, prompts, outputs, seed=seed, longest=longest, kind=kind, block=n), seed)


# (prompt, output); the extremes were not published: generous ones, which move no published moment
CONVERSATION = (quantiles(1155, 1020, 2734, 4142, most=8000, least=2), quantiles(211, 129, 424, 601, most=1000))
# ShareGPT as Kwon et al. (PagedAttention, 2023, section 6.1) give it: means of 161 and 338 tokens; the spread is a guess
SHORT_CHAT = (lognormal(110, 0.875, 2048), lognormal(230, 0.877, 1500))
CODE = (quantiles(2048, 1469, 5188, 7436, most=7500, least=3), quantiles(27.9, 13, 55, 251, most=2000))


def azure_conversation(n: int, *, rate: float = 5.53, seed: int = 0, longest: int | None = None) -> Workload:
    """Like the Azure 2023 conversation trace: 5.53 requests a second, gaps of variation 1.09."""
    return make("azure_conversation", n, gamma(rate, 1.09), *CONVERSATION, seed=seed, longest=longest, kind="conversation")


def azure_code(n: int, *, rate: float = 2.57, seed: int = 0, longest: int | None = None) -> Workload:
    """Like the Azure 2023 code trace: 2.57 requests a second in bursts with long pauses, gaps of variation 13.2."""
    return make("azure_code", n, hyperexponential(rate, 13.2, 0.5 / rate), *CODE, seed=seed, longest=longest, kind="code")


def chat_with_long(
    n: int,
    *,
    rate: float,
    long_share: float = 0.005,
    long_tokens: int = 32_768,
    long_output: int = 64,
    seed: int = 0,
    chats: tuple[Lengths, Lengths] = CONVERSATION,
) -> Workload:
    """Chat-sized requests among which exactly a share brings a very long prompt: what makes first-come stall everybody."""
    if not 0 <= long_share <= 1:
        raise WorkloadError(f"long_share={long_share}", "use a share in [0, 1]")
    chat = make("chat_with_long", n, poisson(rate), *chats, seed=seed, kind="chat")
    long = np.random.default_rng([seed, 1]).permutation(n) < round(long_share * n)
    items = (
        replace(i, prompt_tokens=long_tokens, max_tokens=long_output, kind="long") if is_long else i
        for i, is_long in zip(chat, long)
    )
    return Workload("chat_with_long", items, seed)


def shared_prefixes(
    n: int, *, rate: float, groups: int = 8, prefix_tokens: int = 512, prompts: Lengths, outputs: Lengths, seed: int = 0
) -> Workload:
    """Each request begins with one of `groups` common prefixes (system prompts), drawn with weights 1, 1/2, 1/3, …"""
    _positive(groups=groups, prefix_tokens=prefix_tokens)
    base = make("shared_prefixes", n, poisson(rate), prompts, outputs, seed=seed, kind="shared")
    weight = 1 / np.arange(1, groups + 1)
    chosen = np.random.default_rng([seed, 2]).choice(groups, n, p=weight / weight.sum()).tolist()
    items = (
        replace(i, prompt_tokens=i.prompt_tokens + prefix_tokens, pieces=((g, prefix_tokens),)) for i, g in zip(base, chosen)
    )
    return Workload("shared_prefixes", items, seed)


def sudden_grower(
    n: int, *, rate: float, grower_at: int, grower_tokens: int, prompts: Lengths, outputs: Lengths, seed: int = 0
) -> Workload:
    """One request, number `grower_at`, of a class that is usually short, goes on for `grower_tokens` tokens."""
    base = make("sudden_grower", n, poisson(rate), prompts, outputs, seed=seed, kind="chat")
    if not 0 <= grower_at < n:
        raise WorkloadError(f"grower_at={grower_at} of {n} requests", "name one of them, from 0")
    items = (replace(item, max_tokens=grower_tokens) if i == grower_at else item for i, item in enumerate(base))
    return Workload("sudden_grower", items, seed)


def starving_long(
    n: int, *, rate: float, long_tokens: int = 2048, short_tokens: int = 32, output: int = 16, seed: int = 0
) -> Workload:
    """A long prompt first, then only short ones: under shortest-first with no aging the first waits until all are done."""
    short = make("starving_long", n, poisson(rate), fixed(short_tokens), fixed(output), seed=seed, kind="short")
    first = Item(0.0, prompt_tokens=long_tokens, max_tokens=output, kind="long")
    return Workload("starving_long", (first, *short), seed)


def ties(n: int, *, tokens: int = 64, output: int = 16) -> Workload:
    """Equal requests at one moment: any order that compares the requests themselves fails."""
    return make("ties", n, all_at_once(), fixed(tokens), fixed(output))


def closed_loop(clients: int, n: int, *, prompts: Lengths, outputs: Lengths, seed: int = 0) -> Workload:
    """`clients` clients who each send the next of n requests as soon as their last one has ended."""
    base = make("closed_loop", n, all_at_once(), prompts, outputs, seed=seed, kind="closed")
    return Workload("closed_loop", base.items, seed, clients=clients)
