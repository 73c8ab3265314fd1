"""Run what the README tells its reader to run, in the environment that `make` built.

Every fenced block of language `sh` is run by bash, of language `python` by Python; the first failure ends the check. A
block whose fence says more than the language (as in "sh gpu" or "sh once") needs a GPU, a browser or a fresh clone, and
is listed but not run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

FENCE = re.compile(r"^```(\w+)[ \t]*([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def main(readme: str) -> int:
    root = Path(readme).resolve().parent
    binaries = Path(sys.executable).parent
    env = {**os.environ, "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}", "MPLBACKEND": "Agg"}
    commands = {"sh": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}
    for language, note, body in FENCE.findall(Path(readme).read_text(encoding="utf-8")):
        if language not in commands:
            continue
        print(f"--- {language}{' (not run: ' + note + ')' if note else ''}\n{body.rstrip()}", flush=True)
        if not note and (code := subprocess.run([*commands[language], body], cwd=root, env=env).returncode):
            print(f"the block above, from {readme}, ended with code {code}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
