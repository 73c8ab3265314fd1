"""What notebooks about KV memory draw with: runs of several allocators under one load, and pictures of what they hold.

In a picture each stretch of memory has the colour of the request that owns it, full where it holds tokens and pale where it
is reserved and empty; paper is free, grey waits for a step in flight, gold is cached, dark is shared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pdlab.allocators.fragmentation import Timeline, average_waste, picture
from pdlab.allocators.interface import CACHED, FREE, RETIRED, SHARED, Allocator
from pdlab.bench.kv_allocators import Load
from pdlab.bench.memory_runs import play, real_engine, report, simulated_engine
from pdlab.lab.style import BLUE, FAINT, GOLD, GREEN, INK, PAPER, RULE, RUST, LabFigure, canvas

if TYPE_CHECKING:
    import pandas as pd

    from pdlab.bench.records import Recorder
    from pdlab.workloads.replay import Outcome

__all__ = ["filling", "measured", "moment", "recorded", "serving_table", "simulated", "strips", "strips_of", "throughput"]

_REQUESTS = ("#0C79A9", "#AF3913", "#114D37", "#6B265E", "#4C9FC4", "#D0734F", "#4F8A72", "#A15C93", "#08506F", "#7A2609")
_SCHEMES = {"per request": (BLUE, "o"), "contiguous pool": (RUST, "s"), "paged": (GOLD, "^"), "hybrid": (GREEN, "D")}
_STATES = {FREE: PAPER, RETIRED: "#B9BDB8", CACHED: "#D9BE5A", SHARED: INK}


def _row(variant: str, load: Load, outcome: Outcome) -> dict[str, Any]:
    waste, trace = average_waste(outcome.trace or ()), outcome.trace or []
    seconds = sum(row.t_end - row.t_start for row in trace) or 1.0
    return {
        "variant": variant,
        "concurrency": load.concurrency,
        "requests a second": outcome.throughput,
        "mean, s": outcome.end_to_end.mean,
        "P50, s": outcome.end_to_end.quantile(0.5),
        "P99, s": outcome.end_to_end.quantile(0.99),
        "admitted at once": sum(row.running * (row.t_end - row.t_start) for row in trace) / seconds,
        "internal waste, %": waste.internal,
        "external waste, %": waste.external,
        "preemptions": outcome.preemptions,
    }


def simulated(
    loads: Iterable[Load],
    variants: Sequence[str],
    device: str,
    *,
    recorder: Recorder | None = None,
    blocks: int = 0,
    frame_every: int = 1,
    **changes: Any,
) -> tuple[pd.DataFrame, dict[str, Timeline]]:
    """Each variant under each load on an imitated device: a row each, and with `blocks` the last load's timelines.

    `changes` are fields of EngineConfig that differ from the load's own.
    """
    import pandas as pd

    rows: list[dict[str, Any]] = []
    timelines: dict[str, Timeline] = {}
    for load in loads:
        workload = load.workload(0)
        for variant in variants:
            config = load.config(variant, executor="simulated", simulated_device=device).with_(**changes)
            with simulated_engine(f"random:{load.model}", config) as engine:
                if blocks:
                    timelines[variant] = Timeline(blocks=blocks, frame_every=frame_every).watch(engine)
                outcome = play(engine, workload)
                extra = {
                    "refused in pieces": engine.allocator.refused_in_pieces,
                    "moved, tokens": engine.scheduler.compactor.moved,
                    "KV tokens": engine.executor.capacity(),
                    "pooled, %": 100 * getattr(engine.allocator, "pooled", 0) / max(1, outcome.complete),
                    "threshold": getattr(engine.allocator, "threshold", 0),
                }
            rows.append(_row(variant, load, outcome) | extra)
            if recorder is not None:
                params = {"model": load.model, "concurrency": load.concurrency, "workload": workload.name}
                settings = {"requests": len(workload), "kv_tokens": extra["KV tokens"]}
                report(recorder, outcome, variant=variant, kind="simulated", params=params, settings=settings)
    return pd.DataFrame(rows), timelines


def measured(
    loaded: Any, load: Load, variants: Sequence[str], *, recorder: Recorder | None = None, turns: int = 0, **changes: Any
) -> pd.DataFrame:
    """Each variant under one load on the model itself, on this machine: of its `turns` the one whose rate is in the middle.

    Three turns on a GPU, one elsewhere, unless said. Each round begins with another variant: whoever meets a shape of batch
    first pays for compiling its kernels, and a rehearsal need not meet all shapes.
    """
    import pandas as pd

    workload, rows = load.workload(0), []
    device, dtype = loaded.model.device.type, str(loaded.model.dtype).removeprefix("torch.")
    rehearsal, turns = (len(workload), turns or 3) if device == "cuda" else (8, turns or 1)
    taken: dict[str, list[tuple[Outcome, int]]] = {variant: [] for variant in variants}
    for turn in range(turns):
        first = turn % len(variants)
        for variant in [*variants[first:], *variants[:first]]:
            config = load.config(variant, device=device, dtype=dtype).with_(**changes)
            with real_engine(loaded, config) as engine:
                outcome = play(engine, workload, warm=rehearsal)
                taken[variant].append((outcome, engine.executor.capacity()))
    for variant, several in taken.items():
        outcome, capacity = sorted(several, key=lambda one: one[0].throughput)[turns // 2]
        rows.append(_row(variant, load, outcome) | {"KV tokens": capacity})
        if recorder is not None:
            params = {"model": load.model, "concurrency": load.concurrency, "workload": workload.name}
            settings = {"requests": len(workload), "kv_tokens": capacity, "turns": turns}
            report(recorder, outcome, variant=variant, kind="measured", params=params, settings=settings)
    return pd.DataFrame(rows)


def recorded(device: str, model: str, kind: str = "measured") -> pd.DataFrame:
    """What is kept of kv_allocators for a device and a model under conversations: one row a variant and concurrency, of one
    run; empty where nothing is."""
    from pdlab.bench.records import latest

    found = latest(device, "kv_allocators", kind=kind, model=model, workload="azure_conversation")
    names = {
        "throughput": "requests a second",
        "latency50": "P50, s",
        "latency99": "P99, s",
        "waste_internal": "internal waste, %",
        "waste_external": "external waste, %",
        "preemptions": "preemptions",
    }
    if found.empty:
        return found.reindex(columns=["variant", "concurrency", *names.values()])
    quantile = found.reindex(columns=["quantile"])["quantile"].map("{:.0f}".format).where(found.metric == "latency", "")
    table = found.assign(name=found.metric + quantile, value=found["median"].where(found.unit != "ms", found["median"] / 1e3))
    table = table.pivot_table(index=["concurrency", "variant"], columns="name", values="value", sort=False)
    table = table.rename(columns=names).reindex(columns=list(names.values())).rename_axis(columns=None)
    return table.reset_index().sort_values("concurrency", kind="stable")


# --- pictures


def paint(owners: np.ndarray, filled: np.ndarray) -> np.ndarray:
    """f32[..., 3]: colours of stretches of memory, see the module's docstring."""
    from matplotlib.colors import to_rgb

    palette = np.array([to_rgb(c) for c in _REQUESTS])
    paper = np.array(to_rgb(PAPER))
    colour = palette[np.maximum(owners, 0) % len(palette)]
    strength = (0.28 + 0.72 * filled)[..., None]
    rgb = strength * colour + (1 - strength) * paper
    for state, name in _STATES.items():
        rgb[owners == state] = to_rgb(name)
    return rgb.astype(np.float32)


