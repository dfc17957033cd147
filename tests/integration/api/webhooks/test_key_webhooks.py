"""A webhook of an API key: it is told the end of all that its key asks for."""

import json
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from standardwebhooks import Webhook

from common.settings.settings import SettingError
from deploy.cli.admin import fields_of, new_parser
from deploy.launcher.embedded_broker import Broker
from tests.integration.api.batches.test_batches import chat_line, jsonl, openai_client
from tests.integration.api.webhooks.test_deliveries import ANSWER
from tests.integration.api.webhooks.test_routes import CHAT, PROMPT, told_by
from tests.support.fleet.gateways import answering
from tests.support.jobs import KEYS
from tests.support.keys.issued import add_key, bearer
from tests.support.responses.events import BODY, PATH
from tests.support.waiting import wait_until
from tests.support.webhooks.receiver import SECRET, receiving


async def test_all_that_a_key_asks_for_is_told(broker: Broker, redis: Redis, tmp_path: Path) -> None:
    async with receiving() as receiver, receiving() as named:
        told = await add_key(redis, tenant="acme", webhook=receiver.url, webhook_secret=SECRET)
        quiet, admin = await add_key(redis), await add_key(redis, admin=True)
        hosts = (receiver.host, named.host)
        async with answering(broker.url, ANSWER, files_dir=str(tmp_path), webhook_allowed_hosts=hosts) as (
            _,
            _,
            client,
        ):
            chat = await client.post("/v1/chat/completions", json=CHAT, headers=bearer(told))
            response = await client.post(PATH, json=BODY, headers=bearer(told))
            await redis.xadd(
                KEYS.submit, {"job": json.dumps({"id": "mine", "inputs": "a"}), "api_key": told.text}
            )
            client.headers.update(bearer(told))
            files = openai_client(client).with_options(api_key=told.text)
            file = await files.files.create(file=("in.jsonl", jsonl([chat_line(0)])), purpose="batch")
            batch = await files.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
            )
            own = await client.post("/generate", json=PROMPT | {"webhook": named.hook()})
            await client.post("/generate", json=PROMPT, headers=bearer(quiet))
            await wait_until(lambda: len(receiver.deliveries) >= 4 and named.deliveries)
            listed = (await client.get("/admin/keys", headers=bearer(admin))).json()["keys"]
        assert told_by(receiver) == {
            chat.headers["x-request-id"]: "request.completed",
            response.json()["id"]: "response.completed",
            "mine": "job.completed",
            batch.id: "batch.completed",
        }
        assert told_by(named) == {own.headers["x-request-id"]: "request.completed"}
        assert len(receiver.deliveries) == 4, "a line of a batch is no event"
        Webhook(SECRET).verify(receiver.deliveries[0].body, receiver.deliveries[0].headers)
        assert sorted(key["webhook"] for key in listed) == ["", "", receiver.url] and SECRET not in str(
            listed
        )


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--webhook", "ftp://example.org", "--webhook-secret", SECRET], "`webhook`"),
        (["--webhook", "https://example.org"], "`webhook` and `webhook_secret` need each other"),
        (["--webhook-secret", SECRET], "`webhook` and `webhook_secret` need each other"),
        (["--webhook", "https://example.org", "--webhook-secret", "whsec_a"], "`webhook_secret`"),
    ],
)
def test_a_fault_of_a_keys_webhook_is_named(words: list[str], why: str) -> None:
    flags: Any = new_parser("keys").parse_args(["add", *words])
    with pytest.raises(SettingError, match=why):
        fields_of(flags, 0)


def test_the_flags_make_a_webhook() -> None:
    words = ["add", "--webhook", "https://example.org/hooks", "--webhook-secret", SECRET]
    fields = fields_of(new_parser("keys").parse_args(words), 0)
    assert (fields.webhook, fields.webhook_secret) == ("https://example.org/hooks", SECRET)
