"""The figures of notebooks about decoding: the way to the wall, operations beside their floors, layouts, a sampler's proof."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from pdlab.lab.style import BLUE, FAINT, GOLD, INK, RUST, LabFigure, canvas

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

__all__ = ["addresses", "bars", "operations", "sampled", "waterfall"]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def waterfall(
    panels: Mapping[str, tuple[Mapping[str, float], float, Mapping[str, float]]], *, claim: str, footer: str,
    predicted: bool = False,
) -> LabFigure:  # fmt: skip
    """The way to the wall. `panels`: title -> (tokens a second after each switch, the wall, others' tokens a second).

    A bar starts where the one above it ended: what it adds is dark, or hatched and dashed where it is `predicted`. The dashed
    line is the roofline, the finish.
    """
    most = max(len(steps) + len(others) for steps, _, others in panels.values())
    figure, axes = canvas(claim, footer, size=(9.2, 1.5 + 0.36 * most), columns=len(panels))
    for ax, (title, (steps, finish, others)) in zip(axes[0], panels.items()):
        before = 0.0
        for i, (name, value) in enumerate([*steps.items(), *others.items()]):
            if name in steps:
                low, high = min(before, value), max(before, value)
                colour = BLUE if value >= before else RUST
                ax.barh(i, low, color=BLUE, alpha=0.12 if predicted else 0.3, height=0.66)
                look: dict[str, Any] = {"color": colour}
                if predicted:
                    look = {"facecolor": "none", "edgecolor": colour, "linestyle": "--", "linewidth": 1.2, "hatch": "///"}
                ax.barh(i, high - low, left=low, height=0.66, **look)
                before = value
            else:
                ax.barh(i, value, facecolor="none", edgecolor=FAINT, height=0.66, linewidth=1.2)
            at = 0.0 if value > 0.7 * finish else value  # where there is no room behind the bar, on its pale part
            ax.text(at, i, f" {_number(value)} · {100 * value / finish:.0f} %", va="center", fontsize=8.5, color=INK)
        ax.axvline(finish, color=INK, linestyle="--", linewidth=1.4)
        ax.set(title=title, xlabel=f"tokens a second; the wall is at {_number(finish)}", xlim=(0, finish * 1.06))
        ax.set_yticks(range(len(steps) + len(others)), [*steps, *others])
        ax.invert_yaxis()
        ax.grid(axis="y", visible=False)
        if ax is not axes[0, 0] and list(steps) == list(next(iter(panels.values()))[0]):
            ax.set_yticklabels([])
    return figure


def operations(panels: Mapping[str, pd.DataFrame], *, claim: str, footer: str) -> LabFigure:
    """Time of each operation beside the time its bytes need. `panels`: title -> microseconds, a row an operation, one column
    `floor`."""
    figure, axes = canvas(claim, footer, size=(9.2, 3.9), columns=len(panels))
    large = max(float(table.max().max()) for table in panels.values()) > 5000
    for ax, (title, table) in zip(axes[0], panels.items()):
        names = [c for c in table.columns if c != "floor"]
        if large:
            table = table / 1e3
        width = 0.8 / len(names)
        at = np.arange(len(table))
        for i, name in enumerate(names):
            left = at - 0.4 + width * (i + 0.5)
            ax.bar(left, table[name], width * 0.92, color=(BLUE, RUST, GOLD)[i % 3], label=str(name).replace("_", " "))
        ax.hlines(
            table["floor"], at - 0.42, at + 0.42, color=INK, linestyle="--", linewidth=1.5, label="floor: bytes / bandwidth"
        )
        words = [str(op).replace("_", "\n", 1).replace("_", " ") for op in table.index]
        ax.set_xticks(at, words, fontsize=7.5)
        ax.set(title=title, ylim=(0, 1.18 * float(table.max().max())))
        ax.grid(axis="x", visible=False)
        ax.legend(loc="upper left", fontsize=8)
    axes[0, 0].set_ylabel(f"{'ms' if large else 'us'} a step")
    return figure


def bars(
    table: pd.DataFrame, *, claim: str, footer: str, ylabel: str, finish: float | None = None, words: str = "read ceiling"
) -> LabFigure:
    """Grouped bars: a group a row, a bar a column; `finish` a dashed line across."""
    figure, axes = canvas(claim, footer, size=(9.2, 3.7))
    ax, at = axes[0, 0], np.arange(len(table))
    width = 0.82 / len(table.columns)
    for i, name in enumerate(table.columns):
        left = at - 0.41 + width * (i + 0.5)
        colour = ("#B9BDB8", BLUE, RUST, GOLD, "#114D37", "#6B265E")[i % 6]
        ax.bar(left, table[name], width * 0.9, color=colour, label=str(name).replace("_", " "))
    if finish is not None:
        ax.axhline(finish, color=INK, linestyle="--", linewidth=1.4, label=words)
    ax.set_xticks(at, [str(i) for i in table.index], fontsize=8.5)
    ax.set(ylabel=ylabel, ylim=(0, 1.12 * max(float(np.nanmax(table.to_numpy(float))), finish or 0.0)))
    ax.grid(axis="x", visible=False)
    figure.legend(*ax.get_legend_handles_labels(), loc="outside right center", fontsize=8.5)
    return figure


def addresses(orders: Mapping[str, np.ndarray], *, claim: str, footer: str, xlabel: str, ylabel: str) -> LabFigure:
    """Where elements lie: each layout as a small map whose colour is the address, and the path through it."""
    figure, axes = canvas(claim, footer, size=(9.2, 3.2), columns=len(orders))
    for ax, (name, at) in zip(axes[0], orders.items()):
        path = np.stack(np.unravel_index(np.argsort(at, axis=None), at.shape))
        ax.imshow(at, cmap="YlGnBu", interpolation="nearest", aspect="auto", alpha=0.55)
        ax.plot(path[1], path[0], color=INK, linewidth=0.8, marker="")
        ax.set(title=name.replace("_", " "), xlabel=xlabel, xticks=[], yticks=[])
        ax.grid(False)
    axes[0, 0].set_ylabel(ylabel)
    return figure


def sampled(exact: np.ndarray, counts: np.ndarray, *, claim: str, footer: str) -> LabFigure:
    """Frequencies of drawn tokens (bars, with the spread that chance allows) over exact probabilities (diamonds), likeliest
    first."""
    figure, axes = canvas(claim, footer, size=(9.2, 3.3))
    ax, n = axes[0, 0], counts.sum()
    order = np.argsort(-exact)
    p, drawn = exact[order], counts[order] / n
    at = np.arange(len(p))
    spread: Any = 2 * np.sqrt(p * (1 - p) / n)
    ax.bar(at, drawn, color=BLUE, width=0.8, label=f"drawn by the race, {n:,.0f} tokens")
    ax.errorbar(at, p, spread, fmt="D", color=INK, markersize=3.5, markerfacecolor="none", linewidth=1.0,
                label="exact softmax, ± two deviations of chance")  # fmt: skip
    _log_if_wide(ax, p)
    ax.set(xlabel="token, likeliest first", ylabel="probability", xlim=(-0.7, len(p) - 0.3))
    ax.grid(axis="x", visible=False)
    ax.legend(loc="upper right")
    return figure


def _log_if_wide(ax: Axes, p: np.ndarray) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    if p.max() / p.min() > 50:
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.yaxis.set_minor_locator(NullLocator())
