"""Commands that use a running fleet, and how they reach it. Those that list what a gateway knows, or have
it do something, are rows of `commands.toml` alone.
"""

import argparse
import asyncio
import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import setproctitle
from redis.asyncio import Redis

from common import api_keys
from common.api_keys import ApiKey, IssuedKey, KeyFields, read_fields
from common.broker import heartbeat
from common.broker.client import CONNECT_TIMEOUT_S, ERRORS, connect_setting, describe_error
from common.broker.directory import SILENT_S, DirectoryClient, KnownPool
from common.broker.pool_client import ChangeRefused, PoolClient
from common.messages import events as finish_reasons
from common.process.logs import first_incarnation, plural
from common.settings import flags as setting_flags
from common.settings.fields import AdapterSource, read_adapter
from common.settings.flags import refuse_unknown
from common.settings.settings import SettingError, Settings
from deploy.cli.client import (
    ServerError,
    answer_errors,
    ask,
    fetch_json,
    new_client,
    print_json,
    print_lines,
    printable,
    table_of,
)
from deploy.cli.table import TABLE, call, new_parser
from deploy.cli.target import find
from deploy.launcher import control_socket, prepare

ADAPTER_TIMEOUT = httpx.Timeout(660.0, connect=5.0)
"""A gateway waits for ten minutes until all workers have an adapter."""
POLL_S = 0.5
DURATION = re.compile(r"(\d{1,9})([smhdw])")
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


def main(words: Sequence[str]) -> int:
    """Run a command, named by its first word. Returns 1 if the fleet refuses, or does not answer, or what the
    command itself returns. Raises SettingError.
    """
    command, *argv = words
    parser = new_parser(command)
    flags, rest = parser.parse_known_args(argv)
    if rest and command != "roll":
        refuse_unknown(rest, parser)
    flags.rest = rest
    setproctitle.setproctitle(f"tokenfleet {command}")  # other users can read a command line
    try:
        return WAYS[flags.action.by](flags) or 0
    except ServerError as error:
        print(f"tokenfleet: {error}", file=sys.stderr)
        return 1


# --- ways to the fleet --------------------------------------------------------------------------------------


def call_gateway(flags: argparse.Namespace) -> int | None:
    action = flags.action
    url, _ = find("--url", flags.url, action.changes)
    with (
        new_client(httpx.Client, url, action.read_s, os.environ.get("API_KEY")) as client,
        answer_errors(url),
    ):
        result: int | None = call(action.run, client, flags)
    return result


def call_broker(flags: argparse.Namespace) -> None:
    url, fleet = find("--redis-url", flags.redis_url, flags.action.changes)
    pool = getattr(flags, "pool", None) or os.environ.get("POOL", "")
    settings = Settings.read([], {"POOL": pool or (fleet.pool if fleet else "")})
    settings = settings.model_copy(update={"redis_url": url})
    prepare.check_broker(settings)
    flags.pool = settings.pool
    finish(run_with(PoolClient.connect(settings), flags))


def call_directory(flags: argparse.Namespace) -> None:
    url, _ = find("--directory-url", flags.directory_url, flags.action.changes)
    finish(run_with(connect_setting("directory_url", url), flags))


async def run_with(connected: AbstractAsyncContextManager[Any], flags: argparse.Namespace) -> None:
    async with connected as client:
        await call(flags.action.run, client, flags)


def call_launcher(flags: argparse.Namespace) -> None:
    order = call(flags.action.run, flags)
    pid, _ = find("--pid", flags.pid, flags.action.changes)
    finish(control_socket.order(int(pid), order, partial(print, flush=True)))


def call_here(flags: argparse.Namespace) -> int:
    return int(call(flags.action.run, flags))


def finish(work: Coroutine[Any, Any, None]) -> None:
    """Do what asks a broker or a launcher. Raises ServerError."""
    try:
        asyncio.run(work)
    except ERRORS as error:
        raise ServerError(describe_error(error)) from error
    except (ChangeRefused, control_socket.OrderFailed) as error:
        raise ServerError(str(error)) from error


