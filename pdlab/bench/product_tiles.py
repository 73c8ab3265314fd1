"""The tiles of the fused decode kernels for several rows, swept product by product (single rows: see ring_tiles).

`latency` of a product is microseconds a call in a graph over rotated weights, its sizes as parameters named tile_…. What comes
out fastest, by the copy engine and without it, then meets in whole steps: `step_latency`, ms, one row a set of tiles. The
fastest set of each model and batch goes to tuning/<device>.json ("product_tiles").

Needs a GPU of capability 8.0. Most of the time goes into compiling; what the budget does not reach is marked as skipped, and
for a model whose sweep it cuts short the table stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING

from pdlab.kernels.product_tiles import ProductTile, columns_of, product_rule
from pdlab.models.catalogue import config_of

if TYPE_CHECKING:
    import torch

    from pdlab.bench.suites import Context
    from pdlab.kernels.kv_view import KVView
    from pdlab.kernels.ops import LayerWeights, RopeTable
    from pdlab.kernels.products import Workspace
    from pdlab.kernels.tuning import Tuning
    from pdlab.models.config import ModelConfig
    from pdlab.models.loading import Loaded

NAME = "product_tiles"
HELP = "sweep of the fused decode kernels' tile sizes; writes the device's tuning table"

MODELS = ("llama-2-7b", "llama-3-8b", "llama-1b")
BATCHES = (8, 32, 64)


def shapes(c: ModelConfig) -> dict[str, tuple[int, int]]:
    """(outputs, k) of each product of a layer, and of the vocabulary."""
    return {
        "norm_qkv_rope": (c.q_size + 2 * c.kv_size, c.hidden_size),
        "out_residual": (c.hidden_size, c.q_size),
        "norm_mlp_up": (2 * c.ffn_size, c.hidden_size),
        "down_residual": (c.hidden_size, c.ffn_size),
        "projection_sample": (c.vocab_size, c.hidden_size),
    }


# (weight rows, elements of a step, warps, stages) for up to 8, 32 and 64 activation rows
SIZES = {
    8: ((64, 128, 4, 4),),
    32: ((64, 128, 4, 4), (64, 128, 4, 3)),
    64: ((64, 128, 4, 3), (64, 64, 4, 4), (128, 64, 8, 4)),
}
# (weight rows, warps, stages, pieces asked into L2 together) of staged_product, the same
STAGED = {
    8: ((128, 4, 6, 0), (128, 4, 6, 4), (128, 4, 12, 0), (128, 4, 12, 4)),
    32: ((128, 4, 5, 0), (128, 4, 5, 4), (128, 4, 10, 0), (128, 4, 10, 4)),
    64: ((128, 4, 4, 0), (128, 4, 4, 4), (128, 4, 9, 0), (128, 4, 9, 4), (256, 8, 5, 4)),
}
SHARES = (2, 3, 4, 6, 8)  # programs that may share a tile
TOKENS = 640  # in each request's cache, in whole steps


def held_bytes(tile: ProductTile, columns: int, itemsize: int = 2) -> int:
    """Shared memory of a program."""
    return tile.stages * (tile.rows + columns) * tile.k * itemsize


def product_candidates(tuning: Tuning, op: str, outputs: int, k: int, batch: int) -> Iterator[ProductTile]:
    """The rule's tile, and others that keep 64 KB or more a multiprocessor on their way and are resident all at once.

    A second wave of programs begins when the first ends, and most of the device waits for it: so as many programs share a tile
    as find room together, or about half as many. Before the wait 64 KB a program are asked into L2.
    """
    rule = product_rule(tuning, op, outputs, k, batch)
    yield rule
    columns, seen = columns_of(batch), {rule}
    size = min(size for size in SIZES if batch <= size)
    sizes = [replace(rule, rows=r, k=tile_k, warps=w, stages=s) for r, tile_k, w, s in SIZES[size]]
    if tuning.capability == (9, 0):
        sizes += [replace(rule, rows=r, k=64, warps=w, stages=s, fetch=f, tma=True) for r, w, s, f in STAGED[size]]
    for tile in sizes:
        rows, tile_k = tile.rows, tile.k
        while tile.stages > 3 and held_bytes(tile, columns) + 2048 > tuning.shared_bytes:
            tile = replace(tile, stages=tile.stages - 1)
        held = held_bytes(tile, columns) + 1024
        if held > tuning.shared_bytes - 1024 or tile_k > k:
            continue
        room = min(tuning.shared_bytes // held, (8 if tile.tma else 16) // tile.warps) * tuning.multiprocessors
        tiles = -(-outputs // rows)
        fitting = [1] + [s for s in SHARES if tiles * s <= room and k % (tile_k * s) == 0 and k // (tile_k * s) >= 2]
        if tile.tma:
            fitting = [s for s in fitting if s & (s - 1) == 0]
        ask = max(1, (32 << 10) // rows // tile_k)
        for split in {fitting[-1], max(s for s in fitting if 2 * s <= fitting[-1] or s == 1)}:
            fetch = 1 << (min(ask, k // split // tile_k).bit_length() - 1)
            found = replace(tile, split=split, fetch=fetch if rule.pdl else 0)
            if tile.tma:
                found = replace(found, stages=min(tile.stages, k // split // tile_k), fetch=tile.fetch)
            if found not in seen and tiles * split >= 0.7 * tuning.multiprocessors:
                seen.add(found)
                yield found


def run(ctx: Context) -> None:
    from pdlab.kernels.dispatch import why_not
    from pdlab.kernels.tuning import Tuning

    if reason := why_not("triton", ctx.machine.capability) or (None if ctx.machine.is_gpu else "tiles are timed on a GPU"):
        ctx.record.skip("latency", "us", reason, params={})
        return
    from pdlab.bench.prefill_vs_decode import _load

    tuning = Tuning.of_device()
    for name in MODELS:
        if ctx.left() <= 0:
            ctx.record.skip("step_latency", "ms", "the time budget ran out", params={"model": name})
            continue
        found = {batch: _sweep_products(ctx, config_of(name), tuning, batch) for batch in BATCHES}
        loaded = _load(f"random:{name}", ctx)
        chosen = {batch: _choose_in_steps(ctx, loaded, batch, found[batch]) for batch in BATCHES}
        if ctx.left() > 0:  # what an unfinished sweep found might be slower than what the table has
            _write(ctx, loaded.config, chosen)
        del loaded


def _sweep_products(ctx: Context, config: ModelConfig, tuning: Tuning, batch: int) -> dict[str, list[ProductTile]]:
    """Each operation's contenders: the fastest by itself first, then the fastest of those that use the copy engine if that does
    not, or of the others if it does."""
    found: dict[str, list[ProductTile]] = {}
    for op, (outputs, k) in shapes(config).items():
        if op == "projection_sample":
            continue
        sweep = Product(ctx, config, op, outputs, k, batch)
        times = [(us, tile) for tile in product_candidates(tuning, op, outputs, k, batch) if (us := sweep.time(tile))]
        ranked = [tile for _, tile in sorted(times, key=lambda x: x[0])]
        found[op] = ranked[:1] + [tile for tile in ranked if tile.tma != ranked[0].tma][:1]
        if op == "norm_qkv_rope":
            found[op] = [tile for tile in found[op] if _rotates_right(ctx, config, batch, tile)]
        if ranked:
            ctx.say(f"  {config.name} {op} {batch}: {ranked[0]} {min(times, key=lambda x: x[0])[0]:.1f} us")
    return found


def _rotates_right(ctx: Context, config: ModelConfig, batch: int, tile: ProductTile) -> bool:
    """Whether what steps do with a tile of QKV, rotation and cache included, is right; else a row says that it is not."""
    from pdlab.bench import fused_norm_qkv_rope as suite
    from pdlab.kernels.norm_qkv_rope import norm_qkv_rope
    from pdlab.kernels.products import Workspace
    from pdlab.kernels.row_kernels import norm_rows

    arguments = suite.make_arguments(config, ctx, batch, 0)
    workspace = Workspace(arguments[0].device)

    def call(x: torch.Tensor, w: LayerWeights, rope: RopeTable | None, view: KVView, once: object) -> torch.Tensor:
        return norm_qkv_rope(norm_rows(x, w.attn_norm), w, rope, view, tile, workspace, normed=True)

    try:
        suite.check(f"QKV with {tile}", call, arguments)
    except Exception as error:
        params = {"op": "norm_qkv_rope", "model": config.name, "batch": batch, "dtype": ctx.dtype}
        params |= {f"tile_{name}": value for name, value in asdict(tile).items()}
        ctx.record.skip("latency", "us", f"{type(error).__name__}: {error}"[:200], params=params)
        return False
    return True


def _choose_in_steps(ctx: Context, loaded: Loaded, batch: int, found: dict[str, list[ProductTile]]) -> dict[str, ProductTile]:
    """Of the contenders those with which a whole step is fastest, exchanged one operation after the other: what a kernel takes
    depends on what runs before and behind it."""
    chosen = {op: tiles[0] for op, tiles in found.items() if tiles}
    if not chosen:
        return chosen
    fastest = _step(ctx, loaded, batch, chosen)
    for op, tiles in found.items():
        for tile in tiles[1:]:
            chosen, fastest = _better(ctx, loaded, batch, (chosen, fastest), op, tile)
    return chosen


def _better(
    ctx: Context, loaded: Loaded, batch: int, best: tuple[dict[str, ProductTile], float], op: str, tile: ProductTile
) -> tuple[dict[str, ProductTile], float]:
    """The best tiles and their milliseconds, `tile` among them if a step is faster with it."""
    changed = best[0] | {op: tile}
    ms = _step(ctx, loaded, batch, changed)
    return (changed, ms) if ms < best[1] else best


def _step(ctx: Context, loaded: Loaded, batch: int, tiles: dict[str, ProductTile]) -> float:
    """Milliseconds between the ends of successive steps, two in flight, also written as a row; inf where there are none."""
    from pdlab.bench import _breakdown
    from pdlab.bench import _stages as stages
    from pdlab.hardware.timing import summarize

    config = loaded.config
    params = {"model": config.name, "batch": batch, "tokens": TOKENS, "dtype": ctx.dtype}
    params |= {op: " ".join(f"{name}={value}" for name, value in asdict(tile).items()) for op, tile in tiles.items()}
    if ctx.left() <= 0:
        ctx.record.skip("step_latency", "ms", "the time budget ran out", params=params)
        return float("inf")
    try:
        with _breakdown.step_of(loaded, stages.ALL, TOKENS, batch) as (executor, plan):
            for op, tile in tiles.items():
                executor.model.ops._tiles[(op, *shapes(config)[op], batch)] = tile
            _breakdown.run_steps(executor, [plan(i) for i in range(4)], 1)
            seconds = _breakdown.run_steps(executor, [plan(i) for i in range(4, 30)], 2)
    except Exception as error:
        ctx.record.skip("step_latency", "ms", f"{type(error).__name__}: {error}"[:200], params=params)
        return float("inf")
    timings = summarize([s * 1e3 for s in seconds], "ms")
    ctx.record.add("step_latency", timings, params=params)
    ctx.say(f"  {config.name}, {batch} rows: {timings.median:.3f} ms a step")
    return timings.median


def _write(ctx: Context, config: ModelConfig, chosen: dict[int, dict[str, ProductTile]]) -> None:
    """Entries of the device's table, the smallest batch first."""
    from pdlab.bench import _attention

    for op, (outputs, k) in shapes(config).items():
        made = []
        for batch, tiles in chosen.items():
            if op in tiles:
                sizes = {"tile_k" if name == "k" else name: value for name, value in asdict(tiles[op]).items()}
                made.append({"op": op, "outputs": outputs, "k": k, "min_batch": 2, "max_batch": batch, **sizes})
        if made:
            _attention.write_table(ctx, "product_tiles", made, {"op": op, "outputs": outputs, "k": k})


