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

RULE = "else the fleet of this folder's `tokenfleet serve`, else this user's only one on this machine"


def find_server(flags: argparse.Namespace, changes: bool = False) -> str:
    """The URL of the fleet's gateways. Raises SettingError.

    Args:
        changes: whether the command changes something, or loads the fleet.
    """
    if flags.url is not None:
        return str(flags.url)
    port = Settings.read([], {"PORT": os.environ.get("PORT", "")}).port
    url = f"http://127.0.0.1:{port}"
    if os.environ.get("PORT"):
        announce(url, "PORT names it")
    elif fleet := choose("--url", {one.url: one for one in running_fleets() if one.url}, changes):
        return fleet.url
    else:
        announce(url, "the default, since no `tokenfleet serve` of this user runs on this machine")
    return url


def find_broker(changes: bool, redis_url: str | None, pool: str | None = None) -> Settings:
    """Settings with the URL of the fleet's broker, which answers, and with its pool. Raises SettingError.

    Args:
        redis_url, pool: from flags.
    """
    given = {"REDIS_URL": redis_url or os.environ.get("REDIS_URL", "")}
    given |= {"POOL": pool or os.environ.get("POOL", "")}
    settings = Settings.read([], given)
    if settings.redis_url is None:
        fleet = choose_broker("redis_url", "--redis-url", changes)
        own_pool = {} if given["POOL"] else {"pool": fleet.pool}
        settings = settings.model_copy(update={"redis_url": fleet.redis_url, **own_pool})
    elif redis_url is None:
        announce(address_of(settings.redis_url), "REDIS_URL names it")
    prepare.check_broker(settings)
    return settings


def find_directory(directory_url: str | None, changes: bool) -> str:
    """The URL of the broker with the directory of pools. Raises SettingError."""
    if directory_url is not None:
        return directory_url
    names = ("DIRECTORY_URL", "REDIS_URL")
    settings = Settings.read([], {name: os.environ.get(name, "") for name in names})
    for name in names:
        if url := getattr(settings, name.lower()):
            announce(address_of(url), f"{name} names it")
            return str(url)
    return choose_broker("directory_url", "--directory-url", changes).directory_url


def find_launcher(pid: int | None) -> int:
    """The process id of the fleet's launcher. Raises SettingError."""
    if pid is not None:
        return pid
    fleet = choose("--pid", {str(one.pid): one for one in running_fleets()}, changes=True)
    if fleet is None:
        raise SettingError("--pid", "is missing, and no fleet of this user runs on this machine")
    return fleet.pid


def choose_broker(field: str, flag: str, changes: bool) -> RunningFleet:
    """A running fleet, by its broker, whose URL is in `field`. Raises SettingError."""
    fleets = {address_of(getattr(one, field)): one for one in running_fleets() if getattr(one, field)}
    if fleet := choose(flag, fleets, changes):
        return fleet
    raise SettingError(field, "is not set, and no `tokenfleet serve` of this user runs on this machine")


def choose(flag: str, fleets: Mapping[str, RunningFleet], changes: bool) -> RunningFleet | None:
    """The fleet of this folder, else the only one. Raises SettingError.

    Args:
        flag: what names a fleet.
        fleets: by the value of the flag, as it may be shown.
    """
    if port := os.environ.get("PORT"):
        fleets = {name: one for name, one in fleets.items() if str(urlsplit(one.url).port or port) == port}
    folder = current_folder()
    here = {name: one for name, one in fleets.items() if folder and one.folder == folder}
    found = here or fleets
    if len(found) > 1:
        raise SettingError(flag, f"is missing, and several fleets run: {describe_all(found)}")
    for name, fleet in found.items():
        if here:
            announce(name, "the fleet of this folder")
        else:
            if changes:
                cause = f"is missing: this folder runs no fleet; that of {fleet.folder} has {flag} {name}"
                raise SettingError(flag, cause)
            announce(name, f"the fleet of {fleet.folder}; this folder runs none")
        return fleet
    return None


def announce(address: str, why: str) -> None:
    print(f"tokenfleet: {address} ({why})", file=sys.stderr, flush=True)


def describe_all(fleets: Mapping[str, RunningFleet]) -> str:
    return ", ".join(f"{name} ({one.title} in {one.folder})" for name, one in fleets.items())
