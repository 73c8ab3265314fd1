"""What is refused before anything runs, what a grid is, and what makes a resumed batch run something again."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from batches import run_cli, write_notebook

from pdlab.core.errors import NotebookError
from pdlab.runner import cli, jobs
from pdlab.runner import notebook as nbs
from pdlab.runner.batch import Batch, Say
from pdlab.runner.jobs import Job
from pdlab.runner.process import Result

PARAMETERS = "\n".join(
    [
        'model = "llama-tiny"  # a name',
        "n: int = 3  # a count",
        "share = 0.5  # of capacity",
        "flag = True  # on or off",
        "lens = [16, 32]  # tokens",
        "limit = None  # anything",
        "computed = 2 * 3  # its type is unknown",
    ]
)


@pytest.fixture
def note(tmp_path: Path) -> Path:
    return write_notebook(tmp_path / "note.ipynb", "import pathlib; pathlib.Path('ran').write_text('')", parameters=PARAMETERS)


def plan(note: Path, text: str = "", *assignments: str, **more: Any) -> list[Job]:
    batch = None
    if text:
        (note.parent / "batch.yml").write_text(text)
        batch = jobs.read_batch(note.parent / "batch.yml")
    fixed = dict(jobs.parse_assignment(a) for a in assignments)
    options = {"profile_given": False, "timeout": None, **more}
    names = [] if batch and "runs" in batch else [str(note)]
    return jobs.make_jobs(jobs.requests(names, fixed, batch), "smoke", "cpu-test", **options)


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("nothing=1", "no parameter 'nothing'"),
        ("n=many", "parameter 'n' is a int, and 'many' is a str"),
        ("n=true", "parameter 'n' is a int"),
        ("n=1.5", "parameter 'n' is a int"),
        ("flag=1", "parameter 'flag' is a bool"),
        ("model=3", "parameter 'model' is a str"),
        ("lens=16", "parameter 'lens' is a list of int"),
        ("lens=[a, b]", "parameter 'lens' is a list of int, and ['a', 'b'] is a list of str"),
        ("no assignment", "is not a parameter"),
        ("2x=1", "is not a parameter"),
    ],
)
def test_an_unknown_or_mistyped_parameter_is_refused_and_nothing_runs(note: Path, assignment: str, words: str) -> None:
    with pytest.raises(NotebookError) as caught:
        run_cli(note, "-p", assignment, "--out", note.parent / "out")
    assert words in str(caught.value)
    assert caught.value.hint
    assert not (note.parent / "ran").exists()
    assert not (note.parent / "out").exists()


@pytest.mark.parametrize(
    ("assignment", "value"),
    [
        ("flag=false", False),
        ("n=7", 7),
        ("share=1", 1),
        ("lens=[1, 2, 3]", [1, 2, 3]),
        ("limit=x", "x"),
        ("computed=a", "a"),
        ("model=", ""),
    ],
)
def test_values_are_read_as_yaml(note: Path, assignment: str, value: Any) -> None:
    (job,) = plan(note, "", assignment)
    assert list(job.params.values()) == [value]
    assert type(next(iter(job.params.values()))) is type(value)


def test_a_list_spans_a_grid_but_the_value_of_a_list_parameter_does_not(note: Path) -> None:
    got = plan(note, "model: [a, b]\nn: [1, 2]\nlens: [64, 128]\n")
    assert [job.params for job in got] == [{"model": m, "n": n, "lens": [64, 128]} for m in "ab" for n in (1, 2)]
    assert [job.params["lens"] for job in plan(note, "lens: [[16], [32, 64]]\n")] == [[16], [32, 64]]


def test_a_parameter_on_the_command_line_replaces_the_files_axis(note: Path) -> None:
    assert [job.params for job in plan(note, "n: [1, 2]\nshare: [0.1, 0.2]\n", "n=9")] == [
        {"share": 0.1, "n": 9},
        {"share": 0.2, "n": 9},
    ]


def test_the_same_work_asked_for_twice_is_done_once(note: Path) -> None:
    assert len(plan(note, f"runs:\n- notebook: '{note}'\n- notebook: '{note}'\n  parameters: {{n: [3, 3, 4]}}\n")) == 3


def test_what_the_command_line_says_wins_over_the_file(note: Path) -> None:
    text = f"profile: full\ntimeout: 60\nruns:\n- notebook: '{note}'\n- notebook: '{note}'\n  profile: smoke\n  timeout: 5\n"
    assert [(job.profile, job.timeout) for job in plan(note, text)] == [("full", 60), ("smoke", 5)]
    assert [(job.profile, job.timeout) for job in plan(note, text, profile_given=True, timeout=9.0)] == [("smoke", 9.0)]


@pytest.mark.parametrize(
    "text",
    [
        "- 1",
        "runs: 3",
        "runs:\n- name: x",
        "runs: []\nnotebooks: x",
        "n: [",
        "runs:\n- notebook: 'NOTE'\n  profile: fast",
        "runs:\n- notebook: 'NOTE'\n  timeout: soon",
        "runs:\n- notebook: 'NOTE'\n  timeout: -1",
        "n: []",
        "runs:\n- notebook: missing.ipynb",
    ],
)
def test_a_batch_file_that_cannot_work_is_refused_with_a_hint(note: Path, text: str) -> None:
    with pytest.raises(NotebookError) as caught:
        plan(note, text.replace("NOTE", str(note)))
    assert caught.value.hint


@pytest.mark.parametrize("content", ["", "{}", "[1", '{"cells": 3, "nbformat": 4, "nbformat_minor": 5}'])
def test_a_file_that_is_no_notebook_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "broken.ipynb").write_text(content)
    with pytest.raises(NotebookError, match="not a notebook"):
        run_cli(tmp_path / "broken.ipynb")


def test_a_notebook_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_notebook(tmp_path / "03_flash.ipynb", "1")
    monkeypatch.setattr(jobs, "notebooks_dir", lambda: tmp_path)
    assert [path.stem for path in jobs.find("03")] == [path.stem for path in jobs.find("03_flash")] == ["03_flash"]
    assert [path.stem for path in jobs.series()] == ["03_flash"]
    with pytest.raises(NotebookError, match="03_flash"):
        jobs.find("04")


def test_the_profile_is_passed_only_to_a_notebook_that_declares_it(tmp_path: Path) -> None:
    with_it = write_notebook(tmp_path / "with.ipynb", parameters='profile = "auto"  # or smoke, full')
    without = write_notebook(tmp_path / "without.ipynb", "1")
    assert [job.params for job in plan(with_it) + plan(without)] == [{"profile": "smoke"}, {}]


def test_the_key_changes_with_everything_that_decides_the_result(note: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def key(nb: Any, params: dict | None = None, profile: str = "smoke", device: str = "cpu") -> str:
        return nbs.fingerprint(nb, "note", params or {}, profile, device)

    nb = nbs.read(note)
    base = key(nb)
    assert base == key(nbs.read(note))
    nb.cells[-1].outputs = [{"output_type": "stream", "name": "stdout", "text": "an output is no content"}]
    assert key(nb) == base
    keys = {base, key(nb, {"n": 1}), key(nb, {"n": True}), key(nb, profile="full"), key(nb, device="nvidia-h200")}
    nb.cells[-1].source += "\n# more"
    keys.add(key(nb))
    monkeypatch.setattr(nbs, "versions", lambda: {"torch": "99"})
    keys.add(key(nb))
    monkeypatch.setattr(nbs, "package_hash", lambda: "another library")
    keys.add(key(nb))
    assert len(keys) == 8


def test_a_dry_run_says_what_would_run_and_runs_nothing(note: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (note.parent / "manifest.json").write_text(
        json.dumps({"notebooks": [{"file": "note.ipynb", "seconds": {"smoke": 21.5}, "memory_bytes": {"smoke": 2**28}}]})
    )
    done = run_cli(note, "-p", "n=1", "--dry-run", "--json", "--out", note.parent / "out")
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["estimated_seconds"], row["estimated_memory_bytes"], row["cached"]) == (21.5, 2**28, False)
    assert (done.code, done.rows) == (0, [])
    run_cli(note, "--dry-run")
    assert "1 run, about 22 s of work" in capsys.readouterr().out
    assert not (note.parent / "ran").exists()


def test_the_full_profile_without_a_gpu_is_said_before_anything_runs(note: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_cli(note, "--dry-run", "--profile", "full")
    assert "no GPU is here" in capsys.readouterr().err
    run_cli(note, "--dry-run", "--profile", "smoke")
    assert capsys.readouterr().err == ""


def test_gpu_notebooks_share_the_gpus_and_the_rest_the_cpu(tmp_path: Path) -> None:
    todo = [Job(tmp_path / f"{i}.ipynb", profile="full" if i < 5 else "smoke", key=str(i)) for i in range(8)]
    slots = Batch(todo, tmp_path, gpus=["0", "3"], workers=2, resume=False)._slots()
    assert [env["CUDA_VISIBLE_DEVICES"] for _, env in slots] == ["0", "3", "", ""]
    assert slots[0][0] is slots[1][0]
    assert [slots[0][0].qsize(), slots[2][0].qsize()] == [5, 3]
    assert "OMP_NUM_THREADS" in slots[2][1]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["log", "terminal"])
def test_a_log_gets_plain_lines_and_a_terminal_one_that_moves(stream: io.StringIO) -> None:
    job = Job(Path("a.ipynb"), {"n": 1}, key="k")
    say = Say(2, stream)
    say.started(job)
    say.cell(job, 3, 7)
    say.status()
    say.ended(job, Result("a.ipynb", {}, "smoke", "k", "failed", 1.0, 2**20, "cell 1: x", None))
    text = stream.getvalue()
    assert "[1/2] failed   a n=1  1.0 s  1 MiB\n         cell 1: x\n" in text
    assert ("\x1b[K" in text) == ("a cell 3/7" in text) == stream.isatty()
    assert ("started  a n=1\n" in text) != stream.isatty()


def test_a_folder_that_cannot_be_made_is_refused(note: Path) -> None:
    with pytest.raises(NotebookError, match="cannot write to"):
        run_cli(note, "--out", note / "inside a file")


@pytest.mark.parametrize("arguments", [["--timeout", "0"], ["--jobs", "0"], ["-f", "missing.yml"], ["--ray", "127.0.0.1:1"]])
def test_options_that_cannot_work_are_refused(note: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if "--ray" in arguments:
        monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(NotebookError) as caught:
        run_cli(note, *arguments)
    assert caught.value.hint


def test_the_machine_is_described_from_another_process() -> None:
    """By its own words, with torch; so this process never holds a CUDA context."""
    probed, assumed = cli.describe_machine("auto", "no-such-gpu"), cli.describe_machine("smoke", "0")
    assert probed["device"] == assumed["device"] == "cpu"
    assert probed["slug"] == assumed["slug"]
    assert probed["torch_version"]
    assert assumed["profile"] == "smoke"


def test_a_refusal_is_exit_code_2_and_one_json_document(note: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from pdlab.cli import main

    assert main(["run", str(note), "--profile", "smoke", "-p", "nothing=1", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["type"] == "NotebookError"
    assert main(["run", str(note), "--profile", "smoke", "--dry-run", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 1
    assert not (note.parent / "ran").exists()


def test_a_misspelt_list_of_runs_is_named(tmp_path: Path) -> None:
    (tmp_path / "night.yml").write_text("profile: smoke\nrunz:\n  - notebook: 01\n")
    with pytest.raises(NotebookError, match=r"'runz'.*`runs`"):
        jobs.read_batch(tmp_path / "night.yml")


def test_the_series_is_named_in_order() -> None:
    with pytest.raises(NotebookError) as error:
        jobs.find("99")
    names = error.value.hint.partition(": ")[2].split(", ")
    assert names == sorted(names)
    assert len(names) > 5
