"""The compose stack as an attacker would find it: what a container may do, and whom it reaches."""

import asyncio
import itertools
import ssl
from pathlib import Path

import httpx
import pytest

from common.broker.acl import PROCESSES
from tests.support.compose.clients import SETTLED_S
from tests.support.compose.stack import Stack, run
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(5400)]


def test_redis_answers_only_who_has_the_password_of_a_user(serving: Stack) -> None:
    for words in ([], ["--user", "worker", "--pass", "guess", "--no-auth-warning"]):
        done = run(["docker", "exec", serving.container("redis"), "redis-cli", *words, "PING"])
        assert "PONG" not in done.stdout and "NOAUTH" in done.stdout
    clients = serving.redis("CLIENT", "LIST").splitlines()
    connected = {line.partition(" user=")[2].split()[0] for line in clients}
    assert {*PROCESSES} <= connected <= {*PROCESSES, "default"}
    log = serving.redis("ACL", "LOG").splitlines()
    reasons = [value for name, value in itertools.pairwise(log) if name == "reason"]
    assert set(reasons) <= {"auth"}, "no process lacks a right"


async def test_the_proxy_passes_on_what_is_public(serving: Stack) -> None:
    url = f"http://127.0.0.1:{serving.variables['PORT']}"
    async with httpx.AsyncClient(base_url=url, timeout=180) as client:
        body = {"inputs": "The sky is", "parameters": {"max_new_tokens": 4}}
        assert (await client.post("/generate", json=body)).json()["generated_text"]
        statuses = {
            path: (await client.get(path)).status_code for path in ("/health", "/info", "/v1/models", "/")
        }
        assert set(statuses.values()) == {200}, statuses
        hidden = ("/metrics", "/metrics/", "/%6detrics", "/fleet", "/fleet/requests/a", "/FLEET")
        statuses = {path: (await client.get(path)).status_code for path in hidden}
        assert set(statuses.values()) == {404}, statuses


async def test_key_and_domain_come_from_the_shell(serving: Stack, tmp_path: Path) -> None:
    """For the name localhost, Caddy signs the certificate itself."""
    serving.variables |= {"API_KEY": "secret", "DOMAIN": "localhost"}
    try:
        await asyncio.to_thread(serving.must, "up", "-d", "--no-build", "--no-deps", "api", "proxy")
        root = tmp_path / "root.crt"

        def has_root() -> bool:
            path = "proxy:/data/caddy/pki/authorities/local/root.crt"
            return serving.compose("cp", path, str(root)).returncode == 0

        await wait_until(has_root, SETTLED_S)
        url = f"https://localhost:{serving.variables['PORT']}"
        async with httpx.AsyncClient(base_url=url, verify=ssl.create_default_context(cafile=root)) as client:

            async def status(key: str) -> int:
                body = {"inputs": "The sky is", "parameters": {"max_new_tokens": 4}}
                headers = {"authorization": f"Bearer {key}"}
                try:
                    return (
                        await client.post("/generate", json=body, headers=headers, timeout=180)
                    ).status_code
                except httpx.TransportError:
                    return 0

            async def is_served() -> bool:
                return await status("secret") == 200

            await wait_until(is_served, SETTLED_S)
            assert serving.first_line().startswith("requests must carry the key in API_KEY")
            assert await status("other") == 401
    finally:
        del serving.variables["API_KEY"], serving.variables["DOMAIN"]
