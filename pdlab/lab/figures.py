"""The charts that notebooks share. Each takes a tidy table, a claim for the title and a footer, and returns a LabFigure.

Tables of lines and points have the columns `x`, `y`, `series` and `kind`; measured rows may add `p10` and `p90`. `kind` is
measured | recorded | simulated (solid, filled markers), predicted (dashed) or article (hollow diamonds).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from pdlab.lab.style import FAINT, INK, MARKERS, PALETTE, PAPER, LabFigure, canvas

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

__all__ = ["chips", "draw_lines", "heat", "latency", "roofline", "serving", "shares", "timeline", "utilization"]


def colours(series: Iterable[str]) -> dict[str, tuple[str, str]]:
    """(colour, marker) of each series in order of appearance; when the colours begin again, each has another marker."""
    names, n = list(dict.fromkeys(series)), len(PALETTE)
    return {name: (PALETTE[i % n], MARKERS[(i + i // n) % len(MARKERS)]) for i, name in enumerate(names)}


def plain_ticks(axis: Any, values: Iterable[float], limit: int = 9) -> None:
    """Ticks at the measured values themselves, or at powers of two where there are too many; as whole numbers."""
    at = sorted(set(values))
    if len(at) > limit:
        low, high = math.ceil(math.log2(at[0])), math.floor(math.log2(at[-1]))
        at = [2.0**k for k in range(low, high + 1, 1 + (high - low) // limit)]
    at_ticks(axis, at)


def at_ticks(axis: Any, values: Sequence[float]) -> None:
    """Ticks at these values and nowhere else, written out."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axis.set_major_locator(FixedLocator(list(values)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(short))


