"""What each policy is for, and the article's flaws shown."""

import pytest
from driving import Guesses, add, make_engine, run

from pdlab.core.config import POLICIES, EngineConfig
from pdlab.core.errors import ConfigError, PolicyError
from pdlab.scheduler.deadlines import first_token_due, next_token_due, objectives_met
from pdlab.scheduler.policies import Lazily, Remembered, WeightedPriority, make_policy


def admitted(requests):
    """Numbers in the order of first scheduling."""
    there = [r for r in requests if r.first_scheduled_s is not None]
    return [r.request_id for r in sorted(there, key=lambda r: (r.first_scheduled_s, r.first_token_s))]


def test_every_named_policy_is_built_and_an_unknown_one_is_refused():
    assert {make_policy(EngineConfig(policy=p)).__class__ for p in POLICIES}
    with pytest.raises(ConfigError, match="choose one of"):
        EngineConfig(policy="fastest")


# ---- the article's scheduler


def test_the_articles_scheduler_crashes_on_a_tie_and_says_so():
    engine = make_engine(policy="article")
    for _ in range(2):
        add(engine, 8, 2)
    with pytest.raises(PolicyError, match="compared two requests") as e:
        engine.step()
    assert "sjf" in e.value.hint
    assert isinstance(e.value.__cause__, TypeError)


def test_after_the_crash_the_engine_still_works_once_the_tie_is_gone():
    engine = make_engine(policy="article", article_budget_s=100.0)
    first, second = add(engine, 8, 2), add(engine, 8, 2)
    with pytest.raises(PolicyError):
        engine.step()
    engine.abort(first.request_id)
    run(engine)
    assert second.finish_reason.value == "length"


def test_the_articles_scheduler_never_runs_what_is_over_its_budget_and_hides_nothing_shorter():
    engine = make_engine(policy="article_no_ties", article_budget_s=20.0)
    long, short = add(engine, 30, 2), add(engine, 4, 2)
    run(engine)
    assert (long.finish_reason.value, short.finish_reason.value) == ("error", "length")
    assert "never runs this request" in long.error


def starve(policy, shorts, **fields):
    """Wait of a long request that arrives first, while a short one arrives every second and one at a time may run."""
    engine = make_engine(policy=policy, max_batch_requests=1, article_budget_s=1e6, **fields)
    blocker = add(engine, 4, 1)
    engine.step()
    long = add(engine, 50, 2)
    for _ in range(shorts):
        add(engine, 4, 1)
        engine.step()
    add(engine, 4, 1)
    run(engine)
    assert blocker.finished
    return long.first_scheduled_s - long.arrival_s


@pytest.mark.parametrize("policy", ["article_no_ties", "sjf", "least_remaining"])
def test_shortest_first_starves_a_long_request_for_as_long_as_short_ones_come(policy):
    # seconds_per_token = 1: the long one is estimated at 52 s, a short one at 5 s
    assert starve(policy, 50) >= 50
    assert starve(policy, 200) >= 200


@pytest.mark.parametrize("policy", ["fcfs", "sjf_aging", "oracle", "deadline"])
def test_aging_lets_it_run_after_its_headstart(policy):
    waits = [starve(policy, n, patience_s=30.0, aging_factor=10.0, ttft_objective_s=5.0) for n in (50, 200)]
    assert max(waits) <= 30 + 5
    assert waits[0] == waits[1]


# ---- order


def test_first_come_is_first_served_and_last_come_gives_up_first():
    engine = make_engine(policy="fcfs", max_batch_requests=2)
    requests = [add(engine, n, 2) for n in (12, 3, 9, 1)]
    order, victims = engine.scheduler.policy.order(requests[::-1], requests, 0.0, engine.estimator)
    assert [r.request_id for r in order] == [0, 1, 2, 3]
    assert [r.request_id for r in victims] == [3, 2, 1, 0]
    run(engine)
    assert admitted(requests) == [0, 1, 2, 3]


def test_shortest_first_runs_by_estimate_with_ties_by_arrival():
    engine = make_engine(Guesses({0: 5, 1: 3, 2: 3, 3: 1}), policy="sjf", max_batch_requests=1)
    requests = [add(engine, 4, 1) for _ in range(4)]
    run(engine)
    assert admitted(requests) == [3, 1, 2, 0]


