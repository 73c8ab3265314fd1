"""attention(q, view) by this project's kernels: which of the two a step needs, with which tiles and workspace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pdlab.kernels.flash_decode import Workspace, flash_decode
from pdlab.kernels.flash_prefill import flash_prefill
from pdlab.kernels.kv_view import KVView
from pdlab.kernels.tuning import DecodeRing, DecodeTile, Tuning

ROWS = 64  # most query rows (tokens x heads of a group) that go through the decode kernel


class TritonAttention:
    """Attention of one model's layers. Holds the decode kernel's workspace, so steps must not overlap on two streams.

    Single queries go to the decode kernel and longer chunks to the prefill kernel; each skips the other's requests on the
    device, so a mixed step is two launches and nothing is gathered or split.
    """

    def __init__(self, *, heads: int, kv_heads: int, head_dim: int, max_requests: int, device: torch.device, tuning: Tuning):
        self.heads, self.kv_heads, self.head_dim, self.device, self.tuning = heads, kv_heads, head_dim, device, tuning
        self.workspace = self._make_workspace(heads // kv_heads, max_requests)
        self._outgrown: list[Workspace] = []
        self._tiles: dict[tuple[Any, ...], Any] = {}

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
        requests = len(view.seq_lens)
        lens = view.host_lens
        group = self.heads // self.kv_heads
        if view.max_q <= 1 or view.max_q * group <= ROWS:
            short = view.max_q if view.max_q <= 1 else 1 << (view.max_q - 1).bit_length()
        else:
            short = 1 if not lens or any(n == 1 for n, _ in lens) else 0
        # rows of no request (padding) must still be finite: the model goes on computing with them
        whole = sum(n for n, _ in lens) == len(q) if lens else len(q) == requests
        out = torch.empty_like(q, memory_format=torch.contiguous_format) if whole else q.new_zeros(q.shape)
        if short:
            self._decode(q, view, max(short, 1), out, prefetch)
        if view.max_q > max(short, 1):
            self._prefill(q, view, short + 1, out)
        return out

    def _prefill(self, q: torch.Tensor, view: KVView, min_q: int, out: torch.Tensor) -> None:
        settings: dict[str, Any] = {"min_q": min_q, "l2_bytes": self.tuning.l2_bytes // 2, "out": out}
        facts = {"group": self.heads // self.kv_heads, "kv_heads": self.kv_heads, "batch": len(view.seq_lens)}
        page = view.page_size if view.kind == "paged" else 0
        key = (view.max_q, page, len(view.seq_lens))
        hopper = self._tile(("hopper", *key), lambda: self.tuning.hopper(self.head_dim, view.max_q, page=page, **facts))
        if hopper is not None:
            from pdlab.kernels.flash_prefill_hopper import fits, flash_prefill_hopper

            if fits(q, view):
                flash_prefill_hopper(q, view, hopper, **settings)
                return
        tile = self._tile(("prefill", *key), lambda: self.tuning.prefill(self.head_dim, view.max_q, page, **facts))
        flash_prefill(q, view, tile, **settings)

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