def product_call(
    op: str, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, tile: ProductTile, workspace: Workspace
) -> torch.Tensor:
    """The operation behind its norm; QKV without rotation and cache, which read next to nothing."""
    from pdlab.kernels.norm_product import NOTHING, SWIGLU, norm_product
    from pdlab.kernels.ops import NormWeights
    from pdlab.kernels.residual_product import residual_product

    if op.endswith("residual"):
        return residual_product(x, weight, None, residual, tile, workspace)
    unread = NormWeights(x, None, 0.0)  # x is normed
    return norm_product(x, unread, weight, None, SWIGLU if op == "norm_mlp_up" else NOTHING, tile, workspace, normed=True)


def compiled_products(tuning: Tuning) -> dict[str, Callable[[Context], None]]:
    """Every candidate of the sweep, called once on anything: jobs for pdlab.bench.compile_ahead."""

    def job(ctx: Context, name: str, op: str, outputs: int, k: int, batch: int, tile: ProductTile) -> None:
        import torch

        from pdlab.bench.fused_norm_qkv_rope import make_arguments
        from pdlab.kernels.norm_qkv_rope import norm_qkv_rope
        from pdlab.kernels.products import Workspace

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=getattr(torch, ctx.dtype), device=ctx.device)

        workspace = Workspace(torch.device(ctx.device))
        product_call(op, empty(batch, k), empty(outputs, k), empty(batch, outputs), tile, workspace)
        if op == "norm_qkv_rope":  # the sweep leaves out what steps do
            x, w, rope, view, _ = make_arguments(config_of(name), ctx, batch, 0)
            norm_qkv_rope(x, w, rope, view, tile, workspace, normed=True)

    return {
        f"{name} {op} {batch} {tile}": partial(job, name=name, op=op, outputs=outputs, k=k, batch=batch, tile=tile)
        for name in MODELS
        for op, (outputs, k) in shapes(config_of(name)).items()
        if op != "projection_sample"
        for batch in BATCHES
        for tile in product_candidates(tuning, op, outputs, k, batch)
    }


