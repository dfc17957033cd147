"""`tokenfleet chaos`: streams from any OpenAI-compatible server while it is killed, paused and cut off."""

import argparse
import asyncio
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import orjson
import setproctitle
from rich.console import Console
from rich.status import Status

from common.settings.flags import FlagParser
from common.settings.settings import SettingError
from deploy.bench.measure import Server, identify
from deploy.chaos import page, report
from deploy.chaos.figures import COUNTS, ChaosFigures, failed_counts, figures
from deploy.chaos.run import ChaosPlan, Recording, run
from deploy.chaos.stream import Endpoint
from deploy.chaos.strikes import StrikePlan
from deploy.cli.client import (
    ServerError,
    check_status,
    connection_errors,
    new_client,
    parse_url,
    print_error,
    print_lines,
    write_file,
)

MAX_STREAMS = 1024
MAX_PROMPTS = 10_000
MAX_RESUME_S = 3600
WORDS_PER_TOKEN = 0.8
DESCRIPTION = """Stream answers from an OpenAI-compatible server at temperature 0 while it is killed, paused
and cut off, and compare each with the undisturbed answer: which tokens are lost, repeated or changed, which
requests fail, how long streams pause. No request is sent twice. docs/chaos.md defines each figure.
AGAINST_API_KEY is sent to the server."""


def main(argv: Sequence[str]) -> int:
    """Run the command. Returns 1 when a count of --fail-on is not zero, or the server answers nothing. Raises
    SettingError for a wrong flag.
    """
    setproctitle.setproctitle(
        "tokenfleet chaos"
    )  # `--kill 'pkill -f worker'` must not find our own arguments
    flags = read_flags(argv)
    try:
        server, recording = asyncio.run(measure(flags))
    except ServerError as error:
        return print_error(error)
    found = figures(recording)
    print_lines(report.view(server, recording, found))
    if flags.json:
        write_file(
            "--json", flags.json, orjson.dumps(as_json(server, recording, found), option=orjson.OPT_INDENT_2)
        )
    if flags.report:
        write_file("--report", flags.report, page.render(server, recording, found).encode())
    failed = failed_counts(found, flags.fail_on)
    if failed:
        print_lines(f"failed on: {', '.join(failed)}")
    return int(bool(failed))


