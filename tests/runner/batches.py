"""Small notebooks, and batches of them run through the command line."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import pytest

from pdlab.runner import cli

MACHINE = {"name": "a test's CPU", "slug": "cpu-test", "device": "cpu", "profile": "smoke", "memory_bytes": 2**30}


def write_notebook(path: Path, *cells: str, parameters: str = "", tags: dict[int, list[str]] | None = None) -> Path:
    """A notebook of these code cells, after a parameters cell if one is given; `tags` by number of the cell."""
    v4 = nbformat.v4
    nodes = [v4.new_markdown_cell(f"# {path.stem}")]
    if parameters:
        nodes.append(v4.new_code_cell(parameters, metadata={"tags": ["parameters"]}))
    nodes += [v4.new_code_cell(source, metadata={"tags": (tags or {}).get(i, [])}) for i, source in enumerate(cells)]
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(v4.new_notebook(cells=nodes), path)
    return path


@dataclass
class Ran:
    code: int
    out: Path
    rows: list[dict[str, Any]]

    def row(self, stem: str) -> dict[str, Any]:
        (row,) = [row for row in self.rows if Path(row["notebook"]).stem == stem]
        return row

    def printed(self, stem: str) -> str:
        nb = nbformat.read(self.out / self.row(stem)["output"], as_version=4)
        outputs = [o for cell in nb.cells if cell.cell_type == "code" for o in cell.outputs]
        return "".join(o.text for o in outputs if o.output_type == "stream")


def run_cli(*arguments: str | Path) -> Ran:
    """`pdlab run` in this process, without asking torch what the machine is."""
    parser = argparse.ArgumentParser()
    cli.add_parser(parser.add_subparsers())
    args = parser.parse_args(["run", *map(str, arguments)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "describe_machine", lambda profile, gpu: dict(MACHINE))
        code = cli.run(args)
    results = args.out / "results.json"
    return Ran(code, args.out, json.loads(results.read_text()) if results.is_file() else [])
