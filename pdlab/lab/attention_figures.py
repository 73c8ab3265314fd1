"""Figures of the notebook about attention: the walk over tiles, fading weights, decode's split, and what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pdlab import __version__
from pdlab.lab import attention_tables as tables
from pdlab.lab.figures import draw_lines, heat, plain_ticks
from pdlab.lab.style import BLUE, FAINT, GOLD, INK, PAPER, RULE, RUST, LabFigure, canvas

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

__all__ = [
    "cares", "crossover", "fading", "floors", "implied", "rates", "recorded_decode", "recorded_prefill", "recorded_tiles",
    "split", "tile_walk",
]  # fmt: skip

_OTHERS = (RUST, "#E0A98F", GOLD)  # of requests after the first, which alone is blue


def _tile(ax: Axes, column: int, row: int, width: int, height: int, **style: Any) -> None:
    from matplotlib.patches import Rectangle

    ax.add_patch(Rectangle((column, row), width, height, **style))


def tile_walk(n: int, block_m: int, block_n: int, shown: int, *, claim: str, footer: str) -> LabFigure:
    """The causal n x n matrix, plain and in tiles. `shown` is the block of queries that is being worked on."""
    figure, axes = canvas(claim, footer, size=(9.2, 5.2), columns=2)
    plain, tiled = axes[0]
    _tile(plain, 0, 0, n, n, facecolor="#9CC3D5", edgecolor=INK, linewidth=1.0)
    plain.fill([0, n, n], [0, 0, n], facecolor=RULE, edgecolor=FAINT, hatch="////", linewidth=0)
    plain.text(0.30 * n, 0.68 * n, f"{n} × {n} scores\nwritten to memory,\nread again", ha="center", va="center")
    plain.text(0.70 * n, 0.28 * n, "masked: computed,\nthen thrown away", ha="center", va="center",
               bbox={"facecolor": PAPER, "edgecolor": "none", "alpha": 0.85, "pad": 2})  # fmt: skip
    order = 0
    for first in range(0, n, block_m):
        for key in range(0, n, block_n):
            whole, none = key + block_n - 1 <= first, key > first + block_m - 1
            here = first // block_m == shown
            colour = PAPER if none else BLUE if here and whole else GOLD if here else "#9CC3D5" if whole else "#E6D48C"
            _tile(tiled, key, first, block_n, block_m, facecolor=colour, edgecolor=RULE if none else INK, linewidth=0.8)
            if here and not none:
                order += 1
                at = (key + block_n / 2, first + block_m / 2)
                tiled.text(*at, str(order), ha="center", va="center", color=PAPER if whole else INK, fontweight="bold")
    y = shown * block_m + block_m / 2
    tiled.annotate("", (n * 1.015, y), (n * 1.1, y), arrowprops={"arrowstyle": "->", "color": INK}, annotation_clip=False)
    tiled.text(n * 1.11, y, "one block:\nq, m, l, o\nstay on\nthe chip", ha="left", va="center", fontsize=8.5)
    tiled.text(0.74 * n, 0.2 * n, "never touched", ha="center", va="center", color=FAINT)
    for ax, title in ((plain, "plain: the whole matrix"), (tiled, f"in tiles of {block_m} queries × {block_n} keys")):
        ax.set(xlim=(0, n), ylim=(n, 0), aspect="equal", title=title, xlabel="key")
        ax.set_xticks(range(0, n + 1, max(block_n, n // 4)))
        ax.set_yticks(range(0, n + 1, max(block_m, n // 4)))
        ax.grid(False)
    plain.set_ylabel("query")
    return figure


def fading(weights: np.ndarray, tile: int, *, claim: str, footer: str) -> LabFigure:
    """Weights of the keys seen so far (columns) after each tile (rows), relative to the running maximum."""
    from matplotlib.colors import LinearSegmentedColormap

    figure, axes = canvas(claim, footer, size=(9.2, 3.4))
    ax = axes[0, 0]
    shades = LinearSegmentedColormap.from_list("lab", ["#F1F4F2", "#9CC3D5", "#0C79A9", "#0A3A55"]).with_extremes(bad=PAPER)
    steps, keys = weights.shape
    image = ax.imshow(np.ma.masked_invalid(weights), aspect="auto", cmap=shades, vmin=0, vmax=1, interpolation="nearest",
                      extent=(0, keys, steps + 0.5, 0.5))  # fmt: skip
    for edge in range(tile, keys, tile):
        ax.axvline(edge, color=FAINT, linewidth=0.6)
    tops = np.nanargmax(np.where(np.isnan(weights), -1, weights), axis=1)
    ax.plot(tops + 0.5, np.arange(1, steps + 1), "v", color=RUST, markersize=7, linestyle="", label="the maximum so far")
    ax.set(xlabel="key", ylabel="after tile", yticks=range(1, steps + 1))
    ax.grid(False)
    ax.legend(loc="upper right")
    figure.colorbar(image, ax=ax, label="weight e^(s − m)", pad=0.015)
    return figure


def rates(
    lines: pd.DataFrame, *, claim: str, footer: str, ylabel: str = "TFLOP/s", xlabel: str = "tokens a prompt"
) -> LabFigure:
    """Throughput over length; `lines` as in lab.figures."""
    figure, axes = canvas(claim, footer, size=(9.2, 4.6))
    ax = axes[0, 0]
    handles = [line for line in draw_lines(ax, lines) if line.get_label() != "predicted"]  # the ceiling's own entry says it
    for line in handles:
        if str(line.get_label()).startswith("the ceiling"):
            line.set_color(INK)
    ax.set(xscale="log", xlabel=xlabel, ylabel=ylabel, ylim=(0, 1.12 * float(lines["y"].max())))
    plain_ticks(ax.xaxis, _doubled(lines["x"]), limit=11)
    figure.legend(handles=handles, loc="outside right center")
    return figure


def _doubled(lengths: Any) -> list[float]:
    """Those that are powers of two, for ticks: others are too near to have a number of their own."""
    return [n for n in lengths if float(np.log2(n)).is_integer()]


def floors(panels: Mapping[str, pd.DataFrame], *, claim: str, footer: str, xlabel: str) -> LabFigure:
    """Least times by length, a panel a machine; both axes logarithmic, so what is n squared has the slope 2."""
    from matplotlib.ticker import NullLocator

    from pdlab.lab.figures import short

    figure, axes = canvas(claim, footer, size=(9.2, 4.4), columns=len(panels))
    for ax, (title, lines) in zip(axes[0], panels.items(), strict=True):
        handles = draw_lines(ax, lines)
        ax.set(title=title, xscale="log", yscale="log", xlabel=xlabel)
        plain_ticks(ax.xaxis, lines["x"], limit=7)
        ax.yaxis.set_major_formatter(short)
        ax.yaxis.set_minor_locator(NullLocator())
        ax.legend(handles=handles, loc="lower right")
    axes[0, 0].set_ylabel("least time, ms")
    return figure


def crossover(panels: Mapping[str, pd.DataFrame], mark: float, *, claim: str, footer: str) -> LabFigure:
    """How many times faster fused attention is than plain over the length, a panel a machine; below 1 plain attention wins.
    `mark`: the length that is claimed."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    figure, axes = canvas(claim, footer, size=(9.2, 4.4), columns=len(panels), sharey=True)
    values = np.concatenate([lines["y"].to_numpy(float) for lines in panels.values()])
    low, high = min(0.5, 0.8 * values.min()), 1.4 * values.max()
    ticks = [t for t in (0.25, 0.5, 1, 2, 5, 10, 20, 50, 100) if low <= t <= high]
    look = {"many prompts": (BLUE, "o"), "one prompt": (RUST, "s"), "one prompt, launched by itself": (GOLD, "^")}
    entries: dict[str, Any] = {}
    for ax, (title, lines) in zip(axes[0], panels.items(), strict=True):
        for line in draw_lines(ax, lines):
            name = str(line.get_label()).removesuffix(", recorded")
            if name in look:  # the same in every panel, whatever was measured there
                line.set(color=look[name][0], marker=look[name][1])
            line.set_label(name + " (GPU: in a graph)" * (name == "one prompt"))
            entries.setdefault(line.get_label(), line)
        ax.axhspan(low, 1, color=RULE, alpha=0.55, linewidth=0)
        ax.axhline(1, color=INK, linewidth=1.1)
        ax.text(float(lines["x"].max()), 0.96, "plain attention wins", ha="right", va="top", color=FAINT, fontsize=9)
        ax.axvline(mark, color=FAINT, linewidth=1.0, linestyle=":")
        ax.set(title=title, xscale="log", yscale="log", ylim=(low, high), xlabel="tokens a prompt")
        ax.set_yticks(ticks)
        ax.yaxis.set_minor_locator(NullLocator())
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        plain_ticks(ax.xaxis, _doubled(lines["x"]), limit=7)
    axes[0, 0].set_ylabel("plain time / fused time")
    order = [name for key in look for name in entries if name.split(" (")[0] == key]
    handles = [entries[name] for name in (*order, *(other for other in entries if other not in order))]
    figure.legend(handles=handles, loc="outside right center", fontsize=8.5)
    return figure