class Product:
    """One product of several rows: its inputs, what is right, and a row for each tile."""

    def __init__(self, ctx: Context, config: ModelConfig, op: str, outputs: int, k: int, batch: int) -> None:
        import torch

        from pdlab.hardware.timing import L2Rotation
        from pdlab.kernels.products import Workspace

        self.ctx, self.op = ctx, op
        self.params = {"op": op, "outputs": outputs, "k": k, "batch": batch, "model": config.name, "dtype": ctx.dtype}
        g = torch.Generator(ctx.device).manual_seed(ctx.seed)

        def rand(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (scale * torch.randn(shape, generator=g, device=ctx.device)).to(getattr(torch, ctx.dtype))

        self.x, self.residual = rand(batch, k), rand(batch, outputs)
        self.workspace = Workspace(torch.device(ctx.device))
        self.rotation = L2Rotation(lambda i: (rand(outputs, k, scale=k**-0.5),), outputs * k * self.x.element_size())
        self.weight = self.rotation.sets[0][0]
        product = self.x.double() @ self.weight.double().T
        gate, value = product.chunk(2, -1)
        self.truth = {
            "norm_qkv_rope": product,
            "norm_mlp_up": gate * gate.sigmoid() * value,
        }.get(op, product + self.residual.double())

    def call(self, weight: torch.Tensor, tile: ProductTile) -> torch.Tensor:
        return product_call(self.op, self.x, weight, self.residual, tile, self.workspace)

    def time(self, tile: ProductTile) -> float | None:
        """Microseconds of one tile, also written as a row; None where it has none."""
        from pdlab.bench import _decode
        from pdlab.hardware.timing import graph_time_us

        params = self.params | {f"tile_{name}": value for name, value in asdict(tile).items()}
        if self.ctx.left() <= 0:
            self.ctx.record.skip("latency", "us", "the time budget ran out", params=params)
            return None
        try:
            _decode.check(f"{self.op} with {tile}", self.call(self.weight, tile), self.truth)
            timings = graph_time_us(lambda w: self.call(w, tile), rotation=self.rotation, n=9, warmup=1, budget_ms=15)
        except Exception as error:  # out of shared memory or registers: not a tile for this device
            self.ctx.record.skip("latency", "us", f"{type(error).__name__}: {error}"[:200], params=params)
            return None
        self.ctx.record.add("latency", timings, params=params)
        return timings.median
