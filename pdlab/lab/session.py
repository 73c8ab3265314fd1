"""setup(): the first line of every notebook. It makes a Lab: the machine, what runs on it, its data, and the footers.

lab = setup()
lab.begin("01_prefill_vs_decode", profile=profile, seed=seed, record=record)
lab.device, lab.dtype, lab.profile, lab.machine, lab.ceilings(), lab.measurements("ceilings", "nvidia-h200")
"""

from __future__ import annotations

import os
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdlab import __version__
from pdlab.core.config import EngineConfig
from pdlab.core.errors import ConfigError, DeviceUnavailable
from pdlab.core.paths import checkout_dir, data_dir
from pdlab.lab import install
from pdlab.models.config import ModelConfig

if TYPE_CHECKING:
    import pandas as pd

    from pdlab.bench.records import Recorder
    from pdlab.costs.roofline import Ceilings
    from pdlab.hardware.probe import Machine

PROFILES = ("smoke", "full")


class LiveText:
    """Text that grows in one output of the cell. (A print a token leaves one output a token in an executed copy.)"""

    def __init__(self) -> None:
        self.text = ""
        self._handle: Any = None

    def add(self, piece: str) -> None:
        from IPython.display import display

        self.text += piece
        if self._handle is None:
            self._handle = display(self, display_id=True)
        else:
            self._handle.update(self)

    def __repr__(self) -> str:
        return "\n".join(textwrap.fill(line, 100) for line in self.text.split("\n"))


class Lab:
    """One notebook's session. `profile` is smoke (CPU, at most 45 s) or full (a GPU, at most 90 s); `why` says why."""

    def __init__(self, machine: Machine, profile: str, why: str, *, colab: bool = False) -> None:
        self.machine, self.profile, self.why, self.colab = machine, profile, why, colab
        self.device, self.dtype = machine.device, machine.dtype
        self.notebook, self.seed, self.record = "", 0, False
        self._ceilings: dict[str, Ceilings] = {}

    @property
    def smoke(self) -> bool:
        return self.profile == "smoke"

    def begin(self, notebook: str, *, profile: str = "auto", seed: int = 0, record: bool = False) -> None:
        """Takes the parameters cell's values: a profile other than "auto" overrides the machine's; seeds torch and NumPy.

        Without a GPU, `full` becomes `smoke` and says so: the sizes of `full` are those of a GPU.
        """
        if profile not in ("auto", *PROFILES):
            raise ConfigError(f"profile={profile!r} is not one", f"use auto, {' or '.join(PROFILES)}")
        from pdlab.bench.records import name_command

        if profile != "auto" and profile != self.profile:
            self.profile, self.why = _asked(self.machine, profile, "the parameter `profile`")
        self.notebook, self.seed, self.record = notebook, seed, record
        name_command(f"notebook {notebook}")
        import numpy as np
        import torch

        np.random.seed(seed)  # noqa: NPY002 — a reader's own cells may use the global generator
        torch.manual_seed(seed)
        print(f"profile {self.profile}: {self.why}")

    def config(self, **changes: Any) -> EngineConfig:
        """An EngineConfig for this machine: its device, its dtype, this notebook's seed."""
        return EngineConfig(device=self.device, dtype=self.dtype, seed=self.seed).with_(**changes)

    def fits(self, model: ModelConfig, kv_tokens: int = 0, dtype: str | None = None) -> str:
        """'' when the weights and `kv_tokens` of KV fit in 85 % of the device's memory, else the reason in words."""
        from pdlab.costs.formulas import itemsize_of, kv_bytes, weights_bytes

        size = itemsize_of(dtype or self.dtype)
        need, have = weights_bytes(model, size) + kv_bytes(model, kv_tokens, size), self.machine.memory_bytes * 0.85
        return "" if need <= have else f"{model.name} needs {need / 1e9:.1f} GB and {have / 1e9:.1f} GB can be used here"

    def has_room(self, model: str, kv_tokens: int = 0) -> bool:
        """Whether a catalogue shape fits here; says why where it doesn't, for the notebook's reader."""
        from pdlab.models.catalogue import config_of

        if why := self.fits(config_of(model), kv_tokens):
            print(f"left out: {why}")
        return not why

    def ceilings(self, dtype: str | None = None) -> Ceilings:
        """This machine's ceilings, measured once in this session so that every ratio is taken within one run."""
        dtype = dtype or self.dtype
        if dtype not in self._ceilings:
            from pdlab.bench.ceilings import measure

            self._ceilings[dtype] = measure(self.device, dtype, quick=self.smoke)
        return self._ceilings[dtype]

    def measurements(self, experiment: str, device: str | None = None) -> pd.DataFrame:
        """Recorded rows that count (the newest of each key) of an experiment, on this device or on another's slug."""
        from pdlab.bench.records import latest

        return latest(device or self.machine.slug, experiment)

    def recorder(self, experiment: str) -> Recorder:
        """Where this notebook's own rows go: runs/, or data/ when the notebook was started with record=True."""
        from pdlab.bench.records import Recorder

        return Recorder(experiment, self.machine.slug, record=self.record, seed=self.seed, command=f"notebook {self.notebook}")

    def footer(self, kind: str = "measured", device: str | None = None, *, dtype: str | None = None, when: str = "") -> str:
        """The line under a figure: device, dtype, versions, what kind of number it is, and when.

        `dtype` where it is not the lab's own; `when` the day of what was recorded (anything else is of today).
        """
        if kind not in ("measured", "recorded", "simulated", "predicted", "counted"):
            raise ConfigError(f"kind={kind!r} is no kind of number", "use measured, recorded, simulated, predicted or counted")
        versions = f"torch {self.machine.torch_version} · pdlab {__version__}"
        if kind == "counted":
            return f"counted from the shapes: no device · pdlab {__version__}"
        if kind == "recorded":
            day = f" {when[:10]}" if when else ""
            where = " · ".join(filter(None, (device or self.machine.slug, dtype)))
            return f"{where} · recorded{day} (data/measurements, with provenance) · drawn by pdlab {__version__}"
        where = " · ".join(filter(None, (device, dtype) if device else (self.machine.name, dtype or self.dtype)))
        return f"{where} · {versions} · {kind} {time.strftime('%Y-%m-%d')} · profile {self.profile}"


