"""The command line: exit codes, JSON alone on standard output, and a doctor that works where torch does not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import run_json, run_main

from pdlab import cli
from pdlab.core.errors import ConfigError

COMMANDS = ("doctor", "model", "model list", "model fetch", "generate", "bench", "claims", "compare", "run")


# --- help and usage


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(capsys: pytest.CaptureFixture[str], command: str) -> None:
    code, out, _ = run_main(capsys, *command.split(), "--help")
    assert code == 0
    assert "example" in out.lower()
    assert f"pdlab {command.split()[0]}" in out


@pytest.mark.parametrize(
    "argv",
    [
        ["no_such_command"],
        ["doctor", "--loud"],
        ["generate", "--model", "random:llama-tiny"],
        ["generate", "--model", "random:llama-tiny", "--prompt", "a", "--max-tokens", "few"],
        ["bench", "no_such_suite"],
        ["bench", "ceilings", "--budget", "0"],
        ["bench", "ceilings", "--budget", "nan"],
        ["bench", "ceilings", "--budget", "inf"],
        ["bench", "ceilings", "--seed", "-1"],
        ["bench", "ceilings", "--device", "tpu"],
        ["bench", "ceilings", "--out", "/dev/null/x"],
        ["bench", "--lis"],
        ["model", "fetch", "no-such-model"],
        ["claims", "--device", "../x"],
        ["claims", "--device", "abacus"],
        ["compare", "abacus", "slide-rule"],
        ["compare", "only-one"],
        ["generate", "--model", "no-such-model", "--prompt", "a"],
        ["generate", "--model", "random:llama-tiny", "--prompt", "a", "--temperature", "-1"],
        ["generate", "--model", "random:llama-tiny", "--prompt", "a", "--top-p", "1.5"],
        ["generate", "--model", "random:llama-tiny", "--prompt", "a", "--max-tokens", "0"],
        ["generate", "--model", "random:llama-tiny", "--prompt", "a", "--device", "tpu"],
        ["generate", "--model", "random:llama-tiny", "--prompt", ""],
        ["generate", "--model", "random:llama-tiny", "--prompt", "a\udcff"],
        ["generate", "--model", "random:llama-tiny", "--prompt", "word " * 2000],
    ],
    ids=lambda argv: " ".join(argv)[:60],
)
def test_what_cannot_be_understood_ends_with_2_and_says_what_would_be_right(
    capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    code, doc = run_json(capsys, *argv)
    assert code == 2
    assert set(doc) == {"error"}
    assert set(doc["error"]) == {"type", "message", "hint"}
    assert doc["error"]["message"]
    assert doc["error"]["hint"]


def test_without_json_an_error_goes_to_standard_error_alone(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run_main(capsys, "bench", "no_such_suite")
    assert (code, out) == (2, "")
    assert "no_such_suite" in err
    assert "ceilings" in err
    assert "Traceback" not in err


# --- exit codes


class OutOfMemoryError(RuntimeError):
    """Named like torch's."""


def _raise(error: BaseException) -> Callable[..., Any]:
    def command(args: object) -> Any:
        raise error

    return command


def _caused(error: BaseException) -> BaseException:
    outer = ConfigError("a step failed")
    outer.__cause__ = error
    return outer


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("wrong", "right"), 2),
        (MemoryError(), 6),
        (OutOfMemoryError("CUDA out of memory"), 6),
        (_caused(OutOfMemoryError("CUDA out of memory")), 6),
        (KeyboardInterrupt(), 130),
        (RuntimeError("a bug"), 1),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, BaseException) else str(v),
)
@pytest.mark.parametrize("as_json", [False, True])
def test_each_kind_of_error_has_its_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, as_json: bool
) -> None:
    monkeypatch.setitem(cli._COMMANDS, "doctor", _raise(error))
    got, out, err = run_main(capsys, "doctor", *(["--json"] if as_json else []))
    assert got == code
    if as_json:
        assert json.loads(out)["error"]["message"]
    else:
        assert out == ""
        assert err


