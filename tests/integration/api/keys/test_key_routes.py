"""Admin routes: keys are listed, added, revoked and rotated over HTTP, by admins."""

from base64 import b64encode
from pathlib import Path

import pytest

from common.api_keys import ApiKey
from deploy.cli.admin import show_keys
from deploy.launcher.embedded_broker import Broker
from tests.support.fleet.gateways import answering, serving
from tests.support.fleet.scripted_worker import Answer
from tests.support.keys.issued import bearer, gone, status
from tests.support.waiting import wait_until

ADMIN = bearer("sesame")


async def test_an_admin_manages_keys(broker: Broker) -> None:
    async with answering(broker.url, Answer([11]), api_key="sesame") as (_, gateway, client):
        made = await client.post("/admin/keys", json={"name": "reports", "tenant": "acme"}, headers=ADMIN)
        key = made.json()
        assert made.headers["cache-control"] == "no-store" and key["key"].startswith("tf-")
        await wait_until(lambda: key["key_id"] in gateway.keys.active)
        assert await status(client, key["key"]) == 200
        rotated = (await client.post(f"/admin/keys/{key['key_id']}/rotate", headers=ADMIN)).json()
        listed = (await client.get("/admin/keys", headers=ADMIN)).json()["keys"]
        assert listed == [{name: value for name, value in rotated.items() if name != "key"}]
        assert (listed[0]["tenant"], listed[0]["state"], listed[0]["name"]) == ("acme", "active", "reports")
        hook = {"webhook": "https://10.0.0.1/", "webhook_secret": f"whsec_{b64encode(bytes(24)).decode()}"}
        refused = await client.post("/admin/keys", json=hook, headers=ADMIN)
        assert refused.status_code == 422 and "`webhook` is at 10.0.0.1" in refused.json()["error"]
        assert "digest" not in listed[0] and rotated["key"] != key["key"]
        revoked = (await client.post(f"/admin/keys/{key['key_id']}/revoke", headers=ADMIN)).json()
        assert revoked["state"] == "revoked"
        await gone(gateway.keys, key["key_id"])
        assert await status(client, rotated["key"]) == 401
        assert (await client.post(f"/admin/keys/{key['key_id']}/rotate", headers=ADMIN)).status_code == 409
        assert (await client.post("/admin/keys/none/revoke", headers=ADMIN)).status_code == 404
        wrong = await client.post("/admin/keys", json={"weight": 0}, headers=ADMIN)
        assert (wrong.status_code, "`weight`" in wrong.text) == (422, True)


async def test_nobody_else_does(broker: Broker, tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    entries = "- {key_id: one, key: aaaaaaaaaaaaaaaa}\n- {key_id: two, key: bbbbbbbbbbbbbbbb, admin: true}"
    path.write_text(f"keys:\n{entries}\n")
    async with serving(broker.url, api_keys_file=str(path)) as (_, client):
        one, two = bearer("a" * 16), bearer("b" * 16)
        assert [(await client.get("/admin/keys", headers=key)).status_code for key in (one, two)] == [
            403,
            200,
        ]
        assert (await client.get("/admin/keys")).status_code == 401
        refused = await client.post("/admin/keys", json={}, headers=two)
        assert (refused.status_code, "API_KEYS_FILE" in refused.text) == (409, True)


async def test_the_first_key_is_not_made_by_whoever_comes(broker: Broker) -> None:
    async with serving(broker.url) as (_, client):
        refused = await client.post("/admin/keys", json={"admin": True})
        assert (refused.status_code, "API_KEY" in refused.text) == (403, True)
        assert (await client.get("/admin/keys")).status_code == 403


def test_the_list_of_the_command_has_what_a_key_may_use(capsys: pytest.CaptureFixture[str]) -> None:
    show_keys([ApiKey("k1", "", models=["llama"], adapters=["legal", "sql"])], now_s=0)
    head, row = capsys.readouterr().out.splitlines()
    assert row[head.index("adapters") :].startswith("legal, sql") and "llama" in row
