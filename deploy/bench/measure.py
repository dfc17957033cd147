"""Measuring a server: its kind, one timed request, and figures of many (tokens per second, percentiles)."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import PurePath
from typing import Any

import httpx
import orjson

from deploy.cli.client import (
    ServerError,
    SseDecoder,
    check_status,
    connection_errors,
    error_text,
    frame_errors,
    one_line,
    printable,
)

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
