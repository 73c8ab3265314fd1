"""Calls and decoding measured on the reader's own machine, within a time that a reader will wait."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from pdlab.bench import _stages as stages
from pdlab.costs.formulas import itemsize_of
from pdlab.hardware.timing import summarize

if TYPE_CHECKING:
    import pandas as pd

    from pdlab.bench.decode_single_stream import Stream
    from pdlab.bench.records import Recorder
    from pdlab.lab.session import Lab
    from pdlab.models.config import ModelConfig
    from pdlab.models.loading import Loaded


def tiny_of(config: ModelConfig) -> str:
    """The tiny random model of the same family, which takes the same operators in a layer."""
    return f"random:{'gpt2' if config.family == 'gpt2' else 'llama'}-tiny"


def operator_calls(loaded: Loaded, batch: int = 1) -> pd.DataFrame:
    """How many PyTorch operators one layer's decode takes when nothing is fused, by model operation; counted live."""
    import pandas as pd
    import torch
    from torch.profiler import ProfilerActivity

    from pdlab.bench import _breakdown

    with _breakdown.step_of(loaded, frozenset(), 16, batch, ranged=True) as (executor, plan):
        _breakdown.run_steps(executor, [plan(0)], 1)
        with torch.profiler.profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
            _breakdown.run_steps(executor, [plan(1)], 1)
    events = list(profiler.events())
    spans = [(e.name, e.time_range.start, e.time_range.end) for e in events if e.name in _breakdown.OPERATIONS]
    counts = dict.fromkeys(_breakdown.OPERATIONS, 0)
    for e in events:
        if _works(e):
            name = next((n for n, start, end in spans if start <= e.time_range.start <= end), None)
            if name:
                counts[name] += 1
    layers = loaded.config.num_layers
    each = {name: n / (1 if name == "projection_sample" else layers) for name, n in counts.items()}
    return pd.DataFrame({"operators, plain": {k: round(v) for k, v in each.items()}, "kernels, fused": 1})


_VIEWS = ("view", "reshape", "expand", "slice", "select", "transpose", "unsqueeze", "split", "detach", "alias", "as_strided")


def _works(event: Any) -> bool:
    """Whether a profiler's event is an operator that a reader would count: called by nobody else, and more than a view."""
    outermost = event.cpu_parent is None or not event.cpu_parent.name.startswith("aten::")
    return bool(event.name.startswith("aten::") and outermost and not any(word in event.name for word in _VIEWS))


def operators(call: Any, *arguments: Any) -> int:
    """How many PyTorch operators a call takes."""
    import torch
    from torch.profiler import ProfilerActivity

    call(*arguments)
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        call(*arguments)
    return sum(map(_works, profiler.events()))


