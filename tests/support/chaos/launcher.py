"""A fleet for chaos, and its launcher: `tokenfleet serve` whose broker can be set back, and whose workers
have no model where CHAOS_STEP_MS is set. It writes URL and files of the broker to DIRECTORY/broker.json.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import setproctitle

from common.process import logs
from common.process.launch import die_with_parent
from common.process.startup import exit_when_unservable
from common.settings.settings import Settings
from deploy.launcher import launcher
from deploy.launcher.embedded_broker import Broker
from deploy.launcher.launcher import LocalFleet, command, new_fleet
from tests.support.chaos.broker import CUT_TO
from tests.support.chaos.engine import BLOCKS, NUM_BLOCKS, STEP_MS
from tests.support.fleet.fleet import Fleet

ROOT = Path(__file__).parents[3]
DIRECTORY = "CHAOS_DIRECTORY"
ADDRESS = "broker.json"


class ChaosFleet(Fleet):
    """`step_ms`, `num_blocks`: of engines without a model; None runs the real ones."""

    command = ("tests.support.chaos.launcher",)

    def __init__(self, step_ms: float | None, num_blocks: int = NUM_BLOCKS, **settings: Any) -> None:
        super().__init__(**{"pythonpath": ROOT, "preload": True} | settings)
        self.settings |= {DIRECTORY: self.directory, STEP_MS: step_ms, BLOCKS: num_blocks}

    @property
    def broker(self) -> dict[str, Any]:
        """Return URL and files of the broker."""
        found: dict[str, Any] = json.loads((self.directory / ADDRESS).read_text())
        return found

    @property
    def redis_url(self) -> str:
        """The URL of the broker itself, whether or not it runs."""
        return str(self.settings.get("redis_url") or self.broker["url"])


def chaos_fleet(settings: Settings, broker: Broker | None) -> LocalFleet:
    directory = Path(os.environ[DIRECTORY])
    if broker is not None:
        files = broker.directory / "appendonlydir"
        (directory / ADDRESS).write_text(json.dumps({"url": broker.url, "files": str(files)}))
    if STEP_MS in os.environ:
        del launcher.TEMPLATES["worker"]
    fleet = new_fleet(settings, broker)
    for process in fleet.brokers:
        process.command = [*command("tests.support.chaos.broker"), str(directory / CUT_TO), *process.command]
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
