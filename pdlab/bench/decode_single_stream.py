"""One stream of tokens: how near decoding comes to the time that reading weights and cache takes, and what brings it there.

    throughput        tokens a second from the first to the last token of an answer, through LLM: host, planning and all
    floor_throughput  read bandwidth of the same run / bytes a token must move (weights and the cache, mean context)
    bandwidth_share   percent: those bytes / time / read bandwidth

The variants are the switches of _stages, one after the other (llama-1b and llama-3-8b), alone and left out (llama-1b), and
as rivals `torch_compile` (plain operations compiled in gpt-fast's manner, see _compiled) and `transformers`. Variants take
turns, A B A B, on the same weights; slow ones are timed on the middle part of the answer (their settings say so), where the
mean context is the same. `kernel_time` and `floor_kernel_time` are microseconds a step by operation, see _breakdown.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from pdlab.bench import _stages as stages
from pdlab.core.errors import PdlabError
from pdlab.costs.formulas import decode_shape, itemsize_of, step_bytes, weights_bytes
from pdlab.hardware.timing import Timings
from pdlab.models.catalogue import config_of

if TYPE_CHECKING:
    from pdlab.bench.suites import Context
    from pdlab.models.config import ModelConfig
    from pdlab.models.loading import Loaded

NAME = "decode_single_stream"
HELP = "tokens a second of one stream, as a share of the read ceiling, one switch at a time"

MODELS = {
    "full": ("random:llama-1b", "random:llama-3-8b", "random:llama-2-7b", "random:gpt2-xl"),
    "smoke": ("random:llama-tiny", "random:gpt2-tiny"),
}
LENGTHS = {"full": (512, 256), "smoke": (24, 12)}  # prompt, new tokens
DETAILED = ("llama-1b", "llama-3-8b", "llama-tiny")  # models with the whole waterfall; the others get the headline
_ONE_BY_ONE = ("llama-1b", "llama-tiny")  # and each switch alone and left out
HEADLINE = (stages.ALL, frozenset({"graph"}), frozenset[str]())  # a CPU has no graphs: there the first and the last
_SAMPLE_S = 1.0  # a slow variant's sample
_HEADLINE_S = 14.0  # what a model's headline may need: kept back while others get their details


class Stream:
    """One model's measurements: what every row of it shares."""

    def __init__(self, ctx: Context, config: ModelConfig, read: float, prompt: int, new: int) -> None:
        self.ctx, self.config, self.read, self.prompt, self.new = ctx, config, read, prompt, new
        self.params = {"model": config.name, "prompt": prompt, "new_tokens": new, "dtype": ctx.dtype}
        mean = prompt + new // 2
        self.bytes = step_bytes(config, decode_shape(1, mean), itemsize_of(ctx.dtype)).total

    def report(self, variant: str, seconds: Timings, settings: dict[str, Any] | None = None) -> None:
        rate, share = seconds.rate(1.0, "tok/s"), seconds.rate(100 * self.bytes / self.read, "percent")
        self.ctx.record.add("throughput", rate, variant=variant, params=self.params, settings=settings)
        self.ctx.record.add("bandwidth_share", share, variant=variant, params=self.params, settings=settings)
        self.ctx.say(f"  {self.config.name} {variant}: {rate.median:.1f} tok/s, {share.median:.1f} % of the read ceiling")

    def skip(self, variant: str, why: str) -> None:
        self.ctx.record.skip("throughput", "tok/s", why, variant=variant, params=self.params)
        self.ctx.say(f"  {self.config.name} {variant}: skipped, {why}")


def measure_variants(stream: Stream, loaded: Loaded, sets: list[stages.Switches], rounds: int) -> None:
    """Rows of these sets of switches, taking turns."""
    ctx, calls, settings = stream.ctx, {}, {}
    with ExitStack() as stack:
        for switches in sets:
            name = stages.name_of(switches)
            if ctx.left() <= 0:
                stream.skip(name, "the time budget ran out")
                continue
            llm = stack.enter_context(stages.make_llm(loaded, switches, length=stream.prompt + stream.new + 1))
            prompt, new = stages.lengths_for(llm, stream.prompt, stream.new, _SAMPLE_S, ctx.seed)
            calls[name] = partial(stages.stream_seconds, llm, prompt, new, ctx.seed)
            settings[name] = None if new == stream.new else {"timed_prompt": prompt, "timed_new_tokens": new}
        for name, seconds in stages.in_turns(calls, rounds, ctx.machine.is_gpu).items():
            stream.report(name, seconds, settings[name])
    ctx.record.flush()


