"""Tiles of the attention kernels: from this device's measured table, else by a rule.

`data/tuning/<device>.json` holds what `pdlab bench attention_tiles` found, and the user's own file of that name under
$PDLAB_HOME extends it: its entries come first.

    {"attention_tiles": [{"kind": "decode", "head_dim": 128, "max_rows": 16, "block_n": 64, "warps": 4, ...}, ...],
     "attention_dispatch": [{"phase": "prefill", "dtype": "bfloat16", "max_q": 512, "backend": "sdpa"}, ...]}

The first entry whose conditions all hold counts; a condition that an entry leaves out always holds, `max_...` and `min_...` are
bounds and anything else must be equal. `measured` says in which run, with which commit, when and where. Without an entry the
rule decides: the largest tiles that leave the registers and the shared memory of this capability enough for the loads in
flight. No torch here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, TypeVar

from pdlab.core.errors import MeasurementError
from pdlab.core.paths import data_dir, home_dir

# Shared memory of a multiprocessor, bytes (CUDA programming guide, table of compute capabilities)
SHARED = {(8, 0): 164 << 10, (8, 6): 100 << 10, (8, 9): 100 << 10, (9, 0): 228 << 10, (10, 0): 228 << 10, (12, 0): 100 << 10}


@dataclass(frozen=True)
class DecodeTile:
    block_n: int  # tokens of K and V that a step of the loop takes
    warps: int
    stages: int  # tiles of K and V alive at once, the one being computed with included
    blocks_per_sm: int  # programs that are resident together; the grid is this times the multiprocessors
    pdl: bool = False  # programmatic dependent launch; Hopper and later


@dataclass(frozen=True)
class DecodeRing:
    """The decode kernel's that keeps a ring of asynchronous copies. A tile is 16 keys a warp."""

    warps: int
    stages: int  # tiles of K and V in the ring
    blocks_per_sm: int  # the grid is this times the multiprocessors
    least: int = 4  # tiles a program, below which only one program a multiprocessor shares the work
    pdl: bool = False  # programmatic dependent launch; Hopper and later


@dataclass(frozen=True)
class PrefillTile:
    block_m: int  # query rows (tokens x heads of a group)
    block_n: int
    warps: int
    stages: int

    def shared_bytes(self, head_dim: int, itemsize: int = 2) -> int:
        """Shared memory of a block: the queries and `stages` tiles of K and of V."""
        return (self.block_m + 2 * self.stages * self.block_n) * head_dim * itemsize


@dataclass(frozen=True)
class HopperTile:
    """The warp-specialized prefill kernels': flash_prefill_turns', or with `blocks` flash_prefill_tasks'."""

    consumers: int  # warpgroups of 64 query rows: 2 or 3
    block_n: int
    stages: int  # tiles of K and V in the ring
    turns: int = 1  # consumers take turns at starting products: 1 a tile's two together, 2 the scores only, 0 not at all
    polynomial: int = 0  # one of so many exponentials is a polynomial on the arithmetic units: 8, or 0 for none
    by_request: int = 0  # prompts up to this length run request by request, longer ones the longest first
    blocks: int = 0  # blocks of 64 query rows in an item whose K and V stay in the ring
    share: int = 1  # query heads in such an item
    places: int = 2  # tiles of queries a consumer: the one it works on and those fetched ahead; more than 2 only with `blocks`
    pack: int = 1  # query heads of a group whose rows share a tile of 64, without `blocks`: 1, 2, 4 or 8
    overlap: int = 0  # what runs under what in a consumer, without `blocks`: 0 or 1, see flash_prefill_turns
    caches: int = 1  # halves of L2 that K and V of the heads that run together may take, without `blocks`: 1 or 2

    def __post_init__(self) -> None:
        # a block has sixteen hardware barriers; beyond them the device meets an illegal instruction, and its context is lost
        if not self.blocks and self.stages > 6:
            raise ValueError(f"a ring of {self.stages} stages needs more hardware barriers than are left: at most 6")


Tile = TypeVar("Tile", DecodeTile, DecodeRing, PrefillTile, HopperTile)