def _asked(machine: Machine, profile: str, source: str) -> tuple[str, str]:
    """(profile, why) where `source` asked for one: what was asked for, or smoke where that is `full` and no GPU is here."""
    if profile == "full" and not machine.is_gpu:
        why = machine.problem or "no GPU is here"
        return "smoke", f"{source} says full, but {why}, so a CPU's sizes are run; parameters that begin with gpu_ do nothing"
    return profile, f"set by {source}"


def _profile(machine: Machine) -> tuple[str, str]:
    asked = os.environ.get("PDLAB_PROFILE", "")
    if asked in PROFILES:
        return _asked(machine, asked, "PDLAB_PROFILE")
    why = "a GPU is here" if machine.is_gpu else machine.problem or "no GPU is here"
    ignored = f"PDLAB_PROFILE={asked!r} is neither smoke nor full; " if asked not in ("", "auto") else ""
    return machine.profile, f"{ignored}chosen because {why}"


def _describe(lab: Lab) -> None:
    m = lab.machine
    gib = f"{m.memory_bytes / 2**30:.0f} GiB" if m.memory_bytes else "memory unknown"
    kind = f"compute capability {m.capability[0]}.{m.capability[1]}" if m.capability else f"{os.cpu_count()} logical cores"
    print(f"machine  {m.name} ({m.device}, {gib}, {kind}){' on Colab' if lab.colab else ''}")
    why = {"bfloat16": "capability 8.0 or more", "float16": "below 8.0: no fast bfloat16", "float32": "a CPU"}[m.dtype]
    print(f"dtype    {m.dtype} ({why})")
    if m.dtype == "float16":
        print("         attention is SDPA or plain, products are torch's: Triton's dot kernels have no tensor cores below 8.0")
    print(f"profile  {lab.profile} ({lab.why})")
    shown = data_dir() if checkout_dir() is None else Path("data")
    print(f"data     {shown} · pdlab {__version__} · torch {m.torch_version}")


def setup(device: str = "auto", *, quiet: bool = False) -> Lab:
    """Finds out what is here and says so; on Colab installs what pdlab needs and is missing. Run it again at any time."""
    colab = install.on_colab()
    if colab and (added := install.install_missing()):
        print("installed", ", ".join(added))
    from pdlab.hardware.probe import probe

    machine = probe(device)
    if machine.torch_version is None:
        raise DeviceUnavailable(
            machine.problem or "torch is missing", "in a checkout run: make lab (or pip install -e '.[lab]')"
        )
    from pdlab.lab.style import apply_style

    apply_style()
    _quiet()
    lab = Lab(machine, *_profile(machine), colab=colab)
    if not quiet:
        _describe(lab)
    return lab


def _quiet() -> None:
    """Warnings of libraries about themselves, which a reader of a notebook can do nothing about."""
    import logging
    import warnings

    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*IProgress not found.*")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
