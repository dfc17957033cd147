"""`text-generation-benchmark`: the latency of prefill and decode by batch size, in TGI's tables.

TGI's asks a shard through its socket, and bypasses the router. This one asks a running fleet through its
gateway, so its figures are what a client sees.
"""

import argparse
import asyncio
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any

import httpx
import orjson

from common.settings.flags import FlagParser
from common.settings.settings import SettingError
from deploy.bench.load import prompt
from deploy.bench.measure import COMPLETIONS, TimedAnswer, send
from deploy.cli.client import (
    ServerError,
    api_key,
    check_status,
    connection_errors,
    new_client,
    print_error,
)
from deploy.cli.target import add_url, find_server

BATCH_SIZES = (1, 2, 4, 8, 16, 32)
READ_TIMEOUT_S = 600.0
MIN_TOKENS = {"sequence_length": 1, "decode_length": 2, "runs": 1, "warmups": 0}
SAMPLING = {
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "typical_p": float,
    "repetition_penalty": float,
    "frequency_penalty": float,
    "top_n_tokens": int,
}
DESCRIPTION = """Measure prefill and decode of a running fleet by batch size, and print TGI's tables.
Prompts have exactly --sequence-length tokens and differ, so no prefix cache helps."""


@dataclass(slots=True)
class Latencies:
    """What runs with one batch size took, in seconds; one entry for each run."""

    batch_size: int
    prefills: list[float] = field(default_factory=list)
    decodes: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit code. Raises SettingError for a wrong flag."""
    flags = read_flags(sys.argv[1:] if argv is None else argv)
    try:
        measured = asyncio.run(measure(flags))
    except ServerError as error:
        return print_error(error)
    print(report(flags, measured))
    return 0


def read_flags(argv: Sequence[str]) -> argparse.Namespace:
    parser = FlagParser(prog="text-generation-benchmark", allow_abbrev=False, description=DESCRIPTION)
    add_url(parser)
    parser.add_argument(
        "-t", "--tokenizer-name", default=os.environ.get("TOKENIZER_NAME"), help="for the tables"
    )
    parser.add_argument("--revision", help="accepted: the fleet's own tokenizer makes the prompts")
    parser.add_argument(
        "-b", "--batch-size", type=int, action="append", help=f"again for each size (default: {BATCH_SIZES})"
    )
    parser.add_argument("-s", "--sequence-length", type=int, default=10, help="tokens of a prompt")
    parser.add_argument("-d", "--decode-length", type=int, default=8, help="tokens of an answer")
    parser.add_argument("-r", "--runs", type=int, default=10, help="runs of each size")
    parser.add_argument("-w", "--warmups", type=int, default=1, help="runs before them that do not count")
    parser.add_argument(
        "-m", "--master-shard-uds-path", help="accepted: the fleet is asked through its gateway (--url)"
    )
    for name, kind in SAMPLING.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind)
    for name in ("--watermark", "--do-sample"):
        parser.add_argument(name, action="store_true")
    flags = parser.parse_args(list(argv))
    flags.batch_size = flags.batch_size or list(BATCH_SIZES)
    if min(flags.batch_size) < 1:
        raise SettingError("--batch-size", f"{min(flags.batch_size)} is less than 1")
    for name, least in MIN_TOKENS.items():
        if getattr(flags, name) < least:
            raise SettingError(f"--{name.replace('_', '-')}", f"{getattr(flags, name)} is less than {least}")
    return flags


async def measure(flags: argparse.Namespace) -> list[Latencies]:
    """Measure all batch sizes. Raises ServerError."""
    client = new_client(httpx.AsyncClient, find_server(flags, changes=True), READ_TIMEOUT_S, api_key())
    async with client:
        measured = []
        for size in flags.batch_size:
            latencies = Latencies(size)
            for run in range(-flags.warmups, flags.runs):
                add_run(latencies if run >= 0 else Latencies(size), await run_batch(client, flags, size))
            print(f"batch size {size}: {fmean(latencies.tokens) * 1000:.2f} ms a token", file=sys.stderr)
            measured.append(latencies)
        return measured


async def run_batch(client: httpx.AsyncClient, flags: argparse.Namespace, size: int) -> list[TimedAnswer]:
    """Send a batch of requests at once, and wait for their answers. Raises ServerError."""
    prompts = [await make_prompt(client, flags.sequence_length) for _ in range(size)]
    begun_s = time.monotonic()
    answers = [TimedAnswer(begun_s) for _ in prompts]
    async with asyncio.TaskGroup() as group:
        for ids, answer in zip(prompts, answers, strict=True):
            group.create_task(send(client, COMPLETIONS, body(flags, ids), answer))
    return answers


async def make_prompt(client: httpx.AsyncClient, num_tokens: int) -> list[int]:
    """Return a new prompt of exactly `num_tokens` ids, by the fleet's own tokenizer. Raises ServerError."""
    text = prompt(random.randrange(2**32), num_tokens)
    with connection_errors(str(client.base_url)):
        answer = await client.post("/tokenize", json={"inputs": text})
    check_status(answer.status_code, answer.content)
    ids = [token["id"] for token in answer.json()]
    return (ids * -(-num_tokens // len(ids)))[-num_tokens:]


def body(flags: argparse.Namespace, ids: Sequence[int]) -> bytes:
    sampling = {name: getattr(flags, name) for name in SAMPLING if getattr(flags, name) is not None}
    if flags.watermark:
        sampling["watermark"] = True
    if not flags.do_sample:
        sampling.setdefault("temperature", 0)
    limits = {"max_tokens": flags.decode_length, "min_tokens": flags.decode_length, "ignore_eos": True}
    return orjson.dumps({"prompt": ids, "stream": True} | sampling | limits)


def add_run(latencies: Latencies, answers: Sequence[TimedAnswer]) -> None:
    """Add a batch: its prefill ends when all rows have a token, its decode when all have their last."""
    begun_s = min(answer.sent_s for answer in answers)
    prefilled_s = max(answer.times_s[0] for answer in answers)
    latencies.prefills.append(prefilled_s - begun_s)
    latencies.decodes.append(max(answer.times_s[-1] for answer in answers) - prefilled_s)
    latencies.tokens += [later - sooner for answer in answers for sooner, later in pairwise(answer.times_s)]


def report(flags: argparse.Namespace, measured: Sequence[Latencies]) -> str:
    """Return TGI's three tables, in Markdown."""
    names = {"sequence_length": "Sequence Length", "decode_length": "Decode Length", "runs": "N Runs"}
    names |= {"warmups": "Warmups"} | {name: name.replace("_", " ").title() for name in SAMPLING}
    parameters = [["Model", flags.tokenizer_name or ""]]
    parameters += [[title, str(getattr(flags, name))] for name, title in names.items()]
    parameters += [["Watermark", str(flags.watermark).lower()], ["Do Sample", str(flags.do_sample).lower()]]
    steps = {"Prefill": "prefills", "Decode (token)": "tokens", "Decode (total)": "decodes"}
    latencies = [
        [step, str(one.batch_size), *map(in_ms, spread(getattr(one, name)))]
        for step, name in steps.items()
        for one in measured
    ]
    throughputs = [
        [step, str(one.batch_size), *map(in_tokens_per_s, spread(rates(one, name, flags.decode_length))[:3])]
        for step, name in (("Prefill", "prefills"), ("Decode", "decodes"))
        for one in measured
    ]
    figures = ["Average", "Lowest", "Highest"]
    return "\n\n".join(
        [
            table(["Parameter", "Value"], parameters),
            table(["Step", "Batch Size", *figures, "p50", "p90", "p99"], latencies),
            table(["Step", "Batch Size", *figures], throughputs),
        ]
    )


def rates(one: Latencies, name: str, decode_length: int) -> list[float]:
    """Return tokens per second of each run: one a row in a prefill, the others in the decode."""
    num_tokens = one.batch_size * (1 if name == "prefills" else decode_length - 1)
    return [num_tokens / max(seconds, 1e-9) for seconds in getattr(one, name)]


def spread(values: Sequence[float]) -> list[float]:
    """Return mean, least, most and the percentiles 50, 90 and 99 (the nearest rank above, as TGI's)."""
    ordered = sorted(values) or [0.0]
    ranks = [ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.9, 0.99)]
    return [fmean(ordered), ordered[0], ordered[-1], *ranks]


def in_ms(seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms"


def in_tokens_per_s(rate: float) -> str:
    return f"{rate:.2f} tokens/secs"


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    return "\n".join([line(head), "|" + "|".join("-" * (w + 2) for w in widths) + "|", *map(line, rows)])