def implied(
    table: pd.DataFrame, guess: float, label: str, shares: Mapping[str, Mapping[int, float]], *, claim: str, footer: str
) -> LabFigure:
    """lab.attention.implied_heads: heads from the plain times beside a guess, and what the fused times then mean as shares of
    the card's matrix rate; `shares` are other cards' measured ones, percent by length."""
    figure, axes = canvas(claim, footer, size=(9.2, 4.2), columns=2)
    left, right = axes[0]
    x = np.arange(len(table))
    hollow: dict[str, Any] = {"markerfacecolor": "none", "markeredgecolor": INK, "markersize": 8, "linestyle": ""}
    left.axhline(guess, color=FAINT, linewidth=1.3, linestyle="--", label=label)
    left.plot(x, table["implied"], "D", label="what the article's plain times imply", **hollow)
    left.set(ylabel="heads × requests × layers", ylim=(0, 1.6 * max(guess, float(table["implied"].max()))))
    left.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    right.plot(x, table["fused_percent"], "D", label="what its Flash times imply", **hollow)
    for (name, of), colour in zip(shares.items(), (BLUE, RUST, GOLD)):
        there = [i for i, n in enumerate(table.index) if n in of]
        right.plot(there, [of[table.index[i]] for i in there], "o", linestyle="-", color=colour, label=name)
    right.set(ylabel="share of the card's matrix rate, %", ylim=(0, 118))
    for ax in (left, right):
        ax.set_xticks(x, [f"{n:,}" for n in table.index])
        ax.set(xlim=(-0.4, len(table) - 0.6), xlabel="tokens a prompt")
        ax.legend(loc="upper left", fontsize=8.5)
    return figure


