"""Steps of one request by ways of sizing the rings of weights, and by the persistent kernel; writes the device's table.

A ring of weights reaches across the border between kernels, so what counts is a whole step of a model: `step_latency`, ms
between the ends of successive steps, two in flight, one row a way (`way`) of doing it. The fastest rings go to
tuning/<device>.json ("ring_tiles"). Steps by the persistent kernel are rows whose `way` begins with persistent; up to how many
cached tokens it is faster than the rings goes to the same table ("persistent_decode"), and where it never is no entry is
written, so that it is not used.

Needs a GPU of capability 9.0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from pdlab.bench import _stages as stages
from pdlab.bench.product_tiles import shapes
from pdlab.kernels.product_tiles import RingTile, ring_rule

if TYPE_CHECKING:
    from pdlab.bench.suites import Context
    from pdlab.models.loading import Loaded

NAME = "ring_tiles"
HELP = "a step of one request by ways of sizing the rings of weights and by the persistent kernel; writes the tuning table"

MODELS = ("llama-1b", "llama-3-8b", "llama-2-7b")
TOKENS = 512  # in the cache of a step
LONGER = (1024, 2048, 4096, 8000)  # where what was faster over TOKENS is held beside the others again
RINGS = stages.ALL - {"persistent"}
BIG = ("norm_mlp_up", "down_residual", "projection_sample")
REPLAYS = 56


def ring_ways() -> dict[str, Callable[[str, int], RingTile]]:
    """Ways of sizing the rings: a whole multiprocessor's memory, half of it, or half for the small products alone; and `early`:
    so little for what comes before gates and up that their ring, of 7 stages, fills while attention runs."""

    def half(op: str, k: int) -> RingTile:
        return RingTile(1, max(2, min(6, ((104 << 10) - 2 * k) // (16 << 10))))

    def early(op: str, k: int) -> RingTile:
        if op in ("norm_qkv_rope", "out_residual"):
            return RingTile(1, 4)
        return RingTile(1, 7) if op == "norm_mlp_up" else ring_rule(k)

    return {
        "whole": lambda op, k: ring_rule(k),
        "half": half,
        "mixed": lambda op, k: ring_rule(k) if op in BIG else half(op, k),
        "early": early,
        "early, half down": lambda op, k: half(op, k) if op == "down_residual" else early(op, k),
    }


def persistent_ways() -> dict[str, dict[str, Any]]:
    """Settings of the persistent kernel: panels of weights on their way at a time, around a hand-off and apart from one; stages
    of two panels; u handed over as words."""
    return {
        "2 of 4": {"near": 2, "far": 4},
        "3 of 4": {"near": 3, "far": 4},
        "2 of 6": {"near": 2, "far": 6},
        "2 of 4, words": {"near": 2, "far": 4, "u_words": True},
        "2 of 4, 2x": {"near": 2, "far": 4, "panels": 2},
        "unbounded": {"near": 0, "far": 0},
    }


def run(ctx: Context) -> None:
    if ctx.machine.capability != (9, 0):
        ctx.record.skip("step_latency", "ms", "rings of weights need a GPU of compute capability 9.0", params={})
        return
    from pdlab.bench.prefill_vs_decode import _load

    for name in MODELS:
        loaded = _load(f"random:{name}", ctx)
        way, ms = _sweep_rings(ctx, loaded)
        if way:
            _sweep_persistent(ctx, loaded, way, ms)
        del loaded


def _sweep_rings(ctx: Context, loaded: Loaded) -> tuple[str, float]:
    """The fastest way and its milliseconds; ("", inf) where none could be timed. Requests into L2 are a technique of their own,
    off unless asked for, so they are timed beside the fastest alone."""
    from pdlab.bench import _attention

    times = {way: _step(ctx, loaded, way, RINGS, _sized(loaded, way)) for way in ring_ways()}
    ms, best = min((t, way) for way, t in times.items())
    if ms == float("inf"):
        return "", ms
    _step(ctx, loaded, f"{best}, prefetch", RINGS | {"prefetch"}, _sized(loaded, best))
    if ctx.left() <= 0:
        return best, ms  # what an unfinished sweep found might be slower than what the table has
    for op, (outputs, k) in shapes(loaded.config).items():
        tile = {n: v for n, v in asdict(ring_ways()[best](op, k)).items() if n not in ("pdl", "hint")}
        entry = {"op": op, "outputs": outputs, "k": k, **tile}
        _attention.write_table(ctx, "ring_tiles", [entry], {"op": op, "outputs": outputs, "k": k})
    return best, ms


def _sized(loaded: Loaded, way: str) -> Callable[[Any], None]:
    """Gives a model's operations their rings."""

    def prepare(ops: Any) -> None:
        for op, (outputs, k) in shapes(loaded.config).items():
            ops.ring_tiles[op, outputs, k] = replace(ring_ways()[way](op, k), pdl=ops.pdl)

    return prepare


