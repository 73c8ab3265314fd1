"""The notebooks keep the rules of the series, and each rule can be broken."""

from __future__ import annotations

import copy
import csv
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import notebook_rules
import pytest

from pdlab.lab.place import SETUP_CELL, badge
from pdlab.runner.manifest import measured

ROOT = Path(__file__).resolve().parent.parent / "notebooks"
SERIES = sorted(ROOT.glob("[0-9][0-9]_*.ipynb"))
SOLUTIONS = sorted((ROOT / "solutions").glob("*.ipynb"))


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


@pytest.mark.parametrize("name", notebook_rules.RULES)
@pytest.mark.parametrize("path", SERIES, ids=lambda path: path.stem)
def test_a_notebook_keeps_the_rule(path: Path, name: str) -> None:
    assert notebook_rules.broken(path, read(path), [name]) == {}


SHORT_RULES = [
    "sets_up_once_like_all_others",
    "declares_typed_commented_parameters",
    "is_plain_python_with_few_definitions",
    "is_stored_without_outputs",
    "is_small_and_valid",
    "links_lead_somewhere",
]


@pytest.mark.parametrize("path", SOLUTIONS, ids=lambda path: path.stem)
def test_solutions_answer_their_notebooks_three_exercises(path: Path) -> None:
    nb = read(path)
    assert notebook_rules.broken(path, nb, SHORT_RULES) == {}
    assert path.name in {note.name for note in SERIES}
    headings = re.findall(r"^#+ .*?\b(\d)\b", notebook_rules.prose(nb) and "\n".join(_headings(nb)), re.MULTILINE)
    assert set(headings) >= {"1", "2", "3"}, "a heading for each exercise"
    assert len(notebook_rules.own_code(nb)) >= 3


def _headings(nb: Any) -> list[str]:
    lines = "\n".join(cell.source for cell in nb.cells if cell.cell_type == "markdown").splitlines()
    return [line for line in lines if line.startswith("#")]


def test_every_notebook_has_solutions() -> None:
    assert {path.name for path in SERIES} == {path.name for path in SOLUTIONS}


# --- the manifest ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def manifest() -> dict[str, dict[str, Any]]:
    entries = json.loads((ROOT / "manifest.json").read_text(encoding="utf-8"))["notebooks"]
    assert len({entry["file"] for entry in entries}) == len(entries)
    return {entry["file"]: entry for entry in entries}


def test_the_manifest_lists_the_series_in_order(manifest: dict[str, dict[str, Any]]) -> None:
    assert list(manifest) == [path.name for path in SERIES]


@pytest.mark.parametrize("path", SERIES, ids=lambda path: path.stem)
def test_the_manifest_says_what_the_notebook_says(manifest: dict[str, dict[str, Any]], path: Path) -> None:
    entry, first = manifest[path.name], read(path).cells[0].source
    assert re.search(r"^# \d\d · (.+)$", first, re.MULTILINE)[1].strip() == entry["title"]  # type: ignore[index]
    assert all(isinstance(entry[name], str) and entry[name] for name in ("title", "goal", "hardware"))
    with (ROOT.parent / "data" / "claims.csv").open(newline="", encoding="utf-8") as stream:
        known = {row["id"] for row in csv.DictReader(stream)}
    assert set(entry["claims"]) <= known
    assert set(entry["seconds"]) <= {"smoke", "full"}


@pytest.mark.parametrize("path", SERIES, ids=lambda path: path.stem)
def test_the_manifests_times_are_those_of_the_last_measured_run(manifest: dict[str, dict[str, Any]], path: Path) -> None:
    """`python -m pdlab.runner.manifest` records a run and writes them; typed by hand they would differ from the records."""
    entry, records = manifest[path.name], measured(path.stem)
    for name, source in (("seconds", "seconds"), ("memory_bytes", "memory_bytes"), ("measured_on", "device")):
        assert entry[name] == {profile: record[source] for profile, record in records.items()}


def test_the_readme_lists_the_series(manifest: dict[str, dict[str, Any]]) -> None:
    rows = re.findall(r"^\| (\d\d) \| \[(.+?)\]\(notebooks/(.+?)\)", (ROOT.parent / "README.md").read_text(), re.MULTILINE)
    assert rows == [(name[:2], entry["title"], name) for name, entry in manifest.items()]


