"""Scripts of jobs and batches: one function for each Lua script of `jobs.lua` and `job_records.lua`; and
records of jobs, for people: what was asked for when, and how it has ended.

A job that cannot be served is dead: its record keeps its entry, so that it can be tried again. Other jobs
that have ended are remembered for as long as their results, without what they asked for.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from common.broker.keys import BATCH_TTL_MS, JOB_TTL_MS, RESULT_TTL_MS, Keys, request_keys
from common.broker.lua import Args, Fields, ScriptCall, call_script, decode_all, in_pairs

DEAD_TTL_S, MAX_DEAD = 7 * 86_400, 1000
"""How long jobs and events of webhooks that failed for good are kept, and how many; they can be retried."""

LIVE, SCHEDULED, DEAD, ENDED = "live", "scheduled", "dead", "ended"
"""The sets of jobs."""
DONE, FAILED, CANCELLED = "done", "failed", "cancelled"
"""What an ended job is; a dead one is DEAD."""
MAX_ENDED = 10_000
"""Records of jobs that have ended and are not dead; the oldest are deleted."""
MAX_ADDRESSES = 64
"""Places where the answer of one scheduled job may go."""
REQUEST_TTL_MS = 60_000
"""The keys of an answered request are kept for this time, for another gateway that still serves the job."""
TOMBSTONE_MS = 60_000
"""A cancel that comes before its job is remembered for this time."""
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


FRAMES_LOST = -2
"""What `reply` answers when nothing was sent, as the broker has lost frames before these."""
VALIDATES = "validates:"
"""How the name of a field begins in which a gateway notes that it validates a job."""
EVENTS = {DONE: "completed", CANCELLED: "cancelled", FAILED: "failed", DEAD: "failed"}
"""What the event of a job's webhook says of its end."""


def register_job(
    keys: Keys, job_id: str, *, digest: str, tenant: str, webhook: bytes, channel: str, in_stream: bool
) -> ScriptCall[str]:
    """Register a job. The reply is `live`, `ended` or `conflict`.

    Args:
        tenant: of its API key, or "".
        webhook: where the event of its end goes, or b"".
        channel: that gets the frames, or "".
        in_stream: whether the job's stream gets them, too.
    """
    args: Args = {
        "digest": digest,
        "tenant": tenant,
        "webhook": webhook,
        "ttl_ms": JOB_TTL_MS,
        "channel": channel,
        "in_stream": int(in_stream),
        "reply_ttl_ms": RESULT_TTL_MS,
    }
    return call_script("register_job", bytes.decode, keys, job_id, args=args)


def begin_validation(keys: Keys, job_id: str, *, gateway: str) -> ScriptCall[list[str]]:
    """Note in a job that a gateway validates it. The reply has the gateways that died while they did."""
    args: Args = {"validates": VALIDATES, "gateway": gateway, "gateways": keys.gateway("")}
    return call_script("begin_validation", decode_all, keys, job_id, args=args)


def claim_jobs(keys: Keys, *, group: str, dead: bytes, claimer: str, max_jobs: int) -> ScriptCall[list[str]]:
    """Claim the jobs of a dead gateway for another. The reply has the ids of their entries."""
    gateway = dead.decode(errors="surrogateescape")
    args: Args = {"group": group, "dead": dead, "claimer": claimer, "max_jobs": max_jobs}
    return call_script("claim_jobs", decode_all, keys, gateway, args=args)


def cancel_job(keys: Keys, job_id: str, *, tenant: str) -> ScriptCall[int]:
    """Cancel a job. The reply is as how many requests it was admitted, or -1 when it has ended or is another
    tenant's.

    Args:
        tenant: whose job it must be, or "" for any.
    """
    args: Args = {"tenant": tenant, "mark_ttl_ms": TOMBSTONE_MS, "job_id": job_id}
    return call_script("cancel_job", int, keys, job_id, args=args)


def reply(
    keys: Keys,
    job_id: str,
    *,
    channel: str,
    max_entries: int,
    answer: bytes,
    request_ids: Iterable[str],
    frames: Sequence[tuple[int, int, bytes]],
    num_heard: int,
    ending: JobEnding = GOES_ON,
) -> ScriptCall[int]:
    """Send the new frames of a job, and store its answer. The reply is how many were new, or
    FRAMES_LOST.

    Args:
        channel: that gets the frames, or "".
        max_entries: of the job's stream; 0 for none.
        answer: b"" while it goes on.
        request_ids: whose keys expire with the answer, after REQUEST_TTL_MS.
        frames: lane, index in its lane, text of each.
        num_heard: how many of the first frames the channel has heard already.
        ending: how the job has ended, with the answer.
    """
    args: Args = {
        "channel": channel,
        "max_entries": max_entries,
        "ttl_ms": RESULT_TTL_MS,
        "request_ttl_ms": REQUEST_TTL_MS,
        "job_ttl_ms": JOB_TTL_MS,
        "answer": answer,
        "num_heard": num_heard,
        "event": EVENTS.get(ending.state, ""),
        "job_id": job_id,
        **ending._asdict(),
        "dead_ttl_ms": 1000 * DEAD_TTL_S,
        "max_dead": MAX_DEAD,
        "max_ended": MAX_ENDED,
    }
    return call_script(
        "reply",
        int,
        keys,
        job_id,
        args=args,
        more_keys=[*request_keys(keys, request_ids), *map(keys.logits, request_ids)],
        more_args=[part for frame in frames for part in frame],
    )


# --- batches ------------------------------------------------------------------------------------------------


def create_batch(
    keys: Keys,
    batch_id: str,
    member: str,
    fields: Fields,
    *,
    made_ms: int,
    deadline_ms: int,
    max_batches: int,
) -> ScriptCall[str]:
    """Keep a new batch. The reply is `new`, `known` if it is there already, or `full` if too many have not
    ended.
    """
    args: Args = {
        "member": member,
        "made_ms": made_ms,
        "deadline_ms": deadline_ms,
        "ttl_ms": BATCH_TTL_MS,
        "max_batches": max_batches,
    }
    return call_script("create_batch", bytes.decode, keys, batch_id, args=args, more_args=in_pairs(fields))


def claim_batch(keys: Keys, batch_id: str, member: str, *, lease_ms: int) -> ScriptCall[int]:
    """Become the writer of a batch. The reply is the writer's epoch, or 0 when it has another writer."""
    return call_script("claim_batch", int, keys, batch_id, args={"member": member, "lease_ms": lease_ms})


def write_batch(
    keys: Keys,
    batch_id: str,
    member: str,
    fields: Fields,
    *,
    epoch: int,
    lease_ms: int,
    ended: bool,
    last_part: str = "",
) -> ScriptCall[str]:
    """Write fields, and renew the lease. The reply is `lost`, `hole`, `cancelled` or `live`.

    Args:
        lease_ms: 0 gives the batch up to another writer.
        last_part: the field of the last part that was written; without it, holes are filled.
    """
    args: Args = {
        "member": member,
        "epoch": epoch,
        "lease_ms": lease_ms,
        "ttl_ms": BATCH_TTL_MS,
        "ended": int(ended),
        "last_part": last_part,
    }
    return call_script("write_batch", bytes.decode, keys, batch_id, args=args, more_args=in_pairs(fields))


def cancel_batch(keys: Keys, batch_id: str, member: str, *, cancelling_at: int) -> ScriptCall[bool]:
    """Ask the writer of a batch to end it. False if it has ended."""
    args: Args = {"member": member, "cancelling_at": cancelling_at}
    return call_script("cancel_batch", bool, keys, batch_id, args=args)
