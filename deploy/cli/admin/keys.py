"""`tokenfleet keys add|list|revoke|rotate`: the API keys in the fleet's broker."""

import argparse
import asyncio
import re
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from common import api_keys
from common.api_keys import ApiKey, IssuedKey, KeyChangeError, KeyFields, read_fields
from common.broker.client import ERRORS, describe_error
from common.broker.pool_client import PoolClient
from common.settings.flags import FlagParser
from common.settings.settings import SettingError, Settings
from deploy.cli.client import PIPE_COLUMNS, ServerError, print_error
from deploy.cli.target import add_redis_url, find_broker

DESCRIPTION = """
API keys of a fleet. Once there is one, each request needs a key; the one in the variable API_KEY is always an
admin's. Gateways see a change within seconds: a revoked key is refused, and its running requests end.
A key is printed once, when it is added or rotated; Redis has only its SHA-256.
"""
DURATION = re.compile(r"(\d{1,9})([smhdw])")
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


def main(argv: Sequence[str]) -> int:
    """Run the command. Returns 1 for a change that is refused. Raises SettingError."""
    flags = new_parser().parse_args(list(argv))
    settings = find_broker("tokenfleet keys", flags.run is not show_all, flags.redis_url)
    try:
        asyncio.run(run(settings, flags))
    except (ServerError, KeyChangeError) as error:
        return print_error(ServerError(str(error)))
    return 0


async def run(settings: Settings, flags: argparse.Namespace) -> None:
    """Raises ServerError, KeyChangeError."""
    async with PoolClient.connect(settings) as client:
        try:
            await flags.run(client, flags)
        except ERRORS as error:
            raise ServerError(describe_error(error)) from error


# --- commands -----------------------------------------------------------------------------------------------


async def add(client: PoolClient, flags: argparse.Namespace) -> None:
    print_issued(await api_keys.add_key(client, fields_of(flags, await client.read_time())))


async def rotate(client: PoolClient, flags: argparse.Namespace) -> None:
    print_issued(await api_keys.rotate_key(client, flags.key_id))


async def revoke(client: PoolClient, flags: argparse.Namespace) -> None:
    key = await api_keys.revoke_key(client, flags.key_id)
    print(f"{key.key_id} is revoked since {render_time(key.revoked)}")


async def show_all(client: PoolClient, flags: argparse.Namespace) -> None:
    keys = (await api_keys.read_keys(client)).values()
    print_table([*keys], await client.read_time())


def print_issued(issued: IssuedKey) -> None:
    """Print the key alone to stdout, so that a script can take it."""
    key = issued.record
    print(f"{key.key_id} of the tenant {key.tenant}; its key is shown this once:", file=sys.stderr)
    print(issued.text)


# --- table --------------------------------------------------------------------------------------------------


def print_table(keys: Sequence[ApiKey], now_s: float) -> None:
    if not keys:
        print("there are no API keys")
        return
    table = Table(
        "id", "name", "tenant", "state", "class", "limits", "models", "adapters", "expires", box=None
    )
    for key in keys:
        table.add_row(
            key.key_id,
            key.name,
            key.tenant,
            "admin" if key.admin and key.state(now_s) == "active" else key.state(now_s),
            key.service_class,
            describe_limits(key),
            ", ".join(key.models),
            ", ".join(key.adapters),
            render_time(key.expires_at),
        )
    console = Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS, highlight=False)
    console.print(table)


def describe_limits(key: ApiKey) -> str:
    """The limits that a key has, in few words."""
    limits = (
        (key.max_concurrent, "at once"),
        (key.requests_per_minute, "requests/min"),
        (key.tokens_per_minute, "tokens/min"),
        (key.budget_tokens, "tokens/month"),
    )
    return ", ".join(f"{limit:,} {words}" for limit, words in limits if limit)


def render_time(unix_s: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(unix_s)) if unix_s else ""


# --- flags --------------------------------------------------------------------------------------------------


def new_parser() -> argparse.ArgumentParser:
    parser = FlagParser(prog="tokenfleet keys", allow_abbrev=False, description=DESCRIPTION)
    commands = parser.add_subparsers(required=True, metavar="add|list|revoke|rotate", parser_class=FlagParser)
    shared = FlagParser(add_help=False, allow_abbrev=False)
    add_redis_url(shared)
    adding = commands.add_parser("add", parents=[shared], help="make a key, and print it once")
    adding.set_defaults(run=add)
    add_fields(adding)
    listing = commands.add_parser("list", parents=[shared], help="show all keys")
    listing.set_defaults(run=show_all)
    for word, run, text in (
        ("revoke", revoke, "end a key for ever, and its running requests"),
        ("rotate", rotate, "give a key another text; the old one counts no more"),
    ):
        changing = commands.add_parser(word, parents=[shared], help=text)
        changing.set_defaults(run=run)
        changing.add_argument("key_id", metavar="KEY_ID", help="as `tokenfleet keys list` shows it")
    return parser


def add_fields(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each field of a key."""
    parser.add_argument("--name", help="what you call it")
    parser.add_argument("--tenant", help="whose requests it makes (default: a tenant of its own)")
    parser.add_argument("--class", dest="service_class", help="class of its requests that name none")
    parser.add_argument("--weight", type=float, help="share of its tenant among others (default: 1)")
    for flag, text in (
        ("--max-concurrent", "requests at once"),
        ("--requests-per-minute", "requests a minute"),
        ("--tokens-per-minute", "tokens of prompts and answers a minute"),
        ("--budget-tokens", "tokens a calendar month (UTC)"),
    ):
        parser.add_argument(flag, type=int, metavar="N", help=f"{text} (default: no limit)")
    parser.add_argument("--models", nargs="+", metavar="NAME", help="the only models that it may use")
    parser.add_argument("--adapters", nargs="+", metavar="NAME", help="the only adapters that it may use")
    parser.add_argument("--expires", dest="expires_at", help="2027-01-31, or in a time as 30d or 12h")
    parser.add_argument("--webhook", metavar="URL", help="told of the end of all that it asks for")
    parser.add_argument("--webhook-secret", metavar="SECRET", help="signs these events: whsec_…")
    parser.add_argument("--admin", action="store_true", default=None, help="it may manage keys and the fleet")


def fields_of(flags: argparse.Namespace, now_s: float) -> KeyFields:
    """Raises SettingError that names the flag."""
    given = {name: getattr(flags, name) for name in KeyFields.model_fields}
    given = {name: value for name, value in given.items() if value is not None}
    if (duration := DURATION.fullmatch(given.get("expires_at", ""))) is not None:
        given["expires_at"] = int(now_s) + int(duration[1]) * SECONDS[duration[2]]
    try:
        return read_fields(given)
    except ValueError as error:
        raise SettingError("keys", str(error)) from error
