"""The process that runs one notebook: `python -m pdlab.runner.worker SPEC.json`.

One process a notebook, because papermill's `cwd` is the process's own. It judges by what the kernel's cells left behind,
not by papermill's metadata, which calls a cell completed when its kernel died under it, and forgives `SystemExit`. The
verdict goes to a file beside the specification; a death of this process leaves none, which is a verdict too.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from pdlab.runner.notebook import DISK_FULL, import_nbformat, tags

nbformat = import_nbformat()
from papermill.clientwrap import PapermillNotebookClient  # noqa: E402
from papermill.engines import NBClientEngine, papermill_engines  # noqa: E402
from papermill.execute import execute_notebook, remove_error_markers  # noqa: E402

NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Stopped(BaseException):
    """SIGTERM: the batch gave up on this notebook. Unwinding saves what the cells printed and ends the kernel."""


class Client(PapermillNotebookClient):
    """Says which process the kernel is, and how far it got."""

    progress: Path
    manager: Any = None
    kernel_exit: int | None = None

    def papermill_execute_cells(self) -> None:
        code_cells = [index for index, cell in enumerate(self.nb.cells) if cell.cell_type == "code"]
        start_cell = self.nb_man.cell_start

        def tell(cell: Any, index: int | None = None, **kwargs: Any) -> None:
            done = sum(1 for i in code_cells if index is not None and i < index)
            _write_json(self.progress, {"kernel_pid": self._process().pid, "done": done, "of": len(code_cells)})
            start_cell(cell, index, **kwargs)

        self.nb_man.cell_start = tell
        try:
            super().papermill_execute_cells()
        except RuntimeError:  # nbclient's DeadKernelError
            Client.kernel_exit = self._process().poll()
            raise

    def _process(self) -> Any:
        return self.km.provisioner.process


class Engine(NBClientEngine):
    @classmethod
    def execute_managed_notebook(cls, nb_man: Any, kernel_name: str, **kwargs: Any) -> None:
        Client.manager = nb_man
        names = ("log_output", "stdout_file", "stderr_file", "input_path", "execution_timeout")
        options = {key: value for key, value in kwargs.items() if key not in names}
        options["startup_timeout"] = options.pop("start_timeout", 60)
        Client(nb_man, kernel_name=kernel_name, **options).execute()


def main(spec_path: str) -> int:
    spec = json.loads(Path(spec_path).read_text(encoding="utf-8"))
    folder = Path(spec_path).parent
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the batch, which then ends this process in its own way
    threading.Thread(target=_die_with_parent, args=(os.getppid(),), daemon=True).start()
    Client.progress = folder / "progress.json"
    try:
        verdict = _run(spec, folder)
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        verdict = {"status": "failed", "error": f"disk full: {error}"}
    try:
        _write_json(folder / "verdict.json", verdict)
    except OSError:
        return DISK_FULL
    return 0


def _run(spec: dict[str, Any], folder: Path) -> dict[str, Any]:
    from nbclient.exceptions import DeadKernelError
    from papermill.exceptions import PapermillExecutionError

    papermill_engines.register("pdlab", Engine)
    try:
        execute_notebook(
            _escape(spec["notebook"]),
            _escape(spec["output"]),
            parameters=spec["params"],
            engine_name="pdlab",
            kernel_name=_kernel_name(spec, folder),
            language="python",
            progress_bar=False,
            autosave_cell_every=10,
            cwd=str(Path(spec["notebook"]).parent),
        )
    except DeadKernelError:
        code = Client.kernel_exit
        how = f"killed by signal {-code}" if code is not None and code < 0 else f"it ended with code {code}"
        hint = "; often the system ran out of memory" if code == -signal.SIGKILL else ""
        return {"status": "died", "error": f"the kernel died in {_last_cell()}: {how}{hint}"}
    except PapermillExecutionError:
        pass  # judged below: papermill also raises for cells that were allowed to
    except Stopped:
        return {"status": "stopped", "error": f"stopped in {_last_cell()}"}
    nb = Client.manager.nb
    verdict = judge(nb)
    if verdict["status"] == "ok":
        # papermill marks cells that were allowed to raise as errors too
        nbformat.write(remove_error_markers(nb), spec["output"])
    return verdict


def judge(nb: Any) -> dict[str, Any]:
    """The status that the outputs of an executed notebook amount to."""
    for number, cell in enumerate((c for c in nb.cells if c.cell_type == "code"), start=1):
        errors = [output for output in cell.get("outputs", []) if output.output_type == "error"]
        failed = bool(cell.metadata.get("papermill", {}).get("exception"))
        exits = any(error.ename == "SystemExit" for error in errors)
        if not exits and ("raises-exception" in tags(cell) or not (errors or failed)):
            continue
        name, value = (errors[0].ename, errors[0].evalue) if errors else ("CellExecutionError", "the cell left no traceback")
        return {"status": "oom" if _is_oom(name, value) else "failed", "error": f"cell {number}: {name}: {value}".rstrip(": ")}
    return {"status": "ok", "error": None}


def _is_oom(name: str, value: str) -> bool:
    """MemoryError, numpy's _ArrayMemoryError, torch.OutOfMemoryError, and what torch's CPU allocator raises."""
    return name.endswith(("MemoryError", "OutOfMemoryError")) or (name == "RuntimeError" and "can't allocate memory" in value)


def _kernel_name(spec: dict[str, Any], folder: Path) -> str:
    """A kernel of this very interpreter, whatever a `python3` kernel of the user's own points to.

    The notebook's own kernel is used only where its language is another one.
    """
    nb = json.loads(Path(spec["notebook"]).read_text(encoding="utf-8"))
    own = nb.get("metadata", {}).get("kernelspec", {})
    if own.get("language", "python") != "python":
        return str(own["name"])
    kernel = folder / "kernels" / "pdlab-batch"
    kernel.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "--IPKernelApp.log_level=ERROR", "-f", "{connection_file}"]
    _write_json(kernel / "kernel.json", {"argv": command, "display_name": "Python 3", "language": "python"})
    os.environ["JUPYTER_PATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("JUPYTER_PATH")]))
    return kernel.name


def _escape(path: str) -> str:
    """papermill formats paths with the parameters; braces in a folder's name are not placeholders."""
    return path.replace("{", "{{").replace("}", "}}")


def _last_cell() -> str:
    if Client.manager is None:
        return "no cell yet"
    code = [cell for cell in Client.manager.nb.cells if cell.cell_type == "code"]
    started = [n for n, cell in enumerate(code, start=1) if cell.metadata.get("papermill", {}).get("start_time")]
    return f"cell {started[-1]}" if started else "no cell yet"


def _write_json(path: Path, value: Any) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value), encoding="utf-8")
    part.replace(path)


def _stop(signum: int, frame: Any) -> None:
    raise Stopped


def _die_with_parent(parent: int) -> None:
    """A batch that was killed outright leaves nobody to watch this notebook; then it ends, and its kernel with it."""
    while os.getppid() == parent:
        time.sleep(0.5)
    import psutil

    for process in [*psutil.Process().children(recursive=True), psutil.Process()]:
        process.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
