"""BlockPool: every block has one owner at most, and the last one released is the first one allocated."""

import random

from batcher.scheduling.kv_blocks import BlockPool


def test_block_0_is_never_allocated() -> None:
    pool = BlockPool(4)
    assert pool.allocate(4) == [1, 2, 3, 4]
    assert pool.num_free == 0


def test_as_many_as_are_free_can_be_allocated() -> None:
    pool = BlockPool(3)
    pool.allocate(1)
    assert pool.can_allocate(2) and not pool.can_allocate(3)
    pool.allocate(2)
    assert pool.can_allocate(0) and not pool.can_allocate(1)


def test_no_blocks_are_an_empty_list() -> None:
    pool = BlockPool(3)
    assert pool.allocate(0) == [] and pool.num_free == 3


def test_the_blocks_released_last_are_allocated_first_in_their_order() -> None:
    pool = BlockPool(6)
    first, second = pool.allocate(2), pool.allocate(2)
    pool.release(first)
    pool.release(second)
    assert pool.allocate(3) == [*second, first[0]]


def test_no_block_has_two_owners_and_none_is_lost() -> None:
    pool, draw = BlockPool(20), random.Random(1)
    owned: list[list[int]] = []
    for _ in range(500):
        count = draw.randint(0, 6)
        if pool.can_allocate(count):
            owned.append(pool.allocate(count))
        elif owned:
            pool.release(owned.pop(draw.randrange(len(owned))))
        held = [block for blocks in owned for block in blocks]
        assert sorted(held + pool.free) == list(range(1, 21))