def test_a_short_prompt_passes_a_long_one_between_its_chunks():
    waits = {}
    for policy in ("fcfs", "sjf", "sjf_aging", "least_remaining"):
        engine = make_engine(policy=policy, max_batch_tokens=8, patience_s=1000.0)
        long = add(engine, 80, 1)
        engine.step()
        short = add(engine, 4, 1)
        run(engine)
        assert long.finished
        waits[policy] = short.first_token_s - short.arrival_s
    assert waits["fcfs"] >= 9
    assert waits["sjf"] == waits["sjf_aging"] == waits["least_remaining"] == 1


def test_least_remaining_takes_the_place_of_one_with_much_more_left():
    engine = make_engine(policy="least_remaining", max_batch_requests=1)
    long = add(engine, 8, 60)
    for _ in range(3):
        engine.step()
    short = add(engine, 4, 2)
    run(engine)
    assert short.first_token_s - short.arrival_s <= 2
    assert long.preemptions == 1
    assert len(long.output_token_ids) == 60


def test_least_remaining_leaves_one_that_is_nearly_done():
    engine = make_engine(policy="least_remaining", max_batch_requests=1)
    running = add(engine, 8, 6)
    for _ in range(3):
        engine.step()
    add(engine, 4, 2)
    run(engine)
    assert running.preemptions == 0


def test_a_request_is_preempted_for_others_a_bounded_number_of_times():
    engine = make_engine(policy="least_remaining", max_batch_requests=1)
    long = add(engine, 8, 100)
    for _ in range(30):
        engine.step()
        engine.step()
        add(engine, 2, 1)
    run(engine)
    assert 1 <= long.preemptions <= 2


# ---- priorities


def test_classes_share_by_weight_and_none_starves():
    engine = make_engine(policy="priority", priority_ratio=4.0, max_batch_requests=1)
    requests = [add(engine, 4, 1, priority=i % 2) for i in range(40)]
    run(engine)
    order = [requests[i].priority for i in admitted(requests)]
    for n in range(5, 25, 5):  # while both wait, of every five admitted four are of the upper class, give or take one
        assert abs(sum(order[:n]) - 0.8 * n) <= 1


def test_a_class_that_was_away_gets_no_credit_for_its_absence():
    policy = WeightedPriority(1.0)
    engine = make_engine(policy="priority", max_batch_requests=1, priority_ratio=1.0)
    early = [add(engine, 4, 1, priority=0) for _ in range(20)]
    for _ in range(30):
        engine.step()
    late = [add(engine, 4, 1, priority=1) for _ in range(10)]
    more = [add(engine, 4, 1, priority=0) for _ in range(10)]
    run(engine)
    assert all(r.finished for r in early)
    order = [r.priority for r in sorted(late + more, key=lambda r: r.first_scheduled_s)]
    assert 3 <= sum(order[:10]) <= 7
    assert policy.weight(3) == 1.0


def test_an_urgent_request_takes_the_place_of_a_lower_class():
    engine = make_engine(policy="priority", max_batch_requests=1)
    low = add(engine, 8, 50, priority=0)
    for _ in range(3):
        engine.step()
    high = add(engine, 4, 2, priority=1)
    run(engine)
    assert high.first_token_s - high.arrival_s <= 2
    assert low.preemptions == 1


# ---- deadlines


def test_the_earlier_deadline_goes_first():
    engine = make_engine(policy="deadline", max_batch_requests=1)
    relaxed = add(engine, 4, 1, ttft_deadline_s=500.0)
    pressed = add(engine, 4, 1, ttft_deadline_s=60.0)
    run(engine)
    assert admitted([relaxed, pressed]) == [1, 0]


def test_a_hopeless_request_makes_room_for_one_that_can_be_in_time():
    engine = make_engine(policy="deadline", max_batch_requests=1, patience_s=50.0)
    hopeless = add(engine, 40, 1, ttft_deadline_s=3.0)  # 40 s of prompt at a second a token
    hopeful = add(engine, 4, 1, ttft_deadline_s=30.0)
    run(engine)
    assert admitted([hopeless, hopeful]) == [1, 0]


