"""Addresses of brokers: a broker's URL without what only its clients may know, and the way back.

The directory has addresses. Who opens a pool on another broker uses the user, password and options of its own
REDIS_URL, or the URL that POOL_URLS gives for the pool.
"""

import re
from urllib.parse import parse_qsl, urlencode

from common.settings.settings import SettingError, Settings

URL = re.compile(r"(?P<scheme>[^:]+)://(?:(?P<user>[^@?]*)@)?(?P<place>[^?]*)(?:\?(?P<options>.*))?")
DATABASE = "db"
"""The option that says where keys are, not how to reach the broker."""


def address_of(url: str) -> str:
    """The URL without user, password and options."""
    scheme, _, place, options = split(url)
    return join(scheme, "", place, {name: text for name, text in options.items() if name == DATABASE})


def url_at(address: str, own_url: str) -> str:
    """The URL by which a process that reaches `own_url` reaches the broker at `address`.

    Raises ValueError where the password would leave a broker with TLS for one without.
    """
    if address == address_of(own_url):
        return own_url
    scheme, user, _, own_options = split(own_url)
    their_scheme, _, place, options = split(address)
    if user and scheme.startswith("rediss") and their_scheme in ("redis", "redis+sentinel"):
        raise ValueError("it has no TLS, and REDIS_URL has: the password is not sent in clear")
    if scheme == their_scheme:
        options = {name: text for name, text in own_options.items() if name != DATABASE} | options
    return join(their_scheme, user, place, options)


def pool_url(settings: Settings, pool: str, address: str) -> str:
    """The URL of another pool's broker. Raises SettingError if there is no safe way to reach it."""
    if (given := settings.urls_of_pools.get(pool)) is not None:
        return given
    try:
        return url_at(address, settings.redis_url or "")
    except ValueError as error:
        cause = f"must name the broker of pool {pool!r}: by the directory it is at {address}, and {error}"
        raise SettingError("pool_urls", cause) from error


def split(url: str) -> tuple[str, str, str, dict[str, str]]:
    """Scheme, user (with its password), place and options of a URL. Raises ValueError."""
    if (found := URL.fullmatch(url)) is None:
        raise ValueError("no URL")
    return found["scheme"], found["user"] or "", found["place"], dict(parse_qsl(found["options"] or ""))


def join(scheme: str, user: str, place: str, options: dict[str, str]) -> str:
    return f"{scheme}://{f'{user}@' if user else ''}{place}{f'?{urlencode(options)}' if options else ''}"
