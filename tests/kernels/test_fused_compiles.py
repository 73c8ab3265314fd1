"""The fused kernels compile for each generation without spilling and fit its shared memory; checked without a GPU."""

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

PRODUCTS = ("norm_qkv_rope", "out_residual", "norm_mlp_up", "down_residual", "projection_sample")
RINGS = ("ring_norm_product", "ring_norm_qkv_rope", "ring_residual_product", "ring_project")
FILTERS = ("row_tops", "filtered_sample", "filtered_search", "filtered_search_alone")
ROWS = ("norm_rows", "rope_rows", "silu_product", *FILTERS)
GENERATIONS = ((8, 0), (8, 9), (9, 0))
SHIPPED = [(name, (9, 0), "llama-1b", batch) for name in PRODUCTS for batch in (1, 32)]
SHIPPED += [("norm_mlp_up", capability, "llama-3-8b", batch) for capability in ((8, 0), (8, 9)) for batch in (1, 64)]
SHIPPED += [(name, (8, 0), "qwen3-8b", 1) for name in ROWS]
SHIPPED += [(name, (9, 0), "llama-1b", 1) for name in RINGS]
RARE = [
    (name, capability, model, batch)
    for name in PRODUCTS
    for capability in GENERATIONS
    for model in ("llama-3-8b", "gpt2-xl")
    for batch in (1, 8, 64)
]
RARE += [("projection_sample", capability, "llama-3-8b", batch) for capability in GENERATIONS for batch in (128, 256)]
RARE += [("projection_sample_hopper", (9, 0), model, batch) for model in ("llama-3-8b", "qwen3-0.6b") for batch in (100, 128)]
RARE += [(name, (9, 0), model, 1) for name in RINGS for model in ("llama-2-7b", "llama-3-8b", "qwen3-0.6b")]
RARE += [(name, capability, "gpt2-xl", 1) for name in ROWS for capability in GENERATIONS]
RARE += [(name, capability, "llama-3-8b", 1) for name in FILTERS for capability in GENERATIONS]
pytestmark = pytest.mark.xdist_group("compiled_fused")  # one process fills the cache for all
RESERVED = 1024  # bytes of each block's shared memory that CUDA keeps (CUDA programming guide, compute capabilities)

Job = tuple[str, tuple[int, int], str, int]


def label(job: Job) -> str:
    name, (major, minor), model, batch = job
    return f"{name}-sm_{major}{minor}-{model}-batch={batch}"


def compiled(jobs: list[Job], wanted: Job, cache: Path, environment: dict[str, str]) -> dict[str, Any]:
    """What the compiler says of one job. Answers are remembered by the kernels' source, so an unchanged kernel costs nothing,
    and one process compiles all that are missing, since starting costs more than a kernel."""
    here = Path(__file__).parent
    sources = [path.read_bytes() for path in sorted(Path(pdlab.kernels.__file__).parent.glob("*.py"))]
    sources += [(here / name).read_bytes() for name in ("compile_worker.py", "fused_compile_worker.py")]
    source = b"\0".join([*sources, triton.__version__.encode()])
    paths = {job: cache / f"{hashlib.sha256(source + json.dumps(job).encode()).hexdigest()}.json" for job in jobs}
    if not paths[wanted].exists():
        missing = [job for job in jobs if not paths[job].exists()]
        environment = environment | {"PYTHONPATH": os.pathsep.join([str(here.parent.parent), str(here)])}
        command = [sys.executable, str(here / "fused_compile_worker.py"), json.dumps(missing)]
        run = subprocess.run(command, capture_output=True, text=True, env=environment)
        for job, line in zip(missing, run.stdout.splitlines()):
            paths[job].write_text(line)
        assert paths[wanted].exists(), run.stderr[-3000:]
    return json.loads(paths[wanted].read_text())


def check(jobs: list[Job], job: Job, request: pytest.FixtureRequest, environment: dict[str, str]) -> None:
    found = compiled(jobs, job, request.config.cache.mkdir("compiled_fused"), environment)
    assert found["STACK"] == 0, f"registers spill: {found}"
    assert found["shared"] + RESERVED <= found["room"], f"a block does not fit: {found}"
    if job[0] in PRODUCTS:
        assert (found["HMMA"] + found["HGMMA"] > 0) == (job[3] > 1), "matrix instructions where there are several rows"
    if job[0] in (*RINGS, "projection_sample_hopper"):
        assert found["HGMMA"] > 0
    if job[0] in RINGS:
        assert found["hinted"] == found["copies"] > 0, "weights leave L2 first"
    if job[0] == "projection_sample_hopper":
        assert 0 < found["hinted"] < found["copies"], "weights leave L2 first, activations do not"


@pytest.mark.parametrize("job", SHIPPED, ids=label)
def test_shipped_tiles_compile_without_spills_and_fit(
    job: Job, request: pytest.FixtureRequest, compile_environment: dict[str, str]
) -> None:
    check(SHIPPED, job, request, compile_environment)


@pytest.mark.slow
@pytest.mark.parametrize("job", RARE, ids=label)
def test_every_generation_and_family_compiles_without_spills_and_fits(
    job: Job, request: pytest.FixtureRequest, compile_environment: dict[str, str]
) -> None:
    check(RARE, job, request, compile_environment)
