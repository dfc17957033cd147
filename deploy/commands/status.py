"""`tokenfleet status`: a table of the fleet's processes, live in a terminal, printed once elsewhere."""

import contextlib
import time
from collections import deque
from collections.abc import Sequence

import httpx
import orjson
from rich.console import Console
from rich.live import Live

from common.settings.flag_parser import FlagParser
from deploy.commands.client import ServerError, add_url, api_key, new_client, print_error
from deploy.commands.fleet_snapshot import Snapshot, fetch_snapshot, health, with_rates
from deploy.commands.fleet_table import view

ANSWER_S = 5.0
REFRESH_S = 1.0
NUM_SNAPSHOTS = 4
"""A rate is the difference over this many snapshots, which evens out the times of the heartbeats."""


def main(argv: Sequence[str]) -> int:
    """Run the command. Returns 0 when the fleet serves requests. Raises SettingError for an unknown flag."""
    parser = FlagParser(
        prog="tokenfleet status",
        allow_abbrev=False,
        description="Show every process of the fleet, a line each.",
    )
    add_url(parser)
    parser.add_argument(
        "--once", action="store_true", help="print one table and end (as when the output is no terminal)"
    )
    parser.add_argument("--json", action="store_true", help="print GET /fleet with rates, and end")
    flags = parser.parse_args(list(argv))
    console = Console()
    try:
        with new_client(httpx.Client, flags.url, ANSWER_S, api_key()) as client:
            snapshots = deque([fetch_snapshot(client)], maxlen=NUM_SNAPSHOTS)
            if flags.json or flags.once or not console.is_terminal:
                print_once(client, snapshots, console, flags.json)
            else:
                watch(client, snapshots, console)
    except ServerError as error:
        return print_error(error)
    return 1 if health(snapshots[-1])[0] == "bad" else 0


def print_once(client: httpx.Client, snapshots: deque[Snapshot], console: Console, as_json: bool) -> None:
    time.sleep(REFRESH_S)  # a rate needs two snapshots
    snapshots.append(fetch_snapshot(client))
    if as_json:
        console.out(orjson.dumps(with_rates(snapshots), option=orjson.OPT_INDENT_2).decode(), highlight=False)
    else:
        console.print(view(snapshots, console.width))


def watch(client: httpx.Client, snapshots: deque[Snapshot], console: Console) -> None:
    """Show the table until Ctrl-C. A fleet that does not answer is asked again, every second."""
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(console=console, auto_refresh=False, transient=False) as live,
    ):
        failure = ""
        while True:
            live.update(view(snapshots, console.width, failure), refresh=True)
            time.sleep(REFRESH_S)
            try:
                snapshots.append(fetch_snapshot(client))
                failure = ""
            except ServerError as error:
                failure = str(error)
