"""KV blocks: each has one owner at most unless it is shared; a block is shared only if it is complete.
Simulated workers complain where a block does not hold what it should.

Replica: which rows a worker can start, and when it needs more steps or blocks.
"""

from dataclasses import replace

import pytest

from batcher.scheduling.kv_blocks import PrefixCache
from batcher.scheduling.plan_builder import next_plan, set_lengths
from batcher.scheduling.replica import Replica, WorkerLimits
from common.messages.records import num_group_blocks
from common.messages.request import BeamParams, prompt_hashes
from tests.support.chaos.engine import BLOCK_SIZE
from tests.support.fleet.simulated_pool import (
    Pool,
    generated_id,
    make_replica,
    make_sequence,
    sharing_request,
)

# --- kv blocks prefix cache ---------------------------------------------------------------------------------

SYSTEM = list(range(100, 150))


def run_one(pool: Pool, name: str, prompt: list[int], new: int = 20) -> int:
    """Run a request alone. Return how many tokens its start found computed."""
    sequence = sharing_request(name, prompt, new, entry=len(pool.attempts))
    pool.add(sequence)
    pool.decide()
    assert sequence.row is not None
    num_cached = sequence.row.num_cached
    pool.run()
    for _ in range(50):
        pool.turn()
    pool.check_blocks()
    for replica in pool.scheduler.replicas.values():
        assert replica.pool.num_free == replica.pool.num_blocks
    return num_cached


def test_the_next_turn_of_a_chat_finds_prompt_and_answer_computed() -> None:
    pool = Pool(1, num_blocks=100, seed=1, eos_chance=0)
    prompt = list(range(70))
    assert run_one(pool, "r0", prompt, 40) == 0
    # the KV of the answer's last token was never computed
    assert (
        run_one(pool, "r1", [*prompt, *map(generated_id, range(40)), 7, 8, 9])
        == (70 + 39) // BLOCK_SIZE * BLOCK_SIZE
    )


def test_a_prompt_that_is_known_as_a_whole_computes_its_last_block_again() -> None:
    pool = Pool(1, num_blocks=100, seed=1, eos_chance=0)
    prompt = list(range(4 * BLOCK_SIZE))
    assert [run_one(pool, f"r{i}", prompt) for i in range(3)] == [0, 3 * BLOCK_SIZE, 3 * BLOCK_SIZE]
    assert run_one(pool, "r3", [*prompt, 1]) == 4 * BLOCK_SIZE


def test_a_running_row_shares_its_prompt_once_it_is_computed() -> None:
    """Requests that come before that wait for it, where no worker is idle."""
    pool = Pool(1, num_blocks=100, seed=1, eos_chance=0)
    pool.add(sharing_request("r0", SYSTEM, 300))
    pool.decide()
    early = sharing_request("r1", SYSTEM, 300, 1)
    short = sharing_request("r3", SYSTEM[:20], 300, 3)
    pool.add(early, short)
    pool.decide()
    assert early.row is None and early.waiting and short.row is not None
    for _ in range(5):
        pool.turn()
    assert early.row is not None and early.row.num_cached == 48
    late = sharing_request("r2", SYSTEM, 300, 2)
    pool.add(late)
    pool.decide()
    assert late.row and late.row.num_cached == 48 and late.row.blocks[:3] == early.row.blocks[:3]
    pool.run()
    assert sorted(pool.finished) == ["r0", "r1", "r2", "r3"]
    pool.check_blocks_returned()


def test_choices_of_an_answer_compute_their_prompt_once() -> None:
    """On one worker, though others are idle; whatever becomes of the first."""
    for ends, num_others in (("computed", 3), ("cancelled", 2), ("killed", 3)):
        pool = Pool(4, num_blocks=100, seed=1, eos_chance=0)
        prompt = [*SYSTEM, *range(500, 600)]
        choices = [sharing_request(f"r.{i}", prompt, 50, i, num_choices=4) for i in range(4)]
        pool.add(*choices)
        pool.decide()
        assert [choice.row is not None for choice in choices] == [True, False, False, False]
        first = choices[0].row
        assert first is not None
        if ends == "cancelled":
            pool.scheduler.cancel("r.0", "client")
        elif ends == "killed":
            pool.kill(first.worker)
        pool.run()
        num_computed = sum(worker.num_prefilled for worker in pool.workers.values())
        assert num_computed == len(prompt) + num_others * (len(prompt) % BLOCK_SIZE), ends
        assert sorted(pool.finished) == [f"r.{i}" for i in range(4)]
        pool.check_blocks_returned()
        assert not any(replica.pool.cache.expected for replica in pool.scheduler.replicas.values())


