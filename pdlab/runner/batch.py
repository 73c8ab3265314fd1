"""The batch: jobs over slots, results on disk after each, resumed by key, ended well by Ctrl-C.

A GPU is a slot (notebooks that measure must not share one); on the CPU there are `--jobs` of them. results.json is
replaced as a whole after every job, so a batch that is killed at any point goes on from there with --resume.
"""

from __future__ import annotations

import csv
import io
import json
import os
import queue
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from pdlab.core.errors import NotebookError
from pdlab.runner import pages
from pdlab.runner.jobs import Job
from pdlab.runner.notebook import VALUES
from pdlab.runner.process import EXIT_CODES, Result, run_job


class Batch:
    """`run()` returns the results in the order of the jobs; everything is also in `out`."""

    def __init__(self, jobs: list[Job], out: Path, *, gpus: list[str], workers: int, resume: bool) -> None:
        self.jobs, self.out, self.gpus, self.workers = jobs, out.resolve(), gpus, workers
        self.results: dict[str, Result] = {}
        self.cancel = threading.Event()
        self.say = Say(len(jobs))
        self.problems: list[str] = []
        self._values: dict[str, dict[str, Any]] = {}  # of each finished job, for the table
        self._lock = threading.Lock()
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise NotebookError(f"cannot write to {str(out)!r}: {error.strerror}", "give another folder with --out") from None
        self._earlier = load_results(out)
        if resume:
            self._take_over()

    def run(self) -> list[Result]:
        slots = self._slots()
        threads = [threading.Thread(target=self._serve, args=slot, daemon=True) for slot in slots]
        with interruptible(self.cancel):
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                self.say.status()
                time.sleep(0.1)
        return self.finish()

    def finish(self) -> list[Result]:
        for job in self.jobs:
            if job.key not in self.results:
                self.results[job.key] = unstarted(job, self.cancel.is_set())
        self.save()
        self._remove_stale()
        return self.ordered()

    def ordered(self) -> list[Result]:
        return [self.results[job.key] for job in self.jobs if job.key in self.results]

    def done(self, job: Job, result: Result) -> None:
        pages.write(self.out, result)
        with self._lock:
            self.results[job.key] = result
            self._values[job.key] = given_values(self.out, result)
            self.save()
        self.say.ended(job, result)

    def save(self) -> None:
        """results.json, junit.xml and results.csv; a full disk is said once and costs the exit code, not the batch."""
        rows = [result.row() for result in self.ordered()]
        try:
            replace_text(self.out / "results.json", json.dumps(rows, indent=1, default=str) + "\n")
            replace_text(self.out / "junit.xml", junit(rows))
            replace_text(self.out / "results.csv", table(rows, self._values))
        except OSError as error:
            problem = f"cannot write the results to {self.out}: {error.strerror}"
            if problem not in self.problems:
                self.problems.append(problem)
                self.say.line(problem)

    def exit_code(self) -> int:
        codes = [EXIT_CODES[result.status] for result in self.ordered()] + [3 for _ in self.problems]
        return max([*codes, 130 if self.cancel.is_set() else 0])

    def _slots(self) -> list[tuple[queue.SimpleQueue[Job], dict[str, str]]]:
        """(queue, environment) of each worker thread: the GPUs share what runs in full, the CPU's slots share the rest."""
        todo = [job for job in self.jobs if job.key not in self.results]
        on_gpu = [job for job in todo if job.profile == "full" and self.gpus]
        on_cpu = [job for job in todo if job not in on_gpu]
        workers = min(self.workers, len(on_cpu))
        threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // workers))} if workers > 1 else {}
        gpu_queue, cpu_queue = _queue(on_gpu), _queue(on_cpu)
        gpu_slots = [(gpu_queue, {"CUDA_VISIBLE_DEVICES": gpu}) for gpu in self.gpus[: len(on_gpu)]]
        return gpu_slots + [(cpu_queue, {"CUDA_VISIBLE_DEVICES": "", **threads}) for _ in range(workers)]

    def _serve(self, jobs: queue.SimpleQueue[Job], env: dict[str, str]) -> None:
        while not self.cancel.is_set():
            try:
                job = jobs.get_nowait()
            except queue.Empty:
                return
            self.say.started(job)
            result = run_job(job, self.out, self.cancel, env=env, progress=partial(self.say.cell, job))
            self.done(job, result)

    def _take_over(self) -> None:
        """What an earlier batch in this folder finished, for as long as its notebook is still there."""
        for job in self.jobs:
            row = self._earlier.get(job.key)
            if row and row["status"] in ("ok", "cached") and row["output"] and (self.out / row["output"]).is_file():
                self.results[job.key] = result = Result(**{**row, "status": "cached"})
                self._values[job.key] = given_values(self.out, result)
                self.say.ended(job, result)

    def _remove_stale(self) -> None:
        """The outputs of an earlier batch that this one replaced: a folder holds one batch."""
        kept = {result.output for result in self.results.values()}
        for row in self._earlier.values():
            if row["output"] and row["output"] not in kept:
                for path in (self.out / row["output"], (self.out / row["output"]).with_suffix(".html")):
                    path.unlink(missing_ok=True)


