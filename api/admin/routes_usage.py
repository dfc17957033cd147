"""Usage report: rows of usage, filtered and grouped."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import AfterValidator, Field, WithJsonSchema
from redis.asyncio import Redis
from starlette.responses import Response

from api.errors import invalid, quoted
from api.http.auth import key_of
from api.http.openapi import FLEET, TGI_ERRORS, only
from api.json import fresh_json
from api.requests.metrics import (
    HOURS_KEPT,
    NUMBERS,
    UsageRow,
    month_begin,
    month_name,
    read_hours,
    read_months,
)
from api.requests.service_terms import own_pool
from common.metrics.catalogue import USED_TOKENS

GROUPS: Mapping[str, Callable[[UsageRow], str]] = {
    "hour": lambda row: iso(row.begin),
    "day": lambda row: f"{row.begin:%Y-%m-%d}",
    "month": lambda row: month_name(row.begin),
    "key": lambda row: row.key_id,
    "tenant": lambda row: row.tenant,
    "model": lambda row: row.model,
}
"""What rows can be grouped by, in the order of columns."""
MAX_TENANTS = 500
"""That have series."""


def group(rows: Iterable[UsageRow], by: Sequence[str]) -> list[dict[str, Any]]:
    """Return one object for each group, in order."""
    sums: dict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
    for row in rows:
        sums[tuple(GROUPS[name](row) for name in by)].update(row.used)
    return [dict(zip(by, names, strict=True)) | numbers(used) for names, used in sorted(sums.items())]


def numbers(used: Counter[str]) -> dict[str, int]:
    """Return all numbers of what was used, as reports show them."""
    return {name: used[name] for name in NUMBERS.values()} | {"total_tokens": total(used)}


def total(used: Counter[str]) -> int:
    return used["prompt_tokens"] + used["completion_tokens"]


def metric_values(rows: Iterable[UsageRow], models: Collection[str]) -> dict[str, float]:
    """Return counters of what tenants have used of these models; of too many those that used most."""
    by_owner: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for row in rows:
        if row.model in models:
            by_owner[row.tenant, row.model].update(row.used)
    most = sorted(by_owner.items(), key=lambda item: total(item[1]), reverse=True)
    values: dict[str, float] = {}
    for (tenant, model), used in most[:MAX_TENANTS]:
        for name in [*NUMBERS.values()][1:]:  # of tokens
            values[USED_TOKENS.field((tenant, model, name.removesuffix("_tokens")))] = used[name]
    return values


def iso(time: datetime) -> str:
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


# --- routes usage -------------------------------------------------------------------------------------------


BY_DEFAULT = "key,tenant,model"
NAME = f"({'|'.join(GROUPS)})"


def to_utc(time: datetime) -> datetime:
    """A time that names no zone is in UTC."""
    return time.astimezone(UTC) if time.tzinfo else time.replace(tzinfo=UTC)


Time = Annotated[
    datetime,
    Field(ge=datetime(2000, 1, 1, tzinfo=UTC), lt=datetime(2100, 1, 1, tzinfo=UTC)),
    AfterValidator(to_utc),
    WithJsonSchema(
        {"type": "string", "pattern": r"^(20[0-9]{2}-(0[1-9]|1[0-2])-[0-2][1-8]|1[0-9]{9})$"}
    ),  # more forms are read
]
router = APIRouter(responses=only(TGI_ERRORS, 401, 403, 422, 503), tags=[FLEET])


@router.get("/usage", summary="Report usage")
async def usage(
    request: Request,
    key: Annotated[str | None, Query(description="The id of an API key.")] = None,
    tenant: str | None = None,
    model: str | None = None,
    begin: Annotated[
        Time | None, Query(alias="from", description="ISO 8601 or Unix seconds. Default: this month's begin.")
    ] = None,
    end: Annotated[Time | None, Query(alias="to", description="As `from`. Default: now.")] = None,
    group_by: Annotated[
        str,
        Query(
            description="Some of hour, day, month, key, tenant, model, with commas between; or none.",
            pattern=f"^({NAME}(,{NAME})*)?$",
        ),
    ] = BY_DEFAULT,
    format: Annotated[
        Literal["json"] | None, Query(description="`json` alone.", include_in_schema=False)
    ] = None,
) -> Response:
    """Returns requests and tokens, counted from what is committed, in whole hours (UTC). Hours are kept
    for 90 days; before that, only whole months are known. A tenant's key sees its own tenant.
    """
    now = datetime.fromtimestamp(own_pool(request).client.clock.now_s(), UTC)
    by = [name for name in GROUPS if name in group_by.split(",")]
    first, last = begin or month_begin(now.timestamp()), end or now
    if last < first:
        raise invalid("`to` must not be before `from`")
    wanted = {"key_id": key, "tenant": narrow(request, tenant), "model": model}
    found = await read_rows(own_pool(request).client.redis, first, last, now, by)
    rows = [
        row for row in found if all(value in (None, getattr(row, name)) for name, value in wanted.items())
    ]
    content = {
        "object": "usage",
        "from": iso(first),
        "to": iso(last),
        "group_by": by,
        "data": group(rows, by),
        "total": numbers(sum((row.used for row in rows), Counter[str]())),
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
