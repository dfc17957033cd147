"""`tokenfleet roll`: replaces the processes of a fleet on this machine one by one."""

import argparse
import asyncio
from collections.abc import Sequence
from functools import partial

import setproctitle

from common.settings import flags
from common.settings.flags import FlagParser
from common.settings.settings import SettingError, Settings
from deploy.cli.client import ServerError, print_error
from deploy.cli.target import RULE, find_launcher
from deploy.launcher import control_socket

DESCRIPTION = """
Replace the processes of the `tokenfleet serve` or `tokenfleet supervise` of this folder one by one: with the
files of Tokenfleet as they are now, and with the settings given here. Streams go on: a worker's successor is
ready before the worker hands its requests over and leaves. Where a GPU has no room for both, the worker
leaves first. Settings are flags of `tokenfleet serve`, such as --max-batch-size 128; they hold until the
fleet ends. The command ends when all are replaced; Ctrl-C only ends the waiting.
"""


def main(argv: Sequence[str]) -> int:
    """Run the command. Returns 1 if not all was replaced. Raises SettingError."""
    parser = FlagParser(
        prog="tokenfleet roll",
        allow_abbrev=False,
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--pid", type=int, help=f"the launcher's process (default: {RULE})")
    own, rest = parser.parse_known_args(list(argv))
    setproctitle.setproctitle("tokenfleet roll")  # other users can read a command line
    order = {"settings": given_settings(rest)}
    pid = find_launcher(own.pid)
    try:
        asyncio.run(control_socket.order(pid, order, partial(print, flush=True)))
    except control_socket.OrderFailed as error:
        return print_error(ServerError(str(error)))
    return 0


def given_settings(words: Sequence[str]) -> dict[str, str]:
    """Return the variables that flags stand for. Raises SettingError."""
    given = flags.read(words, {}, "tokenfleet roll")
    for name, value in given.items():
        if name not in Settings.model_fields:
            raise SettingError(value.name, "is no setting of Tokenfleet itself, so a roll cannot change it")
    return {name.upper(): value.text for name, value in given.items()}
