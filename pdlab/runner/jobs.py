"""From what was asked for (names, -p, a YAML file) to the list of jobs: one notebook with one set of parameters each.

A YAML file is either a mapping of parameters, or a whole batch:

    profile: full            # optional, as --profile
    timeout: 1800            # optional, seconds for each notebook
    runs:
      - notebook: 03         # a path, a name or a number of the series
        parameters: {model: [llama-1b, qwen3-8b], seed: [0, 1]}     # four runs
      - notebook: 04

A list makes a grid, one run a value. Where the notebook's own default is a list, a list is one value, and a list of lists
makes the grid.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdlab.core.errors import NotebookError
from pdlab.core.paths import checkout_dir
from pdlab.runner import notebook as nbs


@dataclass(frozen=True)
class Job:
    """One notebook, one set of parameters. `key` decides what a resumed batch need not run again."""

    path: Path
    params: dict[str, Any] = field(default_factory=dict)
    profile: str = "smoke"
    timeout: float | None = None
    key: str = ""

    @property
    def name(self) -> str:
        return f"{self.path.stem}-{self.key[:8]}"

    @property
    def label(self) -> str:
        """For people: the notebook's name and what was set."""
        shown = " ".join(f"{k}={v}" for k, v in self.params.items() if k != "profile")
        return f"{self.path.stem} {shown}".strip()


def notebooks_dir() -> Path | None:
    root = checkout_dir()
    return root / "notebooks" if root and (root / "notebooks").is_dir() else None


def find(name: str) -> list[Path]:
    """The notebooks meant by a path, or by a name, number or pattern of the series."""
    if Path(name).suffix == ".ipynb" and Path(name).exists():
        return [Path(name).resolve()]
    folder = notebooks_dir()
    if folder and "/" not in name:
        # YAML reads an unquoted 01 as the number 1
        patterns = [name, f"{name}.ipynb", *([f"{name.zfill(2)}_*.ipynb"] if name.isdigit() else [])]
        for pattern in patterns:
            if pattern.endswith(".ipynb") and (hits := sorted(folder.glob(pattern))):
                return hits
    series = ", ".join(path.stem for path in sorted(folder.glob("[0-9]*.ipynb"))) if folder else ""
    hint = f"the series has: {series}" if series else "give the path of an .ipynb file"
    raise NotebookError(f"there is no notebook {name!r}", hint)


def series() -> list[Path]:
    folder = notebooks_dir()
    found = sorted(folder.glob("[0-9][0-9]_*.ipynb")) if folder else []
    if not found:
        raise NotebookError(
            "the notebook series is not here: this pdlab was not imported from a checkout",
            "clone the repository, or give the paths of notebooks",
        )
    return found


def parse_assignment(text: str) -> tuple[str, Any]:
    """`name=value`, the value read as YAML: `flag=false` is a bool, `lens=[1, 2]` a list, `name=llama` a string."""
    import yaml

    name, separator, value = text.partition("=")
    if not separator or not name.strip().isidentifier():
        raise NotebookError(f"{text!r} is not a parameter", "write -p name=value, as in -p seed=1")
    try:
        return name.strip(), yaml.safe_load(value) if value.strip() else ""
    except yaml.YAMLError:
        return name.strip(), value


