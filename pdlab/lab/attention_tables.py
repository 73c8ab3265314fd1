"""What the notebook about attention makes of measured and recorded tables: lines, gains, grids of tiles, shares of floors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

PLAIN, OURS = ("article", "torch_math"), ("ours", "ours_plain", "sdpa")  # in order of preference, on a GPU and on a CPU
NAMES = {
    "ours": "this project", "ours_plain": "this project, plain kernel", "ours_alone": "no dependent launch",
    "article": "plain attention", "torch_math": "SDPA, plain", "fa2": "FlashAttention 2", "fa3": "FlashAttention 3",
    "cudnn": "cuDNN", "flashinfer": "FlashInfer", "sdpa": "SDPA", "plain": "the lab's oracle",
}  # fmt: skip


def recorded(device: str, experiment: str) -> pd.DataFrame:
    """What counts of an experiment's records of a device; its footers need `when(table)`."""
    from pdlab.bench.records import latest

    return latest(device, experiment)


def when(table: pd.DataFrame) -> str:
    """The time of a table's newest row."""
    return str(table["time_utc"].max()) if len(table) else ""


def shown(table: pd.DataFrame, draw: Callable[[pd.DataFrame, str], Any], device: str, experiment: str) -> Any:
    """draw(table, device), or a line that says that there are no records to draw."""
    from IPython.display import Markdown

    if len(table):
        return draw(table, device)
    return Markdown(f"*Nothing is recorded of `{experiment}` for {device}; `pdlab bench {experiment} --record` measures it.*")


def best(table: pd.DataFrame, names: Sequence[str]) -> str:
    """The first of `names` that was measured."""
    there = set(table.loc[table["kind"] == "measured", "variant"]) if len(table) else set()
    return next((name for name in names if name in there), names[0])


def lines(
    table: pd.DataFrame, metric: str, variants: Sequence[str], kind: str, x: str = "seq_len", floor: str = "", **where: Any
) -> pd.DataFrame:
    """A metric over x for lab.figures, a series a variant that is there; `floor` names a predicted metric drawn dashed,
    which above rates is a ceiling."""
    import pandas as pd

    for name, value in where.items():
        table = table[table[name] == value]
    rows = table[(table["metric"] == metric) & (table["kind"] == "measured")]
    parts = []
    for name in variants:
        mine = rows[rows["variant"] == name]
        if len(mine):
            columns = {"x": mine[x], "y": mine["median"], "p10": mine["p10"], "p90": mine["p90"]}
            parts.append(pd.DataFrame(columns).assign(series=NAMES.get(name, name), kind=kind))
    least = table[table["metric"] == floor]
    if floor and len(least):
        parts.append(pd.DataFrame({"x": least[x], "y": least["median"]}).assign(series="the ceiling", kind="predicted"))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=["x", "y", "series", "kind"])


def pivot(table: pd.DataFrame, metric: str, index: str = "seq_len", **where: Any) -> pd.DataFrame:
    """Medians of a measured metric, a row an index and a column a variant."""
    for name, value in where.items():
        table = table[table[name] == value]
    table = table[(table["metric"] == metric) & (table["kind"] == "measured")]
    return table.pivot_table(index=index, columns="variant", values="median", aggfunc="last")


def gains(table: pd.DataFrame, kind: str, plain: Sequence[str] = PLAIN, fused: Sequence[str] = OURS) -> pd.DataFrame:
    """Plain time over fused time by length, for figures: many prompts at once, one prompt, and one launched by itself.

    On a GPU the first two run in CUDA graphs; on a CPU there are none, and the third is not measured.
    """
    import pandas as pd

    a, b, parts = best(table, plain), best(table, fused), []
    measured = table[(table["kind"] == "measured") & table["variant"].isin([a, b])]
    for metric, alone, label in (
        ("latency", False, "many prompts"),
        ("latency", True, "one prompt"),
        ("eager_latency", True, "one prompt, launched by itself"),
    ):
        rows = measured[(measured["metric"] == metric) & ((measured["batch"] == 1) == alone)]
        if alone:
            rows = rows[rows["seq_len"] <= 2048]
        wide = rows.pivot_table(index=["heads", "kv_heads", "head_dim", "seq_len"], columns="variant", values="median")
        if {a, b} <= set(wide.columns):
            ratio = (wide[a] / wide[b]).dropna().groupby("seq_len").median()
            parts.append(pd.DataFrame({"x": ratio.index, "y": ratio.to_numpy()}).assign(series=label, kind=kind))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=["x", "y", "series", "kind"])


