"""Usage: what API keys, tenants and models have used, as the scripts count it (common/broker/usage.lua)."""

import contextlib
from collections import defaultdict
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime, timedelta
from typing import Self

from redis.asyncio import Redis

from common.broker.keys import Keys

HOUR_S = 3600
HOURS_KEPT = 90 * 24
MONTHS_KEPT = 13
SPANS_IN_ONE_READ = 64


@dataclass(frozen=True, slots=True)
class Owner:
    """Who has used something. Those that were too many for one hour or month are together the tenant `*`."""

    key_id: str = ""
    tenant: str = ""
    model: str = ""


@dataclass(frozen=True, slots=True)
class Used:
    """What was used. Of `prompt` tokens some were `cached`, of `generated` ones some `speculated`."""

    requests: int = 0
    prompt: int = 0
    cached: int = 0
    generated: int = 0
    speculated: int = 0

    def __add__(self, other: Self) -> "Used":
        return Used(*(getattr(self, name) + getattr(other, name) for name in NUMBERS))


NUMBERS = [field.name for field in fields(Used)]


@dataclass(frozen=True, slots=True)
class UsageRow:
    """What an owner has used in an hour or month that begins at this time."""

    begin: datetime
    owner: Owner
    used: Used


async def read_hours(redis: Redis, begin: datetime, end: datetime) -> list[UsageRow]:
    """Return what was used from one time to another, in whole hours (UTC)."""
    first = int(begin.timestamp()) // HOUR_S
    last = -(-int(end.timestamp()) // HOUR_S)
    hours = range(max(first, last - HOURS_KEPT), last)
    return await read_spans(
        redis, [(datetime.fromtimestamp(n * HOUR_S, UTC), Keys.usage_hour(n)) for n in hours]
    )


async def read_months(redis: Redis, begin: datetime, end: datetime) -> list[UsageRow]:
    """Return what was used from one time to another, in whole months (UTC)."""
    spans, month = [], month_begin(max(begin, end - timedelta(days=31 * MONTHS_KEPT)).timestamp())
    while month < end:
        spans.append((month, Keys.usage_month(month_name(month))))
        month = month_begin(month.timestamp(), 1)
    return await read_spans(redis, spans)


async def read_spans(redis: Redis, spans: list[tuple[datetime, str]]) -> list[UsageRow]:
    rows: list[UsageRow] = []
    for i in range(0, len(spans), SPANS_IN_ONE_READ):
        part = spans[i : i + SPANS_IN_ONE_READ]
        async with redis.pipeline(transaction=False) as pipe:
            for _, key in part:
                pipe.hgetall(key)
            replies = await pipe.execute()
        for (begin, _), reply in zip(part, replies, strict=True):
            found: dict[Owner, Used] = defaultdict(Used)  # of the fields of an hour's or a month's hash
            for field, number in reply.items():
                with contextlib.suppress(ValueError):  # another field
                    key_id, tenant, model, name = field.decode().split("\n")
                    if name in NUMBERS:
                        owner = Owner(key_id, tenant, model)
                        found[owner] = replace(found[owner], **{name: int(number)})
            rows += [UsageRow(begin, owner, used) for owner, used in found.items()]
    return rows


def month_begin(time_s: float, later: int = 0) -> datetime:
    """The beginning of the month of a Unix time, or of one so many months later."""
    now = datetime.fromtimestamp(time_s, UTC)
    months = now.year * 12 + now.month - 1 + later
    return datetime(months // 12, months % 12 + 1, 1, tzinfo=UTC)


def month_name(begin: datetime) -> str:
    return f"{begin:%Y-%m}"


def seconds_to_next_month(time_s: float) -> float:
    return month_begin(time_s, 1).timestamp() - time_s