def _key(figure: LabFigure) -> None:
    from matplotlib.patches import Patch

    red, green, blue = paint(np.array([0]), np.array([0.0]))[0].tolist()
    named: list[tuple[str, Any]] = [("holds tokens", _REQUESTS[0]), ("reserved, empty", (red, green, blue)), ("free", PAPER)]
    patches = [Patch(facecolor=colour, edgecolor=FAINT, linewidth=0.6, label=name) for name, colour in named]
    figure.legend(handles=patches, loc="outside lower right", ncols=3, fontsize=8.5, frameon=False)


def filling(timelines: Mapping[str, Timeline], *, claim: str, footer: str) -> LabFigure:
    """Memory (upward) over time (to the right) for each allocator, all over the same seconds."""
    from matplotlib.ticker import MaxNLocator

    figure, axes = canvas(claim, footer, size=(9.2, 5.6), rows=2, columns=-(-len(timelines) // 2), sharex=True, sharey=True)
    latest = max(t.frame_times[-1] for t in timelines.values())
    for ax, (name, timeline) in zip(axes.flat, timelines.items(), strict=False):
        image = paint(np.array(timeline.frames).T, np.array(timeline.filled).T)
        times = np.linspace(0, timeline.frame_times[-1], 480)  # frames come at uneven times; pixels do not
        at = np.searchsorted(timeline.frame_times, times, side="right").clip(1) - 1
        ax.imshow(image[:, at], aspect="auto", origin="lower", extent=(0, times[-1], 0, 100), interpolation="nearest")
        ax.set(title=name.replace("_", " "), xlim=(0, latest), ylim=(0, 100))
        ax.grid(False)
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    for ax in axes[-1]:
        ax.set_xlabel("time, s")
    for ax in axes[:, 0]:
        ax.set_ylabel("address, % of the memory")
    _key(figure)
    return figure


def moment(timelines: Mapping[str, Timeline], share: float, *, claim: str, footer: str) -> LabFigure:
    """Each allocator's memory, `share` of the way through its own run, read like a page: left to right, then down."""
    figure, axes = canvas(claim, footer, size=(9.2, 3.5), columns=len(timelines))
    for ax, (name, timeline) in zip(axes.flat, timelines.items(), strict=True):
        i = min(len(timeline.frames) - 1, int(share * (len(timeline.frames) - 1)))
        side = int(np.ceil(np.sqrt(timeline.blocks)))
        image = np.ones((side * side, 3), np.float32)
        image[: timeline.blocks] = paint(timeline.frames[i], timeline.filled[i])
        _squares(ax, image.reshape(side, side, 3))
        stats = timeline.stats[min(len(timeline.stats) - 1, i * timeline.frame_every)]
        words = f"{stats.live} requests\n{100 * stats.held / stats.capacity:.0f} % tokens, "
        ax.set_title(f"{name.replace('_', ' ')}, {timeline.frame_times[i]:,.1f} s", fontsize=9.5)
        ax.set_xlabel(words + f"{100 * stats.waste_internal:.0f} % of reserved empty", fontsize=8.5)
    return figure


def _squares(ax: Any, image: np.ndarray) -> None:
    ax.imshow(image, interpolation="nearest")
    height, width = image.shape[:2]
    ax.set_xticks(np.arange(width + 1) - 0.5, minor=True)
    ax.set_yticks(np.arange(height + 1) - 0.5, minor=True)
    ax.grid(False)
    ax.grid(which="minor", color=RULE, linewidth=0.5)
    ax.tick_params(which="both", length=0, labelbottom=False, labelleft=False)
    ax.set_xticks([])
    ax.set_yticks([])


def strips(states: Mapping[str, Allocator], *, claim: str, footer: str, blocks: int = 96) -> LabFigure:
    """The memories of several allocators, or of one at several times, as strips from the lowest address to the highest."""
    return strips_of({name: picture(a, blocks) for name, a in states.items()}, claim=claim, footer=footer)


def strips_of(pictures: Mapping[str, tuple[np.ndarray, np.ndarray]], *, claim: str, footer: str) -> LabFigure:
    """`strips` of pictures that were taken before (fragmentation.picture)."""
    figure, axes = canvas(claim, footer, size=(9.2, 1.15 + 0.72 * len(pictures)), rows=len(pictures))
    for ax, (name, (owners, filled)) in zip(axes[:, 0], pictures.items(), strict=True):
        _squares(ax, paint(owners, filled)[None])
        ax.set_aspect("auto")
        ax.set_title(name.replace("_", " "), fontsize=9.5)
    return figure


def serving_table(table: pd.DataFrame, article: Mapping[str, tuple[float, float, float]], concurrency: int) -> pd.DataFrame:
    """Ours at one concurrency beside the article's (waste %, P99 ms, requests a second), relative to the first row."""
    import pandas as pd

    ours = table[table.concurrency == concurrency].set_index("variant")
    first = next(iter(article))
    rows = {}
    for name, (waste, p99, rate) in article.items():
        mine = ours.loc[name]
        rows[name.replace("_", " ")] = {
            "waste, article": f"{waste:.0f} %",
            "internal": f"{mine['internal waste, %']:.1f} %",
            "external": f"{mine['external waste, %']:.0f} %",
            "P99, article": f"{p99 / article[first][1]:.2f}",
            "P99, ours": f"{mine['P99, s'] / ours.loc[first, 'P99, s']:.2f}",
            "req/s, article": f"{rate / article[first][2]:.2f}",
            "req/s, ours": f"{mine['requests a second'] / ours.loc[first, 'requests a second']:.2f}",
        }
    return pd.DataFrame(rows).T


def throughput(lines: pd.DataFrame, *, claim: str, footer: str, mark: float | None = None) -> LabFigure:
    """Requests a second over requests in flight; `lines` as in figures, `mark` a vertical line where the article has one.

    An allocator has the same colour, marker and place in every such figure, in whatever order its rows come.
    """
    from pdlab.lab.figures import draw_lines, plain_ticks

    figure, axes = canvas(claim, footer, size=(8.6, 4.2))
    ax = axes[0, 0]
    known = {name: i for i, name in enumerate(_SCHEMES)}
    lines = lines.sort_values("series", key=lambda s: s.map(known).fillna(len(known)), kind="stable")
    handles = draw_lines(ax, lines)
    for i, line in enumerate(handles):  # lines that coincide show as stripes
        if look := _SCHEMES.get(str(line.get_label()).split(",")[0]):
            line.set(color=look[0], marker=look[1])
        line.set(linewidth=max(1.2, 6 - 1.6 * i), markersize=max(4.5, 11 - 2.2 * i))
    ax.legend(handles=handles, loc="best")
    ax.set(xscale="log", xlabel="requests in flight", ylabel="requests a second", ylim=(0, 1.15 * float(lines["y"].max())))
    plain_ticks(ax.xaxis, lines["x"])
    if mark is not None:
        ax.axvline(mark, color=FAINT, linewidth=1.0, linestyle=":")
        ax.annotate(f"the article: {mark:g}", (mark, 0.02), xycoords=("data", "axes fraction"), xytext=(5, 4),
                    textcoords="offset points", color=FAINT, fontsize=8.5)  # fmt: skip
    return figure
