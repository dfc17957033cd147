"""TLS: certificates made for a test, and a door with TLS in front of a broker that has none."""

import asyncio
import contextlib
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest


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
async def tls_door(to: Path, certificate: Path, key: Path) -> AsyncIterator[int]:
    """Open a port with TLS that leads to a Unix socket."""
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

    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context) as server:
        yield server.sockets[0].getsockname()[1]