def read_batch(path: Path) -> dict[str, Any]:
    """{profile, timeout, runs} of a YAML file; a plain mapping of parameters comes back as {parameters}."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise NotebookError(f"cannot read {str(path)!r}: {error.strerror}", "give the path of a YAML file") from None
    except yaml.YAMLError as error:
        raise NotebookError(f"{str(path)!r} is not YAML: {error}", "see `pdlab run --help` for an example") from None
    if not isinstance(content, dict):
        raise NotebookError(f"{str(path)!r} holds a {type(content).__name__}", "it should map parameter names to values")
    if "runs" not in content:
        for name, value in content.items():  # a list of runs under a misspelt name would pass as a parameter
            if isinstance(value, list) and any(isinstance(x, dict) and "notebook" in x for x in value):
                raise NotebookError(f"{str(path)!r} lists its runs under {name!r}", "call that entry `runs`")
        return {"parameters": content}
    if unknown := set(content) - {"profile", "timeout", "runs"}:
        raise NotebookError(f"{str(path)!r} has unknown entries {sorted(unknown)}", "a batch has profile, timeout and runs")
    for run in content["runs"] if isinstance(content["runs"], list) else [None]:
        if not isinstance(run, dict) or "notebook" not in run or set(run) - {"notebook", "parameters", "profile", "timeout"}:
            hint = "each of `runs` has notebook and, if wanted, parameters, profile and timeout"
            raise NotebookError(f"{str(path)!r}: {run!r} is not a run", hint)
    return content


def expand(params: dict[str, Any], defaults: dict[str, Any]) -> list[dict[str, Any]]:
    """The grid that lists span, the last parameter changing fastest."""
    axes = []
    for name, value in params.items():
        own_list = isinstance(defaults.get(name), list | tuple)
        is_axis = isinstance(value, list) and (not own_list or (value and all(isinstance(item, list) for item in value)))
        if is_axis and not value:
            raise NotebookError(f"parameter {name!r} has an empty list of values", "give at least one value, or leave it out")
        axes.append([(name, item) for item in value] if is_axis else [(name, value)])
    return [dict(choice) for choice in itertools.product(*axes)]


@dataclass(frozen=True)
class Request:
    """One line of a batch before its notebook was looked at. `grid` parameters may be lists, `fixed` ones are values."""

    notebook: str | None
    grid: dict[str, Any] = field(default_factory=dict)
    fixed: dict[str, Any] = field(default_factory=dict)
    profile: str | None = None
    timeout: float | None = None


def requests(names: list[str], fixed: dict[str, Any], batch: dict[str, Any] | None) -> list[Request]:
    """Names on the command line, or those of the batch file, or the whole series; -p overrides the file."""
    batch = batch or {}
    if "runs" not in batch:
        return [Request(name, batch.get("parameters", {}), fixed) for name in (names or [None])]  # type: ignore[list-item]
    if names:
        raise NotebookError("notebooks were named both on the command line and in the batch file", "use one of the two")
    return [
        Request(
            str(run["notebook"]),
            run.get("parameters") or {},
            fixed,
            run.get("profile", batch.get("profile")),
            run.get("timeout", batch.get("timeout")),
        )
        for run in batch["runs"]
    ]


def make_jobs(asked: list[Request], profile: str, device: str, *, profile_given: bool, timeout: float | None) -> list[Job]:
    """Every job, checked whole before anything runs; the same work asked for twice is done once.

    What the command line says wins over the file: a `timeout`, and a `profile` when it was given and not found out.
    """
    found: dict[str, Job] = {}
    for request in asked:
        own_profile = profile if profile_given else request.profile or profile
        own_timeout = timeout or request.timeout
        if own_profile not in ("smoke", "full"):
            raise NotebookError(f"profile {own_profile!r} is unknown", "use smoke, full or auto")
        if own_timeout is not None and not (isinstance(own_timeout, int | float) and own_timeout > 0):
            raise NotebookError(f"timeout {own_timeout!r} is not a time", "give seconds, more than 0")
        for path in find(request.notebook) if request.notebook else series():
            nb = nbs.read(path)
            defaults = nbs.declared(nb)
            grid = {name: value for name, value in request.grid.items() if name not in request.fixed}
            for chosen in expand(grid, defaults):
                params = {**chosen, **request.fixed}
                nbs.check_parameters(path.name, defaults, params)
                if "profile" in defaults:
                    params = {"profile": own_profile, **params}
                key = nbs.fingerprint(nb, path.stem, params, own_profile, device)
                found.setdefault(key, Job(path, params, own_profile, own_timeout, key))
    return list(found.values())
