"""Grammar: what an answer must look like, from a client's words to llguidance's form.

`read.py` reads it from a request. Here it is compiled and checked: what cannot be served is refused before it
is queued. `force.py` adds calls and thinking. Workers compile llguidance's form for their model's vocabulary.

The compiler runs in a process of its own: a client's grammar may need any amount of stack, memory and time.
Beyond the limits it ends that process, and is refused; the gateway goes on.
"""

import asyncio
import contextlib
import functools
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, TypeVar

import llguidance
import setproctitle

from api.errors import ApiError, cut, internal_error, invalid
from api.grammar.lark import WHITESPACE, Lark, SpecialIds, enforced, literal, to_lark
from api.prompts.tokenizer import ModelTokenizer

Result = TypeVar("Result")
STACK_BYTES = 64 * 2**20
"""With it some 4,000 definitions of objects, or 20,000 rules, may lead from one to the next."""
MEMORY_BYTES = 2**30
CPU_S = 10
"""Processor time of one compilation; a schema of a few hundred definitions takes some 0.1 s."""
LIMITS = f"{CPU_S} s, {MEMORY_BYTES >> 20} MiB of memory or {STACK_BYTES >> 20} MiB of stack"
MAX_GRAMMAR_BYTES = 256 * 1024
ANY_OBJECT = '{"type": "object"}'
COMPILED = "compiled"
NUM_TRIED = 32
"""How many tokens of a text are tried: usually they take a millisecond, at most half a second."""
ALLOWED_BIAS = 200
"""The bias that llguidance gives a token that may come next."""
NO_TEXT = "NoExtensionBias"
"""llguidance's error for a grammar that no text satisfies."""
MAX_FORCED = 8192
"""How many bytes may be forced at once: the engine tokenizes all of them at each step."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar as a client wrote it, or a compiled one of which a part came from a client.

    Attributes:
        kind: `json` (a JSON schema), `regex`, `choice` (a JSON list of strings), `grammar` (Lark or GBNF),
            `structural_tag` (its format as JSON), `compiled` (llguidance's own form).
        text: the grammar.
        field: the request's field that has it.
        whitespace: a regex for white space in JSON.
        closed: objects of a JSON schema have only the properties that they list, where that is safe.
    """

    kind: str
    text: str
    field: str
    whitespace: str = WHITESPACE
    closed: bool = False


async def compile_grammar(grammar: Grammar, tokenizer: ModelTokenizer | None = None) -> str:
    """Compile a grammar apart, and check it. Raises ApiError (422) with the cause.

    `tokenizer` is the model's: tags may be its special tokens.
    """
    if grammar.kind == COMPILED:
        return grammar.text
    if (size := len(grammar.text)) > MAX_GRAMMAR_BYTES:
        words = f"must have at most {MAX_GRAMMAR_BYTES} characters. Given: {size}"
        raise invalid(f"`{grammar.field}` {words}")
    special_ids: SpecialIds = ()
    if tokenizer is not None and grammar.kind == "structural_tag":
        special_ids = tuple(tokenizer.special_tokens.items())
    return await run_apart(grammar.field, compile_checked, grammar, special_ids)


@functools.lru_cache(maxsize=256)
def compile_checked(grammar: Grammar, special_ids: SpecialIds = ()) -> str:
    """Compile a grammar, and check it. Raises ApiError (422).

    Args:
        special_ids: the model's special tokens, which tags may be.
    """
    return checked(grammar.field, functools.partial(compile_unchecked, grammar), special_ids)


def compile_unchecked(grammar: Grammar, special_ids: SpecialIds = ()) -> str:
    """The grammar in llguidance's form. Raises ValueError."""
    match grammar.kind:
        case "json":
            schema = enforced(json.loads(grammar.text), grammar.closed, grammar.whitespace)
            return json.dumps({"grammars": [{"json_schema": schema}]})
        case "regex":
            return llguidance.LLMatcher.grammar_from_regex(grammar.text)
        case "choice":
            return Lark().source(" | ".join(map(literal, json.loads(grammar.text))))
        case "structural_tag":
            lark = Lark(special_ids, grammar.whitespace)
            return lark.source(lark.format(json.loads(grammar.text), ()))
        case _:
            return to_lark(grammar.text)


# --- checks -------------------------------------------------------------------------------------------------


@functools.cache
def byte_tokenizer() -> llguidance.LLTokenizer:
    """llguidance's tokenizer of single bytes: what is too complex for it is too complex for a model's."""
    return llguidance.LLTokenizer("byte")


