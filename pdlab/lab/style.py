"""How every figure of the lab looks, and the figure object that shows itself.

Figures are opaque and light with dark text, so they read the same on a light and on a dark page. The five colours keep
their distance for the common colour deficiencies (a test simulates them) and every series also has its own marker.
What a number is shows in how it is drawn: measured is solid, predicted dashed, the article's value a hollow diamond.
"""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

if TYPE_CHECKING:
    import numpy as np

PAPER = "#FCFCFA"
INK = "#1C2430"
FAINT = "#5A6472"  # footers and secondary text; still 5.9 : 1 on PAPER
RULE = "#D9DBD6"  # grid lines carry no information of their own
BLUE, RUST, GOLD, GREEN, PLUM = "#0C79A9", "#AF3913", "#B38C01", "#114D37", "#6B265E"
PALETTE = (BLUE, RUST, GOLD, GREEN, PLUM)
MARKERS = ("o", "s", "^", "D", "v")

_RC: dict[str, Any] = {
    "figure.facecolor": PAPER, "savefig.facecolor": PAPER, "axes.facecolor": PAPER,
    "text.color": INK, "axes.labelcolor": INK, "axes.titlecolor": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.edgecolor": FAINT, "axes.linewidth": 0.8, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "grid.color": RULE, "grid.linewidth": 0.7, "axes.axisbelow": True,
    "font.family": "DejaVu Sans", "font.size": 10, "axes.labelsize": 10, "axes.titlesize": 10.5, "axes.titlelocation": "left",
    "xtick.labelsize": 9, "ytick.labelsize": 9, "legend.fontsize": 9,
    "legend.frameon": True, "legend.facecolor": PAPER, "legend.edgecolor": RULE, "legend.framealpha": 0.92,
    "lines.linewidth": 1.9, "lines.markersize": 5.5, "figure.dpi": 110,
}  # fmt: skip
_DPI = 220  # pixels are doubled and shown at half size, so text is sharp on a dense screen
_SHOWN_DPI = 96


def apply_style() -> None:
    """Sets the defaults for this process, so a reader's own plots match."""
    import matplotlib as mpl
    from cycler import cycler

    for name, value in _RC.items():
        mpl.rcParams[name] = value  # type: ignore[index]
    mpl.rcParams["axes.prop_cycle"] = cycler(color=PALETTE, marker=MARKERS)


class LabFigure(Figure):
    """A figure outside pyplot's registry: shown once, as the value of a cell, with its claim as the text alternative."""

    claim: str = ""

    def png(self, dpi: int = _DPI) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=dpi, metadata={"Title": self.claim, "Software": None})
        return buffer.getvalue()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        width, height = (round(inches * _SHOWN_DPI) for inches in self.get_size_inches())
        shown = {"width": width, "height": height, "alt": self.claim}
        return {"image/png": self.png(), "text/plain": f"Figure: {self.claim}"}, {"image/png": shown}

    def texts_outside(self, slack: float = 1.0) -> list[str]:
        """Text that is not wholly inside the figure; empty when nothing is clipped. `slack` is in pixels."""
        from matplotlib.text import Text

        self.canvas.draw()
        renderer, frame = self.canvas.get_renderer(), self.bbox  # type: ignore[attr-defined]
        undrawn = set()  # labels of ticks beyond the axis' limits exist, but are not drawn
        for axis in (axis for ax in self.axes for axis in (ax.xaxis, ax.yaxis)):
            low, high = sorted(axis.get_view_interval())
            ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
            undrawn |= {t for tick in ticks if not low <= tick.get_loc() <= high for t in (tick.label1, tick.label2)}
        outside = []
        for text in self.findobj(Text):
            if text in undrawn or not text.get_visible() or not text.get_text().strip():
                continue
            box = text.get_window_extent(renderer)
            fits = box.x0 >= -slack and box.y0 >= -slack and box.x1 <= frame.width + slack and box.y1 <= frame.height + slack
            if not fits:
                outside.append(text.get_text())
        return outside


def _glued(text: str) -> str:
    """No-break spaces between a number and its unit, around an equals sign, and in "at 32" and "3 of 12"."""
    units = r"(?<=\d) (?=(?:%|ms|us|s|GB|MB|TB|tokens)(?:\W|$))"
    return re.sub(rf"{units}| (?==)|(?<==) |(?<=\bat) (?=\d)|(?<=\bof) (?=\d)", "\N{NO-BREAK SPACE}", " ".join(text.split()))


def _wrapped(figure: LabFigure, text: str, **font: Any) -> str:
    """`text` broken into lines that fit the figure's width, measured with the font that will draw it."""
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    probe = figure.text(0, 0, "", **font)
    room = figure.bbox.width * 0.955  # small text is up to two per cent wider at another resolution
    lines: list[str] = []
    for word in _glued(text).split(" "):
        longer = f"{lines[-1]} {word}" if lines else word
        probe.set_text(longer)
        if lines and probe.get_window_extent(renderer).width <= room:
            lines[-1] = longer
        else:
            lines.append(word)
    probe.remove()
    return "\n".join(lines)


def canvas(
    claim: str, footer: str = "", *, size: tuple[float, float] = (8.6, 4.6), rows: int = 1, columns: int = 1, **subplots: Any
) -> tuple[LabFigure, np.ndarray]:
    """A figure whose title states `claim`, and its axes as a [rows, columns] array; `footer` says what its numbers are."""
    apply_style()
    figure = LabFigure(figsize=size, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.08)  # type: ignore[union-attr, call-arg]
    FigureCanvasAgg(figure)
    figure.claim = " ".join(claim.split())
    title = {"fontsize": 12.5, "fontweight": "bold"}
    figure.suptitle(_wrapped(figure, figure.claim, **title), x=0.012, ha="left", color=INK, **title)
    if footer:
        note = {"fontsize": 7.5}
        figure.supxlabel(_wrapped(figure, footer, **note), x=0.012, ha="left", color=FAINT, **note)
    axes = figure.subplots(rows, columns, squeeze=False, **subplots)
    return figure, axes
