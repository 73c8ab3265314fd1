"""Explorers: over results already there, with what ipywidgets 7.7 and 8 share, never without a static twin."""

from __future__ import annotations

import sys
import types

import pandas as pd
import pytest

from pdlab.core.errors import ConfigError
from pdlab.lab.figures import heat
from pdlab.lab.style import LabFigure
from pdlab.lab.widgets import Choice, Explorer

TABLE = pd.DataFrame({"float16": [1.0, 2.0], "float32": [2.0, 4.0]}, index=["small", "large"])
drawn: list[dict] = []


def draw(**chosen: object) -> LabFigure:
    drawn.append(chosen)
    return heat(TABLE, claim=f"batch {chosen['batch']}", footer="counted", unit="GB", xlabel="dtype")


def make(twin=None) -> Explorer:
    drawn.clear()
    return Explorer(draw, twin, batch=Choice("batch", [1, 2, 1024], 2), dtype=Choice("dtype", ["float16", "float32"]))


def surface(display_method: str) -> types.ModuleType:
    """An ipywidgets of only the names, constructor arguments and methods that version 7.7.1 has."""
    module = types.ModuleType("ipywidgets")

    class Widget:
        allowed: frozenset[str] = frozenset()

        def __init__(self, **kwargs: object) -> None:
            unknown = set(kwargs) - self.allowed - {"layout", "style", "description"}
            assert not unknown, f"{type(self).__name__} of 7.7 does not take {unknown}"
            self.watchers: list = []
            self.__dict__.update(kwargs)

        def observe(self, handler, names: str) -> None:
            self.watchers.append((handler, names))

        def choose(self, value: object) -> None:
            self.value = value
            for handler, names in self.watchers:
                assert names == "value"
                handler({"name": "value", "new": value, "owner": self})

    class Dropdown(Widget):
        allowed = frozenset({"options", "value", "disabled", "index", "label"})

    class SelectionSlider(Widget):
        allowed = Dropdown.allowed | {"continuous_update", "orientation", "readout"}

    class Image(Widget):
        allowed = frozenset({"value", "format", "width", "height"})

    class HTML(Widget):
        allowed = frozenset({"value", "placeholder"})

        def __init__(self, value: str = "", **kwargs: object) -> None:
            super().__init__(value=value, **kwargs)

    class Layout(Widget):
        allowed = frozenset({"width", "max_width", "flex_flow"})

    class Box(Widget):
        def __init__(self, children: list, **kwargs: object) -> None:
            super().__init__(**kwargs)
            self.children = tuple(children)

    for cls in (Dropdown, SelectionSlider, Image, HTML, Layout):
        setattr(module, cls.__name__, cls)
    module.VBox = type("VBox", (Box,), {display_method: lambda self, **_: None})
    module.HBox = type("HBox", (Box,), {})
    module.__version__ = "7.7.1"
    return module


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list:
    seen: list = []
    import IPython.display

    monkeypatch.setattr(IPython.display, "display", lambda *objects, **_: seen.extend(objects))
    return seen


def test_explorer_redraws_when_a_control_changes_under_7_7(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ipywidgets", surface("_ipython_display_"))
    box = make().controls()
    controls, said, image, below = box.children
    assert "static twin" in below.value
    batch, dtype = controls.children
    assert (type(batch).__name__, type(dtype).__name__) == ("SelectionSlider", "Dropdown")
    before = image.value
    assert before.startswith(b"\x89PNG")
    batch.choose(1024)
    assert drawn[-1] == {"batch": 1024, "dtype": "float16"}
    assert image.value != before
    assert said.value == ""


def test_explorer_redraws_when_a_control_changes_under_the_installed_version() -> None:
    pytest.importorskip("ipywidgets")
    box = make().controls()
    controls, _, image, _ = box.children
    assert controls.children[0].options == (("1", 1), ("2", 2), ("1,024", 1024))
    before = bytes(image.value)
    controls.children[1].value = "float32"
    assert drawn[-1] == {"batch": 2, "dtype": "float32"}
    assert bytes(image.value).startswith(b"\x89PNG")
    controls.children[0].value = 1
    assert bytes(image.value) != before


def test_the_static_twin_is_shown_below_the_widget(shown: list) -> None:
    pytest.importorskip("ipywidgets")
    make()._ipython_display_()
    assert len(shown) == 2
    assert isinstance(shown[1], LabFigure)
    assert shown[1].claim == "batch 2"


def test_without_ipywidgets_the_twin_alone_is_shown(monkeypatch: pytest.MonkeyPatch, shown: list) -> None:
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    make()._ipython_display_()
    assert [figure.claim for figure in shown] == ["batch 2"]


def test_a_twin_of_its_own_may_show_several_choices_at_once(shown: list) -> None:
    twin = heat(TABLE, claim="all of it", footer="counted", unit="GB", xlabel="dtype")
    make(twin=lambda: twin)._ipython_display_()
    assert shown[-1] is twin


def test_an_error_while_drawing_is_shown_and_the_next_choice_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ipywidgets", surface("_ipython_display_"))

    def fails_for_one(batch: int) -> LabFigure:
        if batch == 1:
            raise ValueError("no row for batch 1")
        return draw(batch=batch)

    controls, said, image, _ = Explorer(fails_for_one, batch=Choice("batch", [2, 1])).controls().children
    kept = image.value
    controls.children[0].choose(1)
    assert "no row for batch 1" in said.value
    assert image.value == kept
    controls.children[0].choose(2)
    assert said.value == ""


def test_a_first_choice_that_is_no_option_is_refused() -> None:
    with pytest.raises(ConfigError, match="use one of"):
        Explorer(draw, batch=Choice("batch", [1, 2], 3))
