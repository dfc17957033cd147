"""The broker of a fleet, as commands that speak to it without a gateway find it."""

import argparse
import os

import setproctitle

from common.settings.settings import Settings
from deploy.launcher import prepare
from deploy.launcher.embedded_broker import running_url


def add_redis_url(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--redis-url",
        metavar="URL",
        help="the fleet's broker (default: REDIS_URL, or that of the `tokenfleet serve` on this machine)",
    )


def broker_settings(command: str, **given: str | None) -> Settings:
    """Settings with the URL of the fleet's broker, which answers. Raises SettingError.

    Args:
        command: shown to other users of the machine from now on, in place of the command line: a password may
            be in it.
        given: settings by name, from flags; where one is None its variable counts.
    """
    setproctitle.setproctitle(command)
    settings = Settings.read([], {name: text or os.environ.get(name, "") for name, text in given.items()})
    if settings.redis_url is None:
        settings = settings.model_copy(update={"redis_url": running_url()})
    prepare.check_broker(settings)
    return settings
