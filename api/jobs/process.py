"""One job worker process: an arq worker until SIGTERM, and its sign of life."""

import asyncio
import contextlib
import logging
import os
import secrets

import setproctitle

from api.jobs.arq_worker import JobWorker
from common import broker, lifeline, logs, metrics_port
from common.keys import Keys
from common.settings import SettingError, Settings, exit_when_unservable
from common.sign import Sign

log = logging.getLogger(__name__)


def main() -> None:
    """Exits with EX_CONFIG where a setting cannot be served."""
    lifeline.die_with_parent()
    name = os.environ.get("PROCESS_NAME", "j0")
    setproctitle.setproctitle(f"tokenfleet jobs {name}")
    with exit_when_unservable():
        settings = Settings.read([])
        logs.set_up(name, settings.log_level, settings.json_output)
        logging.getLogger("arq.worker").setLevel(logging.WARNING)  # below that it logs prompts
        if settings.redis_url is None:
            raise SettingError("redis_url", "is not set")
        metrics_port.serve(settings)
    asyncio.run(serve(settings, os.environ.get("INCARNATION") or f"{name}-{secrets.token_hex(4)}"))


async def serve(settings: Settings, incarnation: str) -> None:
    """Returns after SIGTERM; jobs that are not answered yet are left to others."""
    redis = broker.connect(settings.redis_url or "")
    worker = JobWorker(redis, settings)
    sign = Sign(redis, Keys(settings.pool), "jobs", incarnation, settings.worker_ttl_s)
    showing = asyncio.create_task(sign.show_for_ever(settings.heartbeat_s, lambda: {"running": len(worker.job_tasks)}))
    log.info("%s takes jobs of the queue %s", incarnation, worker.queue_name)
    try:
        with contextlib.suppress(asyncio.CancelledError):  # arq's answer to SIGTERM
            await worker.async_run()
    finally:
        showing.cancel()
        with contextlib.suppress(*broker.ERRORS):
            await sign.take_away()
            await worker.close()
        await redis.aclose()


if __name__ == "__main__":
    main()
