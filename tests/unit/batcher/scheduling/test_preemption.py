"""Preemption: who gives blocks to whom when they run out, and that every stay on a worker brings it on."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batcher.scheduling.plan_builder import next_plan
from batcher.scheduling.preemption import importance
from batcher.scheduling.replica import Replica, WorkerLimits
from batcher.scheduling.sequence import PREEMPT, PlacedRow
from tests.support.fleet.simulated_pool import BLOCK_SIZE, Pool, sharing_request
from tests.support.fleet.simulated_worker import SimulatedWorker
from tests.unit.batcher.scheduling.test_replica import make_replica, make_sequence


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
    [
        ([(1, 1), (1, 2), (1, 3)], 2),
        ([(1, 3), (1, 2), (1, 1)], 0),
        ([(1, 2), (2, 1), (0, 3)], 1),
    ],
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


@pytest.mark.parametrize("progress", ["none", "some"])
def test_a_row_without_a_block_of_progress_stays(progress: str) -> None:
    replica, placed = full_replica((1, 1), (1, 2), (1, 3))
    placed[2].kv_len = 16 * (progress == "some")
    placed[2].at_step = 18
    plan = next_plan(replica, 1, [])
    assert plan and plan.stops == [(placed[1].number, "preempted")]


def test_only_one_row_gives_its_blocks_at_a_time() -> None:
    replica, placed = full_replica((1, 1), (1, 2), (1, 3), (1, 4))
    next_plan(replica, 1, [])
    replica.report_at = replica.step
    plan = next_plan(replica, 1, [])
    assert plan and plan.stops == [] and placed[3].stopping == "preempted"
    assert not any(row.stopping == PREEMPT for row in placed)


@dataclass(eq=False)
class WatchedWorker(SimulatedWorker):
    """Keeps request, base and number of tokens of rows that are preempted."""

    preempted: list[tuple[str, int, int]] = field(default_factory=list)

    def end(self, number: int, why: str) -> None:
        row = self.rows[number]
        if why == "preempted":
            self.preempted.append((row.start.request.request_id, row.start.base, row.num_tokens))
        super().end(number, why)


@settings(max_examples=200)
@given(
    sizes=st.lists(
        st.tuples(st.integers(1, 100), st.integers(1, 200), st.integers(0, 2)),
        min_size=2,
        max_size=20,
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


def test_a_preempted_request_comes_back_to_what_it_computed() -> None:
    """Its blocks stay in the prefix cache until others need them."""
    computed = {}
    for shares in (False, True):
        pool = Pool(1, num_blocks=130, seed=3, eos_chance=0, shares=shares)
        pool.add(*(sharing_request(f"r{i}", [1000 * i + j for j in range(40)], 300, i) for i in range(6)))
        pool.run()
        assert max(pool.attempts.values()) > 1
        computed[shares] = pool.workers["w0"].num_prefilled
    assert computed[True] < computed[False] - 250
