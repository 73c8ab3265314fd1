"""What the notebook about attention computes live: cases as the benchmark measures them, errors, predictions, and source.

Its figures are in lab.attention_figures, what it makes of tables in lab.attention_tables.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    import torch

    from pdlab.bench.records import Recorder
    from pdlab.costs.roofline import Ceilings
    from pdlab.costs.tables import Row
    from pdlab.lab.session import Lab


def excerpt(function: Any, first: str, last: str = "") -> Any:
    """Markdown: the lines of a function's source from the one that begins with `first` to the one that begins with `last`.

    Of a kernel that is the function under its decorator. Raises ValueError where a line is not there (any more).
    """
    from IPython.display import Markdown

    lines = inspect.getsource(getattr(function, "fn", function)).splitlines()

    def find(text: str, after: int = 0) -> int:
        for i, line in enumerate(lines[after:], after):
            if line.strip().startswith(text):
                return i
        raise ValueError(f"{getattr(function, '__name__', function)} has no line that begins with {text!r}")

    a = find(first)
    b = find(last, a) if last else a
    kept = lines[a : b + 1]
    indent = min(len(line) - len(line.lstrip()) for line in kept if line.strip())
    return Markdown("```python\n" + "\n".join(line[indent:] for line in kept) + "\n```")


def interpreted(lab: Lab) -> str:
    """Makes Triton kernels that are imported from now on run in Triton's interpreter, on a CPU. "" or why they cannot run."""
    from pdlab.kernels.dispatch import why_not

    if not lab.machine.is_gpu:
        os.environ["TRITON_INTERPRET"] = "1"
    return why_not("triton", lab.machine.capability) or ""


