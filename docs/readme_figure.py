"""Draws docs/readme-figure.png, the README's first figure: `python docs/readme_figure.py`.

The lines are predictions from the ceilings (measured ones where `pdlab bench ceilings` was recorded for the device, else
the data sheet's), the dots are recorded measurements of `prefill_vs_decode` where there are any. The numbers' fingerprint
is stored in the file; a test compares it with the data of the day, so that the figure cannot go stale unnoticed.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from pdlab.costs.formulas import decode_shape, itemsize_of, prefill_shape
from pdlab.costs.roofline import ceilings_for, step_time
from pdlab.costs.tables import newest, read
from pdlab.hardware.specs import spec
from pdlab.models.catalogue import config_of

TARGET = Path(__file__).with_name("readme-figure.png")
MODEL, CONTEXT, DTYPES = (
    "llama-3-8b",
    512,
    {"tesla-t4": "float16", "nvidia-a100-sxm4-40gb": "bfloat16", "nvidia-h200": "bfloat16"},
)
PROMPTS = [2**i for i in range(4, 14)]
BATCHES = [2**i for i in range(9)]


def numbers() -> dict[str, Any]:
    """For each device: its name, the source of its ceilings, and (tokens in the step, microseconds a token) lines and dots."""
    model, found = config_of(MODEL), {}
    for device, dtype in DTYPES.items():
        top, size = ceilings_for(device, dtype), itemsize_of(dtype)

        def cost(shape: Any, tokens: int, top: Any = top, size: int = size) -> float:
            return float(f"{1e6 * step_time(model, shape, top, size).seconds / tokens:.4g}")

        found[device] = {
            "name": spec(device).name,
            "source": top.source,
            "prefill": [(n, cost(prefill_shape(n), n)) for n in PROMPTS],
            "decode": [(b, cost(decode_shape(b, CONTEXT + 1), b)) for b in BATCHES],
            "measured": measured(device),
        }
    return found


def measured(device: str) -> list[tuple[str, int, float]]:
    """(phase, tokens in the step, microseconds a token) of the recorded steps of MODEL."""
    dots = []
    for row in newest(read(device, "prefill_vs_decode")):
        if row.metric == "latency" and row.kind == "measured" and row.params.get("model") == MODEL:
            phase, batch = row.params["phase"], row.params["batch"]
            tokens = batch * row.params["tokens"] if phase == "prefill" else batch
            dots.append((phase, tokens, float(f"{1e3 * row.median / tokens:.4g}")))
    return sorted(dots)


def fingerprint(found: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def draw(found: dict[str, Any]) -> Any:
    from pdlab.lab.style import canvas

    last = found[list(DTYPES)[-1]]
    gap = last["decode"][0][1] / min(cost for _, cost in last["prefill"])
    any_dots = any(device["measured"] for device in found.values())
    figure, axes = canvas(
        f"Same arithmetic, {gap:.0f} times the time: a token that Llama-3-8B writes alone, and one that it reads with others",
        "lines: predicted from "
        + ", ".join(f"{d['name']} ({d['source']})" for d in found.values())
        + ("; dots: recorded measurements (data/measurements)" if any_dots else "; nothing measured here yet")
        + f" · {', '.join(sorted(set(DTYPES.values())))} · decode with {CONTEXT} tokens of context a request",
        size=(9.4, 4.6),
    )
    ax = axes[0, 0]
    for colour, device in zip(("#8a6d3b", "#1f77b4", "#b3261e"), found.values(), strict=True):
        for phase, style in (("decode", "-"), ("prefill", "--")):
            x, y = zip(*device[phase], strict=True)
            ax.plot(x, y, style, color=colour, marker="", label=f"{device['name']}, {phase}")
            dots = [(tokens, cost) for name, tokens, cost in device["measured"] if name == phase]
            if dots:
                filled = "full" if phase == "decode" else "none"
                ax.plot(
                    *zip(*dots, strict=True), "o", color=colour, fillstyle=filled, label=f"{device['name']}, {phase} measured"
                )
    ax.set(xscale="log", yscale="log", xlabel="tokens that go through the model together", ylabel="microseconds a token")
    ax.set_xticks([1, 4, 16, 64, 256, 1024, 4096], ["1", "4", "16", "64", "256", "1024", "4096"])
    ax.legend(ncols=1, fontsize=8, loc="upper right")
    return figure


def main() -> None:
    found = numbers()
    draw(found).savefig(TARGET, dpi=130, metadata={"Software": "", "Description": fingerprint(found)})
    print(f"wrote {TARGET}")


if __name__ == "__main__":
    main()
