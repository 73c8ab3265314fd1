"""Draws docs/readme-figure.png, the README's first figure: `python docs/readme_figure.py`.

Solid lines are recorded steps of `prefill_vs_decode` (data/measurements), dashed ones the floor that counted FLOPs and bytes
and the device's own measured ceilings set. The title's numbers are taken from the records. The numbers' fingerprint is
stored in the file; a test compares it with the data of the day, so that the figure cannot go stale unnoticed.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from pdlab.costs.formulas import decode_shape, itemsize_of, prefill_shape
from pdlab.costs.roofline import ceilings_for, step_time
from pdlab.costs.tables import Row, newest, read
from pdlab.hardware.specs import spec
from pdlab.models.catalogue import config_of

TARGET = Path(__file__).with_name("readme-figure.png")
DEVICE, DTYPE, MODEL = "nvidia-h200", "bfloat16", "llama-3-8b"
PHASES = {"decode": "writing: a decode step, one token each", "prefill": "reading: the prefill of one prompt"}


def numbers() -> dict[str, Any]:
    """The device, the source of its ceilings, the day, the context of the decode steps, and for each phase (tokens in the step,
    ms measured, ms at the floor).

    All of one run, the newest that holds a token written alone and prompts read: engines of different days do not mix. Of its
    contexts the one with the most batches, of those the shortest.
    """
    runs: dict[str, dict[str, list[Row]]] = {}
    for row in newest(read(DEVICE, "prefill_vs_decode")):
        p = row.params
        if row.metric == "latency" and row.kind == "measured" and p["model"] == MODEL and p["dtype"] == DTYPE:
            runs.setdefault(row.run_id, {phase: [] for phase in PHASES})[p["phase"]].append(row)
    whole = [run for run in runs.values() if run["prefill"] and any(r.params["batch"] == 1 for r in run["decode"])]
    run = max(whole, key=lambda run: max(r.time_utc for r in run["decode"]))
    contexts = [r.params["tokens"] for r in run["decode"]]
    context = min({r.params["tokens"] for r in run["decode"] if r.params["batch"] == 1}, key=lambda n: (-contexts.count(n), n))
    writing = [
        (r.params["batch"], decode_shape(r.params["batch"], context + 1), r)
        for r in run["decode"]
        if r.params["tokens"] == context
    ]
    reading = [(r.params["tokens"], prefill_shape(r.params["tokens"]), r) for r in run["prefill"] if r.params["batch"] == 1]
    top, day = ceilings_for(DEVICE, DTYPE), max(r.time_utc for r in run["decode"])[:10]
    found = {"name": spec(DEVICE).name, "source": top.source, "day": day, "context": context}
    for phase, steps in (("decode", writing), ("prefill", reading)):
        floors = (1e3 * step_time(config_of(MODEL), shape, top, itemsize_of(DTYPE)).seconds for _, shape, _ in steps)
        found[phase] = sorted(
            (n, float(f"{r.median:.4g}"), float(f"{ms:.4g}")) for (n, _, r), ms in zip(steps, floors, strict=True)
        )
    return found


def fingerprint(found: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def draw(found: dict[str, Any]) -> Any:
    from pdlab.lab.figures import plain_ticks, short
    from pdlab.lab.style import BLUE, FAINT, RUST, canvas

    tokens, alone, _ = found["decode"][0]
    assert tokens == 1, "the claim is about a token written alone"
    most, long, _ = found["prefill"][-1]
    figure, axes = canvas(
        f"{MODEL} on an {found['name'].removeprefix('NVIDIA ')} needs {alone:.3g} ms to write one token, and "
        f"{1e3 * long / most:.3g} µs for each of {most:,} that it reads: {alone * most / long:,.0f} times less",
        f"{found['name']} · {DTYPE} · recorded {found['day']} (data/measurements) · random weights · decode over "
        f"{found['context']} cached tokens a request · floor: counted FLOPs and bytes over {found['source']} ceilings",
        size=(8.6, 4.6),
    )
    ax = axes[0, 0]
    for (phase, words), colour, marker in zip(PHASES.items(), (RUST, BLUE), "os", strict=True):
        x, ms, floor = zip(*found[phase], strict=True)
        style: dict[str, Any] = {"color": colour, "markersize": 6}
        ax.plot(x, [1e3 * t / n for t, n in zip(ms, x, strict=True)], "-", marker=marker, label=f"{words}, measured", **style)
        ax.plot(x, [1e3 * t / n for t, n in zip(floor, x, strict=True)], "--", marker="", linewidth=1.5, color=colour)
    ax.plot([], [], "--", color=FAINT, marker="", linewidth=1.5, label="the same at the roofline (predicted)")
    ax.set(xscale="log", yscale="log", xlabel="tokens that go through the model together", ylabel="microseconds a token")
    plain_ticks(ax.xaxis, [4.0**k for k in range(7)])
    ax.yaxis.set_major_formatter(short)
    ax.legend(loc="upper right")
    return figure


def main() -> None:
    found = numbers()
    draw(found).savefig(TARGET, dpi=150, metadata={"Software": "", "Description": fingerprint(found)})
    print(f"wrote {TARGET}")


if __name__ == "__main__":
    main()