def test_recording_a_run_writes_the_rows_and_the_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pdlab.bench import records
    from pdlab.runner import manifest as recording

    (tmp_path / "notebooks").mkdir()
    entry = {"file": "01_x.ipynb", "title": "X", "seconds": {"smoke": 1}}
    (tmp_path / "notebooks" / "manifest.json").write_text(json.dumps({"notebooks": [entry]}))
    row = {"notebook": "notebooks/01_x.ipynb", "params": {}, "profile": "smoke", "key": "k", "status": "ok", "seconds": 21.4}
    more = [row | {"notebook": "other.ipynb", "key": "l"}, row | {"status": "failed", "seconds": 9.0, "key": "m"}]
    run = [r | {"peak_memory_bytes": 2**28, "error": None, "output": None} for r in [row, *more]]
    (tmp_path / "results.json").write_text(json.dumps(run))
    (tmp_path / "machine.json").write_text('{"slug": "cpu-test", "provenance": {"torch": "of the run"}}')
    monkeypatch.setattr(records, "target_root", lambda record=False: tmp_path / "data" / "measurements")
    assert recording.record(tmp_path, tmp_path) == ["01_x"]
    (written,) = json.loads((tmp_path / "notebooks" / "manifest.json").read_text())["notebooks"]
    numbers = {"seconds": {"smoke": 21}, "memory_bytes": {"smoke": 2**28}, "measured_on": {"smoke": "cpu-test"}}
    assert written == entry | numbers
    (kept,) = json.loads((tmp_path / "data" / "measurements" / "cpu-test" / "provenance.json").read_text()).values()
    assert (kept["torch"], kept["command"]) == ("of the run", "pdlab run --profile smoke")


# --- the executed copies -------------------------------------------------------------------------------------------------

sys.path.insert(0, str(ROOT.parent / "docs"))
import executed_copies  # noqa: E402

KEPT = sorted(executed_copies.KEPT.glob("*/*.html"))


@pytest.mark.parametrize("page", KEPT, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_a_kept_page_is_small_names_no_machines_paths_and_its_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(text.encode()) < executed_copies.MAX_BYTES
    assert not executed_copies.machine_paths(text)
    links = re.findall(r'(?:href|src)="([^"#]+)', text)
    near = [link for link in links if not re.match(r"https?:|data:", link)]
    assert near
    assert not [link for link in near if not (page.parent / link).exists()]
    assert f"{page.stem}.ipynb" in {path.name for path in SERIES}


def test_the_readme_links_every_kept_page() -> None:
    text = (ROOT.parent / "README.md").read_text(encoding="utf-8")
    assert KEPT
    assert not [page for page in KEPT if f"({page.relative_to(ROOT.parent).as_posix()})" not in text]


def test_keeping_a_page_mends_its_links_and_refuses_a_machines_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executed_copies, "KEPT", tmp_path / "docs" / "executed")
    rows = [{"notebook": f"notebooks/{n}.ipynb", "status": "ok", "output": f"{n}-1.ipynb"} for n in ("00_a", "01_b", "02_c")]
    (tmp_path / "results.json").write_text(json.dumps(rows))
    (tmp_path / "machine.json").write_text('{"slug": "gpu-x"}')
    links = "".join(f'<a href="index.html#{n}"></a>' for n in ("00_a", "01_b", "02_c"))
    for name in ("00_a", "01_b", "02_c"):
        (tmp_path / f"{name}-1.html").write_text('<a href="index.html">Report</a>' + links)
    first, _ = executed_copies.keep(tmp_path, ["00", "01"])
    assert re.findall('href="(.*?)"', first.read_text()) == [
        "../../../README.md", "#", "01_b.html", "../../../notebooks/02_c.ipynb",
    ]  # fmt: skip
    (tmp_path / "02_c-1.html").write_text('File "/home/someone/x.py"')
    with pytest.raises(SystemExit, match=r"/home/someone/x\.py"):
        executed_copies.keep(tmp_path, ["02"])


# --- every rule can be broken ---------------------------------------------------------------------------------------------


@pytest.fixture
def good(tmp_path: Path) -> tuple[Path, Any]:
    folder = tmp_path / "notebooks"
    (folder / "solutions").mkdir(parents=True)
    for name in ("00_start.ipynb", "01_well.ipynb", "02_next.ipynb", "solutions/01_well.ipynb"):
        (folder / name).write_text("{}")
    v4 = nbformat.v4
    cells = [
        v4.new_markdown_cell(f"{badge('01_well.ipynb')}\n# 01 · Well\n**Goal**: see it. 40 s on a CPU, 1 min on a GPU."),
        v4.new_code_cell(SETUP_CELL),
        v4.new_code_cell("seed = 0  # of every tensor\nlens = [1, 2]  # tokens", metadata={"tags": ["parameters"]}),
        v4.new_markdown_cell("Words that explain what the next cell is about to compute, and why. " * 3),
        v4.new_code_cell("def double(x):\n    return 2 * x\nprint(double(seed))"),
        v4.new_markdown_cell(
            "## What was learned\nMuch.\n## Exercises\n1. One.\n2. Two.\n3. Three.\n[Solutions](solutions/01_well.ipynb)"
        ),
        v4.new_markdown_cell("[00](00_start.ipynb) · [Contents](00_start.ipynb#x) · [02](02_next.ipynb)"),
    ]
    return folder / "01_well.ipynb", v4.new_notebook(cells=cells)


