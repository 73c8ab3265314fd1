"""`pdlab run`: arguments to a batch, and a batch to an exit code."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from pdlab.core.errors import NotebookError
from pdlab.hardware.probe import cpu_slug
from pdlab.runner import jobs as planning
from pdlab.runner.batch import Batch, load_results
from pdlab.runner.jobs import Job
from pdlab.runner.process import Result

EXAMPLES = """examples:
  pdlab run                                       the whole series, in the profile that fits this machine
  pdlab run 03 -p seed=1 --timeout 300            one notebook of the series with a parameter of its own
  pdlab run my/notebook.ipynb -f params.yml       any notebook; a list in the file makes a grid
  pdlab run -f night.yml --out runs/night --resume   a whole batch, gone on with after a kill

exit codes: 0 well; 2 usage; 3 a notebook failed; 4 timed out; 5 its kernel died; 6 out of memory; 130 interrupted
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "run",
        help="Run notebooks as a batch and write a report.",
        description="Run notebooks with papermill, one process each, and write a report.\n\n" + (planning.__doc__ or ""),
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("notebooks", nargs="*", metavar="NOTEBOOK", help="a path, or a name or number of the series; the series if left out")
    add("--profile", choices=["auto", "smoke", "full"], default="auto", help="smoke: CPU; full: a GPU (default: what is here)")
    add("--out", type=Path, default=Path("runs/latest"), metavar="DIR", help="where results go (default: runs/latest)")
    add("--resume", action="store_true", help="skip what an earlier batch in DIR finished with the same content")
    add("--timeout", type=float, metavar="SECONDS", help="for each notebook")
    add("--jobs", type=int, metavar="N", help="notebooks side by side on the CPU (default: one for two cores)")
    add("--gpu", metavar="0,1", help="GPUs to use, one notebook at a time on each (default: 0)")
    add("--ray", metavar="ADDRESS", help="send the jobs to this Ray cluster instead (auto: the one this machine is in)")
    add("--dry-run", action="store_true", help="say what would run, its estimated time and memory")
    add("-p", dest="parameters", action="append", default=[], metavar="NAME=VALUE", help="a parameter, its value read as YAML")
    add("-f", dest="file", type=Path, metavar="FILE.yml", help="parameters, or a whole batch, in YAML")
    add("--json", action="store_true", help="print the results as one JSON document")
    parser.set_defaults(func=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Everything is checked before anything is executed; a PdlabError out of here means that nothing was."""
    if args.timeout is not None and not args.timeout > 0:
        raise NotebookError(f"--timeout {args.timeout:g} is not a time", "give seconds, more than 0")
    if args.jobs is not None and args.jobs < 1:
        raise NotebookError(f"--jobs {args.jobs} runs nothing", "give 1 or more")
    visible = args.gpu or os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    gpus = [gpu.strip() for gpu in visible.split(",") if gpu.strip()]
    fixed = dict(planning.parse_assignment(text) for text in args.parameters)
    asked = planning.requests(args.notebooks, fixed, planning.read_batch(args.file) if args.file else None)
    if args.ray:
        from pdlab.runner import cluster

        machine = cluster.connect(args.ray)
    else:
        machine = describe_machine(args.profile, gpus[0])
    profile = machine["profile"] if args.profile == "auto" else args.profile
    if profile == "full" and machine["device"] == "cpu" and args.profile == "auto":
        profile = "smoke"
    jobs = planning.make_jobs(asked, profile, machine["slug"], profile_given=args.profile != "auto", timeout=args.timeout)
    if machine["device"] == "cpu" and not args.ray and any(job.profile == "full" for job in jobs):
        why = machine.get("problem") or "no GPU is here"
        print(f"{why}: notebooks of the series run a CPU's sizes in the profile full, too, and say so;", file=sys.stderr)
        print("their parameters that begin with gpu_ do nothing", file=sys.stderr)
    if args.dry_run:
        return show_plan(jobs, args)
    workers = args.jobs or max(1, (os.cpu_count() or 1) // 2)
    batch = Batch(jobs, args.out, gpus=gpus if machine["device"] != "cpu" else [], workers=workers, resume=args.resume)
    started = time.monotonic()
    results = cluster.run_batch(batch) if args.ray else batch.run()
    show_results(batch, results, machine, args, time.monotonic() - started)
    return batch.exit_code()


def describe_machine(profile: str, gpu: str) -> dict[str, Any]:
    """The machine as probe() sees it, from a process of its own: a CUDA context here would keep the GPU from the notebooks."""
    if profile == "smoke":
        facts = {"name": f"{platform.machine()}, {os.cpu_count()} logical cores", "slug": cpu_slug(), "dtype": "float32"}
        return {**facts, "device": "cpu", "profile": profile, "memory_bytes": psutil.virtual_memory().total}
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
    code = "import dataclasses, json; from pdlab.hardware.probe import probe; print(json.dumps(dataclasses.asdict(probe())))"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    try:
        machine: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        raise NotebookError(f"cannot tell what this machine is: {done.stderr.strip()[-300:]}", "try: pdlab doctor") from None
    return machine


def show_plan(jobs: list[Job], args: argparse.Namespace) -> int:
    earlier = load_results(args.out)
    rows: list[dict[str, Any]] = []
    for job in jobs:
        seconds, memory = estimate(job, earlier)
        cached = args.resume and earlier.get(job.key, {}).get("status") in ("ok", "cached")
        row: dict[str, Any] = {
            "notebook": str(job.path),
            "params": job.params,
            "profile": job.profile,
            "key": job.key,
            "timeout": job.timeout,
        }
        estimated = {"estimated_seconds": 0.0 if cached else seconds, "estimated_memory_bytes": memory}
        rows.append({**row, "cached": bool(cached), **estimated})
    if args.json:
        print(json.dumps(rows, default=str))
        return 0
    for job, row in zip(jobs, rows, strict=True):
        seconds, memory = row["estimated_seconds"], row["estimated_memory_bytes"]
        time_text = "cached" if row["cached"] else "? s" if seconds is None else f"{seconds:.0f} s"
        memory_text = f"{memory / 2**20:.0f} MiB" if memory else "? MiB"
        print(f"{job.profile:<6} {time_text:>8} {memory_text:>10}  {job.label}")
    known = [row["estimated_seconds"] for row in rows if row["estimated_seconds"] is not None]
    unknown = f", {len(rows) - len(known)} of unknown length" if len(known) < len(rows) else ""
    print(f"{len(rows)} run{'s' * (len(rows) != 1)}, about {sum(known):.0f} s of work{unknown}")
    return 0


def estimate(job: Job, earlier: dict[str, dict[str, Any]]) -> tuple[float | None, int | None]:
    """(seconds, bytes) from an earlier batch in this folder, else from the series' manifest; None where neither knows."""
    past = [
        row
        for row in earlier.values()
        if Path(row["notebook"]).stem == job.path.stem and row["profile"] == job.profile and row["status"] in ("ok", "cached")
    ]
    if past:
        best = next((row for row in past if row["params"] == job.params), past[-1])
        return best["seconds"], best["peak_memory_bytes"]
    try:
        manifest = json.loads((job.path.parent / "manifest.json").read_text(encoding="utf-8"))
        entry = next(entry for entry in manifest["notebooks"] if entry["file"] == job.path.name)
        return entry["seconds"].get(job.profile), (entry.get("memory_bytes") or {}).get(job.profile)
    except (OSError, ValueError, KeyError, StopIteration, AttributeError):
        return None, None


def show_results(
    batch: Batch, results: list[Result], machine: dict[str, Any], args: argparse.Namespace, seconds: float
) -> None:
    from pdlab.runner import report

    rows = [result.row() for result in results]
    try:
        page = report.write(args.out, machine, rows)
    except OSError as error:
        page = None
        batch.problems.append(f"cannot write the report: {error}")
        print(batch.problems[-1], file=sys.stderr)
    if args.json:
        print(json.dumps(rows, default=str))
        return
    width = max([len(row["status"]) for row in rows], default=0)
    for job, row in zip(batch.jobs, rows, strict=True):
        memory = f"{row['peak_memory_bytes'] / 2**20:.0f} MiB" if row["peak_memory_bytes"] else "–"
        print(f"{row['status']:<{width}}  {row['seconds']:7.1f} s  {memory:>9}  {job.label}")
    where = f"; report: {os.path.relpath(page)}" if page else ""
    print(f"{len(rows)} run{'s' * (len(rows) != 1)} in {seconds:.0f} s{where}")
