"""Figures: legible on any page, for any eye, with nothing clipped."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
import pytest

from pdlab.lab import figures, style

FOOTER = "NVIDIA H200 · bfloat16 · torch 2.11.0+cu130 · pdlab 0.1.0 · measured 2026-11-29 · profile full"
LONG = "A prompt token costs 1.7 ms and a generated one 41 ms: the same products with the same weights, yet twenty times dearer"


def linear(colour: str) -> np.ndarray:
    rgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def contrast(a: str, b: str) -> float:
    """WCAG 2 contrast ratio."""
    light, dark = sorted((linear(c) @ [0.2126, 0.7152, 0.0722] for c in (a, b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


# Machado, Oliveira, Fernandes (2009), severity 1.0
DEFICIENCIES = {
    "none": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def cielab(rgb: np.ndarray) -> np.ndarray:
    to_xyz = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
    t = np.array(to_xyz) @ np.clip(rgb, 0, 1) / [0.95047, 1, 1.08883]
    f = np.where(t > 0.008856, np.cbrt(t), 7.787 * t + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def table(y: object, series: str, kind: str, **more: object) -> pd.DataFrame:
    x = np.array([63, 128, 257, 512, 1024])
    return pd.DataFrame({"x": x, "y": x * 0 + y, "series": series, "kind": kind, **more})


def latency() -> style.LabFigure:
    x = np.array([63, 128, 257, 512, 1024])
    prefill = pd.concat([
        table(x * 1.7, "batch 1", "measured", p10=x * 1.6, p90=x * 1.9),
        table(x * 1.1, "batch 1", "predicted"),
        table(x * 2.2, "batch 1", "article"),
    ])  # fmt: skip
    panels = {"prefill": prefill, "one decode step": table(41.0, "batch 1", "measured")}
    return figures.latency(panels, claim=LONG, footer=FOOTER, xlabel="tokens", ylabel="time, ms")


def roofline() -> style.LabFigure:
    rows = [("prefill", i, 70e9, str(i)) for i in (30, 60, 100)] + [("decode", i, i * 9e9, "") for i in (0.5, 2, 8)]
    points = pd.DataFrame(rows, columns=["series", "intensity", "flops_per_s", "label"])
    return figures.roofline(points, read_bytes_per_s=12e9, matmul_flops_per_s=100e9, claim=LONG, footer=FOOTER)


def shares() -> style.LabFigure:
    n = np.geomspace(128, 131072, 11).round()
    parts = pd.DataFrame({"products": 98 - 97 * n / (n + 6000), "attention": 97 * n / (n + 6000), "norms": 2.0}, index=n)
    return figures.shares(parts, claim=LONG, footer=FOOTER, xlabel="prompt, tokens", mark=6000)


def heat() -> style.LabFigure:
    values = pd.DataFrame(
        np.geomspace(0.02, 400, 21).reshape(3, 7), index=["smollm2-135m", "b", "c"], columns=[2**i for i in range(7)]
    )
    values.iloc[0, 0] = np.nan
    return figures.heat(values, claim=LONG, footer=FOOTER, unit="KV cache, GB", xlabel="batch", outline=lambda v: 7 < v < 9)


def utilization() -> style.LabFigure:
    x = np.array([63, 128, 257, 512, 1024])
    rows = pd.concat([table(x * 0.07, "compute", "measured"), table(80 - x * 0.03, "bandwidth", "measured")])
    return figures.utilization(rows, claim=LONG, footer=FOOTER, xlabel="batch", limit=(30, "the article: under 30 %"))


def timeline() -> style.LabFigure:
    words = [" The", " extraordinarily", "\n", " Paris", "."] * 6
    return figures.timeline(38, 0.12, [0.041] * (len(words) - 1), words, claim=LONG, footer=FOOTER)


def chips() -> style.LabFigure:
    rows = [("AMD EPYC 7B13 64-Core Processor", 2e10, 2e11, "measured"), ("Tesla T4", 3.2e11, 6.5e13, "data sheet")]
    rows += [("NVIDIA A100-SXM4-40GB", 1.55e12, 3.12e14, "data sheet"), ("NVIDIA H200", 4.6e12, 7e14, "measured")]
    return figures.chips(
        pd.DataFrame(rows, columns=["name", "bytes_per_s", "flops_per_s", "source"]), claim=LONG, footer=FOOTER
    )


def serving() -> style.LabFigure:
    t = np.arange(40) * 0.01
    columns = {"t_start": t, "t_end": t + 0.01, "prefill_tokens": np.arange(40) % 7 * 300, "decode_count": 9, "waiting": 2}
    return figures.serving(pd.DataFrame(columns), claim=LONG, footer=FOOTER)


FIGURES = [latency, roofline, shares, heat, utilization, timeline, chips, serving]


@pytest.mark.parametrize("make", FIGURES, ids=lambda f: f.__name__)
def test_no_text_is_clipped(make) -> None:
    assert make().texts_outside() == []


def test_clipped_text_is_found() -> None:
    figure, _ = style.canvas("A claim", FOOTER)
    figure.text(0.95, 0.5, "half of this is beyond the edge")
    assert figure.texts_outside() == ["half of this is beyond the edge"]


@pytest.mark.parametrize("make", FIGURES, ids=lambda f: f.__name__)
def test_every_figure_states_its_claim_and_where_its_numbers_come_from(make) -> None:
    figure = make()
    assert " ".join(figure.get_suptitle().split()) == LONG
    assert " ".join(figure.get_supxlabel().split()) == FOOTER


def test_text_and_lines_stand_out_on_the_figures_own_paper() -> None:
    assert contrast(style.INK, style.PAPER) >= 7
    assert contrast(style.FAINT, style.PAPER) >= 4.5
    assert all(contrast(colour, style.PAPER) >= 3 for colour in style.PALETTE)  # WCAG's floor for graphics


def test_the_paper_is_opaque_so_a_dark_page_does_not_shine_through() -> None:
    import io

    from matplotlib.image import imread

    pixels = imread(io.BytesIO(latency().png(50)))
    assert pixels.shape[2] == 3 or pixels[..., 3].min() == 1.0
    assert np.allclose(pixels[0, 0, :3], [int(style.PAPER[i : i + 2], 16) / 255 for i in (1, 3, 5)], atol=0.01)


def test_no_two_series_look_alike_however_many_there_are() -> None:
    look = figures.colours(f"series {i}" for i in range(12))
    assert len(set(look.values())) == 12


@pytest.mark.parametrize("deficiency", DEFICIENCIES)
def test_colours_stay_apart_for_every_eye(deficiency: str) -> None:
    """CIE76 distance: 2.3 is just noticeable, so 20 is plain to see; shapes of markers differ besides."""
    matrix = np.array(DEFICIENCIES[deficiency])
    seen = [cielab(matrix @ linear(colour)) for colour in style.PALETTE]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) > 20


def test_predicted_is_dashed_and_the_articles_value_is_a_hollow_marker() -> None:
    lines = {line.get_label(): line for line in latency().axes[0].get_lines()}
    assert lines["batch 1"].get_linestyle() == "-"
    assert lines["batch 1"].get_markerfacecolor() != "none"
    assert lines["batch 1, predicted"].get_linestyle() == "--"
    assert lines["batch 1, article"].get_markerfacecolor() == "none"
    assert lines["batch 1, article"].get_linestyle() in ("None", "")


def test_simulated_and_recorded_series_carry_that_word() -> None:
    both = pd.concat([table(3.0, "a", "simulated"), table(2.0, "b", "recorded")])
    figure = figures.latency({"": both}, claim="c", footer=FOOTER, xlabel="x", ylabel="y")
    assert [t.get_text() for t in figure.axes[0].get_legend().get_texts()] == ["a, simulated", "b, recorded"]


def test_one_entry_of_the_legend_stands_for_all_predictions() -> None:
    rows = pd.concat([table(3.0, s, k) for s in ("a", "b", "c") for k in ("measured", "predicted")])
    figure = figures.latency({"": rows}, claim="c", footer=FOOTER, xlabel="x", ylabel="y")
    assert [t.get_text() for t in figure.axes[0].get_legend().get_texts()] == ["a", "b", "c", "predicted"]
    colour = {line.get_label(): line.get_color() for line in figure.axes[0].get_lines()}
    assert colour["b"] == colour["b, predicted"] != colour["a"]
    alone = figures.latency({"": rows[rows.kind == "predicted"]}, claim="c", footer=FOOTER, xlabel="x", ylabel="y")
    shown = [t.get_text() for t in alone.axes[0].get_legend().get_texts()]
    assert shown == ["a, predicted", "b, predicted", "c, predicted"]


def test_flat_times_look_flat() -> None:
    figure = latency()
    steep, flat = figure.axes[:2]
    assert steep.get_yscale() == "log"
    assert flat.get_yscale() == "linear"
    assert flat.get_ylim()[0] == 0


def test_heat_map_frames_exactly_the_cells_asked_for() -> None:
    from matplotlib.patches import Rectangle

    framed = [p for p in heat().axes[0].patches if isinstance(p, Rectangle)]
    values = np.geomspace(0.02, 400, 21)
    assert len(framed) == int(((values > 7) & (values < 9)).sum()) > 0


@pytest.mark.parametrize(("low", "high", "least"), [(0.02, 400, 3), (62, 95, 3), (131, 628, 3), (7.0, 7.5, 2)])
def test_a_heat_maps_colour_bar_has_round_numbers_written_out(low: float, high: float, least: int) -> None:
    table = pd.DataFrame(np.geomspace(low, high, 6).reshape(2, 3))
    drawn = figures.heat(table, claim="c", footer="f", unit="TFLOP/s", xlabel="x")
    drawn.canvas.draw()
    axis = drawn.axes[1].yaxis
    told = [tick.get_text() for tick in (*axis.get_ticklabels(), *axis.get_ticklabels(minor=True)) if tick.get_text()]
    assert len(told) >= least
    assert not any("10^" in text for text in told)


def test_a_figure_shows_itself_at_half_its_pixels_with_its_claim_as_alternative() -> None:
    data, metadata = timeline()._repr_mimebundle_()
    assert data["image/png"].startswith(b"\x89PNG")
    assert data["text/plain"] == f"Figure: {LONG}"
    width = int.from_bytes(data["image/png"][16:20], "big")
    assert metadata["image/png"]["alt"] == LONG
    assert width > 2 * metadata["image/png"]["width"]


def test_an_answer_of_one_token_still_has_a_timeline() -> None:
    assert figures.timeline(3, 0.1, [], ["Yes"], claim="c", footer=FOOTER).texts_outside() == []


def test_no_label_of_the_chips_covers_another_or_a_marker() -> None:
    names = ("NVIDIA H0 80GB", "NVIDIA H1", "NVIDIA H2 PCIe")
    crowd = [(name, 3e12 * (1 + 0.12 * i), 9e14 * (1 - 0.08 * i)) for i, name in enumerate(names)]
    rows = pd.DataFrame([(*row, "measured") for row in crowd], columns=["name", "bytes_per_s", "flops_per_s", "source"])
    far = pd.DataFrame([("A CPU", 2e10, 1e11, "data sheet")], columns=rows.columns)
    figure = figures.chips(pd.concat([rows, far]), claim="c", footer=FOOTER)
    figure.canvas.draw()
    boxes = [t.get_window_extent() for t in figure.axes[0].texts if t.get_text() in {"H0 80GB", "H1", "H2 PCIe", "A CPU"}]
    assert len(boxes) == 4
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    for line in figure.axes[0].lines:
        if line.get_marker() not in ("", "None"):
            spots = figure.axes[0].transData.transform(line.get_xydata())
            assert not any(box.contains(*spot) for box in boxes for spot in spots)


def test_a_crowded_legend_covers_no_measurement() -> None:
    rows = pd.concat([table(y, name, "measured") for y, name in ((3.0, "a"), (2.5, "b"), (2.0, "c"), (1.8, "d"))])
    figure = figures.latency({"": rows}, claim="c", footer=FOOTER, xlabel="x", ylabel="y")
    figure.canvas.draw()
    ax = figure.axes[0]
    box = ax.get_legend().get_window_extent()
    assert not any(box.contains(*spot) for line in ax.lines for spot in ax.transData.transform(line.get_xydata()))


def over(ax: object, box: object) -> list[str]:
    """Labels of the solid and dashed lines of which some of many points lie in the box."""
    found = []
    for line in ax.lines:  # type: ignore[attr-defined]
        if line.get_linestyle() in ("-", "--"):
            x, y = (np.interp(np.linspace(0, 1, 2000), np.linspace(0, 1, len(line.get_xdata())), np.log(values))
                    for values in line.get_data())  # fmt: skip
            at = ax.transData.transform(np.exp(np.column_stack([x, y])))  # type: ignore[attr-defined]
            found += [line.get_label()] * any(box.contains(*point) for point in at)  # type: ignore[attr-defined]
    return found


def test_a_legend_among_lines_of_a_logarithmic_panel_gets_room_above() -> None:
    steps = {
        "llama-1b": ([0.97, 1.85, 1.74, 1.9, 2.4], [0.52, 0.53, 0.54, 0.6, 0.83]),
        "llama-3-8b": ([4.5, 8.0, 8.1, 6.4, 9.4], [3.2, 3.3, 3.4, 3.6, 4.8]),
    }
    parts = [(name, kind, ms) for name, both in steps.items() for kind, ms in zip(("measured", "predicted"), both)]
    lines = pd.concat([table(ms, name, kind) for name, kind, ms in parts])
    figure = figures.latency({"a": lines, "b": lines}, claim="c", footer="f", xlabel="x", ylabel="y")
    figure.canvas.draw()
    for ax in figure.axes:
        assert ax.get_yscale() == "log"
        assert over(ax, ax.get_legend().get_window_extent()) == []
        assert [text.get_text() for text in ax.get_legend().get_texts()] == ["llama-1b", "llama-3-8b", "predicted"]


def test_labels_beside_points_keep_off_the_roof_and_the_lines() -> None:
    """Steps of two models on an H200: the longest prompts lie a few per cent below the roof."""
    rows = [("1b", 12.7, 6.4e12, "16 tokens"), ("1b", 180, 8e13, ""), ("1b", 1193, 5.2e14, "4,096 tokens"),
            ("8b", 15, 1.6e13, "16 tokens"), ("8b", 410, 5.6e14, ""), ("8b", 1780, 6.2e14, "4,096 tokens")]  # fmt: skip
    points = pd.DataFrame(rows, columns=["series", "intensity", "flops_per_s", "label"])
    figure = figures.roofline(points, read_bytes_per_s=4.65e12, matmul_flops_per_s=811e12, claim="c", footer="f")
    figure.canvas.draw()
    (ax,) = figure.axes
    labels = [text for text in ax.texts if "tokens" in text.get_text()]
    assert len(labels) == 4
    assert [over(ax, text.get_window_extent()) for text in labels] == [[]] * 4
