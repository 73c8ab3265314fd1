"""The figures of notebooks about decoding: the way to the wall, operations beside their floors, layouts, a sampler's proof."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.lines import Line2D

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
    line is the roofline, the finish. A row means the same in all panels; where one has no value for it, the row says so.
    """
    names = list(dict.fromkeys([n for steps, _, _ in panels.values() for n in steps]))
    names += list(dict.fromkeys([n for _, _, others in panels.values() for n in others]))
    figure, axes = canvas(claim, footer, size=(9.2, 1.5 + 0.36 * len(names)), columns=len(panels))
    for ax, (title, (steps, finish, others)) in zip(axes[0], panels.items()):
        before = 0.0
        for i, name in enumerate(names):
            value = steps.get(name, others.get(name))
            if value is None:
                ax.text(0, i, " not recorded", va="center", fontsize=8.5, color=FAINT)
                continue
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
        ax.set_yticks(range(len(names)), names if ax is axes[0, 0] else [""] * len(names))
        ax.set_ylim(len(names) - 0.4, -0.6)
        ax.grid(axis="y", visible=False)
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
        ax.set(title=title, ylim=(0, 1.42 * float(table.max().max())))  # room for the legend, wherever the high bars are
        ax.grid(axis="x", visible=False)
        ax.legend(loc="upper left", fontsize=8)
    axes[0, 0].set_ylabel(f"{'ms' if large else 'us'} a step")
    return figure


def bars(
    table: pd.DataFrame, *, claim: str, footer: str, ylabel: str, xlabel: str = "", finish: float | None = None,
    words: str = "read ceiling",
) -> LabFigure:  # fmt: skip
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
    ax.set(xlabel=xlabel, ylabel=ylabel, ylim=(0, 1.12 * max(float(np.nanmax(table.to_numpy(float))), finish or 0.0)))
    ax.grid(axis="x", visible=False)
    figure.legend(*ax.get_legend_handles_labels(), loc="outside right center", fontsize=8.5)
    return figure


def addresses(orders: Mapping[str, np.ndarray], *, claim: str, footer: str) -> LabFigure:
    """Where elements lie. `orders`: layout -> addresses [tokens, heads, elements] of a small cache.

    Each layout is a map, a column a token and a row an element of a head, whose colour is the address. A thick stroke joins
    neighbours in memory that belong to one token and one head, a thin one is a jump to another token or head.
    """
    figure, axes = canvas(claim, footer, size=(9.2, 4.4), columns=len(orders))
    shown: Any = None
    for ax, (name, at) in zip(axes[0], orders.items()):
        tokens, heads, dim = at.shape
        field = at.reshape(tokens, heads * dim).T
        shown = ax.imshow(field, cmap="YlGnBu", interpolation="nearest", aspect="auto", alpha=0.6)
        row, token = np.unravel_index(np.argsort(field, axis=None), field.shape)
        together = (token[1:] == token[:-1]) & (row[1:] // dim == row[:-1] // dim) & (abs(np.diff(row)) == 1)
        for i, near in enumerate(together):
            look = {"linewidth": 3.0, "zorder": 3, "solid_capstyle": "round"} if near else {"linewidth": 0.5, "alpha": 0.6}
            ax.plot(token[i : i + 2], row[i : i + 2], color=INK if near else RUST, marker="", **look)
        for border in range(1, heads):
            ax.axhline(border * dim - 0.5, color=FAINT, linewidth=0.9)
        ax.set_yticks([(head + 0.5) * dim - 0.5 for head in range(heads)], [str(head) for head in range(heads)])
        ax.tick_params(axis="y", length=0)
        ax.set(title=name.replace("_", " "), xlabel="token", xticks=range(0, tokens, max(1, tokens // 4)))
        ax.grid(False)
        if ax is not axes[0, 0]:
            ax.set_yticklabels([])
    axes[0, 0].set_ylabel(f"head, {dim} elements each")
    figure.colorbar(shown, ax=list(axes[0]), label="address, in elements", pad=0.015, fraction=0.03)
    strokes = [Line2D([], [], color=INK, linewidth=3.0), Line2D([], [], color=RUST, linewidth=0.8)]
    words = ["side by side in memory, one token and head", "a jump to another token, head or piece"]
    figure.legend(strokes, words, loc="outside lower right", ncols=2, fontsize=8.5, frameon=False)
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
