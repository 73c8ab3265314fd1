"""Run one job in a process of its own, watched by this one's clock: timeouts, memory, deaths.

The kernel is the worker's child in a session of its own, so it is found and ended by its process id. Peak memory is the
kernel's resident high-water mark.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from pdlab.core.paths import checkout_dir
from pdlab.runner.jobs import Job
from pdlab.runner.notebook import DISK_FULL

EXIT_CODES = {
    "ok": 0,
    "cached": 0,
    "skipped": 0,
    "failed": 3,
    "timeout": 4,
    "died": 5,
    "oom": 6,
    "interrupted": 130,
}
GRACE_S = 5.0  # for a stopped worker to save its notebook before it is killed
POLL_S = 0.05


@dataclass
class Result:
    """One row of results.json. `output` is relative to the batch's folder; None where nothing could be written."""

    notebook: str
    params: dict[str, Any]
    profile: str
    key: str
    status: str
    seconds: float
    peak_memory_bytes: int | None
    error: str | None
    output: str | None

    def row(self) -> dict[str, Any]:
        return asdict(self)


Progress = Callable[[int, int], None]  # code cells done, and how many there are


def run_job(
    job: Job,
    out: Path,
    cancel: threading.Event,
    *,
    env: dict[str, str] | None = None,
    progress: Progress = lambda done, of: None,
) -> Result:
    """Blocks until the notebook ended, ran past its time or `cancel` was set. Never raises for what the notebook does."""
    output = out / f"{job.name}.ipynb"
    started = time.monotonic()
    watched = _Watched()
    try:
        if output.is_file():
            output.unlink()  # of a batch that was cut off: what lies there afterwards is of this one
        with tempfile.TemporaryDirectory(prefix="pdlab-", ignore_cleanup_errors=True) as folder:
            status, error = watched.run(job, output, Path(folder), cancel, env or {}, progress)
    except Exception as problem:  # a full disk, no process to be had: this job's failure, not the batch's
        status, error = "failed", f"the batch could not run it: {type(problem).__name__}: {problem}"
    seconds = time.monotonic() - started
    written = output.name if output.is_file() and output.stat().st_size else None
    path = os.path.relpath(job.path) if job.path.is_relative_to(Path.cwd()) else str(job.path)
    return Result(path, job.params, job.profile, job.key, status, round(seconds, 3), watched.peak, error, written)


class _Watched:
    """One worker process and its kernel."""

    def __init__(self) -> None:
        self.peak: int | None = None
        self.kernel: int | None = None

    def run(
        self, job: Job, output: Path, folder: Path, cancel: threading.Event, env: dict[str, str], progress: Progress
    ) -> tuple[str, str | None]:
        spec = {"notebook": str(job.path), "output": str(output), "params": job.params}
        (folder / "spec.json").write_text(json.dumps(spec), encoding="utf-8")
        deadline = time.monotonic() + job.timeout if job.timeout else None
        with (folder / "log.txt").open("wb") as log:
            worker = subprocess.Popen(
                [sys.executable, "-P", "-m", "pdlab.runner.worker", str(folder / "spec.json")],
                cwd=folder,
                env=_environment(job, env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            stopped = None
            try:
                while worker.poll() is None:
                    stopped = (
                        "interrupted" if cancel.is_set() else "timeout" if deadline and time.monotonic() > deadline else None
                    )
                    if stopped:
                        break
                    self.observe(folder, progress)
                    time.sleep(POLL_S)
            finally:
                self.end(worker, folder, progress)
        return self.verdict(job, worker.returncode, folder, stopped)

    def observe(self, folder: Path, progress: Progress) -> None:
        try:
            state = json.loads((folder / "progress.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return
        self.kernel = state["kernel_pid"]
        progress(state["done"], state["of"])
        if memory := _peak_memory(state["kernel_pid"]):
            self.peak = max(self.peak or 0, memory)

    def end(self, worker: subprocess.Popen, folder: Path, progress: Progress) -> None:
        """Whatever is still alive: asked first, so that the notebook is saved, then killed, children and kernel included."""
        self.observe(folder, progress)
        alive: list[psutil.Process] = []
        for pid in filter(None, (worker.pid, self.kernel)):
            try:
                process = psutil.Process(pid)
                alive += [process, *process.children(recursive=True)]
            except psutil.NoSuchProcess:
                continue
        if worker.poll() is None:
            worker.terminate()
            try:
                worker.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
        for process in alive:
            try:
                process.kill()  # psutil compares start times, so a recycled id is safe
            except psutil.NoSuchProcess:
                continue

    def verdict(self, job: Job, code: int, folder: Path, stopped: str | None) -> tuple[str, str | None]:
        try:
            found = json.loads((folder / "verdict.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            found = None
        if stopped:
            where = f" ({found['error']})" if found else ""
            return stopped, f"ran longer than {job.timeout:g} s{where}" if stopped == "timeout" else f"interrupted{where}"
        if found:
            return found["status"], found["error"]
        if code == DISK_FULL:
            return "failed", "disk full: neither the notebook nor its verdict could be written"
        if code < 0:
            return "died", f"the notebook's process was killed by signal {-code}"
        tail = (folder / "log.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        return "failed", f"the notebook could not be run: {tail[0] if tail else f'code {code}'}"


def _environment(job: Job, extra: dict[str, str]) -> dict[str, str]:
    """PYTHONPATH makes a checkout work without installing it; PDLAB_PROFILE tells the notebook's set-up what was decided."""
    env = {**os.environ, "PDLAB_PROFILE": job.profile, "MPLBACKEND": _BACKEND, **extra}
    if root := checkout_dir():
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), env.get("PYTHONPATH")]))
    return env


_BACKEND = "module://matplotlib_inline.backend_inline"  # a backend set for a terminal would draw nothing in a notebook


def _peak_memory(pid: int) -> int | None:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        return int(psutil.Process(pid).memory_info().rss)
    except (OSError, psutil.Error):
        return None
