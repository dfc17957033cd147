"""Target: the fleet that a command acts on, found by one rule for all commands.

1. The fleet that was named: by a flag (--url, --redis-url, --pid), else by PORT or REDIS_URL.
2. Else the fleet that `tokenfleet serve` runs from this folder.
3. Else the only one that this user runs from another folder; a command that changes something must name it.
4. Else, for commands that ask a gateway, port 3000.

A choice that no flag has made is printed to stderr.
"""

import contextlib
import os
import sys
from typing import Any
from urllib.parse import urlsplit

from common.broker.directory import address_of
from common.settings.settings import SettingError, Settings
from deploy.launcher.control_socket import RunningFleet, current_folder, running_fleets

VARIABLES = {
    "--url": ("PORT",),
    "--redis-url": ("REDIS_URL",),
    "--directory-url": ("DIRECTORY_URL", "REDIS_URL"),
    "--pid": (),
}
"""The flag that names a fleet → the variables that may name it, too, the first one before the others."""


def find(flag: str, given: Any, changes: bool) -> tuple[str, RunningFleet | None]:
    """What a flag names of the fleet, as its URL or the process id of its launcher; and the fleet itself,
    where one was searched for. Raises SettingError.

    Args:
        given: what the flag says; None where it is not there.
        changes: whether the command changes something, or loads the fleet.
    """
    if given is not None:
        return str(given), None
    field = flag.removeprefix("--").replace("-", "_")
    shown = address_of if field.endswith("_url") else str
    environ = {name: os.environ.get(name, "") for name in VARIABLES[flag]}
    settings = Settings.read([], environ)
    local = f"http://127.0.0.1:{settings.port}"
    for name in filter(environ.get, environ):
        text = local if name == "PORT" else str(getattr(settings, name.lower()))
        with contextlib.suppress(ValueError):  # what is no URL is refused by who connects to it
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
    none = "no `tokenfleet serve` of this user runs on this machine"
    if flag != "--url":
        raise SettingError(flag, f"is missing, and {none}")
    announce(local, f"the default, since {none}")
    return local, None


def announce(address: str, why: str) -> None:
    print(f"tokenfleet: {address} ({why})", file=sys.stderr, flush=True)
