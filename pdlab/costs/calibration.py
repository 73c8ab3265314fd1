"""What a step costs on a device that is not here: from what was recorded there, else from its data sheet.

In this order: an estimator that learned on that device and was saved (`estimators/<device>/<model>-<dtype>.json`, the
user's own before the shipped one); the recorded `prefill_vs_decode` rows of this model and dtype; the roofline of the data
sheet, slowed by the shares of the ceilings that kernels commonly reach. The last is marked "predicted", the others "recorded".
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdlab.core.errors import MeasurementError
from pdlab.core.paths import data_dir, find_data, home_dir
from pdlab.core.plan import PlanShape
from pdlab.costs import formulas, roofline, tables
from pdlab.costs.host_times import HostTimes
from pdlab.costs.learned import LearnedEstimator
from pdlab.models.config import ModelConfig

# shares of the data sheet's ceilings and seconds a layer that a tuned engine reaches on recent GPUs, where nothing was recorded
MATMUL_SHARE = 0.70
ATTENTION_SHARE = 0.55
BANDWIDTH_SHARE = 0.85
LAYER_SECONDS = 8e-6
HOST_SECONDS = 3e-4
_LEAST_ROWS = 4  # recorded steps of each phase that make a calibration


@dataclass(frozen=True)
class CostModel:
    """`step_seconds(shape)` on the device, the engine's own work for a step, and where both come from."""

    step_seconds: Callable[[PlanShape], float]
    host: HostTimes
    source: str  # recorded | predicted
    detail: str


def estimator_file(device: str, model: str, dtype: str) -> str:
    """Path, relative to the data folder or to home_dir(), of the estimator saved for a device."""
    return f"estimators/{tables.check_name(device, 'device')}/{tables.check_name(model, 'model')}-{dtype}.json"


def save_for_device(
    estimator: LearnedEstimator,
    device: str,
    dtype: str,
    root: Path | None = None,
    provenance: dict[str, Any] | None = None,
) -> Path:
    """Saves under home_dir() (or `root`), where `cost_model` and a later engine on this device find it. `provenance`: the
    machine and the commit that its steps came from."""
    path = (root or home_dir()) / estimator_file(device, estimator.model.name.removeprefix("random:"), dtype)
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {"provenance": provenance or {}, **estimator.state()}
    written = path.with_suffix(f".{os.getpid()}")  # another process may be reading
    written.write_text(json.dumps(state, sort_keys=True, separators=(",", ":")) + "\n", encoding="utf-8")
    written.replace(path)
    return path


def recall(estimator: LearnedEstimator, device: str, dtype: str) -> bool:
    """Lets an engine's estimator go on from what was saved for this device: the user's own, or where that cannot be used the
    shipped one. What is damaged, or has other features, is named in a warning; steps that were launched in another way
    (`padded`) are another matter. False, and nothing changed, where nothing can be used."""
    name = estimator_file(device, estimator.model.name.removeprefix("random:"), dtype)
    for path in (home_dir() / name, data_dir() / name):
        if not path.exists():
            continue
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
            if bool(state.get("padded", False)) is estimator.padded:
                estimator.restore(state)
                return True
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            warnings.warn(
                f"the estimator does not begin with {path}: it cannot be used ({error})", RuntimeWarning, stacklevel=2
            )
    return False


