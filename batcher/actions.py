"""Actions: what the batcher has decided and not done yet.

They are done in order. Scripts are pipelined: each is sent without waiting for the replies to those before
it. One connection keeps their order, and the broker refuses a plan that does not follow the one before. Any
other action is a barrier: it waits until everything before it is done, and everything after it waits for it.
Follow-ups of a reply run before anything that is not sent yet.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from common.broker.client import ERRORS, FastConnection
from common.broker.lua import ScriptCall, load_script

MAX_CALLS = 64
"""Scripts that are on their way at once."""
MAX_BYTES = 2**22
"""No further script is sent while more than this is on its way, as with plans that have long prompts."""
SCRIPTS = ("publish_plan", "dequeue")

Action = Callable[[], Awaitable[object]]
"""Takes any number of round trips."""


@dataclass(frozen=True, slots=True, eq=False)
class ScriptAction:
    """An action that is one of SCRIPTS.

    Attributes:
        call: makes the call when it is sent.
        on_reply: takes the reply, and returns its follow-ups.
    """

    call: Callable[[], ScriptCall[Any]]
    on_reply: Callable[[Any], "Iterable[Action | ScriptAction]"]


class ActionQueue:
    """Each action can be repeated: one that fails is done again, and so are scripts that were sent after it.

    Attributes:
        deferred: long actions that are not in `queue` yet; `barrier` is the one that was queued last.
        sent: scripts on their way, `num_bytes` long; `replies` are those to the first of them.
        all_replied: done once each of them has its reply, or the connection is lost.
    """

    def __init__(self, redis: Redis) -> None:
        self.redis = redis
        self.connection: FastConnection | None = None
        self.queue: deque[Action | ScriptAction] = deque()
        self.deferred: deque[Action] = deque()
        self.barrier: Action | None = None
        self.sent: deque[ScriptAction] = deque()
        self.num_bytes = 0
        self.replies: deque[Any] = deque()
        self.all_replied: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self.queue) + len(self.sent) + len(self.deferred)

    def add(self, *actions: Action | ScriptAction) -> None:
        self.queue.extend(actions)

    def defer(self, action: Action) -> None:
        """Add an action that takes long. A turn queues at most one, so that plans come between two."""
        self.deferred.append(action)

    def queue_deferred(self) -> None:
        """Queue the next long action after all earlier ones, unless the last long one is not done yet."""
        if self.deferred and self.barrier not in self.queue:
            self.barrier = self.deferred.popleft()
            self.queue.append(self.barrier)

    @property
    def can_run(self) -> bool:
        """Whether the first action that is not sent can run before any reply comes."""
        if not self.sent or not self.queue:
            return bool(self.queue)
        has_room = len(self.sent) < MAX_CALLS and self.num_bytes <= MAX_BYTES
        return has_room and isinstance(self.queue[0], ScriptAction)

    async def run_next(self) -> bool:
        """Send the scripts up to the next barrier, or run that barrier. Return whether it was a barrier."""
        if isinstance(first := self.queue[0], ScriptAction):
            await self.send()
            return False
        await first()
        self.queue.popleft()
        return True

    async def send(self) -> None:
        connection = self.connection or await self.connect()
        commands = []
        while self.can_run and isinstance(action := self.queue[0], ScriptAction):
            call = action.call()
            commands.append(call.command)
            self.num_bytes += sum(len(arg) for arg in call.args if isinstance(arg, bytes))
            self.sent.append(action)
            self.queue.popleft()
        if self.all_replied is None or self.all_replied.done():
            self.all_replied = asyncio.get_running_loop().create_future()
        connection.send_all(commands)

    async def connect(self) -> FastConnection:
        for name in SCRIPTS:
            await self.redis.script_load(load_script(name))
        self.connection = await FastConnection.connect(self.redis, self.on_reply)
        self.connection.closed.add_done_callback(lambda _: self.notify())
        return self.connection

    def on_reply(self, reply: Any) -> None:
        self.replies.append(reply)
        if len(self.replies) == len(self.sent):
            self.notify()

    def notify(self) -> None:
        if self.all_replied is not None and not self.all_replied.done():
            self.all_replied.set_result(None)

    def take_replies(self) -> None:
        """Take the replies that have come. Raises the error if the broker refused a script, or the connection
        is lost; then all scripts without a reply are sent again.
        """
        follow_ups: list[Action | ScriptAction] = []
        try:
            while self.replies:
                if isinstance(reply := self.replies.popleft(), Exception):
                    raise reply
                follow_ups += self.sent.popleft().on_reply(reply)
            if self.connection is not None and self.connection.closed.done():
                self.connection.closed.result()
        except ERRORS:
            self.close()
            raise
        finally:
            self.queue.extendleft(reversed(follow_ups))
        if not self.sent:
            self.num_bytes = 0

    @property
    def due(self) -> list[asyncio.Future[None]]:
        """A future that is done when all scripts on their way have replies; empty if none are."""
        return [self.all_replied] if self.sent and self.all_replied else []

    def close(self) -> None:
        """Close the connection: scripts without a reply are sent again on the next one."""
        if self.connection is not None:
            self.connection.close()
        self.connection = self.all_replied = None
        self.queue.extendleft(reversed(self.sent))
        self.sent.clear()
        self.replies.clear()
        self.num_bytes = 0