def distinct(sets: list[stages.Switches], done: list[stages.Switches], on_gpu: bool) -> list[stages.Switches]:
    """Sets not measured yet; a CPU knows no graphs and no kernels, so there only two_steps makes a difference."""
    seen = {stages.name_of(s) for s in done}
    fresh: dict[str, stages.Switches] = {}
    for s in sets:
        if stages.name_of(s) not in seen and (on_gpu or s == {"two_steps"}):
            fresh.setdefault(stages.name_of(s), s)
    return list(fresh.values())


def rivals(stream: Stream, loaded: Loaded, keep: float) -> None:
    """torch_compile beside ours again, in turns; then transformers."""
    from pdlab.bench import _compiled, _transformers

    ctx = stream.ctx
    for name, module in (("torch_compile", _compiled), ("transformers", _transformers)):
        if why := module.why_not(ctx.machine):
            stream.skip(name, why)
            continue
        if ctx.left() <= keep + module.SECONDS:
            stream.skip(name, "the time budget ran out")
            continue
        try:
            with stages.make_llm(loaded, stages.ALL, length=stream.prompt + stream.new + 1) as llm:
                rival = module.make(loaded, stream.prompt, stream.new, ctx.seed)
                prompt, new = stages.lengths_for(llm, stream.prompt, stream.new, _SAMPLE_S, ctx.seed)
                calls = {"ours": partial(stages.stream_seconds, llm, prompt, new, ctx.seed), name: rival.seconds}
                for who, seconds in stages.in_turns(calls, 3, ctx.machine.is_gpu).items():
                    stream.report(who, seconds, rival.settings if who == name else None)
        except Exception as error:  # a rival that cannot run here is no failure of the suite
            stream.skip(name, f"{type(error).__name__}: {' '.join(str(error).split())[:160]}")
        ctx.record.flush()


def measure_model(ctx: Context, name: str, read: float, keep: float) -> None:
    """Everything about one model; `keep` seconds of the budget are left for others."""
    from pdlab.bench import _breakdown
    from pdlab.bench.prefill_vs_decode import _load

    config = config_of(name)
    stream = Stream(ctx, config, read, *LENGTHS[ctx.profile])
    need, have = weights_bytes(config, itemsize_of(ctx.dtype)), ctx.machine.memory_bytes * 0.8
    if need > have:
        return stream.skip("ours", f"needs {need / 1e9:.1f} GB and {have / 1e9:.1f} GB can be used")
    if ctx.left() <= 0:
        return stream.skip("ours", "the time budget ran out")
    floor = read / stream.bytes
    ctx.record.add("floor_throughput", floor, "tok/s", kind="predicted", params=stream.params)
    loaded = _load(name, ctx)
    headline = [s for s in HEADLINE if ctx.machine.is_gpu or s != {"graph"}]
    measure_variants(stream, loaded, headline, 3 if ctx.full else 1)
    if config.name not in DETAILED:
        return None
    if ctx.left() > keep:
        _breakdown.record(ctx, loaded, stream.prompt + stream.new // 2, read)
        ctx.record.flush()
    wanted = stages.waterfall() + (stages.alone() + stages.left_out() if config.name in _ONE_BY_ONE else [])
    more = distinct(wanted, headline, ctx.machine.is_gpu)
    if more and ctx.left() > keep:  # ours again among them: rows to be compared belong to one set of turns
        measure_variants(stream, loaded, [stages.ALL, *more], 2)
    rivals(stream, loaded, keep)
    return None


def run(ctx: Context) -> None:
    import torch

    from pdlab.bench import _decode

    torch.manual_seed(ctx.seed)
    read = _decode.read_ceiling(ctx)
    names = MODELS[ctx.profile]
    for i, name in enumerate(names):
        try:
            measure_model(ctx, name, read, keep=_HEADLINE_S * (len(names) - 1 - i) if ctx.full else 0.0)
        except PdlabError as error:
            ctx.say(f"  {name}: {error}")
            ctx.record.skip("throughput", "tok/s", str(error), params={"model": name, "dtype": ctx.dtype})
        if ctx.machine.is_gpu:
            torch.cuda.empty_cache()
