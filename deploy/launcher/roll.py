"""Roll: replaces the processes of a running fleet one by one, with the files and settings that hold now.

The successor of a worker or batcher is ready beside it before the old one is told to leave, so there is room
for the rows that it hands over. A gateway or job worker is replaced where it is: the socket keeper keeps a
gateway's answers for its successor.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from common.broker.client import ERRORS
from common.broker.pool_client import PoolClient
from common.metrics.exposition import WAITS_FOR_PORT
from common.settings.settings import SettingError, Settings
from deploy.launcher import prepare
from deploy.launcher.control_socket import Order, OrderFailed, Say
from deploy.launcher.fleet import LocalFleet
from deploy.launcher.preloaded_process import kill_group
from deploy.launcher.shutdown import LAST_WORDS_S
from deploy.launcher.startup import ready_workers
from deploy.launcher.supervised_process import Restarts, SupervisedProcess

POLL_S = 0.1
LOOK_TIMEOUT_S = 2.0
FIXED = (
    *("port", "hostname", "gateway_port", "metrics_port", "redis_url", "pool", "model_id", "revision"),
    *("num_gateways", "num_batchers", "num_workers", "num_jobs", "nnodes", "node_rank"),
)
"""Settings that a roll cannot change: where the fleet listens, what it serves, how many processes it has."""
BESIDE = ("worker", "batcher")
"""Kinds whose successor starts beside the old process."""


@dataclass(frozen=True, slots=True)
class Roll:
    """One roll.

    Attributes:
        settings: after it.
        changed, before: variables of processes that differ, as they will be and as they were.
        start: supervises one more process.
    """

    fleet: LocalFleet
    settings: Settings
    changed: Mapping[str, str]
    before: Mapping[str, str]
    start: Callable[[SupervisedProcess], object]
    say: Say

    @classmethod
    def prepare(
        cls, fleet: LocalFleet, order: Order, start: Callable[[SupervisedProcess], object], say: Say
    ) -> "Roll":
        """Raises SettingError for a setting that cannot be changed, OrderFailed for a fleet that cannot be
        rolled.
        """
        if not fleet.was_ready or fleet.is_ending:
            raise OrderFailed("the fleet starts or ends; nothing is replaced")
        if fleet.settings.nnodes > 1:
            raise OrderFailed("a worker of several machines (NNODES) is replaced by its own launchers")
        given: dict[str, str] = order.get("settings", {})
        for name in given:
            if name.lower() in FIXED:
                raise SettingError(name, "cannot be changed by a roll; start the fleet anew")
        old = fleet.settings.environ()
        settings = Settings.read([], {**old, **given})
        new = settings.environ()
        changed = {name: new.get(name, "") for name in old | new if new.get(name, "") != old.get(name, "")}
        before = {name: old.get(name, "") for name in changed}
        return cls(fleet, settings, changed, before, start, say)

    async def run(self) -> None:
        """Replace every process. Raises OrderFailed; the processes that are not replaced run as before."""
        for preloaded in self.fleet.preloaded:  # it has read the files and settings of before
            await preloaded.renew(self.changed)
        try:
            for members in (self.fleet.workers, self.fleet.batchers, self.fleet.gateways, self.fleet.jobs):
                for process in [*members]:
                    await self.replace(members, process)
        except OrderFailed:
            for preloaded in self.fleet.preloaded:
                await preloaded.renew(self.before)
            raise
        self.fleet.settings = self.settings

    async def replace(self, members: list[SupervisedProcess], old: SupervisedProcess) -> None:
        was = old.incarnation
        if old.kind not in BESIDE or not await self.replace_beside(members, old):
            await self.replace_in_place(old)
        self.say(f"{was} is replaced")

    async def replace_beside(self, members: list[SupervisedProcess], old: SupervisedProcess) -> bool:
        """Start a successor, and end the old process once that is ready. Return whether there was room for
        both: a GPU holds one worker.
        """
        environ = {**old.environ, **self.changed, WAITS_FOR_PORT: "1"}
        new = replace(old, environ=environ, incarnation="", running=None, restarts=Restarts())
        members.append(new)
        self.start(new)
        if not await self.becomes_ready(new):
            members.remove(new)
            new.should_run = False
            new.kill()
            if not prepare.caches_on_gpu(self.settings):
                raise OrderFailed(f"{old.name} stays: its successor did not start, as the log says")
            return False
        old.should_run = False
        await self.end(old)
        members.remove(new)
        members[members.index(old)] = new
        return True

    async def replace_in_place(self, process: SupervisedProcess) -> None:
        """End a process, and wait until its supervisor's next run of it is ready."""
        was = process.incarnation
        process.environ = {**process.environ, **self.changed}
        running = process.running
        await self.end(process)
        while process.incarnation == was or process.running is running:
            self.check_fleet()
            await asyncio.sleep(POLL_S)
        if not await self.becomes_ready(process):
            process.environ = {**process.environ, **self.before}
            raise OrderFailed(f"{process.name} did not start, as the log says; it starts again as it was")

    async def end(self, process: SupervisedProcess) -> None:
        """Have a process hand over what it has and end. Kill it if it takes longer than it may."""
        running = process.running
        process.send(process.stop_signal)
        if running is not None:
            try:
                async with asyncio.timeout(self.settings.graceful_termination_timeout + LAST_WORDS_S):
                    await running.wait()
            except TimeoutError:
                kill_group(running)
                await running.wait()

    async def becomes_ready(self, process: SupervisedProcess) -> bool:
        """Wait until the run of a process that has just begun is ready. False if it ends before."""
        first = ""
        while True:
            self.check_fleet()
            first = first or process.incarnation
            if process.incarnation != first or has_ended(process):
                return False
            if first and await is_ready(self.fleet.settings, process):
                return True
            await asyncio.sleep(POLL_S)

    def check_fleet(self) -> None:
        if self.fleet.is_ending:
            raise OrderFailed("the fleet ends")


def has_ended(process: SupervisedProcess) -> bool:
    return process.running is not None and process.running.returncode is not None


async def is_ready(settings: Settings, process: SupervisedProcess) -> bool:
    """Whether a process has a ready heartbeat. False if the broker does not answer."""
    try:
        async with asyncio.timeout(LOOK_TIMEOUT_S), PoolClient.connect(settings) as pool:
            is_worker = process.kind == "worker"
            kind = "jobworker" if process.kind == "jobs" else process.kind
            return process.incarnation in (await (ready_workers(pool) if is_worker else pool.processes(kind)))
    except ERRORS:
        return False
