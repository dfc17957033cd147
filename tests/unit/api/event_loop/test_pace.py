"""Pace and turns: the event loop's other tasks run between the parts of long work."""

import asyncio
import itertools

from api.event_loop import pace
from api.event_loop.pace import Pace, Turns


async def count_turns(counts: list[int]) -> None:
    while True:
        counts[0] += 1
        await asyncio.sleep(0)


async def test_other_tasks_have_their_turn_after_each_slice() -> None:
    counts, paced = [0], Pace()
    others = asyncio.create_task(count_turns(counts))
    for _ in range(10 * pace.MAX_UNITS):
        await paced.step()
    assert counts[0] >= 10
    await paced.step(5 * pace.MAX_UNITS)
    assert counts[0] >= 11
    others.cancel()


async def test_of_many_tasks_only_some_begin_in_one_turn_and_all_in_order() -> None:
    turns, begun = Turns(4), []

    async def begin(number: int) -> None:
        await turns.take()
        begun.append(number)

    tasks = [asyncio.create_task(begin(i)) for i in range(50)]
    sizes = [0]
    tasks[10].cancel()
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        sizes.append(len(begun))
    assert max(after - before for before, after in itertools.pairwise(sizes)) <= 4
    assert begun == [i for i in range(50) if i != 10]
    await turns.take()
