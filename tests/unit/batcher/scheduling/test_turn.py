"""Turn: rows of the class `batch` make room for requests that are more urgent, and lose no progress."""

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from batcher.scheduling.preemption import may_stand_by
from batcher.scheduling.replica import WorkerLimits
from batcher.scheduling.sequence import Sequence
from batcher.scheduling.turn import rows_in_the_way
from tests.support.fleet.simulated_pool import Pool, request, sharing_request

PLACES = 16
LIMITS = WorkerLimits(max_batch_size=PLACES)


def of_class(name: str, class_index: int, num_prompt: int = 8, new: int = 400, entry: int = 0) -> Sequence:
    sequence = request(name, num_prompt, new, entry, gateway="" if class_index == 2 else "g")
    sequence.class_index = class_index
    return sequence


def batch_pool(class_index: int = 2, num_blocks: int = 2000, turns: int = 8) -> Pool:
    """A full worker whose rows have progressed, and as many requests that wait."""
    pool = Pool(1, num_blocks, seed=1, limits=LIMITS, eos_chance=0, shares=False)
    pool.add(*(of_class(f"b{i}", class_index, entry=i) for i in range(2 * PLACES)))
    for _ in range(turns):
        pool.turn()
    return pool


def test_an_urgent_request_takes_the_place_of_a_batch_row_at_the_same_step_boundary() -> None:
    pool = batch_pool()
    worker = pool.workers["w0"]
    for name, class_index in (("u", 0), ("s", 1)):
        pool.add(of_class(name, class_index, entry=100))
        before = worker.step
        pool.decide()
        worker.run()
        assert worker.step == before + 1 and worker.committed[name] == 1
        worker.release()
        pool.scheduler.apply_report("w0", worker.take_report())
    pool.run()
    assert len(pool.finished) == 2 * PLACES + 2
    pool.check_blocks_returned()


@pytest.mark.parametrize(
    ("class_index", "turns"), [(1, 8), (2, 1)], ids=["other classes", "no block of progress"]
)
def test_no_other_row_stops_for_it(class_index: int, turns: int) -> None:
    pool = batch_pool(class_index, turns=turns)
    pool.add(of_class("u", 0, entry=100))
    pool.decide()
    assert not any(row.stopping for row in pool.scheduler.replicas["w0"].running)


def test_a_batch_row_whose_class_has_waited_stays() -> None:
    """Where the urgent never cease, the batch would get a block of each stay, and new ones of it no token."""
    pool = batch_pool()
    for row in pool.scheduler.replicas["w0"].running:
        row.sequence.stays = True
    pool.add(of_class("u", 0, entry=100))
    pool.decide()
    assert not any(row.stopping for row in pool.scheduler.replicas["w0"].running)
    flooded = Pool(1, 2000, seed=1, limits=LIMITS, eos_chance=0, shares=False)
    flooded.add(
        *(of_class(f"u{i}", 0, entry=i) for i in range(60)),
        *(of_class(f"b{i}", 2, entry=100 + i) for i in range(4)),
    )
    flooded.run()
    assert all(flooded.attempts[f"b{i}"] <= 2 for i in range(4))


def test_an_urgent_request_stays_where_it_takes_a_place_though_another_worker_gets_one() -> None:
    """It runs by then, though the batcher has not heard that the row before it has stopped."""
    pool = Pool(2, 2000, seed=1, limits=LIMITS, eos_chance=0, shares=False)
    pool.add(*(of_class(f"b{i}", 2, entry=i) for i in range(2 * PLACES)))
    for _ in range(8):
        pool.turn()
    urgent = of_class("u", 0, entry=100)
    pool.add(urgent)
    pool.decide()
    assert urgent.row
    [other] = pool.workers.keys() - {urgent.row.worker}
    pool.scheduler.cancel(next(pool.scheduler.replicas[other].running).sequence.request_id, "client")
    pool.decide()
    pool.workers[other].run()
    pool.scheduler.apply_report(other, pool.workers[other].take_report())
    pool.decide()
    assert pool.scheduler.replicas[other].num_running < PLACES and not urgent.row.stopping


