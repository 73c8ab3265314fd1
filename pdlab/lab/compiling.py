"""Kernels of a notebook's live part, compiled in other processes while the cells before it run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from pdlab.core.paths import checkout_dir

if TYPE_CHECKING:
    from pdlab.lab.session import Lab


class Compiling:
    """`process` prints what it did in its last line; None where there is nothing to compile."""

    def __init__(self, process: subprocess.Popen[str] | None) -> None:
        self._process = process

    def wait(self) -> None:
        """Until it is done; prints what was compiled and how long one had to wait here, nothing where there was nothing.

        Whatever goes wrong in the processes costs time alone: what is not compiled now is compiled where it is launched.
        """
        process, self._process = self._process, None
        if process is None:
            return
        began = time.monotonic()
        lines = process.communicate()[0].splitlines()
        waited = time.monotonic() - began
        print(f"compiled beside the cells above: {lines[-1] if lines else 'nothing'}; waited here for {waited:.1f} s")


def compile_ahead(lab: Lab, what: str, seconds: float = 60.0) -> Compiling:
    """Begins to compile what `pdlab.bench.compile_ahead --what` knows, on a GPU that Triton's kernels run on; elsewhere does
    nothing. Kernels that the cache has already are only looked up. After `seconds` what is left is left.
    """
    from pdlab.hardware.probe import triton_dot_allowed

    if lab.smoke or not triton_dot_allowed(lab.machine.capability):
        return Compiling(None)
    command = [sys.executable, "-m", "pdlab.bench.compile_ahead", "--what", what, "--seconds", f"{seconds:g}"]
    checkout = checkout_dir()  # which may be on this process's sys.path alone
    found = os.pathsep.join(filter(None, (str(checkout or ""), os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": found}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    return Compiling(process)