def round_values(low: float, high: float) -> list[float]:
    """Round numbers from `low` to `high` for a logarithmic scale: powers of ten where there are three of them, else more."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7), tuple(range(1, 10))):
        found = [step * 10.0**k for k in decades for step in steps if low <= step * 10.0**k <= high]
        if len(found) >= 3:
            return found
    return _even_values(low, high)  # less than a factor of two or so


def _even_values(low: float, high: float) -> list[float]:
    """A few round numbers at equal distances; the two ends where they are nearly one."""
    from matplotlib.ticker import MaxNLocator

    found = [float(v) for v in MaxNLocator(4, steps=[1, 2, 5, 10]).tick_values(low, high) if low <= v <= high]
    return found if len(found) > 1 else [low, high]


def short(value: float, _: Any = None) -> str:
    """Tick text of a logarithmic axis: 0.02, 2.5, 3, 400, 20,000."""
    return f"{value:,.0f}" if value >= 100 or float(value).is_integer() else f"{value:.3g}"


def _y_scale(ax: Axes, values: pd.Series) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = float(values.min()), float(values.max())
    if low <= 0 or high / low < 4:
        ax.set_ylim(0, high * 1.25)
        return
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0) if high / low < 300 else (1.0,)))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(short))


def draw_lines(ax: Axes, table: pd.DataFrame) -> list[Any]:
    """The series of `table` on `ax`, each kind in its own manner; returns the legend's handles.

    A prediction has its measurement's colour, so one grey dashed entry stands for all of them.
    """
    from matplotlib.lines import Line2D

    look, handles = colours(table["series"]), []
    real = set(table.loc[table["kind"] != "predicted", "series"])
    for (series, kind), rows in table.groupby(["series", "kind"], sort=False):
        colour, marker = look[series]
        rows = rows.sort_values("x")
        if kind == "predicted":
            alone = "_" if len(rows) == 1 else ""  # one point makes no line
            dashed: dict[str, Any] = {"color": colour, "linewidth": 1.5, "marker": alone, "markersize": 12}
            made = ax.plot(rows["x"], rows["y"], "--", label=f"{series}, predicted", **dashed)
        elif kind == "article":
            style: dict[str, Any] = {"markerfacecolor": "none", "markeredgecolor": INK, "markersize": 8, "markeredgewidth": 1.4}
            made = ax.plot(rows["x"], rows["y"], "D", label=f"{series}, article", **style)
        else:
            label = str(series) if kind == "measured" else f"{series}, {kind}"
            made = ax.plot(rows["x"], rows["y"], "-", color=colour, marker=marker, label=label)
            if "p10" in rows and rows["p10"].notna().any():
                ax.fill_between(rows["x"], rows["p10"], rows["p90"], color=colour, alpha=0.18, linewidth=0)
        if kind != "predicted" or series not in real:
            handles += made
    if real and "predicted" in set(table["kind"]):
        handles.append(Line2D([], [], color=FAINT, linestyle="--", marker="", linewidth=1.5, label="predicted"))
    return handles


def latency(
    panels: dict[str, pd.DataFrame],
    *,
    claim: str,
    footer: str,
    xlabel: str,
    ylabel: str,
    size: tuple[float, float] = (8.6, 4.6),
) -> LabFigure:
    """Time against size, one panel a title. Both axes are logarithmic, so a slope of 1 doubles with its input; a panel whose
    times differ by less than four times has a plain axis from 0 instead, so that flat looks flat."""
    figure, axes = canvas(claim, footer, size=size, columns=len(panels))
    for ax, (title, table) in zip(axes[0], panels.items()):
        handles = draw_lines(ax, table)
        ax.set(title=title if len(panels) > 1 else "", xlabel=xlabel, xscale="log")
        plain_ticks(ax.xaxis, table["x"], limit=7)
        _y_scale(ax, table["y"])
        crowded = len(handles) > 3 and ax.get_yscale() == "linear"  # then no corner is free: the legend gets room above
        if crowded:
            ax.set_ylim(top=float(table["y"].max()) * 1.75)
        if len(handles) > 1:
            ax.legend(handles=handles, loc="upper left" if crowded else "best")
    axes[0, 0].set_ylabel(ylabel)
    figure.draw_without_rendering()
    for ax in axes[0]:
        legend = ax.get_legend()
        if legend is not None and ax.get_yscale() == "log" and _covers_line(ax, legend.get_window_extent()):
            low, high = ax.get_ylim()
            ax.set_ylim(low, high * (high / low) ** 0.45)
            ax.legend(handles=legend.legend_handles, loc="upper left")
    return figure


def roofline(points: pd.DataFrame, *, read_bytes_per_s: float, matmul_flops_per_s: float, claim: str, footer: str) -> LabFigure:
    """Achieved FLOP/s over intensity under the measured ceilings.

    `points`: series, intensity (FLOP per byte), flops_per_s, and label ("" for none). Points of a series are joined in order.
    """
    import numpy as np
    from matplotlib.ticker import FuncFormatter

    figure, axes = canvas(claim, footer, size=(8.6, 5.0))
    ax = axes[0, 0]
    ridge = matmul_flops_per_s / read_bytes_per_s
    x = np.geomspace(min(points["intensity"].min(), ridge) / 2.5, max(points["intensity"].max(), ridge) * 2.5, 200)
    ax.plot(x, np.minimum(x * read_bytes_per_s, matmul_flops_per_s) / 1e9, "--", color=INK, marker="", linewidth=1.6)
    ax.axvline(ridge, color=FAINT, linewidth=0.9, linestyle=":")
    labels = []
    for series, (colour, marker) in colours(points["series"]).items():
        rows = points[points["series"] == series]
        ax.plot(rows["intensity"], rows["flops_per_s"] / 1e9, "-", color=colour, marker=marker, linewidth=1.2, label=series)
        for _, row in rows[rows["label"] != ""].iterrows():
            labels.append((row["intensity"], row["flops_per_s"] / 1e9, row["label"], colour))
    ax.set(xscale="log", yscale="log", xlabel="intensity, FLOP per byte that must move", ylabel="achieved, GFLOP/s")
    ax.set_ylim(bottom=points["flops_per_s"].min() / 1e9 / 3, top=matmul_flops_per_s / 1e9 * 2.6)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(FuncFormatter(short))
    text: dict[str, Any] = {"fontsize": 8.5, "color": FAINT}
    ax.text(x[-1], matmul_flops_per_s / 1e9 * 1.15, _rate(matmul_flops_per_s, "FLOP/s") + " matrix product", ha="right", **text)
    low = points["intensity"].median() < ridge  # where the points are: the legend goes to the other side
    side = "right" if low else "left"
    ax.text(ridge, ax.get_ylim()[0] * 1.25, f" ridge: {ridge:,.0f} FLOP/byte ", ha=side, **text)
    slope = f"{_rate(read_bytes_per_s, 'B/s')} read"
    ax.text(x[0], x[0] * read_bytes_per_s / 1e9 * 4.2, slope, ha="left", va="bottom", **text)
    ax.legend(loc="lower right" if low else "upper left")
    _label_apart(figure, ax, labels)
    return figure


def _rate(value: float, unit: str) -> str:
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= factor:
            return f"{value / factor:,.3g} {prefix}{unit}"
    return f"{value:,.3g} {unit}"


def shares(
    table: pd.DataFrame, *, claim: str, footer: str, xlabel: str, ylabel: str = "share, %", mark: float | None = None
) -> LabFigure:
    """Parts of a whole over a logarithmic index, stacked; `table` has one column a part, in percent; `mark` a vertical line."""
    figure, axes = canvas(claim, footer, size=(8.6, 4.4))
    ax = axes[0, 0]
    fills = [colour for colour, _ in colours(table.columns).values()]
    bands = ax.stackplot(table.index, table.to_numpy().T, colors=fills, edgecolor=PAPER, linewidth=0.8)
    ax.set(xscale="log", xlim=(table.index.min(), table.index.max()), ylim=(0, 100), xlabel=xlabel, ylabel=ylabel)
    plain_ticks(ax.xaxis, table.index)
    tops = table.cumsum(axis=1)
    thin = []
    for band, part in zip(bands, table.columns):
        widest = int(table[part].to_numpy()[1:-1].argmax()) + 1  # the ends have no room for a centred word
        height = float(table[part].iloc[widest])
        if height < 9:
            thin.append((band, part))
            continue
        side = "left" if widest < len(table) / 4 else "right" if widest > 3 * len(table) / 4 else "center"
        at = (table.index[widest], float(tops[part].iloc[widest]) - height / 2)
        ax.text(*at, str(part), ha=side, va="center", color=PAPER, fontweight="bold")
    if thin:
        figure.legend([band for band, _ in thin], [part for _, part in thin], loc="outside right center")
    if mark is not None:
        ax.axvline(mark, color=PAPER, linewidth=1.4, linestyle=":")
        side = "right" if mark > table.index.max() / 3 else "left"
        ax.text(mark, 3, f" {mark:,.0f} ", ha=side, va="bottom", color=PAPER, fontweight="bold")
    return figure


def heat(
    table: pd.DataFrame,
    *,
    claim: str,
    footer: str,
    unit: str,
    xlabel: str,
    ylabel: str = "",
    outline: Callable[[float], bool] | None = None,
    size: tuple[float, float] | None = None,
) -> LabFigure:
    """A table as a heat map on a logarithmic scale, every cell with its value; cells for which `outline` holds are framed."""
    import numpy as np
    import seaborn as sns
    from matplotlib.colors import LinearSegmentedColormap, LogNorm
    from matplotlib.patches import Rectangle
    from matplotlib.ticker import FuncFormatter

    rows, columns = table.shape
    figure, axes = canvas(claim, footer, size=size or (max(6.4, 2.6 + 0.82 * columns), 1.7 + 0.36 * rows))
    ax, values = axes[0, 0], table.to_numpy(float)
    shades = LinearSegmentedColormap.from_list("lab", ["#F1F4F2", "#9CC3D5", "#0C79A9", "#0A3A55"])
    low, high = max(float(np.nanmin(values)), 1e-9), max(float(np.nanmax(values)), 2e-9)
    text = np.vectorize(lambda v: "" if np.isnan(v) else f"{v:,.0f}" if v >= 100 else f"{v:.2g}" if v < 1 else f"{v:.1f}")(
        values
    )
    sns.heatmap(
        table, ax=ax, annot=text, fmt="", cmap=shades, norm=LogNorm(low, high), linewidths=1.2, linecolor=PAPER,
        annot_kws={"fontsize": 9}, cbar_kws={"label": unit, "pad": 0.02},
    )  # fmt: skip
    scale = ax.collections[0].colorbar.ax.yaxis
    plain_ticks(scale, round_values(low, high))
    scale.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 10 else f"{value:.2g}"))
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.grid(False)
    ax.tick_params(axis="x", rotation=0, length=0)
    ax.tick_params(axis="y", rotation=0, length=0)
    for (i, j), value in np.ndenumerate(values):
        if outline is not None and not np.isnan(value) and outline(value):
            ax.add_patch(Rectangle((j + 0.03, i + 0.05), 0.94, 0.9, fill=False, edgecolor=PALETTE[1], linewidth=2.4))
    return figure


def utilization(
    table: pd.DataFrame, *, claim: str, footer: str, xlabel: str, limit: tuple[float, str] | None = None
) -> LabFigure:
    """Shares of several ceilings as lines over a logarithmic x, in percent; `limit` = (value, words) is a line across."""
    figure, axes = canvas(claim, footer, size=(8.6, 4.4))
    ax = axes[0, 0]
    handles = draw_lines(ax, table)
    if limit is not None:
        handles.append(ax.axhline(limit[0], color=INK, linewidth=1.2, linestyle=":", label=limit[1]))
    figure.legend(handles=handles, loc="outside right center")  # the lines cross everywhere: no corner of the axes is free
    ax.set(xscale="log", xlabel=xlabel, ylabel="share of the measured ceiling, %")
    ax.set_ylim(0, max(105.0, float(table["y"].max()) * 1.08))
    plain_ticks(ax.xaxis, table["x"])
    return figure


def timeline(
    prompt_tokens: int, first_s: float, gaps_s: Sequence[float], texts: Sequence[str], *, claim: str, footer: str
) -> LabFigure:
    """One answer on the clock: the prefill as one block, then a block a token with its text, as wide as it took."""
    starts = [first_s]
    for gap in gaps_s:
        starts.append(starts[-1] + gap)
    figure, axes = canvas(claim, footer, size=(8.6, 2.6))
    ax = axes[0, 0]
    ax.broken_barh([(0, first_s * 1e3)], (0, 1), facecolors=PALETTE[0], edgecolor=PAPER)
    ax.broken_barh([(a * 1e3, gap * 1e3) for a, gap in zip(starts, gaps_s)], (0, 1), facecolors=PALETTE[1], edgecolor=PAPER)
    for start, gap, text in zip(starts, gaps_s, texts[1:]):
        at = ((start + gap * 0.35) * 1e3, 1.08)
        ax.text(*at, text.strip(), ha="left", va="bottom", fontsize=7.5, rotation=52, rotation_mode="anchor")
    ax.text(first_s * 500, 0.5, f"prefill\n{prompt_tokens}", ha="center", va="center", fontsize=8, color=PAPER)
    end = starts[-1] * 1e3
    ax.set(xlabel="time since the request, ms", xlim=(0, end * 1.03), ylim=(0, 2.3), yticks=[])
    ax.grid(False)
    ax.spines["left"].set_visible(False)
    return figure


def _short_name(name: str) -> str:
    """A driver's name without maker, socket and memory type: NVIDIA A100-SXM4-40GB is A100 40GB."""
    return re.sub(r"NVIDIA |GeForce |Tesla |\(R\)|\(TM\)| HBM\w*|-SXM\d?(?=-)", "", name).replace("-", " ")[:24]


