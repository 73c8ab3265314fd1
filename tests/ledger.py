"""Rows and verdicts for the tests of the ledger's claims; with conftest's `places` no rows count but those a test makes."""

from __future__ import annotations

from pathlib import Path

from pdlab import claims
from pdlab.bench.records import Recorder

GPU = "nvidia-h200"


def recorder(places: Path, experiment: str, device: str = GPU) -> Recorder:
    return Recorder(experiment, device, out=places / "data" / "measurements", command="test")


def of(id: str, device: str = GPU) -> claims.Verdict:
    return next(v for v in claims.judge(device) if v.id == id)
