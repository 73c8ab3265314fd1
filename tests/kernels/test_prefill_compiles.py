"""The warp-specialized prefill kernels compile for compute capability 9.0 without spilling; checked without a GPU.

The tiles are those that the shipped tables name, and some that a table might.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")

import pdlab.kernels  # noqa: E402
from pdlab.core.paths import data_dir  # noqa: E402
from pdlab.kernels.tuning import HopperTile  # noqa: E402

Job = tuple[HopperTile, int, int]  # tile, head size, page size (0: extents)
MOST_SHARED = 227 << 10  # bytes of a block (CUDA programming guide, compute capability 9.0)
SOURCES = (
    "flash_prefill_turns",
    "flash_prefill_tasks",
    "hopper_tiles",
    "prefill_items",
    "prefill_schedule",
)


def shipped() -> list[Job]:
    """Each distinct tile of the tables with extents and with pages of 16."""
    names = {f.name for f in fields(HopperTile)}
    found = set()
    for path in (data_dir() / "tuning").glob("*.json"):
        for entry in json.loads(path.read_text(encoding="utf-8")).get("attention_tiles", []):
            if entry.get("kind") == "prefill_hopper":
                tile = HopperTile(**{k: v for k, v in entry.items() if k in names})
                found |= {(tile, head, page) for head in (entry.get("head_dim", 128),) for page in (0, 16)}
    return sorted(found, key=str)


OTHERS: list[Job] = [
    (HopperTile(2, 128, 2), 128, 0),
    (HopperTile(2, 128, 4, polynomial=8), 64, 16),
    (HopperTile(3, 128, 4, pack=4), 64, 0),
    (HopperTile(2, 128, 2, pack=2), 128, 16),
    (HopperTile(3, 128, 4, pack=4, overlap=1), 64, 16),
    (HopperTile(2, 128, 2, overlap=1), 128, 0),
    (HopperTile(2, 64, 4, blocks=4, share=4, places=3), 128, 16),
    (HopperTile(2, 128, 2, blocks=4, places=3), 128, 0),
    (HopperTile(3, 64, 9, turns=0, blocks=8), 64, 256),
]
JOBS = [*shipped(), *(job for job in OTHERS if job not in shipped())]


def label(job: Job) -> str:
    tile, head, page = job
    kind = f"{tile.blocks}x{tile.share}" if tile.blocks else "turns" if tile.turns else "pairs"
    return f"{tile.consumers}x{tile.block_n}x{tile.stages}-{kind}-p={tile.polynomial}-o={tile.overlap}-hd={head}-page={page}"


def compiled(jobs: list[Job], cache: Path, environment: dict[str, str]) -> dict[Job, dict[str, Any]]:
    """What the compiler says of each job; remembered by the kernels' source, so that unchanged kernels cost nothing."""
    here = Path(__file__).parent
    package = Path(pdlab.kernels.__file__).parent
    texts = [package / f"{name}.py" for name in SOURCES] + [here / "prefill_compile_worker.py", here / "compile_worker.py"]
    key = b"\0".join([*(path.read_bytes() for path in texts), triton.__version__.encode()])

    def place(job: Job) -> Path:
        tile, head, page = job
        at_run_time = {"share": 1, "by_request": 0, "caches": 1}
        constants = asdict(tile) | at_run_time | {"blocks": bool(tile.blocks)}  # how many blocks is read at run time too
        return cache / f"{hashlib.sha256(key + json.dumps([constants, head, page]).encode()).hexdigest()}.json"

    missing = {place(job): job for job in jobs if not place(job).exists()}
    if missing:
        environment = environment | {"PYTHONPATH": os.pathsep.join([str(here.parent.parent), str(here)])}
        text = json.dumps([[asdict(tile), head, page] for tile, head, page in missing.values()])
        command = [sys.executable, str(here / "prefill_compile_worker.py"), text]
        run = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert run.returncode == 0, run.stderr[-3000:]
        for path, line in zip(missing, run.stdout.splitlines(), strict=True):
            path.write_text(line)
    return {job: json.loads(place(job).read_text()) for job in jobs}


@pytest.mark.xdist_group("compiler")
@pytest.mark.parametrize("job", JOBS, ids=label)
def test_tiles_compile_without_spills_and_fit(
    job: Job, request: pytest.FixtureRequest, compile_environment: dict[str, str]
) -> None:
    found = compiled(JOBS, request.config.cache.mkdir("compiled_prefill"), compile_environment)[job]
    assert found["STACK"] == 0, f"registers spill: {found}"
    assert found["shared"] <= MOST_SHARED, f"the tiles do not fit: {found}"
    assert found["HGMMA"] > 0, "no matrix instruction of a warpgroup"
    assert found["UTMALDG"] > 0, "the copy engine is not used"
