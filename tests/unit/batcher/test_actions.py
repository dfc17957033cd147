"""ActionQueue: scripts that follow each other are sent at once, and nothing is done out of order."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError, ResponseError

from batcher.actions import MAX_BYTES, MAX_CALLS, Action, ActionQueue, ScriptAction
from common.broker.fast_client import ScriptCall, SerialClient

Settle = Callable[[Any], Iterable[Action | ScriptAction]]


class RecordingClient(SerialClient):
    """A client whose broker replies with the first argument, unless `replies` has another reply to it."""

    def __init__(self, redis: Redis) -> None:
        super().__init__(redis)
        self.sent: list[list[Any]] = []
        self.replies_to: dict[str, Any] = {}

    async def run_scripts(self, calls: Sequence[ScriptCall]) -> list[Any]:
        self.sent.append([call.args[0] for call in calls])
        found = [self.replies_to.pop(str(call.args[0]), call.args[0]) for call in calls]
        if any(isinstance(one, ConnectionError) for one in found):
            raise ConnectionError("cut")
        return found


@pytest.fixture
def client(redis: Redis) -> RecordingClient:
    return RecordingClient(redis)


@pytest.fixture
def actions(client: RecordingClient) -> ActionQueue:
    return ActionQueue(client)


def script(name: str, settled: list[Any], worker: str = "") -> ScriptAction:
    def settle(reply: Any) -> list[Action]:
        settled.append(reply)
        return []

    return ScriptAction(lambda: ScriptCall("dequeue", [], [name]), settle, worker)


async def run_all(actions: ActionQueue) -> None:
    while actions:
        await actions.run_next()


async def test_scripts_between_other_actions_are_sent_at_once(
    client: RecordingClient, actions: ActionQueue
) -> None:
    done: list[Any] = []

    async def note() -> None:
        done.append("other")

    actions.add(script("a", done), script("b", done), note, script("c", done))
    await run_all(actions)
    assert (client.sent, done) == ([["a", "b"], ["c"]], ["a", "b", "other", "c"])


async def test_what_is_sent_at_once_is_bounded(client: RecordingClient, actions: ActionQueue) -> None:
    long = ScriptAction(lambda: ScriptCall("dequeue", [], ["long", bytes(MAX_BYTES + 1)]), lambda _: [])
    actions.add(script("a", []), long, *(script("b", []) for _ in range(MAX_CALLS + 1)))
    await run_all(actions)
    assert [len(names) for names in client.sent] == [2, MAX_CALLS, 1]


async def test_the_next_plan_of_a_worker_waits_for_what_the_reply_to_the_one_before_decides(
    client: RecordingClient, actions: ActionQueue
) -> None:
    done: list[Any] = []
    again = script("again", done, "w1")
    refused = ScriptAction(lambda: ScriptCall("publish_plan", [], ["first"]), lambda _: [again], "w1")
    actions.add(refused, script("other", done, "w2"), script("second", done, "w1"), script("end", done))
    await run_all(actions)
    assert client.sent == [["first", "other"], ["again"], ["second", "end"]]
    assert done == ["other", "again", "second", "end"]


async def test_what_the_broker_refuses_and_what_was_sent_behind_it_is_done_again(
    client: RecordingClient, actions: ActionQueue
) -> None:
    done: list[Any] = []
    client.replies_to["b"] = ResponseError("OOM")
    actions.add(*(script(name, done) for name in "abc"))
    with pytest.raises(ResponseError):
        await actions.run_next()
    assert done == ["a"]
    await run_all(actions)
    assert (client.sent, done) == ([["a", "b", "c"], ["b", "c"]], ["a", "b", "c"])


async def test_all_that_was_sent_before_the_connection_was_lost_is_done_again(
    client: RecordingClient, actions: ActionQueue
) -> None:
    done: list[Any] = []
    client.replies_to["b"] = ConnectionError("cut")
    actions.add(*(script(name, done) for name in "ab"))
    with pytest.raises(ConnectionError):
        await actions.run_next()
    assert not done
    await run_all(actions)
    assert (client.sent, done) == ([["a", "b"], ["a", "b"]], ["a", "b"])
