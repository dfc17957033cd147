"""Foreign hosts: public ones that the setting allows; what is fetched is bounded in bytes, time, hops.
Pictures in texts, and the prompt of a picture of any size: the one that transformers makes.
Pictures as bytes: size and pixels agree with transformers'; damaged ones are refused.
"""

import asyncio
import contextlib
import io
import ipaddress
import json
import random
import socket
import threading
import zlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
from PIL import Image
from transformers.image_utils import load_image

from api.outbound import UrlError, check_target, is_allowed, is_public, public_addresses, read_url
from api.prompts.picture_layouts import PictureLayout, expanded, placed, read_layout
from api.prompts.pictures import PictureFetcher, split_text
from common.pictures import FORMATS, PictureError, Size, check_pixels, decoded, read_size
from common.settings.settings import SettingError
from tests.support.pictures import CLASSES, make_processor, processed_ids

# --- addresses ----------------------------------------------------------------------------------------------

PRIVATE = """
127.0.0.1 127.8.9.1 0.0.0.0
10.1.2.3 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 100.100.100.200 192.0.0.8
198.18.0.1 224.0.0.1 240.0.0.1 255.255.255.255 192.0.2.1
::1 :: fe80::1 fc00::1 fd00:ec2::254 ff02::1 2001:db8::1 fec0::1
::ffff:127.0.0.1 ::ffff:169.254.169.254 ::ffff:a00:1 64:ff9b::7f00:1 64:ff9b::a9fe:a9fe 64:ff9b:1::1
2002:7f00:1:: 2002:a9fe:a9fe:: 2001:0:0:0:0:0:80ff:fffe
""".split()
PUBLIC = "8.8.8.8 93.184.216.34 2606:4700::1111 ::ffff:8.8.8.8 64:ff9b::808:808".split()


@pytest.mark.parametrize("text", [*PRIVATE, *PUBLIC])
def test_addresses_of_machines_networks_and_clouds_are_not_public_and_others_are(text: str) -> None:
    assert is_public(ipaddress.ip_address(text)) == (text in PUBLIC)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("ftp://x.org/a", "begins with https: or http:"),
        ("file:///etc/passwd", "begins with https: or http:"),
        ("//x.org/a", "begins with https: or http:"),
        ("https://user:secret@x.org/a", "without a user and a password"),
        ("https://user@x.org/a", "without a user and a password"),
        ("https:///a", "without a usable host"),
        ("https://x.org\\@127.0.0.1/", "without a u"),
        ("https://x.org:99999/", "is no URL"),
        ("https://[::1", "is no URL"),
        ("https://x_y.org/", "without a usable host"),
        ("https://x.org/a b", "written with %"),
        ("https://x.org/ä", "written with %"),
    ],
)
def test_urls_that_are_not_read(url: str, words: str) -> None:
    with pytest.raises(UrlError, match=words):
        read_url(url)


def test_what_a_url_names() -> None:
    assert read_url("https://X.org./a?b=c#d") == read_url("https://x.org:443/a?b=c")
    found = read_url("http://[::1]:8080/")
    assert (found.host, found.port, found.host_header, found.path) == ("::1", 8080, "[::1]:8080", "/")


@pytest.mark.parametrize(
    ("domain", "url", "allowed"),
    [
        ("x.org", "https://x.org/a", True),
        ("x.org", "http://x.org/a", True),
        ("x.org", "https://x.org:8443/a", False),
        ("x.org:8443", "https://x.org:8443/a", True),
        ("x.org:8443", "https://x.org/a", False),
        ("x.org", "https://a.x.org/a", False),
        ("x.org", "https://evilx.org/a", False),
        ("*.x.org", "https://a.b.x.org/a", True),
        ("*.x.org", "https://x.org/a", False),
        ("*.x.org", "https://x.org.evil.com/a", False),
        ("X.org", "https://x.ORG/a", True),
        ("*", "https://any.where/a", True),
        ("*", "https://any.where:81/a", False),
        ("127.0.0.1:90", "http://127.0.0.1:90/", True),
        ("[::1]:90", "http://[::1]:90/", True),
        ("::1", "http://[::1]/", True),
    ],
)
def test_the_setting_names_hosts_ends_of_hosts_and_ports(domain: str, url: str, allowed: bool) -> None:
    assert is_allowed(read_url(url), domain) == allowed


SPELLINGS = ("127.1", "2130706433", "0x7f000001", "017700000001", "localhost")


@pytest.mark.parametrize("host", SPELLINGS)
async def test_names_and_spellings_of_private_addresses_are_refused(host: str) -> None:
    with pytest.raises(UrlError, match="no host of the public internet"):
        await public_addresses(host, 80, [])


@pytest.mark.parametrize("host", (*SPELLINGS, "a.localhost", "10.1.2.3", "127.0.0.1:8443", "[::1]"))
def test_a_webhook_to_a_private_address_is_refused_before_a_name_is_looked_up(host: str) -> None:
    with pytest.raises(UrlError, match="no host of the public internet"):
        check_target(read_url(f"https://{host}/hooks"), [])


