"""Long work runs in slices, in turns or in a thread, so that no stream waits for it."""

import asyncio
import importlib
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from api import event_loop
from api.event_loop import LONG_SIZE, PacedQueue, Turns, offload
from deploy.launcher.embedded_broker import Broker
from tests.support.fleet.gateways import answering
from tests.support.fleet.scripted_worker import Answer
from tests.support.tokenizer import TOKENIZER

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


CHAT = [{"role": "user", "content": "a"}] * 200
CASES: list[tuple[str, str, str, dict[str, Any]]] = [
    ("/tokenize", "api.http.body", "parse_body", {"inputs": "a " * LONG_SIZE}),
    ("/tokenize", "api.protocols.tokenize", "simple_tokens", {"inputs": "a " * LONG_SIZE}),
    (
        "/generate",
        "api.http.body",
        "parse_body",
        {"inputs": "a", "parameters": {"stop_token_ids": [1] * LONG_SIZE}},
    ),
    (
        "/generate",
        "api.protocols.tgi",
        "render_response",
        {"inputs": "a", "parameters": {"details": True, "top_n_tokens": 20}},
    ),
    ("/v1/completions", "api.http.body", "parse_body", {"prompt": [1] * LONG_SIZE}),
    ("/v1/chat/completions", "api.protocols.openai_bodies", "render_prompt", {"messages": CHAT}),
    ("/chat_tokenize", "api.protocols.openai_bodies", "render_prompt", {"messages": CHAT}),
]


@pytest.mark.parametrize(
    ("path", "module", "name", "body"), CASES, ids=[f"{path} {name}" for path, _, name, _ in CASES]
)
async def test_large_requests_are_parsed_and_rendered_in_threads(
    broker: Broker, path: str, module: str, name: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, seen = threading.get_ident(), set[int]()
    place = importlib.import_module(module)
    work: Callable[..., Any] = getattr(place, name)

    def watched(*args: Any) -> Any:
        seen.add(threading.get_ident())
        return work(*args)

    monkeypatch.setattr(place, name, watched)
    answer = Answer([TOKENIZER.token_to_id("a")] * (LONG_SIZE // 20))  # type: ignore[list-item]
    async with answering(broker.url, answer) as (_, _, client):
        await client.post(path, json=body)
    assert seen and here not in seen