def _covers_line(ax: Axes, box: Any) -> bool:
    """Whether a box in pixels lies over a line of the axes, or over a marker where none joins them; dotted lines, which only
    guide the eye, do not count."""
    import numpy as np

    along = np.linspace(0, 1, 60)[:, None]
    for line in (line for line in ax.lines if line.get_linestyle() != ":"):
        path = line.get_transform().transform(np.column_stack(line.get_data()))
        if line.get_linestyle() != "None" and len(path) > 1:
            path = np.concatenate([start + along * (end - start) for start, end in itertools.pairwise(path)])
        if ((path > (box.x0, box.y0)) & (path < (box.x1, box.y1))).all(axis=1).any():
            return True
    return False


def _label_apart(figure: LabFigure, ax: Axes, points: Sequence[tuple[float, float, str, str]]) -> None:
    """A label beside each point (x, y, words, colour), on the first of several sides where it covers neither a marker nor an
    earlier label, nor, where there is such a side, a line."""
    from matplotlib.transforms import Bbox

    figure.draw_without_rendering()  # the layout decides where a point is
    pixel = figure.dpi / 72
    spots = [ax.transData.transform(point[:2]) for point in points]
    taken = [Bbox.from_extents(px - 6 * pixel, py - 6 * pixel, px + 6 * pixel, py + 6 * pixel) for px, py in spots]
    near = ((7, -4), (-7, 4), (-7, -4), (7, 4), (0, 9), (0, -9))
    sides = [*near, *((2.4 * dx, 2.4 * dy) for dx, dy in near)]
    tries = [(side, True) for side in sides] + [(side, False) for side in sides]
    for px, py, name, colour in sorted(points):
        for (dx, dy), clear in tries:
            at: dict[str, Any] = {
                "ha": "left" if dx > 0 else "right" if dx < 0 else "center",
                "va": "bottom" if dy > 0 else "top",
            }
            label = ax.annotate(name, (px, py), (dx, dy), textcoords="offset points", fontsize=8.5, color=colour, **at)
            box = label.get_window_extent()
            if not any(box.overlaps(other) for other in taken) and not (clear and _covers_line(ax, box)):
                break
            if ((dx, dy), clear) != tries[-1]:
                label.remove()
        taken.append(box)


