"""Runs the persistent decode kernel in Triton's interpreter: one JSON request a line in, one JSON answer a line out.

A process of its own, because TRITON_INTERPRET must be set before triton is first imported, and other tests import it without.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

from interleaved import interleave
from persistent_cases import StackCase, given_up, stack_errors

if __name__ == "__main__":
    interleave(seed=0)
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        try:
            what = {"errors": stack_errors, "given_up": given_up}[request["call"]]
            answer: dict[str, Any] = {"answer": what(StackCase(**request["case"]))}
        except Exception:
            answer = {"failed": traceback.format_exc()}
        print(json.dumps(answer), flush=True)