def _sweep_persistent(ctx: Context, loaded: Loaded, rings: str, ms: float) -> None:
    """`rings`: the fastest way of sizing them, which is still the vocabulary's, and the milliseconds of its step."""
    from pdlab.bench import _attention
    from pdlab.kernels.decode_stack import StackTile, stack_key

    def persistent(way: str, tokens: int) -> float:
        def prepare(ops: Any) -> None:
            _sized(loaded, rings)(ops)
            ops.stack_tile = StackTile(**persistent_ways()[way])

        def check(ops: Any) -> None:
            if [stack is not None and not int(stack.failed) for _, stack in ops.stacks.values()] != [True]:
                raise RuntimeError("the persistent kernel did not run, or a wait in it gave up")

        return _step(ctx, loaded, f"persistent {way}", stages.ALL, prepare, check, tokens=tokens)

    fastest, way = min((persistent(way, TOKENS), way) for way in persistent_ways())
    if fastest == float("inf"):
        return  # not timed: no reason to forget what the table has
    key = stack_key(loaded.model.layers)
    entry: list[dict[str, Any]] = []
    if fastest < ms:
        most = _most_tokens(
            lambda tokens: persistent(way, tokens),
            lambda tokens: _step(ctx, loaded, rings, RINGS, _sized(loaded, rings), tokens=tokens),
        )
        entry = [{**key, "max_kv": _bound(most), **persistent_ways()[way]}]
    if ctx.left() > 0:
        _attention.write_table(ctx, "persistent_decode", entry, key)


def _most_tokens(mine: Callable[[int], float], beside: Callable[[int], float]) -> int:
    """Up to how many cached tokens a step is faster by what was faster over TOKENS."""
    most = TOKENS
    for tokens in LONGER:
        if mine(tokens) >= beside(tokens):
            break
        most = tokens
    return most


def _bound(tokens: int) -> int:
    """What a step over so many tokens asks the table with: a graph knows no length but the most that its engine has room for,
    and that of a measured step has room for one more, see _breakdown.step_of."""
    return tokens + 1


def _step(
    ctx: Context,
    loaded: Loaded,
    way: str,
    switches: frozenset[str],
    prepare: Callable[[Any], None],
    check: Callable[[Any], None] | None = None,
    *,
    tokens: int = TOKENS,
) -> float:
    """Milliseconds between the ends of successive steps over `tokens` cached tokens, also written as a row; inf where there are
    none. `prepare` and `check` are given the model's operations, before the first step and after the last."""
    from pdlab.bench import _breakdown
    from pdlab.hardware.timing import summarize

    params = {"model": loaded.config.name, "tokens": tokens, "dtype": ctx.dtype, "way": way}
    if ctx.left() <= 0:
        ctx.record.skip("step_latency", "ms", "the time budget ran out", params=params)
        return float("inf")
    try:
        with _breakdown.step_of(loaded, switches, tokens) as (executor, plan):
            ops = executor.model.ops
            prepare(ops)
            _breakdown.run_steps(executor, [plan(i) for i in range(4)], 1)
            seconds = _breakdown.run_steps(executor, [plan(i) for i in range(4, 4 + REPLAYS)], 2)
            if check is not None:
                check(ops)
    except Exception as error:
        ctx.record.skip("step_latency", "ms", f"{type(error).__name__}: {error}"[:200], params=params)
        ctx.say(f"  {loaded.config.name}, {tokens} tokens, {way}: {type(error).__name__}: {str(error)[:100]}")
        return float("inf")
    timings = summarize([s * 1e3 for s in seconds], "ms")
    ctx.record.add("step_latency", timings, params=params)
    ctx.say(f"  {loaded.config.name}, {tokens} tokens, {way}: {timings.median:.3f} ms a step")
    return timings.median