def data_sheet_cost(model: ModelConfig, device: str, dtype: str) -> Callable[[PlanShape], float]:
    """Sum over operations of the slower of compute and bandwidth at the shares above, and a constant a layer.

    FLOPs and bytes of every operation are linear in the step's rows T, its attention pairs P, its sampling rows S and the
    cached tokens C it reads, so the counted formulas are asked once and each step costs a few products.
    """
    c, size = roofline.sheet_ceilings(device, dtype), formulas.itemsize_of(dtype)
    zero, launches = PlanShape(), LAYER_SECONDS * model.num_layers
    one = {
        "1": PlanShape(pad_tokens=1),
        "T": PlanShape(pad_tokens=2),
        "P": PlanShape(decode_kv_tokens=1),
        "S": PlanShape(pad_tokens=1, sampled=1),
        "SS": PlanShape(pad_tokens=1, sampled=2),
    }
    f = {k: formulas.step_flops(model, s).as_dict() for k, s in one.items()}
    b = {k: formulas.step_bytes(model, s, size).as_dict() for k, s in one.items()}
    none = formulas.step_bytes(model, zero, size).as_dict()
    terms = []  # an operation: seconds of compute a T, P, S; seconds of bandwidth a step, a T, C, S
    for op in formulas.OPERATIONS:
        rate = (ATTENTION_SHARE if op == "attention" else MATMUL_SHARE) * c.matmul_flops_per_s
        speed = BANDWIDTH_SHARE * c.read_bytes_per_s
        row, start = b["T"][op] - b["1"][op], 2 * b["1"][op] - b["T"][op]
        sample = b["SS"][op] - b["S"][op]
        first_sample = b["S"][op] - b["1"][op] - sample  # the output projection's weights are read if any row samples
        compute = (f["1"][op] / rate, f["P"][op] / rate, (f["S"][op] - f["1"][op]) / rate)
        terms.append(
            (*compute, start / speed, row / speed, (b["P"][op] - none[op]) / speed, sample / speed, first_sample / speed)
        )

    def seconds(shape: PlanShape) -> float:
        chunks = context = pairs = 0
        for n, cached in shape.prefill:
            chunks += n
            context += n + cached
            pairs += n * cached + n * (n + 1) // 2
        t, s, kv = chunks + shape.decode_count + shape.pad_tokens, shape.sampled, shape.decode_kv_tokens
        any_sample = 1 if s else 0
        total = launches
        for ft, fp, fs, b0, bt, bc, bs, bs0 in terms:
            compute = ft * t + fp * (pairs + kv) + fs * s
            moved = b0 + bt * t + bc * (context + kv) + bs * s + bs0 * any_sample
            total += compute if compute > moved else moved
        return total if t else 0.0

    return seconds


def _from_rows(model: ModelConfig, device: str, dtype: str) -> LearnedEstimator | None:
    rows = tables.newest(tables.read(device, "prefill_vs_decode"))
    name = model.name.removeprefix("random:")
    steps = {"prefill": [], "decode": []}  # type: dict[str, list[tuple[PlanShape, float]]]
    for r in rows:
        p = r.params
        if r.variant != "ours" or r.metric != "latency" or p.get("model") != name or p.get("dtype") != dtype:
            continue
        batch, tokens = int(p["batch"]), int(p["tokens"])
        make = formulas.prefill_shape if p.get("phase") == "prefill" else formulas.decode_shape
        shape = make(tokens, batch) if make is formulas.prefill_shape else make(batch, tokens)
        steps[str(p.get("phase"))].append((shape, r.median / 1e3))
    if min(len(s) for s in steps.values()) < _LEAST_ROWS:
        return None
    learned = LearnedEstimator(model, roofline.ceilings_for(device, dtype), formulas.itemsize_of(dtype))
    several = 3 * (steps["prefill"] + steps["decode"])  # few rows: a few passes stand for more of the same
    for shape, seconds in several:
        learned.learn(shape, seconds)
    learned.refit(several)  # all at once: recordings of several days differ, and whichever came last would count most
    return learned


def cost_model(model: ModelConfig, device: str, dtype: str = "bfloat16") -> CostModel:
    """The best that is known of `model` on `device`; DeviceUnavailable where there is not even a data sheet."""
    name = model.name.removeprefix("random:")
    path = find_data(estimator_file(device, name, dtype))
    if path is not None:
        learned = LearnedEstimator(model, roofline.ceilings_for(device, dtype), formulas.itemsize_of(dtype))
        learned.load(path)
        if not learned.seen:
            raise MeasurementError(f"{path} holds an estimator that has seen no step", "delete it, or record it again")
        return CostModel(learned.device_seconds, learned.host, "recorded", f"{learned.seen} steps, {path.name}")
    fitted = _from_rows(model, device, dtype)
    if fitted is not None:
        return CostModel(
            fitted.lasting_seconds, HostTimes(HOST_SECONDS), "recorded", f"{fitted.seen // 3} rows of prefill_vs_decode"
        )
    return CostModel(
        data_sheet_cost(model, device, dtype), HostTimes(HOST_SECONDS), "predicted", "data sheet and common shares of it"
    )
