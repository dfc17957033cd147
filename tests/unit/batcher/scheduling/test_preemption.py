"""Preemption: who gives blocks to whom when they run out. Standby: rows beside a full batch take the place of
those that end.
"""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batcher.scheduling.placement import importance, standby_rows
from batcher.scheduling.plan_builder import next_plan
from batcher.scheduling.replica import Replica, WorkerLimits
from batcher.scheduling.sequence import PlacedRow
from tests.support.fleet.simulated_pool import (
    BLOCK_SIZE,
    Pool,
    make_replica,
    make_sequence,
    request,
    sharing_request,
)
from tests.support.fleet.simulated_worker import SimulatedWorker
from tests.support.scheduling.late_pool import LatePool

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


@dataclass(eq=False)
class WatchedWorker(SimulatedWorker):
    """Keeps request, base and number of tokens of rows that are preempted."""

    preempted: list[tuple[str, int, int]] = field(default_factory=list)

    def end(self, number: int, why: str) -> None:
        row = self.rows[number]
        if why == "preempted":
            self.preempted.append((row.start.request.request_id, row.start.base, row.num_tokens))
        super().end(number, why)


@settings(max_examples=80)
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
    pool = Pool(1, num_blocks, seed, limits, eos_chance=0.005, shares=shares)
    worker = pool.workers["w0"] = WatchedWorker(BLOCK_SIZE, pool.random, pool.eos_chance, num_speculated)
    replica = pool.scheduler.replicas["w0"]
    for i, (num_prompt, new, class_index) in enumerate(sizes):
        sequence = sharing_request(f"r{i}", [*range(num_prompt)], new, i)
        sequence.class_index = class_index
        pool.add(sequence)
    while pool.scheduler.sequences:
        most_important = min(map(importance, replica.running), default=None)
        before = len(worker.preempted)
        pool.turn()
        for name, base, num_tokens in worker.preempted[before:]:
            assert num_tokens - base >= BLOCK_SIZE, name
        assert replica.reserved == sum(row.reserved for row in replica.running) >= 0
        gone = {name for name, *_ in worker.preempted[before:]}
        assert not gone & {
            row.sequence.request_id for row in replica.running if importance(row) == most_important
        }
    assert len(pool.finished) == len(sizes)
    pool.check_blocks_returned()


# --- preemption standby -------------------------------------------------------------------------------------

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


@pytest.mark.parametrize(("places", "late"), [(16, 12)])
def test_places_stay_taken_though_plans_and_reports_are_late(places: int, late: int) -> None:
    """Answers have 128 tokens on average; others wait."""
    busy = {}
    for standby in (True, False):
        pool = LatePool(late, WorkerLimits(max_batch_size=places), eos_chance=1 / 128, standby=standby)
        pool.run(300)
        busy[standby] = sum(taken * ticks for taken, ticks in pool.run(500).items()) / 500 / places
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