def test_cached_blocks_go_before_a_row_is_preempted() -> None:
    pool = Pool(1, num_blocks=20, seed=1, eos_chance=0)
    for i in range(10):
        assert run_one(pool, f"r{i}", [1000 * i + j for j in range(100)], 60) == 0
    replica = pool.scheduler.replicas["w0"]
    assert len(replica.pool.cache.idle) > 10
    assert set(pool.attempts.values()) == {1}


def test_the_least_recently_used_leaf_is_evicted_first() -> None:
    cache = PrefixCache()
    for block, name in enumerate(b"abcd", 1):
        cache.add(bytes([name]), block)
    for block in (2, 1, 4, 3):  # a row with blocks 1 and 2 has ended, then one with 3 and 4
        cache.idle[block] = None
    cache.touch(b"b")
    cache.touch(b"a")
    assert [cache.evict() for _ in range(4)] == [4, 3, 2, 1]
    assert not cache.blocks and not cache.names


def test_rows_with_states_start_at_the_last_snapshot() -> None:
    """Blocks after it are there, but the states at their end are not."""
    cache, names = PrefixCache(), [bytes([i]) for i in range(6)]
    for block, name in enumerate(names[:5], 1):
        cache.add(name, block)
    assert cache.find(names) == [1, 2, 3, 4, 5]
    cache.snapshots = set()
    assert cache.find(names) == []
    cache.note_snapshots([2, 4, 5, -5])
    assert cache.find(names) == [1, 2, 3, 4] and cache.find(names[:3]) == [1, 2]


def test_a_request_waits_for_a_row_whose_states_it_can_start_with() -> None:
    """These are kept at the end of the row's last block, so a request that shares less does not wait."""
    pool = Pool(1, num_blocks=100, seed=1)
    [replica] = pool.scheduler.replicas.values()
    row = replica.start(sharing_request("r0", list(range(100)), 5))
    names = replica.names(row.sequence)
    cache = PrefixCache()
    cache.snapshots = set()
    cache.expect(names, row)
    assert cache.find_expected(names) == (0, len(names), row)
    assert cache.find_expected([*names, b"more"]) == (0, len(names), row)
    assert cache.find_expected(names[:-1]) == (0, 0, None)
    cache.expect_no_more(names, row)
    assert cache.find_expected(names) == (0, 0, None)


# --- replica ------------------------------------------------------------------------------------------------


def test_what_running_rows_may_soon_need_must_be_left() -> None:
    replica = make_replica(num_blocks=9)
    row = replica.start(make_sequence(16))
    assert replica.reserved == 3, "a horizon, and a block"
    assert not replica.can_start(make_sequence(17)), "4 blocks, of 6"
    assert replica.can_start(make_sequence(16)), "3 blocks, of 6"
    replica.end_row(row)
    assert replica.reserved == 0


def test_a_plan_that_grants_nothing_leaves_it_as_it_is_when_a_report_is_due() -> None:
    """Else each plan would put the report off."""
    replica = make_replica(num_blocks=100)
    next_plan(replica, 1, [replica.start(make_sequence(1))])
    replica.step = 10
    plan = next_plan(replica, 1, [replica.start(make_sequence(1))])
    assert plan and (plan.until, plan.report_at) == (32, 16)


def test_a_row_that_starts_has_blocks_for_all_steps_granted_though_the_horizon_is_less_by_then() -> None:
    replica = make_replica(num_blocks=1000)
    replica.step, replica.until = 10, 138
    assert replica.horizon == 32
    assert len(replica.start(make_sequence(16, 200)).blocks) == (16 + 128) // BLOCK_SIZE


def test_steps_that_are_granted_stay_so_though_the_horizon_is_less_by_then() -> None:
    replica = make_replica(num_blocks=1000)
    row = replica.start(make_sequence(16, 500))
    replica.step, replica.until, replica.report_at = 128, 256, 128
    plan = next_plan(replica, 1, [row])
    assert plan and (plan.until, plan.report_at) == (256, 240)


