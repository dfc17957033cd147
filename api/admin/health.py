"""Health of the fleet: whether requests are served now, and what is missing, in words."""

from typing import Any

from api.admin.processes import ProcessList
from api.errors import ApiError
from api.inference.batcher_monitor import SILENT_S
from api.inference.pool import Pool
from common.plural import plural


async def check_health(pool: Pool) -> None:
    """Raises ApiError (503) if a request would not be served now."""
    await pool.admission.check()
    await pool.batcher.check()


async def describe_health(pool: Pool, listed: ProcessList) -> dict[str, str]:
    """The object `health` of `GET /fleet`."""
    try:
        await check_health(pool)
    except ApiError as error:
        return {"state": "bad", "text": error.text}
    state, text = judge_processes(listed, pool.settings.num_workers)
    return {"state": state, "text": text}


def judge_processes(listed: ProcessList, num_workers: int) -> tuple[str, str]:
    """`good`, `warn` or `bad`, and why; `num_workers` is how many there should be at least."""
    workers = listed.of_kind("worker")
    num_ready = sum(is_ready(worker) for worker in workers)
    expected = max(num_workers, len(workers))
    if not num_ready:
        return "bad", "no worker is ready"
    if listed.active_batcher is None:
        return "warn", "no batcher is active"
    if num_ready < expected:
        return "warn", f"{num_ready} of {expected} workers ready"
    return "good", f"{plural(num_ready, 'worker')} ready"


def is_ready(worker: dict[str, Any]) -> bool:
    return bool(worker["state"] == "ready" and worker["age_s"] <= SILENT_S)
