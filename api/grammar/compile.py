"""Grammar: what an answer must look like, from a client's words to llguidance's form.

`read.py` reads it from a request. Here it is compiled and checked: what cannot be served is refused before it
is queued. `force.py` adds calls and thinking. Workers compile llguidance's form for their model's vocabulary.
"""

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass

import llguidance

from api.errors import invalid
from api.grammar.apart import cannot_compile, run_apart
from api.grammar.lark import WHITESPACE, Lark, SpecialIds, enforced, literal, to_lark
from api.prompts.tokenizer import ModelTokenizer

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
        raise invalid(f"`{grammar.field}` {words}", grammar.field)
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
    try:
        return checked(functools.partial(compile_unchecked, grammar), special_ids)
    except ValueError as error:
        raise cannot_compile(grammar.field, str(error)) from error


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


def checked(source: Callable[[SpecialIds], str], special_ids: SpecialIds) -> str:
    """A grammar with the model's special tokens; it is checked with their texts. Raises ValueError.

    Args:
        source: special tokens → the grammar.
    """
    plain = source(())
    if cause := find_error(plain):
        raise ValueError(cause)
    return source(special_ids) if special_ids else plain


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