def test_of_several_benchmarks_one_that_fails_does_not_stop_the_rest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from pdlab.bench import suites

    monkeypatch.setattr(suites, "names", lambda: {"a": "first", "b": "second"})
    monkeypatch.setattr(suites, "load", lambda name: None)
    ran = []

    def run(name: str, **_: object) -> Any:
        ran.append(name)
        if name == "a":
            raise MemoryError
        record = type("R", (), {"rows": [], "device": "cpu", "beside": ()})()
        return suites.Outcome(name, 1.0, 0, 0, ()), record

    monkeypatch.setattr(suites, "run", run)
    code, doc = run_json(capsys, "bench", "all")
    assert code == 6
    assert ran == ["a", "b"]
    assert [(s["name"], s["status"]) for s in doc["suites"]] == [("a", "failed"), ("b", "ok")]


def test_ctrl_c_ends_with_130() -> None:
    # a shell's background jobs, and what they start, are born with SIGINT ignored
    code = """
import signal, sys, time
from pdlab.cli import main

signal.signal(signal.SIGINT, signal.default_int_handler)

class Stdin:
    def read(self):
        print("reading", file=sys.stderr, flush=True)
        time.sleep(60)

sys.stdin = Stdin()
sys.exit(main(sys.argv[1:]))
"""
    command = [sys.executable, "-c", code, "generate", "--model", "random:llama-tiny", "--prompt", "-", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert process.stderr.readline() == "reading\n"
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert json.loads(out)["error"]["type"] == "KeyboardInterrupt"


# --- standard output


def test_with_json_nothing_else_reaches_standard_output(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def chatty(args: object) -> Any:
        print("a library says hello")
        os.write(1, b"so does C code\n")
        subprocess.run([sys.executable, "-c", "print('and a child process')"], check=True)
        return 0, {"answer": 42}, "text"

    monkeypatch.setitem(cli._COMMANDS, "doctor", chatty)
    assert cli.main(["doctor", "--json"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out) == {"answer": 42}
    assert "hello" in err
    assert "C code" in err
    assert "child" in err


GENERATE = ["generate", "--model", "random:llama-tiny", "--prompt", "a", "--max-tokens", "50", "--device", "cpu"]


@pytest.mark.parametrize("argv", [["claims"], ["claims", "--json"], ["nonsense", "--json"], ["--help"], GENERATE], ids=" ".join)
def test_a_reader_that_leaves_early_is_no_error(argv: list[str]) -> None:
    command = [sys.executable, "-m", "pdlab", *argv]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()  # before Python has even started
    errors = process.stderr.read()
    assert "Traceback" not in errors
    assert "BrokenPipe" not in errors
    assert process.wait(60) == (2 if "nonsense" in argv else 0)


@pytest.mark.parametrize("flags", [[], ["--json"]])
@pytest.mark.parametrize(("where", "code"), [(">&-", 0), (">/dev/full", 1), (">&- 2>&- <&-", 0)])
def test_an_answer_that_cannot_be_written_is_no_traceback(where: str, code: int, flags: list[str]) -> None:
    if "full" in where and not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    command = " ".join([sys.executable, "-m", "pdlab", "claims", *flags, where])
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert ("cannot be written" in done.stderr) == bool(code)


def test_a_terminal_without_unicode_gets_what_it_can_show() -> None:
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "pdlab", "claims"]
    for flags in ([], ["--json"]):
        done = subprocess.run([*command, *flags], env=env, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.isascii()
    assert any("–" in claim["article"] for claim in json.loads(done.stdout))  # nothing is lost in JSON


@pytest.mark.parametrize(("error", "code"), [(RuntimeError("a kernel exploded"), 2), (OutOfMemoryError("no memory"), 6)])
@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_text_that_ended_in_an_error_is_no_success(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, flags: list[str]
) -> None:
    from pdlab.models.model import Model

    def forward(*_: object) -> None:
        raise error

    monkeypatch.setattr(Model, "forward", forward)
    got, out, err = run_main(capsys, *GENERATE, *flags)
    assert got == code
    if flags:
        assert str(error) in json.loads(out)["error"]["message"]
    else:
        assert str(error) in err


# --- model, generate, bench, claims


def test_models_are_listed_with_all_their_fields(capsys: pytest.CaptureFixture[str]) -> None:
    code, doc = run_json(capsys, "model", "list")
    assert code == 0
    assert {"smollm2-135m", "llama-tiny", "gpt2-xl"} <= {m["name"] for m in doc}
    assert all(set(m) == {"name", "family", "parameters", "source", "licence", "sha256", "cached_path"} for m in doc)


@pytest.mark.parametrize("model", ["random:llama-tiny", "random:gpt2-tiny"])
def test_generate_answers_as_one_document(capsys: pytest.CaptureFixture[str], model: str) -> None:
    argv = ["generate", "--model", model, "--prompt", "Hello", "--max-tokens", "5", "--logprobs", "2", "--device", "cpu"]
    code, doc = run_json(capsys, *argv)
    assert code == 0
    assert set(doc) == {"text", "token_ids", "finish_reason", "prompt_tokens", "timing", "logprobs"}
    assert set(doc["timing"]) == {"queue_s", "ttft_s", "prefill_s", "decode_s", "itl_s"}
    assert doc["finish_reason"] in ("length", "stop")
    assert 1 <= len(doc["token_ids"]) <= 5
    assert len(doc["timing"]["itl_s"]) == len(doc["token_ids"]) - 1
    assert [p["token_id"] for p in doc["logprobs"]] == doc["token_ids"]
    assert all(len(p["top"]) == 2 for p in doc["logprobs"])


def test_a_stream_is_the_same_text_as_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", "--model", "random:llama-tiny", "--prompt", "Hello", "--max-tokens", "9", "--temperature", "1",
            "--seed", "3", "--device", "cpu"]  # fmt: skip
    _, doc = run_json(capsys, *argv)
    code, out, _ = run_main(capsys, *argv)
    assert code == 0
    assert out == doc["text"] + "\n"


def test_a_prompt_can_come_from_standard_input(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello"))
    argv = ["generate", "--model", "random:llama-tiny", "--max-tokens", "3", "--device", "cpu"]
    _, piped = run_json(capsys, *argv, "--prompt", "-")
    _, typed = run_json(capsys, *argv, "--prompt", "Hello")
    assert piped["token_ids"] == typed["token_ids"]


def test_a_benchmark_writes_where_it_was_told_and_reports_its_rows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from pdlab.bench import ceilings

    monkeypatch.setattr(ceilings, "_buffer_bytes", lambda machine, quick=False: 1 << 20)
    monkeypatch.setattr(ceilings, "_products", lambda machine: [("float32", 64)])
    code, doc = run_json(capsys, "bench", "ceilings", "--device", "cpu", "--out", str(tmp_path), "--budget", "1e6")
    assert code == 0
    (suite,) = doc["suites"]
    assert (suite["name"], suite["status"], suite["rows"]) == ("ceilings", "ok", 3)
    assert len(doc["rows"]) == 3
    (table,) = tmp_path.rglob("ceilings.csv")
    assert suite["files"] == [str(table)]


def test_a_benchmark_dirties_nothing_by_default(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from pdlab.bench import ceilings, records

    monkeypatch.setattr(ceilings, "_buffer_bytes", lambda machine, quick=False: 1 << 20)
    monkeypatch.setattr(ceilings, "_products", lambda machine: [])
    monkeypatch.setattr(records, "checkout_dir", lambda: None)
    monkeypatch.chdir(tmp_path)
    code, doc = run_json(capsys, "bench", "ceilings", "--device", "cpu", "--budget", "1e6")
    assert code == 0
    assert {p.parts[0] for p in (Path(f).relative_to(tmp_path) for f in doc["suites"][0]["files"])} == {"runs"}


def test_benchmarks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    code, doc = run_json(capsys, "bench", "--list")
    assert code == 0
    assert {"ceilings", "prefill_vs_decode"} <= {b["name"] for b in doc}


def test_the_claims_are_a_list_of_verdicts(capsys: pytest.CaptureFixture[str]) -> None:
    code, doc = run_json(capsys, "claims")
    assert code == 0
    assert len(doc) == 24
    allowed = {"reproduced", "partly", "not_reproduced", "impossible", "not_measured"}
    assert {v["verdict"] for v in doc} <= allowed


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "pdlab", "--version"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.split()[0]) == (0, "pdlab")