async def test_a_name_with_one_private_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever address would be tried first."""
    answers = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (text, 80)) for text in ("8.8.8.8", "10.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answers)
    with pytest.raises(UrlError, match="no host of the public internet"):
        await public_addresses("mixed.example", 80, [])


async def test_names_whose_servers_do_not_answer_hold_up_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: may_end.wait() and [])
    asked = [asyncio.create_task(public_addresses("slow.example", 443, [])) for _ in range(64)]
    try:
        await asyncio.sleep(0)
        async with asyncio.timeout(30):
            assert await asyncio.to_thread(lambda: "read") == "read"
    finally:
        may_end.set()
        found = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(one, UrlError) for one in found)


async def test_an_address_that_the_setting_names_may_be_private() -> None:
    assert await public_addresses("127.0.0.1", 80, ["127.0.0.1"]) == ["127.0.0.1"]
    with pytest.raises(UrlError, match="no host of the public internet"):
        await public_addresses("localhost", 80, ["127.0.0.1"])


# --- fetch --------------------------------------------------------------------------------------------------

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


# --- layouts ------------------------------------------------------------------------------------------------

NUM_SIZES = 30
Made = tuple[Any, PictureLayout]
EDGES = (1, 7, 13, 27, 28, 29, 55, 56, 57, 84, 112, 113, 640)
"""Around the borders of tiles and resolutions."""
DEFAULTS: dict[str, dict[str, Any]] = {
    "idefics3": {"size": {"longest_edge": 1456}, "max_image_size": {"longest_edge": 364}},
    "qwen2_vl": {"patch_size": 14, "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}},
}
"""Options of hub models."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Made]:
    known: dict[tuple[str, str], Made] = {}

    def make(family: str, options: str = "{}") -> Made:
        if (family, options) in known:
            return known[family, options]
        folder = tmp_path_factory.mktemp(family)
        processor = make_processor(family, folder, **json.loads(options))
        layout = read_layout(folder)
        assert layout is not None
        known[family, options] = processor, layout
        return processor, layout

    return make


def sizes_of(seed: int) -> list[Size]:
    chosen = random.Random(seed)
    edges = [chosen.choice([*EDGES, chosen.randint(1, 640)]) for _ in range(2 * NUM_SIZES)]
    sizes = zip(edges[::2], edges[1::2], strict=True)
    return [(height, width) for height, width in sizes if max(height, width) <= 200 * min(height, width)]


def our_ids(processor: Any, layout: PictureLayout, text: str, sizes: list[Size]) -> list[int]:
    pictures = [layout.picture_text(size, len(sizes)) for size in sizes]
    found: list[int] = processor.tokenizer(expanded(text, layout.marker, pictures))["input_ids"]
    spans = placed(found, layout, ["digest"] * len(sizes), pictures)
    assert [found[one.start] for one in spans] == [layout.placeholder_id] * len(sizes)
    assert sum(one.num_tokens for one in spans) >= found.count(layout.placeholder_id)
    return found


@pytest.mark.parametrize("family", CLASSES)
def test_one_picture_of_any_size(made: Callable[..., Made], family: str) -> None:
    processor, layout = made(family)
    text = f"What is\n{layout.inline}this?\n\n"
    for size in sizes_of(1):
        assert our_ids(processor, layout, text, [size]) == processed_ids(processor, text, [size]), size


@pytest.mark.parametrize("family", CLASSES)
def test_several_pictures_in_one_prompt(made: Callable[..., Made], family: str) -> None:
    processor, layout = made(family)
    text = f"{layout.inline}{layout.inline} and {layout.inline}"
    sizes = sizes_of(2)
    for trio in zip(sizes[::3], sizes[1::3], sizes[2::3], strict=False):
        assert our_ids(processor, layout, text, [*trio]) == processed_ids(processor, text, trio), trio


@pytest.mark.parametrize("family", DEFAULTS)
def test_options_of_hub_models(made: Callable[..., Made], family: str) -> None:
    processor, layout = made(family, json.dumps(DEFAULTS[family]))
    for size in [(48, 64), (364, 365), (900, 1600), (1, 100)]:
        assert our_ids(processor, layout, layout.inline, [size]) == processed_ids(
            processor, layout.inline, [size]
        ), size


def test_a_picture_that_is_too_narrow_is_refused(made: Callable[..., Made]) -> None:
    _, layout = made("qwen2_vl")
    with pytest.raises(PictureError, match="has 10 x 2010 pixels: no edge may be 200 times the other"):
        layout.picture_text((2010, 10), 1)


def test_a_prompt_has_a_marker_for_each_picture_and_no_other_placeholder(made: Callable[..., Made]) -> None:
    processor, layout = made("qwen2_vl")
    picture = layout.picture_text((28, 28), 1)
    with pytest.raises(PictureError, match=r"the prompt has 2 times .* for 1 pictures"):
        expanded(layout.inline * 2, layout.marker, [picture])
    ids = processor.tokenizer(layout.inline + picture)["input_ids"]
    with pytest.raises(PictureError, match="the prompt has 5 placeholders, and its pictures need 4"):
        placed(ids, layout, ["digest"], [picture])


