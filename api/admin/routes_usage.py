"""Usage report: rows of usage, filtered and grouped."""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from redis.asyncio import Redis
from starlette.responses import Response

from api.errors import asking_broker, invalid, quoted
from api.http.auth import key_of
from api.http.openapi import FLEET, TGI_ERRORS, only
from api.json import fresh_json
from api.requests.metrics import HOURS_KEPT, UsageRow, Used, month_begin, month_name, read_hours, read_months
from api.requests.service_terms import own_pool
from common.metrics.catalogue import USED_TOKENS

GROUPS: Mapping[str, Callable[[UsageRow], str]] = {
    "hour": lambda row: iso(row.begin),
    "day": lambda row: f"{row.begin:%Y-%m-%d}",
    "month": lambda row: month_name(row.begin),
    "key": lambda row: row.owner.key_id,
    "tenant": lambda row: row.owner.tenant,
    "model": lambda row: row.owner.model,
}
"""What rows can be grouped by, in the order of columns."""
KINDS = ("prompt", "cached", "completion", "speculated")
"""Tokens of which Prometheus has a series."""
MAX_TENANTS = 500
"""That have series."""
NUMBERS = (
    *("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "speculated_tokens"),
    "total_tokens",
)


def group(rows: Iterable[UsageRow], by: Sequence[str]) -> list[dict[str, Any]]:
    """Return one object for each group, in order."""
    sums: dict[tuple[str, ...], Used] = defaultdict(Used)
    for row in rows:
        sums[tuple(GROUPS[name](row) for name in by)] += row.used
    return [dict(zip(by, names, strict=True)) | numbers(used) for names, used in sorted(sums.items())]


def numbers(used: Used) -> dict[str, Any]:
    """Return the numbers of what was used, by their names in reports."""
    total = used.prompt + used.generated
    counts = (used.requests, used.prompt, used.cached, used.generated, used.speculated, total)
    return dict(zip(NUMBERS, counts, strict=True))


def metric_values(rows: Iterable[UsageRow], models: Collection[str]) -> dict[str, float]:
    """Return counters of what tenants have used of these models; of too many those that used most."""
    by_owner: dict[tuple[str, str], Used] = defaultdict(Used)
    for row in rows:
        if row.owner.model in models:
            by_owner[row.owner.tenant, row.owner.model] += row.used
    most = sorted(by_owner.items(), key=lambda item: item[1].prompt + item[1].generated, reverse=True)
    values: dict[str, float] = {}
    for (tenant, model), used in most[:MAX_TENANTS]:
        counts = (used.prompt, used.cached, used.generated, used.speculated)
        for kind, number in zip(KINDS, counts, strict=True):
            values[USED_TOKENS.field((tenant, model, kind))] = number
    return values


def iso(time: datetime) -> str:
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


# --- routes usage -------------------------------------------------------------------------------------------


BY_DEFAULT = "key,tenant,model"
NAME = f"({'|'.join(GROUPS)})"
TIME: dict[str, Any] = {
    "json_schema_extra": {"pattern": r"^(20[0-9]{2}-(0[1-9]|1[0-2])-[0-2][1-8]|[0-9]{10})$"}
}
NAMES: dict[str, Any] = {"json_schema_extra": {"pattern": f"^({NAME}(,{NAME})*)?$"}}
"""How the parameters are described; more forms of times are read."""
router = APIRouter(responses=only(TGI_ERRORS, 401, 403, 422, 503), tags=[FLEET])


@router.get("/usage", summary="Report usage")
async def usage(
    request: Request,
    key: Annotated[str | None, Query(description="The id of an API key.")] = None,
    tenant: str | None = None,
    model: str | None = None,
    begin: Annotated[
        str | None,
        Query(alias="from", description="ISO 8601 or Unix seconds. Default: this month's begin.", **TIME),
    ] = None,
    end: Annotated[str | None, Query(alias="to", description="As `from`. Default: now.", **TIME)] = None,
    group_by: Annotated[
        str,
        Query(
            description="Some of hour, day, month, key, tenant, model, with commas between; or none.", **NAMES
        ),
    ] = BY_DEFAULT,
    format: Annotated[str | None, Query(description="`json` alone.", include_in_schema=False)] = None,
) -> Response:
    """Returns requests and tokens, counted from what is committed, in whole hours (UTC). Hours are kept
    for 90 days; before that, only whole months are known. A tenant's key sees its own tenant.
    """
    if format not in (None, "json"):
        raise invalid(f"`format` must be json. Given: {quoted(format)}")
    now = datetime.fromtimestamp(own_pool(request).client.clock.now_s(), UTC)
    names = [name.strip() for name in group_by.split(",") if name.strip()]
    for name in names:
        if name not in GROUPS:
            words = f"must be some of {', '.join(GROUPS)}. Given: {quoted(name)}"
            raise invalid(f"`group_by` {words}")
    by = [name for name in GROUPS if name in names]
    first = read_time(begin, "from") if begin is not None else month_begin(now.timestamp())
    last = read_time(end, "to") if end is not None else now
    if last < first:
        raise invalid("`to` must not be before `from`")
    wanted = {"key_id": key, "tenant": narrow(request, tenant), "model": model}
    async with asking_broker():
        found = await read_rows(own_pool(request).client.redis, first, last, now, by)
    rows = [
        row
        for row in found
        if all(value in (None, getattr(row.owner, name)) for name, value in wanted.items())
    ]
    content = {
        "object": "usage",
        "from": iso(first),
        "to": iso(last),
        "group_by": by,
        "data": group(rows, by),
        "total": numbers(sum((row.used for row in rows), Used())),
    }
    return fresh_json(content)


async def read_rows(
    redis: Redis, first: datetime, last: datetime, now: datetime, by: Sequence[str]
) -> list[UsageRow]:
    """Read months where they are enough, or all that is left, else hours. Raises ApiError (422)."""
    begins = [time == month_begin(time.timestamp()) for time in (first, last)]
    if not {"hour", "day"} & set(by) and begins[0] and (begins[1] or last >= now):
        return await read_months(redis, first, last)
    if first < now - timedelta(hours=HOURS_KEPT):
        raise invalid(
            "`from` must be within 90 days, or all of it whole months, grouped by no `hour` or `day`"
        )
    return await read_hours(redis, first, last)


# --- who may see what ---------------------------------------------------------------------------------------


def narrow(request: Request, tenant: str | None) -> str | None:
    """The tenant that a client asks for, or the one whose usage it may see; None is all. Who has API_KEY, or
    access without one, may see all. Raises ApiError (422).
    """
    key = key_of(request)
    scope = None if key is None or key.admin else key.tenant
    if scope is not None and tenant not in (None, scope):
        raise invalid(f"`tenant` must be {quoted(scope)}, or left out: your API key is of that one")
    return tenant if scope is None else scope


# --- parameters ---------------------------------------------------------------------------------------------


def read_time(text: str, name: str) -> datetime:
    """A time of ISO 8601 (UTC unless it says another zone), a date or Unix seconds. Raises ApiError (422)."""
    with contextlib.suppress(ValueError, OverflowError, OSError):
        if text.replace(".", "", 1).isdigit():
            return datetime.fromtimestamp(float(text), UTC)
        found = datetime.fromisoformat(text)
        return found.astimezone(UTC) if found.tzinfo else found.replace(tzinfo=UTC)
    raise invalid(f"`{name}` must be a time as 2026-11-27T08:00:00Z or Unix seconds. Given: {quoted(text)}")
