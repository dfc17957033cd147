"""`tokenfleet webhooks list|dead|retry`: the events of a running fleet's webhooks."""

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import httpx
from rich.table import Table

from common.settings.flags import FlagParser
from deploy.cli.client import (
    fetch_json,
    frame_errors,
    new_table,
    post,
    print_lines,
    printable,
)
from deploy.cli.target import add_url, run_for

DESCRIPTION = """
Events of webhooks: those that wait to be delivered, and those that were given up (dead). If the fleet has API
keys, API_KEY must be an admin's.
"""
READ_TIMEOUT_S = 30.0


def main(argv: Sequence[str]) -> int:
    """Run the command. Returns 1 on an error. Raises SettingError for an unknown flag."""
    return run_for(new_parser().parse_args(list(argv)), READ_TIMEOUT_S)


def show(client: httpx.Client, flags: argparse.Namespace) -> None:
    content = fetch_json(client, f"/admin/webhooks?state={flags.state}&limit={flags.limit}")
    with frame_errors(content):
        if not content["events"]:
            print(f"no events are {'dead' if flags.state == 'dead' else 'waiting'}")
            return
        print_lines(table(content["events"], flags.state))
        if (hidden := content["total"] - len(content["events"])) > 0:
            print(f"and {hidden} more (--limit)")


def retry(client: httpx.Client, flags: argparse.Namespace) -> None:
    post(client, f"/admin/webhooks/{quote(flags.event_id, safe='')}/retry")
    print(f"{printable(flags.event_id)} is sent now")


def table(events: Sequence[Mapping[str, Any]], state: str) -> Table:
    """A line for each event."""
    shown = new_table()
    for title in (
        "event",
        "type",
        "of",
        "dead since" if state == "dead" else "next",
        "failures",
        "said",
        "url",
    ):
        shown.add_column(title, justify="right" if title == "failures" else "left", no_wrap=title != "said")
    for one in events:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one["at"]))
        cells = (one["id"], one["type"], one["object_id"], at, str(one["failures"]), one["said"], one["url"])
        shown.add_row(*map(printable, cells))
    return shown


def new_parser() -> argparse.ArgumentParser:
    parser = FlagParser(prog="tokenfleet webhooks", allow_abbrev=False, description=DESCRIPTION)
    commands = parser.add_subparsers(required=True, metavar="list|dead|retry", parser_class=FlagParser)
    shared = FlagParser(add_help=False, allow_abbrev=False)
    add_url(shared)
    listed = FlagParser(add_help=False, allow_abbrev=False)
    listed.add_argument("--limit", type=int, default=100, help="most events that are shown (default 100)")
    for word, state, help in (
        ("list", "waiting", "show events that wait to be delivered"),
        ("dead", "dead", "show events that were given up"),
    ):
        command = commands.add_parser(word, parents=[shared, listed], help=help)
        command.set_defaults(run=show, state=state)
    retrying = commands.add_parser("retry", parents=[shared], help="send an event again, now")
    retrying.set_defaults(run=retry, changes=True)
    retrying.add_argument("event_id", metavar="EVENT_ID", help="as `tokenfleet webhooks dead` shows it")
    return parser
