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
_SAMPLE_S = 0.3  # a slow variant's sample


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


def rival(stream: Stream, loaded: Loaded, name: str, module: Any) -> None:
    """A rival beside ours again, taking turns."""
    ctx = stream.ctx
    why = module.why_not(ctx.machine) or ("the time budget ran out" if ctx.left() <= module.SECONDS else "")
    if why:
        return stream.skip(name, why)
    try:
        with stages.make_llm(loaded, stages.ALL, length=stream.prompt + stream.new + 1) as llm:
            other = module.make(loaded, stream.prompt, stream.new, ctx.seed)
            prompt, new = stages.lengths_for(llm, stream.prompt, stream.new, _SAMPLE_S, ctx.seed)
            calls = {"ours": partial(stages.stream_seconds, llm, prompt, new, ctx.seed), name: other.seconds}
            for who, seconds in stages.in_turns(calls, 2, ctx.machine.is_gpu).items():
                stream.report(who, seconds, other.settings if who == name else None)
    except Exception as error:  # a rival that cannot run here is no failure of the suite
        stream.skip(name, f"{type(error).__name__}: {' '.join(str(error).split())[:160]}")
    ctx.record.flush()
    return None


class Models:
    """Loaded models, kept as long as all of them fit into half of the memory."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.kept: dict[str, Loaded] = {}

    def __getitem__(self, name: str) -> Loaded:
        from pdlab.bench.prefill_vs_decode import _load

        if name not in self.kept:
            size = itemsize_of(self.ctx.dtype)
            held = sum(weights_bytes(config_of(n), size) for n in (*self.kept, name))
            if held > 0.5 * self.ctx.machine.memory_bytes:
                self.clear()
            self.kept[name] = _load(name, self.ctx)
        return self.kept[name]

    def clear(self) -> None:
        import torch

        self.kept.clear()
        if self.ctx.machine.is_gpu:
            torch.cuda.empty_cache()


def run(ctx: Context) -> None:
    """The headline of every model, then the details of two of them, then rivals, then each switch alone and left out: what a
    short budget leaves out is what matters least."""
    import torch

    from pdlab.bench import _breakdown, _compiled, _decode, _transformers

    torch.manual_seed(ctx.seed)
    on_gpu, read, models = ctx.machine.is_gpu, _decode.read_ceiling(ctx), Models(ctx)
    streams: dict[str, Stream] = {}
    headline = [s for s in HEADLINE if on_gpu or s != {"graph"}]
    for name in MODELS[ctx.profile]:
        stream = Stream(ctx, config_of(name), read, *LENGTHS[ctx.profile])
        need, have = weights_bytes(stream.config, itemsize_of(ctx.dtype)), ctx.machine.memory_bytes * 0.8
        why = "the time budget ran out" if ctx.left() <= 0 else f"needs {need / 1e9:.1f} GB" if need > have else ""
        if why:
            stream.skip("ours", why)
            continue
        ctx.record.add("floor_throughput", read / stream.bytes, "tok/s", kind="predicted", params=stream.params)
        try:
            measure_variants(stream, models[name], headline, 3 if ctx.full else 1)
        except PdlabError as error:
            stream.skip("ours", str(error))
            continue
        streams[name] = stream
    detailed = [(n, s) for n, s in streams.items() if s.config.name in DETAILED]
    for name, stream in detailed:
        fresh = distinct(stages.waterfall(), headline, on_gpu)
        if fresh and ctx.left() > 0:  # ours again among them: rows to be compared belong to one set of turns
            measure_variants(stream, models[name], [*fresh, stages.ALL], 2)
    for name, stream in detailed:
        if ctx.left() > 0:
            _breakdown.record(ctx, models[name], stream.prompt + stream.new // 2, read)
            ctx.record.flush()
    for who, module in (("torch_compile", _compiled), ("transformers", _transformers)):
        for name, stream in detailed:
            rival(stream, models[name], who, module)
    for name, stream in detailed:
        done = [*headline, *stages.waterfall()[:-2]]  # but all without the last, which all is compared with here
        fresh = distinct(stages.alone() + stages.left_out(), done, on_gpu)
        if stream.config.name in _ONE_BY_ONE and fresh and ctx.left() > 0:
            measure_variants(stream, models[name], [*fresh, stages.ALL], 2)
    models.clear()
