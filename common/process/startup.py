"""Startup: what every process of a fleet does first.

It gets its name and is bound to its parent; then come logs, the broker's URL and the port of its metrics.
"""

import os
from dataclasses import dataclass

import setproctitle

from common.broker import client
from common.metrics import http
from common.process import logs, parent_death, readiness
from common.process.incarnations import new_incarnation
from common.settings.settings import Settings


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """Names of this process.

    Attributes:
        name: its place in the fleet, as `w0`; a process that replaces it has the same.
        incarnation: unique; a process that replaces it has another.
    """

    name: str
    incarnation: str


def start_process(kind: str, name: str) -> ProcessIdentity:
    """Bind this process to its parent, and show its kind and name in `ps`.

    The launcher gives its name in PROCESS_NAME; without that it is `name`.
    """
    parent_death.die_with_parent()
    name = os.environ.get("PROCESS_NAME", name)
    setproctitle.setproctitle(f"tokenfleet {kind} {name}")
    return ProcessIdentity(name, os.environ.get("INCARNATION") or new_incarnation(name))


def configure_process(own: ProcessIdentity, settings: Settings) -> None:
    """Set up logging, and serve this process's metrics. Raises SettingError."""
    logs.set_up(own.name, settings.log_level, settings.json_output, own.incarnation)
    client.broker_url(settings)
    http.start_metrics_server(settings, readiness.READY.is_set)
