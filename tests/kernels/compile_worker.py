"""Compiles (never runs) the attention kernels with the tiles that a device gets, and prints what each takes, as JSON.

    python compile_worker.py '[["decode", [9, 0], 128, 1], ["prefill", [8, 0], 64, 4096], ...]'

A job is kind (decode, ring for the decode kernel with a ring, or prefill), capability, head size, and query tokens a request
(decode: at once; prefill: of the longest chunk) or, for the ring, the query heads of a group.
Run in a process without TRITON_INTERPRET, under which nothing would be compiled.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pdlab.kernels.addressing import padded_head
from pdlab.kernels.flash_decode import flash_decode_kernel
from pdlab.kernels.flash_prefill import flash_prefill_kernel
from pdlab.kernels.tuning import DecodeRing, DecodeTile, PrefillTile, Tuning, _tile

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
GROUP, PAGE, LANES = 4, 16, 32
# what a launch would find out about its arguments: torch's allocations and these shapes' strides are multiples of 16
INTEGERS = ("TABLE", "LENS", "CU_Q", "COUNTERS")
POINTERS = dict.fromkeys(("Q", "K", "V", "OUT"), "*bf16") | dict.fromkeys(INTEGERS, "*i32") | {"BASE": "*i64"}
POINTERS |= {"PART_O": "*fp32", "PART_LSE": "*fp32"}
STRIDES = ("page_stride", "head_stride", "row_stride", "q_token_stride", "q_head_stride", "o_token_stride", "o_head_stride")


def constants(kind: str, tile: DecodeTile | PrefillTile, head: int, tokens: int) -> dict[str, Any]:
    shape = {"KV_HEADS": 8, "GROUP": GROUP, "HEAD": head, "HEAD_PAD": padded_head(head), "PAGED": True, "PAGE": PAGE}
    shape |= {"BLOCK_N": tile.block_n, "BATCH_PAD": LANES, "STAGES": tile.stages}
    if isinstance(tile, PrefillTile):
        return shape | {"BLOCK_M": tile.block_m, "MIN_Q": 2, "CAUSAL": True}
    rows = triton.next_power_of_2(tokens * GROUP)
    parts = max(1, min(32, 2048 * tile.warps // (rows * padded_head(head))))
    return shape | {"ROWS": max(16, rows), "ROWS_PAD": rows, "MAX_Q": tokens, "PARTS": parts, "PDL": tile.pdl}


def resources(cubin: bytes) -> dict[str, int]:
    """Registers, stack bytes (spilled registers live there) and kinds of matrix instructions of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text, code = (
            subprocess.run([str(TOOLS / tool), option, file.name], capture_output=True, text=True, check=True).stdout
            for tool, option in (("cuobjdump", "--dump-resource-usage"), ("nvdisasm", "-c"))
        )
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return found | {name: len(re.findall(rf"\b{name}\b", code)) for name in ("HMMA", "HGMMA", "UTMALDG")}


def copies(ptx: str) -> dict[str, int]:
    """Copies by the copy engine, and those of them whose lines leave L2 first."""
    found = re.findall(r"cp\.async\.bulk\.tensor\S*global\.mbarrier\S*", ptx)
    return {"copies": len(found), "hinted": sum(name.endswith("L2::cache_hint") for name in found)}


def ahead_of_time(
    kernel: Any,
    source: type,
    fixed: dict[str, Any],
    types: dict[str, str],
    capability: tuple[int, int],
    warps: int,
    **more: Any,
) -> Any:
    """The kernel compiled for these constants and argument types; any other argument is an int32."""
    types = dict.fromkeys(fixed, "constexpr") | types
    at = {name: (i,) for i, name in enumerate(kernel.arg_names)}
    code = source(
        fn=kernel,
        signature={name: types.get(name, "i32") for name in kernel.arg_names},
        constexprs={at[name]: value for name, value in fixed.items()},
        attrs={at[name]: [["tt.divisibility", 16]] for name in (*POINTERS, *STRIDES) if name in at},
    )
    major, minor = capability
    return triton.compile(code, target=GPUTarget("cuda", 10 * major + minor, 32), options={"num_warps": warps} | more)


def compile_ring(tile: DecodeRing, capability: tuple[int, int], head: int, group: int) -> Any:
    from triton.experimental.gluon._runtime import GluonASTSource

    from pdlab.kernels.flash_decode_ring import flash_decode_ring_kernel, registers_of

    fixed = {"KV_HEADS": 8, "GROUP": group, "COLUMNS": 8, "HEAD": head, "BATCH_PAD": LANES, "PAGED": True}
    fixed |= {"PAGE": PAGE, "PAGE_STRIDE": 8 * PAGE * head, "ROW_STRIDE": head, "RUN": 16, "STAGES": tile.stages}
    fixed |= {"PREFETCH": tile.pdl, "PDL": tile.pdl, "WARPS": tile.warps}
    types = POINTERS | {"scale_log2": "fp32", "NEXT": "*u8"}
    most = {"maxnreg": registers_of(tile)}
    return ahead_of_time(flash_decode_ring_kernel, GluonASTSource, fixed, types, capability, tile.warps, **most)


def compile_job(kind: str, capability: tuple[int, int], head: int, tokens: int) -> dict[str, Any]:
    """A job of kind {entry of a table, as JSON} compiles what that entry names."""
    tuning = Tuning("no-such-device", capability, 132, 50 << 20)
    entry = json.loads(kind) if kind.startswith("{") else {}
    kind = entry.get("kind", kind).replace("decode_ring", "ring")
    if kind == "ring":
        ring = _tile(DecodeRing, entry) if entry else tuning.ring(head, tokens)
        assert ring is not None
        built = compile_ring(ring, capability, head, tokens)
        answer = {
            "shared": built.metadata.shared,
            "blocks": ring.blocks_per_sm,
            "warps": ring.warps,
            "room": tuning.shared_bytes,
        }
        return answer | resources(built.asm["cubin"])
    kernel = flash_decode_kernel if kind == "decode" else flash_prefill_kernel
    if entry:
        tile = _tile(DecodeTile if kind == "decode" else PrefillTile, entry)
    else:
        tile = tuning.decode(head, tokens * GROUP) if kind == "decode" else tuning.prefill(head, tokens, PAGE)
    types = POINTERS | {"scale_log2": "fp32"}
    built = ahead_of_time(kernel, ASTSource, constants(kind, tile, head, tokens), types, capability, tile.warps)
    blocks = getattr(tile, "blocks_per_sm", 1)
    answer = {"shared": built.metadata.shared, "blocks": blocks, "warps": tile.warps, "room": tuning.shared_bytes}
    return answer | resources(built.asm["cubin"])


if __name__ == "__main__":
    for kind, capability, head, tokens in json.loads(sys.argv[1]):
        print(json.dumps(compile_job(kind, tuple(capability), head, tokens)), flush=True)
