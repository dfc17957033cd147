"""Scheduler against simulated workers: blocks, budgets, ends, deaths. Every request ends."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batcher.scheduling.replica import WorkerLimits
from batcher.scheduling.scheduler import Scheduler
from common.messages.plan import HeldRow, Report
from common.messages.records import pack_ids
from tests.support.fleet.simulated_pool import Pool, request
from tests.support.scheduling.one_at_a_time import completions

sizes = st.lists(st.tuples(st.integers(1, 200), st.integers(1, 120)), min_size=1, max_size=40)


@settings(max_examples=400)
@example(
    sizes=[(65, 49), (129, 13), (147, 47), (138, 56), (1, 1), (1, 11), (161, 33), (81, 49)],
    num_workers=2,
    num_blocks=20,
    seed=8967,
    actions=["kill"],
    num_speculated=0,
)
@example(sizes=[(99, 63), (94, 52)], num_workers=1, num_blocks=20, seed=20, actions=[], num_speculated=0)
@given(
    sizes=sizes,
    num_workers=st.integers(1, 3),
    num_blocks=st.integers(20, 60),
    seed=st.integers(0, 10**6),
    actions=st.lists(
        st.sampled_from(["kill", "drain", "cancel", "cancel", "succeed", "succeed"]), max_size=6
    ),
    num_speculated=st.sampled_from([0, 1, 5]),
)
def test_every_request_ends_once_and_every_block_comes_back(
    sizes: list[tuple[int, int]],
    num_workers: int,
    num_blocks: int,
    seed: int,
    actions: list[str],
    num_speculated: int,
) -> None:
    pool = Pool(num_workers, num_blocks, seed, WorkerLimits(max_batch_size=8), num_speculated=num_speculated)
    pool.add(*(request(f"r{i}", prompt, new, i) for i, (prompt, new) in enumerate(sizes)))
    for action in actions:
        for _ in range(pool.random.randint(1, 30)):
            pool.turn()
        pool.disturb(action, len(sizes))
    pool.run()
    assert sorted([*pool.finished, *(name for name, _ in pool.to_finish)]) == sorted(
        f"r{i}" for i in range(len(sizes))
    )
    assert {why for _, why in pool.to_finish} <= {"client"}
    pool.check_blocks_returned()


@settings(max_examples=100)
@given(
    sizes=sizes,
    num_workers=st.integers(1, 3),
    num_blocks=st.integers(20, 60),
    seed=st.integers(0, 10**6),
    actions=st.lists(st.sampled_from(["kill", "drain", "succeed"]), max_size=6),
    num_speculated=st.sampled_from([0, 1, 5]),
)
def test_an_obvious_scheduler_gives_the_same_completions(
    sizes: list[tuple[int, int]],
    num_workers: int,
    num_blocks: int,
    seed: int,
    actions: list[str],
    num_speculated: int,
) -> None:
    pool = Pool(num_workers, num_blocks, seed, WorkerLimits(max_batch_size=8), num_speculated=num_speculated)
    requests = [request(f"r{i}", prompt, new, i) for i, (prompt, new) in enumerate(sizes)]
    pool.add(*requests)
    for action in actions:
        for _ in range(pool.random.randint(1, 30)):
            pool.turn()
        pool.disturb(action, len(sizes))
    pool.run()
    assert pool.committed == completions([one.request for one in requests], pool.eos_chance)


def test_scarce_blocks_preempt_the_youngest_request_and_every_one_ends() -> None:
    pool = Pool(1, num_blocks=26, seed=1, eos_chance=0)
    pool.add(*(request(f"r{i}", 40, 300, i) for i in range(3)))
    pool.run()
    assert pool.finished[0] == "r0"
    assert sorted(pool.finished) == ["r0", "r1", "r2"]
    assert all(pool.committed[name] == 300 for name in pool.finished)


def test_requests_start_in_order_of_arrival() -> None:
    pool = Pool(1, num_blocks=200, seed=1, limits=WorkerLimits(max_batch_size=1), eos_chance=0)
    pool.add(*(request(f"r{i}", 10, 5, i) for i in (9, 10, 8)))
    pool.run()
    assert pool.finished == ["r8", "r9", "r10"]


def test_rows_go_to_the_least_loaded_worker() -> None:
    pool = Pool(3, num_blocks=200, seed=1)
    pool.add(*(request(f"r{i}", 10, 50, i) for i in range(7)))
    pool.decide()
    assert sorted(replica.num_running for replica in pool.scheduler.replicas.values()) == [2, 2, 3]


def test_cancel_of_a_waiting_request_never_starts_it() -> None:
    pool = Pool(0, num_blocks=100, seed=1)
    pool.add(request("r0", 10, 5))
    pool.scheduler.cancel("r0", "client")
    pool.scheduler.cancel("r0", "client")
    pool.decide()
    assert pool.to_finish == [("r0", "client")]
    pool.add_worker()
    pool.decide()
    assert not pool.workers["w0"].rows


def test_cancel_of_a_running_request_asks_the_worker_once() -> None:
    pool = Pool(1, num_blocks=100, seed=1, eos_chance=0)
    pool.add(request("r0", 10, 500))
    pool.turn()
    pool.scheduler.cancel("r0", "client")
    assert [pending.plan.stops for pending in pool.scheduler.plans()] == [[(1, "client")]]
    assert all(not pending.plan.stops for pending in pool.scheduler.plans())


def test_deadline_ends_waiting_and_running_requests() -> None:
    pool = Pool(1, num_blocks=100, seed=1, limits=WorkerLimits(max_batch_size=1), eos_chance=0)
    pool.add(request("r0", 10, 500, 0, ttl_ms=5000), request("r1", 10, 500, 1, ttl_ms=5000))
    pool.turn()
    pool.scheduler.expire(5999)
    pool.decide()
    assert pool.to_finish == []
    pool.scheduler.expire(6000)
    pool.decide()
    assert pool.to_finish == [("r1", "expired")]
    pool.run()
    assert pool.finished == ["r0"]


def test_a_request_under_which_three_workers_died_is_failed() -> None:
    pool = Pool(1, num_blocks=100, seed=1)
    pool.add(request("r0", 10, 50))
    for crash_count in (1, 2, 3):
        pool.decide()
        assert pool.to_finish == []
        (sequence,) = pool.scheduler.remove_worker(f"w{crash_count - 1}")
        sequence.crash_count = crash_count
        pool.scheduler.resume(sequence)
        del pool.workers[f"w{crash_count - 1}"]
        pool.add_worker()
    pool.decide()
    assert pool.to_finish == [("r0", "poison")]


def test_suspects_start_one_at_a_time() -> None:
    pool = Pool(1, num_blocks=100, seed=1, eos_chance=0)
    suspects = [request(f"r{i}", 10, 50, i) for i in range(3)]
    for one in suspects:
        one.crash_count = 1
    pool.add(*suspects, request("r9", 10, 50, 9))
    pool.decide()
    assert len(pool.workers["w0"].rows) == 2
    assert {row.start.request.request_id for row in pool.workers["w0"].rows.values()} == {"r0", "r9"}
    pool.turn()
    pool.decide()
    assert len(pool.workers["w0"].rows) == 3


def test_a_draining_worker_gives_its_rows_away() -> None:
    pool = Pool(2, num_blocks=100, seed=1, eos_chance=0)
    pool.add(*(request(f"r{i}", 10, 400, i) for i in range(4)))
    pool.turn()
    pool.scheduler.workers.drain("w0")
    for _ in range(30):
        pool.turn()
    assert not pool.workers["w0"].rows and len(pool.workers["w1"].rows) == 4
    pool.run()
    assert len(pool.finished) == 4


def test_the_last_worker_finishes_rows_of_clients_and_takes_new_ones_only_when_the_pool_closes() -> None:
    pool = Pool(1, num_blocks=100, seed=1, limits=WorkerLimits(max_batch_size=2), eos_chance=0)
    pool.add(*(request(f"r{i}", 10, 100, i, gateway="g") for i in range(4)))
    pool.turn()
    pool.scheduler.workers.drain("w0")
    for _ in range(150):
        pool.turn()
    assert sorted(pool.finished) == ["r0", "r1"] and not pool.workers["w0"].rows
    pool.scheduler.workers.set_closing()
    pool.run()
    assert sorted(pool.finished) == ["r0", "r1", "r2", "r3"]


def test_the_last_worker_leaves_jobs_to_the_next_one() -> None:
    pool = Pool(1, num_blocks=100, seed=1, limits=WorkerLimits(max_batch_size=2), eos_chance=0)
    pool.add(request("job", 10, 400, 0), *(request(f"r{i}", 10, 50, 1 + i, gateway="g") for i in range(2)))
    pool.turn()
    pool.scheduler.workers.drain("w0")
    pool.scheduler.workers.set_closing()
    for _ in range(200):
        pool.turn()
    assert sorted(pool.finished) == ["r0", "r1"] and not pool.workers["w0"].rows
    pool.scheduler.workers.closing = False
    pool.add_worker()
    pool.run()
    assert sorted(pool.finished) == ["job", "r0", "r1"]


def test_rows_of_a_draining_worker_move_as_soon_as_another_joins() -> None:
    pool = Pool(1, num_blocks=100, seed=1, eos_chance=0)
    pool.add(*(request(f"r{i}", 10, 400, i, gateway="g") for i in range(4)))
    pool.turn()
    pool.scheduler.workers.drain("w0")
    for _ in range(10):
        pool.turn()
    assert len(pool.workers["w0"].rows) == 4
    joined = pool.add_worker()
    for _ in range(30):
        pool.turn()
    assert not pool.workers["w0"].rows and len(pool.workers[joined].rows) == 4
    pool.run()
    assert len(pool.finished) == 4


def test_a_request_that_no_cache_can_hold_is_refused_and_blocks_nobody() -> None:
    pool = Pool(1, num_blocks=10, seed=1, eos_chance=0)
    pool.add(request("big", 200, 50, 0), request("small", 10, 5, 1))
    pool.run()
    assert pool.to_finish == [("big", "capacity")]
    assert pool.finished == ["small"]


def test_a_withdrawn_row_frees_its_blocks_and_leaves_the_plan() -> None:
    pool = Pool(1, num_blocks=100, seed=1, eos_chance=0)
    pool.add(*(request(f"r{i}", 10, 50, i) for i in range(3)))
    (pending,) = pool.scheduler.plans()
    (row,) = pending.withdraw([1])
    assert row.sequence.request_id == "r1" and row.sequence.row is None
    assert [start.request.request_id for start in pending.plan.starts] == ["r0", "r2"]
    pool.workers["w0"].apply_plan(pending.plan)
    assert len(pool.workers["w0"].owned) == pool.num_blocks - pending.replica.pool.num_free


def test_a_new_batcher_adopts_what_workers_hold() -> None:
    pool = Pool(2, num_blocks=100, seed=1, eos_chance=0)
    pool.add(*(request(f"r{i}", 100, 60, i) for i in range(10)))
    for _ in range(3):
        pool.turn()
    before = {name: list(worker.rows) for name, worker in pool.workers.items()}
    pool.succeed()
    assert pool.num_resumed == 10 - len(pool.finished) - sum(map(len, before.values()))
    pool.decide()
    for name, worker in pool.workers.items():
        assert list(worker.rows)[: len(before[name])] == before[name] and worker.until > worker.step
    pool.run()
    assert sorted(pool.finished) == [f"r{i}" for i in range(10)]
    assert set(pool.committed.values()) == {60}
    pool.check_blocks_returned()


def test_a_cancelled_row_is_adopted_to_be_stopped() -> None:
    pool = Pool(1, num_blocks=100, seed=1, eos_chance=0)
    pool.add(request("r0", 10, 500))
    pool.turn()
    pool.scheduler.sequences["r0"].stop_reason = "client"
    pool.succeed()
    (pending,) = pool.scheduler.plans()
    assert pending.plan.stops == [(1, "client")]


def test_rows_of_requests_that_are_not_known_are_stopped_and_their_blocks_come_back() -> None:
    """So is a row of another attempt than the request's last."""
    pool = Pool(1, num_blocks=100, seed=1, eos_chance=0)
    pool.add(request("r0", 10, 500, 0), request("r1", 10, 500, 1))
    pool.turn()
    pool.scheduler.forget(pool.scheduler.sequences["r0"])
    pool.attempts["r1"] = 2
    pool.succeed()
    assert pool.num_resumed == 1
    (pending,) = pool.scheduler.plans()
    assert pending.plan.stops == [(1, "takeover"), (2, "takeover")]
    assert [start.row for start in pending.plan.starts] == [3]
    pool.workers["w0"].apply_plan(pending.plan)
    pool.run()
    assert pool.finished == ["r1"]
    pool.check_blocks_returned()


def test_a_report_in_which_two_rows_own_a_block_is_refused() -> None:
    pool = Pool(1, num_blocks=100, seed=1)
    blocks = pack_ids([1, 2])
    held = [HeldRow(row, f"r{row}", 1, 0, 0, blocks) for row in (1, 2)]
    scheduler = Scheduler(WorkerLimits(), 2)
    for wrong in (held, [HeldRow(1, "r1", 1, 0, 0, pack_ids([101]))]):
        with pytest.raises(ValueError, match="in use twice"):
            scheduler.add_worker(pool.capacity("w0"), Report(1, 2, 1, 0, takeover=True, held=wrong), [])
    assert not scheduler.replicas