def checked(field: str, source: Callable[[SpecialIds], str], special_ids: SpecialIds) -> str:
    """A grammar with the model's special tokens; it is checked with their texts. Raises ApiError (422).

    Args:
        source: special tokens → the grammar. Raises ValueError.
    """
    try:
        plain = source(())
        if cause := find_error(plain):
            raise ValueError(cause)
        return source(special_ids) if special_ids else plain
    except ValueError as error:
        raise cannot_compile(field, str(error)) from error


def find_error(source: str) -> str:
    """Why a grammar without special tokens cannot be served; "" if it can, as far as the beginning of
    one of its texts shows.
    """
    tokenizer, num_tried = byte_tokenizer(), 0
    matcher = llguidance.LLMatcher(tokenizer, source, log_level=0)
    is_compiled = not matcher.is_error()
    while not matcher.is_stopped() and num_tried < NUM_TRIED:  # an error stops it, too
        token = matcher.compute_logit_bias().rfind(ALLOWED_BIAS, 0, tokenizer.eos_token)
        if token < 0 or not matcher.consume_token(token):
            break
        if len(matcher.compute_ff_tokens()) > MAX_FORCED:
            return f"it forces a text of more than {MAX_FORCED} bytes"
        num_tried += 1
    cause = " ".join(matcher.get_error().partition("<state>")[0].split())
    if cause.startswith(NO_TEXT):
        return "" if num_tried else "no text satisfies it"
    return f"it is too complex: {cause}" if cause and is_compiled else cause


def cannot_compile(field: str, cause: str) -> ApiError:
    """The error for a grammar that cannot be compiled; `cause` may be llguidance's."""
    return invalid(f"`{field}` cannot be compiled: {cut(cause)}", field)


# --- the compiler's process ---------------------------------------------------------------------------------


CALLER = ThreadPoolExecutor(1, thread_name_prefix="compile-grammars")
"""One call at a time."""


@functools.cache
def start() -> tuple["subprocess.Popen[bytes]", Connection]:
    """Start the process that compiles."""
    ours, theirs = Pipe()
    code = f"from api.grammar.compile import main; main({theirs.fileno()})"
    command = [sys.executable, "-P", "-c", code]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
    theirs.close()
    return process, ours


@functools.lru_cache(maxsize=256)
def outcome(field: str, work: Callable[..., Any], args: tuple[Any, ...]) -> tuple[bool, Any]:
    """Whether `work` has a result, and the result; else text and field of its ApiError."""
    if start()[0].poll() is not None:
        start.cache_clear()
    process, connection = start()
    try:
        connection.send((work, args))
        answer: tuple[bool, Any] = connection.recv()
    except (EOFError, OSError):
        connection.close()
        if (status := process.wait()) >= 0:  # not by a signal
            raise internal_error(f"The compiler of grammars has failed with status {status}") from None
        error = cannot_compile(field, f"it takes more than {LIMITS}")
        return False, (error.text, field)
    return answer


async def run_apart(field: str, work: Callable[..., Result], *args: Any) -> Result:
    """The result of `work`, a function of a module. Raises its ApiError, and one (422) with the name of the
    field if it takes more than LIMITS.
    """
    loop = asyncio.get_running_loop()
    has_result, found = await loop.run_in_executor(CALLER, outcome, field, work, args)
    if not has_result:
        raise invalid(*found)
    result: Result = found
    return result


def answer_calls(connection: Connection) -> None:
    """Answer calls until the gateway ends."""
    while True:
        try:
            work, args = connection.recv()
        except EOFError:
            return
        used_s = resource.getrusage(resource.RUSAGE_SELF)
        limit_s = int(used_s.ru_utime + used_s.ru_stime) + 1 + CPU_S
        resource.setrlimit(resource.RLIMIT_CPU, (limit_s, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        try:
            answer = True, work(*args)
        except ApiError as error:
            answer = False, (error.text, error.param)
        except (MemoryError, RecursionError):
            os.abort()
        connection.send(answer)


def main(fd: int) -> None:
    """Compile for the gateway at the other end of a pipe."""
    setproctitle.setproctitle("tokenfleet grammars")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the gateway's end is ours
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
        # before the gateway, where a container's memory ends first
        Path("/proc/self/oom_score_adj").write_text("1000")
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=answer_calls, args=(Connection(fd),))
    thread.start()
    thread.join()
