"""What a fleet says when it is told to end."""

import pytest

from common.settings.settings import Settings
from deploy.launcher.fleet import new_fleet
from deploy.launcher.shutdown import count_live, waits_for

WAITS = "waiting up to 90 s for {} to finish; new ones get 503. Signal again (Ctrl-C) to end now"


@pytest.mark.parametrize(
    ("num_requests", "text"),
    [
        (0, "no request runs: the fleet ends"),
        (1, WAITS.format("1 request")),
        (3, WAITS.format("3 requests")),
        (None, WAITS.format("running requests")),
    ],
)
def test_the_shutdown_says_what_it_waits_for(num_requests: int | None, text: str) -> None:
    assert waits_for(num_requests, 90.0) == text


async def test_a_fleet_that_ends_before_its_first_process_waits_for_nothing() -> None:
    settings = Settings(redis_url="redis://127.0.0.1:1")
    assert await count_live(new_fleet(settings, None)) == 0
