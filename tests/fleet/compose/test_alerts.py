"""Alerts of the compose stack: Prometheus evaluates each, and Alertmanager gets one that fires."""

import asyncio
import time

import httpx
import pytest
import yaml

from tests.support.compose.clients import SETTLED_S
from tests.support.compose.stack import ROOT, Stack
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(5400)]


async def test_every_alert_is_evaluated_and_one_is_sent_on(serving: Stack) -> None:
    """Prometheus evaluates them over this fleet's figures. The alert of a missing batcher reaches
    Alertmanager.
    """
    wanted = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())["groups"][0]["rules"]
    async with httpx.AsyncClient() as client:
        found = (await client.get("http://127.0.0.1:9090/api/v1/rules")).json()["data"]["groups"][0]["rules"]
        assert [(rule["name"], rule["health"]) for rule in found] == [
            (rule["alert"], "ok") for rule in wanted
        ]

        async def sent() -> bool:
            alerts = (await client.get("http://127.0.0.1:9093/api/v2/alerts")).json()
            return any(alert["labels"]["alertname"] == "NoActiveBatcher" for alert in alerts)

        assert not await sent()
        begun_s = time.monotonic()
        await asyncio.to_thread(serving.must, "stop", "batcher")
        await wait_until(sent, SETTLED_S)
        print(f"NoActiveBatcher is at Alertmanager {time.monotonic() - begun_s:.0f} s after `stop batcher`")
