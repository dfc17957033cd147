"""`tokenfleet replay ID|FILE`: computes an answer again, and says whether its tokens are the same."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import orjson
from rich.text import Text

from common.receipts.compare import compare_answers
from common.receipts.saved import SavedAnswer, read_saved, result_receipt
from common.settings.flags import FlagParser
from deploy.cli.client import (
    ServerError,
    api_key,
    frame_errors,
    new_client,
    post,
    print_error,
    print_lines,
    printable,
)
from deploy.cli.explain import ANSWER_ID
from deploy.cli.target import add_url, find_server

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
        description="Compute an answer once more, and compare its tokens and its receipt. Answers with "
        "`receipt` are kept for RECEIPT_TTL_S; a file keeps one for as long as you like, and for any fleet.",
    )
    parser.add_argument(
        "answer",
        metavar="ID|FILE",
        help="the header x-request-id of the answer, or its `id` on /v1; or a JSON file with the fields "
        "`request` and `answer`",
    )
    add_url(parser)
    flags = parser.parse_args(list(argv))
    path = Path(flags.answer)
    try:
        saved = read_file(path) if path.is_file() else None
        with new_client(httpx.Client, find_server(flags), READ_TIMEOUT_S, api_key()) as client:
            if saved is None:
                found = ask_for_replay(client, ANSWER_ID.sub("", flags.answer, count=1))
            else:
                found = ask_again(client, saved)
        with frame_errors(found):
            lines = [Text(printable(line)) for line in describe(found)]
    except ServerError as error:
        return print_error(error)
    print_lines(*lines)
    return 0 if found["equal"] else 1


def ask_for_replay(client: httpx.Client, request_id: str) -> Any:
    """The comparison that the server answers. Raises ServerError."""
    return post(client, f"/requests/{quote(request_id, safe='')}/replay").json()


def read_file(path: Path) -> SavedAnswer:
    """Raises ServerError that names the file and the field at fault."""
    try:
        return read_saved(orjson.loads(path.read_bytes()))
    except OSError as error:
        raise ServerError(f"{path} cannot be read: {error.strerror}") from error
    except orjson.JSONDecodeError as error:
        raise ServerError(f"{path} is not JSON: {error}") from error
    except ValueError as error:
        raise ServerError(f"{path}: {error}") from error


def ask_again(client: httpx.Client, saved: SavedAnswer) -> Any:
    """The comparison with the answer to the same request. Raises ServerError."""
    answer = post(client, saved.route, json=saved.body).json()
    with frame_errors(answer):
        now = result_receipt(answer)
    with frame_errors(saved.receipt):
        return compare_answers(saved.receipt, now)


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
    if choice["first_difference"] is None:
        return f"differs: {choice['num_tokens']} tokens then, {choice['num_replayed']} now, with another hash"
    ids = [choice["token"], choice["replayed_token"]]
    then, now = ("the end" if token is None else f"id {token}" for token in ids)
    return f"differs from token {choice['first_difference'] + 1} on: {then} then, {now} now"


def values(found: Sequence[Any]) -> str:
    return (
        " and ".join("unknown" if value is None else str(value)[:MAX_SHOWN] for value in found) or "nothing"
    )
