"""What the notebooks about decoding compute and look up: recorded rows that belong together, algebra, live steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdlab.bench import _stages as stages
from pdlab.costs.formulas import decode_shape, itemsize_of, step_bytes
from pdlab.costs.tables import params_json, read
from pdlab.models.catalogue import config_of

if TYPE_CHECKING:
    import pandas as pd
    import torch

    from pdlab.bench.records import Row
    from pdlab.kernels.ops import NormWeights
    from pdlab.lab.session import Lab
    from pdlab.models.config import ModelConfig
    from pdlab.models.loading import Loaded

SWITCHES = {
    "graph": "+ CUDA graph",
    "attention": "+ attention kernel",
    "fused": "+ fused operations",
    "dependent": "+ dependent launch",
    "ring": "+ ring of weights",
    "hints": "+ weights leave L2 first",
    "two_steps": "+ two steps in flight",
    "persistent": "+ one kernel for all layers",
}
WORDS = dict(zip(map(stages.name_of, stages.waterfall()), ("plain PyTorch, launched", *SWITCHES.values()), strict=True))


# --- recorded rows


def together(device: str, experiment: str, metric: str, among: Iterable[str] | None = None, **where: Any) -> pd.DataFrame:
    """Recorded rows of a metric that may be compared: for each set of parameters those of one run, the one that holds the most
    variants (of several the newest). Empty where nothing was recorded. Columns as bench.records.frame. A variant that lacks
    what is no switch any more is left out: it would be shown as that switch's effect. Where a run has a variant several times,
    the row counts that was recorded together with the most others: those took turns. `ours_then`: the median of `ours` that was
    recorded together with the row, NaN where none was.

    `among`: only these variants count and are returned, so that a run with other comparisons is not preferred for them.
    """
    from pdlab.bench.records import frame

    def turns_of(row: Row) -> tuple[str, str, str]:
        return params_json(row.params), row.run_id, str(row.time_utc)

    runs: dict[str, dict[str, dict[str, list[Row]]]] = {}  # by what turns_of gives
    then: dict[tuple[str, str, str], float] = {}  # the same, of `ours`
    wanted = None if among is None else set(among)
    for row in read(device, experiment):
        fits = row.metric == metric and (wanted is None or row.variant in wanted)
        fits = fits and row.ok and all(row.params.get(k) == v for k, v in where.items())
        lacks, _, _ = row.variant.removeprefix("without_").partition("_and_")
        if fits and (not row.variant.startswith("without_") or lacks in stages.ORDER):
            params, run, time = turns_of(row)
            runs.setdefault(params, {}).setdefault(run, {}).setdefault(time, []).append(row)
            if row.variant == "ours":
                then[params, run, time] = row.median
    several = [
        [{row.variant: row for turns in sorted(of_run.values(), key=len) for row in turns} for of_run in by_run.values()]
        for by_run in runs.values()
    ]
    chosen = [row for by_run in several for row in max(reversed(by_run), key=len).values()]
    table = frame(chosen)
    if chosen:
        table["ours_then"] = [then.get(turns_of(row), float("nan")) for row in chosen]
    return table


def missing(table: pd.DataFrame, device: str, experiment: str) -> bool:
    """Whether a table is empty; says so, and what would fill it."""
    if len(table) == 0:
        print(f"not shown, since it is not recorded yet: pdlab bench {experiment} --record, on {device}, adds it")
    return len(table) == 0


def day(table: pd.DataFrame) -> str:
    """The day of a recorded table's newest row."""
    return str(table["time_utc"].max())[:10] if len(table) else ""


def apart(table: pd.DataFrame, other: pd.DataFrame) -> str:
    """For a footer: that rivals in `other` come from another run than `table`, and of which day; empty where they do not."""
    runs = set(table["run_id"]) if len(table) else set()
    strangers = other[~other["run_id"].isin(runs)] if len(other) else other
    return f" · hollow: another run, {day(strangers)}" if len(strangers) else ""


