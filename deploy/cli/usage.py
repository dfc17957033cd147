"""`tokenfleet usage`: a table of what API keys, tenants and models have used."""

from collections.abc import Sequence
from typing import Any

import httpx
from rich.table import Table
from rich.text import Text

from common.settings.flags import FlagParser
from deploy.cli.client import (
    ServerError,
    api_key,
    fetch_json,
    frame_errors,
    new_client,
    print_error,
    print_lines,
    printable,
)
from deploy.cli.target import add_url, find_server

READ_TIMEOUT_S = 30.0
COLUMNS = {
    "requests": "requests",
    "prompt_tokens": "prompt",
    "cached_tokens": "cached",
    "completion_tokens": "answers",
    "speculated_tokens": "speculated",
    "total_tokens": "tokens",
}
"""Numbers of a row → titles of their columns."""
FILTERS = {
    "key": "the id of an API key",
    "tenant": "a tenant",
    "model": "a model",
    "from": "a time (UTC) as 2026-11-01 or 2026-11-27T08:00:00Z (default: the begin of this month)",
    "to": "a time (default: now)",
    "group-by": "some of hour,day,month,key,tenant,model (default: key,tenant,model)",
}


def main(argv: Sequence[str]) -> int:
    parser = FlagParser(prog="tokenfleet usage", description="Show what was used, in requests and tokens.")
    for name, text in FILTERS.items():
        parser.add_argument(f"--{name}", help=text)
    add_url(parser)
    given = parser.parse_args(list(argv))
    flags = vars(given)
    asked = {name.replace("-", "_"): flags[name.replace("-", "_")] for name in FILTERS}
    params = {name: value for name, value in asked.items() if value is not None}
    url = find_server(given)
    try:
        with new_client(httpx.Client, url, READ_TIMEOUT_S, api_key()) as client:
            found = fetch_json(client, f"/usage?{httpx.QueryParams(params)}")
        with frame_errors(found):
            table = usage_table(found)
    except ServerError as error:
        return print_error(error)
    print_lines(Text(f"{found['from']} to {found['to']}", style="dim"), table)
    return 0


def usage_table(found: dict[str, Any]) -> Table:
    """Return a line for each group, and one for all together."""
    by: list[str] = found["group_by"]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_footer=bool(by))
    for i, name in enumerate(by):
        table.add_column(name, footer="total" if i == 0 else "", no_wrap=True)
    for name, title in COLUMNS.items():
        table.add_column(title, footer=shown(found["total"][name]), justify="right", no_wrap=True)
    for row in found["data"]:
        names = [printable(row[name]) or "-" for name in by]
        table.add_row(*names, *(shown(row[name]) for name in COLUMNS))
    return table


def shown(number: int) -> str:
    return f"{number:,}"
