"""`tokenfleet bench`: measures this fleet, alone or beside another server.

A number of concurrent users send requests, each the next one when the last one is answered. Prompts are plain
English and differ from their first words on, so that no server's prefix cache helps. The report is a table
with ratios, and notes.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path, PurePath
from statistics import fmean
from typing import Any

import httpx
import orjson
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from common.process.logs import plural
from common.settings.flags import FlagParser
from common.settings.settings import SettingError
from deploy.cli.client import (
    ServerError,
    SseDecoder,
    api_key,
    check_status,
    connection_errors,
    error_text,
    frame_errors,
    new_client,
    new_table,
    one_line,
    parse_url,
    print_error,
    printable,
    write_file,
)
from deploy.cli.target import add_url, find_server

COMPLETIONS = "/v1/completions"
GENERATE = "/generate_stream"
TOKENFLEET, TGI, VLLM, LLAMA_CPP, OPENAI = "Tokenfleet", "TGI", "vLLM", "llama.cpp", "OpenAI API"
IGNORES_EOS = (TOKENFLEET, VLLM, LLAMA_CPP)
"""Servers that accept `ignore_eos`. Answers of others may end early; only received tokens are counted."""
KEY_REFUSED = (401, 403)


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    kind: str
    version: str
    model: str

    @property
    def name(self) -> str:
        return f"{self.kind} {self.version}".strip()

    @property
    def ignores_eos(self) -> bool:
        return self.kind in IGNORES_EOS


def route(servers: list[Server]) -> str:
    """Return one route for all servers: TGI's if one of them is TGI: each of its frames is one token."""
    return GENERATE if any(server.kind == TGI for server in servers) else COMPLETIONS


async def identify(client: httpx.AsyncClient) -> Server:
    """Find out the kind of a server by routes that only one kind has. Raises ServerError if it has none."""
    url = str(client.base_url).rstrip("/")
    if "processes" in (fleet := await get(client, "/fleet")):
        return server(url, TOKENFLEET, fleet.get("version"), fleet.get("model"))
    if "router" in (info := await get(client, "/info")):
        return server(url, TGI, info.get("version"), info.get("model_id"))
    model = first_model(await get(client, "/v1/models"))
    if "default_generation_settings" in (props := await get(client, "/props")) or "build_info" in props:
        name = props.get("model_alias") or PurePath(str(props.get("model_path") or "")).name
        return server(url, LLAMA_CPP, props.get("build_info"), model or name)
    if model and "version" in (about := await get(client, "/version")):
        return server(url, VLLM, about["version"], model)
    if model:
        return server(url, OPENAI, "", model)
    raise ServerError(
        f"{url} is none of the servers known here: it has neither /fleet nor /info nor /v1/models"
    )


def server(url: str, kind: str, version: Any, model: Any) -> Server:
    return Server(url, kind, printable(str(version or "")), printable(str(model or "")))


def first_model(answer: dict[str, Any]) -> str:
    try:
        return str(answer["data"][0]["id"])
    except (LookupError, TypeError):
        return ""


async def get(client: httpx.AsyncClient, path: str) -> dict[str, Any]:
    """Fetch the JSON object at a path; empty if there is none. Raises ServerError when the server does not
    answer, or refuses our key.
    """
    with connection_errors(str(client.base_url)):
        answer = await client.get(path)
    if answer.status_code in KEY_REFUSED:
        check_status(answer.status_code, answer.content)
    try:
        found = orjson.loads(answer.content) if answer.status_code == httpx.codes.OK else None
    except orjson.JSONDecodeError:
        found = None
    return found if isinstance(found, dict) else {}


@dataclass(slots=True)
class TimedAnswer:
    """An answer, filled in while it is streamed.

    Attributes:
        sent_s, times_s, ended_s: monotonic times of the request, of each frame with tokens, and of the end
            (0: it was cut off).
        num_tokens, prompt_tokens: as the server reports them; None if it does not.
        error: why it failed; empty if it did not.
    """

    sent_s: float
    times_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    num_tokens: int | None = None
    prompt_tokens: int | None = None
    error: str = ""


