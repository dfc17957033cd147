"""Order of waiting requests: classes, shares of tenants, age; nobody starves; nobody is forgotten."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st

from batcher.scheduling.replica import WorkerLimits
from batcher.scheduling.request_queue import MAX_LOOKED_PAST, MAX_PASSED, PATIENCE, RequestQueue
from batcher.scheduling.sequence import PlacedRow, Sequence
from common.messages.request import SERVICE_CLASSES
from tests.support.fleet.simulated_pool import Pool, request


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


def test_tenants_start_by_their_weights_and_what_was_interrupted_before_all() -> None:
    """A tenant that comes late has no claim on what others had before it."""
    queue = queue_of(*(new(f"a{i}", i, tenant="a") for i in range(30)), weights={"b": 3.0})
    assert start_all(queue, 10) == [f"a{i}" for i in range(10)]
    for i in range(30):
        queue.add(new(f"b{i}", 100 + i, tenant="b"))
    started = start_all(queue, 20)
    assert [sum(name[0] == "b" for name in some) for some in (started[:8], started[8:])] == [7, 9]
    for i in range(2):
        resumed = new(f"r{i}", 200 + i, prompt=90 - i, tenant="a")
        resumed.resumed = True
        queue.add(resumed)
    assert start_all(queue, 2) == ["r1", "r0"], "the shortest first"
    started += start_all(queue)
    assert sorted(started) == sorted([*(f"a{i}" for i in range(10, 30)), *(f"b{i}" for i in range(30))])


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