@pytest.mark.parametrize(
    ("kv_len", "max_new_tokens", "is_due"),
    [
        (31, 100, False),  # 17 slots left of 48, more than half a horizon
        (32, 100, True),
        (32, 33, False),  # no more than it has can it ever fill
    ],
)
def test_a_grant_is_needed_where_a_row_that_is_ahead_fills_its_blocks(
    kv_len: int, max_new_tokens: int, is_due: bool
) -> None:
    replica = make_replica()
    row = replica.start(make_sequence(16, max_new_tokens))
    replica.on_prefilled(row, 16, 1)
    replica.until, replica.report_at, replica.step = 32, 16, 5
    assert not replica.needs_grant
    set_lengths(replica, [(row.number, kv_len, 5), (99, 1, 5)])
    assert replica.needs_grant == is_due
    if is_due:
        plan = next_plan(replica, 1, [])
        assert plan and plan.until == 37 and [number for number, _ in plan.blocks] == [row.number]
        assert len(row.blocks) == 4, "for 32 tokens and a horizon"
        assert not replica.needs_grant


def test_a_beam_search_has_the_blocks_of_its_prompt_once_and_others_for_each_beam() -> None:
    replica = make_replica(num_blocks=40)
    row = replica.start(
        make_sequence(36, beams=BeamParams(3))
    )  # two full blocks; with a horizon of 32 tokens five
    assert len(row.blocks) == 2 + 3 * 3
    assert replica.reserved == 3 * (2 + 1), "a horizon, and a block, of each beam"
    replica.on_prefilled(row, 36, 1)
    for step in range(2, 101):
        replica.step = step
        replica.is_short = True
        next_plan(replica, 1, [])
        kv_len = min(row.kv_at(step, step), 36 + 99)
        assert num_group_blocks(36, kv_len, 3, BLOCK_SIZE) <= len(row.blocks)
        assert row.sequence.kv_room(len(row.blocks), BLOCK_SIZE) >= kv_len
    assert len(row.blocks) == num_group_blocks(36, 36 + 99, 3, BLOCK_SIZE) == 2 + 3 * 7
    assert replica.reserved == 0
    replica.end_row(row)
    replica.release(row.number, 36 + 3 * 99)
    assert replica.pool.num_free == 40 and not replica.pool.cache.names


def test_a_beam_search_takes_a_place_for_each_beam() -> None:
    replica = make_replica(num_blocks=100, max_batch_size=4)
    first = replica.start(make_sequence(16, beams=BeamParams(3)))
    assert replica.num_running == 3 and replica.can_start(make_sequence(16))
    assert not replica.can_start(make_sequence(16, beams=BeamParams(2)))
    replica.start(make_sequence(16))
    assert not replica.can_start(make_sequence(16))
    replica.end_row(first)
    assert replica.num_running == 1 and replica.can_start(make_sequence(16, beams=BeamParams(3)))


@pytest.mark.parametrize(
    ("width", "max_new_tokens", "fits"), [(4, 33, True), (4, 34, False), (5, 1, False), (1, 129, True)]
)
def test_what_a_worker_can_ever_hold_counts_the_blocks_and_places_of_beams(
    width: int, max_new_tokens: int, fits: bool
) -> None:
    """Ten blocks: two of the prompt, and two for each of four beams."""
    assert make_replica().can_ever_hold(make_sequence(32, max_new_tokens, beams=BeamParams(width))) == fits


def test_states_of_rows_bound_the_batch() -> None:
    """A worker of a model with states has room for fewer rows than MAX_BATCH_SIZE allows."""
    for max_rows, places in ((2, 2), (0, 4), (9, 4)):
        capacity = replace(make_replica().capacity, max_rows=max_rows)
        assert Replica(capacity, WorkerLimits(4)).limits.max_batch_size == places


def test_a_worker_whose_model_has_states_shares_what_its_snapshots_reach() -> None:
    """One token at least is left to compute, also of a prompt of whole blocks."""
    capacity = replace(make_replica().capacity, max_rows=4, prefix_caching=True)
    states, plain = (Replica(replace(capacity, max_rows=max_rows), WorkerLimits(4)) for max_rows in (4, 0))
    sequence = make_sequence(3 * BLOCK_SIZE)
    sequence.block_hashes = prompt_hashes(sequence.request)
    assert (len(states.names(sequence)), len(plain.names(sequence))) == (2, 3)
    for replica in (states, plain):
        for block, name in enumerate(plain.names(sequence), 1):
            replica.pool.cache.add(name, block)
    states.pool.cache.note_snapshots([1, 3])
    assert (states.cached_blocks(sequence), plain.cached_blocks(sequence)) == ([1], [1, 2])
