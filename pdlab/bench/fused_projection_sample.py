"""Final norm, output projection and sampling: one pass over the vocabulary beside the operations one by one.

    latency        us a call; `graph` true: inside a CUDA graph of 20 calls, false: launched one by one from Python
    floor_latency  us: the projection's weights once / read bandwidth of the same run

Variants: `ours`; `unfused` (norm, product, then argmax, or softmax and torch.multinomial; in a graph, where multinomial cannot
go, the exponential race that is equal to it; top-k and top-p by sorting); `cublas` (the product alone); `torch_compile` (the
unfused greedy operations compiled); `flashinfer` where it can be imported. Sampling: greedy, temperature 0.8, top-k 50 with
top-p 0.9. Greedy and temperature tokens of `ours` are checked against float64 logits with the same noise. Weights are rotated
past L2.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from pdlab.core.errors import PdlabError
from pdlab.costs.formulas import itemsize_of
from pdlab.hardware.timing import L2Rotation
from pdlab.models.catalogue import config_of
from pdlab.models.config import ModelConfig

if TYPE_CHECKING:
    import torch

    from pdlab.bench.suites import Context
    from pdlab.kernels.ops import HeadWeights, SamplingBatch

NAME = "fused_projection_sample"
HELP = "output projection + sampling in one pass, beside the product alone and the operations apart"

MODELS = {"full": ("llama-3-8b", "llama-1b", "llama-2-7b", "gpt2-xl"), "smoke": ("llama-tiny",)}
BATCHES = {"full": (1, 32, 128, 8, 64), "smoke": (1, 3)}
KINDS = ("greedy", "temperature", "top_k_top_p")
TEMPERATURE, TOP_K, TOP_P = 0.8, 50, 0.9


def make_head(config: ModelConfig, ctx: Context, batch: int, seed: int) -> tuple[torch.Tensor, HeadWeights]:
    """x [S, H] and random weights whose logits have a deviation of about 3, so that sampling has something to choose."""
    import torch

    from pdlab.kernels.ops import HeadWeights, NormWeights

    g = torch.Generator(ctx.device).manual_seed(seed)
    dtype, h = getattr(torch, ctx.dtype), config.hidden_size
    proj = torch.empty((config.vocab_size, h), dtype=dtype, device=ctx.device).normal_(0, 3 * h**-0.5, generator=g)
    bias = torch.zeros(h, dtype=dtype, device=ctx.device) if config.family == "gpt2" else None
    norm = NormWeights(torch.ones(h, dtype=dtype, device=ctx.device), bias, config.norm_eps)
    return torch.randn((batch, h), generator=g, device=ctx.device).to(dtype), HeadWeights(norm, proj)


def make_sampling(kind: str, batch: int, device: str) -> SamplingBatch:
    import torch

    from pdlab.kernels.ops import SamplingBatch

    ones, number = torch.ones(batch, device=device), torch.arange(batch, device=device)
    filtered = kind == "top_k_top_p"
    return SamplingBatch(
        temperature=ones * (0.0 if kind == "greedy" else TEMPERATURE), top_k=(ones * (TOP_K if filtered else 0)).int(),
        top_p=ones * (TOP_P if filtered else 1.0), min_p=ones * 0, repetition_penalty=ones, seed=number * 1234567,
        position=number, seen=None, any_random=kind != "greedy", any_filter=filtered, num_logprobs=-1,
    )  # fmt: skip


def plain_logits(x: torch.Tensor, head: HeadWeights) -> torch.Tensor:
    import torch.nn.functional as F

    norm, shape = head.norm, head.norm.weight.shape
    if norm.bias is None:
        y = F.rms_norm(x, shape, norm.weight, norm.eps)
    else:
        y = F.layer_norm(x, shape, norm.weight, norm.bias, norm.eps)
    return product(y, head)


def product(x: torch.Tensor, head: HeadWeights) -> torch.Tensor:
    import torch.nn.functional as F

    return F.linear(x, head.proj)


def plain_sample(kind: str, race: bool, x: torch.Tensor, head: HeadWeights) -> torch.Tensor:
    """Tokens as one writes it in PyTorch; `race` draws by an exponential race, which a CUDA graph can hold."""
    import torch

    logits = plain_logits(x, head)
    if kind == "greedy":
        return logits.argmax(-1)
    scaled = logits.float() / TEMPERATURE
    if kind == "top_k_top_p":
        top, ids = torch.topk(scaled, min(TOP_K, scaled.shape[1]), dim=-1)  # sorted
        mass = top.softmax(-1)
        top = top.masked_fill(mass.cumsum(-1) - mass >= TOP_P, -torch.inf)
        return ids.gather(1, _draw(top.softmax(-1), race))[:, 0]
    return _draw(scaled.softmax(-1), race)[:, 0]


def _draw(probabilities: torch.Tensor, race: bool) -> torch.Tensor:
    import torch

    if race:
        return (probabilities / torch.empty_like(probabilities).exponential_()).argmax(-1, keepdim=True)
    return torch.multinomial(probabilities, 1)


def check_ours(tokens: torch.Tensor, x: torch.Tensor, head: HeadWeights, sampling: SamplingBatch) -> None:
    """AssertionError unless each token has the best float64 score, noise included, to within rounding of the logits."""
    from pdlab.kernels.reference_sampling import gumbel

    y = x.double()
    if head.norm.bias is not None:
        y = y - y.mean(-1, keepdim=True)
    y = y / (y.square().mean(-1, keepdim=True) + head.norm.eps).sqrt() * head.norm.weight.double()
    for row in range(0, len(x), max(1, len(x) // 8)):  # float64 products of a few rows are enough, and quick
        score = head.proj.double() @ y[row]
        if sampling.any_random:
            here = slice(row, row + 1)
            score = score / TEMPERATURE + gumbel(sampling.seed[here], sampling.position[here], len(score))[0].double()
        lost = float(score.max() - score[tokens[row]])
        # logits of size 12, made of inputs with 8 bits (bfloat16) rounded once more behind the norm
        if not lost <= 0.15:
            raise AssertionError(f"row {row}: token {int(tokens[row])} is {lost:.3f} below the best")


def flashinfer_sample(kind: str, x: torch.Tensor, head: HeadWeights) -> torch.Tensor:
    import flashinfer

    probabilities = (plain_logits(x, head).float() / TEMPERATURE).softmax(-1)
    if kind == "top_k_top_p":
        return flashinfer.sampling.top_k_top_p_sampling_from_probs(probabilities, TOP_K, TOP_P)
    return flashinfer.sampling.sampling_from_probs(probabilities)


def variants(ctx: Context, config: ModelConfig, kind: str, batch: int, graph: bool) -> dict[str, Any]:
    """call(x, head) of each variant that runs here."""
    import importlib.util

    import torch

    from pdlab.core.config import EngineConfig
    from pdlab.kernels.dispatch import make_ops

    ops = make_ops(EngineConfig(max_batch_requests=batch), config, ctx.device, ctx.dtype)
    sampling = make_sampling(kind, batch, ctx.device)
    calls: dict[str, Any] = {}
    if getattr(ops, "fused", False):
        calls["ours"] = lambda x, head: ops.projection_sample(x, head, sampling).tokens
    calls["unfused"] = partial(plain_sample, kind, graph)
    if kind == "greedy":
        calls["cublas" if ctx.machine.is_gpu else "product"] = product
        if ctx.machine.is_gpu and graph and batch == 1 and config.name == MODELS["full"][0] and ctx.left() > 20:
            options: dict[str, Any] = {"coordinate_descent_tuning": True}
            calls["torch_compile"] = torch.compile(partial(plain_sample, kind, True), dynamic=False, options=options)
    elif ctx.machine.is_gpu and not graph and importlib.util.find_spec("flashinfer") is not None:
        calls["flashinfer"] = partial(flashinfer_sample, kind)
    return calls


def usable(ctx: Context, calls: dict[str, Any], x: torch.Tensor, head: HeadWeights, params: dict[str, Any]) -> dict[str, Any]:
    """The calls that run here; a rival that does not is left out with a row that says why."""
    for name in [n for n in calls if n not in ("ours", "unfused")]:
        try:
            calls[name](x, head)
        except Exception as error:
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
            ctx.record.skip("latency", "us", why, variant=name, params=params)
            del calls[name]
    return calls


def measure(ctx: Context, config: ModelConfig, batch: int, read: float) -> None:
    from pdlab.bench import _attention, _decode

    weights = config.vocab_size * config.hidden_size * itemsize_of(ctx.dtype)
    rotation = L2Rotation(partial(make_head, config, ctx, batch), weights)
    for graph in (True, False) if ctx.machine.is_gpu else (False,):
        for kind in KINDS:
            params = {"model": config.name, "batch": batch, "dtype": ctx.dtype, "graph": graph, "sampling": kind}
            if ctx.left() <= 0:
                ctx.record.skip("latency", "us", "the time budget ran out", params=params)
                continue
            x, head = rotation.next()
            calls = usable(ctx, variants(ctx, config, kind, batch, graph), x, head, params)
            if "ours" in calls and kind != "top_k_top_p":
                check_ours(calls["ours"](x, head), x, head, make_sampling(kind, batch, ctx.device))
            out: dict[str, str] = {}
            rounds = 3 if ctx.full else 1
            times = _decode.take_turns(calls, rotation, ctx.device, graph=graph, rounds=rounds, n=7, left_out=out)
            _attention.record_left_out(ctx, out, "latency", "us", params)
            _decode.report(ctx, times, weights / read * 1e6, params)


def run(ctx: Context) -> None:
    import torch

    from pdlab.bench import _decode

    torch.manual_seed(ctx.seed)
    read = _decode.read_ceiling(ctx)
    for batch in BATCHES[ctx.profile]:
        for name in MODELS[ctx.profile]:
            config = config_of(name)
            if name != MODELS[ctx.profile][0] and batch not in BATCHES[ctx.profile][:2]:
                continue  # the other vocabularies at two batches
            try:
                measure(ctx, config, batch, read)
            except PdlabError as error:
                ctx.record.skip("latency", "us", str(error), params={"model": config.name, "batch": batch})
