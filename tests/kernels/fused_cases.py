"""Small layers and batches on which fused operations are held against float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from pdlab.kernels.fused_ops import FusedOps
from pdlab.kernels.kv_view import KVView
from pdlab.kernels.ops import HeadWeights, LayerWeights, NormWeights, RopeTable, SamplingBatch
from pdlab.kernels.tuning import Tuning


@dataclass
class Case:
    tokens: int
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    ffn: int
    gated: bool = True
    layer_norm: bool = False
    biases: bool = False
    rope: bool = True
    qk_norm: bool = False
    page: int = 7
    dtype: str = "float32"
    device: str = "cpu"
    seed: int = 0

    def make(self) -> tuple[torch.Tensor, LayerWeights, RopeTable | None, KVView, dict[str, torch.Tensor]]:
        g = torch.Generator().manual_seed(self.seed)
        dtype = getattr(torch, self.dtype)

        def rand(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (scale * torch.randn(shape, generator=g)).to(dtype).to(self.device)

        def norm(size: int) -> NormWeights:
            return NormWeights(1 + rand(size, scale=0.2), rand(size, scale=0.2) if self.layer_norm else None, 1e-5)

        def linear(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor | None]:
            return rand(rows, columns, scale=columns**-0.5), rand(rows) if self.biases else None

        qkv = linear((self.heads + 2 * self.kv_heads) * self.dim, self.hidden)
        out = linear(self.hidden, self.heads * self.dim)
        up = linear(self.ffn * (2 if self.gated else 1), self.hidden)
        down = linear(self.hidden, self.ffn)
        head_norms = [NormWeights(1 + rand(self.dim, scale=0.2), None, 1e-6) if self.qk_norm else None for _ in "qk"]
        w = LayerWeights(norm(self.hidden), *qkv, *head_norms, *out, norm(self.hidden), *up, *down)
        angle = torch.arange(100.0)[:, None] * torch.rand(self.dim // 2, generator=g)
        rope = RopeTable(angle.cos().to(self.device), angle.sin().to(self.device)) if self.rope else None
        pages = -(-self.tokens // self.page) + 2
        slots = torch.randperm(pages * self.page, generator=g)[: self.tokens].to(self.device)
        cache = [torch.full((pages, self.kv_heads, self.page, self.dim), 7.0, dtype=dtype, device=self.device) for _ in "kv"]
        positions = torch.randint(0, 100, (self.tokens,), generator=g).to(self.device)
        none = torch.zeros(0, dtype=torch.int32, device=self.device)
        view = KVView("paged", self.page, *cache, none, none.long(), none, none, slots, positions, 1, 1)
        more = {
            "attn": rand(self.tokens, self.heads, self.dim),
            "u": rand(self.tokens, self.ffn),
        }
        return 3 * rand(self.tokens, self.hidden) + 1, w, rope, view, more


def double(item: Any) -> Any:
    """The same weights and tensors in float64, integers as they are."""
    if isinstance(item, torch.Tensor):
        return item.double() if item.is_floating_point() else item
    if hasattr(item, "__dataclass_fields__"):
        return replace(item, **{name: double(value) for name, value in vars(item).items()})
    return item


def exact_norm(x: torch.Tensor, w: NormWeights) -> torch.Tensor:
    if w.bias is not None:
        x = x - x.mean(-1, keepdim=True)
    y = x / (x.square().mean(-1, keepdim=True) + w.eps).sqrt() * w.weight
    return y if w.bias is None else y + w.bias


def exact(case: Case) -> dict[str, torch.Tensor]:
    """Every operation's result in float64, from the formulas."""
    *made, others = case.make()
    x, w, rope, view = (double(item) for item in made)
    more = {name: double(value) for name, value in others.items()}

    def linear(y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return y @ weight.T + (0.0 if bias is None else bias)

    packed = linear(exact_norm(x, w.attn_norm), w.qkv, w.qkv_bias).view(case.tokens, -1, case.dim)
    q, k, v = packed.split((case.heads, case.kv_heads, case.kv_heads), dim=1)
    if w.q_norm is not None:
        q, k = exact_norm(q, w.q_norm), exact_norm(k, w.k_norm)
    if rope is not None:
        cos, sin = rope.cos[view.positions][:, None], rope.sin[view.positions][:, None]

        def rotate(t: torch.Tensor) -> torch.Tensor:
            a, b = t.chunk(2, -1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

        q, k = rotate(q), rotate(k)
    page, row = view.slots // case.page, view.slots % case.page
    view.k[page, :, row], view.v[page, :, row] = k, v

    def activate(up: torch.Tensor) -> torch.Tensor:
        if not case.gated:
            return torch.nn.functional.gelu(up, approximate="tanh")
        gate, value = up.chunk(2, -1)
        return gate * gate.sigmoid() * value

    up = activate(linear(exact_norm(x, w.mlp_norm), w.up, w.up_bias))
    out = x + linear(more["attn"].flatten(1), w.out, w.out_bias)
    behind = linear(exact_norm(out, w.mlp_norm), w.up, w.up_bias)
    return {
        "up behind out": activate(behind),
        "q": q,
        "k": view.k,
        "v": view.v,
        "out": out,
        "up": up,
        "down": x + linear(more["u"], w.down, w.down_bias),
    }


def make_ops(case: Case, tile: Callable[..., Any] | None = None, **options: Any) -> FusedOps:
    device = torch.device(case.device)
    tuning = Tuning.of_device() if device.type == "cuda" else Tuning("cpu", (8, 0), 4, 32 << 20)
    ops = FusedOps([], "plain", case, 1, device, case.dtype, tuning, **options)
    if tile is not None:
        ops.tile = tile  # type: ignore[method-assign]
    return ops


def errors(case: Case, tile: Callable[..., Any] | None, **options: Any) -> dict[str, float]:
    """Largest error of each operation's result as a share of the result's largest value; `tile` None: the rule's."""
    import pdlab.kernels.fused_ops as fused_ops

    ops = make_ops(case, tile, **options)
    x, w, rope, view, more = case.make()
    before = fused_ops.MAX_ROWS
    try:
        if tile is None and case.device == "cpu":
            fused_ops.MAX_ROWS = 0
        for _ in range(2):  # the second launch finds what the first left behind
            got = {
                "q": ops.norm_qkv_rope(x, w, rope, view),
                "up behind out": ops.norm_mlp_up(ops.out_residual(more["attn"], x, w), w),
                "out": ops.out_residual(more["attn"], x, w),
                "up": ops.norm_mlp_up(x, w),
                "down": ops.down_residual(more["u"], x, w),
            }
    finally:
        fused_ops.MAX_ROWS = before
    got |= {"k": view.k, "v": view.v}
    true = exact(case)
    return {name: float((got[name].double() - t).abs().max() / t.abs().max()) for name, t in true.items()}


def sampling_case(
    seed: int, rows: int, vocab: int, hidden: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[torch.Tensor, HeadWeights, SamplingBatch]:
    """Rows of mixed temperatures, the first of them greedy."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, hidden, generator=g).to(dtype).to(device)
    weight = (3 * hidden**-0.5 * torch.randn(vocab, hidden, generator=g)).to(dtype).to(device)
    head = HeadWeights(NormWeights((1 + 0.2 * torch.randn(hidden, generator=g)).to(dtype).to(device), None, 1e-5), weight)
    ones = torch.ones(rows, device=device)
    temperature = torch.tensor([(0.0, 0.7, 1.3)[i % 3] for i in range(rows)], device=device)
    number = torch.arange(rows, device=device)
    sampling = SamplingBatch(temperature, ones.int() * 0, ones, ones * 0, ones, number * 1234567, number, None, True, False, -1)
    return x, head, sampling