class Say:
    """Progress on standard error: one line that is drawn again on a terminal, plain lines in a log."""

    def __init__(self, total: int, stream: Any = None) -> None:
        self.total, self.stream, self.finished = total, stream or sys.stderr, 0
        self.live = self.stream.isatty()
        self._running: dict[str, tuple[Job, float, int, int]] = {}
        self._lock = threading.Lock()

    def line(self, text: str) -> None:
        with self._lock, suppress(OSError):  # whoever read this may be gone; the batch goes on
            self.stream.write(("\r\x1b[K" if self.live else "") + text + "\n")
            self.stream.flush()

    def started(self, job: Job) -> None:
        self._running[job.key] = (job, time.monotonic(), 0, 0)
        if not self.live:
            self.line(f"started  {job.label}")

    def cell(self, job: Job, done: int, of: int) -> None:
        if job.key in self._running:
            self._running[job.key] = (job, self._running[job.key][1], done, of)

    def ended(self, job: Job, result: Result) -> None:
        self._running.pop(job.key, None)
        self.finished += 1
        text = f"[{self.finished}/{self.total}] {result.status:<8} {job.label}  {result.seconds:.1f} s"
        if result.peak_memory_bytes:
            text += f"  {result.peak_memory_bytes / 2**20:.0f} MiB"
        self.line(text + (f"\n         {result.error}" if result.error else ""))

    def status(self) -> None:
        if self.live and self._running:
            now = time.monotonic()
            parts = [
                f"{j.path.stem} cell {done}/{of or '?'} {now - t:.0f} s" for j, t, done, of in list(self._running.values())
            ]
            with self._lock, suppress(OSError):
                self.stream.write("\r\x1b[K" + "  ·  ".join(parts)[:150])
                self.stream.flush()


@contextmanager
def interruptible(cancel: threading.Event) -> Iterator[None]:
    """Ctrl-C and SIGTERM set `cancel`: what runs is saved and ended, what waits is not started."""

    def stop(signum: int, frame: Any) -> None:
        cancel.set()

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def unstarted(job: Job, interrupted: bool) -> Result:
    status, why = ("skipped", "interrupted") if interrupted else ("failed", "the batch ended early")
    return Result(str(job.path), job.params, job.profile, job.key, status, 0.0, None, f"not started: {why}", None)


def _queue(jobs: list[Job]) -> queue.SimpleQueue[Job]:
    waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)
    return waiting


def load_results(out: Path) -> dict[str, dict[str, Any]]:
    """The rows of an earlier batch by key; nothing where there is none or it cannot be read."""
    try:
        rows = json.loads((out / "results.json").read_text(encoding="utf-8"))
        names = set(Result.__dataclass_fields__)
        return {row["key"]: row for row in rows if set(row) == names}
    except (OSError, ValueError, TypeError, KeyError):
        return {}


def replace_text(path: Path, text: str) -> None:
    """All or nothing: a reader, or a batch killed meanwhile, never meets half a file."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def junit(rows: list[dict[str, Any]]) -> str:
    """One test case a notebook, for continuous integration to show."""
    bad = [row for row in rows if EXIT_CODES[row["status"]]]
    skipped = [row for row in rows if row["status"] == "skipped"]
    counts = {"tests": len(rows), "failures": len(bad), "skipped": len(skipped)}
    suite = ElementTree.Element("testsuite", {"name": "pdlab run", **{k: str(v) for k, v in counts.items()}})
    for row in rows:
        name = " ".join([Path(row["notebook"]).stem, *(f"{k}={v}" for k, v in row["params"].items())])
        case = ElementTree.SubElement(suite, "testcase", {"name": name, "classname": "notebooks", "time": str(row["seconds"])})
        if row in bad:
            words = re.sub(r"[^\t\n\x20-\ud7ff\ue000-\ufffd]", "?", row["error"] or row["status"])  # what XML can hold
            ElementTree.SubElement(case, "failure", {"type": row["status"], "message": words}).text = words
        elif row in skipped:
            ElementTree.SubElement(case, "skipped", {"message": row["error"] or ""})
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def table(rows: list[dict[str, Any]], values: dict[str, dict[str, Any]]) -> str:
    """results.csv: a sweep as one table, a row a run, with its parameters and the values that the notebook gave."""
    lines: list[dict[str, Any]] = []
    for row in rows:
        line = {
            "notebook": Path(row["notebook"]).stem,
            **{name: row[name] for name in ("status", "seconds", "peak_memory_bytes")},
        }
        for more in (row["params"], values.get(row["key"], {})):
            line |= {name: value for name, value in more.items() if name not in line}
        lines.append(line)
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(dict.fromkeys(name for line in lines for name in line)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def given_values(out: Path, result: Result) -> dict[str, Any]:
    """What the executed notebook displayed as VALUES, later ones winning."""
    if EXIT_CODES[result.status] or not result.output:
        return {}
    try:
        nb = json.loads((out / result.output).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    values: dict[str, Any] = {}
    for cell in nb["cells"]:
        for output in cell.get("outputs", []):
            values |= output.get("data", {}).get(VALUES) or {}
    return values