@cache
def table(device: str) -> dict[str, list[dict[str, Any]]]:
    """The measured entries of a device slug, the user's own before the shipped; empty where there are none."""
    merged: dict[str, list[dict[str, Any]]] = {}
    for base in (home_dir(), data_dir()):
        path = base / "tuning" / f"{device}.json"
        if not path.is_file():
            continue
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            for key, entries in content.items():
                if isinstance(entries, list):
                    merged.setdefault(key, []).extend(dict(entry) for entry in entries)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise MeasurementError(f"{path} is not a tuning table: {error}", "delete it or measure it again") from error
    return merged


def first_match(entries: list[dict[str, Any]], **facts: Any) -> dict[str, Any] | None:
    """The first entry that these facts satisfy: max_x and min_x bound fact x, any other key must equal the fact of its name."""

    def holds(key: str, value: Any) -> bool:
        bound, _, name = key.partition("_")
        if bound == "max" and name in facts:
            return facts[name] <= value
        if bound == "min" and name in facts:
            return facts[name] >= value
        return key not in facts or facts[key] == value

    return next((entry for entry in entries if all(holds(k, v) for k, v in entry.items())), None)


def _tile(kind: type[Tile], entry: dict[str, Any]) -> Tile:
    return kind(**{f.name: entry[f.name] for f in fields(kind) if f.name in entry})


@dataclass(frozen=True)
class Tuning:
    """What decides a tile. `device` is a slug; sizes are the device's own, in bytes."""

    device: str
    capability: tuple[int, int]
    multiprocessors: int
    l2_bytes: int

    @classmethod
    def of_device(cls, index: int = 0) -> Tuning:
        import torch

        from pdlab.hardware.specs import device_slug

        props = torch.cuda.get_device_properties(index)
        return cls(device_slug(props.name), (props.major, props.minor), props.multi_processor_count, props.L2_cache_size)

    @property
    def shared_bytes(self) -> int:
        """Of one multiprocessor; an unknown capability gets the least of its generation."""
        return SHARED.get(self.capability, 100 << 10)

    def decode(self, head_dim: int, rows: int, **facts: int) -> DecodeTile:
        """`rows`: query tokens times heads of a group. `facts` that entries may also ask for: `kv` (longest), `batch`,
        `kv_heads`, `page` (0 for extents); a fact that is not given keeps no entry from counting."""
        return self._measured(DecodeTile, "decode", head_dim=head_dim, rows=rows, **facts) or decode_rule(
            self.shared_bytes, head_dim, rows
        )

    def ring(self, head_dim: int, rows: int, **facts: int) -> DecodeRing | None:
        """Tile of the decode kernel with a ring; None where the capability or the head size has none, or the table names the
        plain kernel: of the entries of both kinds, the first that fits counts. `facts`: as `decode`."""
        if self.capability < (8, 0) or head_dim not in (64, 128):
            return None
        entries = [e for e in table(self.device).get("attention_tiles", []) if e.get("kind") in ("decode", "decode_ring")]
        entry = first_match(entries, head_dim=head_dim, rows=rows, **facts)
        if entry is None:
            return ring_rule(self.capability, self.shared_bytes, head_dim)
        return _tile(DecodeRing, entry) if entry["kind"] == "decode_ring" else None

    def prefill(self, head_dim: int, queries: int, page: int, **facts: int) -> PrefillTile:
        """`queries`: of the longest chunk; `page` 0 for extents. `facts`: `group`, `batch`, `kv_heads`."""
        return self._measured(PrefillTile, "prefill", head_dim=head_dim, queries=queries, page=page, **facts) or prefill_rule(
            self.capability, head_dim, queries
        )

    def hopper(self, head_dim: int, queries: int, **facts: int) -> HopperTile | None:
        """The warp-specialized kernels' tile; None where there is no such kernel, or where the table says that the plain one is
        faster (an entry with no consumers). `facts`: as `prefill`, and `page`."""
        if self.capability != (9, 0) or head_dim not in (64, 128):
            return None
        tile = self._measured(HopperTile, "prefill_hopper", head_dim=head_dim, queries=queries, **facts)
        if tile is None:
            return hopper_rule(head_dim, queries)
        return tile if tile.consumers else None

    def _measured(self, kind: type[Tile], name: str, **facts: Any) -> Tile | None:
        entry = first_match(table(self.device).get("attention_tiles", []), kind=name, **facts)
        return _tile(kind, entry) if entry else None

    def most_decode_programs(self, head_dim: int) -> int:
        """Programs of the largest grid that any of this head size's decode tiles asks for; sizes the workspace."""
        most = [decode_rule(self.shared_bytes, head_dim, rows).blocks_per_sm for rows in (1, 16, 32, 64)]
        most.append(ring_rule(self.capability, self.shared_bytes, head_dim).blocks_per_sm)
        for entry in table(self.device).get("attention_tiles", []):
            if entry.get("kind") in ("decode", "decode_ring") and entry.get("head_dim", head_dim) == head_dim:
                most.append(entry["blocks_per_sm"])
        return self.multiprocessors * max(most)