def written(table: pd.DataFrame, form: str = "{:.1f}") -> pd.DataFrame:
    """The numbers of a table as text; empty where there is none."""
    return table.map(lambda value: "" if value != value else form.format(value))


def shown(rows: Iterable[Row]) -> pd.DataFrame:
    """Latencies among rows just measured, microseconds: a row for each set of parameters that differ, a column a variant."""
    from pdlab.bench.records import frame

    table = frame(row for row in rows if row.ok and row.metric == "latency")
    if len(table) == 0:
        return table
    names = [n for n in ("sampling", "batch", "graph") if n in table and table[n].nunique() > 1] or ["batch"]
    return table.pivot_table(index=names, columns="variant", values="median", sort=False)


def gains(table: pd.DataFrame, over: str, of: str = "ours", by: Sequence[str] = ("model", "batch", "graph")) -> pd.DataFrame:
    """Latency of the variant `over` divided by that of `of`, a row for each set of the parameters `by`, as column `gain`."""
    columns = [c for c in by if c in table]
    wide = table.pivot_table(index=columns, columns="variant", values="median")
    if over not in wide or of not in wide:
        return table.iloc[:0].assign(gain=[])
    return (wide[over] / wide[of]).dropna().rename("gain").reset_index()


def gain_lines(table: pd.DataFrame, over: str, model: str | None = None) -> pd.DataFrame:
    """`gains` over the batch for figures: a line launched, a line in a graph; of several models the median."""
    import pandas as pd

    found = gains(table, over)
    found = found[found["model"] == model] if model else found
    if len(found) == 0:
        return pd.DataFrame(columns=["x", "y", "series", "kind"])
    found = found.groupby(["batch", "graph"], as_index=False)["gain"].median()
    names = {True: "in a CUDA graph", False: "launched one by one"}
    return pd.DataFrame(
        {"x": found["batch"], "y": found["gain"], "series": found["graph"].map(names), "kind": "recorded"}
    ).sort_values(["series", "x"], ascending=[False, True])


def latency_lines(table: pd.DataFrame, floors: pd.DataFrame, **where: Any) -> pd.DataFrame:
    """Latency over the batch for figures.latency: a line a variant, and the floor as the prediction."""
    import pandas as pd

    def chosen(rows: pd.DataFrame) -> pd.DataFrame:
        for name, value in where.items() if len(rows) else ():
            rows = rows[rows[name] == value]
        return rows

    rows, floor = chosen(table), chosen(floors)
    series = rows["variant"].str.replace("_", " ")
    lines = pd.DataFrame({"x": rows["batch"], "y": rows["median"], "p10": rows["p10"], "p90": rows["p90"], "series": series})
    if len(floor) == 0:
        return lines.assign(kind="recorded")
    bound = pd.DataFrame({"x": floor["batch"], "y": floor["median"], "series": "ours", "kind": "predicted"})
    return pd.concat([lines.assign(kind="recorded"), bound], ignore_index=True)


def latency_panels(device: str, experiment: str, model: str, **where: Any) -> tuple[dict[str, pd.DataFrame], pd.DataFrame]:
    """Recorded latencies of a fused operation over the batch, launched and in a graph, for figures.latency; and their rows.

    Where the rows tell kinds of sampling apart, the product alone (recorded once, as greedy) goes with every kind.
    """
    import pandas as pd

    rows = together(device, experiment, "latency", model=model, **where)
    floors = together(device, experiment, "floor_latency", model=model, **where)
    if missing(rows, device, experiment):
        return {}, rows
    if where.get("sampling", "greedy") != "greedy":
        alone = together(device, experiment, "latency", model=model, sampling="greedy")
        rows = pd.concat([rows, alone[alone["variant"] == "cublas"]], ignore_index=True)
    rows["variant"] = rows["variant"].replace("cublas", "the product alone")
    titles = {"launched from Python": False, "in a CUDA graph": True}
    return {title: latency_lines(rows, floors, graph=graph) for title, graph in titles.items()}, rows


