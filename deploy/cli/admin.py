"""Commands that use a running fleet.

The tables at the end have all of them: ACTIONS what their words do, FLAGS what they take, ACCESS how they
reach the fleet.
"""

import argparse
import asyncio
import math
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

import httpx
import orjson
import setproctitle

from common import api_keys
from common.api_keys import ApiKey, IssuedKey, KeyFields, read_fields
from common.broker import heartbeat
from common.broker.client import CONNECT_TIMEOUT_S, ERRORS, connect_setting, describe_error
from common.broker.directory import SILENT_S, DirectoryClient, DirectoryContent
from common.broker.pool_client import ChangeRefused, PoolClient
from common.messages import events as finish_reasons
from common.process.logs import first_incarnation, plural
from common.settings import flags as setting_flags
from common.settings.flags import FlagParser, refuse_unknown
from common.settings.settings import SettingError, Settings
from common.settings.types import AdapterSource, read_adapter
from deploy.cli import batch, bench, chat, status
from deploy.cli.client import (
    Columns,
    ServerError,
    fetch_json,
    frame_errors,
    new_client,
    parse_url,
    post,
    print_lines,
    printable,
    table_of,
)
from deploy.cli.command_line import describe
from deploy.cli.target import (
    RULE,
    find_broker,
    find_directory,
    find_launcher,
    find_server,
)
from deploy.launcher import control_socket

READING = ("list", "dead", "show", "usage", "explain", "status", "chat")
"""Last words of actions that change nothing."""
ADAPTER_TIMEOUT = httpx.Timeout(660.0, connect=5.0)
"""A gateway waits for ten minutes until all workers have an adapter."""
POLL_S = 0.5
PAGE = 200
"""Jobs of one answer."""
MAX_WEIGHT = 1_000_000
MAX_MODELS = 1000
MAX_NAME = 200
DURATION = re.compile(r"(\d{1,9})([smhdw])")
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


class Action(NamedTuple):
    """What some words do.

    Attributes:
        words: as typed, such as `jobs list`.
        run: gets the connection and the flags.
        flags: names in FLAGS, besides those that find the fleet.
        read_s: how long the gateway may take to answer.
    """

    words: str
    run: Callable[..., Any]
    flags: str
    help: str = ""
    read_s: float = 30.0

    @property
    def changes(self) -> bool:
        """Whether it changes something."""
        return self.words.split()[-1] not in READING


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
        return ACCESS.get(command, GATEWAY).call(flags.action, flags) or 0
    except ServerError as error:
        print(f"tokenfleet: {error}", file=sys.stderr)
        return 1


def new_parser(command: str) -> FlagParser:
    parser = FlagParser(prog=f"tokenfleet {command}", description=describe(command), allow_abbrev=False)
    actions = {it.words.partition(" ")[2]: it for it in ACTIONS if it.words.split()[0] == command}
    words = None
    if "" not in actions:
        words = parser.add_subparsers(required=True, metavar="|".join(actions), parser_class=FlagParser)
    for word, action in actions.items():
        more: Any = {"help": action.help, "description": action.help, "allow_abbrev": False}
        own = words.add_parser(word, **more) if words else parser
        own.set_defaults(action=action)
        for flag in (ACCESS.get(command, GATEWAY).flag, *action.flags.split()):
            help, more = FLAGS.get(f"{command} {flag}") or FLAGS[flag]
            own.add_argument(*flag.split("/"), help=help, **more)
    return parser


def show_table(rows: Sequence[Any], columns: Columns, if_none: str = "") -> None:
    """Print a line for each row, or `if_none`."""
    print_lines(table_of(rows, columns) if rows or not if_none else if_none)


def local_time(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s)) if unix_s else ""


def utc_time(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(unix_s)) if unix_s else ""


# --- ways to the fleet --------------------------------------------------------------------------------------


def call_gateway(action: Action, flags: argparse.Namespace) -> int | None:
    url = find_server(flags, action.changes)
    with new_client(httpx.Client, url, action.read_s, os.environ.get("API_KEY")) as client:
        result: int | None = action.run(client, flags)
    return result


