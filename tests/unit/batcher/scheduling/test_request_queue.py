"""Order of waiting requests: classes, shares of tenants, age; nobody starves; nobody is forgotten."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batcher.scheduling.replica import WorkerLimits
from batcher.scheduling.request_queue import MAX_LOOKED_PAST, MAX_PASSED, PATIENCE, RequestQueue
from batcher.scheduling.sequence import PlacedRow, Sequence
from common.messages.request import SERVICE_CLASSES
from tests.support.fleet.simulated_pool import Pool, request
from tests.support.scheduling.obvious_queue import ObviousQueue

STEP_TOKENS = 64
"""Prompt tokens of one step of a simulated worker."""


def new(
    name: str, arrival: int, priority: str = "", tenant: str = "", prompt: int = 10, most: int = 10
) -> Sequence:
    """A request that waits."""
    sequence = request(name, prompt, most, arrival)
    asked = replace(sequence.request, class_name=priority, tenant=tenant)
    return Sequence(asked, sequence.entry_id, sequence.deadline_ms, waiting=True)


def queue_of(*sequences: Sequence, weights: dict[str, float] | None = None) -> RequestQueue:
    queue = RequestQueue(weights or {})
    for sequence in sequences:
        queue.add(sequence)
    return queue


def start_all(queue: RequestQueue, most: int = 10**6, fits: Callable[[Sequence], bool] = bool) -> list[str]:
    """Start what fits, at most so many; they end at once. Return their names."""
    started: list[str] = []
    while (first := queue.first()) is not None and len(started) < most:
        if fits(first):
            first.waiting = False
            num_new = first.request.stopping.max_new_tokens
            row = PlacedRow(1, first, charged=queue.start(first, first.num_known))
            queue.learn(first, num_new)
            queue.correct_charge(row, first.num_known + num_new)
            started.append(first.request_id)
        else:
            queue.look_past(first)
    queue.end_turn()
    return started


def test_urgent_classes_start_first_and_an_unknown_class_is_standard() -> None:
    queue = queue_of(new("b", 0, "batch"), new("u", 1, "?"), new("s", 2), new("i", 3, "interactive"))
    assert start_all(queue) == ["i", "u", "s", "b"]


def test_a_large_batch_is_passed_by_the_urgent_but_does_not_starve() -> None:
    queue = queue_of(*(new(f"b{i}", i, "batch") for i in range(2000)))
    for i in range(100):
        queue.add(new(f"i{i}", 20_000 + i, "interactive"))
    started = start_all(queue, 105)
    assert [name[0] for name in started[:PATIENCE]] == ["i"] * PATIENCE
    assert Counter(name[0] for name in started) == {"i": 99, "b": 6}


def test_each_class_keeps_its_turn_under_a_flood_of_the_others() -> None:
    queue, arrival, since = RequestQueue({}), 0, Counter[str]()
    for turn in range(500):
        for name in SERVICE_CLASSES:
            arrival += 1
            queue.add(new(f"{name}{turn}", arrival, name))
        [started] = start_all(queue, 1)
        since = Counter({name: since[name] + 1 for name in SERVICE_CLASSES})
        since[started.rstrip("0123456789")] = 0
        assert max(since.values()) <= PATIENCE + len(SERVICE_CLASSES)


@settings(max_examples=60)
@given(
    trace=st.lists(
        st.sampled_from([(0,), (0, 0), (1,), (0, 1), (1, 2), (2, 2), (0, 2), ()]), min_size=30, max_size=150
    )
)
def test_no_class_that_waits_is_passed_for_long(trace: list[tuple[int, ...]]) -> None:
    """`trace`: of each turn, in which one request starts, the classes of those that come."""
    queue, numbers, waiting, passed = RequestQueue({}), count(), Counter[int](), Counter[int]()
    for coming in trace:
        for class_index in coming:
            queue.add(new(f"{class_index}.{next(numbers)}", next(numbers), SERVICE_CLASSES[class_index]))
            waiting[class_index] += 1
        for started in start_all(queue, 1):
            class_index = int(started[0])
            waiting[class_index] -= 1
            passed = Counter({other: passed[other] + 1 for other in +waiting if other != class_index})
        assert all(most <= PATIENCE + len(SERVICE_CLASSES) for most in passed.values())


def test_resumed_requests_start_first_in_their_class_the_shortest_first() -> None:
    long, short, lowly = new("long", 5, prompt=90), new("short", 6), new("lowly", 7, "batch")
    for sequence in (long, short, lowly):
        sequence.resumed = True
    queue = queue_of(new("new", 0), long, short, lowly, new("urgent", 9, "interactive"))
    assert start_all(queue) == ["urgent", "short", "long", "new", "lowly"]


def test_weights_divide_what_is_computed() -> None:
    queue = queue_of(weights={"heavy": 3.0})
    for i in range(400):
        queue.add(new(f"heavy{i}", i, tenant="heavy", prompt=50))
        queue.add(new(f"light{i}", 1000 + i, tenant="light", prompt=5, most=10))
    tokens = Counter[str]()
    for name in start_all(queue, 300):
        tokens[name[:5]] += 60 if name.startswith("heavy") else 15
    assert tokens["heavy"] / tokens["light"] == pytest.approx(3, rel=0.05)


def test_a_tenant_that_was_away_has_saved_nothing() -> None:
    queue = queue_of(*(new(f"a{i}", i, tenant="a") for i in range(200)))
    start_all(queue, 100)
    for i in range(100):
        queue.add(new(f"b{i}", 1000 + i, tenant="b"))
    assert abs(2 * sum(name.startswith("b") for name in start_all(queue, 100)) - 100) <= 4


def test_short_requests_pass_a_long_one_and_it_does_not_starve() -> None:
    long = new("long", 0, prompt=1000)
    queue = queue_of(long, *(new(f"s{i}", 1 + i) for i in range(3 * MAX_PASSED)))
    started = start_all(queue, fits=lambda sequence: sequence is not long)
    assert len(started) == 3 * MAX_PASSED
    assert start_all(queue, fits=lambda sequence: sequence is not long) == []
    queue.add(new("late", 999))
    assert start_all(queue, fits=lambda sequence: sequence is not long) == [], "it has waited for long enough"
    assert start_all(queue) == ["long", "late"]


def test_only_some_that_do_not_fit_are_looked_past_and_no_lower_class_takes_their_room() -> None:
    long = [new(f"l{i}", i, prompt=1000) for i in range(MAX_LOOKED_PAST)]
    short = new("short", 99)
    queue = queue_of(*long, short, new("lowly", 0, "batch"))
    assert start_all(queue, fits=lambda sequence: sequence.num_known < 1000) == []
    assert start_all(queue_of(*long[1:], short), fits=lambda sequence: sequence is short) == ["short"]


Arrival = tuple[int, int, int, int, bool]
arrivals = st.tuples(
    st.integers(0, 2), st.integers(0, 2), st.integers(1, 60), st.integers(1, 40), st.booleans()
)
turns = st.lists(
    st.tuples(st.lists(arrivals, max_size=6), st.integers(0, 4), st.integers(1, 70), st.integers(0, 3)),
    max_size=15,
)


@settings(max_examples=60)
@given(trace=turns, weight=st.sampled_from([1.0, 4.0]))
def test_an_obvious_queue_starts_the_same_and_each_once(
    trace: list[tuple[list[Arrival], int, int, int]], weight: float
) -> None:
    """`trace`: of each turn the requests that come, how many may start, the longest prompt that fits, and how
    many rows end.
    """
    weights = {"t0": weight}
    queue, obvious = RequestQueue(weights), ObviousQueue(weights)
    running: list[PlacedRow] = []
    started: list[str] = []
    num_added = 0

    def turn(most: int, longest: int, num_ends: int) -> None:
        for _ in range(most):
            while (first := queue.first()) is not None and first.num_known > longest:
                assert obvious.first() is first
                queue.look_past(first)
                obvious.look_past(first)
            assert obvious.first() is first
            if first is None:
                break
            first.waiting = False
            charged = queue.start(first, first.num_known)
            assert charged == obvious.start(first, first.num_known)
            running.append(PlacedRow(1, first, charged=charged))
            started.append(first.request_id)
        queue.end_turn()
        obvious.end_turn()
        for row in running[:num_ends]:
            num_new = row.sequence.request.stopping.max_new_tokens // 2 + 1
            obvious.correct_charge(row.sequence, row.charged or 0, row.sequence.num_known + num_new)
            obvious.learn(row.sequence, num_new)
            queue.correct_charge(row, row.sequence.num_known + num_new)
            queue.learn(row.sequence, num_new)
        del running[:num_ends]

    for coming, most, longest, num_ends in trace:
        for class_index, tenant, prompt, most_new, resumed in coming:
            sequence = new(
                f"r{num_added}", num_added, SERVICE_CLASSES[class_index], f"t{tenant}", prompt, most_new
            )
            sequence.resumed = resumed
            num_added += 1
            queue.add(sequence)
            obvious.add(sequence)
        turn(most, longest, num_ends)
    turn(10**6, 10**6, 10**6)
    assert sorted(started) == sorted(f"r{i}" for i in range(num_added))


@settings(max_examples=25)
@given(
    sizes=st.lists(
        st.tuples(st.integers(1, 150), st.integers(1, 80), st.integers(1, 150), st.integers(1, 80)),
        min_size=5,
        max_size=25,
    ),
    seed=st.integers(0, 10**6),
)
def test_two_backlogged_tenants_are_served_alike(sizes: list[tuple[int, int, int, int]], seed: int) -> None:
    """What a worker with one row computes for them differs by at most twice the largest request and a step's
    prefill, as long as both wait.
    """
    pool = Pool(1, num_blocks=64, seed=seed, limits=WorkerLimits(max_batch_size=1))
    wanted = {"a": 0, "b": 0}
    for i, (prompt_a, most_a, prompt_b, most_b) in enumerate(sizes):
        pool.add(new(f"a{i}", 2 * i, tenant="a", prompt=prompt_a, most=most_a))
        pool.add(new(f"b{i}", 1000 + i, tenant="b", prompt=prompt_b, most=most_b))
        wanted["a"] += 1
        wanted["b"] += 1
    largest = max(max(a + b, c + d) for a, b, c, d in sizes)
    prompts = {f"{name}{i}": size[at] for i, size in enumerate(sizes) for name, at in (("a", 0), ("b", 2))}
    while all(any(one.waiting for one in waiting_of(pool, name)) for name in wanted):
        pool.turn()
        served = Counter[str]()
        for name, num_tokens in pool.committed.items():
            served[name[0]] += prompts[name] + num_tokens
        assert abs(served["a"] - served["b"]) <= 2 * (largest + STEP_TOKENS)
    pool.run()
    assert sorted(pool.finished) == sorted(prompts)


@settings(max_examples=30)
@given(
    num_new=st.integers(5, 100),
    num_blocks=st.integers(60, 400),
    prompts=st.lists(st.integers(1, 150), min_size=40, max_size=70),
    actions=st.lists(st.sampled_from(["join", "drain", "cancel", "none", "none"]), max_size=12),
    seed=st.integers(0, 10**6),
)
def test_tenants_are_charged_with_what_was_computed_whichever_rows_stand_by_and_move(
    num_new: int, num_blocks: int, prompts: list[int], actions: list[str], seed: int
) -> None:
    pool = Pool(1, num_blocks, seed, WorkerLimits(max_batch_size=16), shares=False)
    for i, num_prompt in enumerate(prompts):
        pool.add(new(f"r{i}", i, tenant="ab"[i % 3 == 0], prompt=num_prompt, most=num_new))
    for action in actions:
        if action == "join":
            pool.add_worker()
        pool.disturb(action, len(prompts))
        pool.turn()
    pool.run()
    pool.check_blocks_returned()
    computed = sum((worker.computed for worker in pool.workers.values()), Counter[str]())
    accounts = pool.scheduler.queue.classes[1].accounts
    assert {name: round(account.served) for name, account in accounts.items()} == computed
    assert not any(account.num_started for account in accounts.values())


@settings(max_examples=15)
@given(
    num_new=st.integers(5, 100),
    prompts=st.lists(st.tuples(st.integers(1, 150), st.integers(1, 50)), min_size=25, max_size=40),
    join=st.integers(0, 20),
    seed=st.integers(0, 10**6),
)
def test_two_backlogged_tenants_start_alike_whichever_rows_stand_by_and_move(
    num_new: int, prompts: list[tuple[int, int]], join: int, seed: int
) -> None:
    """What their requests take that have started differs by at most twice the largest one."""
    pool = Pool(1, 1000, seed, WorkerLimits(max_batch_size=16), eos_chance=0, shares=False)
    for i, of_each in enumerate(prompts):
        for tenant, first, prompt in zip("ab", (0, 1000), of_each, strict=True):
            pool.add(new(f"{tenant}{i}", first + i, tenant=tenant, prompt=prompt, most=num_new))
    accounts = pool.scheduler.queue.classes[1].accounts
    for turn in count():
        pool.turn()
        if not (accounts["a"].first() and accounts["b"].first()):
            break
        taken = Counter[str]()
        for name in pool.attempts:
            taken[name[0]] += prompts[int(name[1:])]["ab".index(name[0])] + num_new
        assert abs(taken["a"] - taken["b"]) <= 2 * (max(map(max, prompts)) + num_new)
        if turn == join:
            pool.add_worker()
    pool.run()
    assert len(pool.finished) == 2 * len(prompts)


def waiting_of(pool: Pool, tenant: str) -> list[Sequence]:
    return [one for one in pool.scheduler.sequences.values() if one.request.tenant == tenant]
