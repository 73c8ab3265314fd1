"""The same jobs on a Ray cluster.

A notebook travels as bytes and its executed copy comes back the same way, so the nodes need pdlab and the `lab` extra but
no shared disk. A job whose node is lost is started again on another one: jobs are whole and leave nothing half-done.
"""

from __future__ import annotations

import logging
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from pdlab.core.errors import NotebookError
from pdlab.runner.batch import Batch, interruptible
from pdlab.runner.jobs import Job
from pdlab.runner.process import Result, run_job

RETRIES = 3  # lost nodes a job may meet
CPUS_A_JOB = 2


def connect(address: str) -> dict[str, Any]:
    """Joins the cluster and describes it as one machine; raises NotebookError where that cannot be done."""
    try:
        import ray
    except ImportError:
        raise NotebookError("--ray needs Ray, which is not installed", "pip install 'pdlab[batch]'") from None
    try:
        ray.init(address=address, ignore_reinit_error=True, log_to_driver=False, logging_level=logging.WARNING)
    except Exception as error:  # Ray raises ConnectionError, ValueError and its own, by version and kind of address
        hint = "start one with `ray start --head` and pass its address"
        raise NotebookError(f"cannot reach a Ray cluster at {address!r}: {error}", hint) from None
    resources = ray.cluster_resources()
    kinds = sorted(name.partition(":")[2].lower() for name in resources if name.startswith("accelerator_type:"))
    gpus = int(resources.get("GPU", 0))
    return {
        "name": f"Ray cluster: {resources.get('CPU', 0):.0f} CPUs" + (f", {gpus} GPUs ({' '.join(kinds)})" if gpus else ""),
        "slug": "ray-" + ("-".join(kinds) if gpus else "cpu"),
        "device": "cuda" if gpus else "cpu",
        "profile": "full" if gpus else "smoke",
        "memory_bytes": int(resources.get("memory", 0)),
    }


def run_batch(batch: Batch) -> list[Result]:
    """As Batch.run(), with the cluster's scheduler in place of this machine's slots."""
    import ray

    task = ray.remote(max_retries=RETRIES)(_on_node)
    pending: dict[Any, Job] = {}
    for job in batch.jobs:
        if job.key not in batch.results:
            gpus = 1 if job.profile == "full" else 0
            remote = task.options(num_cpus=CPUS_A_JOB, num_gpus=gpus)
            pending[remote.remote(replace(job, path=Path(job.path.name)), job.path.read_bytes(), str(job.path))] = job
            batch.say.started(job)
    with interruptible(batch.cancel):
        while pending and not batch.cancel.is_set():
            ready, _ = ray.wait(list(pending), num_returns=1, timeout=0.2)
            batch.say.status()
            for reference in ready:
                _collect(batch, pending.pop(reference), reference)
        for reference in pending:
            ray.cancel(reference, force=False)
    return batch.finish()


def _collect(batch: Batch, job: Job, reference: Any) -> None:
    import ray

    try:
        result, content = ray.get(reference)
    except ray.exceptions.RayError as error:  # its node was lost more often than it may be tried again
        words = str(error).strip().splitlines()
        result, content = Result(str(job.path), job.params, job.profile, job.key, "died", 0.0, None, words[0], None), None
    if content is not None:
        (batch.out / f"{job.name}.ipynb").write_bytes(content)
    batch.done(job, result)


def _on_node(job: Job, notebook: bytes, original: str) -> tuple[Result, bytes | None]:
    """Runs on the cluster. Where the original path exists (a shared disk) the notebook runs there, beside its files."""
    cancel = threading.Event()
    with tempfile.TemporaryDirectory(prefix="pdlab-ray-") as folder:
        path = Path(original)
        if not (path.is_file() and path.read_bytes() == notebook):
            path = Path(folder) / job.path
            path.write_bytes(notebook)
        out = Path(folder) / "out"
        out.mkdir()
        result = run_job(replace(job, path=path), out, cancel)
        result.notebook = original
        return result, (out / result.output).read_bytes() if result.output else None
