"""Every way in which a notebook can go wrong, with real kernels: one batch, described in one YAML file, run once."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from xml.etree import ElementTree

import psutil
import pytest
import yaml
from batches import Ran, run_cli, write_notebook

TELL_PID = "import os, pathlib\npathlib.Path('{name}.pid').write_text(str(os.getpid()))"
VALUES = "from IPython.display import display\ndisplay({'application/vnd.pdlab.values+json': {'twice': 2 * n}}, raw=True)"
EXPECTED = {
    "well": "ok",
    "note {book} no 1": "ok",
    "raises_as_it_should": "ok",
    "cell_error": "failed",
    "exit_zero": "failed",
    "sys_exit": "failed",
    "exit_tagged": "failed",
    "not_to_be_run_on": "failed",
    "too_long": "timeout",
    "killed": "died",
    "ends_itself": "died",
    "parent_killed": "died",
    "memory": "oom",
    "numpy_memory": "oom",
    "gpu_memory": "oom",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("odd {folder} name")

    def note(name: str, *cells: str, **more: object) -> None:
        write_notebook(folder / f"{name}.ipynb", *cells, **more)  # type: ignore[arg-type]

    note(
        "well",
        "block = bytearray(300 << 20)",
        "print(f'n is {n}, flag is {flag!r}')",
        VALUES,
        parameters="n = 1  # count\nflag = True",
    )
    note("note {book} no 1", "import os; print(os.getcwd())")
    note("raises_as_it_should", "1 / 0", "print('and goes on')", tags={0: ["raises-exception"]})
    note("cell_error", "print('before')", "raise ValueError('the \x1b[31mvalue\x1b[0m of it')", "print('never')")
    note("exit_zero", "raise SystemExit(0)", "print('never')")
    note("sys_exit", "import sys; sys.exit()")
    note("exit_tagged", "raise SystemExit(0)", tags={0: ["raises-exception"]})
    note("not_to_be_run_on", "this is no Python")
    note("too_long", TELL_PID.format(name="too_long"), "print('started', flush=True)\nimport time; time.sleep(300)")
    note("killed", "print('alive', flush=True)", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "print('never')")
    note("ends_itself", "import os; os._exit(0)")
    note(
        "parent_killed",
        TELL_PID.format(name="parent_killed"),
        "import signal; os.kill(os.getppid(), signal.SIGKILL)\nimport time; time.sleep(300)",
    )
    note("memory", "b = bytearray(1 << 60)")
    note("numpy_memory", "import numpy; numpy.ones(1 << 55)")
    note("gpu_memory", "class OutOfMemoryError(RuntimeError): ...", "raise OutOfMemoryError('CUDA out of memory')")
    runs = [{"notebook": str(folder / f"{name}.ipynb")} for name in EXPECTED]
    runs[0]["parameters"] = {"n": [2, 3], "flag": False}  # type: ignore[assignment]
    runs[list(EXPECTED).index("too_long")]["timeout"] = 15  # type: ignore[assignment]
    (folder / "night.yml").write_text(yaml.safe_dump({"profile": "smoke", "timeout": 200, "runs": runs}))
    return folder


@pytest.fixture(scope="module")
def ran(folder: Path) -> Ran:
    return run_cli("-f", folder / "night.yml", "--out", folder / "out", "--jobs", "2")


@pytest.mark.parametrize("name", [name for name in EXPECTED if name != "well"])
def test_each_end_of_a_notebook_has_its_status(ran: Ran, name: str) -> None:
    row = ran.row(name)
    assert row["status"] == EXPECTED[name], row["error"]
    assert (row["error"] is None) == (row["status"] == "ok")


def test_the_exit_code_is_the_highest_of_all(ran: Ran) -> None:
    assert ran.code == 6


def test_results_keep_the_order_of_the_batch_and_the_documented_fields(ran: Ran) -> None:
    assert [Path(row["notebook"]).stem for row in ran.rows] == ["well", *EXPECTED]
    fields = ["notebook", "params", "profile", "key", "status", "seconds", "peak_memory_bytes", "error", "output"]
    assert all(list(row) == fields for row in ran.rows)


def test_a_list_in_the_file_becomes_a_grid_in_one_table(ran: Ran) -> None:
    first, second = (row for row in ran.rows if Path(row["notebook"]).stem == "well")
    assert (first["params"], second["params"]) == ({"n": 2, "flag": False}, {"n": 3, "flag": False})
    assert first["output"] != second["output"]
    with (ran.out / "results.csv").open(newline="") as stream:
        table = [line for line in csv.DictReader(stream) if Path(line["notebook"]).stem == "well"]
    assert [(line["n"], line["flag"], line["status"], line["twice"]) for line in table] == [
        ("2", "False", "ok", "4"),
        ("3", "False", "ok", "6"),
    ]


def test_parameters_reach_the_kernel_with_their_types(ran: Ran) -> None:
    text = (ran.out / ran.rows[1]["output"]).read_text()
    assert "n is 3, flag is False" in text


def test_peak_memory_is_the_kernels(ran: Ran) -> None:
    """300 MiB were held at once; the interpreter and its libraries take well under as much again."""
    assert 300 * 2**20 < ran.rows[0]["peak_memory_bytes"] < 600 * 2**20


def test_braces_and_spaces_in_paths_are_only_characters(ran: Ran, folder: Path) -> None:
    assert ran.row("note {book} no 1")["output"].startswith("note {book} no 1-")
    assert ran.printed("note {book} no 1").strip() == str(folder)


def test_a_cell_that_is_meant_to_raise_does_not_end_its_notebook(ran: Ran) -> None:
    assert ran.printed("raises_as_it_should") == "and goes on\n"
    assert "papermill-error-cell" not in (ran.out / ran.row("raises_as_it_should")["output"]).read_text()


def test_errors_say_which_cell_and_what(ran: Ran) -> None:
    assert ran.row("cell_error")["error"].startswith("cell 2: ValueError: the ")
    assert ran.printed("cell_error") == "before\n"
    assert ran.row("exit_zero")["error"] == "cell 1: SystemExit: 0"
    assert "killed by signal 9" in ran.row("killed")["error"]
    assert "cell 2" in ran.row("killed")["error"]
    assert "ran longer than 15 s" in ran.row("too_long")["error"]


def test_what_a_notebook_printed_before_it_was_stopped_is_kept(ran: Ran) -> None:
    assert ran.printed("too_long") == "started\n"
    assert ran.printed("killed") == "alive\n"


@pytest.mark.parametrize("name", ["too_long", "parent_killed"])
def test_no_kernel_outlives_its_job(ran: Ran, folder: Path, name: str) -> None:
    assert not psutil.pid_exists(int((folder / f"{name}.pid").read_text()))


def test_a_timeout_is_judged_by_the_clock(ran: Ran) -> None:
    assert 15 <= ran.row("too_long")["seconds"] < 60


def test_junit_counts_what_failed(ran: Ran) -> None:
    suite = ElementTree.parse(ran.out / "junit.xml").getroot()
    failed = [case.get("name") for case in suite if case.find("failure") is not None]
    assert int(suite.get("tests", 0)) == len(ran.rows)
    assert int(suite.get("failures", 0)) == len(failed) == sum(status != "ok" for status in EXPECTED.values())
    (case,) = [case for case in suite if case.get("name") == "killed"]
    assert case.find("failure").get("type") == "died"  # type: ignore[union-attr]


def test_the_report_has_a_row_and_a_page_for_each_run(ran: Ran) -> None:
    page = (ran.out / "index.html").read_text()
    for row in ran.rows:
        if row["output"]:
            html = (ran.out / row["output"]).with_suffix(".html")
            assert html.is_file()
            assert "badge bad" in page or row["status"] == "ok"
    for name in EXPECTED:
        assert f"id='{name}'" in page
    assert page.count("<span class='badge good'>ok</span>") == 4


@pytest.mark.parametrize("page", ["index.html", "well"])
def test_pages_need_no_network_and_follow_the_readers_colours(ran: Ran, page: str) -> None:
    path = ran.out / page if page.endswith("html") else (ran.out / ran.rows[0]["output"]).with_suffix(".html")
    text = path.read_text()
    assert "prefers-color-scheme: dark" in text
    assert "width=device-width" in text
    assert "<script" not in text
    assert "https://" not in text.split("<body>")[0]


def test_z_run_again_on_resume_is_only_what_did_not_end_well(ran: Ran, folder: Path) -> None:
    before = {row["key"]: row for row in ran.rows}
    kept = ["well", "note {book} no 1", "cell_error"]
    runs = [{"notebook": str(folder / f"{name}.ipynb")} for name in kept]
    runs[0]["parameters"] = {"n": [2, 3], "flag": False}  # type: ignore[assignment]
    (folder / "again.yml").write_text(yaml.safe_dump({"runs": runs}))
    stamp = (ran.out / ran.rows[0]["output"]).stat().st_mtime_ns
    again = run_cli("-f", folder / "again.yml", "--profile", "smoke", "--out", ran.out, "--resume")
    assert [row["status"] for row in again.rows] == ["cached", "cached", "cached", "failed"]
    assert all(row["seconds"] == before[row["key"]]["seconds"] for row in again.rows[:3])
    assert (ran.out / ran.rows[0]["output"]).stat().st_mtime_ns == stamp
    assert again.code == 3
    left = {path.name for path in ran.out.glob("*.ipynb")}
    assert left == {row["output"] for row in again.rows}, "a folder holds one batch"
    assert json.loads((ran.out / "results.json").read_text()) == again.rows