WAYS: dict[str, Callable[[argparse.Namespace], int | None]] = {
    "--url": call_gateway,
    "--redis-url": call_broker,
    "--directory-url": call_directory,
    "--pid": call_launcher,
    "": call_here,
}
"""The flag that finds the fleet → how an action runs there."""


# --- tables, and what a gateway is asked --------------------------------------------------------------------


def local_time(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s)) if unix_s else ""


def utc_time(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(unix_s)) if unix_s else ""


def describe_workers(adapter: Mapping[str, Any]) -> str:
    """At how many workers an adapter is, and which have refused it."""
    causes = "".join(f"; {worker}: {why}" for worker, why in adapter["refused"].items())
    return f"{adapter['num_workers']} of {adapter['answer']['num_workers']}{causes}"


FORMATS: dict[str, Callable[[Any], str]] = {
    "": str,
    "time": local_time,
    "utc": utc_time,
    "list": ", ".join,
    "count": "{:,}".format,
    "if-known": lambda value: str(value or "-"),
    "workers": describe_workers,
    "date": lambda ms: local_time(ms / 1000),
    "seconds": lambda ms: f"{ms / 1000:.3f}",
    "words": lambda name: name.replace("_", " "),
    "if-any": lambda number: str(number or ""),
    "cause": lambda why: ": ".join([why, *finish_reasons.ERRORS.get(why, ())[1:]]),
    "why": lambda job: f"{job['reason']}: {job['error']}" if job["reason"] else "",
}
"""How a cell of `commands.toml` is shown."""


def cell(of: str) -> Callable[[Any], str]:
    """What makes the text of a cell: of a field, or of the whole row (`.`)."""
    name, _, shown = of.partition(" ")
    return lambda row: FORMATS[shown](row if name == "." else row[name])


def show_rows(rows: Sequence[Any], cells: Mapping[str, str], if_none: str = "") -> None:
    """Print a line for each row, or `if_none`."""
    columns = {title: cell(of) for title, of in cells.items()}
    print_lines(table_of(rows, columns) if rows or not if_none else if_none)


def path_of(flags: argparse.Namespace, **query: Any) -> str:
    """The path of an action, with its operand, and its flags as a query."""
    operands = {name: quote(str(value), safe="") for name, value in vars(flags).items()}
    names = [
        name.removeprefix("--").replace("-", "_") for name in flags.action.flags.split() if name[0] == "-"
    ]
    given = {name: getattr(flags, name) for name in names} | query
    url = httpx.URL(flags.action.path.format(**operands))
    return str(url.copy_merge_params({name: value for name, value in given.items() if value is not None}))


def show_list(client: httpx.Client, flags: argparse.Namespace) -> None:
    """Print what an action lists; pages are read until there are enough rows."""
    action, most = flags.action, getattr(flags, "limit", 0)
    found: list[Any] = []
    query: dict[str, Any] = {}
    while True:
        if most:
            query["limit"] = min(action.page, most - len(found))
        answer = fetch_json(client, path_of(flags, **query))
        found += [{"answer": answer, **row} for row in answer[action.rows]]
        query["cursor"] = cursor = answer.get("cursor")
        if not cursor or len(found) >= most:
            break
    show_rows(found, TABLE["tables"][action.table], "" if cursor else action.none)
    if cursor:
        print(f"more follow: --cursor '{printable(cursor)}'")
    elif (hidden := answer.get("total", 0) - len(found)) > 0:
        print(f"and {hidden} more (--limit)")


def show_one(client: httpx.Client, flags: argparse.Namespace) -> None:
    """Print all that is kept of something, as JSON."""
    print_json(fetch_json(client, path_of(flags)))


def change(client: httpx.Client, flags: argparse.Namespace) -> None:
    ask(client, "POST", path_of(flags))
    print(printable(flags.action.said.format(**vars(flags))))


def show_usage(client: httpx.Client, flags: argparse.Namespace) -> None:
    """Print a line for each group, and one for all together."""
    found = fetch_json(client, path_of(flags))
    by: list[str] = found["group_by"]
    total = found["total"] | dict.fromkeys(by, "") | dict.fromkeys(by[:1], "total")
    print(printable(f"{found['from']} to {found['to']}"))
    cells = {name: f"{name} if-known" for name in by} | TABLE["tables"][flags.action.table]
    show_rows([*found["data"], *([total] if by else [])], cells)


