"""setup(): what it installs on Colab and what it leaves alone; the profile, the dtype and the footers."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from importlib import metadata
from pathlib import Path

import pytest

from pdlab.bench import records
from pdlab.core.errors import ConfigError, DeviceUnavailable, PdlabError
from pdlab.hardware.probe import Machine
from pdlab.lab import install, place, session
from pdlab.models.catalogue import config_of

# Colab in August 2026: what its runtime has of what pdlab asks for
COLAB = {
    "torch": "2.11.0+cu128", "triton": "3.6.0", "numpy": "2.1.3", "pandas": "2.2.3", "matplotlib": "3.10.0",
    "seaborn": "0.13.2", "safetensors": "0.6.2", "tokenizers": "0.22.1", "jinja2": "3.1.6",
    "pyyaml": "6.0.3", "psutil": "5.9.5", "ipywidgets": "7.7.1", "ipython": "7.34.0",
}  # fmt: skip


def machine(**changes: object) -> Machine:
    base: dict[str, object] = {
        "device": "cpu", "name": "A CPU", "slug": "cpu-x86-64", "capability": None, "memory_bytes": 8 * 2**30,
        "dtype": "float32", "profile": "smoke", "torch_version": "2.13.0+cpu",
    }  # fmt: skip
    return Machine(**(base | changes))


@pytest.fixture
def colab(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Colab's module names and package versions; the Python stays the one at hand."""
    google, inner = types.ModuleType("google"), types.ModuleType("google.colab")
    google.colab = inner
    monkeypatch.setitem(sys.modules, "google", google)
    monkeypatch.setitem(sys.modules, "google.colab", inner)
    have = dict(COLAB)

    def version(name: str) -> str:
        if name.lower() not in have:
            raise metadata.PackageNotFoundError(name)
        return have[name.lower()]

    monkeypatch.setattr(install.metadata, "version", version)
    return have


class Pip:
    def __init__(self, code: int = 0, stderr: str = "") -> None:
        self.calls: list[tuple[list[str], list[str]]] = []
        self.code, self.stderr = code, stderr

    def __call__(self, arguments: list[str]) -> subprocess.CompletedProcess:
        constraints = Path(arguments[arguments.index("--constraint") + 1]).read_text().split()
        self.calls.append((arguments, constraints))
        return subprocess.CompletedProcess(arguments, self.code, "", self.stderr)


def test_colab_is_recognised_by_its_module_or_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLAB_RELEASE_TAG", raising=False)
    assert not install.on_colab()
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release-colab-20260801")
    assert install.on_colab()
    monkeypatch.delenv("COLAB_RELEASE_TAG")
    monkeypatch.setitem(sys.modules, "google.colab", types.ModuleType("google.colab"))
    assert install.on_colab()


def test_colab_gets_only_what_it_lacks_and_keeps_what_it_has(colab: dict[str, str]) -> None:
    pip = Pip()
    added = install.install_missing(pip)
    assert [line.split(">")[0] for line in added] == ["gguf"]
    ((arguments, constraints),) = pip.calls
    assert not {"torch", "triton", "numpy", "ipython", "ipywidgets"} & {a.split(">")[0].split("=")[0] for a in arguments}
    assert "--upgrade" not in arguments
    assert "-U" not in arguments
    assert {f"{name}=={COLAB[name]}" for name in install.UNTOUCHED} == set(constraints)


def test_a_package_below_its_floor_is_installed_unless_it_is_untouchable(
    colab: dict[str, str], capsys: pytest.CaptureFixture
) -> None:
    colab |= {"gguf": "0.19.0", "safetensors": "0.4.0", "numpy": "1.26.4"}
    pip = Pip()
    assert [line.split(">")[0] for line in install.install_missing(pip)] == ["safetensors"]
    assert "numpy 1.26.4 (wanted >=2.1)" in capsys.readouterr().out


def test_nothing_is_installed_where_nothing_is_missing(colab: dict[str, str]) -> None:
    colab["gguf"] = "0.19.0"
    pip = Pip()
    assert install.install_missing(pip) == []
    assert pip.calls == []


def test_a_failing_pip_is_an_error_with_its_last_words(colab: dict[str, str]) -> None:
    with pytest.raises(PdlabError, match=r"gguf.*No matching distribution.*run this cell again"):
        install.install_missing(Pip(1, "WARNING: retrying\nERROR: No matching distribution found"))


