"""How every process of a fleet begins: with a name, bound to its parent; then with logs, a broker and a port
for its figures.
"""

import os
import secrets
from dataclasses import dataclass

import setproctitle

from common.broker import client
from common.metrics import http
from common.process import logs, parent_death
from common.settings.settings import Settings


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """What this process is called.

    Attributes:
        name: its place in the fleet, as `w0`; whoever follows it has the same.
        incarnation: this one life.
    """

    name: str
    incarnation: str


def start_process(kind: str, name: str) -> ProcessIdentity:
    """From now on this process ends with its parent, and `ps` shows its kind and name: those that the
    launcher gave it, else `name`.
    """
    parent_death.die_with_parent()
    name = os.environ.get("PROCESS_NAME", name)
    setproctitle.setproctitle(f"tokenfleet {kind} {name}")
    return ProcessIdentity(name, os.environ.get("INCARNATION") or f"{name}-{secrets.token_hex(4)}")


def configure_process(own: ProcessIdentity, settings: Settings) -> None:
    """Sets up logging, and shows this process's own figures. Raises SettingError."""
    logs.set_up(own.name, settings.log_level, settings.json_output)
    client.broker_url(settings)
    http.start_metrics_server(settings)
