"""Two gateway processes that are killed in turns while clients use them."""

import itertools
from collections.abc import Callable
from subprocess import Popen

from deploy.launcher.embedded_broker import Broker
from tests.integration.api.test_app import healthy, start
from tests.support.machine.ports import free_port
from tests.support.waiting import wait_until


class KilledGateways:
    """Two gateways, one of which is killed and started again, in turns.

    Attributes:
        done: how much has been done; each kill is after `pace` more.
        settings: of the gateways, as variables.
    """

    def __init__(self, broker: Broker, pace: int, done: Callable[[], int], **settings: str) -> None:
        self.broker = broker
        self.pace = pace
        self.done = done
        self.settings = settings
        self.ports = [free_port(), free_port()]
        self.urls = [f"http://127.0.0.1:{port}" for port in self.ports]
        self.processes = [self.start(0, 0), self.start(1, 0)]
        self.num_kills = 0

    def start(self, place: int, number: int) -> "Popen[str]":
        port = str(self.ports[place])
        return start(self.broker, f"g{place}-{number}", free_port(), GATEWAY_PORT=port, **self.settings)

    async def until_healthy(self) -> None:
        for url in self.urls:
            await wait_until(lambda url=url: healthy(url))  # type: ignore[misc]

    def kill(self, place: int) -> None:
        """Kill a gateway and start it again."""
        self.processes[place].kill()
        self.processes[place].wait()
        self.num_kills += 1
        self.processes[place] = self.start(place, self.num_kills)

    async def kill_in_turns(self, patience_s: float = 60) -> None:
        for number in itertools.count(1):
            place = number % 2
            await wait_until(lambda place=place: healthy(self.urls[place]), patience_s)  # type: ignore[misc]
            due = self.done() + self.pace
            await wait_until(lambda due=due: self.done() >= due, patience_s)  # type: ignore[misc]
            self.kill(place)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
