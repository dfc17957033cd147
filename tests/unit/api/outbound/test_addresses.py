"""Addresses: only public hosts that the setting allows, read the same way by all who read a URL."""

import asyncio
import ipaddress
import socket
import threading

import pytest

from api.outbound.addresses import UrlError, is_allowed, is_public, public_addresses, read_url

PRIVATE = """
127.0.0.1 127.8.9.1 0.0.0.0
10.1.2.3 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 100.100.100.200 192.0.0.8
198.18.0.1 224.0.0.1 240.0.0.1 255.255.255.255 192.0.2.1
::1 :: fe80::1 fc00::1 fd00:ec2::254 ff02::1 2001:db8::1 fec0::1
::ffff:127.0.0.1 ::ffff:169.254.169.254 ::ffff:a00:1 64:ff9b::7f00:1 64:ff9b::a9fe:a9fe 64:ff9b:1::1
2002:7f00:1:: 2002:a9fe:a9fe:: 2001:0:0:0:0:0:80ff:fffe
""".split()
PUBLIC = "8.8.8.8 93.184.216.34 2606:4700::1111 ::ffff:8.8.8.8 64:ff9b::808:808".split()


@pytest.mark.parametrize("text", PRIVATE)
def test_addresses_of_machines_networks_and_clouds_are_not_public(text: str) -> None:
    assert not is_public(ipaddress.ip_address(text))


@pytest.mark.parametrize("text", PUBLIC)
def test_others_are_public(text: str) -> None:
    assert is_public(ipaddress.ip_address(text))


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


@pytest.mark.parametrize("host", ("127.1", "2130706433", "0x7f000001", "017700000001", "localhost"))
async def test_names_and_spellings_of_private_addresses_are_refused(host: str) -> None:
    with pytest.raises(UrlError, match="no host of the public internet"):
        await public_addresses(host, 80, [])


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
