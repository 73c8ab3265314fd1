"""RMSNorm and a matrix-vector product in CUDA C++, with and without two of the article's techniques. An experiment.

    y[r] = sum_k W[r, k] x[k] g[k] / sqrt(mean(x^2) + eps)            W bfloat16 [rows, K], x and g bfloat16, y bfloat16

  - RESTRICT: the pointers are `__restrict__`, so that the compiler knows that writing y changes neither W nor x nor g: it may
    read them through the read-only path (LDG.E.CONSTANT) and move loads across the stores.
  - SHARED: a block multiplies x by g once, keeps the products in shared memory in float32, and reads them there for each of its
    rows; otherwise each row reads x and g again, from the caches.

Bytes: W once, 2 rows K. Bound: bandwidth. A warp takes a row at a time, eight elements a lane and load.
Oracle: the formula in float64. It runs on a CUDA device only: NVRTC has no interpreter.
"""

from __future__ import annotations

import torch

from pdlab.kernels.nvrtc import Kernel, compile_cubin

VARIANTS = {"none": (False, False), "restrict": (True, False), "shared_norm": (False, True), "article": (True, True)}
THREADS = 256
BLOCKS_PER_SM = (1, 2, 4, 8)  # what is worth trying: few blocks share what a block prepares among many rows

SOURCE = r"""
typedef unsigned int u32;
typedef unsigned short u16;
#if RESTRICT
#define POINTER * __restrict__
#else
#define POINTER *
#endif

__device__ __forceinline__ float low(u32 two) { return __uint_as_float(two << 16); }
__device__ __forceinline__ float high(u32 two) { return __uint_as_float(two & 0xffff0000u); }
__device__ __forceinline__ float one(u16 bits) { return __uint_as_float((u32)bits << 16); }

__device__ __forceinline__ float over_warp(float value) {
  for (int lane = 16; lane; lane >>= 1) value += __shfl_xor_sync(0xffffffffu, value, lane);
  return value;
}

__device__ __forceinline__ u16 rounded(float value) {  // to nearest, ties to even
  u32 bits = __float_as_uint(value);
  return (u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

extern "C" __global__ void __launch_bounds__(256)
norm_product(const uint4 POINTER w, const u16 POINTER x, const u16 POINTER g, u16 POINTER y, int rows, float eps) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
#if SHARED
  extern __shared__ float normed[];  // K products x g, then one sum of squares a warp
  float mine = 0.f;
  for (int k = threadIdx.x; k < K; k += blockDim.x) {
    const float value = one(x[k]);
    mine += value * value;
    normed[k] = value * one(g[k]);
  }
  mine = over_warp(mine);
  if (lane == 0) normed[K + warp] = mine;
  __syncthreads();
  float squares = 0.f;
  for (int i = 0; i < warps; ++i) squares += normed[K + i];
#endif
  for (int row = blockIdx.x * warps + warp; row < rows; row += gridDim.x * warps) {
    float sum = 0.f;
#if !SHARED
    float squares = 0.f;
#endif
#pragma unroll 8
    for (int i = lane; i < K / 8; i += 32) {
      const uint4 eight = w[(size_t)row * (K / 8) + i];
#if SHARED
      const float4 a = ((const float4*)normed)[2 * i], b = ((const float4*)normed)[2 * i + 1];
      sum += low(eight.x) * a.x + high(eight.x) * a.y + low(eight.y) * a.z + high(eight.y) * a.w;
      sum += low(eight.z) * b.x + high(eight.z) * b.y + low(eight.w) * b.z + high(eight.w) * b.w;
#else
      const uint4 xs = ((const uint4*)x)[i], gs = ((const uint4*)g)[i];
#define TAKE(part) { const float p = low(xs.part), q = high(xs.part); squares += p * p + q * q; \
        sum += low(eight.part) * p * low(gs.part) + high(eight.part) * q * high(gs.part); }
      TAKE(x) TAKE(y) TAKE(z) TAKE(w)
#undef TAKE
#endif
    }
    sum = over_warp(sum);
#if !SHARED
    squares = over_warp(squares);
#endif
    if (lane == 0) y[row] = rounded(sum * rsqrtf(squares / K + eps));
  }
}
"""


def cubin(variant: str, k: int, architecture: str) -> bytes:
    """Machine code of one of VARIANTS for rows of `k` elements, a multiple of 8."""
    restrict, shared = VARIANTS[variant]
    flags = [f"-DRESTRICT={int(restrict)}", f"-DSHARED={int(shared)}", f"-DK={k}"]
    return compile_cubin(SOURCE, architecture, flags)


class NormProduct:
    """y = W norm(x) by one of VARIANTS on the current device."""

    def __init__(self, variant: str, k: int, blocks_per_sm: int = 4) -> None:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        self.code = cubin(variant, k, f"sm_{properties.major}{properties.minor}")
        self._kernel = Kernel(self.code, "norm_product")
        self._grid = blocks_per_sm * properties.multi_processor_count
        self._shared = 4 * (k + THREADS // 32) if VARIANTS[variant][1] else 0
        self._k = k

    def __call__(self, w: torch.Tensor, x: torch.Tensor, g: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
        """bfloat16 y [rows] of W [rows, K], x and g [K], all contiguous bfloat16."""
        if w.shape[1] != self._k or w.dtype != torch.bfloat16:
            raise ValueError(f"W is {list(w.shape)} {w.dtype}, and the kernel was built for bfloat16 rows of {self._k}")
        y = torch.empty(len(w), dtype=w.dtype, device=w.device)
        self._kernel(min(self._grid, -(-len(w) * 32 // THREADS)), THREADS, self._shared, w, x, g, y, len(w), eps)
        return y
