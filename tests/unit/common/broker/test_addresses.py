"""What the directory says of a broker's URL, and how a gateway reaches it."""

import pytest

from api.requests.pool import pool_url, url_at
from common.broker.directory import address_of
from common.settings.settings import SettingError, Settings


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://user:secret@host:6379/2", "redis://host:6379/2"),
        ("rediss://:secret@host?ssl_ca_certs=/ca.pem&db=3&password=secret", "rediss://host?db=3"),
        ("unix:///run/redis/socket?password=secret", "unix:///run/redis/socket"),
        ("unix://user:secret@/run/socket", "unix:///run/socket"),
        (
            "redis+sentinel://u:secret@h1:26379,h2/service/1?sentinel_password=secret",
            "redis+sentinel://h1:26379,h2/service/1",
        ),
        ("redis://u:p%40ss%2F@host", "redis://host"),
    ],
)
def test_an_address_has_no_credentials(url: str, address: str) -> None:
    assert address_of(url) == address
    assert "secret" not in address


@pytest.mark.parametrize(
    ("address", "own", "url"),
    [
        ("redis://b:6379", "redis://u:secret@a:6379/1", "redis://u:secret@b:6379"),
        ("redis://b", "redis://a", "redis://b"),
        (
            "rediss://b/2",
            "rediss://:secret@a/1?ssl_ca_certs=/ca.pem&db=5",
            "rediss://:secret@b/2?ssl_ca_certs=%2Fca.pem",
        ),
        ("rediss://b", "redis://:secret@a?socket_timeout=3", "rediss://:secret@b"),
        ("redis://a:6379/1", "redis://u:secret@a:6379/1?x=y", "redis://u:secret@a:6379/1?x=y"),
        ("unix:///run/b", "unix:///run/a", "unix:///run/b"),
    ],
)
def test_a_gateway_uses_its_own_credentials(address: str, own: str, url: str) -> None:
    assert url_at(address, own) == url


@pytest.mark.parametrize("address", ["redis://b", "redis+sentinel://b/service"])
def test_a_password_does_not_leave_a_broker_with_tls_for_one_without(address: str) -> None:
    settings = Settings(redis_url="rediss://:secret@a")
    with pytest.raises(SettingError) as refusal:
        pool_url(settings, "other", address)
    assert "POOL_URLS" in str(refusal.value) and "secret" not in str(refusal.value)
    assert url_at(address, "rediss://a") == address


def test_the_url_of_a_pool_may_be_set() -> None:
    settings = Settings.read(
        ["--pool-urls", "b=redis+sentinel://:other@h1,h2:5/service,c=redis://:third@c/0?db=1"],
        {"REDIS_URL": "redis://:own@a"},
    )
    assert pool_url(settings, "b", "redis://elsewhere") == "redis+sentinel://:other@h1,h2:5/service"
    assert pool_url(settings, "c", "redis://elsewhere") == "redis://:third@c/0?db=1"
    assert pool_url(settings, "d", "redis://d") == "redis://:own@d"
    assert Settings.read([], settings.environ()) == settings


@pytest.mark.parametrize("word", ["b", "b=host", "=redis://:secret@b"])
def test_a_pool_without_a_url_is_refused(word: str) -> None:
    with pytest.raises(SettingError, match="POOL_URLS") as refusal:
        Settings.read(["--pool-urls", word], {})
    assert "secret" not in str(refusal.value)
