"""Decoding by torch.compile over a static cache, in the manner that gpt-fast made known: plain PyTorch, nothing by hand.

One decode step of one request: embed, the layers, greedy choice. Positions live on the device and the cache is as long as the
longest answer, with a mask for what is not yet there, so that every step is the same graph. The layer is compiled once for all
layers (they differ in their weights only, so a whole-model compilation would make the same kernels many times over), with
Inductor's coordinate descent, which turns a product with one row into a matrix-vector kernel; then the whole step is captured
in one CUDA graph. It is checked against the plain operations on the same cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from pdlab.kernels.ops import LayerWeights, NormWeights, RopeTable
from pdlab.kernels.reference import norm

if TYPE_CHECKING:
    from pdlab.hardware.probe import Machine
    from pdlab.models.loading import Loaded

SECONDS = 20.0  # with less left it is not begun; most of it is compilation
OPTIONS: dict[str, Any] = {"coordinate_descent_tuning": True}


def why_not(machine: Machine) -> str | None:
    return None if machine.is_gpu else "compiling takes longer than everything else on a CPU"


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def layer_step(
    x: torch.Tensor, w: LayerWeights, rope: RopeTable | None, position: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Residual stream [1, H] after one layer; `position` i64[1]; k, v [K, longest, D] are written at it."""
    kv_heads, longest, dim = k.shape
    heads = w.qkv.shape[0] // dim - 2 * kv_heads
    packed = F.linear(norm(x, w.attn_norm), w.qkv, w.qkv_bias).view(-1, dim)
    q, new_k, new_v = packed.split((heads, kv_heads, kv_heads))
    if w.q_norm is not None and w.k_norm is not None:
        q, new_k = norm(q, w.q_norm), norm(new_k, w.k_norm)
    if rope is not None:
        cos, sin = rope.cos[position], rope.sin[position]
        q, new_k = _rotate(q, cos, sin), _rotate(new_k, cos, sin)
    k.index_copy_(1, position, new_k.unsqueeze(1))
    v.index_copy_(1, position, new_v.unsqueeze(1))
    late = torch.arange(longest, device=x.device) > position
    grouped = q.view(kv_heads, heads // kv_heads, dim)
    scores = (grouped @ k.transpose(-1, -2)).float() * dim**-0.5
    weights = scores.masked_fill(late, -torch.inf).softmax(-1).to(v.dtype)
    x = x + F.linear((weights @ v).reshape(1, -1), w.out, w.out_bias)
    up = F.linear(norm(x, w.mlp_norm), w.up, w.up_bias)
    if w.up.shape[0] == w.down.shape[1]:
        up = F.gelu(up, approximate="tanh")
    else:
        gate, value = up.chunk(2, dim=-1)
        up = F.silu(gate) * value
    return x + F.linear(up, w.down, w.down_bias)


def choose(x: torch.Tensor, head_norm: NormWeights, proj: torch.Tensor) -> torch.Tensor:
    """The most likely next token, i64[1]."""
    return F.linear(norm(x, head_norm), proj).float().argmax(-1)


class Decoder:
    """One request on a static cache of random numbers, from position `prompt` on. `compiled` False: the same, eager."""

    def __init__(self, loaded: Loaded, prompt: int, new: int, seed: int, *, compiled: bool = True) -> None:
        self.model, self.prompt, self.new = loaded.model, prompt, new
        c, device = loaded.config, loaded.model.device
        g = torch.Generator(device).manual_seed(seed)
        shape = (c.num_layers, c.num_kv_heads, prompt + new, c.head_dim)
        self.k, self.v = (torch.randn(shape, generator=g, device=device).to(loaded.model.dtype) for _ in "kv")
        self.token = torch.full((1,), 7, dtype=torch.int64, device=device)
        self.position = torch.full((1,), prompt, dtype=torch.int64, device=device)
        self.layer: Callable[..., torch.Tensor] = layer_step
        self.choose: Callable[..., torch.Tensor] = choose
        self.settings = {"steps": new, "whole step": "CUDA graph", **OPTIONS}
        self._graph: Any = None
        if compiled:
            torch._dynamo.reset()
            self.layer = torch.compile(layer_step, fullgraph=True, dynamic=False, options=OPTIONS)
            self.choose = torch.compile(choose, fullgraph=True, dynamic=False, options=OPTIONS)

    def hidden(self) -> torch.Tensor:
        """Residual stream of the next token at the present position; its K and V are written."""
        x = self.model.weights.embed[self.token]
        if self.model.weights.positions is not None:
            x = x + self.model.weights.positions[self.position]
        for i, w in enumerate(self.model.layers):
            x = self.layer(x, w, self.model.rope, self.position, self.k[i], self.v[i])
        return x

    def step(self) -> None:
        head = self.model.head
        self.token.copy_(self.choose(self.hidden(), head.norm, head.proj))
        self.position.add_(1)

    def rewind(self) -> None:
        self.token.fill_(7)
        self.position.fill_(self.prompt)

    def check(self) -> None:
        """AssertionError unless the first step is what the plain operations make of the same cache."""
        from pdlab.bench._decode import relative_error

        plain = Decoder.__new__(Decoder)
        plain.__dict__.update(self.__dict__, layer=layer_step, k=self.k.clone(), v=self.v.clone())
        self.rewind()
        with torch.no_grad():
            error = relative_error(self.hidden(), plain.hidden().double())
        # roundings of 16 bits in another order add up over the layers
        if not error < 5e-2:
            raise AssertionError(f"the compiled step is wrong: relative error {error:.2e}")

    def capture(self) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(side):
            for _ in range(2):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        # the context in between restores the stream where the capture fails
        with torch.no_grad(), torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(self._graph):
            self.step()

    def seconds(self) -> float:
        """Seconds a token over `new` - 1 replays of the captured step."""
        self.rewind()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in "se")
        start.record()
        for _ in range(self.new - 1):
            self._graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / (self.new - 1)


def make(loaded: Loaded, prompt: int, new: int, seed: int) -> Decoder:
    """A compiled, checked and captured decoder."""
    decoder = Decoder(loaded, prompt, new, seed)
    decoder.check()
    decoder.rewind()
    decoder.capture()
    return decoder
