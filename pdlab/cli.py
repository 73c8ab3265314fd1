"""The command `pdlab`. Every subcommand imports what it needs when it runs, so `pdlab doctor` works without torch.

With --json, standard output holds one document and nothing else: whatever a library prints meanwhile goes to standard
error. Exit codes: 0 well, 2 usage or a PdlabError, 6 out of memory, 130 interrupted; `run` adds 3, 4 and 5 for notebooks.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

from pdlab import __version__
from pdlab.console import finish, stdout_kept_clean, to_json, usable_streams
from pdlab.core.errors import PdlabError, StepFailed

OK, FAILED, USAGE, OUT_OF_MEMORY, INTERRUPTED = 0, 1, 2, 6, 130


class UsageError(PdlabError):
    """The command line cannot be understood."""


class _Parser(argparse.ArgumentParser):
    """Raises instead of exiting, so that a usage error can be a JSON document too. Options are written out."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, f"see: {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="pdlab",
        description="The prefill/decode lab: Transformer inference, measured.",
        epilog="example: pdlab generate --model smollm2-135m --chat --prompt 'What is the capital of France?'",
    )
    parser.add_argument("--version", action="version", version=f"pdlab {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser, required=True)

    def add(name: str, text: str, example: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text, epilog=f"example: {example}")

    def json_flag(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--json", action="store_true", help="one JSON document on standard output")

    json_flag(add("doctor", "Say what is here, what is missing and what would mend it.", "pdlab doctor --json"))

    model = add("model", "List the models known by name, or fetch the weights of one.", "pdlab model fetch smollm2-135m")
    what = model.add_subparsers(dest="action", metavar="list|fetch", parser_class=_Parser, required=True)
    json_flag(what.add_parser("list", help="names, sizes, sources", epilog="example: pdlab model list --json"))
    fetch = what.add_parser("fetch", help="download weights, check them", epilog="example: pdlab model fetch smollm2-135m")
    fetch.add_argument("name", metavar="NAME")
    json_flag(fetch)

    generate = add(
        "generate", "Continue a prompt, or answer it with --chat.", "pdlab generate --model smollm2-135m --prompt Hello"
    )
    generate.add_argument("--model", required=True, metavar="M", help="catalogue name, random:NAME, folder or hub id")
    generate.add_argument("--prompt", required=True, metavar="P", help="text; - reads standard input")
    generate.add_argument("--max-tokens", type=int, default=64, metavar="N")
    generate.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    generate.add_argument("--top-k", type=int, default=0, metavar="K", help="0 is off (default)")
    generate.add_argument("--top-p", type=float, default=1.0, metavar="P", help="1 is off (default)")
    generate.add_argument("--seed", type=int, default=None, metavar="S")
    generate.add_argument("--logprobs", type=int, default=None, metavar="N", help="of the chosen and the N likeliest tokens")
    generate.add_argument("--chat", action="store_true", help="put the prompt through the model's chat template")
    generate.add_argument("--device", default="auto", help="auto (default), cpu, cuda or cuda:N")
    generate.add_argument("--dtype", default="auto", help="auto (default), float32, float16 or bfloat16")
    json_flag(generate)

    bench = add("bench", "Run benchmarks; without a NAME, list them.", "pdlab bench ceilings --json")
    bench.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run, or all")
    bench.add_argument("--list", action="store_true", help="list the benchmarks and end")
    bench.add_argument("--record", action="store_true", help="append to the kept tables (data/ in a checkout)")
    bench.add_argument("--out", type=Path, metavar="DIR", help="write tables here instead of runs/measurements")
    bench.add_argument("--budget", type=float, metavar="SECONDS", help="time for each (default 20 on a CPU, 60 on a GPU)")
    bench.add_argument("--profile", choices=("smoke", "full"), help="sizes: by default what fits the machine")
    bench.add_argument("--only", choices=("measured", "simulated"), help="leave out the other; what is simulated needs no GPU")
    bench.add_argument("--device", default="auto", help="auto (default), cpu, cuda or cuda:N")
    bench.add_argument("--seed", type=int, default=0)
    json_flag(bench)

    claims = add("claims", "Judge the article's claims by recorded measurements.", "pdlab claims --device nvidia-h200 --json")
    claims.add_argument("--device", metavar="D", default=None, help="whose records (default nvidia-h200)")
    json_flag(claims)

    compare = add(
        "compare",
        "Two devices' measurements side by side, each against its own roofline.",
        "pdlab compare nvidia-h200 cpu-x86-64 --experiment ceilings",
    )
    compare.add_argument("a", metavar="DEVICE_A")
    compare.add_argument("b", metavar="DEVICE_B")
    compare.add_argument("--experiment", metavar="E", default=None)
    compare.add_argument("--all", action="store_true", help="show what only one of them has, too (--json always does)")
    compare.add_argument("--runs", action="store_true", help="read runs/measurements too, where `bench` writes by default")
    json_flag(compare)

    _add_runner(commands)
    return parser


def _add_runner(commands: Any) -> None:
    """`pdlab run` belongs to the runner; where it cannot be imported the other commands still work."""
    try:
        from pdlab.runner import cli as runner

        runner.add_parser(commands)
    except Exception as error:  # a missing package, or one whose native library does not load
        text = "run notebooks in batches (not available here)"
        broken = commands.add_parser("run", help=text, description=f"{text}: {error}", epilog="example: pdlab doctor")
        broken.add_argument("anything", nargs=argparse.REMAINDER)
        broken.set_defaults(broken=str(error))


# --- commands: each returns (exit code, JSON document or None, text for people or None) ---------------------------------

Answer = tuple[int, Any, str | None]


def _doctor(args: argparse.Namespace) -> Answer:
    from pdlab import doctor

    doc = doctor.report()
    return OK, doc, doctor.render(doc)


def _model(args: argparse.Namespace) -> Answer:
    from pdlab.models import fetch
    from pdlab.models.catalogue import list_entries

    def describe(entry: Any) -> dict[str, Any]:
        path = fetch.cached_path(entry.name)
        return {**vars(entry), "cached_path": str(path) if path else None}

    if args.action == "fetch":
        path = fetch.fetch(args.name, progress=lambda line: print(line, file=sys.stderr, flush=True))
        return OK, next(describe(e) for e in list_entries() if e.name == args.name), str(path)
    entries = [describe(e) for e in list_entries()]
    lines = [
        f"{e['name']:14} {e['family']:6} {e['parameters'] / 1e6:9.0f} M  {e['cached_path'] or e['source']}" for e in entries
    ]
    return OK, entries, "\n".join(lines)


def _generate(args: argparse.Namespace) -> Answer:
    try:
        text = sys.stdin.read() if args.prompt == "-" else args.prompt
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is no text in {error.encoding}: {error.reason}", "convert it to UTF-8") from error
    from pdlab import LLM, EngineConfig, SamplingParams
    from pdlab.hardware.probe import resolve_device

    resolve_device(args.device)  # says what is wrong with torch before anything imports it
    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        logprobs=args.logprobs,
    )
    with LLM(args.model, config=EngineConfig(device=args.device, dtype=args.dtype)) as llm:
        prompt = llm.chat_prompt([{"role": "user", "content": text}]) if args.chat else text
        if args.json:
            [out] = llm.generate([prompt], params)
            _ended_well(out.error)
            return OK, _output(out), None
        for event in llm.stream(prompt, params):
            print(event.text, end="", flush=True)
        print(flush=True)
        _ended_well(event.error)
    return OK, None, None


def _ended_well(error: str | None) -> None:
    """Raises what ended the request, if it was an error."""
    if error is not None:
        kind = MemoryError if "OutOfMemoryError" in error or "MemoryError" in error else StepFailed
        raise kind(error.removeprefix("StepFailed: "))


def _output(out: Any) -> dict[str, Any]:
    t = out.timing
    logprobs = None
    if out.logprobs:
        logprobs = [{"token_id": p.token_id, "logprob": p.logprob, "top": [list(pair) for pair in p.top]} for p in out.logprobs]
    return {
        "text": out.text,
        "token_ids": [int(i) for i in out.token_ids],
        "finish_reason": str(out.finish_reason),
        "prompt_tokens": len(out.prompt_token_ids),
        "timing": {n: getattr(t, n) for n in ("queue_s", "ttft_s", "prefill_s", "decode_s")} | {"itl_s": list(t.itl_s)},
        "logprobs": logprobs,
    }


def _bench(args: argparse.Namespace) -> Answer:
    from pdlab.bench import suites
    from pdlab.costs.tables import COLUMNS

    known = suites.names()
    if args.list or not args.names:
        doc = [{"name": n, "help": text} for n, text in known.items()]
        return OK, doc, "\n".join(f"{n:24} {text}" for n, text in known.items())
    if args.budget is not None and not 0 < args.budget < float("inf"):
        raise UsageError(f"--budget {args.budget:g} is no time to measure in", "use seconds, more than 0")
    if not 0 <= args.seed < 1 << 63:
        raise UsageError(f"--seed {args.seed} cannot be taken by every generator", "use a whole number, 0 or more, below 2^63")
    if args.out is not None:
        try:
            args.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--out {args.out} cannot be a folder: {error.strerror}", "use one that may be written") from error
    names = list(known) if args.names == ["all"] else args.names
    for name in names:
        suites.load(name)  # a typo stops everything before the first minute is spent
    results, rows, code = [], [], OK
    for name in names:
        print(f"{name}: {known[name]}", file=sys.stderr, flush=True)
        try:
            outcome, record = suites.run(
                name, device=args.device, profile=args.profile, record=args.record, out=args.out,
                budget_s=args.budget, seed=args.seed, only=args.only,
            )  # fmt: skip
        except Exception as error:
            if len(names) == 1:
                raise
            code = max(code, _code_of(error))
            results.append({"name": name, "status": "failed", "error": _error(error)})
            print(f"{name} failed: {error}", file=sys.stderr, flush=True)
            continue
        results.append({"status": "ok", **vars(outcome)})
        for r in (record, *record.beside):
            rows += [dict(zip(("device", *COLUMNS), (r.device, *row.cells()))) for row in r.rows]
    lines = [
        f"{r['name']}: {r['rows']} rows in {r['seconds']:.0f} s -> {', '.join(r['files'])}" for r in results if "rows" in r
    ]
    return code, {"suites": results, "rows": rows}, "\n".join(lines)


def _claims(args: argparse.Namespace) -> Answer:
    from pdlab import claims

    verdicts = claims.judge(args.device) if args.device else claims.judge()
    return OK, [v.to_dict() for v in verdicts], claims.render(verdicts)


def _compare(args: argparse.Namespace) -> Answer:
    from pdlab.bench import compare, records

    extra = records.target_root() if args.runs else None
    rows = compare.compare_rows(args.a, args.b, args.experiment, extra)
    return OK, rows, compare.render(rows, args.a, args.b, everything=args.all)


def _run(args: argparse.Namespace) -> Answer:
    if hasattr(args, "broken"):
        raise PdlabError(f"pdlab run is not available: {args.broken}", "pdlab doctor says what is missing")
    from pdlab.runner import cli as runner

    return runner.run(args), None, None


_COMMANDS = {
    "doctor": _doctor,
    "model": _model,
    "generate": _generate,
    "bench": _bench,
    "claims": _claims,
    "compare": _compare,
    "run": _run,
}


# --- running one ----------------------------------------------------------------------------------------------------------


def _is_out_of_memory(error: BaseException) -> bool:
    """MemoryError, or torch.OutOfMemoryError without importing torch; also as the cause of a PdlabError."""
    while error is not None:
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
            return True
        error = error.__cause__  # type: ignore[assignment]
    return False


def _code_of(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if _is_out_of_memory(error):
        return OUT_OF_MEMORY
    return USAGE if isinstance(error, PdlabError) or _missing_package(error) else FAILED


def _missing_package(error: BaseException) -> str:
    """The package of somebody else that an import did not find, or an empty string."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return "" if name == "pdlab" else name


def _error(error: BaseException) -> dict[str, str]:
    kind = "usage" if isinstance(error, UsageError) else type(error).__name__
    if isinstance(error, PdlabError):
        return {"type": kind, "message": error.message, "hint": error.hint}
    hint = "use a smaller model, batch or dtype" if _is_out_of_memory(error) else ""
    if package := _missing_package(error):
        hint = f"pdlab doctor says what {package} is for and how to get it"
    return {"type": kind, "message": str(error) or type(error).__name__, "hint": hint}


def main(argv: list[str] | None = None) -> int:
    """Runs one command line (default: the process's own) and returns its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    usable_streams()
    as_json = "--json" in argv
    try:
        args = _parser().parse_args(argv)
        as_json = getattr(args, "json", as_json)
        wanted = as_json and args.command != "run"  # the runner prints its own document
        with stdout_kept_clean(wanted):
            code, document, text = _COMMANDS[args.command](args)
        return finish(code, to_json(document) if wanted else text or "")
    except SystemExit as stop:  # --help and --version
        return finish(int(stop.code or 0), "")
    except BrokenPipeError:  # in the middle of a stream of text
        return finish(OK, "")
    except (Exception, KeyboardInterrupt) as error:
        return _fail(error, as_json)


def _fail(error: BaseException, as_json: bool) -> int:
    code, e = _code_of(error), _error(error)
    if isinstance(error, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    elif code == FAILED:
        traceback.print_exception(error)
    elif not as_json:
        print(f"pdlab: {e['type']}: {e['message']}" + (f"\n  {e['hint']}" if e["hint"] else ""), file=sys.stderr)
    return finish(code, to_json({"error": e}) if as_json else "")


if __name__ == "__main__":
    sys.exit(main())