def test_a_notebook_that_keeps_all_rules_breaks_none(good: tuple[Path, Any]) -> None:
    assert notebook_rules.broken(*good) == {}


def source(index: int, old: str, new: str) -> Callable[[Any], None]:
    def change(nb: Any) -> None:
        assert old in nb.cells[index].source
        nb.cells[index].source = nb.cells[index].source.replace(old, new)

    return change


def more_code(text: str) -> Callable[[Any], None]:
    return lambda nb: nb.cells.insert(4, nbformat.v4.new_code_cell(text))


def printed(nb: Any) -> None:
    nb.cells[4].outputs = [nbformat.v4.new_output("stream", text="0\n")]


def counted(nb: Any) -> None:
    nb.cells[4].execution_count = 3


BREAKS: list[tuple[str, Callable[[Any], None]]] = [
    ("opens_with_badge_title_goal_and_needs", source(0, "01_well", "02_next")),
    ("opens_with_badge_title_goal_and_needs", source(0, "# 01", "# 1")),
    ("opens_with_badge_title_goal_and_needs", source(0, "**Goal**", "Goal")),
    ("opens_with_badge_title_goal_and_needs", source(0, "40 s on a CPU, 1 min on a GPU", "soon done")),
    ("sets_up_once_like_all_others", source(1, "lab = setup()", "lab = setup('cpu')")),
    ("sets_up_once_like_all_others", lambda nb: nb.cells.append(copy.deepcopy(nb.cells[1]))),
    ("declares_typed_commented_parameters", source(2, "  # tokens", "")),
    ("declares_typed_commented_parameters", source(2, "[1, 2]", "list(range(2))")),
    ("declares_typed_commented_parameters", lambda nb: nb.cells[2].metadata.clear()),
    ("declares_typed_commented_parameters", lambda nb: nb.cells.append(copy.deepcopy(nb.cells[2]))),
    ("keeps_code_cells_short", more_code("x = 1\n" * 41)),
    ("keeps_code_cells_short", more_code("x = 1\n" * 30)),
    ("keeps_code_cells_short", more_code("")),
    ("is_plain_python_with_few_definitions", more_code("def a(): ...\nclass B: ...")),
    ("is_plain_python_with_few_definitions", more_code("!pip install x")),
    ("explains_at_least_as_much_as_it_computes", more_code("x = 'a long line of code'\n" * 20)),
    ("is_stored_without_outputs", printed),
    ("is_stored_without_outputs", counted),
    ("is_small_and_valid", source(3, "Words", "W" * 130_000)),
    ("is_small_and_valid", lambda nb: nb.cells[3].pop("source")),
    ("closes_with_lessons_exercises_and_ways_on", source(5, "What was learned", "End")),
    ("closes_with_lessons_exercises_and_ways_on", source(5, "3. Three.", "")),
    ("closes_with_lessons_exercises_and_ways_on", source(6, "02_next", "00_start")),
    ("closes_with_lessons_exercises_and_ways_on", source(5, "solutions/01_well.ipynb", "00_start.ipynb")),
    ("writes_formulas_as_text", source(3, "Words", "Words $x^2$")),
    ("titles_figures_in_plain_text", more_code('figures.heat(claim=f"`{name}` wins")')),
    ("links_lead_somewhere", source(3, "Words", "[Words](09_missing.ipynb)")),
]


@pytest.mark.parametrize(("name", "change"), BREAKS, ids=[f"{name}-{i}" for i, (name, _) in enumerate(BREAKS)])
def test_each_rule_notices_what_breaks_it(good: tuple[Path, Any], name: str, change: Callable[[Any], None]) -> None:
    path, nb = good
    change(nb)
    assert notebook_rules.broken(path, nb, [name])


def test_all_rules_are_shown_to_notice_something() -> None:
    assert {name for name, _ in BREAKS} == set(notebook_rules.RULES)
