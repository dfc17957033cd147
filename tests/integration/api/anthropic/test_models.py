"""GET /v1/models and /v1/models/{id} with the header `anthropic-version`."""

from datetime import UTC, datetime
from typing import Any

import httpx

from api.anthropic.models import VERSION_HEADER, page
from api.models import STARTED_S
from deploy.launcher.embedded_broker import Broker
from tests.support.fleet.gateways import answering
from tests.support.fleet.scripted_worker import Answer

ASKED = {VERSION_HEADER: "2023-06-01"}
CREATED = datetime.fromtimestamp(STARTED_S, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
MODELS: list[dict[str, Any]] = [{"id": name, "created": 0} for name in "abcde"]


def shown(found: dict[str, Any]) -> tuple[str, bool]:
    return "".join(model["id"] for model in found["data"]), found["has_more"]


async def test_anthropics_clients_get_its_list(broker: Broker) -> None:
    async with answering(broker.url, Answer([]), served_model_name=("one", "two")) as (_, _, client):
        listed = await client.get("/v1/models", headers=ASKED)
        first = await client.get("/v1/models?limit=1", headers=ASKED)
        found = await client.get("/v1/models/one", headers=ASKED)
        missing: httpx.Response = await client.get("/v1/models/three", headers=ASKED)
        wrong = await client.get("/v1/models?after_id=three", headers=ASKED)
        plain = await client.get("/v1/models?limit=1&after_id=three")
    one, two = (
        {"type": "model", "id": name, "display_name": name, "created_at": CREATED} for name in ("one", "two")
    )
    assert listed.json() == {"data": [one, two], "first_id": "one", "last_id": "two", "has_more": False}
    assert first.json() == {"data": [one], "first_id": "one", "last_id": "one", "has_more": True}
    assert found.json() == one and missing.status_code == 404
    assert wrong.status_code == 400 and "`after_id` must be a model of the list" in wrong.text
    assert [model["id"] for model in plain.json()["data"]] == ["one", "two"]


def test_pages_go_forwards_and_backwards() -> None:
    assert shown(page(MODELS, 2, None, None)) == ("ab", True)
    assert shown(page(MODELS, 3, "b", None)) == ("cde", False)
    assert shown(page(MODELS, 2, None, "d")) == ("bc", True)
    assert shown(page(MODELS, 9, None, "d")) == ("abc", False)
    assert page(MODELS, 2, "e", None) == {"data": [], "first_id": None, "last_id": None, "has_more": False}