def sampling_gains(device: str, experiment: str, kinds: Sequence[str]) -> pd.DataFrame:
    """How many times faster the fused operation is than the operations apart: a row for each kind, launched and in a graph, a
    column a batch, the median over the models recorded."""
    import pandas as pd

    found: dict[str, dict[int, float]] = {}
    for kind in kinds:
        rows = together(device, experiment, "latency", sampling=kind)
        by_batch = gains(rows, "unfused") if len(rows) else rows
        for title, graph in {"launched": False, "in a graph": True}.items():
            part = by_batch[by_batch["graph"] == graph] if len(rows) else by_batch
            if len(part):
                found[f"{kind.replace('_', ' ')}, {title}"] = part.groupby("batch")["gain"].median().to_dict()
    return pd.DataFrame(found).T.rename_axis("times faster, by batch")


def falls(table: pd.DataFrame, model: str, value: str = "median") -> dict[str, float]:
    """The waterfall of one model: tokens a second after each switch, from `unfused` on; switches not recorded are left out."""
    rows = table[table["model"] == model].set_index("variant")[value]
    return {words: float(rows[name]) for name, words in WORDS.items() if name in rows.index}


def beside_prediction(predicted: Mapping[str, float], wall: float, recorded: Mapping[str, float], end: float) -> pd.DataFrame:
    """Shares of the wall, percent, after each switch: as predicted_walk said and as `falls` found, a row a switch."""
    import pandas as pd

    said = {name: 100 * rate / wall for name, rate in predicted.items()}
    found = {name: 100 * rate / end for name, rate in recorded.items()}
    names = [*found, *(name for name in said if name not in found)]
    return pd.DataFrame({"predicted, %": said, "recorded, %": found}).reindex(names)


def persistent_steps(device: str) -> pd.DataFrame:
    """Milliseconds of a step by kernels with rings of weights and by one persistent kernel, the fastest way of each, of the
    newest run that recorded both; a row a model. Where it was recorded also the same kernel with nothing that bounds how many
    weights it has asked for at a time."""
    import pandas as pd

    rings, one, at_once = "kernels with rings, ms", "one kernel, ms", "one kernel, all asked for at once, ms"
    found: dict[str, dict[str, dict[str, float]]] = {}
    for row in read(device, "ring_tiles"):
        way = str(row.params.get("way"))
        if row.ok and row.metric == "step_latency" and row.params.get("tokens", 512) == 512 and "prefetch" not in way:
            kind = at_once if way == "persistent unbounded" else one if way.startswith("persistent") else rings
            best = found.setdefault(str(row.params["model"]), {}).setdefault(row.run_id, {})
            best[kind] = min(row.median, best.get(kind, row.median))
    kept = {
        model: next((run for run in reversed(runs.values()) if {rings, one} <= set(run)), None) for model, runs in found.items()
    }
    table = pd.DataFrame([{"model": model} | run for model, run in kept.items() if run])
    return table.reindex(columns=[c for c in ("model", rings, at_once, one) if c in table])


def predicted_walk(
    config: ModelConfig, plain: pd.Series, read_bytes_per_s: float, tokens: int, *, launch_us: float, gap_us: float
) -> dict[str, float]:
    """Tokens a second to expect of the first switches, before anything is measured: a step is its bytes over the bandwidth and,
    for each kernel, the time in which nothing streams: `launch_us` of the host, or `gap_us` in a graph.

    `plain`: operators of each operation where nothing is fused (operator_calls). The last entry is fused kernels whose gaps
    are bridged altogether: the wall.
    """
    floor = step_bytes(config, decode_shape(1, tokens), 2).total / read_bytes_per_s * 1e6
    layers, ends = config.num_layers, int(plain["projection_sample"])
    each = int(plain.drop("projection_sample").sum())
    attended = each - int(plain["attention"]) + 1
    steps = {
        "plain PyTorch, launched": max(floor, launch_us * (each * layers + ends)),
        SWITCHES["graph"]: floor + gap_us * (each * layers + ends),
        SWITCHES["attention"]: floor + gap_us * (attended * layers + ends),
        SWITCHES["fused"]: floor + gap_us * (5 * layers + 2),
        "+ no gaps at all": floor,
    }
    return {name: 1e6 / us for name, us in steps.items()}