def call_broker(action: Action, flags: argparse.Namespace) -> None:
    pool = getattr(flags, "pool", None)
    settings = find_broker(action.changes, flags.redis_url, pool)
    flags.pool = settings.pool

    async def run() -> None:
        async with PoolClient.connect(settings) as client:
            try:
                await action.run(client, flags)
            except ERRORS as error:
                raise ServerError(describe_error(error)) from error
            except ChangeRefused as error:
                raise ServerError(str(error)) from error

    asyncio.run(run())


def call_directory(action: Action, flags: argparse.Namespace) -> None:
    url = find_directory(flags.directory_url, action.changes)

    async def run() -> None:
        async with connect_setting("directory_url", url) as redis:
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    await action.run(DirectoryClient(redis), flags)
            except ERRORS as error:
                raise ServerError(describe_error(error)) from error

    asyncio.run(run())


def call_launcher(action: Action, flags: argparse.Namespace) -> None:
    order = action.run(flags)
    try:
        asyncio.run(control_socket.order(find_launcher(flags.pid), order, partial(print, flush=True)))
    except control_socket.OrderFailed as error:
        raise ServerError(str(error)) from error


# --- adapters -----------------------------------------------------------------------------------------------


def list_adapters(client: httpx.Client, flags: argparse.Namespace) -> None:
    content = fetch_json(client, "/admin/adapters")

    def workers(one: Any) -> str:
        causes = "".join(f"; {worker}: {why}" for worker, why in one["refused"].items())
        return f"{one['num_workers']} of {content['num_workers']}{causes}"

    columns: Columns = {"adapter": "name", "state": "state", "workers": workers, "rank": "rank"}
    columns = {**columns, "base model": "base_model", "path": "path"}
    with frame_errors(content):
        show_table(content["adapters"], columns, "there are no adapters")


def load_adapter(client: httpx.Client, flags: argparse.Namespace) -> None:
    source = read_source(flags.adapter)
    body = {"lora_name": source.name, "lora_path": source.path, "load_inplace": flags.replace}
    print(printable(post(client, "/v1/load_lora_adapter", json=body, timeout=ADAPTER_TIMEOUT).text))


def unload_adapter(client: httpx.Client, flags: argparse.Namespace) -> None:
    body = {"lora_name": flags.name}
    print(printable(post(client, "/v1/unload_lora_adapter", json=body, timeout=ADAPTER_TIMEOUT).text))


def read_source(word: str) -> AdapterSource:
    """An adapter as `name=path` or a hub id; a folder that is here is named by its whole path. Raises
    SettingError.
    """
    try:
        source = read_adapter(word)
    except SettingError as error:
        raise SettingError("adapter", error.cause) from error
    folder = Path(source.path).expanduser()
    return source._replace(path=str(folder.resolve())) if folder.is_dir() else source


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
    with frame_errors(found):
        for name, events in found["timelines"].items():
            begin_ms = events[0]["at_ms"]
            rows = [one | {"after": f"{(one['at_ms'] - begin_ms) / 1000:.3f}"} for one in events]
            columns: Columns = {
                "time": lambda one: local_time(one["at_ms"] / 1000),
                "after s": "after",
                "what": lambda one: one["what"].replace("_", " "),
                "worker": "worker",
                "attempt": lambda one: str(one["attempt"] or ""),
                "tokens": "num_tokens",
                "cached": lambda one: str(one.get("num_cached") or ""),
                "why": lambda one: ": ".join([one["why"], *finish_reasons.ERRORS.get(one["why"], ())[1:]]),
            }
            print(f"request {printable(name)}")
            show_table(rows, columns)


# --- jobs ---------------------------------------------------------------------------------------------------


def list_jobs(client: httpx.Client, flags: argparse.Namespace, status: str = "") -> None:
    """Print jobs; pages are read until there are enough of them."""
    asked = {"status": status or flags.status, "tenant": flags.tenant, "search": flags.search}
    query = {name: text for name, text in asked.items() if text}
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
    with frame_errors(found):
        show_table(found, JOB_COLUMNS, "" if cursor else "there are no such jobs")
    if cursor:
        print(f"more follow: --cursor '{printable(cursor)}'")


def show_job(client: httpx.Client, flags: argparse.Namespace) -> None:
    """Print all that is kept of a job, as JSON."""
    content = fetch_json(client, path_of(flags))
    print(orjson.dumps(content, option=orjson.OPT_INDENT_2).decode())