def decode_rule(shared_bytes: int, head_dim: int, rows: int) -> DecodeTile:
    """Two resident blocks, each with two tiles of K and V on their way while a third is computed with."""
    width = max(16, 1 << (head_dim - 1).bit_length())
    warps, blocks = (8, 1) if width > 128 or rows > 32 else (4, 2)
    for block_n, stages in ((64, 3), (32, 3), (16, 3)):
        on_their_way = 2 * (stages - 1) * block_n * width * 2
        if on_their_way + (10 << 10) <= shared_bytes // blocks:  # the rest: p, reductions, CUDA's own reserve
            break
    return DecodeTile(block_n, warps, stages, blocks)


def ring_rule(capability: tuple[int, int], shared_bytes: int, head_dim: int) -> DecodeRing:
    """Four warps, as many resident blocks as registers allow, and as many tiles as the shared memory holds of that many.

    The grid's blocks must be no fewer than fit: with room for more, some multiprocessors would take more blocks than others.
    """
    tile, exchange, reserved = 256 * head_dim, 64 * head_dim, 1 << 10
    for blocks in (3, 2, 1) if head_dim == 64 else (2, 1):
        stages = min(6, (shared_bytes // blocks - exchange - reserved) // tile)
        if stages >= 2:
            break
    return DecodeRing(4, stages, blocks, pdl=capability >= (9, 0))


def hopper_rule(head_dim: int, queries: int) -> HopperTile | None:
    """Short prompts: independent consumers, each with blocks of 64 rows of its own over K and V that stay in the ring; longer
    ones: pairs that take turns over tiles of 128 keys. None for other head sizes than 64 and 128."""
    if head_dim == 64:
        if queries <= 512:
            return (
                HopperTile(3, 64, 9, turns=0, blocks=4, share=4) if queries <= 256 else HopperTile(3, 64, 9, turns=0, blocks=8)
            )
        return HopperTile(2, 128, 4)
    if head_dim != 128:
        return None
    return HopperTile(2, 64, 4, turns=0, blocks=4, share=2, places=3) if queries <= 256 else HopperTile(2, 128, 2)


def prefill_rule(capability: tuple[int, int], head_dim: int, queries: int) -> PrefillTile:
    """Hopper's warpgroup products want 128 rows over two warpgroups; earlier ones hold operands in registers, so less fits.

    Short prompts have too few tiles to hide a start-up behind another's work: smaller tiles, more of them resident.
    """
    width = max(16, 1 << (head_dim - 1).bit_length())
    if capability[0] == 9:
        if width > 128:
            return PrefillTile(128, 32, 8, 2)
        if queries <= 256:
            return PrefillTile(64, 64 if width > 64 else 128, 4, 2)
        return PrefillTile(128, 128, 8, 2 if width > 64 else 3)
    if width > 128:
        return PrefillTile(64, 32, 8, 2)
    if width > 64:
        return PrefillTile(64, 32, 4, 2) if queries <= 256 else PrefillTile(128, 32, 8, 2)
    return PrefillTile(64, 64, 4, 2) if queries <= 256 else PrefillTile(128, 64, 8, 2)