def read_flags(argv: Sequence[str]) -> argparse.Namespace:
    parser = FlagParser(prog="tokenfleet chaos", allow_abbrev=False, description=DESCRIPTION)
    parser.add_argument("--against", type=parse_url, required=True, metavar="URL", help="the server")
    parser.add_argument(
        "--model", default="", metavar="NAME", help="default: the first that the server lists"
    )
    add_load(parser)
    add_strikes(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write figures and every answer's errors")
    parser.add_argument("--report", type=Path, metavar="FILE.html", help="write a page that needs no network")
    parser.add_argument(
        "--fail-on",
        default="",
        metavar="A,B",
        help=f"exit with 1 when one of these is not 0: {', '.join(COUNTS)}",
    )
    flags = parser.parse_args(list(argv))
    check_flags(flags)
    return flags


def add_load(parser: argparse.ArgumentParser) -> None:
    number, seconds = {"type": int, "metavar": "N"}, {"type": float, "metavar": "S"}
    add: Any = parser.add_argument
    add("--duration", default=60.0, help="seconds under strikes (default: %(default)g)", **seconds)
    add("--streams", default=8, help="requests at once (default: %(default)s)", **number)
    add("--prompts", default=16, help="different prompts (default: %(default)s)", **number)
    add("--prompt-tokens", default=64, help="about so many (default: %(default)s)", **number)
    add("--max-tokens", default=128, help="of each answer (default: %(default)s)", **number)
    add("--seed", default=1, help="of prompts, their order, and cuts (default: %(default)s)", **number)
    add("--timeout", default=60.0, help="longest wait for a token (default: %(default)g)", **seconds)
    add(
        "--drop",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="share of the requests whose connection this client cuts (0 to 1)",
    )
    add(
        "--resume-s",
        default=60.0,
        help="how long a client tries to go on after its connection is lost, where the server can "
        "(0: it never does; default: %(default)g)",
        **seconds,
    )


def add_strikes(parser: argparse.ArgumentParser) -> None:
    add: Any = parser.add_argument
    command: Any = {"default": "", "metavar": "CMD"}
    add("--kill", help="a shell command that kills, such as 'pkill -9 -f EngineCore'", **command)
    add("--restart", help="started after each kill, if nothing else restarts what was killed", **command)
    add("--pause", help="a command that stops, such as 'pkill -STOP -f EngineCore'", **command)
    add("--unpause", help="the command that lets it go on, --pause-s later", **command)
    add("--pause-s", type=float, default=3.0, metavar="S", help="default: %(default)g")
    add(
        "--every",
        type=float,
        default=20.0,
        metavar="S",
        help="from one strike to the next, kills and pauses in turns; the first comes after half of it "
        "(default: %(default)g)",
    )


def check_flags(flags: argparse.Namespace) -> None:
    """Raise SettingError for the first flag that is out of its range."""
    most = float("inf")
    ranges = {
        "duration": (1, most),
        "streams": (1, MAX_STREAMS),
        "prompts": (1, MAX_PROMPTS),
        "prompt_tokens": (1, most),
        "max_tokens": (2, most),
        "timeout": (0.1, most),
        "drop": (0, 1),
        "resume_s": (0, MAX_RESUME_S),
        "pause_s": (0, most),
        "every": (0.1, most),
    }
    for name, (least, limit) in ranges.items():
        value = getattr(flags, name)
        if not least <= value <= limit or value == most:
            bounds = f"at least {least}" if limit == most else f"from {least} to {limit}"
            raise SettingError(f"--{name.replace('_', '-')}", f"{value} is not {bounds}")
    for name, other in (("pause", "unpause"), ("unpause", "pause"), ("restart", "kill")):
        if getattr(flags, name) and not getattr(flags, other):
            raise SettingError(f"--{name}", f"needs --{other}")
    flags.fail_on = [word.strip() for word in flags.fail_on.split(",") if word.strip()]
    for word in flags.fail_on:
        if word not in COUNTS:
            raise SettingError("--fail-on", f"{word!r} is none of {', '.join(COUNTS)}")
    for name, path in (("--json", flags.json), ("--report", flags.report)):
        if path is not None:
            write_file(name, path, b"", "ab")  # fails now, and not after a minute


async def measure(flags: argparse.Namespace) -> tuple[Server, Recording]:
    """Find out what the server is, and run the plan. Raises ServerError."""
    key = os.environ.get("AGAINST_API_KEY")
    async with new_client(httpx.AsyncClient, flags.against, flags.timeout, key) as client:
        server = await identify(client)
        if flags.model:
            server = dataclasses.replace(server, model=flags.model)
        endpoint = await choose_endpoint(client, server, flags)
        console = Console(stderr=True)
        with Status("", console=console) as status:
            show = status.update if console.is_terminal else console.print
            return server, await run(endpoint, plan_of(flags), show)


def plan_of(flags: argparse.Namespace) -> ChaosPlan:
    strikes = StrikePlan(flags.kill, flags.restart, flags.pause, flags.unpause, flags.pause_s, flags.every)
    words = max(2, round(flags.prompt_tokens * WORDS_PER_TOKEN))
    return ChaosPlan(flags.duration, flags.streams, flags.prompts, words, flags.drop, flags.seed, strikes)


async def choose_endpoint(client: httpx.AsyncClient, server: Server, flags: argparse.Namespace) -> Endpoint:
    """Ask for one token. Returns the first of OpenAI's two routes that the server has. Raises ServerError."""
    fields = {"model": server.model, "max_tokens": flags.max_tokens}
    fields |= {"ignore_eos": True} if server.ignores_eos else {}
    for path in ("/v1/completions", "/v1/chat/completions"):
        endpoint = Endpoint(client, path, fields, flags.resume_s)
        content = dataclasses.replace(endpoint, fields=fields | {"max_tokens": 1}).body("Hello")
        with connection_errors(str(client.base_url)):
            answer = await client.post(path, content=content, headers={"content-type": "application/json"})
        if answer.status_code not in (404, 405, 501):
            check_status(answer.status_code, answer.content)
            return endpoint
    raise ServerError(
        f"{server.url} is not OpenAI-compatible: it has neither /v1/completions nor /v1/chat/completions"
    )


def as_json(server: Server, recording: Recording, found: ChaosFigures) -> dict[str, Any]:
    begun_s = recording.begun_s
    return {
        "server": dataclasses.asdict(server),
        "plan": dataclasses.asdict(recording.plan),
        "figures": dataclasses.asdict(found),
        "strikes": [
            {"kind": strike.kind, "at_s": strike.begun_s - begun_s, "problem": strike.problem}
            for strike in recording.striker.strikes
        ],
        "wrong_answers": report.wrong_answers(recording),
    }
