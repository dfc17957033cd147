"""Listing jobs: pages of records, and what one job asks for. A page looks at a bounded number of jobs."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgpack
import orjson

from api.errors import ApiError, invalid, quoted
from api.jobs.scripts import CANCELLED, DEAD, DONE, ENDED, FAILED, LIVE, SCHEDULED, JobRecord
from common.broker.pool_client import PoolClient
from common.ids import JOB_ID

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


class JobPage(NamedTuple):
    """Some jobs.

    Attributes:
        cursor: of the next page; None after the last one.
    """

    records: list[JobRecord]
    cursor: str | None


async def read_page(client: PoolClient, query: JobQuery, cursor: str, limit: int) -> JobPage:
    """The jobs after a cursor, or with "" the first ones: at most `limit`, fewer if many others are between
    them. Raises ApiError (422).
    """
    sets = (STATES[query.state],) if query.state else SETS
    place = read_cursor(cursor) if cursor else Place(sets[0])
    if place.set_name not in sets:
        raise invalid(f"`cursor` is of another `status`. Given: {quoted(cursor)}", "cursor")
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
                    return JobPage(found, at.text())
    return JobPage(found, None)


def read_cursor(text: str) -> Place:
    """Raises ApiError (422)."""
    set_name, _, rest = text.partition(":")
    score, _, job_id = rest.partition(":")
    if set_name not in SETS or not score.isdecimal() or len(score) > 15 or not job_id:
        raise invalid(f"`cursor` must be the `cursor` of a page. Given: {quoted(text)}", "cursor")
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
    """What a job that is not done asks for, as it was submitted; None where that is not kept."""
    for entry in (await client.redis.hgetall(client.keys.job_entries(record.id))).values():  # type: ignore[misc]
        if (fields := await read_entry(client, record, entry)).get(b"job"):
            return orjson.loads(fields[b"job"])
    return None


async def read_entry(client: PoolClient, record: JobRecord, entry: bytes) -> dict[bytes, bytes]:
    """The fields of an entry, which is in `submit` while its job is live."""
    if record.set_name == LIVE:
        found = await client.redis.xrange(client.keys.submit, entry, entry)
        return next((fields for _, fields in found), {})
    return dict(in_twos(msgpack.unpackb(entry, raw=True)))


def in_twos(parts: list[bytes]) -> Iterator[tuple[bytes, bytes]]:
    return zip(parts[::2], parts[1::2], strict=True)
