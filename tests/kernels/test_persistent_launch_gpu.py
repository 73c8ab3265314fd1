"""Dependent launches of the persistent decode kernel on a GPU: it begins before the kernel before has ended.

What that one writes is read behind its end, whatever it is: a kernel that lets its dependents begin at once, another stack, a
kernel that does not; and what comes behind the stack reads what the stack writes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl
from fused_cases import sampling_case
from persistent_cases import TOLERANCE, apart, at_length, exact
from persistent_cases import on_device as case

from pdlab.kernels.product_tiles import RingTile
from pdlab.kernels.projection_sample import LOGITS, Race
from pdlab.kernels.ring_kernels import ring_project

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0"
    ),
]
U_WORDS = pytest.mark.parametrize("u_words", [False, True])


@triton.jit
def late_writer(X, NEW_X, NUMBERS, NEW_NUMBERS, K, NEW_K, V, NEW_V, elements, rounds, H: tl.constexpr, BLOCK: tl.constexpr):
    """Lets its dependents begin, takes its time, and only then writes what the stack reads: x [H], where the token is and goes
    (NUMBERS i64[4]) and the whole cache."""
    tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()
    i = tl.program_id(0)
    at = i * BLOCK + tl.arange(0, BLOCK)
    k = tl.load(NEW_K + at, mask=at < elements)
    slow = k.to(tl.float32)
    for _ in range(rounds):
        slow = tl.sqrt(slow * slow)  # what the compiler cannot leave out
    k = tl.where(slow >= 0, k, 0.0)
    tl.store(K + at, k, mask=at < elements)
    tl.store(V + at, tl.load(NEW_V + at, mask=at < elements), mask=at < elements)
    if i == 0:
        h = tl.arange(0, H)
        tl.store(X + h, tl.load(NEW_X + h))
        n = tl.arange(0, 4)
        tl.store(NUMBERS + n, tl.load(NEW_NUMBERS + n))


@pytest.mark.parametrize("rounds", [1, 3000, 30000])
@U_WORDS
def test_x_the_cache_and_the_tokens_place_are_read_when_the_kernel_before_has_written_them(u_words: bool, rounds: int) -> None:
    here = case("small", length=333, tile={"u_words": u_words})
    x, layers, rope, view = here.make()
    numbers = torch.tensor([int(view.positions), int(view.slots), int(view.seq_lens), 0], device="cuda")
    late, late_x = torch.zeros_like(numbers), torch.full_like(x, 7.0)
    # lengths are i32: the low half of the third number
    now = replace(view, positions=late[0:1], slots=late[1:2], seq_lens=late.view(torch.int32)[4:5])
    k, v = view.k.clone(), view.v.clone()
    stack, blocks = here.stack(layers), triton.cdiv(k.numel(), 1024)

    def step() -> torch.Tensor:
        late_writer[(blocks,)](
            late_x, x, late, numbers, view.k, k, view.v, v, k.numel(), rounds, H=here.hidden, BLOCK=1024, launch_pdl=True
        )
        return stack(late_x, rope, now)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [step() for _ in range(3)]
    for _ in range(5):
        late_x.fill_(7.0)
        late.zero_()
        view.k.fill_(9.0)
        view.v.fill_(9.0)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(late_x, x), "the writer must have written"
        wanted = exact(x, layers, rope, view)
        assert max(apart(out, wanted) for out in outs) < TOLERANCE
    assert int(stack.failed) == 0


def both_ways(step: Callable[[], list[torch.Tensor]], times: int = 50) -> None:
    """What a graph of the step gives, launches back to back, is bit for bit what it gives with the device idle between them."""
    wanted = [t.clone() for t in step()]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = step()
    for _ in range(times):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        for out, right in zip(outs, wanted, strict=True):
            assert torch.equal(out, right)


def idle() -> None:
    """Waits for the device between launches, but not while a graph is captured."""
    if not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize()


@U_WORDS
def test_two_stacks_that_take_turns_read_one_anothers_streams(u_words: bool) -> None:
    tile = {"u_words": u_words}
    cases = [case("small", layers=layers, length=333, seed=layers, tile=tile) for layers in (1, 3)]
    made = [here.make() for here in cases]
    stacks = [here.stack(layers) for here, (_, layers, _, _) in zip(cases, made, strict=True)]

    def step() -> list[torch.Tensor]:
        x, outs = made[0][0], list[torch.Tensor]()
        for i in (0, 1, 1, 0, 1, 0):
            idle()
            _, _, rope, view = made[i]
            outs.append(x := stacks[i](x, rope, view))
        return outs

    both_ways(step)
    assert [int(stack.failed) for stack in stacks] == [0, 0]


@pytest.mark.parametrize("programs", [2, 20, 100, None])
@U_WORDS
def test_launches_that_leave_multiprocessors_idle_do_not_overtake_one_another(programs: int | None, u_words: bool) -> None:
    """Where there is room the next launches are all there at once, and read the stream of the one before."""
    more = {} if programs is None else {"programs": programs}
    here = case("small", length=333, tile={"u_words": u_words}, **more)
    x, layers, rope, view = here.make()
    stack = here.stack(layers)

    def step() -> list[torch.Tensor]:
        outs = [x]
        for _ in range(12):
            idle()
            outs.append(stack(outs[-1], rope, view))
        return outs[1:]

    both_ways(step)
    assert int(stack.failed) == 0


@pytest.mark.parametrize("stages", [2, 6])
@U_WORDS
def test_what_projects_the_stream_onto_the_vocabulary_reads_all_of_it(u_words: bool, stages: int) -> None:
    """It is launched when all of the stack's programs have begun, with weights of its own on their way; then the next step."""
    here = case("llama-1b", length=333, tile={"u_words": u_words})
    x, layers, rope, view = here.make()
    stack, race = here.stack(layers), Race("cuda")
    _, head, sampling = sampling_case(3, 1, 8192, here.hidden, torch.bfloat16, "cuda")

    def step() -> list[torch.Tensor]:
        outs = list[torch.Tensor]()
        for _ in range(4):
            idle()
            out = stack(x, rope, view)
            idle()
            outs += [out, ring_project(out, head, LOGITS, sampling, RingTile(1, stages), race)]
        return outs

    both_ways(step)
    assert int(stack.failed) == 0


