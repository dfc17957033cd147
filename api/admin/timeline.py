"""Reads the lives of requests back."""

import dataclasses
from typing import Any

from redis.asyncio import Redis

from common.broker.keys import Keys
from common.messages.codec import WireError, decode
from common.messages.timeline import Timeline

CHUNK = 500
SIBLINGS_MS = 5000
"""The choices of one request are queued within this time of each other."""

CHOICE_MARKS = (".", "#")
"""Between the id of a request, or of a job, and the number of a choice."""

Entry = tuple[bytes, dict[bytes, bytes]]
Events = list[dict[str, Any]]


async def read_timelines(redis: Redis, keys: Keys, request_id: str) -> dict[str, Events]:
    """What happened to a request or job and to its choices, oldest first, by id; read from the newest entry
    back.
    """
    lives: dict[str, Events] = {}
    newest = "+"
    while entries := await redis.xrevrange(keys.timeline, newest, "-", count=CHUNK):
        for entry in entries:
            add(lives, entry, request_id)
        if is_complete(lives, entries[-1]):
            break
        newest = f"({entries[-1][0].decode()}"
    return dict(sorted(lives.items()))


def add(lives: dict[str, Events], entry: Entry, request_id: str) -> None:
    """Puts what an entry tells before what later ones told."""
    choices = tuple(request_id + mark for mark in CHOICE_MARKS)
    for name, data in entry[1].items():
        one = name.decode(errors="replace")
        if one != request_id and not one.startswith(choices):
            continue
        try:
            told = [dataclasses.asdict(happening) for happening in decode(Timeline, data).events]
        except WireError:
            continue
        lives[one] = told + lives.get(one, [])


def is_complete(lives: dict[str, Events], oldest: Entry) -> bool:
    """Whether nothing before this entry can belong to these lives."""
    begins = [happenings[0] for happenings in lives.values()]
    entry_ms = int(oldest[0].split(b"-")[0])
    return bool(begins) and all(
        one["what"] == "queued" and entry_ms < one["at_ms"] - SIBLINGS_MS for one in begins
    )
