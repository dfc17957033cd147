"""Records of jobs, for people: what was asked for when, and how it has ended; and scripts that change jobs.

A job that cannot be served is dead: its record keeps its entry, so that it can be tried again. Other jobs
that have ended are remembered for as long as their results, without what they asked for.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack
import orjson

from api.errors import ApiError, invalid, quoted
from api.requests.pool import Pool
from api.webhooks import DEAD_TTL_S, MAX_DEAD
from common.broker.keys import JOB_TTL_MS, RESULT_TTL_MS, Keys, request_keys
from common.broker.lua import Args, ScriptCall, call_script
from common.broker.pool_client import PoolClient
from common.ids import JOB_ID

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
MAX_ERROR_CHARACTERS = 500
MAX_FRAMES = 2**20
"""In the stream of a job: more than any has."""
FRAMES_LOST = -2
"""What `write_reply` answers when nothing was sent, as the broker has lost frames before these."""
EVENTS = {DONE: "completed", CANCELLED: "cancelled", FAILED: "failed", DEAD: "failed"}
"""What the event of a job's webhook says of its end."""


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


def ending_of(error: ApiError, status: int) -> JobEnding:
    """How a job ends with an error: FAILED by its own fault; DEAD where it may be served another time."""
    if error.error_type == "cancelled":
        state = CANCELLED
    elif error.status >= 500 or error.status in (408, 424, 429):
        state = DEAD
    else:
        state = FAILED
    return JobEnding(state, status, error.error_type, error.text[:MAX_ERROR_CHARACTERS])


@dataclass(slots=True)
class Listener:
    """Where the frames of a job go: to a channel, or "", and to the job's stream.

    Attributes:
        num_sent: frames that this gateway has sent there.
    """

    channel: str = ""
    in_stream: bool = False
    num_sent: int = 0

    @property
    def is_there(self) -> bool:
        return bool(self.channel or self.in_stream)


def write_reply(
    keys: Keys,
    job_id: str,
    listener: Listener,
    frames: Sequence[bytes],
    first: int,
    answer: bytes = b"",
    request_ids: Iterable[str] = (),
    ending: JobEnding = GOES_ON,
) -> ScriptCall[int]:
    """Send the frames of a job from the number `first` on, and store its answer, with which it has ended. The
    reply is 0, or FRAMES_LOST.

    Args:
        request_ids: whose keys expire with the answer, after REQUEST_TTL_MS.
    """
    args: Args = {
        "channel": listener.channel,
        "max_entries": MAX_FRAMES * listener.in_stream,
        "ttl_ms": RESULT_TTL_MS,
        "request_ttl_ms": REQUEST_TTL_MS,
        "job_ttl_ms": JOB_TTL_MS,
        "answer": answer,
        "first": first,
        "num_heard": listener.num_sent,
        "event": EVENTS.get(ending.state, ""),
        "job_id": job_id,
        **ending._asdict(),
        "dead_ttl_ms": 1000 * DEAD_TTL_S,
        "max_dead": MAX_DEAD,
        "max_ended": MAX_ENDED,
    }
    own = [*request_keys(keys, request_ids), *map(keys.logits, request_ids)]
    return call_script("reply", int, keys, job_id, args=args, more_keys=own, more_args=frames)


async def cancel_job(pool: Pool, job_id: str, tenant: str = "") -> bool:
    """Cancel a job, at whatever gateway it runs. False if it has ended, or is not of the tenant, where one is
    given.
    """
    args: Args = {"tenant": tenant, "mark_ttl_ms": TOMBSTONE_MS, "job_id": job_id}
    num_requests = await pool.client.run(call_script("cancel_job", int, pool.client.keys, job_id, args=args))
    for i in range(num_requests):
        await pool.cancel(f"{job_id}#{i}")
    return num_requests >= 0


async def retry_dead(pool: Pool, job_id: str) -> bool:
    """Submit a dead job again, with its id. False if it is not dead."""
    keys = pool.client.keys
    num_requests = int(await pool.client.redis.hget(keys.job(job_id), "choices") or 0)  # type: ignore[misc]
    names = [f"{job_id}#{i}" for i in range(num_requests)]
    own, args = [*request_keys(keys, names), *map(keys.logits, names)], {"job_id": job_id}
    return await pool.client.run(call_script("retry_job", bool, keys, job_id, args=args, more_keys=own))


# --- lists --------------------------------------------------------------------------------------------------


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


SETS = (LIVE, SCHEDULED, DEAD, ENDED)
"""The order in which jobs are listed; in each set the newest come first, of scheduled jobs the next one."""
STATES = {
    "queued": LIVE,
    "running": LIVE,
    SCHEDULED: SCHEDULED,
    DEAD: DEAD,
    DONE: ENDED,
    FAILED: ENDED,
    CANCELLED: ENDED,
}
"""States that people name -> the set that has such jobs."""
CHUNK, MAX_SCANNED = 100, 1000
"""Jobs of one look at Redis, and of one page, shown or not."""


class JobQuery(NamedTuple):
    """Which jobs are listed: those whose fields are the ones given, where "" stands for any.

    Attributes:
        search: a part of the id.
    """

    state: str = ""
    tenant: str = ""
    search: str = ""

    def wants(self, record: JobRecord) -> bool:
        return (
            (not self.state or record.state == self.state)
            and (not self.tenant or record.text("tenant") == self.tenant)
            and self.search in record.id
        )


class Place(NamedTuple):
    """A place in the list: after a member of a set, or before all with `job_id` ""."""

    set_name: str
    score: int = 0
    job_id: str = ""

    def text(self) -> str:
        return f"{self.set_name}:{self.score}:{self.job_id}"


