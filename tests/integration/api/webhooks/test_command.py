"""`tokenfleet webhooks`, at a gateway."""

import asyncio

import pytest

from deploy.cli.admin import main
from deploy.launcher.embedded_broker import Broker
from tests.integration.api.webhooks.test_deliveries import ANSWER, allowing
from tests.support.fleet.gateways import answering
from tests.support.responses.events import BODY, PATH
from tests.support.waiting import wait_until
from tests.support.webhooks.receiver import receiving


async def test_dead_events_are_shown_and_sent_again(
    broker: Broker, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    async with (
        receiving(410) as receiver,
        answering(broker.url, ANSWER, **allowing(receiver)) as (_, _, client),
    ):
        url = str(client.base_url)

        async def run(*words: str) -> str:
            assert await asyncio.to_thread(main, ["webhooks", *words, "--url", url]) == 0
            return capsys.readouterr().out

        assert await run("list") == "no events are waiting\n"
        body = BODY | {"background": True, "webhook": receiver.hook()}
        (await client.post(PATH, json=body)).raise_for_status()

        async def dead() -> bool:
            return "status 410" in await run("dead")

        await wait_until(dead)
        line = (await run("dead")).splitlines()[1]
        event_id = line.split()[0]
        assert "response.completed" in line and receiver.url in line
        assert await run("retry", event_id) == f"{event_id} is sent now\n"
        await wait_until(lambda: len(receiver.deliveries) == 2)
        assert await asyncio.to_thread(main, ["webhooks", "retry", "evt_unknown", "--url", url]) == 1
        assert "No event with this id" in capsys.readouterr().err
