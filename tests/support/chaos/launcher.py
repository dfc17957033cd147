"""Launcher of a fleet for chaos: `tokenfleet serve` whose gateways reach the broker through a proxy if there
is one, whose broker can be set back, and whose workers have no model where CHAOS_STEP_MS is set.

It writes socket and directory of the broker to DIRECTORY/broker.
"""

import json
import os
import sys
from pathlib import Path
from unittest.mock import patch

import setproctitle

from common.process import logs
from common.process.launch import die_with_parent
from common.process.startup import exit_when_unservable
from common.settings.settings import Settings
from deploy.launcher import launcher
from deploy.launcher.embedded_broker import Broker
from deploy.launcher.fleet import LocalFleet, command, new_fleet
from tests.support.chaos.broker import CUT_TO
from tests.support.chaos.engine import STEP_MS

DIRECTORY, PROXY_URL = "CHAOS_DIRECTORY", "CHAOS_PROXY_URL"
ADDRESS = "broker.json"


def chaos_fleet(settings: Settings, broker: Broker | None) -> LocalFleet:
    directory = Path(os.environ[DIRECTORY])
    if broker is not None:
        files = broker.directory / "appendonlydir"
        (directory / ADDRESS).write_text(
            json.dumps({"url": broker.url, "socket": str(broker.socket_path), "files": str(files)})
        )
    fleet = new_fleet(settings, broker)
    for process in fleet.brokers:
        process.command = [*command("tests.support.chaos.broker"), str(directory / CUT_TO), *process.command]
    for process in fleet.gateways if PROXY_URL in os.environ else ():
        process.environ = process.environ | {"REDIS_URL": os.environ[PROXY_URL]}
    if STEP_MS in os.environ:
        for process in fleet.workers:
            process.command = command("tests.support.chaos.worker")
    return fleet


if __name__ == "__main__":
    die_with_parent()
    setproctitle.setproctitle("tokenfleet serve")
    with exit_when_unservable(), patch("deploy.launcher.launcher.new_fleet", chaos_fleet):
        settings = Settings.read([])
        logs.set_up("serve", settings.log_level, settings.json_output)
        sys.exit(launcher.serve(settings))
