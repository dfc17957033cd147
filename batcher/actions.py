"""Actions: what the batcher has decided and not done yet.

They are done in order, one at a time, but scripts that follow each other are sent at once: on one connection
the broker runs them in order, too. What a reply decides comes before everything that was decided before it.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from common.broker.fast_client import ScriptCall, SerialClient

MAX_CALLS = 64
"""Scripts that are sent at once: the lease is looked at in between."""
MAX_BYTES = 2**22
"""No further script is sent with those that carry so much, as plans with long prompts do."""

Action = Callable[[], Awaitable[object]]
"""Something that takes any number of round trips."""


@dataclass(frozen=True, slots=True, eq=False)
class ScriptAction:
    """Something that one script does.

    Attributes:
        call: returns the call, when its turn has come.
        settle: takes the reply, and returns what is to be done next.
        worker: whose plan it writes. Of each worker one plan is sent at once: its reply may change it, and so
            must come before the next one.
    """

    call: Callable[[], ScriptCall]
    settle: Callable[[Any], "Iterable[Action | ScriptAction]"]
    worker: str = ""


class ActionQueue:
    """Each action can be repeated: one that fails, and those that were sent with it, are done again."""

    def __init__(self, client: SerialClient) -> None:
        self.client = client
        self.queue: deque[Action | ScriptAction] = deque()

    def __len__(self) -> int:
        return len(self.queue)

    def add(self, *actions: Action | ScriptAction) -> None:
        self.queue.extend(actions)

    async def run_next(self) -> None:
        """Do the first action, or all scripts that come before the next other one."""
        first = self.queue[0]
        if isinstance(first, ScriptAction):
            await self.run_scripts()
        else:
            await first()
            self.queue.popleft()

    def first_scripts(self) -> Iterator[ScriptAction]:
        """The scripts at the head of the queue that may be sent at once, however many and long they are."""
        workers: set[str] = set()
        for action in self.queue:
            if not isinstance(action, ScriptAction) or action.worker in workers:
                return
            if action.worker:
                workers.add(action.worker)
            yield action

    def first_calls(self) -> dict[ScriptAction, ScriptCall]:
        """The scripts that are sent next, with their calls."""
        calls: dict[ScriptAction, ScriptCall] = {}
        num_bytes = 0
        for action in self.first_scripts():
            call = calls[action] = action.call()
            num_bytes += sum(len(arg) for arg in call.args if isinstance(arg, bytes))
            if len(calls) == MAX_CALLS or num_bytes > MAX_BYTES:
                break
        return calls

    async def run_scripts(self) -> None:
        """Run the first scripts of the queue. Those behind one that the broker refused stay in it."""
        calls = self.first_calls()
        replies = await self.client.run_scripts(list(calls.values()))
        follow: list[Action | ScriptAction] = []
        try:
            for action, reply in zip(calls, replies, strict=True):
                if isinstance(reply, Exception):
                    raise reply
                self.queue.popleft()
                follow += action.settle(reply)
        finally:
            self.queue.extendleft(reversed(follow))
