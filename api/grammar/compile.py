"""Grammar: what an answer must look like, from a client's words to llguidance's form.

It is read from the fields of a request: OpenAI's and TGI's `response_format`, TGI's `grammar`, vLLM's
`structured_outputs` and `guided_*`, and structural tags. Then it is compiled and checked: what cannot be
served is refused before it is queued. `force.py` adds calls and thinking. Workers compile llguidance's form
for their model's vocabulary.

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
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import llguidance
import setproctitle

from api.errors import ApiError, cut, internal_error, invalid, not_one_of, unavailable
from api.grammar.lark import WHITESPACE, Lark, SpecialIds, enforced, literal, to_lark
from api.json import parse_text
from api.prompts.tokenizer import ModelTokenizer

STACK_BYTES = 64 * 2**20
"""With it some 4,000 definitions of objects, or 20,000 rules, may lead from one to the next."""
MEMORY_BYTES = 2**30
CPU_S = 10
"""Processor time of one compilation; a schema of a few hundred definitions takes some 0.1 s."""
OF_LIMITS = (signal.SIGABRT, signal.SIGBUS, signal.SIGSEGV, signal.SIGXCPU)
"""Signals that end a compilation beyond a limit."""
LIMITS = f"{CPU_S} s, {MEMORY_BYTES >> 20} MiB of memory or {STACK_BYTES >> 20} MiB of stack"
MAX_GRAMMAR_BYTES = 256 * 1024
ANY_OBJECT = '{"type": "object"}'
COMPILED = "compiled"
BYTES = llguidance.LLTokenizer("byte")
"""llguidance's tokenizer of single bytes: what is too complex for it is too complex for a model's."""
NUM_TRIED = 32
"""How many tokens of a text are tried: usually they take a millisecond, at most half a second."""
ALLOWED_BIAS = 200
"""The bias that llguidance gives a token that may come next."""
NO_TEXT = "NoExtensionBias"
"""llguidance's error for a grammar that no text satisfies."""
MAX_FORCED = 8192
"""How many bytes may be forced at once: the engine tokenizes all of them at each step."""
WITHOUT_EFFECT = ("disable_fallback", "disable_any_whitespace", "_backend", "_backend_was_auto")
PATTERN = "whitespace_pattern"
RESPONSE_FORMATS = ("text", "json_object", "json_schema", "json", "regex", "structural_tag")


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar as a client wrote it, or a compiled one of which a part came from a client.

    Attributes:
        kind: `json` (a JSON schema), `regex`, `choice` (a JSON list of strings), `grammar` (Lark or GBNF),
            `structural_tag` (its format as JSON, or the older form), `compiled` (llguidance's own form).
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


# --- fields of bodies ---------------------------------------------------------------------------------------


def read_grammar(fields: Mapping[str, Any], whitespace: str | None) -> Grammar | None:
    """The grammar of a body of OpenAI's routes; None if it has none. Raises ApiError, also for two of them.

    Args:
        fields: those of FIELDS; None for one that is not given.
        whitespace: vLLM's `guided_whitespace_pattern`.
    """
    read = {name: reader(fields[name], name) for name, reader in FIELDS.items() if fields[name] is not None}
    given = {name: grammar for name, grammar in read.items() if grammar is not None}
    if len(given) > 1:
        first, second, *_ = given
        raise invalid(f"`{first}` and `{second}` exclude each other", second)
    return with_whitespace(next(iter(given.values()), None), whitespace, "guided_whitespace_pattern")


def read_response_format(value: Mapping[str, Any], field: str = "response_format") -> Grammar | None:
    """The grammar of `{"type": …}`; None for text. OpenAI puts the schema under `json_schema`, TGI under
    `value`. Objects are closed with OpenAI's `strict`, and in TGI's shape, as there. Raises ApiError.
    """
    match type_of(value, RESPONSE_FORMATS, field):
        case "json_object" | "json" if value.get("value") is not None:
            return read_schema(value["value"], f"{field}.value", closed=True)
        case "json_object" | "json":
            return Grammar("json", ANY_OBJECT, field)
        case "json_schema":
            name = "json_schema" if "json_schema" in value else "value"
            return read_named_schema(value.get(name), f"{field}.{name}", closed=name == "value")
        case "regex":
            return KINDS["regex"](value.get("value"), f"{field}.value")
        case "structural_tag":
            return KINDS["structural_tag"](value, field)
        case _:
            return None


def read_structured_outputs(value: Mapping[str, Any], field: str = "structured_outputs") -> Grammar | None:
    """The grammar of vLLM's `structured_outputs`, which has one of KINDS. Raises ApiError."""
    given = {name: value[name] for name in KINDS if value.get(name) not in (None, False)}
    for name, item in value.items():
        if name not in (*KINDS, *WITHOUT_EFFECT, PATTERN) and item:
            raise invalid(f"`{field}.{cut(name)}` is not supported yet")
    if len(given) != 1:
        raise invalid(f"`{field}` must have one of {', '.join(KINDS)}. Given: {len(given)}")
    [(name, item)] = given.items()
    return with_whitespace(KINDS[name](item, f"{field}.{name}"), value.get(PATTERN), f"{field}.{PATTERN}")


def with_whitespace(grammar: Grammar | None, pattern: Any, field: str) -> Grammar | None:
    """The grammar with a pattern, if one is given, for the white space of its JSON. Raises ApiError."""
    return replace(grammar, whitespace=text(pattern, field)) if grammar and pattern else grammar


# --- one kind of grammar ------------------------------------------------------------------------------------


def read_named_schema(value: Any, field: str, closed: bool = False) -> Grammar:
    """OpenAI's object with a `schema` and a name. Raises ApiError."""
    is_strict = bool(an_object(value, field).get("strict"))
    return read_schema(value.get("schema"), f"{field}.schema", closed=closed or is_strict)


def read_schema(value: Any, field: str, closed: bool = False) -> Grammar:
    """A JSON schema, given as an object or as its text. Raises ApiError."""
    return Grammar("json", json.dumps(an_object(as_json(value, field), field)), field, closed=closed)


def read_structural_tag(value: Any, field: str) -> Grammar:
    """A structural tag, given as an object or as its text. The older form has no `format`."""
    tag = an_object(as_json(value, field), field)
    return Grammar("structural_tag", json.dumps(tag.get("format", tag)), field)


def as_json(value: Any, field: str) -> Any:
    """A value that may be given as its JSON text. Raises ApiError."""
    try:
        return parse_text(value) if isinstance(value, str) else value
    except ValueError as error:
        raise invalid(f"`{field}` is not JSON that can be read: {cut(str(error))}") from error


# --- checks of values ---------------------------------------------------------------------------------------


def must_be(words: str, is_right: Callable[[Any], bool], value: Any, place: str) -> Any:
    """The value of a field, None if it is not given, which must be so. Raises ApiError."""
    if not is_right(value):
        raise invalid(f"`{place}` must be {words}")
    return value


an_object = partial(must_be, "an object", lambda value: isinstance(value, dict))
text = partial(must_be, "a text that is not empty", lambda value: isinstance(value, str) and value != "")
a_list = partial(must_be, "a list that is not empty", lambda value: isinstance(value, list) and value != [])


def type_of(value: Any, kinds: Collection[str], place: str) -> str:
    """The `type` of an object, which is one of these. Raises ApiError."""
    kind = an_object(value, place).get("type")
    if not isinstance(kind, str) or kind not in kinds:
        raise not_one_of(f"{place}.type", kinds, kind)
    return kind


KINDS: Mapping[str, Callable[[Any, str], Grammar]] = {
    "json": read_schema,
    "regex": lambda value, field: Grammar("regex", text(value, field), field),
    "choice": lambda value, field: Grammar(
        "choice", json.dumps([text(one, field) for one in a_list(value, field)]), field
    ),
    "grammar": lambda value, field: Grammar("grammar", text(value, field), field),
    "json_object": lambda value, field: Grammar("json", ANY_OBJECT, field),
    "structural_tag": read_structural_tag,
}
"""Kinds of `structured_outputs`, of which it has one → their readers."""
FIELDS: Mapping[str, Callable[[Any, str], Grammar | None]] = {
    **{f"guided_{kind}": KINDS[kind] for kind in ("json", "regex", "choice", "grammar")},
    "response_format": read_response_format,
    "structured_outputs": read_structured_outputs,
}
"""Fields of OpenAI's routes that give a grammar → their readers."""


# --- compile and check --------------------------------------------------------------------------------------


async def compile_grammar(grammar: Grammar, tokenizer: ModelTokenizer | None = None) -> str:
    """Compile a grammar apart, and check it. Raises ApiError (422) with the cause.

    `tokenizer` is the model's: tags may be its special tokens.
    """
    if grammar.kind == COMPILED:
        return grammar.text
    check_size(grammar.field, grammar.text)
    special_ids = tokenizer.special_tokens if tokenizer and grammar.kind == "structural_tag" else {}
    return await run_apart(grammar.field, compile_checked, grammar, tuple(special_ids.items()))


def check_size(field: str, text: str) -> None:
    """Raises ApiError for a text that is too long to be compiled."""
    if len(text) > MAX_GRAMMAR_BYTES:
        raise invalid(f"`{field}` must have at most {MAX_GRAMMAR_BYTES} characters. Given: {len(text)}")


@functools.lru_cache(maxsize=256)
def compile_checked(grammar: Grammar, special_ids: SpecialIds = ()) -> str:
    """Compile a grammar, and check it. Raises ApiError (422).

    Args:
        special_ids: the model's special tokens, which tags may be.
    """
    return checked(grammar.field, partial(compile_unchecked, grammar), special_ids)


def compile_unchecked(grammar: Grammar, special_ids: SpecialIds = ()) -> str:
    """The grammar in llguidance's form. Raises ValueError."""
    match grammar.kind:
        case "json":
            schema = enforced(json.loads(grammar.text), grammar.closed, grammar.whitespace)
            return json.dumps({"grammars": [{"json_schema": schema}]})
        case "regex":
            return llguidance.LLMatcher.grammar_from_regex(grammar.text)
        case "choice":
            lark = Lark()
            return lark.source(lark.lexeme(" | ".join(map(literal, json.loads(grammar.text)))))
        case "structural_tag":
            lark = Lark(special_ids, grammar.whitespace)
            return lark.source(lark.format(json.loads(grammar.text), ()))
        case _:
            return to_lark(grammar.text)


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
    matcher, num_tried = llguidance.LLMatcher(BYTES, source, log_level=0), 0
    is_compiled = not matcher.is_error()
    while not matcher.is_stopped() and num_tried < NUM_TRIED:  # an error stops it, too
        token = matcher.compute_logit_bias().rfind(ALLOWED_BIAS, 0, BYTES.eos_token)
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
    command = [sys.executable, "-P", "-c", f"from api.grammar.compile import main; main({theirs.fileno()})"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
    theirs.close()
    return process, ours


@functools.lru_cache(maxsize=256)
def outcome(field: str, work: Callable[..., str], args: tuple[Any, ...]) -> str | tuple[str, str | None]:
    """What `work` returns, or text and field of its ApiError. Raises ApiError (503) if the process was killed
    each time, whatever it compiled.
    """
    for _ in range(2):
        if start()[0].poll() is not None:
            start.cache_clear()
        process, connection = start()
        try:
            connection.send((work, args))
            answer: str | tuple[str, str | None] = connection.recv()
        except (EOFError, OSError):
            connection.close()
        else:
            return answer
        if (status := process.wait()) >= 0:  # not by a signal
            raise internal_error(f"The compiler of grammars has failed with status {status}")
        if -status in OF_LIMITS:
            return cannot_compile(field, f"it takes more than {LIMITS}").text, field
    raise unavailable("the compiler of grammars was killed")


async def run_apart(field: str, work: Callable[..., str], *args: Any) -> str:
    """The result of `work`, a function of a module. Raises its ApiError, and one (422) with the name of the
    field if it takes more than LIMITS.
    """
    found = await asyncio.get_running_loop().run_in_executor(CALLER, outcome, field, work, args)
    if isinstance(found, str):
        return found
    raise invalid(*found)


def main(fd: int) -> None:
    """Compile for the gateway at the other end of a pipe, until it ends."""
    setproctitle.setproctitle("tokenfleet grammars")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the gateway's end is ours
    connection = Connection(fd)
    set_limit(resource.RLIMIT_CORE, 0)
    set_limit(resource.RLIMIT_STACK, STACK_BYTES)
    set_limit(resource.RLIMIT_AS, MEMORY_BYTES)
    with contextlib.suppress(OSError):  # before the gateway, where a container's memory ends first
        Path("/proc/self/oom_score_adj").write_text("1000")
    with contextlib.suppress(EOFError):
        while True:
            work, args = connection.recv()
            set_limit(resource.RLIMIT_CPU, int(time.process_time()) + 1 + CPU_S)
            try:
                connection.send(work(*args))
            except ApiError as error:
                connection.send((error.text, error.param))
            except (MemoryError, RecursionError):
                os.abort()


def set_limit(kind: int, most: int) -> None:
    """Limit this process, as far as the system lets it."""
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))
