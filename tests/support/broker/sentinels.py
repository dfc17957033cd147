"""Brokers behind TLS, and behind Sentinel."""

import asyncio
import contextlib
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import redis

from common.broker import acl
from tests.support import brokers
from tests.support.machine.ports import free_port
from tests.support.waiting import wait_until_sync


def make_certificate(directory: Path, name: str = "127.0.0.1") -> tuple[Path, Path]:
    """Make a self-signed certificate for an IP address. Return it and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl")
    certificate, key = directory / f"{name}.pem", directory / f"{name}.key"
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    words += ["-days", "2", "-subj", "/CN=test", "-addext", f"subjectAltName=IP:{name}"]
    subprocess.run([*words, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return certificate, key


@contextlib.asynccontextmanager
async def tls_door(to: Path, certificate: Path, key: Path, port: int = 0) -> AsyncIterator[int]:
    """Open a port with TLS that leads to a Unix socket; `port`: 0 for any."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(2**16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_unix_connection(to)
        await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer))

    async with await asyncio.start_server(serve, "127.0.0.1", port, ssl=context) as server:
        yield server.sockets[0].getsockname()[1]


# --- sentinels ----------------------------------------------------------------------------------------------

SERVER = Path("/usr/bin/redis-server")
SERVICE = "fleet"
PASSWORD = "p@ss"
WATCH_PASSWORD = "watch"
ALL = """
bind 127.0.0.1
port 0
tls-port {port}
tls-cert-file {certificate}
tls-key-file {key}
tls-ca-cert-file {certificate}
tls-auth-clients yes
tls-replication yes
dir {folder}
"""
BROKER = """
aclfile users.acl
masteruser replica
masterauth {password}
appendonly yes
save ""
repl-diskless-sync-delay 0
"""
SENTINEL = """
requirepass {watch_password}
sentinel monitor {service} 127.0.0.1 {primary} 1
sentinel auth-user {service} sentinel
sentinel auth-pass {service} {password}
sentinel down-after-milliseconds {service} 1000
sentinel failover-timeout {service} 10000
"""


@dataclass
class Watched:
    """Attributes:
    url: how clients find the primary, by way of a sentinel.
    primary: the process that is the primary at first.
    """

    url: str
    primary: subprocess.Popen[bytes]

    def fail_over(self) -> None:
        """Kill the primary; after a while the replica takes its place."""
        self.primary.kill()
        self.primary.wait()


@contextlib.contextmanager
def secured() -> Iterator[Watched]:
    """Yield a watched service whose URL has the user `fleet`. Skips the test where Redis is not installed."""
    if not SERVER.exists():
        pytest.skip(f"there is no {SERVER}")
    with TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        certificate, key = make_certificate(folder)
        trust = f"ssl_ca_certs={certificate}&ssl_certfile={certificate}&ssl_keyfile={key}"
        first, second, own = free_port(), free_port(), free_port()
        shared = {"certificate": certificate, "key": key, "password": PASSWORD, "service": SERVICE}
        shared |= {"watch_password": WATCH_PASSWORD, "primary": first}

        def start(port: int, text: str, *options: str) -> subprocess.Popen[bytes]:
            place = folder / str(port)
            place.mkdir()
            (place / "users.acl").write_text(users())
            config = place / "redis.conf"
            config.write_text((ALL + text).format(port=port, folder=place, **shared))
            process = brokers.spawn([str(SERVER), str(config), *options], {})
            stack.callback(process.wait)
            stack.callback(process.kill)
            wait_until_sync(lambda: process.poll() is not None or answers(port, trust))
            return process

        primary = start(first, BROKER)
        start(second, BROKER, "--replicaof", "127.0.0.1", str(first))
        start(own, SENTINEL, "--sentinel")
        with redis.Redis.from_url(f"rediss://:{WATCH_PASSWORD}@127.0.0.1:{own}?{trust}") as sentinel:
            wait_until_sync(lambda: watches(sentinel))
        (folder / "password").write_text(f"{PASSWORD}\n")
        options = f"{trust}&sentinel_password={WATCH_PASSWORD}&password_file={folder}/password"
        yield Watched(f"rediss+sentinel://{acl.FLEET}@127.0.0.1:{own}/{SERVICE}?{options}", primary)


def users() -> str:
    """An ACL file: what `tokenfleet doctor --acl` prints, with passwords; nobody else may do anything."""
    lines = [f"user {kind} on >{PASSWORD} {' '.join(acl.rules(kind, ['default']))}" for kind in acl.USERS]
    return "\n".join(["user default off", *lines, ""])


def answers(port: int, trust: str) -> bool:
    return brokers.answers(f"rediss://127.0.0.1:{port}?{trust}")


def watches(sentinel: redis.Redis) -> bool:
    """Whether the sentinel knows the replica, and the replica has all that the primary has."""
    states: list[dict[str, str]] = sentinel.sentinel_slaves(SERVICE)  # type: ignore[no-untyped-call]
    return [(one["flags"], one["master-link-status"]) for one in states] == [("slave", "ok")]
