"""The attention kernels' arithmetic, tile by tile in plain PyTorch, with each numerical care as a switch.

    for each tile of keys:  m' = max(m, max s);  a = exp(m - m');  p = exp(s - m')
                            l = l a + sum p;     o = o a + p V;    m = m'           then  o / l

The kernels of flash_decode and flash_prefill do this with every care taken. Turning one off shows what it is for:

    wide_scores    scores in float32. In float16 a product above 65504 is infinite before the scale could shrink it
    subtract_max   exponents at most 0. Without, exp overflows float32 above a score of 88
    rescale        earlier tiles shrink when the maximum grows. Without, tiles are weighted by different maxima
    guard_empty    a row without any key so far subtracts 0. Without, -inf - -inf is NaN, for good

Used by the stability benchmark, the notebook that builds attention by hand, and the tests. Oracle: exact_attention here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Care:
    """Which precautions are taken; the kernels take all."""

    wide_scores: bool = True
    subtract_max: bool = True
    rescale: bool = True
    guard_empty: bool = True


def tiled_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: int, *, mask: torch.Tensor | None = None, care: Care | None = None
) -> torch.Tensor:
    """Attention of one head, q [n, D], k and v [m, D] in the inputs' dtype, scale 1/sqrt(D); `mask` [n, m] True where allowed.

    As on the tensor cores: products of the dtype's numbers summed in float32, p rounded to the dtype before it meets V.
    Rows that may see nothing come out zero.
    """
    care = care or Care()
    n, dim = q.shape
    dtype, scale = q.dtype, dim**-0.5
    m = torch.full((n,), -torch.inf, device=q.device)
    total = torch.zeros(n, device=q.device)
    acc = torch.zeros(n, dim, device=q.device)
    for lo in range(0, len(k), tile):
        keys = slice(lo, min(lo + tile, len(k)))
        scores = q.float() @ k[keys].float().T
        scores = (scores if care.wide_scores else scores.to(dtype).float()) * scale
        if mask is not None:
            scores = scores.masked_fill(~mask[:, keys], -torch.inf)
        new = torch.maximum(m, scores.amax(1)) if care.subtract_max else torch.zeros_like(m)
        base = torch.where(new == -torch.inf, 0.0, new) if care.guard_empty else new
        p = torch.exp(scores - base[:, None])
        shrink = torch.exp(m - base) if care.rescale and care.subtract_max else torch.ones_like(m)
        total = total * shrink + p.sum(1)
        acc = acc * shrink[:, None] + p.to(dtype).float() @ v[keys].float()
        m = new
    return (acc / torch.where(total == 0, 1.0, total)[:, None]).to(dtype)


def exact_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """The same in float64, at once; rows that may see nothing are zero."""
    scores = q.double() @ k.double().T * q.shape[1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    top = scores.amax(1, keepdim=True)
    p = torch.exp(scores - torch.where(top == -torch.inf, 0.0, top))
    total = p.sum(1, keepdim=True)
    return (p / torch.where(total == 0, 1.0, total)) @ v.double()


def hard_cases(
    dtype: torch.dtype, n: int = 24, m: int = 96, dim: int = 64, seed: int = 0
) -> dict[str, dict[str, torch.Tensor]]:
    """Inputs that break an attention that takes no care: name -> q, k, v and perhaps mask, in `dtype`.

    `large` has scores of about +-1e4 after the scale, `growing` a maximum that rises from tile to tile, `masked` rows that see
    no key at all or none in the first tiles, `minus_infinity` scores of -inf that come from the data, not from a mask, and
    `overflow` products beyond float16 whose scaled scores are ordinary numbers apart.
    """
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g)

    q, k, v = draw(n, dim), draw(m, dim), draw(m, dim)
    cases = {"ordinary": {"q": q, "k": k, "v": v}}
    cases["large"] = {"q": q * 60, "k": k * 60, "v": v}
    ramp = torch.linspace(0.1, 6.0, m)[:, None]
    cases["growing"] = {"q": q.abs(), "k": ramp * (1 + 0.1 * k.abs()), "v": v}
    mask = torch.arange(m) < (torch.arange(n)[:, None] % 4) * (m // 3)  # a quarter of the rows sees nothing
    cases["masked"] = {"q": q, "k": k, "v": v, "mask": mask.flip(1)}
    infinite = k.clone()
    infinite[: m // 2, 0] = -torch.inf
    cases["minus_infinity"] = {"q": torch.cat((q[:, :1].abs() + 0.1, q[:, 1:]), 1), "k": infinite, "v": v}
    common = torch.full((1, dim), 40.0)
    cases["overflow"] = {"q": common + q * 0.01, "k": common + k * 0.02, "v": v}
    return {name: {x: t if x == "mask" else t.to(dtype) for x, t in case.items()} for name, case in cases.items()}
