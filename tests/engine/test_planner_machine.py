"""The planner under random arrivals, aborts, failures and memory shortage, over a device that only checks what it is told.

The device keeps, as a GPU would, the token that each row sampled last, and says of request r's i-th output token what the
test can compute alone. So an answer that was mixed up, lost or computed twice differs from what the test expects.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdlab.core.clock import VirtualClock
from pdlab.core.config import EngineConfig, SamplingParams
from pdlab.core.plan import IN_FLIGHT, Plan, PlanShape
from pdlab.core.request import FinishReason, Request, Status
from pdlab.core.trace import TraceRow
from pdlab.costs.interface import Estimator
from pdlab.engine.engine import Engine
from pdlab.engine.interface import StepResult
from pdlab.engine.simulated import synthetic_tokens
from pdlab.models.config import ModelConfig

MODEL = ModelConfig("checked", "llama", 64, 8, 1, 1, 1, 8, 8, max_context=64)
CAPACITY = 48


class Constant(Estimator):
    """Every step takes a millisecond."""

    def step_seconds(self, shape: PlanShape) -> float:
        return 1e-3

    def remaining(self, request: Request) -> float:
        return 1e-3 * (request.num_tokens - request.num_computed)

    def observe(self, row: TraceRow, shape: PlanShape | None = None, launch_s: float = 0.0) -> None:
        return None

    def save(self, path) -> None:  # type: ignore[no-untyped-def]
        return None

    load = save


class CheckedDevice:
    """Runs nothing; checks each plan as far as it goes alone. `fail_next` makes the next step end in an error."""

    def __init__(self, steps_in_flight: int) -> None:
        self.clock, self.overlaps = VirtualClock(), False
        self.last: dict[int, int] = {}
        self.unfinished = 0
        self.most = steps_in_flight
        self.fail_next = False
        self.bad_next = False
        self.on_plan: Callable[[Plan], None] = lambda plan: None

    def capacity(self) -> int:
        return CAPACITY

    def submit(self, plan: Plan) -> CheckedHandle:
        assert self.unfinished < self.most
        self.unfinished += 1
        self.on_plan(plan)
        b = plan.batch
        assert len({*plan.request_ids.tolist()}) == b == len({*plan.rows.tolist()})
        assert plan.q_start[-1] == plan.new_tokens
        assert len({*plan.slots.tolist()}) == plan.new_tokens
        assert plan.slots.max() < CAPACITY
        for i in range(b):
            lo, hi = plan.q_start[i], plan.q_start[i + 1]
            assert plan.positions[lo:hi].tolist() == list(range(plan.context_lens[i] - (hi - lo), plan.context_lens[i]))
            if plan.token_ids[lo] == IN_FLIGHT:
                assert hi - lo == 1
                assert int(plan.rows[i]) in self.last
        sampled = plan.sample_rows
        tokens = synthetic_tokens(plan.sampling.seed, plan.sampling.position, MODEL.vocab_size)
        self.last.update(zip(plan.rows[sampled].tolist(), tokens.tolist(), strict=True))
        error = RuntimeError("told to fail") if self.fail_next else None
        if self.bad_next and len(tokens):
            tokens[0], self.bad_next = -1, False
        self.fail_next = False
        self.clock.advance(1e-3)
        now = self.clock.now()
        return CheckedHandle(self, StepResult(plan.step, tokens, now - 1e-3, now, error=error))

    def reset(self) -> None:
        assert self.unfinished == 0
        self.last.clear()

    def close(self) -> None:
        return None


class CheckedHandle:
    def __init__(self, device: CheckedDevice, outcome: StepResult) -> None:
        self.device, self.outcome = device, outcome

    def done(self) -> bool:
        return True

    def result(self) -> StepResult:
        self.device.unfinished -= 1
        return self.outcome


class Planner(RuleBasedStateMachine):
    @initialize(
        flights=st.sampled_from([1, 2]),
        budget=st.sampled_from([1, 3, 7, 30]),
        requests=st.sampled_from([1, 3, 8]),
        page=st.sampled_from([1, 4, 16]),
        batching=st.sampled_from(["continuous_chunked", "continuous"]),
        allocator=st.sampled_from(["paged", "paged", "contiguous_pool", "hybrid", "per_request"]),
        reuse=st.booleans(),
        compact=st.booleans(),
    )
    def build(self, flights, budget, requests, page, batching, allocator, reuse, compact) -> None:  # type: ignore[no-untyped-def]
        self.config = EngineConfig(
            steps_in_flight=flights,
            max_batch_tokens=budget,
            max_batch_requests=requests,
            page_size=page,
            batching=batching,
            kv_allocator=allocator,
            prefix_reuse=reuse,
            compact_every=1 if compact else None,
            compact_on_refusal=compact,
        )
        self.device = CheckedDevice(flights)
        self.engine = Engine(self.config, MODEL, self.device, Constant())
        self.requests: list[Request] = []

    @rule(prompt=st.integers(1, 30), outputs=st.integers(1, 20), shared=st.booleans())
    def arrive(self, prompt: int, outputs: int, shared: bool) -> None:
        start = 0 if shared else 7 * len(self.requests)
        tokens = [(start + i) % 50 for i in range(prompt)]
        self.requests.append(self.engine.add(tokens, SamplingParams(max_tokens=outputs, seed=len(self.requests))))

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.one_step()

    @precondition(lambda self: any(not r.finished for r in self.requests))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from([r for r in self.requests if not r.finished]))
        self.engine.abort(request.request_id)
        assert request.finish_reason is FinishReason.ABORTED

    @precondition(lambda self: not self.engine.idle)
    @rule()
    def fail_a_step(self) -> None:
        self.device.fail_next = True
        self.one_step()

    @precondition(lambda self: not self.engine.idle)
    @rule()
    def spoil_a_row(self) -> None:
        self.device.bad_next = True
        self.one_step()
        self.device.bad_next = False

    def one_step(self) -> None:
        s = self.engine.scheduler
        before = {r.request_id: r for r in s.running.values()}
        decoding = {i for i, r in before.items() if i not in s.prefilling and s.rows.sampled[r.row] < s.output_limit(r)}
        waiting = list(s.waiting)
        self.device.on_plan = lambda plan: self.check_plan(plan, decoding, waiting)
        self.engine.step()
        self.engine.allocator.check()

    def check_plan(self, plan: Plan, decoding: set[int], waiting: list[int]) -> None:
        tokens, budget = plan.new_tokens, self.config.max_batch_tokens
        chunks = plan.batch - plan.shape.decode_count
        assert tokens <= budget or (self.config.batching == "continuous" and chunks == 1)
        assert tokens == plan.shape.new_tokens
        assert plan.batch <= self.config.max_batch_requests
        ids = set(plan.request_ids.tolist())
        by_id = {r.request_id: r for r in self.requests}
        for stalled in decoding - ids:  # a decode stalls only for memory: it was preempted, or waits for a step in flight
            r = by_id[stalled]
            assert r.status is not Status.RUNNING or self.config.steps_in_flight == 2 or r.finished
        for i, rid in enumerate(plan.request_ids.tolist()):
            lo, hi = int(plan.q_start[i]), int(plan.q_start[i + 1])
            if plan.token_ids[lo] != IN_FLIGHT:
                end = int(plan.context_lens[i])
                assert plan.token_ids[lo:hi].tolist() == by_id[rid].tokens(end - (hi - lo), end)
        self.check_memory(admitted=any(i in ids for i in waiting))
        # first come, first served: nobody is admitted past someone who came earlier and still waits
        admitted = [i for i in waiting if i in ids]
        still = [i for i in waiting if not by_id[i].finished and by_id[i].status is Status.WAITING]
        if admitted and still:
            assert max(admitted) < min(still)

    def check_memory(self, admitted: bool) -> None:
        """Pages are reserved for what is being written, and whoever is admitted finds room for the rest of its prompt."""
        s, memory = self.engine.scheduler, self.engine.allocator
        stats, size = memory.stats(), memory.page_size
        lacking = 0
        for rid, r in s.running.items():
            room, scheduled = memory.room(rid), s.rows.scheduled[r.row]
            assert room >= scheduled
            if memory.kind == "paged" and rid not in getattr(memory, "_runs", ()):
                assert room - scheduled < size
            if rid in s.prefilling:
                lacking += max(0, -(-r.num_tokens // size) * size - room)
        assert s.unreserved == lacking
        if admitted:
            assert lacking <= stats.free
        if len(s.prefilling) == len(s.running):  # no decode is there whose end could be waited for
            assert lacking <= stats.free + stats.retired

    @invariant()
    def tokens_are_the_requests_own(self) -> None:
        for r in getattr(self, "requests", []):
            expected = synthetic_tokens(np.full(len(r.output_token_ids), r.seed), np.arange(len(r.output_token_ids)), 64)
            assert r.output_token_ids == expected.tolist()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        work = sum(r.num_tokens + self.engine.scheduler.output_limit(r) for r in self.requests if not r.finished)
        for _ in range(8 * work + 8):  # a bound that preemptions multiply, but not for ever
            if self.engine.idle:
                break
            self.one_step()
        assert self.engine.idle
        for r in self.requests:
            assert r.finished
            if r.finish_reason is FinishReason.LENGTH:
                assert len(r.output_token_ids) == min(r.params.max_tokens, self.engine.max_len - r.prompt_len)
            assert (r.error is not None) == (r.finish_reason is FinishReason.ERROR)
        assert not self.engine.allocator.live()
        assert all(r is None for r in self.engine.scheduler.rows.request)
        stats = self.engine.allocator.stats()
        assert stats.reserved == 0
        assert stats.retired == 0
        assert stats.free == stats.capacity


Planner.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestThePlanner = Planner.TestCase
