"""Cut off at any point, a batch leaves what was done, ends what ran, and goes on from there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from batches import run_cli, write_notebook

from pdlab.runner import jobs
from pdlab.runner.batch import load_results

WAIT = """\
import os, pathlib, time
print('waiting', flush=True)
pathlib.Path('kernel.pid').write_text(str(os.getpid()))
while not pathlib.Path('go').exists():
    time.sleep(0.05)
"""


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    return [
        write_notebook(tmp_path / "a_quick.ipynb", "1 + 1"),
        write_notebook(tmp_path / "b_waits.ipynb", WAIT),
        write_notebook(tmp_path / "c_after.ipynb", "2 + 2"),
    ]


def start(notes: list[Path]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pdlab", "run", *map(str, notes), "--profile", "smoke", "--jobs", "1", "--out", "out"]
    env = {**os.environ, "PYTHONPATH": str(Path(jobs.__file__).parents[2])}
    return subprocess.Popen(command, cwd=notes[0].parent, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def until(condition: Callable[[], bool], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "what was waited for never came"
        time.sleep(0.05)


def kernel(folder: Path) -> int:
    until(lambda: (folder / "kernel.pid").is_file() and (folder / "kernel.pid").read_text() != "")
    return int((folder / "kernel.pid").read_text())


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def resume(notes: list[Path]) -> dict[str, str]:
    """Goes on with the batch, now that nothing holds it up."""
    folder = notes[0].parent
    (folder / "go").write_text("")
    done = subprocess.run(
        [sys.executable, "-m", "pdlab", "run", *map(str, notes), "--profile", "smoke", "--out", "out", "--resume", "--json"],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(Path(jobs.__file__).parents[2])}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {Path(row["notebook"]).stem: row["status"] for row in json.loads(done.stdout)}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_an_interrupted_batch_saves_ends_and_goes_on(three: list[Path], number: signal.Signals) -> None:
    folder = three[0].parent
    batch = start(three)
    pid = kernel(folder)
    batch.send_signal(number)
    text, _ = batch.communicate(timeout=60)
    assert batch.returncode == 130, text
    assert gone(pid)
    rows = {Path(row["notebook"]).stem: row for row in json.loads((folder / "out" / "results.json").read_text())}
    assert {name: row["status"] for name, row in rows.items()} == {
        "a_quick": "ok",
        "b_waits": "interrupted",
        "c_after": "skipped",
    }
    assert "waiting" in (folder / "out" / rows["b_waits"]["output"]).read_text()
    assert (folder / "out" / "index.html").is_file()
    if number == signal.SIGINT:
        assert resume(three) == {"a_quick": "cached", "b_waits": "ok", "c_after": "ok"}


def test_a_batch_that_was_killed_outright_leaves_no_process_and_goes_on(three: list[Path]) -> None:
    folder = three[0].parent
    batch = start(three)
    pid = kernel(folder)
    batch.kill()
    batch.communicate(timeout=60)
    until(lambda: gone(pid), 30)
    assert [row["status"] for row in load_results(folder / "out").values()] == ["ok"]
    assert resume(three) == {"a_quick": "cached", "b_waits": "ok", "c_after": "ok"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_fails_the_notebook_that_met_it_and_it_runs_again(tmp_path: Path) -> None:
    note = write_notebook(tmp_path / "note.ipynb", "print('x' * 100_000)")
    (job,) = jobs.make_jobs(jobs.requests([str(note)], {}, None), "smoke", "cpu-test", profile_given=True, timeout=None)
    out = tmp_path / "out"
    out.mkdir()
    (out / f"{job.name}.ipynb").symlink_to("/dev/full")
    ran = run_cli(note, "--profile", "smoke", "--out", out)
    assert ran.code == 3
    assert ran.row("note")["status"] == "failed"
    assert "disk full" in ran.row("note")["error"]
    assert "disk full" in (out / "index.html").read_text()
    (out / f"{job.name}.ipynb").unlink()
    assert run_cli(note, "--profile", "smoke", "--out", out, "--resume").row("note")["status"] == "ok"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_results_that_cannot_be_written_cost_the_exit_code_and_keep_the_old_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    note = write_notebook(tmp_path / "note.ipynb", "1 + 1")
    out = tmp_path / "out"
    first = run_cli(note, "--profile", "smoke", "--out", out)
    assert first.code == 0
    before = (out / "results.json").read_text()
    (out / "results.json.part").symlink_to("/dev/full")
    again = run_cli(note, "--profile", "smoke", "--out", out, "--resume")
    assert again.code == 3
    assert "cannot write the results" in capsys.readouterr().err
    assert (out / "results.json").read_text() == before
