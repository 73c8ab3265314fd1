"""Copies by Hopper's copy engine whose lines are the first to leave the L2 cache.

A decode step reads each weight once, and more of them than L2 holds: 2.5 GB through 60 MB. Lines that nobody will read again
push out those that are read in every step or by every program: activations, norms' weights, a short cache. A load can say so
(`eviction_policy="evict_first"`, which the kernels without the copy engine do), and so can the engine's copies, by a cache
policy that the instruction takes:

    createpolicy.fractional.L2::evict_first.b64 policy, 1.0;
    cp.async.bulk.tensor.2d ... .L2::cache_hint [place], [tensor, {x, y}], [barrier], policy;

Triton (up to 3.7) has no word for it. So a kernel leaves a mark, a comment that names the tensor's parameter, and the PTX of a
kernel with marks is completed before it is assembled. Nothing depends on it but time; where Triton writes its copies in another
way they stay as they are, and a test that compiles the kernels says so.
"""

from __future__ import annotations

import re
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_MARK = re.compile(r"copies by parameter (\d+) leave L2 first")
_ADDRESS = re.compile(r"^\s*mov\.[bu]64\s+(%rd\d+), \w+_param_(\d+);", re.M)
_GENERIC = re.compile(r"^\s*cvta\.param\.u64\s+(%rd\d+), (%rd\d+);", re.M)
_COPY = re.compile(
    r"^(?P<guard>\s*(?:@!?%p\d+ )?)(?P<copy>cp\.async\.bulk\.tensor\.\dd\.shared::(?:cluster|cta)\.global"
    r"\.mbarrier::complete_tx::bytes)"
    r"(?P<operands> \[%r\d+\], \[(?P<tensor>%rd\d+), \{[^}]*\}\], \[%r\d+\]);$",
    re.M,
)
_POLICY = "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;"
_MADE_OF_IT = gl.constexpr(_POLICY.rstrip(";"))  # stands in the mark: Triton's cache must know another policy by another source


@gluon.jit
def leave_l2_first(PARAMETER: gl.constexpr):
    """Marks all copies of the matrix that a descriptor describes. PARAMETER: how many parameters the kernel has before it,
    one for each argument that is passed at run time and five for each descriptor of a matrix (itself, sizes, strides)."""
    gl.inline_asm_elementwise(
        f"// copies by parameter {PARAMETER} leave L2 first: {_MADE_OF_IT}\n mov.b32 $0, 0;",
        "=r", [], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


def hinted(ptx: str) -> str:
    """PTX in which marked copies carry their policy; as it was where nothing is marked."""
    marked = set(_MARK.findall(ptx))
    if not marked:
        return ptx
    addresses = {register for register, parameter in _ADDRESS.findall(ptx) if parameter in marked}
    addresses |= {register for register, source in _GENERIC.findall(ptx) if source in addresses}

    def complete(copy: re.Match[str]) -> str:
        if copy["tensor"] not in addresses:
            return copy[0]
        hinted_copy = f"{copy['guard'].strip()} {copy['copy']}.L2::cache_hint{copy['operands']}, policy;".strip()
        return f"\t{{ .reg .b64 policy; {_POLICY} {hinted_copy} }}"

    return _COPY.sub(complete, ptx)


def _install() -> None:
    """Completes the PTX that Triton's NVIDIA backend makes in this process. Not by Triton's hook for stages, which would give
    every kernel, marked or not, another key in the cache."""
    try:
        from triton.backends.nvidia.compiler import CUDABackend

        make_ptx = CUDABackend.make_ptx
    except (ImportError, AttributeError):  # another Triton: copies without a policy
        return

    def make_hinted_ptx(*arguments: Any, **settings: Any) -> Any:
        ptx = make_ptx(*arguments, **settings)
        return hinted(ptx) if isinstance(ptx, str) else ptx

    if not getattr(make_ptx, "completes_copies", False):
        make_hinted_ptx.completes_copies = True  # type: ignore[attr-defined]
        CUDABackend.make_ptx = make_hinted_ptx


_install()
