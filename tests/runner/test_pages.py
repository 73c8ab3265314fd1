"""An executed notebook's page: what a browser without a network can show."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from pdlab.runner import pages
from pdlab.runner.process import Result

v4 = nbformat.v4


def shown(*cells: Any, status: str = "ok", error: str | None = None) -> str:
    result = Result("notes/a_note.ipynb", {"n": 3}, "smoke", "k", status, 1.5, None, error, "a_note-k.ipynb")
    return pages.render(nbformat.writes(v4.new_notebook(cells=list(cells))), result).split("<body>")[1]


def test_formulas_become_mathml_and_code_and_money_stay() -> None:
    page = shown(
        v4.new_markdown_cell(
            "Costs $2\\,T_a * b$ and\n\n$$\\frac{f}{m} \\;\\ge\\; x_1 * x_2$$\n\nbut `$HOME and $PATH` and 5$ stay, 3$ too."
        )
    )
    assert page.count("<math") == 2
    assert 'display="block"' in page
    assert "<mfrac>" in page
    assert "<code>$HOME and $PATH</code>" in page
    assert "5$ stay, 3$ too" in page
    assert not re.search(r"formula\d", page)


def test_a_formula_that_cannot_be_read_is_shown_as_its_source() -> None:
    assert "<code>$x_$</code>" in shown(v4.new_markdown_cell("see $x_$"))


def test_a_widget_is_named_and_its_static_twin_is_shown() -> None:
    outputs = [
        v4.new_output(
            "display_data", {"application/vnd.jupyter.widget-view+json": {"model_id": "1"}, "text/plain": "Box(children)"}
        ),
        v4.new_output("display_data", {"image/png": "iVBORw0KGgo=", "text/plain": "<Figure>"}),
    ]
    page = shown(v4.new_code_cell("explore()", outputs=outputs))
    assert "data:image/png;base64,iVBORw0KGgo=" in page
    assert "interactive control" in page
    assert "Box(children)" not in page
    assert "<script" not in page


def test_links_to_other_notebooks_lead_into_the_report() -> None:
    page = shown(v4.new_markdown_cell("[next](02_next.ipynb) [contents](00_start.ipynb#x) [answers](solutions/01_a.ipynb)"))
    assert 'href="index.html#02_next"' in page
    assert 'href="index.html#00_start"' in page
    assert 'href="index.html#01_a"' in page


def test_a_notebook_that_failed_says_so_first() -> None:
    page = shown(v4.new_code_cell("1/0"), status="died", error="killed by <signal> 9")
    assert page.index("killed by &lt;signal&gt; 9") < page.index("1")
    assert "banner bad" in page


@pytest.mark.parametrize("content", ["", '{"cells": [', "{}"])
def test_half_a_notebook_has_no_page_and_breaks_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.ipynb").write_text(content)
    assert pages.write(tmp_path, Result("x.ipynb", {}, "smoke", "k", "died", 1, None, "e", "x.ipynb")) is None
    assert not (tmp_path / "x.html").exists()