# --- adapters -----------------------------------------------------------------------------------------------


def load_adapter(client: httpx.Client, flags: argparse.Namespace) -> None:
    source = read_source(flags.adapter)
    body = {"lora_name": source.name, "lora_path": source.path, "load_inplace": flags.replace}
    print(printable(ask(client, "POST", "/v1/load_lora_adapter", json=body, timeout=ADAPTER_TIMEOUT).text))


def unload_adapter(client: httpx.Client, flags: argparse.Namespace) -> None:
    body = {"lora_name": flags.name}
    print(printable(ask(client, "POST", "/v1/unload_lora_adapter", json=body, timeout=ADAPTER_TIMEOUT).text))


def read_source(word: str) -> AdapterSource:
    """An adapter as `name=path` or a hub id; a folder that is here is named by its whole path. Raises
    SettingError.
    """
    try:
        source = read_adapter(word)
    except SettingError as error:
        raise SettingError("adapter", error.cause) from error
    with contextlib.suppress(OSError, RuntimeError):  # the server says what is wrong with the path
        if (folder := Path(source.path).expanduser()).is_dir():
            return source._replace(path=str(folder.resolve()))
    return source


# --- drain --------------------------------------------------------------------------------------------------


async def drain(pool: PoolClient, flags: argparse.Namespace) -> None:
    """Ask a worker to drain until it is gone, and print each change. Raises ServerError if it came back."""
    worker = choose_worker(await pool.workers(), flags.worker, flags.pool)
    shown, seen = "", "seen by nobody"
    while True:
        try:
            found = await pool.run(heartbeat.drain(pool.keys, worker))
            if found is None:
                check_return(worker, await pool.workers())
                print(f"{worker} is gone; it was last {seen}", flush=True)
                return
            state, num_rows = found
            seen = f"{state}, with {plural(num_rows, 'request')}"
            line = f"{worker} is {seen}"
        except ERRORS as error:
            line = f"{worker}: {describe_error(error)}"
        if line != shown:
            print(line, flush=True)
        shown = line
        await asyncio.sleep(POLL_S)


def choose_worker(workers: Sequence[str], word: str, pool: str) -> str:
    """Return the worker with this id, or the only one with this name. Raises ServerError."""
    if word in workers:
        return word
    named = [worker for worker in workers if worker.rpartition("-")[0] == word]
    if len(named) == 1:
        return named[0]
    found = ", ".join(sorted(named or workers)) or "none"
    problem = f"{len(named)} workers are named {word!r}" if named else f"there is no worker {word!r}"
    raise ServerError(f"{problem}; those of the pool {pool!r}: {found}")


def check_return(worker: str, workers: Sequence[str]) -> None:
    """Raises ServerError if the worker's process is among the workers again, under a new incarnation: its
    heartbeat had only expired.
    """
    first = first_incarnation(worker)
    if back := [other for other in workers if other != worker and first_incarnation(other) == first]:
        raise ServerError(f"{worker} was cut off, and is back as {back[0]}, which is not drained")


# --- explain ------------------------------------------------------------------------------------------------

ANSWER_ID = re.compile(r"(chatcmpl-|cmpl-|resp_|msg_)(?=[0-9a-f]{32}(\.|$))")
"""What the routes of `/v1` put before a request's id in the `id` of its answer."""


def explain(client: httpx.Client, flags: argparse.Namespace) -> None:
    """Print a line for each event of a request: its times, the worker, the tokens by then, and why."""
    request_id = ANSWER_ID.sub("", flags.request_id, count=1)
    found = fetch_json(client, f"/fleet/requests/{quote(request_id, safe='')}")
    for name, events in found["timelines"].items():
        begin_ms = events[0]["at_ms"]
        print(f"request {printable(name)}")
        rows = [{"num_cached": 0, **one, "after_ms": one["at_ms"] - begin_ms} for one in events]
        show_rows(rows, TABLE["tables"]["events"])


