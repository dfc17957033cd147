"""Placement of requests with adapters: on workers that have loaded the adapter, best on its device."""

from dataclasses import replace

from batcher.scheduling.sequence import Sequence
from tests.support.fleet.simulated_pool import Pool, request

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


def test_a_worker_that_unloads_an_adapter_gets_no_more_of_its_requests() -> None:
    pool = make_pool(2, w0=(SQL,), w1=(SQL,))
    running = ask(pool, "r0", SQL)
    pool.scheduler.set_adapters(home(running), frozenset())
    assert home(ask(pool, "r1", SQL)) not in ("", home(running))
    for _ in range(60):
        pool.turn()
    assert "r0" in pool.finished, "its live rows end as they would"


def test_a_request_that_waits_for_an_adapter_does_not_stand_by_or_take_a_place_elsewhere() -> None:
    pool = make_pool(2, w0=(SQL,))
    limit = pool.scheduler.limits.max_batch_size
    rows = [ask(pool, f"r{i}", SQL) for i in range(limit)]
    assert {home(one) for one in rows if one.row} == {"w0"}
    assert home(ask(pool, "next", SQL)) in ("", "w0")