class Priced(Guesses):
    """A step takes a second, and a hundredth more for each prompt token, twice that for every thousand tokens before it."""

    def step_seconds(self, shape):
        return 1.0 + sum(1e-2 * n * (1 + 2e-3 * context) for n, context in shape.prefill)

    def prefill_seconds(self, tokens):
        return 1e-2 * tokens


def test_a_prompt_that_cannot_be_in_time_gets_steps_of_its_own_and_delays_nobody():
    engine = make_engine(Priced(), policy="deadline", max_batch_tokens=512, page_size=64, capacity=65536, patience_s=1000.0)
    large = add(engine, 3000, 1, ttft_deadline_s=10.0)  # it takes 30 s alone
    chats = [add(engine, 40, 4, ttft_deadline_s=900.0) for _ in range(3)]
    run(engine)
    assert sum(row.prefill_tokens for row in engine.trace) == 3000 + 3 * 40
    assert engine.trace[0].prefill_tokens == 120, "those who can be in time share the first step, and nobody else's is in it"
    assert max(r.first_token_s for r in chats) == 1.0
    assert large.finished


def test_a_step_with_a_large_prompt_takes_little_more_than_a_full_one_until_patience_is_over():
    engine = make_engine(
        Priced(), policy="deadline", max_batch_tokens=1000, page_size=64, capacity=65536, patience_s=10.0,
        ttft_objective_s=1.0,
    )  # fmt: skip
    policy, large = engine.scheduler.policy, add(engine, 3500, 1)
    chunks = []
    for done in (0, 1000, 2000):
        large.num_scheduled = done
        policy.order([large], [], 5.0, engine.estimator)
        chunks.append(policy.chunk(large, 1000, 0))
        assert policy.chunk(large, 900, 100) == 0, "never beside somebody else's prompt"
    # a full step takes 11 s, so at most 16.5 s at 1, 3 and 5 hundredths a token
    assert chunks == [1000, pytest.approx(516, abs=1), pytest.approx(310, abs=1)]
    policy.order([large], [], 10.0, engine.estimator)
    assert policy.chunk(large, 900, 100) == 900, "whoever waited out patience is served like anybody"


def test_due_times_and_goodput_follow_their_definition():
    engine = make_engine()
    r = add(engine, 4, 8, arrival_s=0.0, ttft_deadline_s=3.0, per_token_deadline_s=0.5)
    assert (first_token_due(r, 9.0), next_token_due(r, 9.0, 9.0)) == (3.0, 3.0)
    r.output_token_ids += [1, 2]
    assert next_token_due(r, 9.0, 9.0) == 4.0
    plain = add(engine, 4, 8, arrival_s=1.0)
    assert first_token_due(plain, 9.0) == 10.0
    assert objectives_met(1.0, 0.1, 1.0, 0.1)
    assert objectives_met(1.0, None, 1.0, 0.1)
    assert not objectives_met(1.01, 0.1, 1.0, 0.1)
    assert not objectives_met(1.0, 0.11, 1.0, 0.1)
    assert not objectives_met(None, None, 1.0, 0.1)
    assert not objectives_met(float("nan"), None, 1.0, 0.1)


# ---- helpers


def test_victims_are_sorted_only_when_somebody_asks():
    calls = []
    lazy = Lazily(lambda: calls.append(1) or [3, 2, 1])
    assert calls == []
    assert (len(lazy), list(lazy), lazy[0], lazy[1:]) == (3, [3, 2, 1], 3, [2, 1])
    assert calls == [1]


def test_what_is_remembered_of_requests_stays_bounded():
    engine = make_engine(capacity=4096)
    memory = Remembered()
    for _ in range(5):
        batch = [add(engine, 1, 1) for _ in range(700)]
        for r in batch:
            assert memory.get(r, lambda r: float(r.request_id)) == r.request_id
        memory.forget_all_but(batch[:10])
        assert len(memory._known) <= 1024 + 700
    assert memory.get(batch[3], lambda r: -1.0) == batch[3].request_id
