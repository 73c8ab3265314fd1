"""All layers of a decode step with one activation row as one kernel whose weights never stop coming. Compute capability 9.0.

For each layer, what five fused kernels do in turn (x is the residual stream, [H]):

    q, k, v = rope(norm(x) W_qkv^T), k and v into the cache;   a = attention(q);   x += a W_out^T
    u = silu(g) * v,  [g, v] = norm(x) W_up^T;                 x += u W_down^T

As many programs as multiprocessors are resident from beginning to end. Where a launch ended and the next began, programs wait
for one another by counters in L2 (a release by each that has stored its results, an acquire by each that will read them):

    after W_qkv, W_out, W_up, W_down   all programs for all: each of them reads the whole vector
    after attention                    for KV_HEADS arrivals: the last program of a head to finish combines that head's parts

Weights depend on nothing, so each program asks for its pieces into the L2 cache AHEAD turns before it multiplies them, across
products, layers and waits: memory has AHEAD * 32 KB a program to bring while they wait (8: 35 MB, 7.5 us on an H200).

Counters are zero between launches: the last program to leave clears them, as nobody can still be looking. A wait is bounded;
past its bound programs go on without waiting, the residual stream comes out as NaN, which sampling reports as a bad row, and
`Stack.failed` counts it. The launch is cooperative: the driver refuses a grid that would not be resident at once.

Bytes and floor: the layers' weights and the cached K and V once. Bound: bandwidth. LLaMA 1B: 1.95 GB, 420 us at 4.63 TB/s.
Oracle: reference.ReferenceOps, layer by layer. Twin for the interpreter: this kernel with one program, which waits for nobody.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pdlab.kernels.flash_decode import LOG2E
from pdlab.kernels.persistent_decode_phases import (
    arrive,
    ask,
    attention_phase,
    leave,
    place_of,
    qkv_phase,
    residual_phase,
    up_phase,
    wait,
)

if TYPE_CHECKING:
    from pdlab.kernels.kv_view import KVView
    from pdlab.kernels.ops import LayerWeights, RopeTable

OFFSETS_OF = ("qkv", "out", "up", "down", "attn_norm", "mlp_norm")  # a layer's six places in the table of offsets


@dataclass(frozen=True)
class StackTile:
    """How the kernel is cut. `lines` x `segment` weights are a piece; a lane asks for 64 of them."""

    lines: int = 128
    segment: int = 128
    stages: int = 4  # pieces on their way from L2 to shared memory
    ahead: int = 8  # pieces a program has asked for into L2 beyond the one it multiplies
    keys: int = 64  # cached tokens that attention takes at a time
    warps: int = 8
    fetch: bool = True  # False in the interpreter, which has no prefetch
    patience: int = 1 << 18  # looks at a counter before a wait gives up: about 0.2 s


@triton.jit(do_not_specialize=["layers", "parts", "ahead", "patience"])
def persistent_decode_kernel(
    X, OUT_X, W, OFFSETS, COS, SIN, POSITIONS, SLOTS, TABLE, BASE, LENGTHS, KC, VC, Q, ATTN, U, PART_O, PART_M, PART_L, COUNT,
    FAILED, kv_stride, table_stride, eps_attn, eps_mlp, scale_log2, layers, parts, ahead, patience,
    HIDDEN: tl.constexpr, FFN: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr,
    PAGED: tl.constexpr, PAGE: tl.constexpr, LINES: tl.constexpr, BK: tl.constexpr, SEG_H: tl.constexpr, SEG_W: tl.constexpr,
    SEG_F: tl.constexpr, PARTS: tl.constexpr, PARTS_PAD: tl.constexpr, GROUP_PAD: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, FETCH: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = HEADS * HEAD
    PACKED: tl.constexpr = (HEADS + 2 * KV_HEADS) * HEAD
    # weight rows of a piece, by their length
    R_H: tl.constexpr = LINES // SEG_H
    R_W: tl.constexpr = LINES // SEG_W
    R_F: tl.constexpr = LINES // SEG_F
    # a layer's pieces: where the products behind the first begin, and the next layer
    OUT: tl.constexpr = (PACKED + R_H - 1) // R_H
    UP: tl.constexpr = OUT + (HIDDEN + R_W - 1) // R_W
    DOWN: tl.constexpr = UP + (2 * FFN + R_H - 1) // R_H
    END: tl.constexpr = DOWN + (HIDDEN + R_F - 1) // R_F
    CUT: tl.constexpr = (LINES, BK, STAGES, FETCH)
    FIRST: tl.constexpr = (0, OUT, UP, DOWN, END)
    SIZES: tl.constexpr = (PACKED * HIDDEN, HIDDEN * WIDTH, 2 * FFN * HIDDEN, HIDDEN * FFN)
    STRIDES: tl.constexpr = (R_H * HIDDEN, R_W * WIDTH, R_H * HIDDEN, R_F * FFN)
    COUNTERS: tl.constexpr = 5 + KV_HEADS  # of a layer

    programs = tl.num_programs(0)
    line = (W, OFFSETS, layers * END, ahead * programs)
    for i in range(ahead):
        place = place_of(line, tl.program_id(0) + i * programs, FIRST)
        ask(line, place, SIZES, STRIDES, CUT)
    token = (tl.load(SLOTS), tl.load(POSITIONS), tl.load(LENGTHS))
    table = (TABLE, BASE, table_stride, scale_log2)
    partial = (PART_O, PART_M, PART_L)
    for layer in range(layers):
        count = COUNT + layer * COUNTERS
        far_layer = tl.cast(layer, tl.int64) * kv_stride  # a cache may hold more elements than 32 bits count
        cache = (KC + far_layer, VC + far_layer)
        residual = X
        if layer > 0:
            residual = OUT_X
            patience = wait(count - COUNTERS + 4, programs, patience)
        qkv_phase(residual, eps_attn, line, layer, token, COS, SIN, Q, cache, HIDDEN, SEG_H, HEADS, KV_HEADS, HEAD, PAGE, FIRST,
                  SIZES, STRIDES, CUT)  # fmt: skip
        arrive(count)
        patience = wait(count, programs, patience)
        attention_phase(Q, cache, table, partial, ATTN, count, token[2], parts, KV_HEADS, HEADS // KV_HEADS, GROUP_PAD, HEAD,
                        BLOCK_N, PARTS, PARTS_PAD, PAGED, PAGE)  # fmt: skip
        patience = wait(count + 1, KV_HEADS, patience)
        residual_phase(ATTN, residual, OUT_X, line, layer, 1, HIDDEN, WIDTH, SEG_W, FIRST, SIZES, STRIDES, CUT)
        arrive(count + 2)
        patience = wait(count + 2, programs, patience)
        up_phase(OUT_X, eps_mlp, U, line, layer, HIDDEN, FFN, SEG_H, FIRST, SIZES, STRIDES, CUT)
        arrive(count + 3)
        patience = wait(count + 3, programs, patience)
        residual_phase(U, OUT_X, OUT_X, line, layer, 3, HIDDEN, FFN, SEG_F, FIRST, SIZES, STRIDES, CUT)
        arrive(count + 4)
    leave(OUT_X, COUNT, FAILED, layers * COUNTERS, programs, patience, HIDDEN, LINES)


class Stack:
    """What the programs of the kernel meet at, for one model's layers: vectors between phases, partial results, counters.

    Kept between launches, so that a captured graph finds it where it was. Launches that share it must not run at the same time.
    """

    def __init__(
        self, layers: list[LayerWeights], *, heads: int, kv_heads: int, head_dim: int, programs: int, tile: StackTile,
        parts: int | None = None,
    ) -> None:  # fmt: skip
        """`programs` are all resident at once: no more than there are multiprocessors. `parts` of a head's cache, else as many
        as programs allow."""
        w = layers[0]
        device, dtype = w.qkv.device, w.qkv.dtype
        self.layers, self.heads, self.kv_heads, self.head_dim, self.tile = layers, heads, kv_heads, head_dim, tile
        self.programs, self.parts = programs, parts or most_parts(programs, heads, kv_heads, head_dim)
        base, size = w.qkv.data_ptr(), w.qkv.element_size()
        places = [[(tensor.data_ptr() - base) // size for tensor in _tensors(layer)] for layer in layers]
        self.offsets = torch.tensor(places, dtype=torch.int64, device=device)
        self.q, self.attn = (torch.empty(heads * head_dim, dtype=dtype, device=device) for _ in "qa")
        self.u = torch.empty(w.down.shape[1], dtype=dtype, device=device)
        rows = self.parts * heads
        self.part_o = torch.empty(rows * head_dim, dtype=torch.float32, device=device)
        self.part_m, self.part_l = (torch.empty(rows, dtype=torch.float32, device=device) for _ in "ml")
        # counters of every layer, programs that have left, and those that gave up
        self.count = torch.zeros(len(layers) * (5 + kv_heads) + 2, dtype=torch.int32, device=device)
        self.failed = torch.zeros(1, dtype=torch.int32, device=device)  # launches in which a wait passed its bound

    def __call__(self, x: torch.Tensor, rope: RopeTable, view: KVView) -> torch.Tensor:
        """The residual stream [1, H] behind the last layer, of x [1, H], contiguous. One request; view.k is of all layers."""
        w, tile = self.layers[0], self.tile
        hidden, ffn = w.qkv.shape[1], w.down.shape[1]
        out = torch.empty_like(x)
        # parts of less than one round of keys would be empty
        parts = max(1, min(self.parts, triton.cdiv(view.max_kv, tile.keys)))
        persistent_decode_kernel[(self.programs,)](
            x, out, w.qkv, self.offsets, rope.cos, rope.sin, view.positions, view.slots, view.block_table, view.base,
            view.seq_lens, view.k, view.v, self.q, self.attn, self.u, self.part_o, self.part_m, self.part_l, self.count,
            self.failed, view.k.stride(0), view.block_table.stride(0), w.attn_norm.eps, w.mlp_norm.eps,
            LOG2E * self.head_dim**-0.5, len(self.layers), parts, tile.ahead, tile.patience,
            **kernel_constants(tile, hidden, ffn, self.heads, self.kv_heads, self.head_dim, self.parts),
            PAGED=view.kind == "paged", PAGE=view.page_size,
            num_warps=tile.warps, launch_cooperative_grid=self.programs > 1,
        )  # fmt: skip
        return out


def most_parts(programs: int, heads: int, kv_heads: int, head_dim: int) -> int:
    """Parts of a head's cache: a program each, as long as one program can hold what all of them found in registers."""
    return max(1, min(programs // kv_heads, (1 << 14) // (triton.next_power_of_2(heads // kv_heads) * head_dim)))


def kernel_constants(
    tile: StackTile, hidden: int, ffn: int, heads: int, kv_heads: int, head_dim: int, parts: int
) -> dict[str, int | bool]:
    """The kernel's compile-time arguments, all but the cache's."""
    segments = {
        f"SEG_{n}": triton.next_power_of_2(k // tile.segment) for n, k in (("H", hidden), ("W", heads * head_dim), ("F", ffn))
    }
    return segments | {
        "HIDDEN": hidden, "FFN": ffn, "HEADS": heads, "KV_HEADS": kv_heads, "HEAD": head_dim, "LINES": tile.lines,
        "BK": tile.segment, "PARTS": parts, "PARTS_PAD": triton.next_power_of_2(parts), "BLOCK_N": tile.keys,
        "GROUP_PAD": triton.next_power_of_2(heads // kv_heads), "STAGES": tile.stages, "FETCH": tile.fetch,
    }  # fmt: skip


def _tensors(w: LayerWeights) -> list[torch.Tensor]:
    """As OFFSETS_OF names them."""
    return [w.qkv, w.out, w.up, w.down, w.attn_norm.weight, w.mlp_norm.weight]


def stack_of(layers: list[LayerWeights], head_dim: int, tile: StackTile | None = None) -> Stack | None:
    """A Stack for these layers on their GPU, a program a multiprocessor; None where the kernel does not take them.

    A program that can be launched at all is resident, one a multiprocessor; where another process has been given some of them
    the cooperative launch is refused with an error.
    """
    tile = tile or StackTile()
    if not stack_fits(layers, head_dim, tile):
        return None
    first = layers[0]
    programs = torch.cuda.get_device_properties(first.qkv.device).multi_processor_count
    heads = first.out.shape[1] // head_dim
    kv_heads = (len(first.qkv) // head_dim - heads) // 2
    return Stack(layers, heads=heads, kv_heads=kv_heads, head_dim=head_dim, programs=programs, tile=tile)


def stack_fits(layers: list[LayerWeights], head_dim: int, tile: StackTile) -> bool:
    """Whether the kernel can take these layers: LLaMA-like, all alike, 16 bits, sizes that pieces divide."""
    first = layers[0]
    shapes = [t.shape for t in _tensors(first)]
    hidden, ffn = first.qkv.shape[1], first.down.shape[1]
    for w in layers:
        extras = (w.qkv_bias, w.out_bias, w.up_bias, w.down_bias, w.q_norm, w.k_norm, w.attn_norm.bias, w.mlp_norm.bias)
        tensors = _tensors(w)
        if any(extra is not None for extra in extras) or [t.shape for t in tensors] != shapes:
            return False
        if any(t.element_size() != 2 or t.dtype != first.qkv.dtype or not t.is_contiguous() for t in tensors):
            return False
        if any(t.data_ptr() % 16 for t in tensors) or (w.attn_norm.eps, w.mlp_norm.eps) != (
            first.attn_norm.eps, first.mlp_norm.eps,
        ):  # fmt: skip
            return False
    width = first.out.shape[1]
    gated = first.up.shape[0] == 2 * ffn
    heads = width // head_dim
    group = heads // max(1, (len(first.qkv) // head_dim - heads) // 2)  # the rows of one matrix product
    even = all(k % tile.segment == 0 for k in (hidden, width, ffn))
    # a piece holds a pair of rows of H, and a row of the others
    short = triton.next_power_of_2(hidden // tile.segment) * 2 <= tile.lines and max(width, ffn) <= tile.lines * tile.segment
    return gated and even and short and group <= 16 and 16 <= head_dim <= 128 and head_dim & (head_dim - 1) == 0
