"""What the batching and scheduling notebooks draw: padding as area, one queue as a Gantt chart, tails over load."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pdlab.lab.figures import at_ticks, colours, draw_lines, round_values
from pdlab.lab.style import BLUE, FAINT, GOLD, INK, PAPER, RUST, LabFigure, canvas

if TYPE_CHECKING:
    import pandas as pd

    from pdlab.bench.suites import Context
    from pdlab.lab.session import Lab
    from pdlab.workloads.replay import Ended, Outcome

WAYS = {
    "static": "static", "article": "the article's", "article_mended": "mended", "continuous": "continuous",
    "continuous_chunked": "continuous, chunked", "one_at_a_time": "one at a time",
}  # fmt: skip


def context(lab: Lab, experiment: str, budget_s: float) -> Context:
    """What a bench suite works with, for this notebook: its machine, its seed, its recorder, and a budget."""
    from pdlab.bench.suites import Context

    return Context(lab.machine, lab.profile, lab.recorder(experiment), budget_s, lab.seed, say=lambda line: None)


def table_of(rows: Iterable[Any]) -> pd.DataFrame:
    """Measurement rows as a table with one column a parameter."""
    from pdlab.bench.records import frame

    return frame(rows)


# ---- padding


def cut(lengths: Sequence[int], budget: int) -> dict[str, list[list[int]]]:
    """Prompt lengths of each batch, cut in the order given, by the article's rule, and by the mended one."""
    from types import SimpleNamespace

    from pdlab.scheduler.static_batching import Static, article_batches, mended_batches

    queue: Any = [SimpleNamespace(num_tokens=n, request_id=i) for i, n in enumerate(lengths)]
    arrival, at = [], 0
    while at < len(queue):
        arrival.append(Static().next_batch(queue[at:], budget))
        at += len(arrival[-1])
    ways = {"by arrival": arrival, "the article's": article_batches(queue, 2 * budget), "mended": mended_batches(queue, budget)}
    return {name: [[r.num_tokens for r in batch] for batch in batches] for name, batches in ways.items()}


def padding_share(batches: Sequence[Sequence[int]]) -> float:
    """Percent of the computed prompt tokens that are padding, for batches of prompt lengths."""
    computed = sum(len(b) * max(b) for b in batches if b)
    return 100 * (computed - sum(sum(b) for b in batches)) / computed


def padding_areas(ways: Mapping[str, Sequence[Sequence[int]]], *, claim: str, footer: str) -> LabFigure:
    """One panel a way of forming batches: a bar a request, its own tokens and what pads it to the longest of its batch."""
    rows = max(sum(len(b) + 1 for b in batches) for batches in ways.values())
    figure, axes = canvas(claim, footer, size=(8.6, min(6.4, 1.6 + 0.09 * rows)), columns=len(ways), sharex=True)
    for ax, (name, batches) in zip(axes[0], ways.items()):
        y = 0
        for batch in batches:
            longest = max(batch)
            for tokens in batch:
                ax.barh(y, tokens, height=0.9, color=BLUE)
                ax.barh(y, longest - tokens, left=tokens, height=0.9, color=RUST, alpha=0.55)
                y += 1
            y += 1
        ax.set(title=f"{name}: {padding_share(batches):.0f} %", xlabel="tokens", yticks=[])
        ax.set_ylim(y, -1)
        ax.grid(axis="y", visible=False)
    axes[0, 0].set_ylabel("requests, batch by batch")
    axes[0, -1].legend([_patch(BLUE, 1.0), _patch(RUST, 0.55)], ["prompt", "padding"], loc="upper right")
    return figure


def _patch(colour: str, alpha: float) -> Any:
    from matplotlib.patches import Patch

    return Patch(facecolor=colour, alpha=alpha)


# ---- one queue on the clock


def _by_arrival(outcome: Outcome) -> list[Ended]:
    return sorted(outcome.requests or [], key=lambda r: (r.arrival_s, r.request_id))