def change_job(client: httpx.Client, flags: argparse.Namespace, change: str, done: str) -> None:
    post(client, f"{path_of(flags)}/{change}")
    print(f"{printable(flags.job_id)} is {done}")


def path_of(flags: argparse.Namespace) -> str:
    return f"/admin/jobs/{quote(flags.job_id, safe='')}"


JOB_COLUMNS: dict[str, str | Callable[[Any], str]] = {
    "job": "id",
    "state": "state",
    "kind": "kind",
    "tenant": "tenant",
    "submitted": lambda one: local_time(one["created_at"]),
    "not before": lambda one: local_time(one["not_before"]),
    "ended": lambda one: local_time(one["ended_at"]),
    "why": lambda one: f"{one['reason']}: {one['error']}" if one["reason"] else "",
}


# --- keys ---------------------------------------------------------------------------------------------------


async def add_key(pool: PoolClient, flags: argparse.Namespace) -> None:
    print_issued(await api_keys.add_key(pool, fields_of(flags, await pool.read_time())))


async def rotate_key(pool: PoolClient, flags: argparse.Namespace) -> None:
    print_issued(await api_keys.rotate_key(pool, flags.key_id))


async def revoke_key(pool: PoolClient, flags: argparse.Namespace) -> None:
    key = await api_keys.revoke_key(pool, flags.key_id)
    print(f"{key.key_id} is revoked since {utc_time(key.revoked)}")


async def list_keys(pool: PoolClient, flags: argparse.Namespace) -> None:
    keys, now_s = [*(await api_keys.read_keys(pool)).values()], await pool.read_time()
    columns: dict[str, Callable[[ApiKey], str]] = {
        "id": lambda key: key.key_id,
        "name": lambda key: key.name,
        "tenant": lambda key: key.tenant,
        "state": lambda key: "admin" if key.admin and key.state(now_s) == "active" else key.state(now_s),
        "class": lambda key: key.service_class,
        "limits": describe_limits,
        "models": lambda key: ", ".join(key.models),
        "adapters": lambda key: ", ".join(key.adapters),
        "expires": lambda key: utc_time(key.expires_at),
    }
    show_table(keys, columns, "there are no API keys")


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
        raise SettingError("keys", str(error)) from error


# --- models -------------------------------------------------------------------------------------------------


async def list_models(directory: DirectoryClient, flags: argparse.Namespace) -> None:
    """Print a line for each model and pool: models with weights first, then each pool's own names."""
    content = await directory.read()
    rows = [
        {"model": model, "share": f"{100 * weight / (sum(weights.values()) or 1):.4g}%"}
        | of_pool(content, pool)
        for model, weights in sorted(content.weights.items())
        for pool, weight in weights.items()
    ]
    own = {(model, name) for name, known in content.pools.items() for model in known.entry.models or [name]}
    rows += [
        {"model": model, "share": ""} | of_pool(content, pool)
        for model, pool in sorted(own)
        if model not in content.weights
    ]
    titles = ("model", "pool", "share", "state", "workers", "waiting", "running", "broker")
    show_table(rows, {title: title for title in titles})


def of_pool(content: DirectoryContent, pool: str) -> dict[str, Any]:
    """What the directory says of a pool."""
    if (known := content.pools.get(pool)) is None:
        return dict.fromkeys(("workers", "waiting", "running", "broker"), "") | {
            "pool": pool,
            "state": "gone",
        }
    entry, silent = known.entry, f"silent for {known.age_s:.0f} s"
    state = silent if known.age_s > SILENT_S else "live" if known.is_live else "no worker"
    counts = {"workers": entry.num_ready, "waiting": entry.waiting, "running": entry.rows}
    return {"pool": pool, "state": state, **counts, "broker": entry.address}


async def set_weights(directory: DirectoryClient, flags: argparse.Namespace) -> None:
    """Raises SettingError for weights that give nothing, and for pools that are not there."""
    weights = dict(flags.weights)
    if len(weights) < len(flags.weights):
        raise SettingError("weights", "a pool is named twice")
    if not sum(weights.values()):
        raise SettingError("weights", "all are 0, so no pool would get a request")
    content = await directory.read()
    if absent := [name for name in weights if name not in content.pools]:
        known = ", ".join(sorted(content.pools)) or "none"
        raise SettingError("weights", f"there is no pool {absent[0]!r}; those of the directory: {known}")
    if flags.model not in content.weights and len(content.weights) >= MAX_MODELS:
        raise SettingError("model", f"{MAX_MODELS} models have weights already; `models unset` forgets some")
    await directory.set_weights(flags.model, weights)
    await list_models(directory, flags)


