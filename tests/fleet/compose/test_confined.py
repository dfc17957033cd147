"""The compose stack as an attacker would find it: what a container may do, and whom it reaches."""

import asyncio
import itertools
import json
import ssl
from pathlib import Path

import httpx
import pytest

from common.broker.acl import PROCESSES
from tests.support.compose.clients import SETTLED_S
from tests.support.compose.stack import SERVICES, Stack, run
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(5400)]

NET_BIND_SERVICE = 1 << 10


def test_containers_have_no_rights_and_cannot_change_their_files(serving: Stack) -> None:
    for service in SERVICES:
        looks = "cat /proc/1/status; touch /changed && echo changed"
        status = run(["docker", "exec", serving.container(service), "sh", "-c", looks]).stdout
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        may = int(fields["CapBnd"], 16) | int(fields["CapEff"], 16)
        assert may == (NET_BIND_SERVICE if service == "proxy" else 0), service
        assert fields["NoNewPrivs"] == "1", service
        assert "changed" not in status.splitlines(), service
        assert int(serving.inspect(service, "{{.HostConfig.Memory}}")) > 0, service
        assert int(serving.inspect(service, "{{.HostConfig.PidsLimit}}")) > 0, service


def reaches(stack: Stack, service: str, host: str, port: int) -> bool:
    """Whether something answers a container there. HTTP or not, an answer is an answer."""
    asks = f"wget -q -T 3 -t 1 -O /dev/null http://{host}:{port}/ 2>&1; echo end $?"
    said = run(["docker", "exec", stack.container(service), "sh", "-c", asks], timeout_s=60).stdout
    return said.splitlines()[-1] not in ("end 1", "end 4")


def test_the_proxy_reaches_gateways_and_not_redis(serving: Stack) -> None:
    networks = json.loads(serving.inspect("redis", "{{json .NetworkSettings.Networks}}"))
    [address] = [one["IPAddress"] for one in networks.values()]
    assert reaches(serving, "proxy", "api", 3000)
    for host, port in (("redis", 6379), (address, 6379), ("prometheus", 9090), ("batcher", 9100)):
        assert not reaches(serving, "proxy", host, port), host


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
            assert serving.first_line("api").startswith("requests must carry the key in API_KEY")
            assert await status("other") == 401
    finally:
        del serving.variables["API_KEY"], serving.variables["DOMAIN"]
