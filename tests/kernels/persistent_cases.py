"""Small stacks of layers on which the persistent decode kernel is held against the plain operations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from pdlab.kernels.decode_stack import DecodeStack, StackTile
from pdlab.kernels.kv_view import KVView
from pdlab.kernels.ops import LayerWeights, NormWeights, RopeTable
from pdlab.kernels.persistent_decode import WRAP
from pdlab.kernels.reference import ReferenceOps

SHAPES: dict[str, dict[str, Any]] = {
    "small": {"hidden": 256, "heads": 4, "kv_heads": 2, "dim": 64, "ffn": 640},
    "llama-1b": {"hidden": 2048, "heads": 32, "kv_heads": 8, "dim": 64, "ffn": 8192},
    "llama-3-8b": {"hidden": 4096, "heads": 32, "kv_heads": 8, "dim": 128, "ffn": 14336},
    "llama-2-7b": {"hidden": 4096, "heads": 32, "kv_heads": 32, "dim": 128, "ffn": 11008},
}
TOLERANCE = 2.5e-2  # q, u, x and y of every layer are rounded to 8 bits, by the plain operations too


@dataclass
class StackCase:
    layers: int = 2
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    ffn: int = 128
    length: int = 21  # tokens in the cache, the new one included
    page: int = 8
    kind: str = "paged"
    dtype: str = "float32"
    device: str = "cpu"
    programs: int = 1
    tile: dict[str, Any] | None = None
    seed: int = 0

    @property
    def head_dim(self) -> int:
        return self.dim

    def make(self) -> tuple[torch.Tensor, list[LayerWeights], RopeTable, KVView]:
        g = torch.Generator().manual_seed(self.seed)
        dtype = getattr(torch, self.dtype)

        def rand(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (scale * torch.randn(shape, generator=g)).to(dtype).to(self.device)

        def linear(rows: int, columns: int) -> torch.Tensor:
            return rand(rows, columns, scale=columns**-0.5)

        def norm() -> NormWeights:
            return NormWeights(1 + rand(self.hidden, scale=0.2), None, 1e-5)

        width, packed = self.heads * self.dim, (self.heads + 2 * self.kv_heads) * self.dim
        layers = [
            LayerWeights(
                norm(), linear(packed, self.hidden), None, None, None, linear(self.hidden, width), None,
                norm(), linear(2 * self.ffn, self.hidden), None, linear(self.hidden, self.ffn), None,
            )
            for _ in range(self.layers)
        ]  # fmt: skip
        angle = torch.arange(float(self.length + 5))[:, None] * torch.rand(self.dim // 2, generator=g)
        rope = RopeTable(angle.cos().to(self.device), angle.sin().to(self.device))
        return rand(1, self.hidden), layers, rope, self.view(g, rand)

    def view(self, g: torch.Generator, rand: Any) -> KVView:
        pages = -(-(self.length + 5) // self.page) + 2
        k, v = (rand(self.layers, pages, self.kv_heads, self.page, self.dim) for _ in "kv")
        table = torch.randperm(pages, generator=g).to(torch.int32)
        base, last = 5, self.length - 1
        slot = int(table[last // self.page]) * self.page + last % self.page if self.kind == "paged" else base + last

        def numbers(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=self.device)

        return KVView(
            kind=self.kind, page_size=self.page, k=k, v=v, block_table=table[None].to(self.device), base=numbers(base),
            seq_lens=numbers(self.length, dtype=torch.int32), cu_q=numbers(0, 1, dtype=torch.int32), slots=numbers(slot),
            positions=numbers(last), max_q=1, max_kv=self.length, host_lens=((1, self.length),),
        )  # fmt: skip

    def stack(self, layers: list[LayerWeights]) -> DecodeStack:
        heads = {"heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.dim}
        return DecodeStack(layers, **heads, programs=self.programs, tile=StackTile(**(self.tile or {})))


def on_device(shape: str, **more: Any) -> StackCase:
    """A case of a real model's sizes, a program for each multiprocessor."""
    programs = torch.cuda.get_device_properties(0).multi_processor_count
    settings = {"programs": programs, "page": 16, "dtype": "bfloat16", "device": "cuda"}
    return StackCase(**SHAPES[shape] | settings | more)


