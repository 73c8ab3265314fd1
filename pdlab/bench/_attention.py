"""What the attention suites share: random caches behind a view, a float64 check in the same run, timing in turns, tables."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from pdlab.bench._turns import each_or_refused, in_turns, reason
from pdlab.hardware.timing import MIN_GRAPH_CALLS, L2Rotation, Timings, graph_time_us, time_ms

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from pdlab.bench.suites import Context
    from pdlab.costs.roofline import Ceilings
    from pdlab.kernels.kv_view import KVView
    from pdlab.kernels.tuning import DecodeRing, DecodeTile

Call = Callable[..., Any]
GRAPH_MS = 6.0  # of long calls so many go into a graph as take this long, at least two
PAUSE_S = 0.02  # before each turn on a GPU
# p and the output are rounded to the dtype: relative 2^-9 (bfloat16) and 2^-12 (float16) on average, each
TOLERANCE = {"bfloat16": 8e-3, "float16": 1e-3, "float32": 1e-5}
OWN = ("ours", "ours_alone", "triton")  # this project's attention, under the names that suites give it


def make_view(
    lens: list[int],
    queries: list[int],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    page: int,
    dtype: str,
    device: str,
    seed: int,
) -> tuple[torch.Tensor, KVView]:
    """q [T, N, D] and a view of random K and V: scattered pages, or one extent after the other for page 0."""
    import torch

    from pdlab.kernels.kv_view import KVView

    g = torch.Generator(device).manual_seed(seed)
    kind, size = getattr(torch, dtype), max(1, page)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, device=device).to(kind)

    def whole(values: Any, as_type: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=as_type, device=device)

    counts = [-(-n // size) for n in lens]
    order = torch.randperm(sum(counts), generator=g, device=device).to(torch.int32)
    table = torch.zeros(len(lens), max(counts) if page else 0, dtype=torch.int32, device=device)
    if page:
        for b, part in enumerate(order.split(counts)):
            table[b, : len(part)] = part
    starts = [sum(lens[:b]) for b in range(len(lens))]
    k, v = (draw(sum(counts), kv_heads, size, head_dim) for _ in range(2))
    first = [sum(queries[:b]) for b in range(len(lens) + 1)]
    nowhere = torch.zeros(sum(queries), dtype=torch.int64, device=device)
    view = KVView("paged" if page else "extent", size, k, v, table, whole(starts, torch.int64), whole(lens), whole(first),
                  nowhere, nowhere, max(queries), max(lens), tuple(zip(queries, lens)))  # fmt: skip
    return draw(sum(queries), heads, head_dim), view


def last_request(q: torch.Tensor, view: KVView, most: int = 256) -> tuple[torch.Tensor, int]:
    """Attention in float64 of the last request's last queries, at most `most`, and how many they are."""
    import torch

    b, (n, length) = len(view.host_lens) - 1, view.host_lens[-1]
    rows = min(n, most)
    t = torch.arange(length, device=q.device)
    size = view.page_size
    slots = view.block_table[b, t // size].long() * size + t % size if view.kind == "paged" else view.base[b] + t
    k, v = (c[slots // size, :, slots % size].double().transpose(0, 1) for c in (view.k, view.v))
    grouped = q[-rows:].double().view(rows, k.shape[0], -1, q.shape[2])
    late = t > torch.arange(length - rows, length, device=q.device)[:, None]
    out = torch.empty_like(grouped)
    for head in range(k.shape[0]):
        scores = torch.einsum("qgd,td->gqt", grouped[:, head], k[head]) * q.shape[2] ** -0.5
        out[:, head] = (scores.masked_fill(late, -torch.inf).softmax(-1) @ v[head]).transpose(0, 1)
    return out.view(rows, q.shape[1], q.shape[2]), rows


class Wrong(AssertionError):
    """A call ran and gave something else than attention."""


def check(name: str, call: Call, q: torch.Tensor, view: KVView, truth_rows: tuple[torch.Tensor, int] | None = None) -> None:
    """Raises Wrong unless call(q, view) is attention to within rounding. `truth_rows` as of last_request."""
    truth, rows = truth_rows or last_request(q, view)
    out = call(q, view)[-rows:].double()
    error = float((out - truth).norm() / truth.norm())
    if not error < TOLERANCE[str(q.dtype).removeprefix("torch.")]:
        raise Wrong(f"{name} is wrong: relative error {error:.2e}")


def backend(name: str, q: torch.Tensor, view: KVView, requests: int) -> Call:
    """attention(q, view) of a dispatch backend for this shape of heads."""
    from types import SimpleNamespace

    from pdlab.core.config import EngineConfig
    from pdlab.kernels.dispatch import make_ops

    heads = SimpleNamespace(num_heads=q.shape[1], num_kv_heads=view.k.shape[1], head_dim=q.shape[2])
    config = EngineConfig(attention=name, max_batch_requests=requests, page_size=view.page_size)
    return make_ops(config, heads, q.device, q.dtype).attention


def decode_alone(q: torch.Tensor, view: KVView, requests: int) -> Call:
    """As backend("triton") for single queries, but without programmatic dependent launch: no load begins before its turn.

    In a graph of equal calls a dependent launch lets a call's loads begin under the end of the call before, as they do under
    a model's preceding kernel; rivals have none of that.
    """
    from pdlab.kernels.triton_attention import TritonAttention
    from pdlab.kernels.tuning import Tuning

    class Alone(Tuning):
        def decode(self, head_dim: int, rows: int, **facts: int) -> DecodeTile:
            return replace(super().decode(head_dim, rows, **facts), pdl=False)

        def ring(self, head_dim: int, rows: int, **facts: int) -> DecodeRing | None:
            ring = super().ring(head_dim, rows, **facts)
            return ring and replace(ring, pdl=False)

    tuning = Tuning.of_device(q.device.index or 0)
    alone = Alone(tuning.device, tuning.capability, tuning.multiprocessors, tuning.l2_bytes)
    heads = {"heads": q.shape[1], "kv_heads": view.k.shape[1], "head_dim": q.shape[2]}
    return TritonAttention(**heads, max_requests=requests, device=q.device, tuning=alone)


@dataclass
class Measured:
    """Milliseconds by variant, how each was timed, and why the others have none."""

    times: dict[str, Timings]
    left_out: dict[str, str]


def measure(
    calls: dict[str, Call],
    q: torch.Tensor,
    view: KVView,
    *,
    graph: bool,
    rounds: int = 3,
    budget_ms: float = 60,
    truth: tuple[torch.Tensor, int] | None = None,
) -> Measured:
    """Each call checked, then timed in turns over caches rotated past L2. What is wrong, or a rival that refuses, be it in a
    capture or in its last turn, is left out.

    Raises what one of OWN raises: a rival may refuse a shape, this project's attention may not. If it runs and is wrong the
    others are still timed, and `insist` fails the suite at its end.
    `truth`: what last_request(q, view) gives, where it is there already.
    With `graph` everything is timed inside CUDA graphs, of 20 calls or of as many as take GRAPH_MS. On a GPU a pause comes
    before each turn, and each round begins with another variant: what a long kernel finds of the card's power is what the one
    before it left, so whoever always followed a slow one would be ahead.
    """
    import torch

    def copy(i: int) -> tuple[Any, ...]:
        return (q, view if i == 0 else replace(view, k=torch.randn_like(view.k), v=torch.randn_like(view.v)))

    truth = truth or last_request(q, view)
    left_out: dict[str, str] = {}

    def refused(name: str, error: Exception) -> None:
        if name in OWN and not isinstance(error, Wrong):
            raise error
        left_out[name] = reason(error)

    each_or_refused(calls, lambda name: check(name, calls[name], q, view, truth), refused)
    rotation = L2Rotation(copy, 2 * view.k.numel() * view.k.element_size(), l2_bytes=None if q.is_cuda else 0)

    def timer(call: Call) -> Callable[[], Timings]:
        if not (graph and q.is_cuda):
            return partial(time_ms, call, rotation=rotation, device=str(q.device), n=15, warmup=1, budget_ms=budget_ms)
        once = time_ms(call, rotation=rotation, n=3, warmup=1, budget_ms=10).median
        calls = max(2, min(MIN_GRAPH_CALLS, round(GRAPH_MS / max(once, 1e-3))))
        settings: dict[str, Any] = {"rotation": rotation, "calls": calls, "fewest": calls, "n": 15, "warmup": 1}
        return lambda: graph_time_us(call, **settings, budget_ms=budget_ms).scaled(1e-3, "ms")

    timers = each_or_refused([n for n in calls if n not in left_out], lambda name: timer(calls[name]), refused)
    return Measured(in_turns(timers, rounds, PAUSE_S * q.is_cuda, refused), left_out)


def record_left_out(ctx: Context, left_out: dict[str, str], metric: str, unit: str, params: dict[str, Any]) -> None:
    """A row for each variant that has no number, with the reason."""
    for name, why in left_out.items():
        ctx.record.skip(metric, unit, why, variant=name, params=params)
        ctx.say(f"  {name} left out: {why[:120]}")


def insist(ctx: Context, *own: str) -> None:
    """Raises AssertionError if this project's own attention was wrong somewhere; called when the other rows are made."""
    wrong = [r for r in ctx.record.rows if r.variant in (own or OWN) and "is wrong" in r.status]
    if wrong:
        raise AssertionError(f"{len(wrong)} cases are wrong, the first: {wrong[0].params}: {wrong[0].status}")


@cache
def _ceilings(device: str, dtype: str) -> Ceilings:
    from pdlab.bench import ceilings

    return ceilings.measure(device, dtype, quick=not device.startswith("cuda"))


def record_ceilings(ctx: Context) -> Ceilings:
    """The read and matrix ceilings, measured once in this process and written beside what is held against them."""
    top = _ceilings(ctx.device, ctx.dtype)
    ctx.record.add("read_ceiling", top.read_bytes_per_s / 1e12, "TB/s", params={})
    ctx.record.add("matmul_ceiling", top.matmul_flops_per_s / 1e12, "TFLOP/s", params={"dtype": ctx.dtype})
    return top


def table_paths(ctx: Context) -> list[Path]:
    """Where a suite's tables go: beside the records that are being made, or into the user's own folder, where they count."""
    from pdlab.bench.records import target_root
    from pdlab.core.paths import home_dir

    folders = []
    for root in ctx.record.roots:
        kept = root.parent if root.name == "measurements" else root
        folders.append(home_dir() if root == target_root(False) else kept)
    return [folder / "tuning" / f"{ctx.machine.slug}.json" for folder in folders]


def write_table(ctx: Context, key: str, entries: list[dict[str, Any]], replaced: dict[str, Any]) -> None:
    """Puts entries into tuning/<device>.json, in place of those with these values, and notes the run they come from."""
    from pdlab.kernels.tuning import table

    ctx.record.flush()
    known = ctx.record.provenance.get(ctx.record.rows[-1].provenance_id, {}) if ctx.record.rows else {}
    run = {name: known.get(name) for name in ("gpu", "driver", "torch", "triton", "commit", "time_utc")}
    for path in table_paths(ctx):
        path.parent.mkdir(parents=True, exist_ok=True)
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        content[key] = entries + [e for e in content.get(key, []) if any(e.get(k) != v for k, v in replaced.items())]
        content.setdefault("measured", {})[key] = {"run_id": ctx.record.run_id, **run}
        path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        ctx.say(f"  wrote {path}")
    table.cache_clear()
