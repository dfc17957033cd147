"""`tokenfleet replay ID`: computes an answer again, and says whether its tokens are the same."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import httpx
from rich.text import Text

from common.settings.flags import FlagParser
from deploy.cli.client import (
    ServerError,
    add_url,
    api_key,
    frame_errors,
    new_client,
    post,
    print_error,
    print_lines,
    printable,
)
from deploy.cli.explain import ANSWER_ID

READ_TIMEOUT_S = 3600.0
MAX_SHOWN = 300
"""Characters of a value that are printed."""

Replay = Mapping[str, Any]


def main(argv: Sequence[str]) -> int:
    """Run the command. Returns 0 if the tokens are the same, 1 if not or on an error. Raises SettingError for
    an unknown flag.
    """
    parser = FlagParser(
        prog="tokenfleet replay",
        allow_abbrev=False,
        description="Compute an answer that is kept once more, and compare its tokens and its receipt. "
        "Answers with `receipt` are kept for RECEIPT_TTL_S.",
    )
    parser.add_argument("request_id", help="the header x-request-id of the answer, or its `id` on /v1")
    add_url(parser)
    flags = parser.parse_args(list(argv))
    request_id = ANSWER_ID.sub("", flags.request_id, count=1)
    try:
        with new_client(httpx.Client, flags.url, READ_TIMEOUT_S, api_key()) as client:
            found = ask_for_replay(client, request_id)
        with frame_errors(found):
            lines = [Text(printable(line)) for line in describe(found)]
    except ServerError as error:
        return print_error(error)
    print_lines(*lines)
    return 0 if found["equal"] else 1


def ask_for_replay(client: httpx.Client, request_id: str) -> Any:
    """The comparison that the server answers. Raises ServerError."""
    return post(client, f"/requests/{quote(request_id, safe='')}/replay").json()


def describe(replay: Replay) -> Iterator[str]:
    """Yield the lines that a person reads: the receipts first, then the tokens."""
    yield f"request {replay['id']}"
    for one in replay["differences"]:
        yield f"  {one['field']}: {values(one['then'])} then, {values(one['now'])} now"
    if replay["exact"]:
        yield "the receipts agree: its tokens must be the same"
    for reason in replay["reasons"]:
        yield f"its tokens may differ: {reason}"
    for choice in replay["choices"]:
        yield f"choice {choice['index']}: {describe_choice(choice)}"


def describe_choice(choice: Mapping[str, Any]) -> str:
    if choice["equal"]:
        return f"equal, all {choice['num_tokens']} tokens"
    ids = [choice["token"], choice["replayed_token"]]
    then, now = ("the end" if token is None else f"id {token}" for token in ids)
    return f"differs from token {choice['first_difference'] + 1} on: {then} then, {now} now"


def values(found: Sequence[Any]) -> str:
    return (
        " and ".join("unknown" if value is None else str(value)[:MAX_SHOWN] for value in found) or "nothing"
    )
