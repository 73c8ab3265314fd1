"""What every test gets: marks that skip or deselect themselves, few threads, and an environment that does not leak."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# The tests use tiny shapes, on which several threads only fight (worse so with pytest-xdist's workers).
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")

# Set by whoever asked for the interpreter or a device on purpose; a test that changes one must not change its neighbours.
_GUARDED = ("TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES", "PDLAB_HOME", "PDLAB_PROFILE", "PDLAB_COMMIT")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _deselect_slow(config, items)
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and (reason := _why_no_gpu()):
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=reason))


def _deselect_slow(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Slow tests run when asked for: `-m slow`, or a test named by its own id."""
    asked = "slow" in (config.getoption("-m") or "") or any("::" in arg for arg in config.args)
    if asked:
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]


def _why_no_gpu() -> str | None:
    try:
        import torch
    except ImportError as error:
        return f"needs a CUDA device, and torch cannot be imported: {error}"
    return None if torch.cuda.is_available() else "needs a CUDA device; torch sees none here"


@pytest.fixture(autouse=True)
def _environment_is_restored() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in _GUARDED}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture
def compile_environment() -> dict[str, str]:
    """The environment for a process that compiles Triton kernels: under TRITON_INTERPRET nothing would be compiled."""
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


@pytest.fixture(scope="session")
def repository() -> Path:
    return Path(__file__).resolve().parent.parent


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where recorded rows are looked for: none but those a test makes; the ledger of claims itself is the shipped one."""
    from pdlab.costs import tables

    monkeypatch.setattr(tables, "data_dir", lambda: tmp_path / "data")
    monkeypatch.setattr(tables, "home_dir", lambda: tmp_path / "home")
    return tmp_path
