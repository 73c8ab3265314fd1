"""What is here, what is missing, and what would mend it. Works where torch is missing or broken: it imports nothing that
must work, and reports whatever raises."""

from __future__ import annotations

import platform
import sys
from importlib import metadata
from typing import Any

from pdlab import __version__
from pdlab.hardware.probe import import_torch, probe, triton_dot_allowed

# distribution -> (what it is for, how to get it); the first group is needed, the second opens further doors
_NEEDED = {
    "torch": "runs the models; nothing can be generated or measured without it",
    "triton": "the lab's own kernels (Linux); without it attention is PyTorch's",
    "numpy": "plans and schedules",
    "pandas": "tables: serve() results, measurements as DataFrames",
    "matplotlib": "the figures of the notebooks",
    "seaborn": "the figures of the notebooks",
    "safetensors": "loading Hugging Face weights",
    "tokenizers": "loading Hugging Face tokenizers",
    "gguf": "loading GGUF weights, so the default model",
    "jinja2": "chat templates",
    "pyyaml": "parameters of notebooks on the command line",
    "psutil": "how much memory a CPU has for models, and how much a notebook took",
}
_EXTRAS = {
    "jupyterlab": ("lab", "make lab: the notebooks in a browser"),
    "papermill": ("lab", "pdlab run: notebooks in batches"),
    "nbconvert": ("lab", "HTML copies of executed notebooks"),
    "ipywidgets": ("lab", "the explorers in the notebooks (each has a static twin)"),
    "ray": ("batch", "pdlab run --ray: batches over a cluster"),
    "huggingface_hub": ("hub", "models by their hub id"),
    "flash-attn": ("flash", "FlashAttention 2 as a rival and a backend"),
}
_ALSO = ("transformers", "pynvml", "nvidia-ml-py", "pytest")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _backends(torch_problem: str | None) -> dict[str, dict[str, Any]]:
    """Attention backends as kernels.dispatch reports them; without torch there are none."""
    from pdlab.kernels import dispatch

    found = dispatch.backends() if torch_problem is None else dict.fromkeys(dispatch.BACKENDS, (False, torch_problem))
    return {name: {"available": ok, "reason": why} for name, (ok, why) in found.items()}


def report() -> dict[str, Any]:
    """The document of `pdlab doctor --json`: a dict of JSON values; never raises."""
    torch, problem = import_torch()
    machine = probe()
    packages: dict[str, str | None] = {"pdlab": __version__}
    packages |= {name: _version(name) for name in (*_NEEDED, *_EXTRAS, *_ALSO)}
    if torch is not None:
        packages["torch"] = str(torch.__version__)
    missing: list[dict[str, str]] = []
    if torch is None:
        why = problem or "torch cannot be imported"
        if "broken" not in why:
            packages["torch"] = None
        again = "--force-reinstall " if "broken" in why else ""
        missing.append({"name": "torch", "why": f"{why}; {_NEEDED['torch']}", "fix": f"pip install {again}'torch>=2.11'"})
    for name, why in _NEEDED.items():
        if name != "torch" and packages[name] is None and (name != "triton" or sys.platform == "linux"):
            missing.append({"name": name, "why": why, "fix": f"pip install {name}"})
    for name, (extra, why) in _EXTRAS.items():
        if packages[name] is None:
            missing.append({"name": name, "why": f"optional: {why}", "fix": f"pip install 'pdlab[{extra}]'"})
    device = None
    if machine.is_gpu:
        device = {
            "name": machine.name,
            "capability": f"{machine.capability[0]}.{machine.capability[1]}" if machine.capability else None,
            "memory_bytes": machine.memory_bytes,
            "dtype": machine.dtype,
        }
        if not triton_dot_allowed(machine.capability):
            note = "below 8.0 Triton's dot kernels have no tensor cores: attention is SDPA or plain, products are torch's"
            missing.append({"name": "tensor-core Triton kernels", "why": note, "fix": "a GPU of capability 8.0 or more"})
    elif machine.problem and torch is not None:
        fix = "without a GPU everything runs in the smoke profile; with one, check nvidia-smi and the CUDA build of torch"
        missing.append({"name": "GPU", "why": f"optional: {machine.problem}", "fix": fix})
    return {
        "schema": 1,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "device": device,
        "profile": machine.profile,
        "backends": _backends(problem),
        "missing": missing,
    }


def render(doc: dict[str, Any]) -> str:
    """The same for people."""
    lines = [f"python {doc['python']} on {doc['platform']}"]
    if doc["device"]:
        d = doc["device"]
        lines.append(
            f"device {d['name']}, capability {d['capability']}, {d['memory_bytes'] / 2**30:.0f} GiB, dtype {d['dtype']}"
        )
    else:
        lines.append("device none but the CPU, dtype float32")
    lines.append(f"profile {doc['profile']}")
    lines.append("packages " + ", ".join(f"{n} {v}" for n, v in doc["packages"].items() if v))
    for name, backend in doc["backends"].items():
        lines.append(f"attention {name}: {'yes' if backend['available'] else 'no'} ({backend['reason']})")
    lines += [f"missing {m['name']}: {m['why']}\n    -> {m['fix']}" for m in doc["missing"]]
    return "\n".join(lines)