def gantt(outcomes: Mapping[str, Outcome], *, claim: str, footer: str, at: float | None = None) -> LabFigure:
    """One panel a policy, one row a request in order of arrival: it waits (line), its prompt is computed, it answers.

    `at`: only what had happened by then, in seconds.
    """
    n = max(len(o.requests or []) for o in outcomes.values())
    end = max(r.finish_s for o in outcomes.values() for r in o.requests or [])
    columns = len(outcomes) if len(outcomes) <= 3 else 2
    rows = -(-len(outcomes) // columns)
    figure, axes = canvas(
        claim, footer, size=(8.6, 1.4 + rows * (0.6 + 0.13 * n)), rows=rows, columns=columns, sharex=True, sharey=True
    )
    until = end if at is None else at
    for ax, (name, outcome) in zip(axes.flat, outcomes.items()):
        for y, r in enumerate(_by_arrival(outcome)):
            admitted = r.finish_s if r.admitted_s is None else r.admitted_s
            first = r.finish_s if r.first_token_s is None else r.first_token_s
            for start, stop, colour, width in (
                (r.arrival_s, admitted, FAINT, 1.2),
                (admitted, first, RUST if r.kind == "long" else BLUE, 6.0),
                (first, r.finish_s, GOLD, 6.0),
            ):
                if start < min(stop, until):
                    ax.plot([start, min(stop, until)], [y, y], color=colour, linewidth=width, marker="", solid_capstyle="butt")
        if at is not None:
            ax.axvline(at, color=INK, linewidth=1.0, linestyle=":")
        ax.set(title=name, xlim=(0, end * 1.02), yticks=[])
        ax.set_ylim(n + 2.5, -1)  # room for the legend
        ax.grid(axis="y", visible=False)
    for ax in axes.flat[len(outcomes) :]:
        ax.set_visible(False)
    for ax in axes[-1]:
        ax.set_xlabel("seconds")
    for ax in axes[:, 0]:
        ax.set_ylabel("requests by arrival")
    from matplotlib.lines import Line2D

    long = any(r.kind == "long" for o in outcomes.values() for r in o.requests or [])
    keys = [(FAINT, 1.2, "waits"), (BLUE, 6.0, "prompt"), (GOLD, 6.0, "answer")]
    keys += [(RUST, 6.0, "long prompt")] if long else []
    handles = [Line2D([], [], color=colour, linewidth=width, marker="") for colour, width, _ in keys]
    last = axes.flat[len(outcomes) - 1]
    last.legend(handles, [label for _, _, label in keys], loc="lower right", ncols=len(keys), fontsize=8, handlelength=1.2)
    return figure


def waits(outcomes: Mapping[str, Outcome]) -> pd.DataFrame:
    """Seconds to the first token by policy: median, worst chat, the long one, and the mean over all."""
    import pandas as pd

    def row(outcome: Outcome) -> dict[str, float]:
        first = [(r.kind, r.first_token_s - r.arrival_s) for r in outcome.requests or [] if r.first_token_s is not None]
        chats = sorted(t for kind, t in first if kind != "long")
        long = [t for kind, t in first if kind == "long"]
        return {
            "chats, median": chats[len(chats) // 2],
            "chats, worst": chats[-1],
            "long prompts, worst": max(long, default=float("nan")),
            "never ran": sum(r.first_token_s is None for r in outcome.requests or []),
        }

    table = pd.DataFrame({name: row(o) for name, o in outcomes.items()}).T
    return table.astype({"never ran": int}).rename_axis("seconds to the first token")


# ---- lines over a plain axis


def over_load(
    panels: Mapping[str, pd.DataFrame],
    *,
    claim: str,
    footer: str,
    xlabel: str,
    ylabel: str,
    mark: tuple[float, str] | None = None,
    log: bool = True,
) -> LabFigure:
    """Lines (tables with x, y, series, kind; see figures) over a plain x axis, one panel a title; `mark` a level with words."""
    figure, axes = canvas(claim, footer, size=(8.6, 4.6), columns=len(panels))
    for ax, (title, table) in zip(axes[0], panels.items()):
        handles = draw_lines(ax, table)
        if len(handles) > 1:
            ax.legend(handles=handles, loc="best")
        ax.set(title=title if len(panels) > 1 else "", xlabel=xlabel)
        if log:
            ax.set_yscale("log")
            at_ticks(ax.yaxis, round_values(*ax.get_ylim()))
        else:
            low, high = min(0.0, float(table["y"].min())), float(table["y"].max())
            ax.set_ylim(low - 0.06 * (high - low), high + 0.08 * (high - low))
        if len(set(table["x"])) <= 8:
            ax.set_xticks(sorted(set(table["x"])))
            ax.set_xticklabels([f"{x:g}" for x in sorted(set(table["x"]))])
        if mark is not None:
            ax.axhline(mark[0], color=INK, linewidth=1.0, linestyle=":", label=mark[1])
            ax.legend(loc="upper left", fontsize=8.5)
    axes[0, 0].set_ylabel(ylabel)
    return figure


def lines(table: pd.DataFrame, x: str, y: str, series: str, kind: str = "measured") -> pd.DataFrame:
    """A table's columns under the names that charts use."""
    out = table.rename(columns={x: "x", y: "y", series: "series"})[["x", "y", "series"]].copy()
    out["kind"] = kind
    return out


def agreement(
    predicted: Sequence[float], measured: Sequence[float], mixed: Sequence[bool], *, claim: str, footer: str
) -> LabFigure:
    """Step times, predicted before they ran against measured, in ms; the diagonal is a perfect guess."""
    figure, axes = canvas(claim, footer, size=(8.6, 4.8))
    ax = axes[0, 0]
    for chosen, label in ((False, "decodes alone"), (True, "with prompt tokens")):
        at = [i for i, m in enumerate(mixed) if bool(m) is chosen]
        colour, marker = colours(["decodes alone", "with prompt tokens"])[label]
        x, y = [1e3 * measured[i] for i in at], [1e3 * predicted[i] for i in at]
        ax.plot(x, y, marker, color=colour, markersize=4, alpha=0.5, markeredgecolor=PAPER, markeredgewidth=0.3, label=label)
    low, high = 1e3 * min(*measured, *predicted), 1e3 * max(*measured, *predicted)
    low, high = low / 1.1, high * 1.1
    ax.plot([low, high], [low, high], "--", color=INK, marker="", linewidth=1.2, label="a perfect guess")
    ax.set(xscale="log", yscale="log", xlabel="measured, ms", ylabel="predicted before the step, ms")
    ax.set(xlim=(low, high), ylim=(low, high))
    for axis in (ax.xaxis, ax.yaxis):
        at_ticks(axis, round_values(low, high))
    ax.legend(loc="upper left")
    return figure


# ---- what was recorded of the serving suites, in words and small tables


def recorded_tails(rows: pd.DataFrame, load: float, over: str = "fcfs", of: str = "deadline") -> list[str]:
    """A sentence for each run of a workload: P99 to the first token at `load` under two policies, and their ratio.

    `rows`: of scheduling_mixed_load, as Lab.measurements gives them.
    """
    at = rows[(rows["metric"] == "ttft") & (rows["quantile"] == 99) & (rows["load"] == load)]
    said = []
    for (workload, kind, model, _), part in at.groupby(["workload", "kind", "model", "run_id"]):
        ms = part.groupby("variant")["median"].last()
        if {over, of} <= set(ms.index):
            where = f"{workload}, {model}, {kind} {str(part['time_utc'].max())[:10]}"
            said.append(f"{where}: {ms[over]:,.0f} ms by {over}, {ms[of]:,.0f} ms by {of}, {ms[over] / ms[of]:.1f} times")
    return said


def recorded_prices(rows: pd.DataFrame) -> pd.DataFrame:
    """Mean error of the estimator's step times in percent: a row a kind of number and a held-out load, a column a variant.

    `rows`: of estimator_error.
    """
    chosen = rows[rows["metric"] == "mape"]
    table = chosen.pivot_table(index=["kind", "workload", "load"], columns="variant", values="median", aggfunc="last")
    return table.rename_axis(columns="mean error, %")


def recorded_trust(rows: pd.DataFrame, within: float = 5.0) -> pd.DataFrame:
    """How far the simulator's P99 lie from the real engine's: a row a kind of number, workload and load.

    `rows`: of simulator_error. Columns: how many P99 there are (three quantities under each policy), how many of them are off
    by at most `within` percent, the median of the absolute errors, and the largest, with what it is of.
    """
    import pandas as pd

    tails = rows[(rows["metric"] == "error") & (rows["quantile"] == 99)]
    found = {}
    for where, part in tails.groupby(["kind", "workload", "load"]):
        error = part["median"].abs()
        worst = part.loc[error.idxmax()]
        found[where] = {
            "P99 compared": len(part),
            f"within {within:g} %": int((error <= within).sum()),
            "median error, %": round(float(error.median()), 1),
            "largest, %": f"{worst['median']:+.0f} ({worst['variant']}, {worst['quantity']})",
        }
    table = pd.DataFrame(found).T
    table.index = table.index.set_names(["kind", "workload", "load"])
    return table