def cares(errors: pd.DataFrame, broken: pd.DataFrame, *, claim: str, footer: str) -> LabFigure:
    """Errors by hard input (rows) and missing care (columns): pale is rounding, strong is wrong, dark is not a number."""
    figure, axes = canvas(claim, footer, size=(9.2, 1.5 + 0.46 * len(errors)))
    ax = axes[0, 0]
    for i, name in enumerate(errors.index):
        for j, care in enumerate(errors.columns):
            error, share = float(errors.loc[name, care]), float(broken.loc[name, care])
            bad = share > 0
            face = INK if bad else RUST if error > 0.05 else "#E6D48C" if error > 0.01 else "#DCEAE0"
            _tile(ax, j, i, 1, 1, facecolor=face, edgecolor=PAPER, linewidth=2.0)
            words = f"{share:.0f} % not finite" if bad else f"{error:.1e}"
            ax.text(j + 0.5, i + 0.5, words, ha="center", va="center", fontsize=9,
                    color=PAPER if bad or error > 0.05 else INK)  # fmt: skip
    ax.set(xlim=(0, len(errors.columns)), ylim=(len(errors), 0), ylabel="")
    ax.set_xticks(
        np.arange(len(errors.columns)) + 0.5, [c.replace("no_", "without ").replace("_", " ") for c in errors.columns]
    )
    ax.set_yticks(np.arange(len(errors)) + 0.5, [name.replace("_", " ") for name in errors.index])
    ax.tick_params(length=0)
    ax.grid(False)
    for spine in ax.spines.values():
        spine.set_visible(False)
    return figure


