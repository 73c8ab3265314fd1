"""Explorers: choose, and a figure of results already computed is drawn again. Nothing here starts work on a device.

Only what ipywidgets 7.7 (Colab) and 8 share is used: Dropdown, SelectionSlider, Image, HTML, boxes and `observe`. Every
explorer also puts a static twin into the cell's own output, because a widget is lost in papermill's copy, on GitHub and in
exported pages; without ipywidgets the twin is all there is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pdlab.core.errors import ConfigError
from pdlab.lab.style import LabFigure

__all__ = ["Choice", "Explorer"]


@dataclass(frozen=True)
class Choice:
    """One control: its label, its options, and the one chosen first. Numbers get a slider, anything else a list."""

    label: str
    options: Sequence[Any]
    start: Any = None

    @property
    def first(self) -> Any:
        return self.options[0] if self.start is None else self.start

    def named(self) -> list[tuple[str, Any]]:
        return [(f"{o:,}" if isinstance(o, int) and not isinstance(o, bool) else str(o), o) for o in self.options]

    @property
    def numeric(self) -> bool:
        return all(isinstance(o, int | float) and not isinstance(o, bool) for o in self.options)


class Explorer:
    """`draw(**chosen) -> LabFigure` behind one control per choice, above its static twin.

    The twin is `twin()` where given (a figure that shows several choices at once), else the figure of the first choices.
    Being the last value of a cell shows both. `draw` must only read tables that are already there.
    """

    def __init__(self, draw: Callable[..., LabFigure], twin: Callable[[], LabFigure] | None = None, **choices: Choice) -> None:
        for name, choice in choices.items():
            if not choice.options or choice.first not in choice.options:
                raise ConfigError(f"choice {name!r} starts with {choice.start!r}", f"use one of: {list(choice.options)}")
        self.draw, self.choices = draw, choices
        self.twin = twin or (lambda: draw(**{name: c.first for name, c in choices.items()}))
        self.box: Any = None

    def controls(self) -> Any:
        """The widget, made once; None where ipywidgets cannot be imported."""
        if self.box is None:
            try:
                import ipywidgets as w
            except ImportError:
                return None
            self.box = self._build(w)
        return self.box

    def _build(self, w: Any) -> Any:
        wide = {"description_width": "initial"}
        made: dict[str, Any] = {}
        for name, choice in self.choices.items():
            kind = w.SelectionSlider if choice.numeric and len(choice.options) > 1 else w.Dropdown
            settings = {"continuous_update": False} if kind is w.SelectionSlider else {}
            layout = w.Layout(width="290px")
            made[name] = kind(
                options=choice.named(), value=choice.first, description=choice.label, style=wide, layout=layout, **settings
            )
        width = round(self.draw(**{n: c.first for n, c in self.choices.items()}).get_size_inches()[0] * 96)
        image = w.Image(format="png", layout=w.Layout(max_width="100%", width=f"{width}px"))
        said = w.HTML()

        def update(_: Any = None) -> None:
            chosen = {name: control.value for name, control in made.items()}
            try:
                image.value, said.value = self.draw(**chosen).png(), ""
            except Exception as error:  # shown beside the controls: an exception in a callback is lost in some front ends
                said.value = f"<b>{type(error).__name__}</b>: {error}"

        for control in made.values():
            control.observe(update, names="value")
        update()
        flow = w.Layout(flex_flow="row wrap")
        below = w.HTML("<small>Below: the static twin, for copies of this page without a running kernel.</small>")
        return w.VBox([w.HBox(list(made.values()), layout=flow), said, image, below])

    def _ipython_display_(self) -> None:
        from IPython.display import display

        if (box := self.controls()) is not None:
            display(box)
        display(self.twin())
