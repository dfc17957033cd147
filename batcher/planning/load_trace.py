"""Load traces: when requests arrive, and how many tokens each has."""

import csv
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import orjson

from common.messages.request import DEFAULT_CLASS, SERVICE_CLASSES
from common.settings.settings import SettingError

AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class TracedRequest:
    arrival_ms: float
    prompt_tokens: int
    output_tokens: int
    class_name: str = DEFAULT_CLASS
    tenant: str = ""

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.output_tokens < 1:
            raise ValueError("a request has at least one prompt token and one output token")
        if self.class_name not in SERVICE_CLASSES:
            raise ValueError(f"class {self.class_name!r} is none of {', '.join(SERVICE_CLASSES)}")


def read_trace(path: Path) -> list[TracedRequest]:
    """Read a trace of any form that `parser_of` knows, in order of arrival; the first request arrives at 0.
    Raises SettingError with the line at fault.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError("--trace", f"{path} cannot be read: {error}") from error
    found = sorted(parse(path, lines), key=lambda request: request.arrival_ms)
    if not found:
        raise SettingError("--trace", f"{path} has no request")
    first_ms = found[0].arrival_ms
    return [
        TracedRequest(it.arrival_ms - first_ms, it.prompt_tokens, it.output_tokens, it.class_name, it.tenant)
        for it in found
    ]


def parse(path: Path, lines: Iterable[str]) -> Iterator[TracedRequest]:
    parser: Callable[[str], TracedRequest] | None = None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            if parser is None:
                parser = parser_of(line)
                if parser is parse_azure:
                    continue  # the line is the header
            yield parser(line)
        except (ValueError, LookupError, TypeError) as error:
            raise SettingError("--trace", f"line {number} of {path}: {describe(error)}") from error


def describe(error: Exception) -> str:
    return f"the field {error} is missing" if isinstance(error, KeyError) else str(error)


def parser_of(line: str) -> Callable[[str], TracedRequest]:
    """Return what reads a file that begins with this line. Raises ValueError for a form that is not known."""
    if tuple(line.strip().split(",")) == AZURE:
        return parse_azure
    if not line.lstrip().startswith("{"):
        raise ValueError(f"neither JSON lines nor Azure's CSV ({','.join(AZURE)})")
    return parse_mooncake if "input_length" in orjson.loads(line) else parse_own


def parse_own(line: str) -> TracedRequest:
    fields: dict[str, Any] = orjson.loads(line)
    class_name, tenant = fields.get("class") or DEFAULT_CLASS, fields.get("tenant") or ""
    sizes = int(fields["prompt_tokens"]), int(fields["output_tokens"])
    return TracedRequest(1e3 * float(fields["arrival_s"]), *sizes, class_name, tenant)


def parse_mooncake(line: str) -> TracedRequest:
    """Mooncake's trace: times are in ms. Its `hash_ids` are not read: no prefix is taken to be cached."""
    fields: dict[str, Any] = orjson.loads(line)
    return TracedRequest(
        float(fields["timestamp"]), int(fields["input_length"]), max(1, int(fields["output_length"]))
    )


def parse_azure(line: str) -> TracedRequest:
    """Azure's LLM inference traces (2023, 2024). Their times have seven digits after the second."""
    [stamp, prompt_tokens, output_tokens] = next(csv.reader([line]))
    whole, _, fraction = stamp.removesuffix("+00:00").partition(".")
    arrival_s = datetime.fromisoformat(whole).timestamp() + float(f"0.{fraction or 0}")
    return TracedRequest(1e3 * arrival_s, max(1, int(prompt_tokens)), max(1, int(output_tokens)))


def draw_trace(
    rps: float, seconds: float, prompt_tokens: int, output_tokens: int, spread: float, seed: int
) -> list[TracedRequest]:
    """Return requests that arrive at random (Poisson), whose lengths differ evenly by up to `spread`."""
    draw, at_s, found = random.Random(seed), 0.0, []

    def length(mean: int) -> int:
        return max(1, round(mean * draw.uniform(1 - spread, 1 + spread)))

    while (at_s := at_s + draw.expovariate(rps)) < seconds:
        found.append(TracedRequest(1e3 * at_s, length(prompt_tokens), length(output_tokens)))
    return found
