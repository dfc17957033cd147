"""Job worker process: runs an arq worker, and its heartbeat, until SIGTERM."""

import asyncio
import contextlib
import logging

import uvloop

from api.arq.worker import JobWorker, log_in_one_line
from common.broker.client import ERRORS
from common.broker.pool_client import PoolClient
from common.process.heartbeat import Heartbeat
from common.process.readiness import READY
from common.process.refusal import exit_when_unservable
from common.process.startup import configure_process, start_process
from common.settings.settings import Settings

log = logging.getLogger(__name__)


def main() -> None:
    """Run the process; it exits with EX_CONFIG if a setting cannot be served."""
    own = start_process("jobs", "j0")
    with exit_when_unservable():
        settings = Settings.read([])
        configure_process(own, settings)
        arq_log = logging.getLogger("arq.worker")
        arq_log.setLevel(logging.WARNING)  # below that it logs prompts
        arq_log.addFilter(log_in_one_line)
    uvloop.run(serve(settings, own.incarnation))


async def serve(settings: Settings, incarnation: str) -> None:
    """Serve until SIGTERM; jobs that are not answered by then are left to other workers."""
    client = PoolClient.connect(settings)
    worker = JobWorker(client, settings)
    heartbeat = Heartbeat(client, "jobworker", incarnation, settings.worker_ttl_s)
    log.info("%s takes jobs of the queue %s", incarnation, worker.queue_name)
    try:
        async with heartbeat.sending(settings.heartbeat_s, lambda: {"running": len(worker.job_tasks)}):
            READY.set()
            with contextlib.suppress(asyncio.CancelledError):  # arq's answer to SIGTERM
                await worker.async_run()
    finally:
        with contextlib.suppress(*ERRORS):
            await worker.close()
        await client.redis.aclose()


if __name__ == "__main__":
    main()
