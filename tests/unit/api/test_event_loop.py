"""Long work runs in slices, in turns or in a thread, so that no stream waits for it."""

import asyncio
import itertools
import threading
from collections.abc import Iterator

import pytest

from api import event_loop
from api.event_loop import LONG_SIZE, PacedQueue, Turns, offload

# --- slices and turns ---------------------------------------------------------------------------------------


async def test_parts_are_done_at_once_as_far_as_a_slice_goes_and_all_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, queue, done = asyncio.get_running_loop(), PacedQueue(), []
    monkeypatch.setattr(loop, "time", lambda: 1.0)  # uvloop's stands still within a turn
    monkeypatch.setattr(event_loop, "SLICE_S", 3600.0)
    running = asyncio.create_task(queue.run())

    def part(number: int, size: int) -> Iterator[int]:
        for i in range(size):
            done.append((number, i))
            yield 1

    queue.add(part(0, 3))
    assert len(done) == 3, "a short one is done when it comes"
    for number in range(1, 100):
        queue.add(part(number, number % 70))
    sizes = [len(done)]
    while queue.parts:
        await asyncio.sleep(0)
        sizes.append(len(done))
    assert max(after - before for before, after in itertools.pairwise([0, *sizes])) <= event_loop.SLICE_UNITS
    expected = [(0, i) for i in range(3)] + [
        (number, i) for number in range(1, 100) for i in range(number % 70)
    ]
    assert done == expected
    running.cancel()


async def test_of_many_tasks_only_some_begin_in_one_turn_and_all_in_order() -> None:
    turns, begun = Turns(4), []

    async def begin(number: int) -> None:
        await turns.wait_turn()
        begun.append(number)

    tasks = [asyncio.create_task(begin(i)) for i in range(50)]
    sizes = [0]
    tasks[10].cancel()
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        sizes.append(len(begun))
    assert max(after - before for before, after in itertools.pairwise(sizes)) <= 4
    assert begun == [i for i in range(50) if i != 10]
    await turns.wait_turn()


# --- threads ------------------------------------------------------------------------------------------------


async def test_long_work_runs_in_a_thread_and_its_error_comes_back() -> None:
    here = threading.get_ident()
    assert await offload(LONG_SIZE - 1, threading.get_ident) == here
    assert await offload(LONG_SIZE, threading.get_ident) != here
    with pytest.raises(ZeroDivisionError):
        await offload(LONG_SIZE, lambda: 1 / 0)
