"""Where shipped data and the user's own files are found.

Shipped data is the `data/` folder: in a checkout, beside the package; from a wheel, installed as `pdlab/_data`. What a
user measures or downloads lives under `$PDLAB_HOME` (default `~/.cache/pdlab`) and overrides what was shipped.
"""

from __future__ import annotations

import os
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


def checkout_dir() -> Path | None:
    """Root of the source checkout that this package is imported from, or None for an installed wheel."""
    root = _PACKAGE.parent
    return root if (root / "pyproject.toml").is_file() and (root / "data").is_dir() else None


def data_dir() -> Path:
    """The shipped data: measurements, tuning tables, claims."""
    root = checkout_dir()
    return root / "data" if root else _PACKAGE / "_data"


def home_dir() -> Path:
    """The user's own folder; not created until something is written there."""
    return Path(os.environ.get("PDLAB_HOME") or Path.home() / ".cache" / "pdlab").expanduser()


def find_data(relative: str) -> Path | None:
    """The user's file of this name under home_dir() if there is one, else the shipped one, else None."""
    for base in (home_dir(), data_dir()):
        if (path := base / relative).exists():
            return path
    return None
