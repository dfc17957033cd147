"""Hand-over: rows of a draining worker leave when another has room, and a few at a time."""

from dataclasses import replace

from batcher.scheduling.replica import WorkerLimits
from batcher.scheduling.sequence import Sequence
from common.messages.request import BeamParams
from tests.support.fleet.simulated_pool import Pool, request

PROMPT, NEW = 40, 1000


def on(pool: Pool, worker: str) -> int:
    """Return how many rows a worker has."""
    return len(pool.workers[worker].rows)


def two_workers(num_rows: int, max_batch_size: int = 8, num_blocks: int = 2000, prompt: int = PROMPT) -> Pool:
    """Return a pool with rows that decode."""
    limits = WorkerLimits(max_batch_size=max_batch_size)
    pool = Pool(2, num_blocks, seed=1, limits=limits, eos_chance=0, shares=False)
    pool.add(*(request(f"r{i}", prompt, NEW, i, gateway="g") for i in range(num_rows)))
    for _ in range(5 + prompt // 64):
        pool.turn()
    return pool


def learn_pace(pool: Pool, worker: str, tokens_per_ms: float) -> None:
    times = pool.scheduler.replicas[worker].pace.times
    times.tokens, times.added_ms = 1000.0 * tokens_per_ms, 1000.0


def test_rows_go_on_where_they_are_until_another_worker_has_a_place() -> None:
    pool = two_workers(16)
    assert on(pool, "w0") == on(pool, "w1") == 8
    pool.scheduler.workers.drain("w0")
    committed = dict(pool.committed)
    for _ in range(10):
        pool.turn()
    assert on(pool, "w0") == 8, "w1 has no place"
    assert all(pool.committed[name] > committed[name] for name in committed), "all decode on"
    for sequence in [row.sequence for row in pool.scheduler.replicas["w1"].running][:3]:
        pool.scheduler.cancel(sequence.request_id, "client")
    for _ in range(20):
        pool.turn()
    assert (on(pool, "w0"), on(pool, "w1")) == (5, 8), "as many leave as places became free"
    pool.run()
    assert len(pool.finished) == 16


def test_new_requests_leave_places_to_rows_on_their_way() -> None:
    """Without that, a row that was stopped for a place that became free would wait for another end."""
    pool = two_workers(16)
    pool.scheduler.workers.drain("w0")
    pool.add(*(request(f"new{i}", 10, NEW, 100 + i, gateway="g") for i in range(4)))
    pool.turn()
    scheduler = pool.scheduler
    ended = next(scheduler.replicas["w1"].running).sequence
    scheduler.cancel(ended.request_id, "client")
    for _ in range(20):
        if not scheduler.hand_over.moves:
            pool.turn()
    [moved] = scheduler.hand_over.moves
    for _ in range(20):
        if moved.row is not None and moved.row.worker == "w1":
            break
        pool.turn()
        assert not any(pool.attempts.get(f"new{i}") for i in range(4))
    pool.run()
    assert len(pool.finished) == 20


def test_a_worker_that_joins_gets_all_rows_of_a_full_pool() -> None:
    pool = two_workers(16)
    pool.scheduler.workers.drain("w0")
    joined = pool.add_worker()
    while on(pool, "w0"):
        pool.turn()
    for _ in range(3):
        pool.turn()
    assert (on(pool, "w1"), on(pool, joined)) == (8, 8)


def test_no_more_tokens_are_on_their_way_than_the_others_compute_at_once() -> None:
    pool = two_workers(16, max_batch_size=64, prompt=100)
    pool.scheduler.workers.drain("w0")
    learn_pace(pool, "w1", tokens_per_ms=4.0)  # 600 tokens at once
    seen = 0
    while on(pool, "w0"):
        pool.turn()
        learn_pace(pool, "w1", tokens_per_ms=4.0)
        moves = pool.scheduler.hand_over.moves
        seen = max(seen, len(moves))
        assert len(moves) == 1 or sum(move.kv_len for move in moves.values()) <= 600
    assert seen > 1
    pool.run()
    assert len(pool.finished) == 16


def test_a_row_longer_than_what_is_computed_at_once_leaves_alone() -> None:
    pool = two_workers(4, prompt=600)
    pool.scheduler.workers.drain("w0")
    for _ in range(40):
        learn_pace(pool, "w1", tokens_per_ms=0.01)
        pool.turn()
        assert len(pool.scheduler.hand_over.moves) <= 1
    assert (on(pool, "w0"), on(pool, "w1")) == (0, 4)


def test_the_shortest_rows_leave_first_and_beam_searches_last() -> None:
    pool = Pool(1, num_blocks=2000, seed=1, eos_chance=0)
    search = Sequence(replace(request("beams", 10, NEW).request, beams=BeamParams(2)), "1000-3", 10**9)
    pool.add(search, request("long", 500, NEW, 0), request("short", 20, NEW, 2))
    for _ in range(15):
        pool.turn()
    pool.add_worker()
    pool.scheduler.workers.drain("w0")
    due = [row.sequence.request_id for row, _ in pool.scheduler.hand_over.due()]
    assert due == ["short", "long", "beams"]


def test_rows_do_not_leave_for_a_worker_without_blocks() -> None:
    pool = two_workers(2, num_blocks=130, prompt=1000)
    assert on(pool, "w0") == on(pool, "w1") == 1
    pool.scheduler.workers.drain("w0")
    for _ in range(10):
        pool.turn()
        assert not pool.scheduler.hand_over.moves
    assert on(pool, "w0") == 1
    pool.scheduler.cancel(next(pool.scheduler.replicas["w1"].running).sequence.request_id, "client")
    pool.run()
    assert (len(pool.finished), pool.workers["w0"].rows) == (2, {})


def test_a_request_that_ends_on_its_way_is_forgotten() -> None:
    pool = two_workers(4)
    pool.scheduler.workers.drain("w0")
    learn_pace(pool, "w1", tokens_per_ms=4.0)
    pool.scheduler.hand_over.stop_rows(pool.scheduler.sequences)
    assert len(pool.scheduler.hand_over.moves) == 2
    for name in list(pool.scheduler.sequences):
        pool.scheduler.cancel(name, "client")
    pool.run()
    pool.turn()
    assert not pool.scheduler.hand_over.moves