def told(found: pd.DataFrame) -> pd.Series:
    """`gains` as words by length: of many prompts, or of one where only one was measured."""
    wide = found.pivot_table(index="x", columns="series", values="y", sort=False)
    best_of = wide.reindex(columns=["many prompts", "one prompt"]).bfill(axis=1).iloc[:, 0]
    return best_of.dropna().map("{:.1f}×".format)


def tile_grid(table: pd.DataFrame, head_dim: int, length: int, kernel: str = "prefill") -> pd.DataFrame:
    """The fastest recorded TFLOP/s of each tile of queries (rows) and keys (columns), whatever its warps and stages."""
    from pdlab.bench.attention_tiles import HEADS, TOKENS
    from pdlab.costs.formulas import attention_flops

    rows = table[(table["kernel"] == kernel) & (table["head_dim"] == head_dim) & (table["length"] == length)]
    flops = attention_flops(TOKENS // length, HEADS, length, length, head_dim)
    rows = rows.assign(rate=flops / rows["median"] / 1e6)
    return rows.pivot_table(index="tile_block_m", columns="tile_block_n", values="rate", aggfunc="max")


def decode_grid(table: pd.DataFrame) -> pd.DataFrame:
    """Percent of the floor that each kernel reaches, a row a case of attention_decode with 32/8 heads of 128: every second
    batch in pages of 16, and one in other pages, which is what fits a page."""
    rows = table[(table["metric"] == "share_of_floor") & (table["kv_heads"] == 8) & (table["head_dim"] == 128)]
    usual = (rows["page"] == 16) & rows["batch"].isin([1, 8, 32, 128])
    rows = rows[usual | (rows["batch"] == 32)]
    page = rows["page"].astype(int).map(lambda n: f"pages of {n}" if n else "extents")
    even = rows["batch"].astype(int).astype(str) + " × " + rows["kv_len"].astype(int).map("{:,}".format)
    case = (even.where(~rows["ragged"].astype(bool), "131,072 beside 31 × 4,096")) + ", " + page
    grid = rows.assign(case=case).pivot_table(index="case", columns="variant", values="median", aggfunc="last", sort=False)
    order = [name for name in ("ours", "ours_alone", "flashinfer", "fa3") if name in grid]
    size = rows.assign(case=case).groupby("case", sort=False)[["ragged", "page", "batch", "kv_len"]].last()
    size = size.assign(other=size["page"] != 16).sort_values(["ragged", "other", "batch", "kv_len", "page"])
    return grid.loc[size.index, order].rename(columns=NAMES)


def fastest(table: pd.DataFrame, device: str = "") -> pd.DataFrame:
    """The fastest backend of each recorded cell of attention_dispatch and what it gains on the next; a column a head size."""
    import pandas as pd

    cells = {}
    for (phase, length, batch, dim), rows in table.groupby(["phase", "length", "batch", "head_dim"]):
        rows = rows.sort_values("median")
        first, next_ = rows.iloc[0], rows.iloc[min(1, len(rows) - 1)]
        words = f"{first['variant']} ({next_['median'] / first['median']:.1f}× {next_['variant']})"
        cells[phase, f"{int(batch)} × {int(length):,}", f"head size {int(dim)}"] = words
    return pd.Series(cells).unstack(sort=False).rename_axis(["phase", "requests × tokens"])


def kernel_stability(table: pd.DataFrame, device: str = "") -> pd.DataFrame:
    """The kernels' recorded errors on the hard inputs: the worst over tiles, a column a kernel and dtype."""
    rows = table[(table["metric"] == "relative_error") & table["variant"].str.startswith("ours")]
    names = rows["variant"].str.removeprefix("ours_") + ", " + rows["dtype"]
    grid = rows.assign(column=names).pivot_table(index="case", columns="column", values="median", aggfunc="max")
    return grid.rename_axis(index="input", columns=None).map("{:.1e}".format)
