"""Order of waiting requests: classes, shares of tenants, age; nobody starves; nobody is forgotten.
Placement: a request goes to the worker that has its beginning computed and its adapter loaded, unless that
has many more rows.

Preemption: who gives blocks to whom when they run out. Standby: rows beside a full batch take the place of
those that end.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batcher.scheduling.placement import importance, standby_rows
from batcher.scheduling.plan_builder import next_plan
from batcher.scheduling.replica import Replica, WorkerLimits
from batcher.scheduling.request_queue import MAX_LOOKED_PAST, MAX_PASSED, PATIENCE, RequestQueue
from batcher.scheduling.sequence import PlacedRow, Sequence
from common.messages.request import SERVICE_CLASSES
from tests.support.chaos.engine import BLOCK_SIZE
from tests.support.fleet.simulated_pool import (
    LatePool,
    Pool,
    make_replica,
    make_sequence,
    request,
    sharing_request,
)


def new(
    name: str,
    arrival: int,
    priority: str = "",
    tenant: str = "",
    prompt: int = 10,
    most: int = 10,
    weight: float = 0.0,
) -> Sequence:
    """A request that waits."""
    sequence = request(name, prompt, most, arrival, class_name=priority, tenant=tenant, weight=weight)
    sequence.waiting = True
    return sequence


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
    """A tenant that comes late has no claim on what others had before it. The weight of a request's API key
    counts for it, whatever earlier ones of its tenant had.
    """
    queue = queue_of(*(new(f"a{i}", i, tenant="a") for i in range(30)), weights={"b": 3.0})
    assert start_all(queue, 10) == [f"a{i}" for i in range(10)]
    for i in range(30):
        queue.add(new(f"b{i}", 100 + i, tenant="b"))
    started = start_all(queue, 20)
    assert [sum(name[0] == "b" for name in some) for some in (started[:8], started[8:])] == [7, 9]
    for i in range(4):
        resumed = new(f"r{i}", 200 + i, prompt=90 - i, tenant="a")
        resumed.resumed, resumed.crash_count = True, i // 2
        queue.add(resumed)
    assert start_all(queue, 4) == ["r1", "r0", "r3", "r2"], "the shortest first, suspects last"
    started += start_all(queue)
    assert sorted(started) == sorted([*(f"a{i}" for i in range(10, 30)), *(f"b{i}" for i in range(30))])
    for i in range(40):
        queue.add(new(f"a{i}", 300 + i, tenant="a", weight=3.0))
        queue.add(new(f"b{i}", 300 + i, tenant="b", weight=1.0))
    assert sum(name[0] == "a" for name in start_all(queue, 40)) >= 29


@settings(max_examples=15)
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


# --- placement ----------------------------------------------------------------------------------------------

CHAT = list(range(200))


def run_turns(pool: Pool) -> None:
    for _ in range(50):
        pool.turn()


def start(pool: Pool, name: str, prompt: list[int], new: int = 20) -> tuple[str, int]:
    """Return the worker on which a request starts, and how many of its tokens are there."""
    sequence = sharing_request(name, prompt, new, entry=len(pool.attempts))
    pool.add(sequence)
    pool.decide()
    while sequence.row is None:  # it waits for a row that computes its prompt
        pool.turn()
        pool.decide()
    replicas = pool.scheduler.replicas.items()
    return next(name for name, one in replicas if sequence.row in one.rows.values()), sequence.row.num_cached


def test_a_chat_comes_back_to_its_worker() -> None:
    pool = Pool(4, num_blocks=200, seed=1, eos_chance=0)
    chats = {f"c{i}": [i, *CHAT] for i in range(4)}
    homes = {name: start(pool, name, prompt)[0] for name, prompt in chats.items()}
    assert sorted(homes.values()) == ["w0", "w1", "w2", "w3"]
    run_turns(pool)
    for name in reversed(chats):
        assert start(pool, f"{name} again", [*chats[name], 7]) == (homes[name], 192)
        run_turns(pool)


def test_what_is_cached_does_not_gather_all_rows_on_one_worker() -> None:
    pool = Pool(4, num_blocks=400, seed=1, eos_chance=0)
    home, _ = start(pool, "r0", CHAT)
    run_turns(pool)
    placed = [start(pool, f"r{i}", [*CHAT, i], new=300) for i in range(1, 9)]
    assert placed[0] == (home, 192)
    assert len({name for name, _ in placed[:3]}) == 3
    rows = [replica.num_running for replica in pool.scheduler.replicas.values()]
    assert min(rows) >= 1 and max(rows) <= 3


def test_what_fits_is_not_refused_for_one_that_needs_more_at_a_long_horizon() -> None:
    """Where 128 steps are granted ahead, the other needs 198 tokens; at the shortest horizon 102."""
    pool = Pool(1, num_blocks=200, seed=1, eos_chance=0)
    [replica] = pool.scheduler.replicas.values()
    replica.pace.late_trip_steps = 62
    replica.pool.allocate(190)
    other, fits = request("other", 70, 1000, 0), request("fits", 100, 10, 1)
    pool.add(other, fits)
    pool.decide()
    assert other.waiting and not fits.waiting


# --- placement adapters -------------------------------------------------------------------------------------

SQL, LEGAL = "sql@1", "legal@2"


def make_pool(num_workers: int, **adapters: tuple[str, ...]) -> Pool:
    """Make workers w0, w1 …, which have loaded these adapters; one of them is on a device at once."""
    pool = Pool(num_workers, num_blocks=200, seed=1, eos_chance=0)
    for name, replica in pool.scheduler.replicas.items():
        replica.capacity = replace(replica.capacity, max_loras=1)
        pool.scheduler.set_adapters(name, frozenset(adapters.get(name, ())))
    return pool


def ask(pool: Pool, name: str, adapter: str, new: int = 40) -> Sequence:
    sequence = request(name, 20, new, len(pool.scheduler.sequences), adapter=adapter)
    pool.add(sequence)
    pool.decide()
    return sequence


def home(sequence: Sequence) -> str:
    return sequence.row.worker if sequence.row else ""


def test_a_request_starts_only_where_its_adapter_is_loaded() -> None:
    pool = make_pool(3, w1=(SQL,))
    assert {home(ask(pool, f"r{i}", SQL)) for i in range(4)} == {"w1"}
    assert home(ask(pool, "plain", "")) in ("w0", "w2")


def test_a_request_waits_for_its_adapter_and_keeps_nobody_else_waiting() -> None:
    pool = make_pool(1)
    waiting = ask(pool, "sql", SQL)
    plain = [ask(pool, f"r{i}", "", new=4) for i in range(40)]
    for _ in range(60):
        pool.turn()
    assert not home(waiting)
    assert {one.request_id for one in plain} <= set(pool.finished)
    pool.scheduler.set_adapters("w0", frozenset([SQL]))
    pool.decide()
    assert home(waiting) == "w0"


def test_a_worker_with_the_adapter_on_its_device_comes_first() -> None:
    both = (SQL, LEGAL)
    pool = make_pool(2, w0=both, w1=both)
    first, other = ask(pool, "r0", SQL), ask(pool, "r1", LEGAL)
    assert {home(first), home(other)} == {"w0", "w1"}
    assert home(ask(pool, "r2", SQL)) == home(first)
    assert home(ask(pool, "r3", LEGAL)) == home(other)
    many = [home(ask(pool, f"s{i}", SQL)) for i in range(8)]
    assert set(many) == {"w0", "w1"}, "but not if it has far more rows"


def test_a_row_leaves_for_no_worker_without_its_adapter() -> None:
    """Neither an answer that waits where a worker joins, nor one whose worker drains, as others do."""
    pool = make_pool(1, w0=(SQL,))
    rows = [request(f"r{i}", 20, 400, i, adapter=adapter) for i, adapter in enumerate((SQL, SQL, ""))]
    for one in rows:
        pool.committed[one.request_id] = 1
        pool.resume(one)
        pool.scheduler.register(one)
    pool.decide()
    pool.add_worker()
    pool.decide()
    assert not any(one.row is None or one.row.stopping for one in rows[:2])
    pool.scheduler.workers.drain("w0")
    for _ in range(20):
        pool.turn()
    assert [home(one) for one in rows] == ["w0", "w0", "w1"]
    assert [one.attempt for one in rows[:2]] == [1, 1]


# --- preemption ---------------------------------------------------------------------------------------------


def full_replica(*rows: tuple[int, int]) -> tuple[Replica, list[PlacedRow]]:
    """Rows (class, arrival) that fill all blocks of a worker and have each filled a block and more."""
    replica = make_replica(num_blocks=3 * len(rows))
    placed = []
    for class_index, arrival in rows:
        sequence = make_sequence(16)
        sequence.class_index, sequence.arrival = class_index, arrival
        placed.append(replica.start(sequence))
        replica.on_prefilled(placed[-1], 16, step=1)
    replica.step = replica.until = 33
    return replica, placed


@pytest.mark.parametrize(
    ("rows", "victim"),
    [([(1, 1), (1, 2), (1, 3)], 2), ([(1, 3), (1, 2), (1, 1)], 0), ([(1, 2), (2, 1), (0, 3)], 1)],
    ids=["the youngest", "the youngest request, though its row is the oldest", "the least urgent class"],
)
def test_the_victim_is_the_least_important_request(rows: list[tuple[int, int]], victim: int) -> None:
    replica, placed = full_replica(*rows)
    plan = next_plan(replica, 1, [])
    assert plan and plan.stops == [(placed[victim].number, "preempted")] and replica.starved


def test_scarce_blocks_go_to_the_most_important_row() -> None:
    replica, placed = full_replica((1, 2), (2, 1), (0, 3))
    replica.end_row(placed[1])
    replica.release(placed[1].number)
    plan = next_plan(replica, 1, [])  # each needs two blocks, of three
    assert plan and [(number, len(blocks) // 4) for number, blocks in plan.blocks] == [
        (placed[2].number, 2),
        (placed[0].number, 1),
    ]


@settings(max_examples=30)
@given(
    sizes=st.lists(
        st.tuples(st.integers(1, 100), st.integers(1, 200), st.integers(0, 2)), min_size=2, max_size=20
    ),
    num_blocks=st.integers(20, 50),
    horizon=st.sampled_from([4, 16, 32]),
    seed=st.integers(0, 10**6),
    shares=st.booleans(),
    num_speculated=st.sampled_from([0, 3]),
)
def test_whoever_is_preempted_has_filled_a_block_and_the_most_important_request_never_is(
    sizes: list[tuple[int, int, int]],
    num_blocks: int,
    horizon: int,
    seed: int,
    shares: bool,
    num_speculated: int,
) -> None:
    limits = WorkerLimits(max_batch_size=16, max_horizon=horizon)
    pool = Pool(1, num_blocks, seed, limits, 0.005, shares, num_speculated=num_speculated)
    worker, replica = pool.workers["w0"], pool.scheduler.replicas["w0"]
    for i, (num_prompt, new, class_index) in enumerate(sizes):
        sequence = sharing_request(f"r{i}", [*range(num_prompt)], new, i)
        sequence.class_index = class_index
        pool.add(sequence)
    while pool.scheduler.sequences:
        most_important = min(map(importance, replica.running), default=None)
        before = len(worker.interrupted)
        pool.turn()
        preempted = worker.interrupted[before:]
        assert all(row.num_tokens - row.base >= BLOCK_SIZE for row in preempted)
        assert replica.reserved == sum(row.reserved for row in replica.running) >= 0
        gone = {row.request.request_id for row in preempted}
        assert not gone & {
            row.sequence.request_id for row in replica.running if importance(row) == most_important
        }
    assert len(pool.finished) == len(sizes)
    pool.check_blocks_returned()


# --- preemption standby -------------------------------------------------------------------------------------

ROWS = 16
LIMITS = WorkerLimits(max_batch_size=ROWS)


def full_pool() -> Pool:
    """Every place is taken, for long, and one request more waits."""
    pool = Pool(1, 1000, seed=1, limits=LIMITS, eos_chance=0)
    pool.add(*(request(f"r{i}", 8, 40 if i == 3 else 200, i) for i in range(ROWS + 1)))
    pool.decide()
    return pool


def test_a_row_that_ends_is_replaced_at_the_same_step_boundary() -> None:
    pool = full_pool()
    worker = pool.workers["w0"]
    while len(worker.live) > ROWS:
        assert worker.run() and worker.live[ROWS + 1].kv_len == 0
        if worker.rows.step > worker.rows.grant.until // 2:
            pool.scheduler.apply_report("w0", worker.take_report())
            pool.decide()
    assert worker.run(), "before anybody hears of the end"
    assert worker.live[ROWS + 1].kv_len
    assert worker.most_rows == ROWS
    pool.run()
    assert len(pool.finished) == ROWS + 1
    pool.check_blocks_returned()


@pytest.mark.parametrize(("places", "late"), [(16, 12)])
def test_places_stay_taken_though_plans_and_reports_are_late(places: int, late: int) -> None:
    """Answers have 128 tokens on average; others wait."""
    busy = {}
    for standby in (True, False):
        pool = LatePool(late, WorkerLimits(max_batch_size=places), eos_chance=1 / 128, standby=standby)
        pool.run_ticks(300)
        busy[standby] = sum(taken * ticks for taken, ticks in pool.run_ticks(500).items()) / 500 / places
    assert busy[True] > 0.97 > busy[False]


@pytest.mark.parametrize("kind", ["suspect", "choice"])
def test_whoever_may_not_stand_by_gets_a_place_before_those_behind(kind: str) -> None:
    """Else those that stand by would take every place that a row leaves."""
    pool = Pool(1, 2000, seed=1, limits=LIMITS, eos_chance=0)
    pool.add(*(request(f"r{i}", 8, 20 + 10 * i, i) for i in range(ROWS + 1)))
    pool.decide()
    one = sharing_request("one", [*range(8)], 10, 50, num_choices=2 if kind == "choice" else 1)
    one.crash_count = int(kind == "suspect")
    pool.add(one, *(request(f"b{i}", 8, 200, 100 + i) for i in range(60)))
    while one.waiting:
        pool.turn()
        assert len(pool.finished) < 6
    pool.run()


def test_nobody_stands_by_where_another_worker_has_room() -> None:
    pool = full_pool()
    waits = pool.scheduler.sequences[f"r{ROWS}"]
    assert waits.row in standby_rows(pool.scheduler.replicas["w0"])
    other = pool.add_worker()
    pool.decide()
    pool.scheduler.apply_report("w0", pool.workers["w0"].take_report())
    pool.decide()
    pool.decide()
    assert waits.row and waits.row.worker == other and waits.attempt == 2
    pool.run()
    pool.check_blocks_returned()


def test_a_row_that_stands_by_gives_its_blocks_to_one_that_lacks_them() -> None:
    """Else they would wait for each other, where nothing else runs."""
    replica = Replica(make_replica(num_blocks=6).capacity, WorkerLimits(max_batch_size=1))
    runs, waits = make_sequence(16), make_sequence(16)
    waits.class_index = 0  # more urgent, but it has nothing to lose
    running, standby = replica.start(runs), replica.start(waits)
    replica.on_prefilled(running, 16, step=1)
    replica.step = replica.until = 33
    plan = next_plan(replica, 1, [])
    assert plan and plan.stops == [(standby.number, "preempted")] and replica.starved