def body(server: Server, path: str, prompt: str, max_tokens: int) -> bytes:
    """Return a greedy, streamed request that ignores the end-of-sequence token if the server can do so."""
    ignore_eos = {"ignore_eos": True} if server.ignores_eos else {}
    if path == GENERATE:
        parameters = {"max_new_tokens": max_tokens, "do_sample": False, "details": True} | ignore_eos
        return orjson.dumps({"inputs": prompt, "parameters": parameters})
    fields = {"model": server.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    return orjson.dumps(fields | {"stream": True, "stream_options": {"include_usage": True}} | ignore_eos)


async def send(client: httpx.AsyncClient, path: str, content: bytes, answer: TimedAnswer) -> None:
    """Send the request, and fill in the answer until it ends. Raises ServerError."""
    headers = {"content-type": "application/json"}
    with connection_errors(str(client.base_url)):
        async with client.stream("POST", path, content=content, headers=headers) as response:
            if response.status_code != httpx.codes.OK:
                check_status(response.status_code, await response.aread())
            frames = SseDecoder()
            async for chunk in response.aiter_raw():
                now_s = time.monotonic()
                for frame in frames.feed(chunk):
                    read_frame(answer, frame, now_s)
    if not (answer.times_s or answer.num_tokens):
        raise ServerError("the server's answer has no token")
    answer.ended_s = time.monotonic()


def read_frame(answer: TimedAnswer, frame: dict[str, Any], now_s: float) -> None:
    """Add one frame, of either route, to the answer."""
    if error := error_text(frame):
        raise ServerError(f"the server ends the answer: {one_line(error)}")
    with frame_errors(frame):
        if has_tokens(frame):
            answer.times_s.append(now_s)
        usage = frame.get("usage") or {}
        details = frame.get("details") or {}
        answer.num_tokens = (
            usage.get("completion_tokens") or details.get("generated_tokens") or answer.num_tokens
        )
        answer.prompt_tokens = (
            usage.get("prompt_tokens") or details.get("input_length") or answer.prompt_tokens
        )


def has_tokens(frame: dict[str, Any]) -> bool:
    """Whether a frame has tokens. A token may have no text (half a character). A last frame with only a
    finish reason has no token.
    """
    choices = frame.get("choices")
    if not choices:
        return "token" in frame
    return bool(choices[0].get("text")) or not choices[0].get("finish_reason")


@dataclass(frozen=True, slots=True)
class Round:
    """One server under one load. Requests that were unanswered at `ended_s` were cut off."""

    begun_s: float
    ended_s: float
    answers: Sequence[TimedAnswer]


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of all rounds with one load. None: not known, because too many waits were cut off.

    Attributes:
        spread: the largest tokens/s of a round less the smallest, by the mean; 0 for a single round.
        first_p50_s, first_p99_s: from the request to the first frame with tokens.
        gap_p50_s, gap_p99_s: between two frames of one answer.
        tokens_per_frame: 1 if every token has a frame of its own.
        num_answers: complete answers.
        num_errors: failed answers; `error` is the reason of the first.
    """

    tokens_per_s: float
    spread: float
    first_p50_s: float | None
    first_p99_s: float | None
    gap_p50_s: float | None
    gap_p99_s: float | None
    tokens_per_frame: float
    num_answers: int
    num_errors: int
    error: str


def quantile(done: Iterable[float], cut: Iterable[float], q: float) -> float | None:
    """Return the smallest time within which a share `q` of all waits ends; None: too many were cut off.

    A wait that was cut off counts as one that lasts at least until the cut (Kaplan and Meier, "Nonparametric
    Estimation from Incomplete Observations", 1958). If it did not count, a server that lets its clients wait
    would look faster. Without cuts this is the nearest-rank percentile.

    Args:
        done, cut: seconds of waits that ended, and of waits that were cut off.
    """
    waits = sorted([(wait, False) for wait in done] + [(wait, True) for wait in cut])
    waiting, still = len(waits), 1.0
    for wait, was_cut in waits:
        if not was_cut:
            still *= 1 - 1 / waiting
            if 1 - still >= q - 1e-9:
                return wait
        waiting -= 1
    return None


def figures(rounds: Sequence[Round]) -> Figures:
    answers = [answer for one in rounds for answer in one.answers]
    complete = [answer for answer in answers if answer.ended_s]
    errors = [answer.error for answer in answers if answer.error]
    num_frames = sum(len(answer.times_s) for answer in answers)
    per_frame = tokens_per_frame(complete)
    seconds = sum(one.ended_s - one.begun_s for one in rounds)
    firsts = [answer.times_s[0] - answer.sent_s for answer in answers if answer.times_s]
    gaps = [later - sooner for answer in answers for sooner, later in pairwise(answer.times_s)]
    first_cut, gap_cut = cut_off(rounds)
    speeds = [sum(len(it.times_s) for it in one.answers) / (one.ended_s - one.begun_s) for one in rounds]
    return Figures(
        tokens_per_s=num_frames * per_frame / seconds if seconds > 0 else 0.0,
        spread=(max(speeds) - min(speeds)) / (sum(speeds) / len(speeds)) if any(speeds) else 0.0,
        first_p50_s=quantile(firsts, first_cut, 0.5),
        first_p99_s=quantile(firsts, first_cut, 0.99),
        gap_p50_s=quantile(gaps, gap_cut, 0.5),
        gap_p99_s=quantile(gaps, gap_cut, 0.99),
        tokens_per_frame=per_frame,
        num_answers=len(complete),
        num_errors=len(errors),
        error=errors[0] if errors else "",
    )


def tokens_per_frame(complete: Sequence[TimedAnswer]) -> float:
    """Return the mean by the server's own counts of tokens; 1 if it sends none."""
    counts = [
        (answer.num_tokens, len(answer.times_s))
        for answer in complete
        if answer.num_tokens and answer.times_s
    ]
    return sum(tokens for tokens, _ in counts) / sum(frames for _, frames in counts) if counts else 1.0


def cut_off(rounds: Sequence[Round]) -> tuple[list[float], list[float]]:
    """Return the waits for first tokens and for next tokens that the end of a round cut off."""
    firsts, gaps = [], []
    for one in rounds:
        for answer in one.answers:
            if answer.ended_s or answer.error:
                continue
            if answer.times_s:
                gaps.append(max(0.0, one.ended_s - answer.times_s[-1]))
            else:
                firsts.append(max(0.0, one.ended_s - answer.sent_s))
    return firsts, gaps


WORDS_PER_TOKEN = 0.8
"""Of these prompts, with usual tokenizers. The first answer says how many tokens they really have."""
MAX_TURNS = 2
"""Rounds of each load: ours, theirs, theirs, ours. A machine that becomes slower affects both servers."""
SETTLE_S = 0.3
"""Pause between two rounds, in which a server notices that its clients disconnected."""
RETRY_S = 0.2
MIN_ROUND_S = 0.5
SLOW_FIRST_TOKEN = 0.2
"""A server whose median time to first token is a larger part of a round than this gets longer rounds."""
VERBS = (
    "carried measured described painted repaired followed "
    "questioned gathered counted remembered ignored compared"
).split()
NOUNS = (
    "river engine teacher market garden letter bridge "
    "storm library soldier orchard machine captain village harbour"
).split()
ADJECTIVES = (
    "quiet enormous broken modern distant careful golden "
    "ancient practical nervous bright frozen curious local"
).split()


def prompt(seed: int, num_words: int) -> str:
    """Return a prompt of `num_words` words; the same seed gives the same prompt."""
    draw = random.Random(seed)
    words = ["Story", f"{draw.randrange(10**6)}:"]
    while len(words) < num_words:
        subject, other = draw.choice(ADJECTIVES).capitalize(), draw.choice(ADJECTIVES)
        words += [
            subject,
            f"{draw.choice(NOUNS)}s",
            draw.choice(VERBS),
            "the",
            other,
            f"{draw.choice(NOUNS)}.",
        ]
    return " ".join(words[: max(1, num_words)])


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The load of one benchmark, which takes `duration_s` in all."""

    duration_s: float
    concurrency: Sequence[int]
    prompt_tokens: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server, the client to reach it by, and the route of its requests."""

    server: Server
    client: httpx.AsyncClient
    path: str


def schedule(num_servers: int, concurrency: Sequence[int], num_turns: int) -> list[tuple[int, int]]:
    """Return (users, server) of every round, in order. The server that begins alternates."""
    order = list(range(num_servers))
    rounds = [
        (users, order if (i + turn) % 2 == 0 else order[::-1])
        for i, users in enumerate(concurrency)
        for turn in range(num_turns)
    ]
    return [(users, server) for users, turn in rounds for server in turn]


def round_s(plan: LoadPlan, num_servers: int, num_turns: int) -> float:
    """Seconds of one round: all rounds and the warm-ups (one for each server) together take the duration."""
    num_rounds = num_servers * len(plan.concurrency) * num_turns
    return max(
        MIN_ROUND_S,
        (plan.duration_s - num_servers * warm_up_s(plan, num_servers)) / num_rounds - SETTLE_S,
    )


def warm_up_s(plan: LoadPlan, num_servers: int) -> float:
    """Seconds of one warm-up, with its pause."""
    return plan.duration_s / num_servers / (len(plan.concurrency) * MAX_TURNS + 1)


def choose_num_turns(warm: Sequence[Round]) -> int:
    """Choose one long round for each load, instead of two, if a server is slow with its first tokens."""
    medians = [figures([one]).first_p50_s for one in warm]
    slow = any(
        median is None or median > SLOW_FIRST_TOKEN * (one.ended_s - one.begun_s)
        for one, median in zip(warm, medians, strict=True)
    )
    return 1 if slow else MAX_TURNS


async def measure(
    targets: Sequence[Endpoint], plan: LoadPlan, show_stage: Callable[[str, float], None]
) -> tuple[int | None, dict[tuple[int, int], list[Round]]]:
    """Measure every server under every load. Returns the mean length of the prompts in tokens, as the servers
    report it, and the rounds by (users, server).

    Args:
        show_stage: gets the name and the seconds of each round that begins.

    Raises:
        ServerError: a server does not answer its first request.
    """
    num_words, seed = round(plan.prompt_tokens * WORDS_PER_TOKEN), random.randrange(2**32)
    show_stage("asking for one token", 0.0)
    first = [await request_one_token(target, prompt(seed + i, num_words)) for i, target in enumerate(targets)]
    num_words = round(num_words * plan.prompt_tokens / (first[0].prompt_tokens or plan.prompt_tokens))
    warm = []
    for target in targets:
        texts = prompts(f"{seed} warm-up", num_words)
        show_stage(f"{target.server.name}: warming up", warm_up_s(plan, len(targets)))
        seconds = max(MIN_ROUND_S, warm_up_s(plan, len(targets)) - SETTLE_S)
        warm.append(await run_round(target, max(plan.concurrency), texts, plan.max_tokens, seconds))
    num_turns = choose_num_turns(warm)
    seconds = round_s(plan, len(targets), num_turns)
    rounds: dict[tuple[int, int], list[Round]] = {}
    for users, i in schedule(len(targets), plan.concurrency, num_turns):
        done = rounds.setdefault((users, i), [])
        show_stage(f"{targets[i].server.name}: {users} at once", seconds + SETTLE_S)
        texts = prompts(f"{seed} {users} {len(done)}", num_words)
        done.append(await run_round(targets[i], users, texts, plan.max_tokens, seconds))
    answers = [answer for done in rounds.values() for one in done for answer in one.answers]
    counts = [answer.prompt_tokens for answer in answers if answer.prompt_tokens]
    return (round(fmean(counts)) if counts else first[0].prompt_tokens), rounds


async def request_one_token(target: Endpoint, text: str) -> TimedAnswer:
    """Request one token, without a time limit, to learn how long the prompt is. Raises ServerError."""
    answer = TimedAnswer(time.monotonic())
    try:
        await send(target.client, target.path, body(target.server, target.path, text, 1), answer)
    except ServerError as error:
        raise ServerError(
            f"{target.server.name} at {target.server.url} answers no request: {error}"
        ) from error
    return answer


def prompts(name: str, num_words: int) -> Iterator[str]:
    """Yield prompts without end; the same name gives the same prompts."""
    draw = random.Random(name)
    while True:
        yield prompt(draw.randrange(2**32), num_words)


async def run_round(
    target: Endpoint, users: int, texts: Iterator[str], max_tokens: int, seconds: float
) -> Round:
    """Run one round. Requests that are unanswered at its end are cut off."""
    answers: list[TimedAnswer] = []

    async def user() -> None:
        while True:
            content = body(target.server, target.path, next(texts), max_tokens)
            answers.append(answer := TimedAnswer(time.monotonic()))
            try:
                await send(target.client, target.path, content, answer)
            except ServerError as error:
                answer.error = str(error)
                await asyncio.sleep(RETRY_S)

    begun_s = time.monotonic()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
            for _ in range(users):
                group.create_task(user())
    ended_s = time.monotonic()
    await asyncio.sleep(SETTLE_S)
    return Round(begun_s, ended_s, answers)


WIDE, MEDIUM = 96, 70
BUSY_CORES = 0.7
NOISE = 0.05
"""Rounds with one load that differ by more are worth a warning."""
COLORS = ("cyan", "magenta")
SAME_RATIO = 0.02
"""A ratio this near to 1 is not coloured."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of a benchmark.

    Attributes:
        servers: ours first.
        figures: by (users, server).
        prompt_tokens: as measured; None if no server reports them.
        client_cores: processor time of this client by time. Near 1, the client itself limits the figures.
    """

    servers: Sequence[Server]
    plan: LoadPlan
    path: str
    figures: dict[tuple[int, int], Figures]
    prompt_tokens: int | None
    client_cores: float


@dataclass(frozen=True, slots=True)
class Column:
    """One column. A stored value times `factor` is the value shown."""

    title: str
    of: Callable[[Figures], float | None]
    factor: float
    more_is_better: bool
    least_width: int = 0


COLUMNS = (
    Column("tokens/s", lambda it: it.tokens_per_s, 1, True),
    Column("first token ms", lambda it: it.first_p50_s, 1000, False),
    Column("p99", lambda it: it.first_p99_s, 1000, False, MEDIUM),
    Column("next token ms", lambda it: it.gap_p50_s, 1000, False),
    Column("p99", lambda it: it.gap_p99_s, 1000, False, MEDIUM),
)


def view(result: Comparison, width: int) -> RenderableType:
    lines = (Text(note, style="yellow") for note in notes(result))
    return Group(head(result), Text(), table(result, width), *lines)


def head(result: Comparison) -> Text:
    plan = result.plan
    lines = Text()
    for server, color in zip(result.servers, COLORS, strict=False):
        lines.append(f"{server.name}  ", style=f"bold {color}").append(f"{server.model or 'model unknown'}  ")
        lines.append(f"{server.url}\n", style="dim")
    num_tokens = result.prompt_tokens or f"about {plan.prompt_tokens}"
    prompt = f"prompts of {num_tokens} tokens, {plan.max_tokens} new ones"
    return lines.append(f"{plan.duration_s:g} s, {prompt}, greedy, {result.path}", style="dim")


def table(result: Comparison, width: int) -> Table:
    columns = [one for one in COLUMNS if width >= one.least_width]
    shown = new_table()
    shown.add_column("users", justify="right")
    shown.add_column("server", no_wrap=True, overflow="ellipsis")
    for column in columns:
        shown.add_column(column.title, justify="right")
    if width >= WIDE:
        shown.add_column("answers", justify="right")
    shown.add_column("errors", justify="right")
    for users in result.plan.concurrency:
        both = [result.figures[users, i] for i in range(len(result.servers))]
        for i, (server, it) in enumerate(zip(result.servers, both, strict=True)):
            cells = [number(column.of(it), column.factor) for column in columns]
            answers = [Text(str(it.num_answers), style="dim")] if width >= WIDE else []
            errors = Text(str(it.num_errors), style="red" if it.num_errors else "dim")
            shown.add_row(
                str(users) if i == 0 else "",
                Text(label(result, server), style=COLORS[i]),
                *cells,
                *answers,
                errors,
            )
        if len(both) == 2:
            shown.add_row("", Text("ratio", style="bold"), *(ratio_cell(column, *both) for column in columns))
        shown.add_row()
    return shown


def label(result: Comparison, server: Server) -> str:
    """Return the server's kind; if both are of one kind, `ours` or `theirs`."""
    if len({one.kind for one in result.servers}) == len(result.servers):
        return server.kind
    return "ours" if server is result.servers[0] else "theirs"


def ratio_cell(column: Column, ours: Figures, theirs: Figures) -> Text:
    """Return ours divided by theirs; green where ours is better."""
    own, other = column.of(ours), column.of(theirs)
    if not own or not other:
        return Text("–", style="dim")
    part = own / other
    better = part > 1 if column.more_is_better else part < 1
    return Text(
        f"{part:.2f}×", style="bold" if abs(part - 1) < SAME_RATIO else "bold green" if better else "bold red"
    )


def number(value: float | None, factor: float = 1.0) -> str:
    """Format a value with three digits."""
    if value is None:
        return "–"
    value *= factor
    return (
        f"{value:,.0f}".replace(",", " ")
        if value >= 100
        else f"{value:.1f}"
        if value >= 10
        else f"{value:.2f}"
    )


def notes(result: Comparison) -> list[str]:
    """Return the warnings that a reader needs to judge the figures."""
    found = []
    for i, server in enumerate(result.servers):
        mine = {users: it for (users, index), it in result.figures.items() if index == i}
        errors = sum(it.num_errors for it in mine.values())
        if errors:
            first = next(it.error for it in mine.values() if it.error)
            found.append(f"{server.name}: {plural(errors, 'request')} failed; the first: {first}")
        if not all(it.tokens_per_s or it.num_errors for it in mine.values()):
            found.append(
                f"{server.name}: no token came in time; "
                "a longer --duration, fewer users or shorter prompts show more"
            )
        if any(it.tokens_per_frame > 1.05 for it in mine.values()):
            found.append(
                f"{server.name} sends several tokens in one frame: "
                "its time to the next token is that to the next frame"
            )
        if not server.ignores_eos:
            found.append(
                f"{server.name} cannot be told to go on after the end of a sequence: "
                "its answers may be shorter"
            )
    if (noise := max(it.spread for it in result.figures.values())) > NOISE:
        found.append(
            f"tokens/s of two rounds with one load differ by up to {noise:.0%}, and smaller differences say "
            "nothing: end what else runs on the machine, or measure for longer"
        )
    if len({server.model for server in result.servers}) > 1:
        found.append("the names of the models differ: make sure that they are the same")
    if result.client_cores > BUSY_CORES:
        found.append(
            f"this client used {result.client_cores:.0%} of a core: it may be what limits the figures"
        )
    return found


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
    plan = LoadPlan(flags.duration, flags.concurrency, flags.prompt_tokens, flags.max_tokens)
    url = find_server(flags, changes=True)
    try:
        result = asyncio.run(compare([url, flags.against] if flags.against else [url], plan))
    except ServerError as error:
        return print_error(error)
    console = Console(highlight=False)
    console.print(view(result, console.width))
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
    if flags.json is not None:
        write_file("--json", flags.json, b"", "ab")  # fails now, and not after a minute
    return flags


async def compare(urls: Sequence[str], plan: LoadPlan) -> Comparison:
    """Measure the servers at `urls`, ours first. Raises ServerError."""
    async with contextlib.AsyncExitStack() as stack:
        keys = (api_key(), os.environ.get("AGAINST_API_KEY"))
        clients = [
            await stack.enter_async_context(new_client(httpx.AsyncClient, url, READ_TIMEOUT_S, key))
            for url, key in zip(urls, keys, strict=False)
        ]
        found = [await identify(client) for client in clients]
        path = route(found)
        targets = [Endpoint(server, client, path) for server, client in zip(found, clients, strict=True)]
        begun_s, begun_cpu_s = time.monotonic(), time.process_time()
        with progress_bar() as show:
            prompt_tokens, rounds = await measure(targets, plan, Stage(show, plan.duration_s).show_stage)
        cores = (time.process_time() - begun_cpu_s) / (time.monotonic() - begun_s)
    measured = {key: figures(done) for key, done in rounds.items()}
    return Comparison(found, plan, path, measured, prompt_tokens, cores)


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


def as_json(result: Comparison) -> dict[str, Any]:
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