def switch_table(table: pd.DataFrame, model: str) -> pd.DataFrame:
    """What each switch is worth alone (over `unfused`) and what leaving it out of all costs (`ours` over the rest, that of the
    same turns where the table says it); of what is off by default, what adding it brings."""
    import pandas as pd

    here = table[table["model"] == model].set_index("variant")
    rows, found = here["median"], {}

    def ours(beside: str) -> float:
        then = float(here.loc[beside, "ours_then"]) if "ours_then" in here else float("nan")
        return then if then == then else float(rows["ours"])

    for switch, words in SWITCHES.items():
        alone, without = stages.name_of({switch}), stages.name_of(stages.without(switch))
        values = {
            "alone": rows[alone] / rows["unfused"] if {alone, "unfused"} <= set(rows.index) else float("nan"),
            "in all, against without": ours(without) / rows[without] if {without, "ours"} <= set(rows.index) else float("nan"),
        }
        if any(v == v for v in values.values()):
            found[words.removeprefix("+ ")] = values
    for switch in stages.BESIDES:
        less = stages.BESIDES_WITHOUT[switch]
        without, more = stages.name_of(less), stages.name_of(less | {switch})
        if {more, without} <= set(rows.index):
            found[f"{switch} (off by default)"] = {"in all, against without": rows[more] / rows[without]}
    return pd.DataFrame(found).T


# --- algebra


def norm_orders(norm: NormWeights, x: torch.Tensor, weight: torch.Tensor) -> dict[str, float]:
    """Relative errors of ways to order a norm and a product of 16-bit inputs (sums in float32), against float64."""
    x64, g64, w64 = x.double(), norm.weight.double(), weight.double()
    centred = x64 if norm.bias is None else x64 - x64.mean(-1, keepdim=True)
    scale = (centred.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    truth = (centred * scale * g64) @ w64.T
    kind, s = x.dtype, scale.float()

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a.to(kind).float() @ b.to(kind).float().T

    y, g, w = centred.float(), g64.float(), weight.float()
    ways = {
        "norm, rounded, product (ours, several rows)": product(y * s * g, weight),
        "x g rounded, product, 1/rms (ours, one row by a ring)": product(y * g, weight) * s,
        "x g in registers, product, 1/rms (ours, one row)": ((y * g) @ w.T) * s,
        "g folded into 16-bit weights, product, 1/rms": (y @ (w * g).to(kind).float().T) * s,
    }
    if norm.bias is not None:  # LayerNorm: the mean may be taken off before or after
        mean = x.float().mean(-1, keepdim=True)
        ways["x g rounded, product, mean taken off, 1/rms"] = (product(x.float() * g, weight) - mean * (w * g).sum(-1)) * s
    return {name: float((out.double() - truth).norm() / truth.norm()) for name, out in ways.items()}


def chi_square(exact: Any, counts: Any) -> float:
    """Probability that draws from `exact` differ from it by as much as `counts` do, or by more (Pearson's test)."""
    import torch

    p, n = torch.as_tensor(exact, dtype=torch.float64), torch.as_tensor(counts, dtype=torch.float64)
    expected = p / p.sum() * n.sum()
    statistic = ((n - expected).square() / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(p) - 1) / 2, dtype=torch.float64), statistic / 2))


