"""Settings of the compose stack: keys and names from the shell; cores that workers divide."""

import asyncio
import ssl
from pathlib import Path

import httpx
import pytest

from common.process import machine
from tests.support.compose.clients import SETTLED_S
from tests.support.compose.stack import Stack
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(5400)]


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
            assert serving.first_line("api").startswith("requests must carry the key in API_KEY;")
            assert await status("other") == 401
    finally:
        del serving.variables["API_KEY"], serving.variables["DOMAIN"]


async def test_workers_divide_the_cores_that_their_containers_may_use(serving: Stack) -> None:
    """`CPU_WORKERS=3` starts three workers that divide the cores; a container's own limit counts."""
    cores = machine.num_cores()
    one_each = serving.variables.pop("THREADS")

    async def expect(num_workers: int, num_threads: int) -> None:
        expected = [max(1, num_threads)] * num_workers
        await wait_until(lambda: serving.threads("cpu_worker") == expected, SETTLED_S)
        print(f"{num_workers} workers on {cores} cores: threads {expected}", flush=True)

    try:
        for num_workers in (3, 1):
            serving.variables["CPU_WORKERS"] = str(num_workers)
            await asyncio.to_thread(serving.must, "up", "-d", "--no-build", "--no-deps", "cpu_worker")
            await expect(num_workers, cores // num_workers)
        await asyncio.to_thread(serving.limit_cores, "cpu_worker", 1)
        await expect(1, 1)
    finally:
        serving.variables["THREADS"] = one_each
        del serving.variables["CPU_WORKERS"]
