"""Fetching: bounded in bytes, time and redirects, from checked addresses only."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable

import pytest

from api.pictures.fetch import PictureFetcher
from common.pictures import PictureError

CONTENT = b"a picture"


class PictureHost:
    """An HTTP server that answers each path as a test says.

    Attributes:
        answers: path → the bytes of a response; None never answers.
        seen: heads of requests.
    """

    def __init__(self) -> None:
        self.answers: dict[str, bytes | None] = {}
        self.seen: list[str] = []
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.seen.append(head)
            answer = self.answers.get(head.split()[1], response(b"", status="404 Not Found"))
            if answer is None:
                await reader.read()
            else:
                writer.write(answer)
                await writer.drain()
        writer.close()

    def url(self, path: str = "/a.png", host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"


def response(content: bytes, status: str = "200 OK", **headers: str | None) -> bytes:
    fields = {"content-type": "image/png", "content-length": str(len(content)), "connection": "close"}
    named = fields | {name.replace("_", "-"): text for name, text in headers.items()}
    lines = [f"{name}: {text}\r\n" for name, text in named.items() if text is not None]
    return f"HTTP/1.1 {status}\r\n{''.join(lines)}\r\n".encode() + content


def moved(location: str) -> bytes:
    return response(b"", status="302 Found", location=location)


@pytest.fixture
async def host() -> AsyncIterator[PictureHost]:
    found = PictureHost()
    server = await asyncio.start_server(found.serve, "127.0.0.1", 0)
    found.port = server.sockets[0].getsockname()[1]
    async with server:
        yield found


@pytest.fixture
def fetcher(host: PictureHost) -> PictureFetcher:
    return PictureFetcher([f"127.0.0.1:{host.port}"], max_bytes=100, timeout_s=5.0)


async def test_a_picture_is_fetched_without_anything_that_names_the_gateway(
    host: PictureHost, fetcher: PictureFetcher
) -> None:
    host.answers["/a.png?size=2"] = response(CONTENT)
    assert await fetcher.fetch(host.url("/a.png?size=2#part")) == CONTENT
    [head] = host.seen
    names = [line.split(":")[0].lower() for line in head.split("\r\n")[1:] if line]
    assert sorted(names) == ["accept", "accept-encoding", "host", "user-agent"]
    assert f"127.0.0.1:{host.port}" in head


async def test_redirects_are_followed_where_they_are_allowed(
    host: PictureHost, fetcher: PictureFetcher
) -> None:
    host.answers |= {"/a.png": moved("/b/c.png"), "/b/c.png": moved(host.url("/d")), "/d": response(CONTENT)}
    assert await fetcher.fetch(host.url()) == CONTENT
    host.answers["/loop"] = moved("/loop")
    with pytest.raises(PictureError, match="more than 3 redirects"):
        await fetcher.fetch(host.url("/loop"))


REFUSED_REDIRECTS = {
    "http://127.0.0.1:1/": "nothing is fetched here",
    "http://169.254.169.254/latest/meta-data/": "nothing is fetched here",
    "http://[::ffff:169.254.169.254]/": "nothing is fetched here",
    "http://[::1]/": "nothing is fetched here",
    "file:///etc/passwd": "begins with https: or http:",
    "http://u:p@127.0.0.1/": "without a user and a password",
}


@pytest.mark.parametrize("location", REFUSED_REDIRECTS)
@pytest.mark.parametrize("any_host", (False, True))
async def test_redirects_lead_nowhere_else(host: PictureHost, location: str, any_host: bool) -> None:
    """Not even where any public host is allowed."""
    host.answers["/a.png"] = moved(location)
    own = f"127.0.0.1:{host.port}"
    fetcher = PictureFetcher([own, "*"] if any_host else [own], max_bytes=100, timeout_s=5.0)
    words = REFUSED_REDIRECTS[location]
    with pytest.raises(PictureError, match=f"{words}|no host of the public internet" if any_host else words):
        await fetcher.fetch(host.url())
    assert len(host.seen) == 1


@pytest.mark.parametrize("address", ("127.0.0.1", "169.254.169.254", "10.0.0.7", "::1", "fd00:ec2::254"))
async def test_names_of_private_addresses_are_not_connected_to(
    host: PictureHost, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    """An allowed name that resolves to one; the connection is made to what was checked."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    answer = [(family, socket.SOCK_STREAM, 6, "", (address, host.port))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer)
    fetcher = PictureFetcher([f"pictures.example:{host.port}"], max_bytes=100, timeout_s=5.0)
    with pytest.raises(PictureError, match=r"at pictures.example, which is no host of the public internet"):
        await fetcher.fetch(host.url(host="pictures.example"))
    assert host.seen == []


async def test_a_name_is_resolved_once(host: PictureHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is public when it is checked and private afterwards leads to the checked address."""
    asked, connected = [], []
    real: Callable[..., object] = socket.getaddrinfo

    def resolve(name: str, *args: object, **options: object) -> object:
        if name != "pictures.example":
            return real(name, *args, **options)
        asked.append(name)
        text = "127.0.0.1" if len(asked) > 1 else "192.0.9.9"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (text, host.port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    fetcher = PictureFetcher([f"pictures.example:{host.port}"], max_bytes=100, timeout_s=5.0)

    async def connect(address: str, *_: object) -> object:
        connected.append(address)
        raise OSError("not now")

    monkeypatch.setattr(fetcher.backend.backend, "connect_tcp", connect)
    with pytest.raises(PictureError, match="could not be fetched"):
        await fetcher.fetch(host.url(host="pictures.example"))
    assert (asked, connected) == (["pictures.example"], ["192.0.9.9"])


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (response(bytes(101)), "has more than 100 bytes"),
        (response(bytes(101), content_length=None), "has more than 100 bytes"),
        (response(b"", content_length="101"), "has more than 100 bytes"),
        (response(CONTENT, content_type="text/html"), "has the content type 'text/html'"),
        (response(CONTENT, content_type=None), "has the content type ''"),
        (response(CONTENT, content_encoding="gzip"), "the host compresses it"),
        (response(b"", status="403 Forbidden"), "answers with status 403"),
        (response(CONTENT, content_length="50"), "could not be fetched: RemoteProtocolError"),
        (b"nonsense\r\n\r\n", "could not be fetched: RemoteProtocolError"),
    ],
)
async def test_what_is_no_picture_is_not_taken(
    host: PictureHost, fetcher: PictureFetcher, answer: bytes, words: str
) -> None:
    host.answers["/a.png"] = answer
    with pytest.raises(PictureError, match=words):
        await fetcher.fetch(host.url())


async def test_a_host_that_does_not_answer_is_given_up(host: PictureHost) -> None:
    host.answers["/a.png"] = None
    fetcher = PictureFetcher([f"127.0.0.1:{host.port}"], max_bytes=100, timeout_s=0.1)
    with pytest.raises(PictureError, match=r"within 0\.1 s"):
        await fetcher.fetch(host.url())


async def test_without_hosts_nothing_is_fetched(host: PictureHost) -> None:
    with pytest.raises(PictureError, match="ALLOWED_MEDIA_DOMAINS is empty"):
        await PictureFetcher([], max_bytes=100, timeout_s=1.0).fetch(host.url())
    assert host.seen == []
