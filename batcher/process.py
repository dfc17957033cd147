"""One batcher process: stands by until the lease is free, then is the active one until it loses it."""

import logging
import os
import signal
import socket
import sys

import setproctitle
import uvloop

from batcher.lease import Lease, LeaseLost
from batcher.loop import Batcher
from common import broker, lifeline, logs
from common.keys import Keys
from common.settings import Settings

log = logging.getLogger(__name__)
LEASE_S = 3.0


async def serve(settings: Settings, name: str) -> None:
    redis = broker.connect(settings.redis_url or "")
    keys = Keys(settings.pool)
    lease = Lease(redis, keys, f"{name}@{socket.gethostname()}", LEASE_S)
    epoch = await lease.take()
    await Batcher(settings, redis, keys, lease, epoch).run()


def main() -> None:
    lifeline.die_with_parent()
    settings, name = Settings.read([]), os.environ.get("PROCESS_NAME", "b0")
    setproctitle.setproctitle(f"tokenfleet batcher {name}")
    logs.set_up(name, settings.log_level)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        uvloop.run(serve(settings, name))
    except LeaseLost as error:
        log.warning("lease lost: %s", error)
        sys.exit(1)
