"""Placement: a request goes to the worker that has its beginning computed, unless that has many more rows."""

import pytest

from batcher.scheduling import scheduler
from batcher.scheduling.plan_builder import next_plan
from batcher.scheduling.replica import Replica, WorkerLimits
from batcher.scheduling.sequence import PlacedRow, Sequence
from common.messages.plan import Plan
from tests.support.fleet.simulated_pool import Pool, request, sharing_request

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


def test_after_a_death_the_survivors_caches_are_used() -> None:
    pool = Pool(2, num_blocks=200, seed=1, eos_chance=0)
    for i in range(2):  # both workers know the chat
        pool.add(sharing_request(f"r{i}", CHAT, 60, i))
    run_turns(pool)
    sequence = sharing_request("r2", CHAT, 60, 2)
    pool.add(sequence)
    pool.decide()
    assert sequence.row is not None
    home = next(name for name, worker in pool.workers.items() if worker.rows)
    for _ in range(3):
        pool.turn()
    pool.kill(home)
    pool.decide()
    assert sequence.row is not None and sequence.row.num_cached > len(CHAT)
    pool.run()
    assert pool.committed["r2"] == 60


def test_requests_that_share_nothing_go_where_the_fewest_rows_are() -> None:
    pool = Pool(2, num_blocks=200, seed=1, eos_chance=0)
    start(pool, "r0", CHAT, new=100)
    pool.add(request("r1", 10, 50, 1))
    pool.decide()
    assert [replica.num_running for replica in pool.scheduler.replicas.values()] == [1, 1]


def test_a_worker_that_joins_gets_what_waits_then_what_comes() -> None:
    pool = Pool(1, num_blocks=400, seed=1, limits=WorkerLimits(max_batch_size=4), eos_chance=0)
    pool.add(*(request(f"r{i}", 20, 300, i) for i in range(7)))
    pool.turn()
    joined = pool.add_worker()
    pool.decide()
    assert len(pool.workers[joined].rows) == 3, "those that waited, in the first decision"
    pool.add(request("r7", 20, 300, 7))
    pool.decide()
    assert len(pool.workers[joined].rows) == 4
    pool.run()
    assert len(pool.finished) == 8


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


class Calls:
    """Counts how often workers are asked for a plan, and whether they can start a request."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plans = self.starts = 0
        can_start = Replica.can_start

        def count_plan(
            replica: Replica, epoch: int, starting: list[PlacedRow], has_callers: bool
        ) -> Plan | None:
            self.plans += 1
            return next_plan(replica, epoch, starting, has_callers)

        def count_start(replica: Replica, sequence: Sequence) -> bool:
            self.starts += 1
            return can_start(replica, sequence)

        monkeypatch.setattr(scheduler, "next_plan", count_plan)
        monkeypatch.setattr(Replica, "can_start", count_start)

    def during(self, pool: Pool) -> tuple[int, int]:
        """Plans asked for, and starts tried, in one decision."""
        self.plans = self.starts = 0
        pool.decide()
        return self.plans, self.starts


def test_a_decision_costs_what_has_changed_however_many_workers_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = Pool(60, num_blocks=100, seed=1, limits=WorkerLimits(max_batch_size=1), eos_chance=0)
    calls = Calls(monkeypatch)
    pool.add(*(request(f"r{i}", 20, 400, i) for i in range(60)))
    pool.decide()
    assert calls.during(pool) == (0, 0)
    pool.add(request("r60", 20, 400, 60))
    assert calls.during(pool) == (0, 60), "it finds no room"
    assert calls.during(pool) == (0, 0), "and is not tried again where nothing has changed"
    pool.add(request("r61", 20, 400, 61))
    assert calls.during(pool) == (0, 0), "nor is one that needs as much"
    pool.scheduler.cancel("r7", "client")
    assert calls.during(pool)[0] == 1
    home = next(name for name, worker in pool.workers.items() if worker.leaving)
    pool.scheduler.apply_report(home, pool.workers[home].take_report())
    assert calls.during(pool) <= (2, 3)
    assert pool.scheduler.sequences["r60"].row is not None