async def unset_weights(directory: DirectoryClient, flags: argparse.Namespace) -> None:
    """Raises SettingError if the model has none."""
    if flags.model not in (await directory.read()).weights:
        raise SettingError(
            "model", f"{flags.model!r} has no weights; `tokenfleet models list` shows those that do"
        )
    await directory.set_weights(flags.model, {})
    await list_models(directory, flags)


def read_name(text: str) -> str:
    if not 0 < len(text) <= MAX_NAME:
        raise SettingError("model", f"a name has 1 to {MAX_NAME} characters, not {len(text)}")
    return text


def read_weight(word: str) -> tuple[str, float]:
    pool, _, text = word.rpartition("=")
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if pool and 0 <= weight <= MAX_WEIGHT:
        return pool, weight
    raise SettingError("weights", f"{word!r} is not a pool and a weight of 0 to {MAX_WEIGHT}, as a=90")


# --- roll ---------------------------------------------------------------------------------------------------


def order_roll(flags: argparse.Namespace) -> control_socket.Order:
    """The order to roll, with the variables that flags stand for. Raises SettingError."""
    given = setting_flags.read(flags.rest, {}, "tokenfleet roll")
    for name, value in given.items():
        if name not in Settings.model_fields:
            raise SettingError(value.name, "is no setting of Tokenfleet itself, so a roll cannot change it")
    return {"settings": {name.upper(): value.text for name, value in given.items()}}


# --- usage --------------------------------------------------------------------------------------------------

USAGE_COLUMNS = {
    "requests": "requests",
    "prompt_tokens": "prompt",
    "cached_tokens": "cached",
    "completion_tokens": "answers",
    "speculated_tokens": "speculated",
    "total_tokens": "tokens",
}
"""Numbers of a row → titles of their columns."""


def show_usage(client: httpx.Client, flags: argparse.Namespace) -> None:
    """Print a line for each group, and one for all together."""
    names = ("key", "tenant", "model", "from", "to", "group_by")
    params = {name: value for name in names if (value := getattr(flags, name)) is not None}
    found = fetch_json(client, f"/usage?{httpx.QueryParams(params)}")
    with frame_errors(found):
        by: list[str] = found["group_by"]
        total = found["total"] | dict.fromkeys(by, "") | dict.fromkeys(by[:1], "total")
        rows = [
            {name: row[name] or "-" for name in by}
            | {t: f"{row[name]:,}" for name, t in USAGE_COLUMNS.items()}
            for row in (*found["data"], *([total] if by else []))
        ]
        print(printable(f"{found['from']} to {found['to']}"))
        show_table(rows, {title: title for title in (*by, *USAGE_COLUMNS.values())})


# --- webhooks -----------------------------------------------------------------------------------------------


def list_events(client: httpx.Client, flags: argparse.Namespace, state: str) -> None:
    content = fetch_json(client, f"/admin/webhooks?state={state}&limit={flags.limit}")
    columns: dict[str, str | Callable[[Any], str]] = {
        "event": "id",
        "type": "type",
        "of": "object_id",
        "dead since" if state == "dead" else "next": lambda one: local_time(one["at"]),
        "failures": "failures",
        "said": "said",
        "url": "url",
    }
    with frame_errors(content):
        show_table(content["events"], columns, f"no events are {state}")
        if (hidden := content["total"] - len(content["events"])) > 0:
            print(f"and {hidden} more (--limit)")


def retry_event(client: httpx.Client, flags: argparse.Namespace) -> None:
    post(client, f"/admin/webhooks/{quote(flags.event_id, safe='')}/retry")
    print(f"{printable(flags.event_id)} is sent now")


# --- the table ----------------------------------------------------------------------------------------------

