"""Lost entries: jobs that run here, and whose entries a broker that was restored does not have.

Such a job is submitted again: its entry is what another gateway finds when this one dies.
"""

import logging
from typing import Any

from api.jobs.job import Job
from common.broker.keys import Keys

log = logging.getLogger(__name__)


async def submit_lost(redis: Any, keys: Keys, running: dict[str, Job]) -> None:
    """Submit again those of the jobs, by entry, that have none any more, and remove them: whoever reads the
    new entry serves the job, too. A faulty one is being answered; one that has a result was answered by
    another gateway, which had claimed it.
    """
    for entry_id, job in [*running.items()]:
        has_entry = await redis.xrange(keys.submit, entry_id, entry_id)
        if job.fault or has_entry or await redis.exists(keys.result(job.id)):
            continue
        if entry_id in running:  # it has not been answered meanwhile
            log.warning("the broker has lost the entry of job %s: it is submitted again", job.id)
            await redis.xadd(keys.submit, job.to_fields())
            running.pop(entry_id, None)
