"""Two gateway processes that are killed while clients use them."""

from subprocess import Popen

from deploy.launcher.embedded_broker import Broker
from tests.integration.api.test_app import healthy, start
from tests.support.machine.ports import free_port
from tests.support.waiting import wait_until


class KilledGateways:
    """Two gateways, which can be killed and are started again; `settings` are their variables."""

    def __init__(self, broker: Broker, **settings: str) -> None:
        self.broker = broker
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

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