def at_length(view: KVView, length: int) -> KVView:
    """The same buffers, which now describe a request of `length` tokens; 0: nobody's, as a graph's rows that fill it up are."""
    last = max(length - 1, 0)
    slot = int(view.base) + last
    if view.kind == "paged":
        slot = int(view.block_table[0, last // view.page_size]) * view.page_size + last % view.page_size
    view.seq_lens.fill_(length)
    view.positions.fill_(last)
    view.slots.fill_(slot)
    return replace(view, host_lens=((1, length),))


def leave_nothing_else(view: KVView, length: int) -> None:
    """NaN wherever the cache holds nothing of a request of `length` tokens yet, the newest one's place included."""
    page = view.page_size
    t = torch.arange(length - 1, device=view.k.device)
    slots = view.base + t if view.kind == "extent" else view.block_table[0, t // page].long() * page + t % page
    for cache in (view.k, view.v):
        kept = cache[:, slots // page, :, slots % page].clone()
        cache.fill_(float("nan"))
        cache[:, slots // page, :, slots % page] = kept


def apart(mine: torch.Tensor, right: torch.Tensor) -> float:
    """The largest difference as a share of the largest value; infinite where one is NaN."""
    worst = float((mine.double() - right.double()).abs().max() / right.double().abs().max())
    return worst if worst == worst else float("inf")


def exact(x: torch.Tensor, layers: list[LayerWeights], rope: RopeTable, view: KVView) -> torch.Tensor:
    """The residual stream by the plain operations; writes the cache of `view`."""
    ops = ReferenceOps()
    for i, w in enumerate(layers):
        here = view.layer(i)
        x = ops.out_residual(ops.attention(ops.norm_qkv_rope(x, w, rope, here), here), x, w)
        x = ops.down_residual(ops.norm_mlp_up(x, w), x, w)
    return x


def stack_errors(case: StackCase) -> dict[str, float]:
    """Largest error of x, K and V as a share of the largest value, over two launches; and what must be zero between them."""
    x, layers, rope, view = case.make()
    stack = case.stack(layers)
    k, v = view.k.clone(), view.v.clone()
    wanted = exact(x, layers, rope, view)
    k_wanted, v_wanted = view.k.clone(), view.v.clone()
    found = {"counters": 0.0}
    before = x.clone()
    for _ in range(2):
        view.k.copy_(k)
        view.v.copy_(v)
        got = stack(x, rope, view)
        for name, mine, right in (("x", got, wanted), ("k", view.k, k_wanted), ("v", view.v, v_wanted), ("input", x, before)):
            found[name] = max(found.get(name, 0.0), apart(mine, right))
        found["counters"] += float(stack.count.abs().sum() + stack.failed.abs().sum())
    return found


def given_up(case: StackCase) -> dict[str, Any]:
    """A launch whose programs do not wait long enough for one another, and the one after it."""
    x, layers, rope, view = case.make()
    stack = case.stack(layers)
    wanted = stack(x, rope, view)
    patient = stack.tile
    stack.tile = replace(patient, patience=1)  # on a device one look passes before the others have so much as begun
    lost = stack(x, rope, view)
    stack.tile = patient
    after = stack(x, rope, view)
    return {
        "lost": bool(lost.isnan().all()), "failed": int(stack.failed), "after": float((after - wanted).abs().max()),
        "left": int(stack.count.abs().sum()),
    }  # fmt: skip


def begun_again(case: StackCase) -> list[tuple[int, float]]:
    """Launches about the one at which epochs begin again: the epoch behind each, and how far its stream is from the first's."""
    x, layers, rope, view = case.make()
    stack = case.stack(layers)
    wanted = stack(x, rope, view).clone()
    stack.epoch.fill_(WRAP.value - 2 * len(layers))
    found = []
    for _ in range(4):
        apart = float((stack(x, rope, view) - wanted).abs().max())
        found.append((int(stack.epoch), apart))
    return found
