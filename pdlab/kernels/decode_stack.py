"""What the persistent decode kernel needs of a model: its weights stacked by kind, and the memory its programs meet in."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from pdlab.kernels.flash_decode import LOG2E
from pdlab.kernels.persistent_attention import keys_of
from pdlab.kernels.persistent_decode import PHASES, persistent_decode_kernel, words_of
from pdlab.kernels.ring_product import LINES, PANEL, SEGMENTS
from pdlab.kernels.tuning import first_match, table

if TYPE_CHECKING:
    from pdlab.kernels.kv_view import KVView
    from pdlab.kernels.ops import LayerWeights, RopeTable
    from pdlab.kernels.tuning import Tuning

LINEAR = ("qkv", "out", "up", "down")
NORMS = ("attn_norm", "mlp_norm")
SHARED = 215 << 10  # bytes of shared memory for the ring and the activation; the rest is for exchanges between warps


@dataclass(frozen=True)
class StackTile:
    """How the kernel is cut."""

    panels: int = 1  # of 64 columns of both halves of a tile that a stage of the ring holds: 16 KB each
    stages: int = 0  # of the ring; 0: as many as fit beside the longest activation
    near: int = 2  # panels that may be on their way while the product before may still be going on; 0: all
    far: int = 4  # and when it is over
    pdl: bool = True  # programmatic dependent launch: weights stream in under the tail of the kernel before
    u_words: bool = False  # u handed over as words like everything else; or stored plainly and counted
    hint: bool = True  # weights are the first to leave L2, see copy_hints
    patience: int = 1 << 18  # looks at words or a counter before a wait gives up: about 0.2 s
    traced: bool = False  # when each program is through with each phase goes to DecodeStack.trace, for measurements

    def __post_init__(self) -> None:
        """ValueError for what would hang, or give up at the first look."""
        for name, least in (("panels", 1), ("stages", 0), ("near", 0), ("far", 0), ("patience", 1)):
            if not least <= getattr(self, name) < 1 << 31:
                raise ValueError(f"{name} is {getattr(self, name)}; it is {least} or more, and 32 bits")
        if self.stages == 1:
            raise ValueError("a ring has two stages or more: one is given back when the products of the next have begun")

    def stages_for(self, longest: int) -> int:
        """`longest`: elements of the longest vector that a product reads. Fewer than 2: there is no ring beside it."""
        return self.stages or min(12 // self.panels, (SHARED - 2 * longest) // (self.panels << 14))


def stack_weights(layers: list[LayerWeights]) -> dict[str, torch.Tensor]:
    """Each kind of weight of all layers as one tensor [layers, ...]; the layers' own become views of it, so that the weights
    are held once. One kind at a time is there twice while this goes on; what is stacked already is left as it is."""
    stacked = {}
    for name in LINEAR:
        own = [getattr(w, name) for w in layers]
        one = _as_one(own)
        if one is None:
            one = torch.stack(own)
            for w, view in zip(layers, one, strict=True):
                setattr(w, name, view)
        stacked[name] = one
        del own  # before the next kind is copied
    for name in NORMS:
        stacked[name] = torch.stack([getattr(w, name).weight for w in layers])
    for w, after in pairwise(layers):
        w.following = after.qkv
    return stacked


def _as_one(tensors: list[torch.Tensor]) -> torch.Tensor | None:
    """The tensor [n, ...] that contiguous tensors of one shape are, if they lie one after the other in one allocation."""
    first, size = tensors[0], tensors[0].numel()
    for i, t in enumerate(tensors):
        same = t.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() and t.is_contiguous()
        if not same or t.storage_offset() != first.storage_offset() + i * size:
            return None
    return first.as_strided((len(tensors), *first.shape), (size, *first.stride()))


class DecodeStack:
    """A model's layers for the persistent kernel: the words in which its programs hand over results, the epoch, counters.

    Kept between launches, so that a captured graph finds it where it was; a graph holds addresses, no tensors, so whoever keeps
    one keeps the stack. Launches that share it must not run at the same time.
    """

    def __init__(
        self, layers: list[LayerWeights], *, heads: int, kv_heads: int, head_dim: int, programs: int,
        tile: StackTile | None = None,
    ) -> None:  # fmt: skip
        """`programs` are all resident at once: ValueError for more than multiprocessors, for fewer than KV heads, and where
        no ring fits beside the longest vector. Not during a capture: RuntimeError."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            # each replay would stack weights that have been given back, and begin epochs again
            raise RuntimeError("a DecodeStack cannot be made while a graph is captured; run the step once before")
        w = layers[0]
        device, dtype = w.qkv.device, w.qkv.dtype
        self.layers, self.heads, self.kv_heads, self.head_dim = layers, heads, kv_heads, head_dim
        self.tile, self.programs = tile or StackTile(), programs
        if programs < kv_heads:
            raise ValueError(f"{programs} programs cannot take a KV head each of {kv_heads}")
        if device.type == "cuda" and programs > (most := torch.cuda.get_device_properties(device).multi_processor_count):
            # a dependent launch is not refused, as a cooperative one is: those that run would wait for the others in vain
            raise ValueError(f"{programs} programs are not resident at once on {most} multiprocessors")
        self.hidden, self.ffn = w.qkv.shape[1], w.down.shape[1]
        ring_of(self.tile, self.hidden, self.ffn, heads * head_dim)  # raises before anything is copied
        self.eps = w.attn_norm.eps, w.mlp_norm.eps
        self.parts = 1 << (min(16, max(1, programs // kv_heads)).bit_length() - 1)  # of a head's cache, at most
        stacked = stack_weights(layers)
        layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        self.weights = [
            TensorDescriptor.from_tensor(
                stacked[n].view(-1, stacked[n].shape[2] // SEGMENTS), [LINES.value, PANEL.value], layout
            )
            for n in LINEAR
        ]
        self.norms = [stacked[n] for n in NORMS]
        self.u = torch.empty(self.ffn, dtype=dtype, device=device)
        words = words_of(self.hidden, self.ffn, heads, kv_heads, head_dim, self.parts)[-1]
        self.words = torch.zeros(words, dtype=torch.int64, device=device)  # of epoch 0, which no launch has
        self.epoch = torch.zeros(1, dtype=torch.int32, device=device)  # the last one used
        # arrivals of u in every layer, programs that have left, and threads that gave up
        self.count = torch.zeros(len(layers) + 2, dtype=torch.int32, device=device)
        self.failed = torch.zeros(1, dtype=torch.int32, device=device)  # launches in which a wait passed its bound
        stamps = (len(layers), PHASES.value, programs) if self.tile.traced else (1,)
        self.trace = torch.zeros(stamps, dtype=torch.int64, device=device)  # ns

    def __call__(self, x: torch.Tensor, rope: RopeTable, view: KVView) -> torch.Tensor:
        """The residual stream [1, H] behind the last layer, of x [1, H], contiguous. One request; view.k is of all layers.

        ValueError where the kernel would leave memory that it was given, as far as the host can know.
        """
        self._check(x, rope, view)
        out = torch.empty_like(x)
        parts = max(1, min(self.parts, triton.cdiv(view.max_kv, keys_of(self.head_dim))))
        persistent_decode_kernel[(self.programs,)](
            x, out, *self.weights, *self.norms, rope.cos, rope.sin, view.positions, view.slots, view.seq_lens,
            view.block_table, view.base, view.k, view.v, self.u, self.words, self.epoch, self.count, self.failed, self.trace,
            view.k.stride(0), *self.eps, LOG2E * self.head_dim**-0.5, len(self.layers), parts,
            self.tile.patience, **self.constants(), PAGED=view.kind == "paged", PAGE=view.page_size,
            num_warps=4, **self.launch(),
        )  # fmt: skip
        return out

    def _check(self, x: torch.Tensor, rope: RopeTable, view: KVView) -> None:
        dtype, cells = self.u.dtype, (self.kv_heads, view.page_size, self.head_dim)
        if x.shape != (1, self.hidden) or x.dtype != dtype or not x.is_contiguous() or len(view.seq_lens) != 1:
            raise ValueError(f"x is {x.dtype} {list(x.shape)}; the stack takes one contiguous row, {dtype} [1, {self.hidden}]")
        for cache in (view.k, view.v):
            if len(cache.shape) != 5 or cache.shape[0] != len(self.layers) or cache.shape[2:] != cells:
                wanted = f"[{len(self.layers)}, pages, {', '.join(map(str, cells))}]"
                raise ValueError(f"the cache is {list(cache.shape)}; the stack reads {wanted}, of all layers")
            if cache.dtype != dtype or not cache.is_contiguous() or cache.shape != view.k.shape:
                raise ValueError(f"K and V must be contiguous, alike, and {dtype}")
        rows, half = rope.cos.shape
        if half * 2 != self.head_dim or rope.sin.shape != rope.cos.shape or rows < view.max_kv:
            raise ValueError(f"the rotary table is {list(rope.cos.shape)}; {view.max_kv} tokens need a row each")
        if view.kind == "paged" and view.block_table.shape[1] * view.page_size < max(1, view.max_kv):
            raise ValueError(f"{view.block_table.shape[1]} pages of {view.page_size} do not hold {view.max_kv} tokens")
        if self.tile.traced and self.trace.numel() == 1:
            raise ValueError("a stack that was made without stamps has no memory for them; make it with traced=True")

    def launch(self) -> dict[str, bool]:
        """How it is launched. A cooperative launch, which the driver refuses where its programs would not all be resident,
        begins when everything before it has ended; a dependent one begins early, and its programs are resident as soon as
        those before it have left, since they wait for nothing here."""
        return {"launch_pdl": True} if self.tile.pdl else {"launch_cooperative_grid": self.programs > 1}

    def constants(self) -> dict[str, int]:
        """The kernel's compile-time arguments, all but the cache's."""
        return kernel_constants(self.tile, self.hidden, self.ffn, self.heads, self.kv_heads, self.head_dim, self.parts)


def ring_of(tile: StackTile, *lengths: int) -> tuple[int, int]:
    """(panels of a stage, stages) of the ring beside vectors of these lengths; ValueError where there is no room for two."""
    if any(k % (tile.panels << 10) for k in lengths):  # stages of whole panels
        tile = replace(tile, panels=1)
    if (stages := tile.stages_for(max(lengths))) < 2:
        raise ValueError(f"{stages} stages of {tile.panels} panels fit beside a vector of {max(lengths)}; two are the least")
    return tile.panels, stages


def kernel_constants(
    tile: StackTile, hidden: int, ffn: int, heads: int, kv_heads: int, head_dim: int, parts: int
) -> dict[str, int]:
    """The kernel's compile-time arguments, all but the cache's."""
    panels, stages = ring_of(tile, hidden, ffn, heads * head_dim)
    places = stages * panels
    return {
        "HIDDEN": hidden, "FFN": ffn, "HEADS": heads, "KV_HEADS": kv_heads, "HEAD": head_dim,
        "GROUP_PAD": triton.next_power_of_2(heads // kv_heads), "PARTS": parts, "PANELS": panels,
        "STAGES": stages, "IN_WORDS": tile.u_words, "TRACED": tile.traced, "HINT": tile.hint,
        # a bound beyond all places would wait for phases that are long over, for ever
        "NEAR": min(tile.near or places, places), "FAR": min(tile.far or places, places), "PDL": tile.pdl,
    }  # fmt: skip


def stack_of(layers: list[LayerWeights], head_dim: int, tile: StackTile | None = None) -> DecodeStack | None:
    """A DecodeStack for these layers on their GPU, a program a multiprocessor; None where the kernel does not take them.

    A program is resident, one a multiprocessor, as soon as what else runs there has left it. Where that takes longer than
    `patience`, or another kernel keeps a multiprocessor for good, the stream comes out as NaN: see `failed`.
    """
    if not stack_fits(layers, head_dim):
        return None
    first = layers[0]
    programs = torch.cuda.get_device_properties(first.qkv.device).multi_processor_count
    heads = first.out.shape[1] // head_dim
    kv_heads = (len(first.qkv) // head_dim - heads) // 2
    if kv_heads > programs:
        return None
    return DecodeStack(layers, heads=heads, kv_heads=kv_heads, head_dim=head_dim, programs=programs, tile=tile)


def stack_key(layers: list[LayerWeights]) -> dict[str, int]:
    """What names these layers in a device's tuning table."""
    first = layers[0]
    return {"layers": len(layers), "hidden": first.qkv.shape[1], "packed": first.qkv.shape[0], "ffn": first.down.shape[1]}


def measured_tile(tuning: Tuning, layers: list[LayerWeights], kv: int) -> StackTile | None:
    """The tile that the device's table ("persistent_decode") has for these layers and up to `kv` cached tokens; None where it
    was never measured to be faster than the other kernels."""
    return recorded_tile(tuning, stack_key(layers), kv)


def recorded_bounds(tuning: Tuning, layers: list[LayerWeights]) -> tuple[int, ...]:
    """Up to how many cached tokens each entry of the table for these layers counts, ascending."""
    key = stack_key(layers)
    entries = [e for e in table(tuning.device).get("persistent_decode", []) if all(e.get(k) == v for k, v in key.items())]
    return tuple(sorted({entry["max_kv"] for entry in entries if "max_kv" in entry}))


def recorded_tile(tuning: Tuning, key: dict[str, int], kv: int) -> StackTile | None:
    """measured_tile for layers of this `stack_key`."""
    entry = first_match(table(tuning.device).get("persistent_decode", []), **key, kv=kv)
    return StackTile(**{f.name: entry[f.name] for f in fields(StackTile) if f.name in entry}) if entry else None


def stack_fits(layers: list[LayerWeights], head_dim: int) -> bool:
    """Whether the kernel can take these layers: LLaMA-like, all alike, 16 bits, sizes that the copy engine can cut."""
    first = layers[0]
    shapes = [getattr(first, name).shape for name in LINEAR]
    for w in layers:
        extras = (w.qkv_bias, w.out_bias, w.up_bias, w.down_bias, w.q_norm, w.k_norm, w.attn_norm.bias, w.mlp_norm.bias)
        tensors = [getattr(w, name) for name in LINEAR]
        if any(extra is not None for extra in extras) or [t.shape for t in tensors] != shapes:
            return False
        if any(t.element_size() != 2 or t.dtype != first.qkv.dtype for t in tensors):
            return False
        if (w.attn_norm.eps, w.mlp_norm.eps) != (first.attn_norm.eps, first.mlp_norm.eps):
            return False
    hidden, width, ffn = first.qkv.shape[1], first.out.shape[1], first.down.shape[1]
    heads = width // head_dim
    group = heads // max(1, (len(first.qkv) // head_dim - heads) // 2)
    gated = first.up.shape[0] == 2 * ffn and StackTile().stages_for(max(hidden, width, ffn)) >= 2
    return gated and all(k % 128 == 0 for k in (hidden, width, ffn)) and group <= 8 and head_dim in (64, 128)