def test_setup_installs_on_colab_and_says_so(
    colab: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    pip = Pip()
    monkeypatch.setattr(install, "install_missing", lambda real=install.install_missing: real(pip))
    lab = session.setup("cpu")
    said = capsys.readouterr().out
    assert lab.colab
    assert "installed gguf" in said
    assert "on Colab" in said


def test_setup_elsewhere_installs_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.delenv("COLAB_RELEASE_TAG", raising=False)
    monkeypatch.setattr(install, "install_missing", lambda: pytest.fail("pip outside Colab"))
    lab = session.setup("cpu")
    said = capsys.readouterr().out
    assert (lab.device, lab.dtype) == ("cpu", "float32")
    for word in ("machine", "float32 (a CPU)", "profile", "data", "pdlab"):
        assert word in said


def test_setup_without_torch_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from pdlab.hardware import probe

    broken = machine(torch_version=None, problem="torch cannot be imported: No module named 'torch'")
    monkeypatch.setattr(probe, "probe", lambda device: broken)
    with pytest.raises(DeviceUnavailable, match="make lab"):
        session.setup()


def test_a_t4_is_told_float16_and_no_triton_dot_kernels(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    from pdlab.hardware import probe

    t4 = machine(device="cuda", name="Tesla T4", slug="tesla-t4", capability=(7, 5), dtype="float16", profile="full")
    monkeypatch.setattr(probe, "probe", lambda device: t4)
    lab = session.setup()
    said = capsys.readouterr().out
    assert lab.profile == "full"
    assert "float16 (below 8.0" in said
    assert "SDPA or plain" in said


def test_the_profile_parameter_overrides_the_machines(capsys: pytest.CaptureFixture) -> None:
    lab = session.Lab(machine(device="cuda", profile="full"), "full", "chosen because a GPU is here")
    lab.begin("01", profile="auto", seed=3)
    assert not lab.smoke
    lab.begin("01", profile="smoke", seed=3)
    assert lab.smoke
    assert "set by the parameter" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="smoke or full"):
        lab.begin("01", profile="fast")


def test_without_a_gpu_the_full_profile_becomes_smoke_and_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    lab = session.Lab(machine(), "smoke", "chosen because no GPU is here")
    lab.begin("01", profile="full")
    said = capsys.readouterr().out
    assert lab.smoke
    assert "no GPU is here" in said
    assert "gpu_" in said
    assert "profile smoke" in lab.footer()  # figures name what was run, not what was asked for
    monkeypatch.setenv("PDLAB_PROFILE", "full")
    profile, why = session._profile(machine(problem="the driver does not answer"))
    assert profile == "smoke"
    assert "the driver does not answer" in why


def test_the_profile_can_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = machine(device="cuda", profile="full")
    monkeypatch.setenv("PDLAB_PROFILE", "smoke")
    assert session._profile(gpu) == ("smoke", "set by PDLAB_PROFILE")
    monkeypatch.setenv("PDLAB_PROFILE", "nonsense")
    profile, why = session._profile(machine())
    assert profile == "smoke"
    assert "'nonsense' is neither smoke nor full" in why


def test_the_seed_makes_random_tensors_repeat() -> None:
    import torch

    lab = session.Lab(machine(), "smoke", "")
    draws = []
    for _ in range(2):
        lab.begin("01", seed=5)
        draws.append(torch.rand(3))
    assert torch.equal(*draws)


def test_every_footer_says_what_kind_of_number_it_is() -> None:
    lab = session.Lab(machine(), "smoke", "")
    for kind in ("measured", "simulated", "predicted"):
        assert kind in lab.footer(kind)
        assert "A CPU · float32" in lab.footer(kind)
    assert lab.footer("recorded", "nvidia-h200").startswith("nvidia-h200 · recorded (data")
    assert "nvidia-h200 · bfloat16 · recorded 2026-11-29 (" in lab.footer(
        "recorded", "nvidia-h200", dtype="bfloat16", when="2026-11-29T22:23:58Z"
    )
    assert "counted" in lab.footer("counted")
    with pytest.raises(ConfigError):
        lab.footer("guessed")


def test_a_footer_names_the_dtype_of_what_was_measured_not_the_machines() -> None:
    lab = session.Lab(machine(name="A GPU", device="cuda", dtype="bfloat16"), "full", "")
    assert "A GPU · bfloat16 ·" in lab.footer()
    assert "A GPU · float32 ·" in lab.footer(dtype="float32")
    assert "bfloat16" not in lab.footer(dtype="float32")


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["/venv/bin/pdlab", "bench", "ceilings"], "pdlab bench ceilings"),
        (["/src/pdlab/__main__.py", "bench", "ceilings"], "pdlab bench ceilings"),
        (["/lib/ipykernel_launcher.py", "-f", "/tmp/kernel.json"], "python"),
        (["/elsewhere/__main__.py", "-q"], "python"),
        ([""], "python"),
    ],
)
def test_provenance_holds_our_command_line_and_no_other_programs(
    monkeypatch: pytest.MonkeyPatch, argv: list[str], command: str
) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(records, "_named", None)
    assert records.snapshot()["command"] == command


