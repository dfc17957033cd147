"""Interrupted answers that wait for their prefill, when a worker joins."""

from batcher.scheduling.replica import WorkerLimits
from tests.support.fleet.simulated_pool import Pool, request

NUM_REQUESTS, NUM_PROMPT, NUM_NEW = 12, 400, 40


def pool_after_a_death(num_committed: int) -> Pool:
    """All rows of two workers are on the one that is left, and none is computed again yet."""
    pool = Pool(2, num_blocks=1000, seed=3, limits=WorkerLimits(max_batch_size=32), eos_chance=0.0)
    pool.add(*(request(f"r{i}", NUM_PROMPT + i, NUM_NEW, i) for i in range(NUM_REQUESTS)))
    pool.committed = dict.fromkeys((f"r{i}" for i in range(NUM_REQUESTS)), num_committed)
    pool.decide()
    for name in ("w0", "w1"):
        pool.kill(name)
    pool.add_worker()
    pool.decide()
    assert rows(pool) == {"w2": NUM_REQUESTS}
    return pool


def rows(pool: Pool) -> dict[str, int]:
    return {name: replica.num_running for name, replica in pool.scheduler.replicas.items()}


def test_a_worker_that_joins_gets_its_share_of_the_interrupted_answers_that_wait() -> None:
    pool = pool_after_a_death(num_committed=5)
    longest = {f"r{i}" for i in range(NUM_REQUESTS // 2, NUM_REQUESTS)}
    pool.add_worker()
    pool.decide()
    stopped = [row.sequence.request_id for row in pool.scheduler.replicas["w2"].running if row.stopping]
    assert {*stopped} == longest, "they would be computed last"
    for _ in range(3):
        pool.turn()
    assert rows(pool) == {"w2": NUM_REQUESTS // 2, "w3": NUM_REQUESTS // 2}
    pool.run()
    assert len(pool.finished) == NUM_REQUESTS
    pool.check_blocks_returned()


def test_requests_whose_answers_have_not_begun_stay_where_they_are() -> None:
    pool = pool_after_a_death(num_committed=0)
    pool.add_worker()
    pool.decide()
    assert not any(row.stopping for row in pool.scheduler.replicas["w2"].running)
