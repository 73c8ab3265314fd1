"""The rules of DESIGN for notebooks, each a function from a notebook to the list of what breaks it."""

from __future__ import annotations

import ast
import json
import re
import statistics
import tokenize
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

from pdlab.lab.place import SETUP_CELL, badge

MAX_LINES, MEDIAN_LINES, MAX_DEFS, MAX_BYTES = 40, 10, 2, 120_000
LINK = re.compile(r"\]\(([^)#\s]+\.ipynb)(?:#[^)]*)?\)")

Rule = Callable[[Path, Any], list[str]]
RULES: dict[str, Rule] = {}


def rule(function: Rule) -> Rule:
    RULES[function.__name__] = function
    return function


def code_cells(nb: Any) -> list[Any]:
    return [cell for cell in nb.cells if cell.cell_type == "code"]


def own_code(nb: Any) -> list[Any]:
    """Code cells apart from the set-up and the parameters, which are the same everywhere or hold no code."""
    return [cell for cell in code_cells(nb) if cell.source != SETUP_CELL and "parameters" not in tags(cell)]


def tags(cell: Any) -> list[str]:
    return list(cell.metadata.get("tags", []))


def prose(nb: Any) -> str:
    """Markdown without code blocks, link targets and markup."""
    text = "\n".join(cell.source for cell in nb.cells if cell.cell_type == "markdown")
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return re.sub(r"\]\([^)]*\)|[#*`|\[\]!]", "", text)


@rule
def opens_with_badge_title_goal_and_needs(path: Path, nb: Any) -> list[str]:
    first = nb.cells[0].source if nb.cells and nb.cells[0].cell_type == "markdown" else ""
    number = path.stem.split("_")[0]
    relative = path.relative_to(next(p for p in path.parents if p.name == "notebooks")).as_posix()
    wanted = {
        "the Colab badge of its own path": badge(relative) in first,
        f"a title '# {number} · …'": bool(re.search(rf"^# {number} · \S", first, re.MULTILINE)),
        "a line **Goal**: …": "**Goal**" in first,
        "the time it takes, with a unit": bool(re.search(r"\d+\s?(s|min)\b", first)),
        "the hardware it needs": bool(re.search(r"\b(CPU|GPU)\b", first)),
    }
    return [f"the first cell lacks {what}" for what, there in wanted.items() if not there]


@rule
def sets_up_once_like_all_others(path: Path, nb: Any) -> list[str]:
    cells = [i for i, cell in enumerate(nb.cells) if cell.cell_type == "code" and cell.source == SETUP_CELL]
    return [] if cells == [1] else [f"the set-up cell of pdlab.lab.place is at {cells or 'no place'}, not once and second"]


@rule
def declares_typed_commented_parameters(path: Path, nb: Any) -> list[str]:
    cells = [i for i, cell in enumerate(nb.cells) if "parameters" in tags(cell)]
    if cells != [2]:
        return [f"cells tagged `parameters` are at {cells}, not one and third"]
    source = nb.cells[2].source
    comments = {t.start[0] for t in tokenize.generate_tokens(StringIO(source).readline) if t.type == tokenize.COMMENT}
    problems = []
    for statement in ast.parse(source).body:
        name = ast.unparse(statement).split("=")[0].strip()
        try:
            if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
                raise ValueError
            ast.literal_eval(statement.value)
        except ValueError:
            problems.append(f"parameter {name!r} is not a literal")
        if not comments & set(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)):
            problems.append(f"parameter {name!r} has no comment")
    return problems


@rule
def keeps_code_cells_short(path: Path, nb: Any) -> list[str]:
    lines = [len(cell.source.splitlines()) for cell in own_code(nb)]
    problems = [f"a code cell of {n} lines, more than {MAX_LINES}" for n in lines if n > MAX_LINES]
    if lines and statistics.median(lines) > MEDIAN_LINES:
        problems.append(f"code cells of {statistics.median(lines):g} lines in the median, more than {MEDIAN_LINES}")
    return problems + ["an empty code cell" for cell in code_cells(nb) if not cell.source.strip()]


