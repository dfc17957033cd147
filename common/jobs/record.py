"""Record of a job, for people: what was asked for when, and how it has ended; and the scripts that write it.

A job that cannot be served is dead: its record keeps its entry, so that it can be tried again. Other jobs
that have ended are remembered for as long as their results, without what they asked for.
"""

from collections.abc import Mapping
from typing import NamedTuple

from common.broker.keys import Keys
from common.broker.lua import Args, Fields, ScriptCall, call_script, in_pairs

LIVE, SCHEDULED, DEAD, ENDED = "live", "scheduled", "dead", "ended"
"""The sets of jobs."""
DONE, FAILED, CANCELLED = "done", "failed", "cancelled"
"""What an ended job is; a dead one is DEAD."""
MAX_ENDED = 10_000
"""Records of jobs that have ended and are not dead; the oldest are deleted."""
MAX_ADDRESSES = 64
"""Places where the answer of one scheduled job may go."""
MAX_RELEASED = 100
"""Jobs that one script releases."""


class JobEnding(NamedTuple):
    """How a job has ended.

    Attributes:
        state: DONE, FAILED, CANCELLED or DEAD.
        status: as HTTP has it.
        reason: type of its error; empty without one.
    """

    state: str
    status: int
    reason: str = ""
    error: str = ""


GOES_ON = JobEnding("", 0)


def note_job(
    keys: Keys,
    job_id: str,
    entry_id: str,
    fields: Fields,
    *,
    address: str,
    not_before_ms: int,
    group: str,
    max_scheduled: int,
) -> ScriptCall[str]:
    """Keep the record of a job. One that may not run yet leaves `submit` until its time. The reply is `live`,
    `scheduled`, or `full` when too many jobs are scheduled.

    Args:
        address: where the answer to this entry goes.
        not_before_ms: 0 for a job that is not to wait.
    """
    args: Args = {
        "job_id": job_id,
        "entry_id": entry_id,
        "address": address,
        "not_before_ms": not_before_ms,
        "group": group,
        "max_scheduled": max_scheduled,
        "max_addresses": MAX_ADDRESSES,
    }
    return call_script("note_job", bytes.decode, keys, job_id, args=args, more_args=in_pairs(fields))


def note_waiting(keys: Keys, job_id: str, entry_id: str, fields: Fields, *, address: str) -> ScriptCall[bool]:
    """Keep the record of a job whose turn has not come. False if it is known, or has ended."""
    args: Args = {"job_id": job_id, "entry_id": entry_id, "address": address}
    return call_script("note_waiting", bool, keys, job_id, args=args, more_args=in_pairs(fields))


def release_jobs(keys: Keys, *, submit_limit: int) -> ScriptCall[int]:
    """Submit scheduled jobs whose time has come. The reply is how many: MAX_RELEASED if there may be more."""
    return call_script(
        "release_jobs", int, keys, args={"max_jobs": MAX_RELEASED, "submit_limit": submit_limit}
    )


def retry_job(keys: Keys, job_id: str, request_keys: list[str]) -> ScriptCall[bool]:
    """Submit a dead job again. False if it is not dead.

    Args:
        request_keys: all keys of its requests.
    """
    return call_script("retry_job", bool, keys, job_id, args={"job_id": job_id}, more_keys=request_keys)


class JobRecord(NamedTuple):
    """What Redis has of a job.

    Attributes:
        has_started: whether its turn has come.
    """

    id: str
    fields: Mapping[str, str]
    set_name: str
    has_started: bool = False

    def number(self, name: str) -> int:
        return int(self.fields.get(name) or "0")

    def text(self, name: str) -> str:
        return self.fields.get(name, "")

    @property
    def created_ms(self) -> int:
        return int(self.text("first_entry").partition("-")[0] or "0")

    @property
    def state(self) -> str:
        """As people name it: queued, running, scheduled, done, failed, cancelled or dead."""
        if self.set_name == LIVE:
            return "running" if self.has_started else "queued"
        return SCHEDULED if self.set_name == SCHEDULED else self.text("state")
