"""`tokenfleet explain REQUEST_ID`: the timeline of one request."""

import argparse
import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any
from urllib.parse import quote

import httpx
from rich.table import Table
from rich.text import Text

from common.messages import events as finish_reasons
from common.process.logs import plural
from deploy.cli.client import fetch_json, frame_errors, new_table, print_lines, printable

ENDS = {
    "length": "max_new_tokens was reached (length)",
    "eos_token": "the model generated its end-of-sequence token (eos_token)",
    "stop_sequence": "a stop sequence was reached (stop_sequence)",
    "budget": "its API key reached its budget of the month (budget)",
    "client": "its client left or cancelled it (client)",
    "gateway": "its gateway died and its client did not come back in time (gateway)",
    "cancelled": "it was cancelled",
} | {reason: f"{text} ({reason})" for reason, (_, text) in finish_reasons.ERRORS.items()}
INTERRUPTIONS = {
    "preempted": "preempted: an older or more urgent request needed its room, or its worker drains",
    "takeover": "paused while a new batcher took over",
}
PAUSES = ("died", "interrupted", "taken_over")
STYLES = {"died": "red", "interrupted": "yellow", "taken_over": "yellow", "ended": "green"}

ANSWER_ID = re.compile(r"(chatcmpl-|cmpl-|resp_|msg_)(?=[0-9a-f]{32}(\.|$))")
"""What the routes of `/v1` put before a request's id in the `id` of its answer."""

Event = dict[str, Any]


def show(client: httpx.Client, flags: argparse.Namespace) -> None:
    request_id = ANSWER_ID.sub("", flags.request_id, count=1)
    found = fetch_json(client, f"/fleet/requests/{quote(request_id, safe='')}")
    with frame_errors(found):
        tables = {name: timeline(events) for name, events in found["timelines"].items()}
    for name, table in tables.items():
        print_lines(Text(f"request {printable(name)}", style="bold"), table)


def timeline(events: Sequence[Event]) -> Table:
    """Return one line for each event: the time of day, seconds since the first event, and what happened."""
    table = new_table(show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    begin_ms = events[0]["at_ms"]
    for one, text in zip(events, describe_events(events), strict=True):
        clock = datetime.fromtimestamp(one["at_ms"] / 1000).strftime("%H:%M:%S.%f")[:-3]
        table.add_row(
            clock,
            f"+{max(0, one['at_ms'] - begin_ms) / 1000:.3f} s",
            Text(printable(text), style=STYLES.get(one["what"], "")),
        )
    return table


def describe_events(events: Sequence[Event]) -> Iterator[str]:
    """Describe each event. A pause begins with the first event that interrupted the request, and ends with
    its next token.
    """
    pause: Event | None = None
    for one in events:
        match one["what"]:
            case "prefilled":
                yield describe_token(one, events[0], pause)
                pause = None
            case "placed":
                waited = (
                    f" after {seconds(events[0], one)} in the queue"
                    if one["attempt"] == 1 and events[0]["what"] == "queued"
                    else ""
                )
                num_cached = one.get("num_cached", 0)
                known = f"; the KV of {plural(num_cached, 'token')} is there" if num_cached else ""
                yield f"placed on {one['worker']}, attempt {one['attempt']}{waited}{known}"
            case _:
                yield describe_event(one)
                pause = (pause or one) if one["what"] in PAUSES else pause


def describe_token(one: Event, begin: Event, pause: Event | None) -> str:
    """Describe the first token of an attempt."""
    if one["num_tokens"] > 1:
        return f"token {one['num_tokens']}" + (f": resumed after {seconds(pause, one)}" if pause else "")
    return "first token" + (
        f", {seconds(begin, one)} after it was queued" if begin["what"] == "queued" else ""
    )


def describe_event(one: Event) -> str:
    tokens, why = one["num_tokens"], one["why"]
    match one["what"]:
        case "queued":
            return f"queued with {plural(tokens, 'prompt token')}"
        case "died":
            return f"worker {one['worker']} died at token {tokens}"
        case "interrupted":
            return f"{INTERRUPTIONS.get(why, why)}, at token {tokens}"
        case "taken_over":
            return f"found by a new batcher, at token {tokens}"
        case "ended":
            return f"ended with {plural(tokens, 'token')}: {ENDS.get(why, why)}"
        case other:
            return str(other)


def seconds(begin: Event, end: Event) -> str:
    return f"{max(0, end['at_ms'] - begin['at_ms']) / 1000:.3f} s"