# --- keys ---------------------------------------------------------------------------------------------------


async def add_key(pool: PoolClient, flags: argparse.Namespace) -> None:
    print_issued(await api_keys.add_key(pool, fields_of(flags, await pool.read_time())))


async def rotate_key(pool: PoolClient, flags: argparse.Namespace) -> None:
    print_issued(await api_keys.rotate_key(pool, flags.key_id))


async def revoke_key(pool: PoolClient, flags: argparse.Namespace) -> None:
    key = await api_keys.revoke_key(pool, flags.key_id)
    print(f"{key.key_id} is revoked since {utc_time(key.revoked)}")


async def list_keys(pool: PoolClient, flags: argparse.Namespace) -> None:
    keys, now_s = (await api_keys.read_keys(pool)).values(), await pool.read_time()
    rows = [asdict(key) | {"state": key.state(now_s), "limits": describe_limits(key)} for key in keys]
    rows = [row | {"state": "admin"} if row["admin"] and row["state"] == "active" else row for row in rows]
    show_rows(rows, TABLE["tables"]["keys"], "there are no API keys")


def print_issued(issued: IssuedKey) -> None:
    """Print the key alone to stdout, so that a script can take it."""
    key = issued.record
    print(f"{key.key_id} of the tenant {key.tenant}; its key is shown this once:", file=sys.stderr)
    print(issued.text)


def describe_limits(key: ApiKey) -> str:
    """The limits that a key has, in few words."""
    limits = (
        (key.max_concurrent, "at once"),
        (key.requests_per_minute, "requests/min"),
        (key.tokens_per_minute, "tokens/min"),
        (key.budget_tokens, "tokens/month"),
    )
    return ", ".join(f"{limit:,} {words}" for limit, words in limits if limit)


def fields_of(flags: argparse.Namespace, now_s: float) -> KeyFields:
    """Raises SettingError that names the flag."""
    given = {name: getattr(flags, name) for name in KeyFields.model_fields}
    given = {name: value for name, value in given.items() if value is not None}
    if (duration := DURATION.fullmatch(given.get("expires_at", ""))) is not None:
        given["expires_at"] = int(now_s) + int(duration[1]) * SECONDS[duration[2]]
    try:
        return read_fields(given)
    except ValueError as error:
        named = re.sub(r"`(\w+)`", lambda found: flag_of(found[1]), str(error))
        raise SettingError("keys", named) from error


def flag_of(field: str) -> str:
    """The flag that sets a field of a key."""
    own = (flag for flag, options in TABLE["flags"].items() if options.get("dest") == field)
    return next(own, f"--{field.replace('_', '-')}")


# --- models -------------------------------------------------------------------------------------------------


async def list_models(redis: Redis, flags: argparse.Namespace) -> None:
    """Print a line for each model and pool."""
    async with asyncio.timeout(CONNECT_TIMEOUT_S):
        pools = await DirectoryClient(redis).read()
    rows = [
        {"model": model, "pool": name, **describe_pool(known)}
        for name, known in pools.items()
        for model in dict.fromkeys(known.entry.models or [name])
    ]
    show_rows(sorted(rows, key=lambda row: (row["model"], row["pool"])), TABLE["tables"]["models"])


def describe_pool(known: KnownPool) -> dict[str, Any]:
    """What the directory says of a pool."""
    entry, silent = known.entry, f"silent for {known.age_s:.0f} s"
    state = silent if known.age_s > SILENT_S else "live" if known.is_live else "no worker"
    counts = {"workers": entry.num_ready, "waiting": entry.waiting, "running": entry.rows}
    return {"state": state, **counts, "broker": entry.address}


# --- roll ---------------------------------------------------------------------------------------------------


def order_roll(flags: argparse.Namespace) -> control_socket.Order:
    """The order to roll, with the variables that flags stand for. Raises SettingError."""
    given = setting_flags.read(flags.rest, {}, "tokenfleet roll")
    for name, value in given.items():
        if name not in Settings.model_fields:
            raise SettingError(value.name, "is no setting of Tokenfleet itself, so a roll cannot change it")
    return {"settings": {name.upper(): value.text for name, value in given.items()}}
