"""Makes the kernels that a model's loads need in processes of their own, side by side, before the model is measured.

    python -m pdlab.bench.memory_kernels MODEL MEMORY REQUESTS TASK      TASK: "shapes", or sizes of decode batches "1,2,4"

A kernel takes about a second to make and a load needs some dozens, most of them one after the other: a fresh process takes
half a minute to its first token. What one process makes, all find in Triton's cache on disk. Nothing waits for what fails
here: it is then made when it is first met, as it would be anyway.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from pdlab.core.config import EngineConfig
from pdlab.workloads.workload import Item, Workload

MEMORIES = ("paged", "contiguous_pool")  # every allocator's kernels are those of one of them
PROCESS_BYTES = 6 << 30  # of a device, for two layers of a large model, its vocabulary, a small cache and a context


def tasks(sizes: Sequence[int]) -> list[tuple[str, str]]:
    """(memory, task) of each process: some need many kernels of their own, decode batches of neighbouring sizes share them."""
    few, many = [n for n in sizes if n <= 8], [n for n in sizes if n > 8]
    groups = [[1], [n for n in few if n > 1], *(many[i::3] for i in range(3))]
    named = [",".join(map(str, group)) for group in groups if group]
    return [(m, "shapes") for m in MEMORIES] + [(MEMORIES[0], n) for n in named] + [(MEMORIES[1], n) for n in named[::2]]


def make(model: str, requests: int, *, at_once: int, patience_s: float = 40.0, command: Sequence[str] = ()) -> float:
    """Runs all processes to their end, `at_once` side by side, for `patience_s` seconds at most; the seconds that it took."""
    from pdlab.engine.graphs import graph_sizes

    started = time.monotonic()
    program = list(command) or [sys.executable, "-m", "pdlab.bench.memory_kernels"]
    waiting = [[*program, model, memory, str(requests), task] for memory, task in tasks(graph_sizes(requests))]
    running: list[subprocess.Popen[bytes]] = []
    while (waiting or running) and time.monotonic() - started < patience_s:
        running = [process for process in running if process.poll() is None]
        while waiting and len(running) < at_once:
            running.append(subprocess.Popen(waiting.pop(0), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        time.sleep(0.05)
    for process in running:
        process.kill()
        process.wait()
    return time.monotonic() - started


def how_many(memory_bytes: int) -> int:
    """Processes side by side: one a core but for this one, and no more than the device's memory holds."""
    return max(1, min((os.cpu_count() or 2) - 1, memory_bytes // PROCESS_BYTES))


def shapes(config: EngineConfig) -> Iterable[Workload]:
    """Long and short chunks of prompts, alone and beside few and many decodes that all go on to the end: of each size of
    batch one."""
    long = min(1900, config.max_batch_tokens - 100)
    prompts = [Item(0.0, prompt_tokens=n, max_tokens=1) for n in (long, long, long // 9, 20, long // 9)]
    for decodes in sorted({0, *(min(n, config.max_batch_requests) for n in (20, 100, 300))}, reverse=True):
        short = [Item(0.0, prompt_tokens=6, max_tokens=8) for _ in range(decodes)]
        yield Workload("shapes", short + prompts, clients=decodes + 2 if decodes else 1)


def work(model: str, memory: str, requests: int, task: str) -> None:
    """What one process does: runs what the task names on a small memory of that kind."""
    from pdlab.bench.kv_allocators import Load
    from pdlab.bench.memory_runs import play
    from pdlab.hardware.probe import resolve_device
    from pdlab.llm import LLM
    from pdlab.models.catalogue import config_of
    from pdlab.models.loading import DTYPES, Loaded, build
    from pdlab.models.source import RandomSource
    from pdlab.models.tokenizer import ByteTokenizer

    machine = resolve_device("auto")
    small = replace(config_of(f"random:{model}"), num_layers=2)  # a kernel does not know how many layers there are
    layers = build(small, RandomSource(small, machine.device, DTYPES[machine.dtype], 0))
    loaded = Loaded(small, layers, ByteTokenizer(small), "random")
    asked = Load(model, requests, requests)
    longest = min(asked.longest, loaded.config.max_context)
    config = asked.config(memory, device=machine.device, dtype=machine.dtype, kv_capacity_tokens=8 * longest + 40 * requests)
    config = config.with_(max_model_len=longest, max_batch_tokens=min(config.max_batch_tokens, longest))
    with LLM(loaded, config) as llm:
        if task != "shapes":
            llm.engine.executor.capture_graphs(("greedy",), sizes=[int(n) for n in task.split(",")])  # type: ignore[attr-defined]
            return
        for workload in shapes(config):
            items = (replace(i, prompt_tokens=min(i.prompt_tokens, longest - 8)) for i in workload)
            play(llm.engine, Workload(workload.name, items, clients=workload.clients))


if __name__ == "__main__":
    work(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
