"""Changes of jobs: cancelling one, and trying a dead one again."""

from api.jobs import scripts as job_scripts
from api.jobs.scripts import retry_job
from api.requests.pool import Pool
from common.broker.keys import request_keys

TOMBSTONE_MS = 60_000
"""A cancel that comes before its job is remembered for this time."""


async def cancel_job(pool: Pool, job_id: str, tenant: str = "") -> bool:
    """Cancel a job, at whatever gateway it runs. False if it has ended, or is not of the tenant, where one is
    given.
    """
    call = job_scripts.cancel_job(pool.client.keys, job_id, tenant=tenant, mark_ttl_ms=TOMBSTONE_MS)
    num_requests = await pool.client.run(call)
    for i in range(num_requests):
        await pool.admission.cancel(f"{job_id}#{i}")
    return num_requests >= 0


async def retry_dead(pool: Pool, job_id: str) -> bool:
    """Submit a dead job again, with its id. False if it is not dead."""
    keys = pool.client.keys
    num_requests = int(await pool.client.redis.hget(keys.job(job_id), "choices") or 0)  # type: ignore[misc]
    names = [f"{job_id}#{i}" for i in range(num_requests)]
    call = retry_job(keys, job_id, [*request_keys(keys, names), *map(keys.logits, names)])
    return await pool.client.run(call)