def test_the_placeholder_is_the_one_of_the_config_or_has_the_usual_text(tmp_path: Path) -> None:
    make_processor("qwen2_vl", tmp_path)
    known = read_layout(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_vl"}')
    found = read_layout(tmp_path)
    assert known is not None and found is not None and vars(found) == vars(known)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_vl", "image_token_id": 99999}')
    with pytest.raises(SettingError, match="has no token for pictures: none has the id 99999"):
        read_layout(tmp_path)


# --- source -------------------------------------------------------------------------------------------------

DATA = "data:image/png;base64,AAAA"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a", [("a", "")]),
        (f"![]({DATA})", [("", DATA), ("", "")]),
        (f"a ![]({DATA})![](https://x/y) b", [("a ", DATA), ("", "https://x/y"), (" b", "")]),
        ("![a](https://x/y) ![](x/y) ![]", [("![a](https://x/y) ![](x/y) ![]", "")]),
        (f"![](x ![]({DATA}) ![](http://x", [("![](x ", DATA), (" ![](http://x", "")]),
    ],
)
def test_pictures_of_a_text(text: str, parts: list[tuple[str, str]]) -> None:
    assert [*split_text(text)] == parts


def test_a_text_of_beginnings_takes_no_longer_than_another() -> None:
    """Looking for each one's end to the end of the text would take minutes."""
    text = "![](data:" * 500_000
    assert [*split_text(text)] == [(text, "")]


# --- pictures as bytes --------------------------------------------------------------------------------------


def picture(
    kind: str = "PNG", size: tuple[int, int] = (6, 4), mode: str = "RGB", orientation: int = 1
) -> bytes:
    image = Image.effect_noise(size, 80).convert(mode)
    exif = Image.Exif()
    exif[0x0112] = orientation
    target = io.BytesIO()
    image.save(target, kind, **({"exif": exif} if kind in ("JPEG", "PNG", "WEBP") else {}))
    return target.getvalue()


@pytest.mark.parametrize("kind", FORMATS)
def test_size_and_pixels_of_each_format(kind: str) -> None:
    content = picture(kind)
    assert read_size(content) == (4, 6)
    assert decoded(content).size == (6, 4)
    assert decoded(content).mode == "RGB"


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_is_upright_as_transformers_has_it(orientation: int, tmp_path: Path) -> None:
    content = picture("JPEG", orientation=orientation)
    path = tmp_path / "picture.jpg"
    path.write_bytes(content)
    expected = load_image(str(path))
    height, width = read_size(content)
    assert (width, height) == expected.size
    assert numpy.array_equal(numpy.asarray(decoded(content)), numpy.asarray(expected))


@pytest.mark.parametrize("mode", ("P", "RGBA", "1", "CMYK"))
def test_other_modes_become_rgb(mode: str) -> None:
    assert decoded(picture("TIFF", mode=mode)).mode == "RGB"


def test_the_first_frame_of_an_animation_counts() -> None:
    frames = [Image.new("RGB", (6, 4), color) for color in ("red", "blue")]
    target = io.BytesIO()
    frames[0].save(target, "GIF", save_all=True, append_images=frames[1:])
    assert decoded(target.getvalue()).getpixel((0, 0)) == (255, 0, 0)


@pytest.mark.parametrize(
    "content", (b"", b"<svg/>", b"%PDF-1.7", b"\x89PNG\r\n\x1a\n", b"GIF89a", bytes(1000))
)
def test_what_is_no_picture_is_refused(content: bytes) -> None:
    with pytest.raises(PictureError, match="is no picture of a known format"):
        read_size(content)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_picture_that_ends_too_early_is_refused(kind: str) -> None:
    """Whatever is cut off: nothing but a PictureError comes out."""
    content = picture(kind, size=(64, 64))
    for length in range(0, len(content) // 2, max(1, len(content) // 97)):
        with pytest.raises(PictureError):
            decoded(content[:length])
    check_pixels(content)
    with pytest.raises(PictureError, match=r"is damaged|is no picture"):
        check_pixels(content[: len(content) // 2])


def test_a_header_with_too_many_pixels_is_read_without_decoding() -> None:
    """A bomb: a small file of a giant picture. Pillow's own bound is far above that of the gateway."""
    target = io.BytesIO()
    Image.new("1", (12_000, 12_000)).save(target, "PNG")
    assert len(target.getvalue()) < 50_000
    assert read_size(target.getvalue()) == (12_000, 12_000)
    header = bytearray(picture())
    header[16:24] = (100_000).to_bytes(4, "big") * 2
    header[29:33] = zlib.crc32(header[12:29]).to_bytes(4, "big")
    with pytest.raises(PictureError, match="has too many pixels"):
        read_size(bytes(header))
