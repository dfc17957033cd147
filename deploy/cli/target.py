"""Target: the fleet that a command acts on, found by one rule for all commands.

1. The fleet that was named: by a flag (--url, --redis-url, --pid), else by PORT or REDIS_URL.
2. Else the fleet that `tokenfleet serve` runs from this folder.
3. Else the only one that this user runs from another folder; a command that changes something must name it.
4. Else, for commands that ask a gateway, port 3000.

A choice that no flag has made is printed to stderr.
"""

import argparse
import os
import sys
from collections.abc import Mapping
from urllib.parse import urlsplit

from common.broker.directory import address_of
from common.settings.settings import SettingError, Settings
from deploy.launcher import prepare
from deploy.launcher.control_socket import RunningFleet, current_folder, running_fleets


def find_server(flags: argparse.Namespace, changes: bool = False) -> str:
    """The URL of the fleet's gateways. Raises SettingError.

    Args:
        changes: whether the command changes something, or loads the fleet.
    """
    given = os.environ.get("PORT", "")
    url = f"http://127.0.0.1:{Settings.read([], {'PORT': given}).port}"
    named = {"--url": flags.url, "PORT": url if given else None}
    return find("url", named, changes, default=url)[0]


def find_broker(changes: bool, redis_url: str | None, pool: str | None = None) -> Settings:
    """Settings with the URL of the fleet's broker, which answers, and with its pool. Raises SettingError.

    Args:
        redis_url, pool: from flags.
    """
    given = {"REDIS_URL": redis_url, "POOL": pool}
    settings = Settings.read([], {name: flag or os.environ.get(name, "") for name, flag in given.items()})
    url = settings.redis_url
    named = {"--redis-url": url if redis_url else None, "REDIS_URL": url}
    url, fleet = find("redis_url", named, changes)
    if fleet is not None:
        own = settings.pool if pool or os.environ.get("POOL") else fleet.pool
        settings = settings.model_copy(update={"redis_url": url, "pool": own})
    prepare.check_broker(settings)
    return settings


def find_directory(directory_url: str | None, changes: bool) -> str:
    """The URL of the broker with the directory of pools. Raises SettingError."""
    names = ("DIRECTORY_URL", "REDIS_URL")
    settings = Settings.read([], {name: os.environ.get(name, "") for name in names})
    named = {"--directory-url": directory_url, names[0]: settings.directory_url, names[1]: settings.redis_url}
    return find("directory_url", named, changes)[0]


def find_launcher(pid: int | None) -> int:
    """The process id of the fleet's launcher. Raises SettingError."""
    return int(find("pid", {"--pid": None if pid is None else str(pid)}, changes=True)[0])


def find(
    field: str, named: Mapping[str, str | None], changes: bool, default: str = ""
) -> tuple[str, RunningFleet | None]:
    """A field of the fleet: that which is named; else that of this folder's, else of the only one, which is
    returned with it. Raises SettingError.

    Args:
        named: what may name it → the field; the first one is a flag.
        default: the field if there is no fleet.
    """
    shown = address_of if field.endswith("_url") else str
    flag, *_ = named
    for name, text in named.items():
        if text:
            if name != flag:
                announce(shown(text), f"{name} names it")
            return text, None
    fleets = {shown(getattr(one, field)): one for one in running_fleets() if getattr(one, field)}
    if port := os.environ.get("PORT"):
        fleets = {name: one for name, one in fleets.items() if str(urlsplit(one.url).port or port) == port}
    folder = current_folder()
    here = {name: one for name, one in fleets.items() if folder and one.folder == folder}
    found = here or fleets
    if len(found) > 1:
        known = ", ".join(f"{name} ({one.title} in {one.folder})" for name, one in found.items())
        raise SettingError(flag, f"is missing, and several fleets run: {known}")
    for name, fleet in found.items():
        if changes and not here:
            cause = f"is missing: this folder runs no fleet; that of {fleet.folder} has {flag} {name}"
            raise SettingError(flag, cause)
        other = f"the fleet of {fleet.folder}; this folder runs none"
        announce(name, "the fleet of this folder" if here else other)
        return str(getattr(fleet, field)), fleet
    if not default:
        raise SettingError(flag, "is missing, and no `tokenfleet serve` of this user runs on this machine")
    announce(default, "the default, since no `tokenfleet serve` of this user runs on this machine")
    return default, None


def announce(address: str, why: str) -> None:
    print(f"tokenfleet: {address} ({why})", file=sys.stderr, flush=True)
