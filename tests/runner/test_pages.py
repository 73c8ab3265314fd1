"""An executed notebook's page: what a browser without a network can show."""

from __future__ import annotations

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


def test_nothing_is_loaded_from_elsewhere() -> None:
    page = shown(
        v4.new_markdown_cell(
            "[![Open in Colab](https://colab.example/badge.svg)](https://colab.example/x) and ![own](data:image/png;base64,AA)"
        )
    )
    assert '<a href="https://colab.example/x">Open in Colab</a>' in page
    assert 'src="https' not in page
    assert 'src="data:image/png' in page


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


def test_links_to_kept_pages_are_words_in_a_report_that_may_lie_anywhere() -> None:
    page = shown(
        v4.new_markdown_cell("executed: [gpu-x](../docs/executed/gpu-x/02_next.html), [gpu-y](../docs/executed/y.html)")
    )
    assert "../docs/" not in page
    assert "executed: gpu-x, gpu-y" in page


def test_a_notebook_that_failed_says_so_first() -> None:
    failing = v4.new_code_cell("1/0", outputs=[v4.new_output("error", ename="E", evalue="e", traceback=["E: e"])])
    page = shown(failing, status="failed", error="cell 1: <E>: e")
    assert page.index('banner bad"><a href="#error">failed</a>: cell 1: &lt;E&gt;: e') < page.index('id="error"')


@pytest.mark.parametrize("content", ["", '{"cells": [', "{}"])
def test_half_a_notebook_has_no_page_and_breaks_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.ipynb").write_text(content)
    assert pages.write(tmp_path, Result("x.ipynb", {}, "smoke", "k", "died", 1, None, "e", "x.ipynb")) is None
    assert not (tmp_path / "x.html").exists()
