"""The processes that make a fleet on one machine."""

import sys
from dataclasses import dataclass

from common.settings import Settings
from deploy.broker import Broker
from deploy.process import Process

MODULES = {"batcher": "batcher", "worker": "gpu_worker", "gateway": "api"}


@dataclass(slots=True)
class Fleet:
    """What `tokenfleet serve` runs.

    Attributes:
        settings: with the `redis_url` that all processes use.
        brokers: the embedded broker, or nothing when the broker is not ours.
        was_ready: whether the fleet ever served.
    """

    settings: Settings
    brokers: list[Process]
    batchers: list[Process]
    workers: list[Process]
    gateways: list[Process]
    was_ready: bool = False

    @property
    def all(self) -> list[Process]:
        return [*self.brokers, *self.batchers, *self.workers, *self.gateways]


def command(module: str) -> list[str]:
    """Runs one of our modules; -P because a folder `api` where the user stands is none of ours."""
    return [sys.executable, "-P", "-m", module]


def new_fleet(settings: Settings, broker: Broker | None) -> Fleet:
    """A fleet not yet started. `broker` is the one to start, None where `settings.redis_url` leads to another."""
    environ = settings.environ()

    def members(kind: str, count: int) -> list[Process]:
        return [Process(kind, f"{kind[0]}{number}", command(MODULES[kind]), environ) for number in range(count)]

    gateways = members("gateway", settings.num_gateways)
    if settings.gateway_port:
        for number, gateway in enumerate(gateways):
            gateway.environ = environ | {"GATEWAY_PORT": str(settings.gateway_port + number)}
    return Fleet(
        settings=settings,
        brokers=[Process("broker", "broker", broker.command(), {})] if broker else [],
        batchers=members("batcher", settings.num_batchers),
        workers=members("worker", settings.num_workers),
        gateways=gateways,
    )
