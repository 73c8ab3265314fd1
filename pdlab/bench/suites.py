"""The suites that `pdlab bench` knows, and what each is given to run.

A suite is a module of this package with NAME, HELP and `run(ctx)`. It imports torch inside its functions, measures through
hardware.timing, stops when `ctx.left()` runs out, and hands every number to `ctx.record`.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from pdlab.bench.records import Recorder
from pdlab.core.errors import ConfigError
from pdlab.hardware.probe import Machine, resolve_device

_NOT_SUITES = {"compare", "read_kernel", "records", "suites"}
DEFAULT_BUDGET_S = {"smoke": 20.0, "full": 60.0}


@dataclass
class Context:
    """What a suite works with. `record` collects rows under the suite's name; `say` prints progress to stderr."""

    machine: Machine
    profile: str
    record: Recorder
    budget_s: float
    seed: int = 0
    only: str | None = None  # "measured" or "simulated": leave out the other
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)
    started: float = field(default_factory=time.monotonic)

    @property
    def device(self) -> str:
        """For torch: cpu, cuda or cuda:N."""
        return self.machine.device

    @property
    def dtype(self) -> str:
        return self.machine.dtype

    @property
    def full(self) -> bool:
        return self.profile == "full"

    @property
    def measures(self) -> bool:
        return self.only != "simulated"

    @property
    def simulates(self) -> bool:
        return self.only != "measured"

    def left(self) -> float:
        """Seconds of the budget that are left; a suite ends, or skips what remains, when this is not positive."""
        return self.budget_s - (time.monotonic() - self.started)


@dataclass(frozen=True)
class Outcome:
    """What came of one suite."""

    name: str
    seconds: float
    rows: int
    skipped: int
    files: tuple[str, ...]


def names() -> dict[str, str]:
    """Every suite and its line of help; one whose module cannot be imported says why instead."""
    import pdlab.bench as package

    found = {}
    for info in pkgutil.iter_modules(package.__path__):
        if info.name in _NOT_SUITES or info.name.startswith("_"):
            continue
        try:
            module = importlib.import_module(f"pdlab.bench.{info.name}")
        except Exception as error:  # what one needs may be missing, broken, or half-edited: the others still run
            found[info.name] = f"not available here: {type(error).__name__}: {' '.join(str(error).split())}"
            continue
        if hasattr(module, "NAME") and hasattr(module, "run"):
            found[module.NAME] = module.HELP
    return dict(sorted(found.items()))


def load(name: str) -> ModuleType:
    """The suite's module; an unknown name is a ConfigError that lists the known ones."""
    known = names()
    if name not in known:
        raise ConfigError(f"there is no benchmark named {name!r}", f"known: {', '.join(known)}")
    try:
        return importlib.import_module(f"pdlab.bench.{name}")
    except Exception as error:
        what = f"benchmark {name!r} cannot run here: {type(error).__name__}: {error}"
        raise ConfigError(what, "pdlab doctor says what is missing") from error


def run(
    name: str,
    *,
    device: str = "auto",
    profile: str | None = None,
    record: bool = False,
    out: Path | None = None,
    budget_s: float | None = None,
    seed: int = 0,
    only: str | None = None,
    say: Callable[[str], None] | None = None,
) -> tuple[Outcome, Recorder]:
    """Runs one suite. What was measured is written even when it is interrupted or fails.

    `only`: "simulated" runs, at full size by default, what a suite simulates, which needs no GPU; "measured" leaves that out.
    """
    module = load(name)
    if only == "simulated" and not getattr(module, "SIMULATES", False):
        raise ConfigError(f"{name} simulates nothing that it has not measured before", "leave out --only")
    machine = resolve_device(device)
    profile = profile or ("full" if only == "simulated" else machine.profile)
    recorder = Recorder(name, machine.slug, record=record, out=out, seed=seed)
    extra: dict[str, Any] = {} if say is None else {"say": say}
    budget = DEFAULT_BUDGET_S[profile] if budget_s is None else budget_s
    context = Context(machine, profile, recorder, budget, seed, only, **extra)
    with recorder:
        module.run(context)
    seconds = time.monotonic() - context.started
    recorders = (recorder, *recorder.beside)
    rows = [row for r in recorders for row in r.rows]
    skipped = sum(row.status.startswith("skipped:") for row in rows)
    return Outcome(name, seconds, len(rows), skipped, tuple(str(p) for r in recorders for p in r.files)), recorder
