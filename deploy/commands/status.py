"""`tokenfleet status`: a table of the fleet's processes, live in a terminal, once for everybody else."""

import contextlib
import time
from collections import deque
from collections.abc import Sequence

import httpx
import orjson
from rich.console import Console
from rich.live import Live

from common.settings.flags import FlagParser
from deploy.commands.client import Trouble, add_url, api_key, complain, new_client
from deploy.commands.fleet_snapshot import Snapshot, look, num_ready, with_rates
from deploy.commands.fleet_table import view

ANSWER_S = 5.0
REFRESH_S = 1.0
NUM_LOOKS = 4
"""Rates are differences over so many looks: one heartbeat more or less does not show in them."""


def main(argv: Sequence[str]) -> int:
    """Returns 0 when at least one worker is ready. Raises SettingError for flags that are not ours."""
    parser = FlagParser(
        prog="tokenfleet status", allow_abbrev=False, description="One line for every process of the fleet."
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
            looks = deque([look(client)], maxlen=NUM_LOOKS)
            if flags.json or flags.once or not console.is_terminal:
                once(client, looks, console, flags.json)
            else:
                watch(client, looks, console)
    except Trouble as trouble:
        return complain(trouble)
    return 0 if num_ready(looks[-1]) else 1


def once(client: httpx.Client, looks: deque[Snapshot], console: Console, as_json: bool) -> None:
    time.sleep(REFRESH_S)  # a rate needs two looks
    looks.append(look(client))
    if as_json:
        console.out(orjson.dumps(with_rates(looks), option=orjson.OPT_INDENT_2).decode(), highlight=False)
    else:
        console.print(view(looks, console.width))


def watch(client: httpx.Client, looks: deque[Snapshot], console: Console) -> None:
    """Until Ctrl-C. A fleet that does not answer is asked again."""
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(console=console, auto_refresh=False, transient=False) as live,
    ):
        trouble = ""
        while True:
            live.update(view(looks, console.width, trouble), refresh=True)
            time.sleep(REFRESH_S)
            try:
                looks.append(look(client))
                trouble = ""
            except Trouble as error:
                trouble = str(error)
