"""Calendar months (UTC)."""

from datetime import UTC, datetime

import pytest

from api.requests.usage import month_begin, month_name, seconds_to_next_month


@pytest.mark.parametrize(
    ("now", "begin", "following"),
    [
        ("2026-11-30T23:59:59", "2026-11", "2026-12"),
        ("2026-12-01T00:00:00", "2026-12", "2027-01"),
        ("2028-02-29T12:00:00", "2028-02", "2028-03"),
    ],
)
def test_a_month_ends_where_the_next_begins(now: str, begin: str, following: str) -> None:
    time_s = datetime.fromisoformat(now).replace(tzinfo=UTC).timestamp()
    assert [month_name(month_begin(time_s, later)) for later in (0, 1)] == [begin, following]
    assert month_begin(time_s + seconds_to_next_month(time_s)) == month_begin(time_s, 1)