@rule
def is_plain_python_with_few_definitions(path: Path, nb: Any) -> list[str]:
    definitions, problems = 0, []
    for cell in code_cells(nb):
        try:
            tree = ast.parse(cell.source)
        except SyntaxError as error:
            problems.append(f"not plain Python (a magic, or an error): {error.text!r}")
            continue
        kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        definitions += sum(isinstance(node, kinds) for node in ast.walk(tree))
    if definitions > MAX_DEFS:
        problems.append(f"{definitions} definitions, more than {MAX_DEFS}: library code lives in pdlab/")
    return problems


@rule
def explains_at_least_as_much_as_it_computes(path: Path, nb: Any) -> list[str]:
    words, code = (len(re.sub(r"\s", "", text)) for text in (prose(nb), "".join(cell.source for cell in own_code(nb))))
    return [] if words >= code else [f"{words} characters of prose for {code} of code"]


@rule
def is_stored_without_outputs(path: Path, nb: Any) -> list[str]:
    problems = [f"code cell {i} has outputs" for i, cell in enumerate(code_cells(nb), 1) if cell.outputs]
    problems += [f"code cell {i} has an execution count" for i, cell in enumerate(code_cells(nb), 1) if cell.execution_count]
    problems += ["widget state is stored"] if "widgets" in nb.metadata else []
    return problems


@rule
def is_small_and_valid(path: Path, nb: Any) -> list[str]:
    import nbformat

    size = len(json.dumps(nb))
    problems = [f"{size:,} bytes, more than {MAX_BYTES:,}"] if size > MAX_BYTES else []
    try:
        nbformat.validate(nb)
    except nbformat.ValidationError as error:
        problems.append(f"not a valid notebook: {error.message}")
    return problems


@rule
def closes_with_lessons_exercises_and_ways_on(path: Path, nb: Any) -> list[str]:
    text = "\n".join(cell.source for cell in nb.cells[-4:] if cell.cell_type == "markdown")
    exercises = re.search(r"^#+ Exercises?\b.*?\n(.*)", text, re.DOTALL | re.MULTILINE | re.IGNORECASE)
    count = len(re.findall(r"^\d\. ", exercises[1], re.MULTILINE)) if exercises else 0
    problems = [] if re.search(r"^#+ What was learned", text, re.MULTILINE | re.IGNORECASE) else ["no 'What was learned'"]
    problems += [] if count == 3 else [f"{count} numbered exercises, not three"]
    series = sorted(p.name for p in path.parent.glob("[0-9][0-9]_*.ipynb"))
    at, last = series.index(path.name), nb.cells[-1].source
    wanted = {series[0], f"solutions/{path.name}", *series[max(at - 1, 0) : at + 2]} - {path.name}
    return problems + [f"no link to {name} at the end" for name in sorted(wanted) if name not in LINK.findall(text + last)]


@rule
def writes_formulas_as_text(path: Path, nb: Any) -> list[str]:
    """TeX needs a script from a network to be shown; reports are read without one."""
    text = re.sub(r"```.*?```|`[^`]*`", "", "\n".join(c.source for c in nb.cells if c.cell_type == "markdown"), flags=re.DOTALL)
    return [f"TeX: {found}" for found in re.findall(r"\$\$?[^$\n]+\$", text)]


@rule
def titles_figures_in_plain_text(path: Path, nb: Any) -> list[str]:
    """A figure draws its title as it is: Markdown's backticks and asterisks would be seen."""
    problems = []
    for cell in code_cells(nb):
        try:
            calls = [node for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.Call)]
        except SyntaxError:
            continue  # another rule says so
        for claim in (k.value for call in calls for k in call.keywords if k.arg == "claim"):
            texts = [n.value for n in ast.walk(claim) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
            problems += [f"markup in a figure's title: {text!r}" for text in texts if re.search(r"`|\*\*", text)]
    return problems


@rule
def links_lead_somewhere(path: Path, nb: Any) -> list[str]:
    text = "\n".join(cell.source for cell in nb.cells if cell.cell_type == "markdown")
    targets = {t for t in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text) if not re.match(r"[a-z]+:", t)}
    return [f"a link to {target}, which is not there" for target in sorted(targets) if not (path.parent / target).exists()]


def broken(path: Path, nb: Any, names: list[str] | None = None) -> dict[str, list[str]]:
    """The broken rules and what breaks them."""
    found = {name: RULES[name](path, nb) for name in (names or RULES)}
    return {name: problems for name, problems in found.items() if problems}
