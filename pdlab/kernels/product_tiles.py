"""Tiles of the fused decode kernels: from this device's measured table, else by a rule. No torch here.

    {"product_tiles": [{"op": "norm_qkv_rope", "outputs": 3072, "k": 2048, "max_batch": 1, "rows": 8, ...}, ...]}

The first entry whose conditions hold counts; see tuning.first_match. `tile_k` is ProductTile.k.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from pdlab.kernels.tuning import Tuning, first_match, table

MAX_ROWS = 64  # activation rows up to which the fused kernels run; from there on products are bound by more than bytes


@dataclass(frozen=True)
class ProductTile:
    rows: int  # weight rows a program holds; a power of two, partners included
    k: int  # elements of each row that a step of the loop takes
    split: int  # programs that share a row's elements
    ahead: int  # tiles loaded before waiting for the kernel launched before: 1 or 2 with one activation row, else 0
    fetch: int  # tiles asked into L2 before that wait, behind those loaded; 0 or a power of two
    warps: int
    stages: int
    pdl: bool = False  # programmatic dependent launch; Hopper and later
    tma: bool = False  # tiles by the copy engine; Hopper, several activation rows: staged_product, or the vocabulary's product
    hint: bool = True  # weights that the copy engine brings are the first to leave L2, see copy_hints


@dataclass(frozen=True)
class RingTile:
    """Of a ring_product: one activation row, Hopper."""

    panels: int  # of 64 columns of both halves of a tile that a stage holds: 16 KB each
    stages: int
    pdl: bool = True
    hint: bool = True  # weights are the first to leave L2, see copy_hints
    ahead: int = 0  # stages' worth of the next product's weights that a program asks into L2 before it waits


def columns_of(batch: int) -> int:
    """Activation rows as the kernels hold them: 1, or a power of two from 16 on."""
    return 1 if batch == 1 else max(16, 1 << (batch - 1).bit_length())


def product_tile(tuning: Tuning, op: str, outputs: int, k: int, batch: int) -> ProductTile:
    """`outputs` weight rows of `k` elements, `batch` activation rows."""
    entry = first_match(table(tuning.device).get("product_tiles", []), op=op, outputs=outputs, k=k, batch=batch)
    if entry:
        given = {"k" if name == "tile_k" else name: value for name, value in entry.items()}
        return ProductTile(**{f.name: given[f.name] for f in fields(ProductTile) if f.name in given} | {"k": entry["tile_k"]})
    return product_rule(tuning, op, outputs, k, batch)


def ring_tile(tuning: Tuning | None, op: str, outputs: int, k: int) -> RingTile | None:
    """For one row: the measured table's "ring_tiles", else a rule; None where that table prefers no ring (`stages` 0)."""
    entry = tuning and first_match(table(tuning.device).get("ring_tiles", []), op=op, outputs=outputs, k=k)
    if entry:
        tile = RingTile(**{f.name: entry[f.name] for f in fields(RingTile) if f.name in entry})
        return tile if tile.stages else None
    return ring_rule(k)


def ring_rule(k: int) -> RingTile:
    """192 KB of weights on their way, or what x leaves room for: one program a multiprocessor.

    With half of that the next kernel's program is resident beside, but two programs of one kernel may share a multiprocessor
    then, and another gets none: llama-3-8b's layers took 3.7 ms instead of 3.2.
    """
    panels = 2 if k > 1024 else 1  # a sixteenth of a row is all there is to copy
    return RingTile(panels, max(2, min(12 // panels, ((226 << 10) - 2 * k) // (panels << 14))))


def product_rule(tuning: Tuning, op: str, outputs: int, k: int, batch: int) -> ProductTile:
    """Enough programs to fill the device twice, each with tens of kilobytes of weights in flight."""
    pdl = tuning.capability >= (9, 0)
    wide = 1 << (k - 1).bit_length()
    columns = columns_of(batch)
    if columns == 1:
        tile_k = min(2048 if k % 2048 == 0 and outputs < 16384 else 1024, wide)
        rows = 8 if k <= 2048 else 4
        return ProductTile(rows, tile_k, 1, 2 if k >= 8192 else 1, 0, 4 if k <= 2048 else 8, 1, pdl)
    big = tuning.shared_bytes > (128 << 10)
    # wide batches take their x along for each tile, so they want tall ones; results and their noise take registers too
    rows, tile_k = (64, 128) if columns <= 16 or (columns <= 64 and outputs < 256 * tuning.multiprocessors) else (128, 64)
    if not big and columns > 64:
        rows, tile_k = 64, 64
    warps = 4 if rows * columns <= 64 * 64 else 8
    if columns > 128 and tuning.capability < (9, 0):
        warps = 16  # or products and noise do not find room in registers
    tile_k = max(16, min(wide, tile_k))
    stages = (4 if columns <= 64 else 3) if big else 3 if columns <= 64 else 2
    # fewer registers: two programs are resident, and one reads while the other samples
    tma = op == "projection_sample" and tuning.capability == (9, 0) and columns > 64 and k % 8 == 0
    split, programs = 1, (3 if columns <= 32 else 2) * tuning.multiprocessors
    while split < 8 and outputs // rows * split * 2 <= programs and k // (tile_k * split * 2) >= 4:
        split *= 2
    if columns == 64 and outputs // rows * split > tuning.multiprocessors:
        stages = min(stages, 3)  # room for two programs: a second wave would cost more than a fourth stage brings
    fetch = 512 // tile_k if pdl and 512 * split <= k else 0
    return ProductTile(rows, tile_k, split, 0, fetch, warps, stages, pdl, tma)
