"""Startup: what every process of a fleet does first.

It gets its name and is bound to its parent; then come logs, the broker's URL and the port of its metrics.
"""

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module

import setproctitle

from common import tracing
from common.broker import client
from common.metrics import exposition
from common.process import launch, logs
from common.process.logs import new_incarnation
from common.settings.fields import SettingError
from common.settings.settings import Settings

log = logging.getLogger(__name__)

READY = threading.Event()
"""Whether `GET /health` at METRICS_PORT says ready. It is set once a worker has joined its pool, or a
batcher has asked for the lease. A gateway has `GET /health` at its own port.
"""


@contextlib.contextmanager
def exit_when_unservable() -> Iterator[None]:
    """End this process at a SettingError, with one line and the status EX_CONFIG (78), which tells the
    launcher that a setting is at fault. Once logs are JSON, the line is one of the log.
    """
    try:
        yield
    except SettingError as error:
        if any(isinstance(handler.formatter, logs.JsonFormatter) for handler in logging.root.handlers):
            log.error("%s", error)
        else:
            print(f"tokenfleet: {error}", file=sys.stderr, flush=True)
        sys.exit(os.EX_CONFIG)


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
    launch.die_with_parent()
    name = os.environ.get("PROCESS_NAME", name)
    setproctitle.setproctitle(f"tokenfleet {kind} {name}")
    return ProcessIdentity(name, os.environ.get("INCARNATION") or new_incarnation(name))


def configure_process(own: ProcessIdentity, settings: Settings) -> None:
    """Set up logging, and serve this process's metrics. Raises SettingError."""
    logs.set_up(own.name, settings.log_level, settings.json_output, own.incarnation)
    client.broker_url(settings)
    exposition.start_metrics_server(settings, READY.is_set)


@contextlib.contextmanager
def exporting_spans(settings: Settings, incarnation: str) -> Iterator[None]:
    """Export the spans of this process while the context is open, if that is wanted. Raises SettingError."""
    if not tracing.is_wanted(settings, os.environ):
        yield
        return
    tracing.exporter = exporter = import_module("common.otlp").OtlpExporter(settings, incarnation)
    try:
        yield
    finally:
        exporter.close()
        tracing.exporter = None
