"""Calendar months (UTC): budgets and usage are counted by them."""

from datetime import UTC, datetime


def month_begin(time_s: float, later: int = 0) -> datetime:
    """The beginning of the month of a Unix time, or of one so many months later."""
    now = datetime.fromtimestamp(time_s, UTC)
    months = now.year * 12 + now.month - 1 + later
    return datetime(months // 12, months % 12 + 1, 1, tzinfo=UTC)


def month_name(begin: datetime) -> str:
    return f"{begin:%Y-%m}"


def seconds_to_next_month(time_s: float) -> float:
    return month_begin(time_s, 1).timestamp() - time_s
