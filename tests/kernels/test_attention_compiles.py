"""The attention kernels compile for each generation without spilling and fit its shared memory; checked without a GPU."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")

import pdlab.kernels  # noqa: E402

Job = tuple[str, tuple[int, int], int, int]  # kind, capability, head size, query tokens (ring: heads of a group)
SHIPPED: list[Job] = [(kind, capability, head, tokens) for capability in ((8, 0), (8, 9), (9, 0)) for head in (64, 128)
           for kind, tokens in (("decode", 1), ("ring", 4), ("prefill", 4096))]  # fmt: skip
SHIPPED += [("prefill", (9, 0), head, 256) for head in (64, 128)]
RARE: list[Job] = [(kind, capability, head, tokens) for capability in ((8, 0), (8, 9), (9, 0))
        for kind, head, tokens in (("decode", 256, 1), ("prefill", 256, 4096), ("decode", 80, 1), ("prefill", 80, 256),
                                   ("decode", 128, 4), ("decode", 64, 16), ("ring", 128, 7), ("ring", 64, 1))]  # fmt: skip


def _of_the_table(name: str, capability: tuple[int, int]) -> list[Job]:
    """A job for each kernel that a shipped table names, but for the warp-specialized prefill kernels, which have their own."""
    entries = json.loads((Path(pdlab.kernels.__file__).parents[2] / "data" / "tuning" / f"{name}.json").read_text())
    kept = [e for e in entries.get("attention_tiles", []) if e["kind"] in ("decode", "decode_ring", "prefill")]
    bounds = ("max_batch", "max_kv", "max_rows", "max_queries", "min_queries", "group", "least")
    tiles = dict.fromkeys(json.dumps({k: v for k, v in e.items() if k not in bounds}, sort_keys=True) for e in kept)
    found: list[Job] = []
    for text in tiles:
        tile = json.loads(text)
        found.append((text, capability, tile["head_dim"], {"decode": 1, "decode_ring": 4, "prefill": 4096}[tile["kind"]]))
    return found


SHIPPED += _of_the_table("nvidia-h200", (9, 0))
# The reserve that CUDA keeps of each block's shared memory (CUDA programming guide, compute capabilities)
RESERVED = 1024
REGISTERS = 65536


def label(job: Job) -> str:
    kind, (major, minor), head, tokens = job
    if kind.startswith("{"):
        tile = json.loads(kind)
        kind = "table-" + tile.pop("kind") + "-" + "-".join(f"{k}={v}" for k, v in tile.items() if k != "head_dim")
    return f"{kind}-sm_{major}{minor}-hd={head}-q={tokens}"


def compiled(jobs: list[Job], cache: Path, environment: dict[str, str]) -> dict[Job, dict[str, Any]]:
    """What the compiler says of each job; remembered by the kernels' source, so that unchanged kernels cost nothing."""
    here = Path(__file__).parent
    package = Path(pdlab.kernels.__file__).parent
    names = (
        "addressing",
        "decode_line",
        "flash_decode",
        "flash_decode_ring",
        "flash_prefill",
        "tuning",
    )
    sources = [(package / f"{name}.py").read_bytes() for name in names] + [(here / "compile_worker.py").read_bytes()]
    key = b"\0".join([*sources, triton.__version__.encode()])
    path = {job: cache / f"{hashlib.sha256(key + json.dumps(job).encode()).hexdigest()}.json" for job in jobs}
    missing = [job for job in jobs if not path[job].exists()]
    if missing:
        environment = environment | {"PYTHONPATH": os.pathsep.join([str(here.parent.parent), str(here)])}
        command = [sys.executable, str(here / "compile_worker.py"), json.dumps(missing)]
        run = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert run.returncode == 0, run.stderr[-3000:]
        for job, line in zip(missing, run.stdout.splitlines(), strict=True):
            path[job].write_text(line)
    return {job: json.loads(path[job].read_text()) for job in jobs}


def check(job: Job, found: dict[str, Any]) -> None:
    assert found["STACK"] == 0, f"registers spill: {found}"
    assert found["blocks"] * (found["shared"] + RESERVED) <= found["room"], (
        f"the grid's blocks are not resident together: {found}"
    )
    assert found["blocks"] * found["warps"] * 32 * found["REG"] <= REGISTERS, (
        f"the grid's blocks are not resident together: {found}"
    )
    assert found["HMMA"] + found["HGMMA"] > 0, "no matrix instruction: the products run on the plain cores"
    if job[0] == "prefill" and job[1][0] == 9:
        assert found["HGMMA"] > 0, "the slow matrix instructions of earlier generations"


@pytest.mark.xdist_group("compiler")
@pytest.mark.parametrize("job", SHIPPED, ids=label)
def test_shipped_tiles_compile_without_spills_and_fit(
    job: Job, request: pytest.FixtureRequest, compile_environment: dict[str, str]
) -> None:
    check(job, compiled(SHIPPED, request.config.cache.mkdir("compiled_attention"), compile_environment)[job])


@pytest.mark.slow
@pytest.mark.xdist_group("compiler")
@pytest.mark.parametrize("job", RARE, ids=label)
def test_rarer_head_sizes_and_several_queries_compile_without_spills_and_fit(
    job: Job, request: pytest.FixtureRequest, compile_environment: dict[str, str]
) -> None:
    check(job, compiled(RARE, request.config.cache.mkdir("compiled_attention"), compile_environment)[job])
