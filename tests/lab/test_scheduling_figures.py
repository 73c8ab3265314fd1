"""The batching and scheduling notebooks' helpers: padding counted right, charts that clip nothing."""

import pandas as pd
import pytest

from pdlab.core.config import EngineConfig
from pdlab.lab import scheduling
from pdlab.workloads import generators as g
from pdlab.workloads.replay import simulate
from pdlab.workloads.workload import Item, Workload


def test_cuts_keep_every_length_and_sorting_pads_less():
    lengths = [5, 300, 7, 280, 9, 310, 4, 2]
    ways = scheduling.cut(lengths, 640)
    assert set(ways) == {"by arrival", "the article's", "mended"}
    assert all(sorted(n for b in batches for n in b) == sorted(lengths) for batches in ways.values())
    assert scheduling.padding_share(ways["mended"]) < scheduling.padding_share(ways["by arrival"])
    assert scheduling.padding_share([[4, 2], [3]]) == pytest.approx(100 * 2 / 11)


def small_queue():
    chats = g.make("q", 5, g.steady(20), g.fixed(200), g.fixed(4), kind="chat")
    queue = Workload("q", [Item(0.0, prompt_tokens=6000, max_tokens=3, kind="long"), *chats])
    return {p: simulate("llama-1b", EngineConfig(policy=p, max_batch_tokens=512), queue, keep=True) for p in ("fcfs", "sjf")}


def test_charts_keep_their_text_inside_the_figure():
    charts = small_queue()
    lines = pd.DataFrame({"load": [0.5, 0.9] * 2, "ms": [10, 300, 9, 20], "policy": ["fcfs"] * 2 + ["sjf"] * 2})
    table = scheduling.lines(lines, "load", "ms", "policy", "simulated")
    figures = [
        scheduling.padding_areas(scheduling.cut([5, 300, 7, 280], 640), claim="c", footer="f"),
        scheduling.gantt(charts, claim="c", footer="f"),
        scheduling.gantt({"fcfs": charts["fcfs"]}, claim="c", footer="f", at=0.1),
        scheduling.over_load({"P99": table}, claim="c", footer="f", xlabel="x", ylabel="y", mark=(40, "here")),
        scheduling.agreement([1e-3, 2e-3], [1.1e-3, 1.9e-3], [True, False], claim="c", footer="f"),
    ]
    for figure in figures:
        assert figure.texts_outside() == []
        assert figure.png().startswith(b"\x89PNG")


@pytest.mark.parametrize("span", [1.02, 1.3, 4.0, 300.0])
def test_the_scatter_of_prices_has_ticks_and_names_its_diagonal(span: float) -> None:
    took = [8.3e-3, 8.3e-3 * span]
    figure = scheduling.agreement(took[::-1], took, [True, False], claim="c", footer="f")
    ax = figure.axes[0]
    for axis in (ax.xaxis, ax.yaxis):
        low, high = axis.get_view_interval()
        texts = [axis.get_major_formatter()(at) for at in axis.get_majorticklocs() if low <= at <= high]
        assert len(set(texts)) >= 2, texts
    assert "a perfect guess" in [text.get_text() for text in ax.get_legend().get_texts()]
    assert ax.get_xlim() == ax.get_ylim()  # so that the diagonal is one


def test_the_table_of_waits_shows_who_waits_under_which_order():
    table = scheduling.waits(small_queue())
    assert table.loc["sjf", "chats, worst"] < table.loc["fcfs", "chats, worst"]
    assert (table["never ran"] == 0).all()


def serving_rows() -> pd.DataFrame:
    """Rows as Lab.measurements gives them: two runs of one load, and errors of a simulator."""
    day = "2026-11-30T10:00:00Z"
    base = {"time_utc": day, "workload": "w", "model": "m", "kind": "measured", "load": 0.9, "quantile": 99.0}
    rows = [
        {**base, "metric": "ttft", "variant": "fcfs", "median": 1000.0, "run_id": "a"},
        {**base, "metric": "ttft", "variant": "deadline", "median": 250.0, "run_id": "a"},
        {**base, "metric": "ttft", "variant": "fcfs", "median": 9000.0, "run_id": "b"},  # without its rival: no comparison
        {**base, "metric": "mape", "variant": "ours", "median": 2.0, "run_id": "a"},
        {**base, "metric": "mape", "variant": "roofline", "median": 30.0, "run_id": "a"},
        {**base, "metric": "error", "variant": "fcfs", "median": -4.0, "quantity": "ttft", "run_id": "a"},
        {**base, "metric": "error", "variant": "sjf", "median": 40.0, "quantity": "per_token", "run_id": "a"},
    ]
    return pd.DataFrame(rows)


def test_recorded_tails_are_compared_within_a_run():
    assert scheduling.recorded_tails(serving_rows(), 0.9) == [
        "w, m, measured 2026-11-30: 1,000 ms by fcfs, 250 ms by deadline, 4.0 times"
    ]
    assert scheduling.recorded_tails(serving_rows(), 0.5) == []


def test_recorded_errors_are_told_with_their_worst():
    prices = scheduling.recorded_prices(serving_rows())
    assert prices.loc[("measured", "w", 0.9), "ours"] == 2.0
    trust = scheduling.recorded_trust(serving_rows()).loc[("measured", "w", 0.9)]
    assert list(trust) == [2, 1, 22.0, "+40 (sjf, per_token)"]
