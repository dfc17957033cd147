"""Standby: rows beside a full batch take the place of those that end, and are in nobody's way."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batcher.scheduling.plan_builder import next_plan
from batcher.scheduling.preemption import max_standby, standby_rows
from batcher.scheduling.replica import Replica, WorkerLimits
from tests.support.fleet.simulated_pool import Pool, request, sharing_request
from tests.support.scheduling.late_pool import LatePool
from tests.unit.batcher.scheduling.test_replica import make_replica, make_sequence

ROWS = 16
LIMITS = WorkerLimits(max_batch_size=ROWS)


def full_pool(num_blocks: int = 1000, num_workers: int = 1, standby: bool = True) -> Pool:
    """Every place is taken, for long, and one request more waits."""
    pool = Pool(num_workers, num_blocks, seed=1, limits=LIMITS, eos_chance=0, standby=standby)
    pool.add(*(request(f"r{i}", 8, 40 if i == 3 else 200, i) for i in range(ROWS * num_workers + 1)))
    pool.decide()
    return pool


def test_a_row_that_ends_is_replaced_at_the_same_step_boundary() -> None:
    pool = full_pool()
    worker = pool.workers["w0"]
    while len(worker.rows) > ROWS:
        assert worker.run() and worker.rows[ROWS + 1].kv_len == 0
        if worker.step > worker.until // 2:
            pool.scheduler.apply_report("w0", worker.take_report())
            pool.decide()
    assert worker.run(), "before anybody hears of the end"
    assert worker.rows[ROWS + 1].is_prefilled
    assert worker.most_rows == ROWS
    pool.run()
    assert len(pool.finished) == ROWS + 1
    pool.check_blocks_returned()


@pytest.mark.parametrize(("places", "late"), [(16, 12), (64, 3)])
def test_places_stay_taken_though_plans_and_reports_are_late(places: int, late: int) -> None:
    """Answers have 128 tokens on average; others wait."""
    busy = {}
    for standby in (True, False):
        pool = LatePool(late, WorkerLimits(max_batch_size=places), eos_chance=1 / 128, standby=standby)
        pool.run(300)
        busy[standby] = sum(taken * ticks for taken, ticks in pool.run(500).items()) / 500 / places
    assert busy[True] > 0.97 > busy[False]


@pytest.mark.parametrize(
    ("places", "ends_per_trip", "num_standby"),
    [
        (15, 5.0, 0),
        (16, 0.0, 1),
        (16, 1.25, 3),
        (16, 10.0, 8),
        (256, 0.0, 1),
        (256, 4.0, 6),
        (256, 999.0, 128),
    ],
)
def test_as_many_stand_by_as_end_in_a_round_trip(places: int, ends_per_trip: float, num_standby: int) -> None:
    assert max_standby(places, ends_per_trip) == num_standby


@pytest.mark.parametrize(("places", "num_standby"), [(1, 0), (15, 0), (16, 1), (256, 1)])
def test_one_stands_by_while_no_end_is_known_and_none_beside_a_small_batch(
    places: int, num_standby: int
) -> None:
    pool = Pool(1, 2000, seed=1, limits=WorkerLimits(max_batch_size=places), eos_chance=0)
    pool.add(*(request(f"r{i}", 8, 200, i) for i in range(places + 10)))
    pool.decide()
    assert len(pool.workers["w0"].rows) == places + num_standby


def test_a_worker_that_does_not_know_of_standby_gets_no_row_beside_a_full_batch() -> None:
    assert len(full_pool(standby=False).workers["w0"].rows) == ROWS


def test_suspects_and_choices_that_share_their_prompt_do_not_stand_by() -> None:
    pool = full_pool()
    pool.scheduler.cancel(f"r{ROWS}", "client")
    pool.turn()
    suspect, choice = request("s", 8, 10, 90), sharing_request("c", [*range(40)], 10, 91, num_choices=2)
    suspect.crash_count = 1
    pool.add(suspect, choice)
    pool.decide()
    assert suspect.waiting and choice.waiting
    for sequence in (suspect, choice):
        pool.scheduler.cancel(sequence.request_id, "client")
    pool.add(request("r90", 8, 10, 92))
    pool.decide()
    assert not pool.scheduler.sequences["r90"].waiting


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


def test_a_cancel_ends_a_row_that_stands_by() -> None:
    pool = full_pool()
    pool.scheduler.cancel(f"r{ROWS}", "client")
    pool.decide()
    assert len(pool.workers["w0"].rows) == ROWS
    pool.scheduler.apply_report("w0", pool.workers["w0"].take_report())
    pool.decide()
    assert pool.finished == [f"r{ROWS}"]
    assert not standby_rows(pool.scheduler.replicas["w0"])


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


@pytest.mark.parametrize("first", [0, 1])
def test_a_request_stands_by_where_its_beginning_is_known(first: int) -> None:
    pool = Pool(2, 2000, seed=1, limits=LIMITS, eos_chance=0)
    chats = [[1000 * i + j for j in range(200)] for i in range(2)]
    pool.add(*(sharing_request(f"c{i}", chat, 20, i) for i, chat in enumerate(chats)))
    for _ in range(50):
        pool.turn()
    pool.add(*(request(f"r{i}", 8, 200, 10 + i) for i in range(2 * ROWS)))
    pool.turn()
    again = [sharing_request(f"again{i}", [*chat, 7], 20, 100 + i) for i, chat in enumerate(chats)]
    pool.add(again[first])
    pool.decide()
    pool.add(again[1 - first])
    pool.decide()
    assert [one.row and one.row.num_cached for one in again] == [192, 192]


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


@settings(max_examples=60)
@given(
    num_workers=st.integers(1, 3),
    num_blocks=st.integers(40, 200),
    sizes=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 120)), min_size=20, max_size=70),
    actions=st.lists(
        st.sampled_from(["kill", "succeed", "drain", "cancel", "cancel", "none", "none"]), max_size=25
    ),
    seed=st.integers(0, 10**6),
    shares=st.booleans(),
)
def test_every_request_ends_once_whatever_dies_while_rows_stand_by(
    num_workers: int,
    num_blocks: int,
    sizes: list[tuple[int, int]],
    actions: list[str],
    seed: int,
    shares: bool,
) -> None:
    pool = Pool(num_workers, num_blocks, seed, LIMITS, shares=shares)
    for i, (num_prompt, new) in enumerate(sizes):
        pool.add(sharing_request(f"r{i}", [i % 3] * num_prompt, new, i))
    for action in actions:
        pool.disturb(action, len(sizes))
        pool.turn()
    pool.run()
    ended = pool.finished + [name for name, _ in pool.to_finish]
    assert sorted(ended) == sorted(f"r{i}" for i in range(len(sizes)))
    pool.check_blocks_returned()
