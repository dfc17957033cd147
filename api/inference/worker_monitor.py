"""Worker monitor: what a gateway knows of a pool's workers; sends the gateway's own heartbeat with every
look.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from api.errors import unavailable
from api.inference.limits import Limits
from common.beats import until_beat
from common.broker.client import CONNECT_TIMEOUT_S, ERRORS, describe_error
from common.broker.pool_client import PoolClient
from common.messages.codec import WireError, decode
from common.messages.plan import WorkerCapacity
from common.process.heartbeat import Heartbeat
from common.settings.settings import Settings

log = logging.getLogger(__name__)
FRESH_S = 0.05
TTL_SHARE = 0.8
"""Share of WORKER_TTL_S after which a gateway's heartbeat expires: in the rest of it others claim its
jobs.
"""


class WorkerMonitor:
    """Reads the state of the workers at every heartbeat interval. The limits of workers that died are kept.

    Attributes:
        ready_s: monotonic time of the last heartbeat of a worker that was ready; None before there was one.
        max_total_tokens: of the smallest worker.
        last_error: why the last read failed; empty if it succeeded.
        checked_s: monotonic time of the last read.
        state: of the gateway, as its heartbeat shows it: `ready`, `draining`.
        names: incarnations that were there at the last read.
    """

    def __init__(
        self, client: PoolClient, gateway: str, settings: Settings, num_streams: Callable[[], int]
    ) -> None:
        self.client = client
        self.settings = settings
        self.heartbeat = Heartbeat(client, "gateway", gateway, TTL_SHARE * settings.worker_ttl_s)
        self.num_streams = num_streams
        self.ready_s: float | None = None
        self.max_total_tokens = 0
        self.last_error = "not connected to the broker yet"
        self.checked_s = 0.0
        self.refresh_lock = asyncio.Lock()
        self.state = "ready"
        self.names: list[str] = []

    async def run(self) -> None:
        """Never returns."""
        while True:
            await self.refresh()
            await asyncio.sleep(until_beat(self.settings.heartbeat_s))

    async def refresh(self) -> None:
        """Send one heartbeat, and read the workers once."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await asyncio.gather(self.send_heartbeat(), self.read_workers())
            self.last_error = ""
        except ERRORS as error:
            if self.last_error != describe_error(error):
                self.last_error = describe_error(error)
                log.warning("cannot read the workers: %s", self.last_error)
        self.checked_s = time.monotonic()

    async def refresh_unless_fresh(self) -> None:
        """Refresh, unless that was done within FRESH_S."""
        async with self.refresh_lock:
            if time.monotonic() - self.checked_s > FRESH_S:
                await self.refresh()

    async def send_heartbeat(self) -> None:
        """Send the gateway's heartbeat, with the number of its streams and tasks."""
        await self.heartbeat.send(
            state=self.state, streams=self.num_streams(), tasks=len(asyncio.all_tasks())
        )

    async def read_workers(self) -> None:
        """Read the workers, in one round trip unless others have joined, and note what those say that are
        ready.
        """
        found, seen, now_ms = await self.client.look_at_workers(self.names, ["state", "capacity"])
        self.names = [*seen]
        ages_s, max_tokens = [], []
        for incarnation, seen_ms in seen.items():
            state, capacity = found[incarnation]
            if state != b"ready" or capacity is None:
                continue
            try:
                max_tokens.append(decode(WorkerCapacity, capacity).max_total_tokens)
                ages_s.append(max(0.0, now_ms - seen_ms) / 1000)  # the broker's clock may have gone back
            except WireError as error:
                log.error("worker %s: %s", incarnation, error)
        if ages_s:
            self.ready_s = max(self.ready_s or 0.0, time.monotonic() - min(ages_s))
            self.max_total_tokens = min(max_tokens)

    def check(self) -> None:
        """Raises ApiError (503) if no worker is ready, or was within WORKER_GRACE_S."""
        if self.last_error:
            raise unavailable(self.last_error)
        if self.ready_s is None:
            raise unavailable("no worker is ready yet")
        gone_s = time.monotonic() - self.ready_s
        if gone_s > self.settings.worker_grace_s:
            raise unavailable(f"no worker for {gone_s:.0f} s")

    @property
    def limits(self) -> Limits:
        """Limits of a request; valid after `check` succeeded once."""
        max_total_tokens = min(self.settings.max_total_tokens or self.max_total_tokens, self.max_total_tokens)
        max_input_tokens = min(self.settings.max_input_tokens or max_total_tokens, max_total_tokens - 1)
        return Limits(max_input_tokens, max_total_tokens, self.settings)
