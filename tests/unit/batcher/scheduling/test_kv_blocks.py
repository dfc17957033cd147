"""KV blocks: each has one owner at most unless it is shared; a block is shared only if it is complete.
Simulated workers complain where a block does not hold what it should.
"""

from batcher.scheduling.kv_blocks import PrefixCache
from tests.support.fleet.simulated_pool import BLOCK_SIZE, Pool, sharing_request
from tests.support.fleet.simulated_worker import generated_id

# --- kv blocks prefix cache ---------------------------------------------------------------------------------

SYSTEM = list(range(100, 150))


def run_one(pool: Pool, name: str, prompt: list[int], new: int = 20, salt: str = "") -> int:
    """Run a request alone. Return how many tokens its start found computed."""
    sequence = sharing_request(name, prompt, new, entry=len(pool.attempts), salt=salt)
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


def test_requests_of_different_salts_share_nothing() -> None:
    pool = Pool(1, num_blocks=100, seed=1, eos_chance=0)
    prompt = list(range(70))
    assert [run_one(pool, f"r{salt}", prompt, salt=salt) for salt in ("", "a", "b", "a")] == [0, 0, 0, 64]


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
    row = replica.start(sharing_request("r0", list(range(100)), 5, entry=0, salt=""))
    names = replica.names(row.sequence)
    cache = PrefixCache()
    cache.snapshots = set()
    cache.expect(names, row)
    assert cache.find_expected(names) == (0, len(names), row)
    assert cache.find_expected([*names, b"more"]) == (0, len(names), row)
    assert cache.find_expected(names[:-1]) == (0, 0, None)
    cache.expect_no_more(names, row)
    assert cache.find_expected(names) == (0, 0, None)