async def read_page(
    client: PoolClient, query: JobQuery, cursor: str, limit: int
) -> tuple[list[JobRecord], str | None]:
    """The jobs after a cursor, or with "" the first ones: at most `limit`, fewer if many others are between
    them; and the cursor of the next page, None after the last one. Raises ApiError (422).
    """
    sets = (STATES[query.state],) if query.state else SETS
    place = read_cursor(cursor) if cursor else Place(sets[0])
    if place.set_name not in sets:
        raise invalid(f"`cursor` is of another `status`. Given: {quoted(cursor)}")
    found: list[JobRecord] = []
    num_scanned = 0
    for set_name in sets[sets.index(place.set_name) :]:
        at = place if place.set_name == set_name else Place(set_name)
        while chunk := await read_after(client, at):
            for at, record in chunk:
                num_scanned += 1
                if record is not None and query.wants(record):
                    found.append(record)
                if len(found) == limit or num_scanned == MAX_SCANNED:
                    return found, at.text()
    return found, None


def read_cursor(text: str) -> Place:
    """Raises ApiError (422)."""
    set_name, _, rest = text.partition(":")
    score, _, job_id = rest.partition(":")
    if set_name not in SETS or not score.isdecimal() or len(score) > 15 or not job_id:
        raise invalid(f"`cursor` must be the `cursor` of a page. Given: {quoted(text)}")
    return Place(set_name, int(score), job_id)


async def read_after(client: PoolClient, place: Place) -> list[tuple[Place, JobRecord | None]]:
    """Some jobs after a place of a set, each with its own; None for one whose record has expired."""
    redis: Any = client.redis
    key = client.keys.job_set(place.set_name)
    start = await rank_after(client, place)
    is_newest_first = place.set_name != SCHEDULED
    members = await redis.zrange(key, start, start + CHUNK - 1, desc=is_newest_first, withscores=True)
    async with redis.pipeline(transaction=False) as pipe:
        for member, _ in members:
            pipe.hgetall(client.keys.job_record(member.decode()))
            pipe.hexists(client.keys.job(member.decode()), "choices")
        replies = await pipe.execute()
    pairs = zip(replies[::2], replies[1::2], strict=True)
    return [
        (
            Place(place.set_name, int(score), member.decode()),
            JobRecord(member.decode(), decode(fields), place.set_name, has_started) if fields else None,
        )
        for (member, score), (fields, has_started) in zip(members, pairs, strict=True)
    ]


async def rank_after(client: PoolClient, place: Place) -> int:
    """How many members come before those after a place. Where its member has left the set, others of the same
    millisecond may come twice, but none is left out.
    """
    if not place.job_id:
        return 0
    redis: Any = client.redis
    key = client.keys.job_set(place.set_name)
    is_newest_first = place.set_name != SCHEDULED
    rank = await (redis.zrevrank if is_newest_first else redis.zrank)(key, place.job_id)
    if rank is not None:
        return int(rank) + 1
    before = (f"({place.score}", "+inf") if is_newest_first else ("-inf", f"({place.score}")
    return int(await redis.zcount(key, *before))


def decode(fields: dict[bytes, bytes]) -> dict[str, str]:
    return {name.decode(): value.decode(errors="replace") for name, value in fields.items()}


async def count_jobs(client: PoolClient) -> dict[str, int]:
    """How many jobs each set has."""
    async with client.redis.pipeline(transaction=False) as pipe:
        for set_name in SETS:
            pipe.zcard(client.keys.job_set(set_name))
        return dict(zip(SETS, await pipe.execute(), strict=True))


# --- one job ------------------------------------------------------------------------------------------------


async def read_record(client: PoolClient, job_id: str) -> JobRecord:
    """Raises ApiError (404)."""
    if not JOB_ID.fullmatch(job_id):
        raise no_job(job_id)
    async with client.redis.pipeline() as pipe:
        pipe.hgetall(client.keys.job_record(job_id))
        pipe.hexists(client.keys.job(job_id), "choices")
        for set_name in SETS:
            pipe.zscore(client.keys.job_set(set_name), job_id)
        fields, has_started, *scores = await pipe.execute()
    own = [set_name for set_name, score in zip(SETS, scores, strict=True) if score is not None]
    if not fields or not own:
        raise no_job(job_id)
    return JobRecord(job_id, decode(fields), own[0], has_started)


def no_job(job_id: str) -> ApiError:
    return ApiError(404, "not_found", f"There is no job {quoted(job_id)}, or it has ended long ago")


async def read_content(client: PoolClient, record: JobRecord) -> Any:
    """What a job that is not done asks for, without its webhook's secret; None where that is not kept."""
    for entry in (await client.redis.hgetall(client.keys.job_entries(record.id))).values():  # type: ignore[misc]
        if (fields := await read_entry(client, record, entry)).get(b"job"):
            content = orjson.loads(fields[b"job"])
            if isinstance(content, dict) and isinstance(webhook := content.get("webhook"), dict):
                webhook.pop("secret", None)
            return content
    return None


async def read_entry(client: PoolClient, record: JobRecord, entry: bytes) -> dict[bytes, bytes]:
    """The fields of an entry, which is in `submit` while its job is live."""
    if record.set_name == LIVE:
        found = await client.redis.xrange(client.keys.submit, entry, entry)
        return next((fields for _, fields in found), {})
    parts = msgpack.unpackb(entry, raw=True)
    return dict(zip(parts[::2], parts[1::2], strict=True))
