"""The set-up cell in an imitation of Colab: its module names, its package versions, an empty folder, a fresh process.

What Colab has is told by package metadata that lies first on the path; git and pip are stand-ins that note how they were
called. The Python, and the code that is imported, are those at hand.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from pdlab.lab.install import UNTOUCHED
from pdlab.lab.place import SETUP_CELL

COLAB = {
    "torch": "2.11.0+cu128", "triton": "3.6.0", "numpy": "2.1.3", "pandas": "2.2.3", "matplotlib": "3.10.0",
    "seaborn": "0.13.2", "safetensors": "0.6.2", "tokenizers": "0.22.1", "jinja2": "3.1.6", "pyyaml": "6.0.3",
    "psutil": "5.9.5", "ipython": "7.34.0", "ipywidgets": "7.7.1", "ipykernel": "6.17.1", "nbformat": "5.10.4",
    "requests": "2.32.4", "tqdm": "4.67.1",
}  # fmt: skip
LACKING = {"gguf"}  # of the core's dependencies; papermill is not needed in a notebook

PROGRAM = """\
import json, sys
from pathlib import Path
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in getattr(f, "__module__", "") + getattr(f, "__name__", "")]
sys.path[:] = [p for p in sys.path if not (Path(p or ".") / "pdlab").is_dir()]
from importlib import metadata
found = metadata.version
def version(name):
    if name in {lacking!r}:
        raise metadata.PackageNotFoundError(name)
    return found(name)
metadata.version = version
exec(compile(Path(sys.argv[1]).read_text(), "setup cell", "exec"))
exec(compile(Path(sys.argv[1]).read_text(), "setup cell", "exec"))  # a reader may run the cell again
import pdlab
from pdlab.core.paths import data_dir
print(json.dumps({{"colab": lab.colab, "package": pdlab.__file__, "data": str(data_dir()), "profile": lab.profile}}))
"""


def write(path: Path, text: str, mode: int = 0o644) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.fixture
def colab(tmp_path: Path, repository: Path) -> dict[str, str]:
    """The environment of a process that believes it is on Colab, in an empty folder `content`."""
    site = tmp_path / "dist-packages"
    for name, number in COLAB.items():
        write(site / f"{name}-{number}.dist-info" / "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
        write(site / f"{name}-{number}.dist-info" / "RECORD", "")
    write(site / "google" / "colab" / "__init__.py", "")
    copied = " ".join(f"'{repository / name}'" for name in ("pdlab", "data", "pyproject.toml"))
    clone = f'#!/bin/sh\necho "$@" >> "$CALLS/git"\nfor last; do :; done\nmkdir -p "$last" && cp -r {copied} "$last"\n'
    write(tmp_path / "bin" / "git", clone, 0o755)
    (tmp_path / "content").mkdir()
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(site), "CALLS": str(tmp_path), "COLAB_RELEASE_TAG": "release"}


def run_cell(folder: Path, env: dict[str, str]) -> dict[str, Any]:
    cell = write(folder / "cell.py", SETUP_CELL)
    command = [sys.executable, "-c", PROGRAM.format(lacking=LACKING), str(cell)]
    done = subprocess.run(command, cwd=folder / "content", env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.fixture
def pip_calls(colab: dict[str, str], tmp_path: Path) -> Callable[[], list[tuple[list[str], list[str]]]]:
    """A stand-in for pip; what it was called with: the arguments, and the lines of the constraints file."""
    program = """\
import json, os, pathlib, sys
pins = pathlib.Path(sys.argv[sys.argv.index('--constraint') + 1]).read_text().split()
with open(os.environ['CALLS'] + '/pip', 'a') as calls:
    calls.write(json.dumps([sys.argv[1:], pins]) + '\\n')
"""
    write(tmp_path / "stand-in" / "pip" / "__init__.py", "")
    write(tmp_path / "stand-in" / "pip" / "__main__.py", program)
    colab["PYTHONPATH"] += os.pathsep + str(tmp_path / "stand-in")
    return lambda: [json.loads(line) for line in (tmp_path / "pip").read_text().splitlines()]


def test_the_setup_cell_leaves_colabs_own_packages_alone(colab: dict[str, str], pip_calls: Any, tmp_path: Path) -> None:
    lab = run_cell(tmp_path, colab)
    assert lab["colab"]
    clone = tmp_path / "content" / "pdlab-checkout"
    assert Path(lab["package"]) == clone / "pdlab" / "__init__.py"
    assert Path(lab["data"]) == clone / "data"
    assert len((tmp_path / "git").read_text().splitlines()) == 1, "the second run of the cell clones nothing"
    assert pip_calls()
    for arguments, pins in pip_calls():
        wanted = {Requirement(a).name.lower() for a in arguments if not a.startswith(("-", "/")) and a != "install"}
        assert wanted == LACKING
        assert not {"--upgrade", "-U", "--force-reinstall", "--ignore-installed"} & set(arguments)
        assert {f"{name}=={COLAB[name]}" for name in ("torch", "numpy", "ipython", "ipywidgets", "triton")} <= set(pins)


@pytest.mark.slow
def test_pips_own_resolver_would_change_none_of_them(colab: dict[str, str], pip_calls: Any, tmp_path: Path) -> None:
    """The same request put to the real pip, in an environment that has what Colab has. Needs a package index."""
    run_cell(tmp_path, colab)
    arguments, pins = pip_calls()[0]
    arguments[arguments.index("--constraint") + 1] = str(write(tmp_path / "pins.txt", "\n".join(pins)))
    venv.create(tmp_path / "venv", with_pip=True)
    command = [str(tmp_path / "venv" / "bin" / "python"), "-m", "pip", *arguments, "--dry-run", "--report", "report.json"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "dist-packages")}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    planned = {entry["metadata"]["name"].lower() for entry in json.loads((tmp_path / "report.json").read_text())["install"]}
    assert planned == LACKING
    assert not planned & set(UNTOUCHED)
