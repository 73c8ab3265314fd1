"""The doctor, and every light command, where torch is missing or broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import run_json, run_main, run_python

# --- doctor

DOCTOR = {"schema", "python", "platform", "packages", "device", "profile", "backends", "missing"}


def _check_doctor(doc: dict[str, Any]) -> None:
    assert set(doc) == DOCTOR
    assert doc["schema"] == 1
    assert set(doc["packages"]) >= {"torch", "triton", "numpy", "pandas", "papermill"}
    assert doc["profile"] in ("smoke", "full")
    assert doc["device"] is None or set(doc["device"]) == {"name", "capability", "memory_bytes", "dtype"}
    assert doc["backends"]
    assert all(set(b) == {"available", "reason"} and isinstance(b["available"], bool) for b in doc["backends"].values())
    assert all(set(m) == {"name", "why", "fix"} and all(m.values()) for m in doc["missing"])


def test_the_doctor_reports_what_is_here(capsys: pytest.CaptureFixture[str]) -> None:
    code, doc = run_json(capsys, "doctor")
    assert code == 0
    _check_doctor(doc)
    assert doc["packages"]["torch"]
    assert doc["backends"]["plain"]["available"]
    code, out, _ = run_main(capsys, "doctor")
    assert code == 0
    assert "profile" in out


BLOCK = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
BLOCKED = set(sys.argv.pop(1).split(","))
sys.meta_path.insert(0, Blocker())
from pdlab.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("blocked", ["torch", "torch,triton,numpy,pandas,yaml,psutil,matplotlib,jinja2,gguf"])
def test_the_doctor_works_without_torch(blocked: str) -> None:
    done = run_python(BLOCK, blocked, "doctor", "--json")
    assert done.returncode == 0, done.stderr
    doc = json.loads(done.stdout)
    _check_doctor(doc)
    assert doc["packages"]["torch"] is None
    assert doc["device"] is None
    assert set(doc["backends"]) == {"plain", "sdpa", "triton", "flash_attn"}
    assert not any(b["available"] for b in doc["backends"].values())
    missing = {m["name"]: m for m in doc["missing"]}
    assert "pip install" in missing["torch"]["fix"]


@pytest.mark.parametrize(
    "body",
    ["raise OSError('libcudart.so.13: cannot open shared object file')", "raise RuntimeError('half an upgrade')", "x = 1"],
    ids=["missing library", "raises", "an empty shell"],
)
def test_the_doctor_works_with_a_broken_torch(tmp_path: Path, body: str) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(body + "\n")
    code = "import sys; from pdlab.cli import main; sys.exit(main(sys.argv[1:]))"
    done = run_python(code, "doctor", "--json", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    doc = json.loads(done.stdout)
    _check_doctor(doc)
    torch = next(m for m in doc["missing"] if m["name"] == "torch")
    assert "broken" in torch["why"]
    assert "--force-reinstall" in torch["fix"]


@pytest.mark.parametrize("argv", [["generate", "--model", "random:llama-tiny", "--prompt", "a"], ["bench", "ceilings"]])
def test_other_commands_say_that_torch_is_missing(argv: list[str]) -> None:
    done = run_python(BLOCK, "torch", *argv, "--json")
    assert done.returncode == 2, done.stderr
    error = json.loads(done.stdout)["error"]
    assert "torch" in error["message"]
    assert error["hint"]


@pytest.mark.parametrize("argv", [["run", "notebook.ipynb", "--out", "x", "--json"], ["run", "--help"]], ids=" ".join)
def test_running_notebooks_without_what_it_needs_says_so(argv: list[str]) -> None:
    done = run_python(BLOCK, "psutil", *argv)
    assert "psutil" in done.stdout
    assert done.returncode == (0 if "--help" in argv else 2), done.stderr
    assert "example" in done.stdout if "--help" in argv else "pdlab doctor" in json.loads(done.stdout)["error"]["hint"]


def test_the_light_commands_never_load_torch() -> None:
    code = """
import sys
from pdlab.cli import main
for argv in (["claims", "--json"], ["model", "list", "--json"], ["bench", "--list", "--json"]):
    assert main(argv) == 0, argv
    assert "torch" not in sys.modules, argv
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("said", "holds"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")])
def test_threads_of_the_cpu_wait_asleep_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, said: dict[str, str], holds: str
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    done = run_python("import os, pdlab; print(os.environ['OMP_WAIT_POLICY'])", **said)
    assert done.stdout.strip() == holds
