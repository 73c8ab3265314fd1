"""pdlab: the prefill/decode lab.

Importing the package is light: torch is loaded only when something needs it, so that `pdlab doctor` also works where
torch is missing or broken.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# torch's CPU threads wait by spinning. As soon as another process holds a core, whoever is waited for has been put aside and
# the others burn its turn: on two busy cores a decode step takes ten times as long. Asleep, they lose some microseconds a
# wait. It counts only if it is said before torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# name -> module that defines it; resolved on first access
_LAZY = {
    "EngineConfig": "pdlab.core.config",
    "LLM": "pdlab.llm",
    "PdlabError": "pdlab.core.errors",
    "RequestOutput": "pdlab.llm",
    "SamplingParams": "pdlab.core.config",
    "ServeResult": "pdlab.llm",
    "TokenEvent": "pdlab.core.request",
}

__all__ = ["__version__", *sorted(_LAZY)]

if TYPE_CHECKING:
    from pdlab.core.config import EngineConfig, SamplingParams
    from pdlab.core.errors import PdlabError
    from pdlab.core.request import TokenEvent
    from pdlab.llm import LLM, RequestOutput, ServeResult


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(importlib.import_module(_LAZY[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'pdlab' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
