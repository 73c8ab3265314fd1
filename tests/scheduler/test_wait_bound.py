"""The bound on waiting that sjf_aging promises, and that nothing is lost under any policy: state machines over the real
scheduler, allocator and engine on a virtual clock, with estimates as wrong as hypothesis can make them."""

import pytest
from driving import Guesses, add, make_engine
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from pdlab.scheduler.deadlines import EarliestDeadline
from pdlab.scheduler.policies import AgedShortestFirst

SETTINGS = settings(
    max_examples=25,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


class WaitBound(RuleBasedStateMachine):
    """One second a step. For every request the bound is computed at the moment key(r) passes, from what is there then."""

    policy = "sjf_aging"

    @initialize(
        factor=st.sampled_from([0.1, 1.0, 7.0]), patience=st.sampled_from([1.0, 9.0, 40.0]), flight=st.sampled_from([1, 2])
    )
    def begin(self, factor, patience, flight):
        self.guesses = Guesses()
        self.engine = make_engine(
            self.guesses, policy=self.policy, aging_factor=factor, patience_s=patience, steps_in_flight=flight
        )
        self.all = []
        self.latest = {}  # request id -> time by which it must have been scheduled

    def key(self, r):
        policy = self.engine.scheduler.policy
        if isinstance(policy, EarliestDeadline):
            return r.arrival_s + policy.patience_s
        assert isinstance(policy, AgedShortestFirst)
        return policy.key(r, self.engine.clock.now(), self.guesses)

    @rule(prompt=st.integers(1, 60), output=st.integers(1, 12), guess=st.sampled_from([0.0, 0.3, 2.0, 50.0, 1e9]))
    def arrive(self, prompt, output, guess):
        self.guesses.told[len(self.all)] = guess
        self.all.append(add(self.engine, prompt, output))

    @rule(steps=st.integers(1, 5))
    def go_on(self, steps):
        for _ in range(steps):
            self.note_bounds()
            self.engine.step()

    def note_bounds(self):
        now = self.engine.clock.now()
        waiting = [r for r in self.all if not r.finished and r.first_scheduled_s is None]
        for r in waiting:
            if r.request_id in self.latest or now < self.key(r):
                continue
            before = [o for o in self.all if not o.finished and o is not r and (o.row >= 0 or self.key(o) <= self.key(r))]
            computed = (o.num_tokens - 1 if o.output_token_ids and o.row >= 0 else o.num_computed for o in before)
            left = sum(o.prompt_len + o.params.max_tokens for o in before) - sum(computed)
            # two steps of slack: the one that noticed that key(r) had passed, and one in flight
            self.latest[r.request_id] = now + left + 2

    @invariant()
    def nobody_waits_longer_than_the_bound(self):
        if not hasattr(self, "engine"):
            return
        now = self.engine.clock.now()
        for r in self.all:
            latest = self.latest.get(r.request_id)
            if latest is not None:
                assert (now if r.first_scheduled_s is None else r.first_scheduled_s) <= latest, (r.request_id, latest)

    @invariant()
    def nobody_is_overtaken_by_one_who_came_after_its_key(self):
        if not hasattr(self, "engine"):
            return
        for r in (r for r in self.all if r.first_scheduled_s is None and not r.finished):
            for other in self.all:
                if other.first_scheduled_s is not None and other.arrival_s > self.key(r):
                    pytest.fail(f"{other.request_id} arrived at {other.arrival_s}, after key {self.key(r)} of {r.request_id}")

    def teardown(self):
        if hasattr(self, "engine"):
            for _ in range(10_000):
                if self.engine.idle:
                    break
                self.note_bounds()
                self.engine.step()
                self.nobody_waits_longer_than_the_bound()
            assert all(len(r.output_token_ids) == r.params.max_tokens for r in self.all)


@pytest.mark.parametrize("policy", ["sjf_aging", "oracle", "deadline"])
def test_every_wait_is_under_the_stated_bound_whatever_the_estimates(policy):
    run_state_machine_as_test(type("Bound", (WaitBound,), {"policy": policy}), settings=SETTINGS)


class NothingLost(RuleBasedStateMachine):
    """Any policy, little memory, aborts and steps in flight: every request ends once, and memory is whole at all times."""

    policy = "fcfs"
    batching = "continuous_chunked"

    @initialize(flight=st.sampled_from([1, 2]), capacity=st.sampled_from([48, 96, 400]))
    def begin(self, flight, capacity):
        self.guesses = Guesses()
        self.engine = make_engine(
            self.guesses, capacity, policy=self.policy, batching=self.batching, steps_in_flight=flight, static_batch_tokens=64,
            patience_s=5.0,
        )  # fmt: skip
        self.all = []

    @rule(
        prompt=st.integers(1, 40),
        output=st.integers(1, 7),
        guess=st.floats(0, 100),
        priority=st.integers(-1, 2),
        ttft=st.sampled_from([None, 1.0, 20.0]),
    )
    def arrive(self, prompt, output, guess, priority, ttft):
        self.guesses.told[len(self.all)] = guess + 1e-6 * len(self.all)  # no ties: the article's crash has its own test
        self.all.append(add(self.engine, prompt, output, priority=priority, ttft_deadline_s=ttft))

    @rule(which=st.integers(0, 30))
    def abort(self, which):
        if which < len(self.all):
            self.engine.abort(self.all[which].request_id)

    @rule(steps=st.integers(1, 6))
    def go_on(self, steps):
        for _ in range(steps):
            self.engine.step()

    @invariant()
    def memory_is_whole(self):
        if hasattr(self, "engine"):
            self.engine.allocator.check()
            assert len(self.engine.scheduler.running) <= 4

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for _ in range(20_000):
            if self.engine.idle:
                break
            self.engine.step()
            if self.engine.stuck:
                self.engine.give_up()
        assert self.engine.idle
        assert not self.engine.scheduler.running
        assert not self.engine.scheduler.waiting
        assert self.engine.allocator.stats().reserved == 0
        for r in self.all:
            assert r.finished
            if r.finish_reason.value == "length":
                assert len(r.output_token_ids) == r.params.max_tokens


@pytest.mark.parametrize(
    "policy",
    ["fcfs", "sjf", "sjf_aging", "least_remaining", "priority", "deadline", "oracle", "article", "article_no_ties"],
)
def test_no_request_and_no_page_is_lost_under_any_policy(policy):
    run_state_machine_as_test(type("Lost", (NothingLost,), {"policy": policy}), settings=settings(SETTINGS, max_examples=12))


@pytest.mark.parametrize("batching", ["continuous", "static", "one_at_a_time", "article_mended"])
def test_no_request_and_no_page_is_lost_under_any_batching(batching):
    run_state_machine_as_test(
        type("Lost", (NothingLost,), {"batching": batching}), settings=settings(SETTINGS, max_examples=12)
    )
