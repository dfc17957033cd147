"""How long an heir waits for a broker that does not answer."""

from types import SimpleNamespace

import pytest
from starlette.requests import ClientDisconnect

from api.errors import unavailable
from api.resume.inherit import wait_for_broker
from common.messages.kept_answer import KeptAnswer, KeptRequests


@pytest.mark.parametrize("outlives_client", [False, True])
async def test_requests_that_go_on_without_their_client_wait_for_the_broker(outlives_client: bool) -> None:
    requests = KeptRequests("default", "events", [], b"", outlives_client)
    kept, left = KeptAnswer("r1", 0, "1", requests=requests), SimpleNamespace(disconnected=True)
    if outlives_client:
        await wait_for_broker(left, kept, unavailable("away"))
    else:
        with pytest.raises(ClientDisconnect):
            await wait_for_broker(left, kept, unavailable("away"))