def launch_curve(lab: Lab, sizes: Sequence[int]) -> pd.DataFrame:
    """Time of y = x + 1 on vectors of so many bytes, as lines for figures.latency: called from Python, on a GPU also in a CUDA
    graph, and the bytes over the copy bandwidth.

    Up to 512 pairs take turns: large vectors then come from memory, small ones from a cache on a CPU. There the bandwidth is
    that of copying the largest pairs right here, since a ceiling from a busier minute would be no bound.
    """
    import pandas as pd
    import torch

    from pdlab.hardware.timing import L2Rotation, graph_time_us, time_ms

    dtype, on_gpu, rows = getattr(torch, lab.dtype), lab.machine.is_gpu, []

    def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.add(x, 1, out=y)

    def copy(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return y.copy_(x)

    def pairs(size: int) -> L2Rotation:
        n = max(1, size // itemsize_of(lab.dtype))

        def pair(i: int) -> tuple[Any, ...]:
            return tuple(torch.ones(n, dtype=dtype, device=lab.device) for _ in "xy")

        return L2Rotation(pair, 2 * size, l2_bytes=None if on_gpu else 64 << 20)

    speed = lab.ceilings().copy_bytes_per_s if on_gpu else 0.0
    for size in sorted(sizes, reverse=True):
        rotation = pairs(size)
        took = {"called from Python": time_ms(add, rotation=rotation, device=lab.device, n=200, budget_ms=60).scaled(1e3, "us")}
        if on_gpu:
            took["in a CUDA graph"] = graph_time_us(add, rotation=rotation, n=10, budget_ms=40)
        speed = speed or 2e3 * size / time_ms(copy, rotation=rotation, device=lab.device, n=50, budget_ms=300).p10
        rows += [(size / 1e3, t.median, t.p10, t.p90, name, "measured") for name, t in took.items()]
        floor = 2e6 * size / speed
        rows.append((size / 1e3, floor, floor, floor, "called from Python", "predicted"))
    return pd.DataFrame(rows[::-1], columns=["x", "y", "p10", "p90", "series", "kind"])


_FEWEST = 3  # tokens of an answer that is timed: two steps


def affordable(first_s: float, token_s: float, left_s: float, answers: int, most: int) -> int:
    """How long `answers` answers may be, in tokens, so that all fit into `left_s`: at the most `most`, at the least three.

    `first_s`: seconds until an answer's first token. `token_s`: seconds of each further one.
    """
    return min(most, max(_FEWEST, 1 + int((left_s / answers - first_s) / token_s)))


def streams(
    lab: Lab, recorder: Recorder, loaded: Loaded, sets: Sequence[Iterable[str]], prompt: int, new: int, rounds: int = 2,
    budget_s: float = 15.0,
) -> pd.DataFrame:  # fmt: skip
    """Tokens a second of one stream with each set of switches, taking turns; with the share of the read ceiling. Recorded.

    On a CPU, where another process may hold a core and a token may then take a second, answers become shorter (around the same
    mean context) and are timed once instead of `rounds` times where `budget_s` would not do.
    """
    import pandas as pd

    from pdlab.bench.decode_single_stream import Stream, measure_variants
    from pdlab.bench.suites import Context

    context = Context(lab.machine, lab.profile, recorder, 60.0, lab.seed, say=lambda line: None)
    stream = Stream(context, loaded.config, lab.ceilings().read_bytes_per_s, prompt, new)
    before, switches = len(recorder.rows), [frozenset(s) for s in sets]
    if lab.machine.is_gpu:
        measure_variants(stream, loaded, switches, rounds)
    else:
        _within(budget_s, stream, loaded, switches, rounds)
    table: dict[str, dict[str, float]] = {}
    for row in recorder.rows[before:]:
        if row.ok:
            table.setdefault(row.variant, {})[row.metric] = row.median
    columns = {"throughput": "tokens a second", "bandwidth_share": "share of the read ceiling, %"}
    return pd.DataFrame(table).T.rename(columns=columns)


def _within(budget_s: float, stream: Stream, loaded: Loaded, sets: list[stages.Switches], rounds: int) -> None:
    """Rows of these sets on a CPU; says how many tokens were timed where they are fewer than asked for."""
    seed, started, prompt, new = stream.ctx.seed, time.perf_counter(), stream.prompt, stream.new
    timed, taken = 0, {stages.name_of(s): list[float]() for s in sets}
    with ExitStack() as stack:
        llms = {stages.name_of(s): stack.enter_context(stages.make_llm(loaded, s, length=prompt + new + 1)) for s in sets}
        for number in range(rounds):
            if number and time.perf_counter() - started > 0.6 * budget_s:
                break  # another round would not fit
            for name, llm in llms.items():
                if not timed:  # the first tokens of all, which also warm up
                    begun = time.perf_counter()
                    token_s = stages.stream_seconds(llm, prompt, _FEWEST, seed)
                    first_s = max(0.0, time.perf_counter() - begun - (_FEWEST - 1) * token_s)
                    left = budget_s - (time.perf_counter() - started)
                    timed = affordable(first_s, token_s, left, len(sets) * rounds, new)
                taken[name].append(stages.stream_seconds(llm, prompt + (new - timed) // 2, timed, seed))
    settings = None if timed == new else {"timed_prompt": prompt + (new - timed) // 2, "timed_new_tokens": timed}
    for name, seconds in taken.items():
        stream.report(name, summarize(seconds, "s"), settings)
    if settings:
        print(f"a slow or busy machine: answers of {timed} tokens were timed instead of {new}")
    stream.ctx.record.flush()
