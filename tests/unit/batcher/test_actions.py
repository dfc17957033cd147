"""ActionQueue: scripts are sent at once, whatever replies are due, and nothing is done out of order."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, cast

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError, ResponseError

from batcher import batcher_scripts
from batcher.actions import MAX_BYTES, MAX_CALLS, Action, ActionQueue, ScriptAction
from common.broker.client import FastConnection
from common.broker.keys import Keys
from common.broker.lua import ScriptCall
from tests.support.broker_state import run_all


class RecordedQueue(ActionQueue):
    """A queue whose broker replies with the first argument, unless `replies_to` has another reply to it.

    Attributes:
        names: of the scripts of each sending.
    """

    def __init__(self, redis: Redis) -> None:
        super().__init__(redis)
        self.names: list[list[str]] = []
        self.replies_to: dict[str, Any] = {}
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def connect(self) -> FastConnection:
        self.closed = asyncio.get_running_loop().create_future()
        self.connection = cast(FastConnection, self)
        return self.connection

    def close(self) -> None:
        self.connection = None
        super().close()

    def send_all(self, commands: Sequence[Sequence[Any]]) -> None:
        self.names.append([str(command[3]) for command in commands])
        for name in self.names[-1]:
            reply = self.replies_to.pop(name, name)
            if isinstance(reply, ConnectionError):
                self.closed.set_exception(reply)
                self.notify()
                return
            self.on_reply(reply)


@pytest.fixture
async def actions(redis: Redis) -> RecordedQueue:
    return RecordedQueue(redis)


def script(name: str, taken: list[Any], *follow: Action | ScriptAction) -> ScriptAction:
    def on_reply(reply: Any) -> Iterable[Action | ScriptAction]:
        taken.append(reply)
        return follow

    return ScriptAction(lambda: ScriptCall("dequeue", [], [name], str), on_reply)


async def test_scripts_between_other_actions_are_sent_at_once(actions: RecordedQueue) -> None:
    done: list[Any] = []

    async def note() -> None:
        done.append("other")

    actions.add(script("a", done), script("b", done), note, script("c", done))
    await run_all(actions)
    assert (actions.names, done) == ([["a", "b"], ["c"]], ["a", "b", "other", "c"])


async def test_what_is_on_its_way_is_bounded(actions: RecordedQueue) -> None:
    long = ScriptAction(lambda: ScriptCall("dequeue", [], ["long", bytes(MAX_BYTES + 1)], str), lambda _: [])
    actions.add(script("a", []), long, *(script("b", []) for _ in range(MAX_CALLS + 1)))
    await run_all(actions)
    assert [len(names) for names in actions.names] == [2, MAX_CALLS, 1]


async def test_what_a_reply_decides_comes_before_all_that_is_not_sent(actions: RecordedQueue) -> None:
    done: list[Any] = []

    async def note() -> None:
        done.append("other")

    refused = script("refused", done, script("again", done), script("behind", done))
    actions.add(refused, script("sent", done, script("sent again", done)), note, script("end", done))
    await run_all(actions)
    assert actions.names == [["refused", "sent"], ["again", "behind", "sent again"], ["end"]]
    assert done == ["refused", "sent", "again", "behind", "sent again", "other", "end"]


async def test_a_long_action_waits_for_what_was_decided_and_the_next_one_for_another_turn(
    actions: RecordedQueue,
) -> None:
    done: list[Any] = []

    def long(name: str) -> Action:
        async def act() -> None:
            done.append(name)

        return act

    actions.add(script("plan", done))
    actions.defer(long("first"))
    actions.defer(long("second"))
    actions.queue_deferred()
    actions.queue_deferred()
    actions.add(script("after the first", done))
    await actions.run_next()
    assert not actions.can_run, "there is no reply to the plan yet"
    await run_all(actions, len(actions.deferred))
    assert done == ["plan", "first", "after the first"]
    actions.queue_deferred()
    await run_all(actions)
    assert done[3:] == ["second"]


@pytest.mark.parametrize("failure", [ResponseError("OOM"), ConnectionError("cut")])
async def test_what_fails_and_what_was_sent_behind_it_is_done_again(
    actions: RecordedQueue, failure: Exception
) -> None:
    done: list[Any] = []
    actions.replies_to["b"] = failure
    actions.add(*(script(name, done) for name in "abc"))
    with pytest.raises(type(failure)):
        await run_all(actions)
    assert done == ["a"]
    await run_all(actions)
    assert (actions.names, done) == ([["a", "b", "c"], ["b", "c"]], ["a", "b", "c"])


async def test_a_broker_that_has_forgotten_the_scripts_learns_them_again(redis: Redis) -> None:
    """Here the broker is a real one."""
    done: list[Any] = []
    queue = ActionQueue(redis)
    call = batcher_scripts.dequeue(Keys("test"), {"r": "1-0"})
    one = ScriptAction(lambda: call, script("", done).on_reply)
    queue.add(one)
    await run_all(queue)
    await redis.script_flush()
    queue.add(one)
    with pytest.raises(ResponseError, match="No matching script"):
        await run_all(queue)
    await run_all(queue)
    queue.close()
    assert done == [[1], [1]]
