"""A notebook as the batch sees it: its declared parameters, and a fingerprint of everything that decides its results."""

from __future__ import annotations

import ast
import hashlib
import json
import platform
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from pdlab.core.errors import NotebookError

VERSIONS_THAT_MATTER = ("torch", "triton", "numpy", "pandas", "transformers", "papermill", "ipykernel")
VALUES = "application/vnd.pdlab.values+json"  # a notebook displays a mapping of this type to put values into the table
DISK_FULL = 74  # the worker's exit code for when even its verdict could not be written
NOT_LITERAL = object()  # a default that is computed: its type is unknown, so any value is accepted


def import_nbformat() -> Any:
    """nbformat, without the two seconds that jsonschema's check of international addresses compiles a grammar for."""
    if "nbformat" not in sys.modules and "jsonschema" not in sys.modules:
        sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]  # jsonschema then leaves that check out
        try:
            import jsonschema  # noqa: F401
        finally:
            del sys.modules["rfc3987_syntax"]
    import nbformat

    return nbformat


def read(path: Path) -> Any:
    """The notebook of this file as an nbformat node of version 4."""
    nbformat = import_nbformat()
    if not path.is_file():
        raise NotebookError(f"there is no notebook {str(path)!r}", "give a path, or a name or number of the series, as in 01")
    try:
        return nbformat.read(path, as_version=4)
    except Exception as error:  # nbformat raises its own, json's and validation errors alike
        raise NotebookError(f"{str(path)!r} is not a notebook: {error}", "give a Jupyter notebook of format 4") from None


def tags(cell: Any) -> list[str]:
    return list(cell.metadata.get("tags", []))


def declared(nb: Any) -> dict[str, Any]:
    """Name and default of each assignment in the cell tagged `parameters`, in order."""
    found: dict[str, Any] = {}
    for cell in nb.cells:
        if cell.cell_type != "code" or "parameters" not in tags(cell):
            continue
        try:
            statements = ast.parse(cell.source).body
        except SyntaxError as error:
            raise NotebookError(f"the parameters cell cannot be read: {error}", "use plain `name = literal` lines") from None
        for statement in statements:
            targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
            value = getattr(statement, "value", None)
            for target in targets:
                if isinstance(target, ast.Name) and value is not None:
                    found[target.id] = _literal(value)
    return found


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return NOT_LITERAL


def fits(value: Any, default: Any) -> bool:
    """Whether `value` has the type that the default declares; an int may stand for a float, nothing for a bool."""
    if default is None or default is NOT_LITERAL:
        return True
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    if isinstance(default, float):
        return isinstance(value, int | float)
    if isinstance(default, list | tuple):
        kinds = {type(item) for item in default}
        return isinstance(value, list | tuple) and (len(kinds) != 1 or all(fits(item, default[0]) for item in value))
    return isinstance(value, type(default))


def check_parameters(name: str, defaults: dict[str, Any], given: dict[str, Any]) -> None:
    """Raises NotebookError for a parameter that the notebook does not declare, or a value of another type."""
    for key, value in given.items():
        if key not in defaults:
            known = ", ".join(defaults) or "none"
            raise NotebookError(f"{name} has no parameter {key!r} (given {value!r})", f"it declares: {known}")
        if not fits(value, defaults[key]):
            want, got = _type_name(defaults[key]), _type_name(value)
            hint = f"its default is {defaults[key]!r}"
            raise NotebookError(f"{name}: parameter {key!r} is a {want}, and {value!r} is a {got}", hint)


def _type_name(value: Any) -> str:
    if isinstance(value, list | tuple) and len({type(item) for item in value}) == 1:
        return f"list of {type(value[0]).__name__}"
    return type(value).__name__


def fingerprint(nb: Any, stem: str, params: dict[str, Any], profile: str, device: str) -> str:
    """Same key, same results (as far as a program can tell): notebook, package, parameters, profile, device, versions."""
    cells = [[cell.cell_type, cell.source, tags(cell)] for cell in nb.cells]
    facts = [stem, cells, package_hash(), params, profile, device, versions()]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=repr).encode()).hexdigest()


@cache
def package_hash() -> str:
    """Of every source file of pdlab, so that an edit to the library makes a batch run again."""
    root = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


@cache
def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in VERSIONS_THAT_MATTER:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
