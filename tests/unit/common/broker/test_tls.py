"""Brokers behind TLS: both clients work, and a certificate that is not trusted is called that."""

import asyncio
from pathlib import Path

import pytest

from common.broker import client as access
from common.broker.client import SerialClient
from common.settings.settings import SettingError
from deploy.launcher.embedded_broker import Broker
from tests.support.broker.tls import make_certificate, tls_door
from tests.support.waiting import wait_until


async def refusal(url: str) -> str:
    with pytest.raises(SettingError) as refused:
        await access.check_broker(url)
    return str(refused.value)


async def test_both_clients_work_behind_a_trusted_certificate(broker: Broker, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    async with tls_door(broker.socket_path, certificate, key) as port:
        url = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={certificate}"
        await access.check_broker(url)
        async with access.connect(url) as redis:
            await redis.set("key", b"x" * 10**6)
            fast = SerialClient(redis)
            assert await fast.execute("GET", "key") == b"x" * 10**6
            answers: list[bytes] = []
            fast.start(answers.append, "ECHO", "not held")
            await wait_until(lambda: answers == [b"not held"])
            fast.close()


async def test_a_certificate_that_is_not_trusted_is_called_that(broker: Broker, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    async with tls_door(broker.socket_path, certificate, key) as port:
        line = await refusal(f"rediss://:secret@127.0.0.1:{port}")
        assert "its certificate is not trusted; ssl_ca_certs=FILE in REDIS_URL names whom to trust" in line
        assert f"127.0.0.1:{port}" in line and "not permitted" not in line and "secret" not in line


async def test_a_certificate_of_another_host_is_called_that(broker: Broker, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "127.0.0.9")
    async with tls_door(broker.socket_path, certificate, key) as port:
        url = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={certificate}"
        assert "its certificate names another host" in await refusal(url)
        await access.check_broker(f"{url}&ssl_check_hostname=no")


async def test_a_broker_without_tls_is_called_that(broker: Broker, tmp_path: Path) -> None:
    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"-ERR unknown command\r\n")
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert "no TLS with the broker" in await refusal(f"rediss://127.0.0.1:{port}")
