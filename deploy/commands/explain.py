"""`tokenfleet explain REQUEST_ID`: one request's life as a timeline."""

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any
from urllib.parse import quote

import httpx
import orjson
from rich.console import Console
from rich.table import Table
from rich.text import Text

from common.settings.flags import FlagParser
from deploy.commands.client import (
    Trouble,
    add_url,
    api_key,
    check,
    complain,
    explained,
    harmless,
    new_client,
    unexpected,
)

ANSWER_S = 15.0
ENDS = {
    "length": "as many as it asked for (length)",
    "eos_token": "the model ended it (eos_token)",
    "stop_sequence": "a stop sequence was reached (stop_sequence)",
    "timeout": "its deadline passed",
    "client": "its client went",
    "gateway": "its gateway died",
    "poison": "two workers died under it",
    "capacity": "no worker's KV cache can hold it",
    "cancelled": "it was cancelled",
}
INTERRUPTIONS = {
    "preempted": "preempted, for an older request needed its KV blocks or its worker left",
    "takeover": "set aside for a new batcher",
}
PAUSES = ("died", "interrupted", "taken_over")
STYLES = {"died": "red", "interrupted": "yellow", "taken_over": "yellow", "ended": "green"}

Happening = dict[str, Any]


def main(argv: Sequence[str]) -> int:
    """Returns 1 when nothing is known of the request. Raises SettingError for flags that are not ours."""
    parser = FlagParser(
        prog="tokenfleet explain",
        allow_abbrev=False,
        description="What happened to a request: where it waited and ran.",
    )
    parser.add_argument(
        "request_id",
        help="as in the header x-request-id of its answer, with or without the number of a choice",
    )
    add_url(parser)
    flags = parser.parse_args(list(argv))
    try:
        lives = ask(flags.url, flags.request_id)
        with unexpected(lives):
            timelines = {request_id: timeline(life) for request_id, life in lives.items()}
    except Trouble as trouble:
        return complain(trouble)
    console = Console(highlight=False)
    for request_id, table in timelines.items():
        console.print(Text(f"request {harmless(request_id)}", style="bold"))
        console.print(table)
    return 0


def ask(url: str, request_id: str) -> dict[str, list[Happening]]:
    """The lives of a request and of its choices, by id. Raises Trouble."""
    with explained(url), new_client(httpx.Client, url, ANSWER_S, api_key()) as client:
        answer = client.get(f"/fleet/requests/{quote(request_id, safe='')}")
    check(answer.status_code, answer.content)
    try:
        lives: dict[str, list[Happening]] = orjson.loads(answer.content)["timelines"]
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise Trouble(f"{url} answers, but not as a Tokenfleet does") from error
    return lives


def timeline(life: Sequence[Happening]) -> Table:
    """A line for each thing that happened: the time of day, seconds since the first, and words."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    begin_ms = life[0]["at_ms"]
    for one, words in zip(life, told(life), strict=True):
        clock = datetime.fromtimestamp(one["at_ms"] / 1000).strftime("%H:%M:%S.%f")[:-3]
        table.add_row(
            clock,
            f"+{max(0, one['at_ms'] - begin_ms) / 1000:.3f} s",
            Text(harmless(words), style=STYLES.get(one["what"], "")),
        )
    return table


def told(life: Sequence[Happening]) -> Iterator[str]:
    """What happened, in words; a pause begins with what first interrupted the request, and ends with its next
    token.
    """
    pause: Happening | None = None
    for one in life:
        match one["what"]:
            case "prefilled":
                yield token(one, life[0], pause)
                pause = None
            case "placed":
                waited = (
                    f" after {seconds(life[0], one)} in the queue"
                    if one["attempt"] == 1 and life[0]["what"] == "queued"
                    else ""
                )
                yield f"placed on {one['worker']}, attempt {one['attempt']}{waited}"
            case _:
                yield words(one)
                pause = (pause or one) if one["what"] in PAUSES else pause


def token(one: Happening, begin: Happening, pause: Happening | None) -> str:
    """The first token of an attempt."""
    if one["num_tokens"] > 1:
        return f"token {one['num_tokens']}" + (f": resumed after {seconds(pause, one)}" if pause else "")
    return "first token" + (
        f", {seconds(begin, one)} after it was queued" if begin["what"] == "queued" else ""
    )


def words(one: Happening) -> str:
    tokens, why = one["num_tokens"], one["why"]
    match one["what"]:
        case "queued":
            return f"queued with {tokens} prompt tokens"
        case "died":
            return f"worker {one['worker']} died at token {tokens}"
        case "interrupted":
            return f"{INTERRUPTIONS.get(why, why)}, at token {tokens}"
        case "taken_over":
            return f"found by a new batcher, at token {tokens}"
        case "ended":
            return f"ended with {tokens} tokens: {ENDS.get(why, why)}"
        case other:
            return str(other)


def seconds(begin: Happening, end: Happening) -> str:
    return f"{max(0, end['at_ms'] - begin['at_ms']) / 1000:.3f} s"
