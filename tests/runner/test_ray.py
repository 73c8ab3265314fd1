"""Jobs on a Ray cluster of two local nodes, one of which is lost while a notebook runs on it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from batches import run_cli, write_notebook

pytestmark = pytest.mark.slow
ray = pytest.importorskip("ray", reason="the `batch` extra is not installed")

WAIT = """\
import os, pathlib, time
folder = pathlib.Path({folder!r})
with (folder / "starts").open("a") as starts:
    starts.write(f"{{os.getpid()}} {{os.environ['RAY_RAYLET_PID']}}\\n")
while not (folder / "go").exists():
    time.sleep(0.1)
print("n is", n)
"""


@pytest.fixture
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    for left in (2, 1, 0):  # Ray gives its agents fifteen seconds to start, which a loaded machine may exceed
        try:
            cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
            break
        except Exception:
            if not left:
                raise
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def until(condition: Any, seconds: float = 180) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "what was waited for never came"
        time.sleep(0.1)


def test_a_job_whose_node_is_lost_runs_again_on_another(cluster: Any, tmp_path: Path) -> None:
    nodes = [cluster.add_node(num_cpus=2), cluster.add_node(num_cpus=2)]
    cluster.wait_for_nodes()
    starts = tmp_path / "starts"
    write_notebook(tmp_path / "waits.ipynb", WAIT.format(folder=str(tmp_path)), parameters="n = 1  # count")
    write_notebook(tmp_path / "quick.ipynb", "print('quick')")
    write_notebook(tmp_path / "fails.ipynb", "1 / 0")
    done: list[Any] = []
    notes = [tmp_path / f"{name}.ipynb" for name in ("waits", "quick", "fails")]
    (tmp_path / "params.yml").write_text("runs:\n" + "".join(f"- notebook: '{note}'\n" for note in notes))
    arguments = ["--ray", cluster.address, "-f", tmp_path / "params.yml", "--out", tmp_path / "out"]
    batch = threading.Thread(target=lambda: done.append(run_cli(*arguments)))
    batch.start()
    try:
        until(lambda: starts.is_file() and starts.read_text().endswith("\n"))
        kernel, raylet = map(int, starts.read_text().split())
        (lost,) = [node for node in nodes if raylet_pid(node) == raylet]
        cluster.remove_node(lost, allow_graceful=False)
        until(lambda: len(starts.read_text().splitlines()) == 2)
        until(lambda: not psutil.pid_exists(kernel), 30)
    finally:
        (tmp_path / "go").write_text("")
        batch.join(240)
    (ran,) = done
    assert {Path(row["notebook"]).stem: row["status"] for row in ran.rows} == {"waits": "ok", "quick": "ok", "fails": "failed"}
    assert ran.code == 3
    assert ran.printed("waits") == "n is 1\n"
    assert ran.row("waits")["peak_memory_bytes"] > 2**24
    assert (ran.out / "index.html").is_file()


def raylet_pid(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)
