"""The repository's own promises: one truth for dependencies, light imports, wheels that carry their data."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

# conda-forge's names for what the package index calls otherwise; the -base packages leave out a GUI toolkit.
CONDA_NAMES = {"torch": "pytorch", "matplotlib": "matplotlib-base", "seaborn": "seaborn-base", "nbconvert": "nbconvert-core"}
NOT_ON_CONDA_LIST = {"ray", "huggingface-hub", "flash-attn"}  # the extras batch, hub and flash: optional everywhere


@pytest.fixture(scope="module")
def project(repository: Path) -> dict:
    return tomllib.loads((repository / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def requirements(project: dict) -> dict[str, Requirement]:
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    return {canonicalize_name(r.name): r for r in map(Requirement, lines)}


def conda_specs(text: str) -> dict[str, str]:
    entries = [entry for entry in yaml.safe_load(text)["dependencies"] if isinstance(entry, str)]
    return {name: rest.strip() for name, _, rest in (entry.partition(" ") for entry in entries)}


def test_conda_and_pip_ask_for_the_same_packages_and_floors(repository: Path, requirements: dict[str, Requirement]) -> None:
    conda = conda_specs((repository / "environment.yml").read_text())
    expected = {
        CONDA_NAMES.get(name, name): str(r.specifier) for name, r in requirements.items() if name not in NOT_ON_CONDA_LIST
    }
    expected["triton"] = ""  # conda-forge's pytorch pins the triton that it was built for
    for tool in ("python", "pip", "setuptools", "make"):
        expected[tool] = conda.get(tool, "absent")
    assert conda == expected


def test_conda_takes_python_from_the_same_range(repository: Path, project: dict) -> None:
    floor = str(SpecifierSet(project["requires-python"]))
    assert conda_specs((repository / "environment.yml").read_text())["python"].startswith(floor)


def test_conda_leaves_flash_attention_as_a_marked_option(repository: Path, requirements: dict[str, Requirement]) -> None:
    text = (repository / "environment.yml").read_text()
    comment = re.search(r"# OPTIONAL[^\n]*\n\s*# - flash-attn (\S+)", text)
    assert comment
    assert comment[1] == str(requirements["flash-attn"].specifier)
    assert yaml.safe_load(text)["channels"] == ["conda-forge", "nodefaults"]


def test_every_pinned_version_satisfies_its_range(repository: Path, requirements: dict[str, Requirement]) -> None:
    lines = (repository / "constraints.txt").read_text().splitlines()
    pins = {canonicalize_name(r.name): r for r in map(Requirement, (x for x in lines if x and not x.startswith("#")))}
    assert all(re.fullmatch(r"==[^=,*]+", str(pin.specifier)) for pin in pins.values())
    for name, requirement in requirements.items():
        if name == "flash-attn":  # source only on the package index, built against whatever torch is there
            continue
        version = str(pins[name].specifier).removeprefix("==")
        assert requirement.specifier.contains(version), f"{name}: {version} is pinned but {requirement.specifier} is asked for"


def test_every_pin_can_be_installed_on_the_oldest_python_that_is_promised(project: dict, repository: Path) -> None:
    """A pin of a package that asks for 3.11.5 stops `make run` on a Python 3.11.2, which distributions ship."""
    oldest = f"{project['requires-python'].removeprefix('>=')}.0"
    pinned = {
        canonicalize_name(x.partition("==")[0]) for x in (repository / "constraints.txt").read_text().splitlines() if "==" in x
    }
    here = {canonicalize_name(d.metadata["Name"]): d.metadata["Requires-Python"] for d in metadata.distributions()}
    assert len(pinned & set(here)) > 20
    too_new = {name: here[name] for name in pinned & set(here) if here[name] and oldest not in SpecifierSet(here[name])}
    assert not too_new


@pytest.mark.parametrize(
    "module", ["pdlab", "pdlab.cli", "pdlab.core.config", "pdlab.allocators", "pdlab.scheduler.interface", "pdlab.runner.cli"]
)
def test_import_does_not_load_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit(' '.join({{'torch', 'triton', 'pandas', 'matplotlib'}} & set(sys.modules)) or None)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_wheel_carries_the_shipped_data(repository: Path, tmp_path: Path) -> None:
    """Built without isolation or dependencies, unpacked elsewhere, and imported from there."""
    tracked = subprocess.run(["git", "ls-files"], cwd=repository, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a git checkout: cannot tell sources from what was left lying about")
    source = tmp_path / "source"
    for name in tracked.stdout.splitlines():
        if name.startswith(("pdlab/", "data/")) or "/" not in name:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((repository / name).read_bytes())
    script = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    built = subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=source, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = (
        "import pdlab; from pdlab.core.paths import checkout_dir, data_dir, find_data;"
        "assert checkout_dir() is None, checkout_dir();"
        "print(data_dir()); print(find_data('claims.csv'))"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "PDLAB_HOME": str(tmp_path / "home")}
    found = subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    data, claims = found.stdout.split()
    assert Path(data) == tmp_path / "site" / "pdlab" / "_data"
    assert Path(claims).read_bytes() == (repository / "data" / "claims.csv").read_bytes()


def test_ci_runs_both_commands_in_order_and_then_the_readme(repository: Path) -> None:
    script = (repository / ".ci" / "run").read_text()
    assert os.access(repository / ".ci" / "run", os.X_OK)
    assert script.index("\nmake test\n") < script.index("\nmake run\n") < script.index(".ci/readme.py")


def test_the_workflow_covers_every_supported_python(repository: Path, project: dict) -> None:
    workflow = yaml.safe_load((repository / ".github" / "workflows" / "ci.yml").read_text())
    versions = workflow["jobs"]["cpu"]["strategy"]["matrix"]["python"]
    assert versions == ["3.11", "3.12", "3.13"]
    assert all(SpecifierSet(project["requires-python"]).contains(version) for version in versions)
    assert "self-hosted" in workflow["jobs"]["full"]["runs-on"]


def test_the_licence_is_whole(repository: Path, project: dict) -> None:
    text = (repository / "LICENSE").read_text()
    assert project["license"] == "Apache-2.0"
    assert "Version 2.0, January 2004" in text
    assert "limitations under the License." in text


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_links_inside_the_repository_lead_somewhere(repository: Path, name: str) -> None:
    text = (repository / name).read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text) + re.findall(r"(?:src|href)=\"([^\"#]+)\"", text)
    local = [target for target in targets if not re.match(r"[a-z]+:", target)]
    assert local
    missing = [target for target in local if not (repository / target).exists()]
    assert not missing


def test_every_source_file_stays_small(repository: Path) -> None:
    """Readable in an evening: files under 400 lines."""
    long = {
        str(path.relative_to(repository)): lines
        for path in (repository / "pdlab").rglob("*.py")
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > 400
    }
    assert not long


def test_the_readmes_figure_is_drawn_from_the_data_of_the_day(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python docs/readme_figure.py` draws it anew; only shipped data counts, not what was measured on this machine."""
    from PIL import Image

    monkeypatch.setenv("PDLAB_HOME", str(tmp_path))
    monkeypatch.syspath_prepend(repository / "docs")
    import readme_figure

    stored = Image.open(repository / "docs" / "readme-figure.png")
    assert stored.info["Description"] == readme_figure.fingerprint(readme_figure.numbers())
    assert "docs/readme-figure.png" in (repository / "README.md").read_text(encoding="utf-8").split("\n## ")[0]
