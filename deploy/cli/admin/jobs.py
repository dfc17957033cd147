"""`tokenfleet jobs list|show|cancel|retry|dead`: the jobs of a running fleet."""

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlencode

import httpx
import orjson
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
Jobs over Redis and of arq: those that wait, run, are scheduled, or have ended within an hour; and those that
could not be served (dead), which are kept with their requests. If the fleet has API keys, API_KEY must be an
admin's. Without one of these words the command starts a job worker.
"""
STATES = ("queued", "running", "scheduled", "done", "failed", "cancelled", "dead")
COLUMNS = ("job", "state", "kind", "tenant", "submitted", "not before", "ended", "why")
READ_TIMEOUT_S = 30.0
PAGE = 200
"""Jobs of one answer."""


def main(argv: Sequence[str]) -> int:
    """Run the command. Returns 1 on an error. Raises SettingError for an unknown flag."""
    return run_for(new_parser().parse_args(list(argv)), READ_TIMEOUT_S)


# --- commands -----------------------------------------------------------------------------------------------


def show_list(client: httpx.Client, flags: argparse.Namespace) -> None:
    query = {"status": flags.status, "tenant": flags.tenant, "search": flags.search}
    found, cursor = fetch_jobs(client, {name: text for name, text in query.items() if text}, flags)
    if not found and not cursor:
        print("there are no such jobs")
        return
    with frame_errors(found):
        print_lines(table(found))
    if cursor:
        print(f"more follow: --cursor '{printable(cursor)}'")


def fetch_jobs(
    client: httpx.Client, query: Mapping[str, str], flags: argparse.Namespace
) -> tuple[list[Any], str]:
    """Jobs, and the cursor after them, or "". Pages are read until there are enough jobs."""
    found: list[Any] = []
    cursor = flags.cursor
    while len(found) < flags.limit:
        page = {"cursor": cursor, "limit": min(PAGE, flags.limit - len(found))}
        content = fetch_json(client, f"/admin/jobs?{urlencode({**query, **page})}")
        with frame_errors(content):
            found += content["jobs"]
            cursor = content["cursor"] or ""
        if not cursor:
            break
    return found, cursor


def show(client: httpx.Client, flags: argparse.Namespace) -> None:
    """Print all that is kept of a job, as JSON."""
    content = fetch_json(client, path_of(flags))
    print(orjson.dumps(content, option=orjson.OPT_INDENT_2).decode())


def cancel(client: httpx.Client, flags: argparse.Namespace) -> None:
    post(client, f"{path_of(flags)}/cancel")
    print(f"{printable(flags.job_id)} is cancelled")


def retry(client: httpx.Client, flags: argparse.Namespace) -> None:
    post(client, f"{path_of(flags)}/retry")
    print(f"{printable(flags.job_id)} is tried again")


def path_of(flags: argparse.Namespace) -> str:
    return f"/admin/jobs/{quote(flags.job_id, safe='')}"


# --- table --------------------------------------------------------------------------------------------------


def table(jobs: Sequence[Mapping[str, Any]]) -> Table:
    """A line for each job."""
    shown = new_table()
    for title in COLUMNS:
        shown.add_column(title, no_wrap=title != "why")
    for one in jobs:
        times = map(render_time, (one["created_at"], one["not_before"], one["ended_at"]))
        why = f"{one['reason']}: {one['error']}" if one["reason"] else ""
        cells = (one["id"], one["state"], one["kind"], one["tenant"], *times, why)
        shown.add_row(*map(printable, cells))
    return shown


def render_time(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s)) if unix_s else ""


# --- flags --------------------------------------------------------------------------------------------------


def new_parser() -> argparse.ArgumentParser:
    parser = FlagParser(prog="tokenfleet jobs", allow_abbrev=False, description=DESCRIPTION)
    commands = parser.add_subparsers(
        required=True, metavar="list|show|cancel|retry|dead", parser_class=FlagParser
    )
    shared = FlagParser(add_help=False, allow_abbrev=False)
    add_url(shared)
    listed = FlagParser(add_help=False, allow_abbrev=False)
    listed.add_argument("--tenant", help="only jobs of this tenant")
    listed.add_argument("--search", metavar="TEXT", help="only jobs whose id has this text")
    listed.add_argument("--limit", type=int, default=100, help="most jobs that are shown (default 100)")
    listed.add_argument("--cursor", default="", help="go on where another list ended, as that one says")
    listing = commands.add_parser("list", parents=[shared, listed], help="show jobs")
    listing.add_argument("--status", choices=STATES, help="only jobs in this state")
    listing.set_defaults(run=show_list)
    dead = commands.add_parser("dead", parents=[shared, listed], help="show jobs that could not be served")
    dead.set_defaults(run=show_list, status="dead")
    for word, run, text in (
        ("show", show, "print a job and what it asks for, as JSON"),
        ("cancel", cancel, "end a job that waits, is scheduled or runs"),
        ("retry", retry, "try a dead job again, with its id"),
    ):
        command = commands.add_parser(word, parents=[shared], help=text)
        command.set_defaults(run=run, changes=run is not show)
        command.add_argument("job_id", metavar="ID", help="as `tokenfleet jobs list` shows it")
    return parser