@pytest.mark.parametrize("first", [0, 1])
def test_the_urgent_take_places_where_their_beginning_is_known(first: int) -> None:
    pool = Pool(2, 2000, seed=1, limits=LIMITS, eos_chance=0)
    chats = [[1000 * i + j for j in range(200)] for i in range(2)]
    pool.add(*(urgent_sharing(f"c{i}", chat, i) for i, chat in enumerate(chats)))
    for _ in range(50):
        pool.turn()
    pool.add(*(of_class(f"b{i}", 2, entry=10 + i) for i in range(3 * PLACES)))
    for _ in range(8):
        pool.turn()
    again = [urgent_sharing(f"again{i}", [*chat, 7], 100 + i) for i, chat in enumerate(chats)]
    pool.add(again[first])
    pool.decide()
    pool.add(again[1 - first])
    pool.decide()
    assert [one.row and one.row.num_cached for one in again] == [192, 192]


def urgent_sharing(name: str, prompt: list[int], entry: int, num_choices: int = 1) -> Sequence:
    sequence = sharing_request(name, prompt, 20, entry, num_choices=num_choices)
    sequence.class_index = 0
    return sequence


def test_a_place_that_is_made_for_a_request_is_not_taken_by_those_behind_it() -> None:
    """Choices of one answer may not stand by, so that it waits until the place is free."""
    pool = batch_pool()
    choice = urgent_sharing("c", [*range(40)], 100, num_choices=2)
    pool.add(choice)
    for i in range(3):
        later = of_class(f"u{i}", 0, entry=200 + i)
        pool.add(later)
        pool.turn()
        assert later.row or later.attempt, "whoever may stand by takes another place meanwhile"
    assert not choice.waiting
    pool.run()
    pool.check_blocks_returned()


def test_batch_rows_give_their_blocks_one_after_the_other() -> None:
    """Not more of them than it needs, though it waits for their release."""
    pool = batch_pool(num_blocks=PLACES * 8)
    replica = pool.scheduler.replicas["w0"]
    while replica.num_running == PLACES + 1:
        pool.turn()
    urgent = of_class("u", 0, num_prompt=160, new=8, entry=100)
    pool.add(urgent)
    num_stopped = 0
    while urgent.waiting:
        pool.decide()
        num_stopped += any(row.stopping for row in replica.running)
        assert sum(bool(row.stopping) for row in replica.running) <= 1
        pool.turn()
    assert num_stopped and replica.num_running > 1
    pool.run()
    pool.check_blocks_returned()


@settings(max_examples=60, phases=[Phase.generate])
@given(
    num_workers=st.integers(1, 3),
    num_blocks=st.integers(40, 200),
    sizes=st.lists(
        st.tuples(st.integers(1, 60), st.integers(1, 120), st.integers(0, 2)), min_size=20, max_size=70
    ),
    actions=st.lists(
        st.sampled_from(["kill", "succeed", "drain", "cancel", "none", "none"]), min_size=5, max_size=25
    ),
    seed=st.integers(0, 10**6),
    shares=st.booleans(),
)
def test_every_request_ends_once_and_no_urgent_one_waits_beside_batch_rows_that_may_go(
    num_workers: int,
    num_blocks: int,
    sizes: list[tuple[int, int, int]],
    actions: list[str],
    seed: int,
    shares: bool,
) -> None:
    pool = Pool(num_workers, num_blocks, seed, LIMITS, shares=shares)
    sequences = []
    for i, (num_prompt, new, class_index) in enumerate(sizes):
        sequence = sharing_request(f"r{i}", [i % 3] * num_prompt, new, i)
        sequence.class_index = class_index
        sequences.append(sequence)
    for action, some in zip(actions, range(0, len(sequences), 6), strict=False):
        pool.add(*sequences[some : some + 6])
        pool.disturb(action, len(sizes))
        pool.turn()
        pool.decide()
        check_urgent(pool)
    pool.add(
        *(one for one in sequences if one.request_id not in pool.scheduler.sequences and not ended(pool, one))
    )
    pool.run()
    names = pool.finished + [name for name, _ in pool.to_finish]
    assert sorted(names) == sorted(f"r{i}" for i in range(len(sizes)))
    pool.check_blocks_returned()


def ended(pool: Pool, sequence: Sequence) -> bool:
    return sequence.request_id in {*pool.finished, *(name for name, _ in pool.to_finish)}


def check_urgent(pool: Pool) -> None:
    """The first of the most urgent class, if it may stand by, finds no blocks where batch rows may stop."""
    sequence = pool.scheduler.queue.classes[0].first()
    if sequence is None or not may_stand_by(sequence) or not sequence.refused_at:
        return  # there is none, or it has come back behind the last decision
    for replica in pool.scheduler.workers.placement.with_batch:
        count, victims = rows_in_the_way(replica)
        assert count > len(victims) or not replica.has_room(sequence), sequence.request_id
