"""Colab: what a fresh runtime lacks, installed without touching what it has.

Colab ships its own torch, numpy, IPython and ipywidgets, built to fit each other and its front end. So only packages that
are missing or below their floor are asked for, and pip is given the present versions of those four (and of torch's own
companions) as constraints: it fails rather than replaces one.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from pdlab.core.errors import PdlabError
from pdlab.core.paths import checkout_dir

UNTOUCHED = ("torch", "triton", "numpy", "ipython", "ipywidgets")
Run = Callable[[list[str]], "subprocess.CompletedProcess[str]"]


def on_colab() -> bool:
    """A Colab runtime: its kernel sets COLAB_RELEASE_TAG, and its google.colab module is there to import."""
    if "google.colab" in sys.modules or os.environ.get("COLAB_RELEASE_TAG"):
        return True
    try:
        return importlib.util.find_spec("google.colab") is not None
    except (ImportError, ValueError):
        return False


def requirements() -> list[str]:
    """What pdlab's core asks for: from pyproject.toml in a checkout, else from the installed package's metadata."""
    root = checkout_dir()
    if root is not None:
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        return list(project["dependencies"])
    return [r for r in metadata.requires("pdlab") or [] if "extra ==" not in r]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def lacking(wanted: list[str] | None = None) -> tuple[list[str], list[str]]:
    """(requirements to install, untouchable packages that are missing or too old, in words)."""
    from packaging.requirements import Requirement

    install, beyond = [], []
    for line in requirements() if wanted is None else wanted:
        need = Requirement(line)
        if need.marker is not None and not need.marker.evaluate():
            continue
        have = _version(need.name)
        if have is not None and need.specifier.contains(have, prereleases=True):
            continue
        if need.name.lower() in UNTOUCHED:
            beyond.append(f"{need.name} {have or 'is missing'} (wanted {need.specifier})")
        else:
            install.append(f"{need.name}{need.specifier}")
    return install, beyond


def _pip(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def install_missing(run: Run = _pip) -> list[str]:
    """Installs what lacking() names and returns it; raises PdlabError with pip's last words when pip fails."""
    install, beyond = lacking()
    if beyond:
        print("older than pdlab was tested with, and left as they are:", "; ".join(beyond))
    if not install:
        return []
    pins = [f"{name}=={have}" for name in UNTOUCHED if (have := _version(name)) is not None]
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder) / "untouched.txt"
        constraints.write_text("\n".join(pins) + "\n", encoding="utf-8")
        done = run(["install", "--quiet", "--constraint", str(constraints), *install])
    if done.returncode != 0:
        words = (done.stderr or done.stdout or "").strip().splitlines()[-1:]
        raise PdlabError(
            f"pip could not install {', '.join(install)}: {' '.join(words)}", "restart the runtime and run this cell again"
        )
    importlib.invalidate_caches()
    return install
