"""Placement: a request goes to the worker that has its beginning computed and its adapter loaded, unless that
has many more rows.
"""

from dataclasses import replace

import pytest

from batcher.scheduling import scheduler
from batcher.scheduling.plan_builder import next_plan
from batcher.scheduling.replica import Replica, WorkerLimits
from batcher.scheduling.sequence import PlacedRow, Sequence
from common.messages.plan import Plan
from tests.support.fleet.simulated_pool import Pool, request, sharing_request

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
    sequence = request(name, 20, new, entry=len(pool.scheduler.sequences))
    sequence.request = replace(sequence.request, adapter=adapter)
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
