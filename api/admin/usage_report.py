"""Usage report: rows of usage, filtered and grouped."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from api.requests.usage import UsageRow, Used, month_name
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
    "requests",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "speculated_tokens",
    "total_tokens",
)


@dataclass(frozen=True, slots=True)
class UsageFilter:
    """What of all usage is asked for; None filters nothing."""

    key: str | None = None
    tenant: str | None = None
    model: str | None = None

    def matches(self, row: UsageRow) -> bool:
        owner = row.owner
        pairs = ((self.key, owner.key_id), (self.tenant, owner.tenant), (self.model, owner.model))
        return all(wanted in (None, found) for wanted, found in pairs)


def group(rows: Iterable[UsageRow], wanted: UsageFilter, by: Sequence[str]) -> list[dict[str, Any]]:
    """Return one object for each group, in order."""
    sums: dict[tuple[str, ...], Used] = defaultdict(Used)
    for row in filter(wanted.matches, rows):
        sums[tuple(GROUPS[name](row) for name in by)] += row.used
    return [dict(zip(by, names, strict=True)) | numbers(used) for names, used in sorted(sums.items())]


def numbers(used: Used) -> dict[str, Any]:
    """Return the numbers of what was used, by their names in reports."""
    total = used.prompt + used.generated
    counts = (used.requests, used.prompt, used.cached, used.generated, used.speculated, total)
    return dict(zip(NUMBERS, counts, strict=True))


def total(rows: Iterable[UsageRow], wanted: UsageFilter) -> dict[str, Any]:
    return numbers(sum((row.used for row in rows if wanted.matches(row)), Used()))


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
