"""Callers beside a full pool of batch rows: they wait for no step that was not granted to run already."""

from dataclasses import replace

from batcher.scheduling.replica import WorkerLimits
from batcher.scheduling.scheduler import CALLERS_MS
from batcher.scheduling.sequence import Sequence
from tests.support.fleet.simulated_pool import Pool, request

NUM_WORKERS, NUM_ROWS, PROMPT, TOKENS = 2, 256, 3, 64
NUM_BATCH = NUM_WORKERS * NUM_ROWS + 100
TTL_MS = 600_000


def of_class(class_name: str, name: str, entry: int) -> Sequence:
    """Make a request that is queued at 1,000 ms."""
    made = request(name, PROMPT, TOKENS, entry, ttl_ms=TTL_MS, gateway="g")
    asked = replace(made.request, class_name=class_name, ttl_ms=TTL_MS)
    return Sequence(asked, made.entry_id, made.deadline_ms)


def full_pool() -> Pool:
    """Workers whose places all have batch rows that have come on, and more of them in the queue."""
    pool = Pool(
        NUM_WORKERS, 10**5, seed=1, limits=WorkerLimits(max_batch_size=NUM_ROWS), eos_chance=0, shares=False
    )
    pool.add(*(of_class("batch", f"b{number}", number) for number in range(NUM_BATCH)))
    while min(pool.committed.get(f"b{number}", 0) for number in range(NUM_WORKERS * NUM_ROWS)) < 20:
        pool.turn()
    return pool


def test_the_first_token_of_a_caller_comes_with_the_next_step_of_a_full_pool() -> None:
    pool = full_pool()
    names = [f"c{number}" for number in range(NUM_WORKERS)]
    pool.add(*(of_class("interactive", name, 10**5 + number) for number, name in enumerate(names)))
    pool.decide()
    for worker in pool.workers.values():
        assert worker.run()
    first = {name for worker in pool.workers.values() for name in worker.committed if name in names}
    assert first == {*names}


def test_batch_rows_that_have_made_room_go_on_and_all_end_with_all_tokens() -> None:
    pool = full_pool()
    pool.add(*(of_class("interactive", f"c{number}", 10**5 + number) for number in range(50)))
    pool.run()
    assert len(pool.finished) == NUM_BATCH + 50
    assert {*pool.committed.values()} == {TOKENS}


def test_plans_bound_prompts_of_batches_for_a_minute_after_the_last_caller() -> None:
    pool = Pool(1, 1000, seed=1, eos_chance=0)
    bounds = []
    for number, now_ms in enumerate((999, 1000, 999 + CALLERS_MS, 1000 + CALLERS_MS)):
        pool.scheduler.expire(now_ms)
        pool.add(of_class("batch", f"b{number}", number))
        if now_ms == 1000:
            pool.add(of_class("standard", "c0", 10**5))
        bounds += [pending.plan.bulk_tokens > 0 for pending in pool.scheduler.plans()]
    assert bounds == [False, True, True, False]
