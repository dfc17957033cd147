"""The limits that an arq worker has from the fleet's settings."""

from redis.asyncio import Redis

from api.jobs.arq_worker import JobWorker
from common.broker.keys import Keys
from common.broker.pool_client import PoolClient
from common.settings.settings import Settings


async def test_arq_limits_follow_the_settings(redis: Redis) -> None:
    running = JobWorker(PoolClient(redis, Keys("default")), Settings(request_timeout_s=700))
    assert running.job_timeout_s == 710
    assert running.max_jobs == 256
    assert running.allow_abort_jobs
    assert running.keep_result_s == 3600
    assert running.queue_name == "tf:{default}:arq:queue"
