"""Refusal: the end of a process whose settings cannot be served."""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator

from common.process import logs
from common.settings.types import SettingError

log = logging.getLogger(__name__)

YES = ("true", "1", "yes", "on", "t", "y")


@contextlib.contextmanager
def exit_when_unservable() -> Iterator[None]:
    """End this process at a SettingError, with one line and EX_CONFIG (78), by which the launcher knows that
    it was a setting. With JSON_OUTPUT the line is one of the log.
    """
    try:
        yield
    except SettingError as error:
        set_up_json()
        if logs.are_json():
            log.error("%s", error)
        else:
            print(f"tokenfleet: {error}", file=sys.stderr, flush=True)
        sys.exit(os.EX_CONFIG)


def set_up_json() -> None:
    """Set up logging where JSON_OUTPUT asks for it and this process had no time to: settings come first."""
    if not logs.are_json() and os.environ.get("JSON_OUTPUT", "").strip().lower() in YES:
        name = os.environ.get("PROCESS_NAME", "tokenfleet")
        logs.set_up(name, "error", as_json=True, incarnation=os.environ.get("INCARNATION", ""))