def test_a_notebooks_measurements_name_the_notebook_not_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = ["/venv/lib/ipykernel_launcher.py", "--IPKernelApp.parent_appname=x", "-f", "/tmp/kernel.json"]
    monkeypatch.setattr(sys, "argv", kernel)
    monkeypatch.setattr(records, "_named", None)
    assert records.snapshot()["command"] == "python"
    session.Lab(machine(), "smoke", "").begin("00_start_here")
    assert records.snapshot()["command"] == "notebook 00_start_here"
    assert records.snapshot(command="another")["command"] == "another"


def test_a_model_that_does_not_fit_is_refused_with_the_numbers() -> None:
    lab = session.Lab(machine(memory_bytes=16 * 10**9), "full", "")
    assert lab.fits(config_of("llama-1b"), dtype="bfloat16") == ""
    assert "llama-3-8b needs 16.1 GB and 13.6 GB" in lab.fits(config_of("llama-3-8b"), dtype="bfloat16")


def test_config_takes_the_machines_device_dtype_and_the_notebooks_seed() -> None:
    lab = session.Lab(machine(), "smoke", "")
    lab.begin("01", seed=7)
    config = lab.config(page_size=32)
    assert (config.device, config.dtype, config.seed, config.page_size) == ("cpu", "float32", 7, 32)


def run_cell(folder: Path, extra: str = "") -> subprocess.CompletedProcess:
    """The setup cell as a script, without site-packages' pdlab, in `folder`."""
    code = f"import sys; sys.path[:] = [p for p in sys.path if p not in ('', {str(Path.cwd())!r})]\n{extra}\n{place.SETUP_CELL}"
    blocked = "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in repr(f)]\n"
    return subprocess.run([sys.executable, "-c", blocked + code], cwd=folder, capture_output=True, text=True)


def test_the_setup_cell_finds_the_checkout_around_the_notebook(repository: Path) -> None:
    done = run_cell(repository / "notebooks")
    assert done.returncode == 0, done.stderr
    assert "profile" in done.stdout


def test_the_setup_cell_clones_where_there_is_nothing(repository: Path, tmp_path: Path) -> None:
    """`git clone` is imitated by a link to this checkout; the repository and the ref are those of place.py."""
    fake = (
        "import os, subprocess\n"
        f"def clone(cmd, check): print('CLONE', *cmd); os.symlink({str(repository)!r}, cmd[-1])\n"
        "subprocess.run = clone\n"
    )
    done = run_cell(tmp_path, fake)
    assert done.returncode == 0, done.stderr
    assert f"--branch={place.REF} https://github.com/{place.REPOSITORY} " in done.stdout
    again = run_cell(tmp_path, fake)
    assert again.returncode == 0, again.stderr
    assert "CLONE" not in again.stdout


def test_the_setup_cell_is_short() -> None:
    assert len(place.SETUP_CELL.splitlines()) <= 12


def test_stamping_renews_badge_and_setup_cell_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "solutions" / "01_x.ipynb"
    path.parent.mkdir()
    old = [
        {"cell_type": "markdown", "source": "[![Open in Colab](old.svg)](old-link)\n# Title"},
        {"cell_type": "code", "source": "from pdlab.lab import setup\nlab = setup()"},
        {"cell_type": "code", "source": "x = 1"},
    ]
    path.write_text(json.dumps({"cells": old}))
    assert place.stamp(path, tmp_path)
    cells = ["".join(c["source"]) for c in json.loads(path.read_text())["cells"]]
    assert cells == [place.badge("solutions/01_x.ipynb") + "\n# Title", place.SETUP_CELL, "x = 1"]
    assert not place.stamp(path, tmp_path)


def test_publishing_writes_the_name_into_links_and_the_clone_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "README.md"
    colab = "https://colab.research.google.com/github/{}/blob/main/notebooks/00.ipynb"
    text = f"git clone https://github.com/{{}} pdlab && cd pdlab\n[badge]({colab}) https://github.com/another/project\n"
    page.write_text(text.format("OWNER/REPO", "OWNER/REPO"))
    monkeypatch.setattr(place, "REPOSITORY", "me/my.lab")
    assert place.stamp_links(page)
    assert page.read_text() == text.format("me/my.lab", "me/my.lab")
    assert not place.stamp_links(page)


def test_where_the_name_is_still_missing_the_reader_is_told_what_to_do(repository: Path) -> None:
    if place.REPOSITORY != place._PLACEHOLDER:
        pytest.skip("this copy is published")
    assert f"# {place._PLACEHOLDER}: put" in place.SETUP_CELL
    for name in ("README.md", "CONTRIBUTING.md"):
        assert f"`{place._PLACEHOLDER}` stands for" in (repository / name).read_text(encoding="utf-8")