def chips(table: pd.DataFrame, *, claim: str, footer: str) -> LabFigure:
    """Devices by bandwidth (x) and matrix rate (y); equal ridges lie on the dotted diagonals.

    `table`: name, bytes_per_s, flops_per_s, source ("measured": filled; anything else, as "data sheet": hollow).
    """
    from matplotlib.ticker import FuncFormatter

    figure, axes = canvas(claim, footer, size=(8.6, 4.8))
    ax = axes[0, 0]
    x, y = table["bytes_per_s"] / 1e9, table["flops_per_s"] / 1e12
    low, high = x.min() / 2.2, x.max() * 4
    for ridge in (1, 10, 100, 1000):
        ax.plot([low, high], [low * ridge / 1e3, high * ridge / 1e3], ":", color=FAINT, marker="", linewidth=0.9)
    ax.set(xscale="log", yscale="log", xlim=(low, high), ylim=(y.min() / 3, y.max() * 4))
    for (source, rows), (colour, marker) in zip(table.groupby("source", sort=True), zip(PALETTE, MARKERS)):
        fill = colour if source == "measured" else "none"
        rx, ry = rows["bytes_per_s"] / 1e9, rows["flops_per_s"] / 1e12
        ax.plot(rx, ry, marker, color=colour, markerfacecolor=fill, markersize=8, markeredgewidth=1.5, label=str(source))
    _label_apart(figure, ax, [(px, py, _short_name(str(name)), INK) for px, py, name in zip(x, y, table["name"])])
    for ridge in (1, 10, 100, 1000):
        at_x = min(high * 0.92, ax.get_ylim()[1] * 1e3 / ridge * 0.6)
        ax.text(at_x, at_x * ridge / 1e3 * 1.12, f"{ridge:,} FLOP/byte", fontsize=8, color=FAINT, ha="right", va="bottom")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(FuncFormatter(short))
    ax.set(xlabel="memory, GB/s", ylabel="matrix products, TFLOP/s")
    ax.legend(loc="upper left")
    return figure


def serving(steps: pd.DataFrame, *, claim: str, footer: str) -> LabFigure:
    """A trace of steps (ServeResult.steps): what each step carried, and how many requests ran and waited, over time."""
    figure, axes = canvas(claim, footer, size=(8.6, 4.6), rows=2, sharex=True, height_ratios=(1.2, 1))
    top, below = axes[:, 0]
    top.bar(steps["t_start"], steps["prefill_tokens"], steps["t_end"] - steps["t_start"], align="edge", color=PALETTE[0])
    top.set_ylabel("prompt tokens a step")
    top.set_ylim(0, max(1.0, float(steps["prefill_tokens"].max())) * 1.1)
    for column, label, colour in (("decode_count", "decoding", PALETTE[1]), ("waiting", "waiting", PALETTE[2])):
        below.plot(steps["t_end"], steps[column], drawstyle="steps-pre", color=colour, marker="", label=label)
    below.set(xlabel="time, s", ylabel="requests", ylim=(0, None))
    below.legend(loc="upper right")
    return figure
