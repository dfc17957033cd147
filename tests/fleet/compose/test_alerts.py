"""Alerts of the compose stack: Prometheus evaluates each, and one that fires is sent on."""

import asyncio
import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
import yaml

from tests.support.compose.clients import SETTLED_S
from tests.support.compose.stack import ROOT, Stack, run
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(5400)]


@contextmanager
def webhook() -> Iterator[tuple[int, list[str]]]:
    """A server that is told of alerts: its port, and the names of those that fire."""
    told: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            alerts = json.loads(self.rfile.read(int(self.headers["content-length"])))["alerts"]
            told.extend(alert["labels"]["alertname"] for alert in alerts if alert["status"] == "firing")
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with http.server.ThreadingHTTPServer(("0.0.0.0", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port, told
        server.shutdown()


async def test_every_alert_is_evaluated_and_one_that_fires_is_sent_to_the_url_of_the_variable(
    serving: Stack,
) -> None:
    wanted = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())["groups"][0]["rules"]
    async with httpx.AsyncClient() as client:
        found = (await client.get("http://127.0.0.1:9090/api/v1/rules")).json()["data"]["groups"][0]["rules"]
    assert [(one["name"], one["health"]) for one in found] == [(one["alert"], "ok") for one in wanted]
    [name] = list(json.loads(serving.inspect("alertmanager", "{{json .NetworkSettings.Networks}}")))
    host = run(
        ["docker", "network", "inspect", "-f", "{{(index .IPAM.Config 0).Gateway}}", name]
    ).stdout.strip()
    with webhook() as (port, told):
        serving.variables["ALERT_WEBHOOK"] = f"http://{host}:{port}/alerts"
        try:
            await asyncio.to_thread(serving.must, "up", "-d", "--no-build", "--no-deps", "alertmanager")
            assert not told
            await asyncio.to_thread(serving.must, "stop", "batcher")
            await wait_until(lambda: "NoActiveBatcher" in told, SETTLED_S)
        finally:
            del serving.variables["ALERT_WEBHOOK"]
