"""attention(q, view) by this project's kernels: which of the two a step needs, with which tiles and workspace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pdlab.kernels.flash_decode import Workspace, flash_decode
from pdlab.kernels.flash_prefill import flash_prefill
from pdlab.kernels.kv_view import KVView
from pdlab.kernels.tuning import DecodeRing, DecodeTile, PrefillTile, Tuning

ROWS = 64  # most query rows (tokens x heads of a group) that go through the decode kernel
CACHE = 256  # longest cache that short chunks walk in the prefill kernel, which cannot share one out


@dataclass
class Step:
    """What the layers of a step have in common. `lens` is the step's own tuple: the same object, the same step."""

    lens: tuple[tuple[int, int], ...]
    seen: tuple[Any, ...]
    short: int  # the decode kernel takes requests of up to so many queries; 0: there are none
    whole: bool  # every row is some request's
    hopper: Any = None  # the warp-specialized kernels' launch, once it is known
    plain: PrefillTile | None = None  # the plain kernel's tile, once it is known that this kernel runs


class TritonAttention:
    """Attention of one model's layers. Holds the kernels' workspaces, so steps must not overlap on two streams.

    Single queries go to the decode kernel and longer chunks to the prefill kernel; each skips the other's requests on the
    device, so a mixed step is two launches and nothing is gathered or split.
    """

    def __init__(self, *, heads: int, kv_heads: int, head_dim: int, max_requests: int, device: torch.device, tuning: Tuning):
        self.heads, self.kv_heads, self.head_dim, self.device, self.tuning = heads, kv_heads, head_dim, device, tuning
        self.workspace = self._make_workspace(heads // kv_heads, max_requests)
        self._outgrown: list[Workspace] = []
        self._tiles: dict[tuple[Any, ...], Any] = {}
        self._step: Step | None = None
        self._counter = torch.zeros(1, dtype=torch.int32, device=device)  # the warp-specialized prefill kernels'

    def _make_workspace(self, rows: int, requests: int) -> Workspace:
        programs = self.tuning.most_decode_programs(self.head_dim)
        return Workspace.create(
            self.device, programs=programs, rows=rows, head_dim=self.head_dim, segments=requests * self.kv_heads
        )

    def _tile(self, key: tuple[Any, ...], look_up: Callable[[], Any]) -> Any:
        """A step asks the same of every layer, and going through a table takes longer than launching a kernel."""
        if key not in self._tiles:
            if len(self._tiles) > 4096:
                self._tiles.clear()
            self._tiles[key] = look_up()
        return self._tiles[key]

    def __call__(self, q: torch.Tensor, view: KVView, prefetch: torch.Tensor | None = None) -> torch.Tensor:
        """`prefetch`: what the next kernel reads; single queries bring it into the L2 cache on the side, where they can."""
        step = self._step
        seen = (q.shape, q.stride(), view.max_q, view.max_kv, view.page_size, view.kind, view.seq_lens.shape[0])
        if step is None or step.lens is not view.host_lens or step.seen != seen:
            step = self._step = self._look_at(q, view, seen)
        out = torch.empty_like(q, memory_format=torch.contiguous_format) if step.whole else q.new_zeros(q.shape)
        if step.short:
            self._decode(q, view, step.short, out, prefetch)
        if view.max_q > max(step.short, 1):
            self._prefill(q, view, step, out)
        return out

    def _look_at(self, q: torch.Tensor, view: KVView, seen: tuple[Any, ...]) -> Step:
        """What is asked once a step: going through hundreds of lengths in every layer takes longer than the launches."""
        lens, group = view.host_lens, self.heads // self.kv_heads
        if view.max_q <= 1 or (view.max_q * group <= ROWS and not self._half_a_tile(view)):
            short = view.max_q if view.max_q <= 1 else 1 << (view.max_q - 1).bit_length()
        else:
            short = 1 if not lens or any(n == 1 for n, _ in lens) else 0
        # rows of no request (padding) must still be finite: the model goes on computing with them
        whole = sum(n for n, _ in lens) == q.shape[0] if lens else q.shape[0] == view.seq_lens.shape[0]
        return Step(lens, seen, short, whole)

    def _prefill(self, q: torch.Tensor, view: KVView, step: Step, out: torch.Tensor) -> None:
        if step.plain is None and self.tuning.capability == (9, 0):
            from pdlab.kernels.flash_prefill_hopper import fits, launch

            step.hopper = step.hopper or self._plan(q, view, step)
            if step.hopper is not None and fits(q, view):
                launch(step.hopper, q, view, out, self._counter)
                return
        step.plain = step.plain or self.tuning.prefill(self.head_dim, view.max_q, **self._facts(view))
        flash_prefill(q, view, step.plain, min_q=step.short + 1, l2_bytes=self.tuning.l2_bytes // 2, out=out)

    def _half_a_tile(self, view: KVView) -> bool:
        """Whether the chunks are short, but fill half of a tile of the warp-specialized kernels and have no long cache to share
        out: 64 tokens of 32 heads take those 4.7 us on an H200, the decode kernel 8.7."""
        rows = view.max_q * self.heads // self.kv_heads
        return (
            2 * rows > ROWS
            and view.max_kv <= CACHE
            and self.tuning.hopper(self.head_dim, view.max_q, **self._facts(view)) is not None
        )

    def _facts(self, view: KVView) -> dict[str, int]:
        page = view.page_size if view.kind == "paged" else 0
        return {"page": page, "batch": view.seq_lens.shape[0], "group": self.heads // self.kv_heads, "kv_heads": self.kv_heads}

    def _plan(self, q: torch.Tensor, view: KVView, step: Step) -> Any:
        """The warp-specialized kernels' launch; None where the table names the plain kernel."""
        from pdlab.kernels.flash_prefill_hopper import plan

        tile = self.tuning.hopper(self.head_dim, view.max_q, **self._facts(view))
        return tile and plan(q, view, tile, min_q=step.short + 1, l2_bytes=self.tuning.l2_bytes // 2)

    def _decode(self, q: torch.Tensor, view: KVView, max_q: int, out: torch.Tensor, prefetch: torch.Tensor | None) -> None:
        from pdlab.kernels.flash_decode_ring import fits, flash_decode_ring

        rows = max_q * self.heads // self.kv_heads
        facts = {"kv": view.max_kv, "batch": len(view.seq_lens), "kv_heads": self.kv_heads}
        facts["page"] = view.page_size if view.kind == "paged" else 0
        with_ring = max_q == 1 and fits(q, view)

        def look_up() -> DecodeRing | DecodeTile:
            ring = self.tuning.ring(self.head_dim, rows, **facts) if with_ring else None
            return ring or self.tuning.decode(self.head_dim, rows, **facts)

        tile = self._tile(("decode", rows, with_ring, *facts.values()), look_up)
        need = {
            "programs": tile.blocks_per_sm * self.tuning.multiprocessors,
            "rows": rows,
            "head_dim": self.head_dim,
            "segments": len(view.seq_lens) * self.kv_heads,
        }
        if not self.workspace.fits(**need):
            self._outgrown.append(self.workspace)  # captured graphs go on using it
            self.workspace = self._make_workspace(rows, len(view.seq_lens))
        if isinstance(tile, DecodeRing):
            flash_decode_ring(q, view, self.workspace, tile, need["programs"], out=out, prefetch=prefetch)
        else:
            flash_decode(q, view, self.workspace, tile, need["programs"], max_q=max_q, out=out)