def kernel_errors(lab: Lab, lengths: Iterable[int], *, heads: int = 4, kv_heads: int = 2, head_dim: int = 64) -> pd.DataFrame:
    """The kernels against float64: prompts of these lengths, and one more token after each, over scattered pages of 16."""
    import pandas as pd
    import torch

    from pdlab.bench import _attention as common
    from pdlab.bench.attention_tiles import call_of
    from pdlab.kernels.flash_prefill import flash_prefill
    from pdlab.kernels.tuning import Tuning, decode_rule, prefill_rule

    gpu = lab.machine.is_gpu
    tuning = Tuning.of_device() if gpu else Tuning("interpreter", (8, 0), 4, 32 << 20)
    rows = []
    for dtype in ("float16", "bfloat16") if gpu else ("float16", "float32"):
        for n in lengths:
            row: dict[str, Any] = {"dtype": dtype, "tokens": n}
            for phase, new in (("prefill", n), ("decode", 1)):
                shape: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "page": 16}
                q, view = common.make_view([n], [new], **shape, dtype=dtype, device=lab.device, seed=lab.seed)
                if phase == "prefill":
                    out = flash_prefill(q, view, prefill_rule(tuning.capability, head_dim, n))
                else:
                    out = call_of(decode_rule(tuning.shared_bytes, head_dim, heads // kv_heads), tuning, lab.device)(q, view)
                truth, checked = common.last_request(q, view)
                row[f"{phase}, relative error"] = float((out[-checked:].double() - truth).norm() / truth.norm())
            rows.append(row | {"rounding of the dtype": torch.finfo(getattr(torch, dtype)).eps / 2})
    return pd.DataFrame(rows)


def prefill(lab: Lab, recorder: Recorder, cases: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Cases of attention_prefill (heads, kv_heads, head_dim, seq_len, batch) measured here and now, as the benchmark does.

    A CPU is often shared, and a neighbour's burst lasts longer than a short case: there all cases are passed through three
    times in shorter turns, and of each the middle pass is kept. Calls launched by themselves are left out there, since
    without graphs all calls are such.
    """
    from pdlab.bench import attention_prefill as suite
    from pdlab.bench.suites import Context

    context = Context(lab.machine, lab.profile, recorder, float("inf"), lab.seed, say=lambda line: None)
    before, top, gpu, passes = len(recorder.rows), lab.ceilings(), lab.machine.is_gpu, []
    whole: list[dict[str, Any]] = [{**case, "causal": True, "dtype": lab.dtype} for case in cases]
    for _ in range(1 if gpu else 3):
        start = len(recorder.rows)
        for case in whole:
            suite.measure_case(context, case, top, eager=gpu, turn_ms=40 if gpu else 15)
        passes.append(recorder.rows[start:])
    recorder.rows[before:] = middle_pass(passes)
    return tidy(recorder.rows[before:])


def middle_pass(passes: Sequence[Sequence[Row]]) -> list[Row]:
    """Of several passes over the same cases, each case's and variant's rows of the pass whose latency is the middle one."""

    def key(row: Row) -> tuple[Any, ...]:
        return row.variant, row.kind, *sorted(row.params.items())

    times: dict[tuple[Any, ...], list[tuple[float, int]]] = {}
    for i, rows in enumerate(passes):
        for row in rows:
            if row.ok and row.metric == "latency":
                times.setdefault(key(row), []).append((row.median, i))
    middle = {of: sorted(found)[(len(found) - 1) // 2][1] for of, found in times.items()}
    return [row for i, rows in enumerate(passes) for row in rows if middle.get(key(row), 0) == i]


def tidy(rows: Iterable[Row]) -> pd.DataFrame:
    """Rows that have a number, as a table with a column a parameter."""
    from pdlab.bench.records import frame

    return frame(row for row in rows if row.ok)


def floors(
    lengths: Iterable[int], top: Ceilings, *, heads: int, head_dim: int, batch: int = 1, itemsize: int = 2
) -> pd.DataFrame:
    """The least milliseconds of plain and of tiled attention, causal, from these ceilings: x, y, series, kind."""
    import pandas as pd

    from pdlab.costs.formulas import attention_flops, plain_attention_bytes

    rows = []
    for n in lengths:
        half = attention_flops(batch, heads, n, n, head_dim) / top.matmul_flops_per_s
        whole = attention_flops(batch, heads, n, n, head_dim, causal=False) / top.matmul_flops_per_s
        moved = plain_attention_bytes(batch, heads, n, head_dim, itemsize)
        plain = max(whole, moved / top.read_bytes_per_s)
        once = plain_attention_bytes(batch, heads, n, head_dim, itemsize, passes=0)
        rows.append({"x": n, "y": 1e3 * plain, "series": "plain", "kind": "predicted"})
        tiled = max(half, once / top.read_bytes_per_s)
        rows.append({"x": n, "y": 1e3 * tiled, "series": "in tiles", "kind": "predicted"})
    return pd.DataFrame(rows)


def implied_heads(times: Mapping[int, tuple[float, float]], device: str, head_dim: int, heads: float, passes: int = 8) -> Any:
    """What the article's (plain, fused) milliseconds say about their workload, from a card's data sheet.

    `implied`: for how many heads x requests x layers plain attention, bound by `passes` over the scores, needs its time;
    `fused_percent`: the share of the card's matrix rate that the fused time means with `heads` of them.
    """
    import pandas as pd

    from pdlab.costs.formulas import attention_flops, plain_attention_bytes
    from pdlab.costs.roofline import sheet_ceilings

    card, rows = sheet_ceilings(device, "float16"), []
    for n, (plain_ms, fused_ms) in times.items():
        implied = plain_ms * 1e-3 * card.read_bytes_per_s / plain_attention_bytes(1, 1, n, head_dim, passes=passes)
        rate = heads * attention_flops(1, 1, n, n, head_dim) / (fused_ms * 1e-3)
        rows.append({"tokens": n, "implied": implied, "fused_percent": 100 * rate / card.matmul_flops_per_s})
    return pd.DataFrame(rows).set_index("tokens")


def stability(
    lab: Lab, dtype: str, tile: int, recorder: Recorder | None = None, keys: int = 256
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(relative errors against float64, percent of outputs not finite): a row a hard input, a column a missing care."""
    import pandas as pd
    import torch

    from pdlab.bench.attention_stability import cares, errors, write
    from pdlab.kernels.online_softmax import exact_attention, hard_cases, tiled_attention

    wrong: dict[str, dict[str, float]] = {}
    broken: dict[str, dict[str, float]] = {}
    for name, drawn in hard_cases(getattr(torch, dtype), m=keys, seed=lab.seed).items():
        case = {key: x.to(lab.device) for key, x in drawn.items()}
        truth = exact_attention(**case)
        for variant, care in cares().items():
            out = tiled_attention(**case, tile=tile, care=care)
            error, share = errors(out, truth)
            wrong.setdefault(name, {})[variant] = float("nan") if error is None else error
            broken.setdefault(name, {})[variant] = share
            if recorder is not None:
                write(recorder, variant, out, truth, {"case": name, "dtype": dtype, "tile": tile})
    return pd.DataFrame(wrong).T, pd.DataFrame(broken).T


def stretches(lens: Sequence[int], kv_heads: int, programs: int, tile: int = 64) -> dict[str, list[list[tuple[int, int]]]]:
    """Decode's work, two ways: for each program the (request, tokens) that it reads, in order.

    "a block a request": every (request, KV head) is one piece of work, taken by the program that is free first. "equal
    stretches": all of them laid end to end in tiles and cut into as many equal stretches as there are programs.
    """
    segments = [(b, n) for b, n in enumerate(lens) for _ in range(kv_heads)]
    whole: list[list[tuple[int, int]]] = [[] for _ in range(programs)]
    busy = [0] * programs
    for b, n in segments:
        p = busy.index(min(busy))
        whole[p].append((b, n))
        busy[p] += n
    tiles = [(b, min(tile, n - at)) for b, n in segments for at in range(0, n, tile)]
    share, extra = divmod(len(tiles), programs)
    even: list[list[tuple[int, int]]] = []
    at = 0
    for p in range(programs):
        mine: list[tuple[int, int]] = []
        for b, n in tiles[at : at + share + (p < extra)]:
            if mine and mine[-1][0] == b:
                mine[-1] = (b, mine[-1][1] + n)
            else:
                mine.append((b, n))
        at += share + (p < extra)
        even.append(mine)
    return {"a block a request and KV head": whole, "equal stretches": even}


def online_weights(scores: np.ndarray, tile: int) -> np.ndarray:
    """[steps, keys]: after each tile, the weight of the keys seen so far relative to the running maximum; NaN: not yet seen."""
    import numpy as np

    steps = -(-len(scores) // tile)
    weights = np.full((steps, len(scores)), np.nan)
    for step in range(steps):
        seen = scores[: (step + 1) * tile]
        weights[step, : len(seen)] = np.exp(seen - seen.max())
    return weights


def same_tokens(lab: Lab, names: Sequence[str], new_tokens: int = 24) -> dict[str, Any]:
    """Greedy tokens of a tiny random model under each forced attention, or why it cannot run here: {name: tokens or reason}."""
    from pdlab import LLM, SamplingParams
    from pdlab.core.errors import DeviceUnavailable
    from pdlab.models.loading import load

    loaded = load("random:llama-tiny", device=lab.device, dtype="float32", seed=lab.seed)
    prompts = [[(7 * i + 3 * j) % 200 for j in range(5 + 11 * i)] for i in range(3)]
    found: dict[str, Any] = {}
    for name in names:
        try:
            with LLM(loaded, lab.config(dtype="float32", attention=name, kv_capacity_tokens=512)) as llm:
                outs = llm.generate(prompts, SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True))
            found[name] = [out.token_ids for out in outs]
        except DeviceUnavailable as error:
            found[name] = error.message.rpartition(" here: ")[2]
    return found


def numpy_case(tokens: int, head_dim: int, seed: int) -> tuple[Any, Any, Any]:
    """q, k, v [tokens, D] in float64, of one head; keys that some queries like much more than others, so weights are uneven."""
    import numpy as np

    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((tokens, head_dim)) for _ in range(3))
    return q * 1.5, k, v


def as_torch(*arrays: Any, dtype: str = "float32") -> tuple[torch.Tensor, ...]:
    """NumPy arrays as tensors."""
    import torch

    return tuple(torch.from_numpy(a).to(getattr(torch, dtype)) for a in arrays)
