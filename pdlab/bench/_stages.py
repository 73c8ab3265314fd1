"""The switches of the decode path, each alone, one after the other and left out, and one stream of tokens through any of them.

    unfused      plain PyTorch operations and attention, launched one by one, one step in flight
    graph        CUDA graphs: a step's launches recorded once and repeated as one
    attention    the split-KV attention kernel instead of a gather and plain attention
    fused        one kernel an operation instead of several
    dependent    programmatic dependent launch: a kernel's first weights are loaded under the tail of the one before it
    ring         products of one row by a ring of weight tiles in shared memory that the copy engine fills (Hopper)
    hints        weights that the copy engine brings leave the L2 cache first, so that what is read again can stay
    two_steps    two steps in flight: the host plans in the shadow of the device
    persistent   one row: all layers as one kernel whose weights never stop coming, where the device's table says that this is
                 faster (Hopper)
    ours         all of them
    prefetch     besides: each kernel asks for the first weights of the next one, into L2; off unless asked for

A variant is a set of switches. It is called by what it has (`with_graph_attention`) or by the only one it lacks
(`without_graph`);`unfused_graph` is the plain operations in a CUDA graph, the fairest of the simple baselines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from pdlab.core.config import EngineConfig, SamplingParams
from pdlab.hardware import nvml
from pdlab.hardware.timing import Timings, summarize

if TYPE_CHECKING:
    from pdlab.llm import LLM
    from pdlab.models.loading import Loaded

Switches = frozenset[str]

PLAIN: dict[str, Any] = {
    "attention": "plain", "ops": "reference", "cuda_graphs": False, "steps_in_flight": 1, "dependent_launch": False,
    "weight_hints": False, "weight_prefetch": False, "weight_ring": False, "persistent_decode": False,
}  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {
    "graph": {"cuda_graphs": True},
    "attention": {"attention": "auto"},
    "fused": {"ops": "auto"},
    "dependent": {"dependent_launch": True},
    "ring": {"weight_ring": True},
    "hints": {"weight_hints": True},
    "two_steps": {"steps_in_flight": 2},
    "persistent": {"persistent_decode": None},  # as the device's table says
}
BESIDES: dict[str, dict[str, Any]] = {"prefetch": {"weight_prefetch": True}}  # not among what is on by default
OF_FUSED = ("dependent", "ring", "hints", "persistent")  # techniques of the fused operations, without which they change nothing
# what makes no sense without a switch, or has its own of the kind
BUILT_ON = {"fused": OF_FUSED, "ring": ("persistent",), "attention": ("persistent",)}
ORDER = tuple(CHANGES)
ALL: Switches = frozenset(ORDER)
BESIDES_WITHOUT: dict[str, Switches] = {"prefetch": ALL - {"persistent"}}  # what each joins: one kernel has none that follows


def name_of(switches: Iterable[str]) -> str:
    """The variant's name in tables."""
    here = frozenset(switches)
    if more := here - ALL:
        return f"{name_of(here & ALL)}_and_{'_'.join(sorted(more))}"
    if here in (frozenset(), ALL):
        return "ours" if here else "unfused"
    if here == {"graph"}:
        return "unfused_graph"
    if len(here) == len(ALL) - 1:
        return f"without_{next(iter(ALL - here))}"
    return "with_" + "_".join(s for s in ORDER if s in here)


def waterfall() -> list[Switches]:
    """From nothing to everything, one switch at a time."""
    return [frozenset(ORDER[:i]) for i in range(len(ORDER) + 1)]


def alone() -> list[Switches]:
    """Each switch by itself; what belongs to the fused kernels has no life of its own."""
    return [frozenset({s}) for s in ORDER if s not in OF_FUSED]


def without(switch: str) -> Switches:
    """Everything but one, and what makes no sense without it."""
    return ALL - {switch, *BUILT_ON.get(switch, ())}


def left_out() -> list[Switches]:
    """All but one, for each; and all with what is not on by default."""
    return [without(switch) for switch in ORDER] + [BESIDES_WITHOUT[switch] | {switch} for switch in BESIDES]


def make_llm(loaded: Loaded, switches: Iterable[str], *, length: int, batch: int = 1, **more: Any) -> LLM:
    """An LLM on the loaded weights with these switches and room for `batch` requests of `length` tokens."""
    from pdlab.llm import LLM

    here = frozenset(switches)
    changes = dict(PLAIN)
    for switch in here:
        changes |= (CHANGES | BESIDES)[switch]
    page = 16
    config = EngineConfig(
        device=str(loaded.model.device),
        dtype=str(loaded.model.dtype).removeprefix("torch."),
        page_size=page,
        max_batch_requests=batch,
        max_batch_tokens=max(512, batch),
        max_model_len=length,
        kv_capacity_tokens=batch * (-(-length // page) + 1) * page,
        **(changes | more),
    )
    return LLM(loaded, config)


def stream_seconds(llm: LLM, prompt: int, new: int, seed: int) -> float:
    """Seconds a token from the first to the last of one greedy answer of `new` tokens to a random prompt."""
    vocab = llm.model_config.vocab_size
    ids = np.random.default_rng(seed).integers(0, vocab, prompt).tolist()
    output = llm.generate([ids], SamplingParams(max_tokens=new, ignore_eos=True))[0]
    if output.error is not None or output.timing.decode_s is None:
        raise RuntimeError(f"the stream ended early: {output.error or output.finish_reason}")
    return output.timing.decode_s / (new - 1)


def lengths_for(llm: LLM, prompt: int, new: int, seconds: float, seed: int) -> tuple[int, int]:
    """(prompt, new tokens) to time: as asked, or for a slow variant its middle part, so that the mean context stays.

    Runs a few tokens first, which also compiles kernels and captures graphs.
    """
    stream_seconds(llm, prompt, 4, seed)
    each = stream_seconds(llm, prompt, 8, seed)
    count = min(new, max(16, int(seconds / each)))
    if count == new:
        stream_seconds(llm, prompt, new, seed)  # graphs for every length, where attention needs several
    return prompt + (new - count) // 2, count


def in_turns(samples: Mapping[str, Callable[[], float]], rounds: int, on_gpu: bool) -> dict[str, Timings]:
    """Every sample once, then again, A B A B; seconds. A throttled one is taken again, then kept and marked."""
    taken: dict[str, list[tuple[float, bool]]] = {name: [] for name in samples}
    for _ in range(rounds):
        for name, sample in samples.items():
            for attempt in range(2):
                value = sample()
                state = (nvml.state() if attempt else nvml.recent_state()) if on_gpu else None
                hot = state is not None and state.throttled
                if not hot:
                    break
            taken[name].append((value, hot))
    found = {}
    for name, several in taken.items():
        cool = [value for value, hot in several if not hot]
        found[name] = summarize(cool or [value for value, _ in several], "s", not cool)
    return found