NUMBER = {"type": int, "metavar": "N"}
NAMES = {"nargs": "+", "metavar": "NAME"}
JOB_STATES = ("queued", "running", "scheduled", "done", "failed", "cancelled", "dead")
FLAGS: dict[str, tuple[str, dict[str, Any]]] = {
    "--url": (f"the server (default: that at PORT, {RULE})", {"type": parse_url}),
    "--redis-url": (f"the fleet's broker (default: REDIS_URL, {RULE})", {"metavar": "URL"}),
    "--directory-url": (
        f"the broker with the directory of pools (default: DIRECTORY_URL, REDIS_URL, {RULE})",
        {"metavar": "URL"},
    ),
    "--pid": (f"the launcher's process (default: {RULE})", {"type": int}),
    "--against": ("the other server; AGAINST_API_KEY is sent to it", {"type": parse_url, "metavar": "URL"}),
    "--duration": (
        "seconds of all loads together (default: %(default)g)",
        {"type": float, "default": 60.0, "metavar": "S"},
    ),
    "--concurrency": (
        "users at once (default: 1,8,32)",
        {"type": bench.read_users, "default": (1, 8, 32), "metavar": "N,N"},
    ),
    "--prompt-tokens": ("of each prompt (default: %(default)s)", NUMBER | {"default": 128}),
    "bench --max-tokens": ("of each answer (default: %(default)s)", NUMBER | {"default": 64}),
    "bench --json": ("write the figures", {"type": Path, "metavar": "FILE"}),
    "adapter": ("its folder, which all workers can read, or its hub id", {"metavar": "NAME=PATH"}),
    "--replace": ("take the place of one of this name", {"action": "store_true"}),
    "name": ("as `tokenfleet adapters list` shows it", {"metavar": "NAME"}),
    "worker": ("its id in `tokenfleet status`, or its name, if only one has it", {}),
    "--pool": ("the worker's pool (default: POOL, else the fleet's)", {}),
    "job_id": ("as `tokenfleet jobs list` shows it", {"metavar": "ID"}),
    "--status": ("only jobs in this state", {"choices": JOB_STATES}),
    "--tenant": ("only of this tenant", {}),
    "--search": ("only jobs whose id has this text", {"metavar": "TEXT"}),
    "--limit": ("most lines that are shown (default 100)", {"type": int, "default": 100}),
    "--cursor": ("go on where another list ended, as that one says", {"default": ""}),
    "key_id": ("as `tokenfleet keys list` shows it", {"metavar": "KEY_ID"}),
    "--name": ("what you call it", {}),
    "keys --tenant": ("whose requests it makes (default: a tenant of its own)", {}),
    "--class": ("class of its requests that name none", {"dest": "service_class"}),
    "--weight": ("share of its tenant among others (default: 1)", {"type": float}),
    "--max-concurrent": ("requests at once (default: no limit)", NUMBER),
    "--requests-per-minute": ("requests a minute (default: no limit)", NUMBER),
    "--tokens-per-minute": ("tokens of prompts and answers a minute (default: no limit)", NUMBER),
    "--budget-tokens": ("tokens a calendar month (UTC) (default: no limit)", NUMBER),
    "--models": ("the only models that it may use", NAMES),
    "--adapters": ("the only adapters that it may use", NAMES),
    "--expires": ("2027-01-31, or in a time as 30d or 12h", {"dest": "expires_at"}),
    "--webhook": ("told of the end of all that it asks for", {"metavar": "URL"}),
    "--webhook-secret": ("signs these events: whsec_…", {"metavar": "SECRET"}),
    "--admin": ("it may manage keys and the fleet", {"action": "store_true", "default": None}),
    "model": ("the name in requests", {"metavar": "NAME", "type": read_name}),
    "weights": ("such as a=90 b=10", {"metavar": "POOL=WEIGHT", "nargs": "+", "type": read_weight}),
    "--key": ("only of the API key with this id", {}),
    "--model": ("only of this model", {}),
    "--from": ("a time (UTC) as 2026-11-01 or 2026-11-27T08:00:00Z (default: the begin of this month)", {}),
    "--to": ("a time (default: now)", {}),
    "--group-by": ("some of hour,day,month,key,tenant,model (default: key,tenant,model)", {}),
    "event_id": ("as `tokenfleet webhooks dead` shows it", {"metavar": "EVENT_ID"}),
    "request_id": (
        "the header x-request-id of the response, or its `id` on /v1; the number of a choice may follow",
        {},
    ),
    "--once": ("print one table and end (as when the output is no terminal)", {"action": "store_true"}),
    "--json": ("print GET /fleet with rates, and end", {"action": "store_true"}),
    "--system": ("the system prompt", {"default": "", "metavar": "TEXT"}),
    "--temperature": (
        "0 always takes the most likely token (default: the server's)",
        {"type": float, "metavar": "X"},
    ),
    "--max-tokens": ("most tokens of one answer (default: the server's)", NUMBER),
    "--seed": ("makes sampling repeatable: the same seed gives the same answer", NUMBER),
    "file": ("the requests", {"nargs": "?", "type": Path}),
    "-i/--input-file": ("the requests, too", {"dest": "input", "type": Path}),
    "-o/--output-file": ("the answers", {"dest": "output", "type": Path, "required": True}),
    "--id": ("wait for this batch, which was begun before", {}),
    "--window": (
        "by when (default: %(default)s)",
        {"choices": ("1h", "24h", "best_effort"), "default": "24h"},
    ),
}
"""Flag, or command and flag → its help, and what else argparse is told of it."""
KEY_FLAGS = (
    "--name --tenant --class --weight --max-concurrent --requests-per-minute --tokens-per-minute "
    "--budget-tokens --models --adapters --expires --webhook --webhook-secret --admin"
)
ACTIONS = (
    Action("bench", bench.run, "--against --duration --concurrency --prompt-tokens --max-tokens --json"),
    Action("explain", explain, "request_id"),
    Action("status", status.show, "--once --json", read_s=5.0),
    Action("chat", chat.run, "--system --temperature --max-tokens --seed", read_s=600.0),
    Action("batch", batch.run, "file -i/--input-file -o/--output-file --id --window", read_s=60.0),
    Action("adapters list", list_adapters, "", "show all adapters"),
    Action("adapters load", load_adapter, "adapter --replace", "load an adapter on all workers"),
    Action("adapters unload", unload_adapter, "name", "give requests an adapter no more"),
    Action("drain", drain, "worker --pool"),
    Action("jobs list", list_jobs, "--status --tenant --search --limit --cursor", "show jobs"),
    Action("jobs show", show_job, "job_id", "print a job and what it asks for, as JSON"),
    Action(
        "jobs cancel",
        partial(change_job, change="cancel", done="cancelled"),
        "job_id",
        "end a job that waits, is scheduled or runs",
    ),
    Action(
        "jobs retry",
        partial(change_job, change="retry", done="tried again"),
        "job_id",
        "try a dead job again, with its id",
    ),
    Action(
        "jobs dead",
        partial(list_jobs, status="dead"),
        "--tenant --search --limit --cursor",
        "show jobs that could not be served",
    ),
    Action("keys add", add_key, KEY_FLAGS, "make a key, and print it once"),
    Action("keys list", list_keys, "", "show all keys"),
    Action("keys revoke", revoke_key, "key_id", "end a key for ever, and its running requests"),
    Action("keys rotate", rotate_key, "key_id", "give a key another text; the old one counts no more"),
    Action("models list", list_models, "", "show models, pools and weights"),
    Action("models set", set_weights, "model weights", "share the requests of a model out by weight"),
    Action("models unset", unset_weights, "model", "forget the weights of a model"),
    Action("roll", order_roll, ""),
    Action("usage", show_usage, "--key --tenant --model --from --to --group-by"),
    Action(
        "webhooks list",
        partial(list_events, state="waiting"),
        "--limit",
        "show events that wait to be delivered",
    ),
    Action("webhooks dead", partial(list_events, state="dead"), "--limit", "show events that were given up"),
    Action("webhooks retry", retry_event, "event_id", "send an event again, now"),
)


class Access(NamedTuple):
    """How a command reaches the fleet.

    Attributes:
        flag: names the fleet.
        call: finds the fleet, and runs an action there. Raises SettingError, ServerError.
    """

    flag: str
    call: Callable[[Action, argparse.Namespace], int | None]


GATEWAY = Access("--url", call_gateway)
ACCESS = {
    "bench": Access("--url", lambda action, flags: action.run(find_server(flags, action.changes), flags)),
    "drain": Access("--redis-url", call_broker),
    "keys": Access("--redis-url", call_broker),
    "models": Access("--directory-url", call_directory),
    "roll": Access("--pid", call_launcher),
}
"""By command, where it is not GATEWAY."""
