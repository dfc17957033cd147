"""Not before: the time until which a job waits, as seconds since 1970 or in ISO 8601."""

from datetime import datetime

from api.errors import ApiError, invalid, quoted

MAX_WAIT_S = 30 * 86_400


def read_not_before(value: float | str, submitted_ms: int) -> int:
    """Milliseconds since 1970. Raises ApiError (422)."""
    due_ms = round(1000 * (parse_time(value) if isinstance(value, str) else value))
    if due_ms < 0:
        raise refused(value)
    if due_ms > submitted_ms + 1000 * MAX_WAIT_S:
        raise invalid(
            f"`not_before` must be at most {MAX_WAIT_S // 86_400} days ({MAX_WAIT_S} s) after the job was"
            f" submitted. Given: {quoted(value)}",
            "not_before",
        )
    return due_ms


def parse_time(text: str) -> float:
    """Seconds since 1970. Raises ApiError (422), also for a time without an offset."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        raise refused(text) from error
    if time.tzinfo is None:
        raise refused(text)
    return time.timestamp()


def refused(value: float | str) -> ApiError:
    return invalid(
        "`not_before` must be seconds since 1970, or a time with its offset as 2027-01-31T08:00:00Z."
        f" Given: {quoted(value)}",
        "not_before",
    )
