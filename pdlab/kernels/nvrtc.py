"""CUDA C++ at run time: NVRTC compiles it, the driver loads it. Both come with torch and the driver; nothing else is needed.

cubin = compile_cubin(source, "sm_90")        bytes; needs libnvrtc, which torch's CUDA builds bring along
kernel = Kernel(cubin, "name")                needs a CUDA device
kernel(grid, threads, shared_bytes, tensor, tensor, 3)

An experiment's tool (see cuda_norm_product): the engine's own kernels are Triton's.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from pdlab.core.errors import DeviceUnavailable


def _library() -> ctypes.CDLL:
    major = (torch.version.cuda or "13").split(".")[0]
    names = [f"libnvrtc.so.{major}", "libnvrtc.so"]
    beside = Path(torch.__file__).parent.parent / "nvidia"
    names += [str(path) for path in sorted(beside.glob(f"*/lib/libnvrtc.so.{major}*"))]
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise DeviceUnavailable("NVRTC was not found", "it comes with torch's CUDA builds; or pip install nvidia-cuda-nvrtc")


def why_not() -> str | None:
    """Why nothing can be compiled here, or None."""
    try:
        _library()
    except DeviceUnavailable as error:
        return error.message
    return None


def compile_cubin(source: str, architecture: str, options: Sequence[str] = ()) -> bytes:
    """Machine code of `source` for `architecture` ("sm_90"); RuntimeError with the compiler's own words where it refuses."""
    nvrtc, program = _library(), ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
    arguments = [f"--gpu-architecture={architecture}", *options]
    array = (ctypes.c_char_p * len(arguments))(*(a.encode() for a in arguments))
    failed = nvrtc.nvrtcCompileProgram(program, len(arguments), array)
    try:
        if failed:
            raise RuntimeError(_bytes(nvrtc, program, "ProgramLog").decode(errors="replace").strip("\0\n"))
        return _bytes(nvrtc, program, "CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _bytes(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
    return buffer.raw


class Kernel:
    """A function of a cubin on the current device. Tensors are passed by address, ints as int32, floats as float32."""

    def __init__(self, cubin: bytes, name: str) -> None:
        torch.cuda.current_stream()  # a context exists
        self._driver, self._module, self._function = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_void_p()
        self._check(self._driver.cuModuleLoadData(ctypes.byref(self._module), cubin))
        self._check(self._driver.cuModuleGetFunction(ctypes.byref(self._function), self._module, name.encode()))

    def _check(self, code: int) -> None:
        if code:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(code, ctypes.byref(text))
            raise RuntimeError(f"CUDA driver: {(text.value or b'unknown error').decode()}")

    def __call__(self, grid: int, threads: int, shared_bytes: int, *arguments: torch.Tensor | int | float) -> None:
        """Launches on the current stream; may be captured in a graph."""
        if shared_bytes > 48 << 10:  # beyond what a block gets unasked; 8: CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._check(self._driver.cuFuncSetAttribute(self._function, 8, shared_bytes))
        held = [_argument(a) for a in arguments]
        pointers = (ctypes.c_void_p * len(held))(*(ctypes.cast(ctypes.byref(a), ctypes.c_void_p) for a in held))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        launch = self._driver.cuLaunchKernel
        self._check(launch(self._function, grid, 1, 1, threads, 1, 1, shared_bytes, stream, pointers, None))


def _argument(value: torch.Tensor | int | float) -> ctypes._SimpleCData:
    if isinstance(value, torch.Tensor):
        return ctypes.c_void_p(value.data_ptr())
    return ctypes.c_int(value) if isinstance(value, int) else ctypes.c_float(value)


def sass(cubin: bytes) -> str:
    """The machine code as text, by the disassembler that comes with Triton."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([str(tool), "-c", file.name], capture_output=True, text=True, check=True).stdout


def count_instructions(text: str) -> dict[str, int]:
    """Instructions of a disassembly that tell how memory is read: loads, those of them that may use the read-only path, and
    loads from and stores to shared memory."""
    found = re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+ )?([A-Z][\w.]*)", text, re.MULTILINE)
    loads = [name for name in found if re.match(r"LDG\b", name)]
    return {
        "instructions": len(found),
        "global_loads": len(loads),
        "constant_loads": sum("CONSTANT" in name for name in loads),
        "shared_loads": sum(name.startswith("LDS") for name in found),
        "shared_stores": sum(name.startswith("STS") for name in found),
    }
