"""`tokenfleet bench`: measures this fleet, alone or beside another server."""

import argparse
import asyncio
import contextlib
import dataclasses
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import orjson
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from common.settings.flags import FlagParser
from common.settings.settings import SettingError
from deploy.bench import load, measure, report
from deploy.bench.measure import figures
from deploy.cli.client import ServerError, api_key, new_client, parse_url, print_error, write_file
from deploy.cli.target import add_url, find_server

READ_TIMEOUT_S = 60.0
MAX_USERS = 1024
MIN_DURATION_S = 1.0
DESCRIPTION = """Measure this fleet, and with --against another server beside it (TGI, vLLM, llama.cpp
or OpenAI-compatible). Both get the same prompts, streamed and greedy. API_KEY is sent to our
server, AGAINST_API_KEY to the other."""


def main(argv: Sequence[str]) -> int:
    """Run the command. Returns 0 when every server sent tokens under every load. Raises SettingError for a
    wrong flag.
    """
    flags = read_flags(argv)
    plan = load.LoadPlan(flags.duration, flags.concurrency, flags.prompt_tokens, flags.max_tokens)
    url = find_server(flags, changes=True)
    try:
        result = asyncio.run(compare([url, flags.against] if flags.against else [url], plan))
    except ServerError as error:
        return print_error(error)
    console = Console(highlight=False)
    console.print(report.view(result, console.width))
    if flags.svg:
        write_file("--svg", flags.svg, report.draw(result).encode())
    if flags.json:
        write_file("--json", flags.json, orjson.dumps(as_json(result), option=orjson.OPT_INDENT_2))
    return 0 if all(it.tokens_per_s for it in result.figures.values()) else 1


def read_flags(argv: Sequence[str]) -> argparse.Namespace:
    parser = FlagParser(prog="tokenfleet bench", allow_abbrev=False, description=DESCRIPTION)
    add_url(parser)
    parser.add_argument("--against", type=parse_url, metavar="URL", help="the other server")
    parser.add_argument(
        "--duration",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds of the whole benchmark (default: %(default)g)",
    )
    parser.add_argument(
        "--concurrency", default="1,8,32", metavar="N,N", help="users at once (default: %(default)s)"
    )
    parser.add_argument("--prompt-tokens", type=int, default=128, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--max-tokens", type=int, default=64, metavar="N", help="of each answer (default: %(default)s)"
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write a picture (needs the extra `bench`)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    flags = parser.parse_args(list(argv))
    try:
        flags.concurrency = sorted({int(word) for word in flags.concurrency.split(",")})
    except ValueError as error:
        raise SettingError(
            "--concurrency", f"{flags.concurrency!r} is not a list of numbers such as 1,8,32"
        ) from error
    if not (flags.concurrency[0] >= 1 and flags.concurrency[-1] <= MAX_USERS):
        raise SettingError("--concurrency", f"from 1 to {MAX_USERS} users")
    for name, least in (("duration", MIN_DURATION_S), ("prompt_tokens", 1), ("max_tokens", 1)):
        if not least <= getattr(flags, name) < float("inf"):
            raise SettingError(
                f"--{name.replace('_', '-')}", f"{getattr(flags, name)} is less than {least}, or endless"
            )
    if flags.svg is not None:
        report.check_matplotlib()
    for name, path in (("--svg", flags.svg), ("--json", flags.json)):
        if path is not None:
            write_file(name, path, b"", "ab")  # fails now, and not after a minute
    return flags


async def compare(urls: Sequence[str], plan: load.LoadPlan) -> report.Comparison:
    """Measure the servers at `urls`, ours first. Raises ServerError."""
    async with contextlib.AsyncExitStack() as stack:
        keys = (api_key(), os.environ.get("AGAINST_API_KEY"))
        clients = [
            await stack.enter_async_context(new_client(httpx.AsyncClient, url, READ_TIMEOUT_S, key))
            for url, key in zip(urls, keys, strict=False)
        ]
        found = [await measure.identify(client) for client in clients]
        path = measure.route(found)
        targets = [load.Target(server, client, path) for server, client in zip(found, clients, strict=True)]
        begun_s, begun_cpu_s = time.monotonic(), time.process_time()
        with progress_bar() as show:
            prompt_tokens, rounds = await load.measure(targets, plan, Stage(show, plan.duration_s).show_stage)
        cores = (time.process_time() - begun_cpu_s) / (time.monotonic() - begun_s)
    measured = {key: figures(done) for key, done in rounds.items()}
    return report.Comparison(found, plan, path, measured, prompt_tokens, cores)


def progress_bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


class Stage:
    """Shows the round that runs in the progress bar."""

    def __init__(self, show: Progress, duration_s: float) -> None:
        self.show = show
        self.task = show.add_task("", total=duration_s)
        self.done_s = 0.0

    def show_stage(self, words: str, seconds: float) -> None:
        """Show that a round of `seconds` begins."""
        self.show.update(self.task, description=words, completed=self.done_s)
        self.done_s += seconds


def as_json(result: report.Comparison) -> dict[str, Any]:
    rows = [
        {"users": users, "server": i} | dataclasses.asdict(it) for (users, i), it in result.figures.items()
    ]
    return {
        "plan": dataclasses.asdict(result.plan),
        "servers": [dataclasses.asdict(server) for server in result.servers],
        "route": result.path,
        "prompt_tokens": result.prompt_tokens,
        "client_cores": result.client_cores,
        "figures": rows,
    }