def unfused_bytes(config: ModelConfig, batch: int, itemsize: int = 2) -> dict[str, float]:
    """Bytes of norm + QKV + rotary + cache write of one layer: fused, and apart (each operation reads and writes memory)."""
    fused = step_bytes(config, decode_shape(batch, 1), itemsize).norm_qkv_rope / config.num_layers
    h, q, kv = config.hidden_size, config.q_size, config.kv_size
    between = 2 * h + 2 * (q + 2 * kv) + (2 * (q + kv) if config.family == "llama" else 0) + 2 * kv
    return {"fused": fused, "apart": fused + batch * between * itemsize}


# --- a step, the wall, layouts


def kernel_table(models: Mapping[str, pd.Series], read_bytes_per_s: float, tokens: int) -> pd.DataFrame:
    """What decides how much gaps hurt: bytes of a step (two a number), its kernels, and the time that the bytes of one of the
    fused kernels take. `models`: name -> operators of each operation where nothing is fused (operator_calls)."""
    import pandas as pd

    rows = {}
    for name, plain in models.items():
        config = config_of(name)
        total, fused = step_bytes(config, decode_shape(1, tokens), 2).total, 5 * config.num_layers + 2
        each, ends = int(plain.drop("projection_sample").sum()), int(plain["projection_sample"])
        rows[name] = {
            "GB a token": total / 1e9,
            "operators, plain": each * config.num_layers + ends,
            "kernels, fused": fused,
            "bytes of a fused kernel, us": total / fused / read_bytes_per_s * 1e6,
        }
    return pd.DataFrame(rows).T.astype({"operators, plain": int, "kernels, fused": int})


def breakdown(lab: Lab, loaded: Loaded, tokens: int, trace: Path | None = None, *, fused: bool = True) -> pd.DataFrame:
    """Microseconds of each operation in one decode step of this machine beside its byte floor; see bench._breakdown."""
    import pandas as pd

    from pdlab.bench import _breakdown

    found = _breakdown.profile(loaded, stages.ALL if fused else frozenset(), tokens, trace)
    floors = step_bytes(loaded.config, decode_shape(1, tokens), itemsize_of(lab.dtype))
    speed = lab.ceilings().read_bytes_per_s
    rows = {op: {"us": us, "floor": getattr(floors, op) / speed * 1e6} for op, us in found.items()}
    return pd.DataFrame(rows).T


def recorded_breakdown(device: str, model: str) -> pd.DataFrame:
    """The same from the records, a row an operation and a column a variant, the floor among them; microseconds a step."""
    import pandas as pd

    rows = together(device, "decode_single_stream", "kernel_time", model=model)
    floors = together(device, "decode_single_stream", "floor_kernel_time", model=model)
    both = pd.concat([rows, floors.assign(variant="floor")], ignore_index=True) if len(rows) else rows
    both = both.replace({"variant": {"unfused_graph": "plain operations"}})  # not replayed here: each kernel is timed by itself
    return both.pivot_table(index="operation", columns="variant", values="median", sort=False) if len(both) else both


def wall(device: str, models: Sequence[str], read_bytes_per_s: float, tokens: int, dtype: str = "bfloat16") -> pd.DataFrame:
    """Bytes a token and the most tokens a second that a read bandwidth allows, weights and `tokens` of cache counted."""
    import pandas as pd

    rows = {}
    for model in models:
        moved = step_bytes(config_of(model), decode_shape(1, tokens), itemsize_of(dtype)).as_dict()
        total = sum(moved.values())
        rows[model] = {
            "GB a token": total / 1e9,
            "of it cache, %": 100 * moved["attention"] / total,
            "ms a token": total / read_bytes_per_s * 1e3,
            "tokens a second, at most": read_bytes_per_s / total,
        }
    return pd.DataFrame(rows).T.rename_axis(device)


def run_length(at: torch.Tensor) -> int:
    """How many elements of one (token, head) lie side by side, at the most everywhere; `at` as of kv_layouts.offsets."""
    steps = (at[..., 1:] - at[..., :-1]).flatten(0, 1)[0] == 1
    longest = run = 1
    for beside in steps.tolist():
        run = run + 1 if beside else 1
        longest = max(longest, run)
    return longest