def split(work: Mapping[str, Sequence[Sequence[tuple[int, int]]]], *, claim: str, footer: str) -> LabFigure:
    """lab.attention.stretches: each program's reading as a row of pieces, one panel a way to split. The first request is
    blue, the others have three colours by turns."""
    from matplotlib.patches import Patch

    figure, axes = canvas(claim, footer, size=(9.2, 4.8), columns=len(work), sharex=True, sharey=True)
    longest = max(sum(n for _, n in mine) for programs in work.values() for mine in programs)
    for ax, (name, programs) in zip(axes[0], work.items(), strict=True):
        for p, mine in enumerate(programs):
            at = 0
            for b, n in mine:
                ax.broken_barh([(at, n)], (p, 1), facecolors=_OTHERS[b % len(_OTHERS)] if b else BLUE, linewidth=0)
                at += n
        ends = [sum(n for _, n in mine) for mine in programs]
        ax.axvline(max(ends), color=INK, linewidth=1.2, linestyle="--")
        busy = 100 * sum(ends) / (max(ends) * len(ends))
        ax.set(title=f"{name}:\ndone after {max(ends):,} tokens, {busy:.0f} % busy", xlim=(0, longest * 1.03))
        ax.set_ylim(len(programs), 0)
        ax.set_xlabel("tokens read by a program (time)")
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        ax.grid(False)
    axes[0, 0].set_ylabel("program")
    others = max(b for programs in work.values() for mine in programs for b, _ in mine)
    keys = [Patch(color=BLUE, label="the first request")]
    keys += [Patch(color=c, label="") for c in _OTHERS[1:]]
    keys.append(Patch(color=_OTHERS[0], label=f"the {others} others, in three colours by turns"))
    figure.legend(handles=keys, loc="outside lower right", ncols=len(keys), columnspacing=0.6, handletextpad=0.5, fontsize=8.5)
    return figure


# --- of records


def _footer(table: pd.DataFrame, device: str) -> str:
    day = tables.when(table)[:10]
    return f"{device} · bfloat16 · recorded {day} (data/measurements, with provenance) · drawn by pdlab {__version__}"


def recorded_prefill(table: pd.DataFrame, device: str, tokens: int = 16384) -> LabFigure:
    """Throughput over length of this project's kernels and their rivals, 32 heads of 128, prompts of `tokens` in all."""
    usual: dict[str, Any] = {"heads": 32, "kv_heads": 32, "head_dim": 128}
    table = table[table["metric"].isin(["throughput", "floor_throughput"]) & (table["batch"] * table["seq_len"] > tokens * 0.9)]
    own = tables.best(table, ("ours", "ours_plain"))
    names = [own, "cudnn", "fa3", "fa2", "article"]
    lines = tables.lines(table, "throughput", names, "recorded", floor="floor_throughput", **usual)
    of = tables.pivot(table, "throughput", **usual).dropna(subset=[own])
    rivals = [name for name in of if not name.startswith("ours") and name not in tables.PLAIN]
    beside = of[rivals].max(axis=1)
    claim = (
        f"{device}: {tables.NAMES[own]} is ahead of every rival at {int((of[own] >= beside).sum())} of {len(of)} lengths; "
        f"{of[own].max():.0f} TFLOP/s at best, the fastest rival {beside.max():.0f}"
    )
    return rates(lines, claim=claim, footer=_footer(table, device))


def recorded_tiles(table: pd.DataFrame, device: str, head_dim: int = 128) -> LabFigure:
    """The plain Triton kernel's rate by the size of its squares, for each length as a share of the best square's."""
    import pandas as pd

    from pdlab.bench.attention_tiles import QUERIES

    parts, told = {}, []
    for length in QUERIES:
        grid = tables.tile_grid(table, head_dim, length)
        rates = grid.to_numpy()
        m, n = np.unravel_index(np.nanargmax(rates), rates.shape)
        times = float(np.nanmax(rates) / np.nanmin(rates))
        told.append(f"{grid.index[m]:.0f} × {grid.columns[n]:.0f} at {length:,} tokens ({times:.1f}× the worst)")
        for m, row in grid.iterrows():
            parts[f"{length:,} tokens: {int(m)} queries"] = 100 * (
                row / np.nanmax(rates)
            )  # the best is 100 exactly, and framed
    shown = pd.DataFrame(parts).T
    shown.columns = [f"{int(n)}" for n in shown.columns]
    return heat(
        shown, unit="% of the best at that length", xlabel="keys a tile", outline=lambda x: x >= 100,
        claim=f"The best square (queries × keys): {', '.join(told)}", footer=_footer(table, device),
        size=(8.6, 2.2 + 0.42 * len(shown)),
    )  # fmt: skip


def recorded_decode(table: pd.DataFrame, device: str) -> LabFigure:
    """The share of the bandwidth's floor that decode attention reaches, by case and kernel."""
    grid = tables.decode_grid(table)
    mine = grid[tables.NAMES["ours"]].dropna()
    claim = f"Decode attention reaches {mine.min():.0f} to {mine.max():.0f} % of what the memory allows"
    return heat(
        grid, unit="% of the floor", xlabel="", claim=claim, footer=_footer(table, device), size=(8.6, 2.4 + 0.3 * len(grid))
    )
