"""Order of waiting requests: classes, shares of tenants, age; nobody starves; nobody is forgotten. The order
is that of ObviousQueue, which looks at every request each time.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st

from batcher.scheduling.replica import WorkerLimits
from batcher.scheduling.request_queue import (
    FIRST_OUTPUT,
    MAX_LOOKED_PAST,
    MAX_PASSED,
    OUTPUT_MEMORY,
    PATIENCE,
    RequestQueue,
)
from batcher.scheduling.sequence import PlacedRow, Sequence
from common.messages.request import SERVICE_CLASSES
from tests.support.fleet.simulated_pool import Pool, request

Tenant = tuple[int, str]
"""(rank of a class, name of a tenant)"""


def tenant_of(sequence: Sequence) -> Tenant:
    return sequence.class_index, sequence.request.tenant


@dataclass
class ObviousQueue:
    weights: dict[str, float]
    waiting: list[Sequence] = field(default_factory=list)
    served: dict[Tenant, float] = field(default_factory=dict)
    means: dict[Tenant, float] = field(default_factory=dict)
    levels: list[float] = field(default_factory=lambda: [0.0] * 3)
    passed: list[int] = field(default_factory=lambda: [0] * 3)
    num_passed: dict[str, int] = field(default_factory=dict)
    looked_past: list[Sequence] = field(default_factory=list)

    def add(self, sequence: Sequence) -> None:
        tenant = tenant_of(sequence)
        has_new = any(tenant_of(one) == tenant and not one.resumed for one in self.waiting)
        if not sequence.resumed and not has_new:
            self.served[tenant] = max(self.served.get(tenant, 0.0), self.levels[sequence.class_index])
        self.waiting.append(sequence)

    def first_of(self, class_index: int) -> Sequence | None:
        if sum(one.class_index == class_index for one in self.looked_past) >= MAX_LOOKED_PAST:
            return None
        known = {id(one) for one in self.looked_past}
        mine = [
            one
            for one in self.waiting
            if one.class_index == class_index and one.waiting and id(one) not in known
        ]
        resumed = [one for one in mine if one.resumed]
        if resumed:
            return min(resumed, key=lambda one: (one.num_known, one.arrival))
        oldest = {
            tenant: min(one.arrival for one in mine if tenant_of(one) == tenant)
            for tenant in map(tenant_of, mine)
        }
        return min(
            mine,
            key=lambda one: (self.served.get(tenant_of(one), 0.0), oldest[tenant_of(one)], one.arrival),
            default=None,
        )

    def first(self) -> Sequence | None:
        if any(self.num_passed.get(one.request_id, 0) >= MAX_PASSED for one in self.looked_past):
            return None
        for class_index in (2, 1, 0):
            if self.passed[class_index] >= PATIENCE and (one := self.first_of(class_index)):
                return one
        for class_index in (0, 1, 2):
            if (found := self.first_of(class_index)) or any(
                one.class_index == class_index for one in self.looked_past
            ):
                return found
        return None

    def start(self, sequence: Sequence, num_prefill: int) -> int:
        tenant, class_index = tenant_of(sequence), sequence.class_index
        self.waiting.remove(sequence)
        served = self.served.get(tenant, self.levels[class_index])
        if not sequence.resumed:
            self.levels[class_index] = served
        left = sequence.request.stopping.max_new_tokens - sequence.base
        charged = num_prefill + min(left, round(self.means.get(tenant, FIRST_OUTPUT)))
        self.served[tenant] = served + charged / self.weights.get(tenant[1], 1.0)
        self.num_passed[sequence.request_id] = 0
        for other in range(3):
            waits = any(one.class_index == other and one.waiting for one in self.waiting)
            self.passed[other] = self.passed[other] + 1 if waits and other != class_index else 0
        for one in self.looked_past:
            self.num_passed[one.request_id] = self.num_passed.get(one.request_id, 0) + 1
        return charged

    def look_past(self, sequence: Sequence) -> None:
        self.looked_past.append(sequence)

    def correct_charge(self, sequence: Sequence, charged: int, num_computed: int) -> None:
        tenant = tenant_of(sequence)
        self.served[tenant] += (num_computed - charged) / self.weights.get(tenant[1], 1.0)

    def learn(self, sequence: Sequence, num_generated: int) -> None:
        mean = self.means.get(tenant_of(sequence), FIRST_OUTPUT)
        self.means[tenant_of(sequence)] = OUTPUT_MEMORY * mean + (1 - OUTPUT_MEMORY) * num_generated

    def end_turn(self) -> None:
        self.looked_past.clear()


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