def test_a_kernel_before_that_is_no_dependent_launch_is_waited_for() -> None:
    """Plain operations of PyTorch's and copies, which let nothing begin early; outside a graph as well."""
    here = case("small", length=333)
    x, layers, rope, view = here.make()
    stack, big = here.stack(layers), torch.randn(1 << 24, device="cuda")
    wanted = stack(x, rope, view).clone()
    for _ in range(50):
        late = torch.full_like(x, float("nan"))
        big.mul_(-1.0)
        late.copy_(x)
        out = stack(late, rope, view)
        late.fill_(float("nan"))  # which in turn waits for the stack
        assert torch.equal(out, wanted)
    assert int(stack.failed) == 0


def test_others_work_on_the_device_delays_programs_and_changes_nothing() -> None:
    """Matrix products on another stream have multiprocessors, for milliseconds at a time, that programs wait for."""
    here = case("llama-1b", length=333)
    x, layers, rope, view = here.make()
    stack, other = here.stack(layers), torch.cuda.Stream()
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    wanted = stack(x, rope, view).clone()
    torch.cuda.synchronize()
    outs = []
    for _ in range(20):
        with torch.cuda.stream(other):
            a @ a
        outs += [stack(x, rope, view) for _ in range(3)]
    torch.cuda.synchronize()
    assert all(torch.equal(out, wanted) for out in outs)
    assert int(stack.failed) == 0


@U_WORDS
def test_a_graph_that_begins_with_the_stack_is_right_replay_after_replay_at_changing_lengths(u_words: bool) -> None:
    """Replays queue up; each finds the words, the epoch and the counters as the one before left them."""
    here = case("llama-1b", length=2100, tile={"u_words": u_words})
    x, layers, rope, view = here.make()
    stack = here.stack(layers)
    stack(x, rope, view)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = stack(x, rope, view)
    found = []
    for length in (2100, 1, 33, 600, 2, 1500):
        now = at_length(view, length)
        for _ in range(10):
            graph.replay()
        found.append((out.clone(), exact(x, layers, rope, now)))
    assert max(apart(*pair) for pair in found) < TOLERANCE
    assert int(stack.epoch) == 61 * (len(layers) + 1), "a launch of its own and sixty replays"
    assert int(stack.failed) == 0


def test_a_cooperative_launch_gives_what_a_dependent_one_gives() -> None:
    def stream(pdl: bool) -> torch.Tensor:
        here = case("llama-1b", length=333, tile={"pdl": pdl})
        x, layers, rope, view = here.make()
        return here.stack(layers)(x, rope, view)

    assert torch.equal(stream(True), stream(False))
