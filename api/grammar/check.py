"""Check: whether a grammar in llguidance's form can be served, and what its texts can begin with.

Grammars are checked with a vocabulary of single bytes: what is too complex for it is too complex for a
model's.
"""

import functools

import llguidance

NUM_TRIED = 32
"""How many tokens of a text are tried: usually they take a millisecond, at most half a second."""
ALLOWED_BIAS = 200
"""The bias that llguidance gives a token that may come next."""
NO_TEXT = "NoExtensionBias"
"""llguidance's error for a grammar that no text satisfies."""
UNSATISFIABLE = "no text satisfies it"
MAX_FORCED = 8192
"""How many bytes may be forced at once: the engine tokenizes all of them at each step."""


@functools.cache
def byte_tokenizer() -> llguidance.LLTokenizer:
    """llguidance's tokenizer of single bytes."""
    return llguidance.LLTokenizer("byte")


# --- checks -------------------------------------------------------------------------------------------------


def find_error(source: str) -> str:
    """Why a grammar without special tokens cannot be served; "" if it can, as far as the beginning of
    one of its texts shows.
    """
    tokenizer = byte_tokenizer()
    matcher = llguidance.LLMatcher(tokenizer, source, log_level=0)
    if matcher.is_error():
        return error_of(matcher)
    tried, next_token = 0, last_allowed(matcher, tokenizer)
    while next_token >= 0 and tried < NUM_TRIED and matcher.consume_token(next_token):
        if len(matcher.compute_ff_tokens()) > MAX_FORCED:
            return f"it forces a text of more than {MAX_FORCED} bytes"
        tried, next_token = tried + 1, last_allowed(matcher, tokenizer)
    cause = error_of(matcher)
    if cause.startswith(NO_TEXT):
        return "" if tried else UNSATISFIABLE
    return f"it is too complex: {cause}" if cause else ""


def last_allowed(matcher: llguidance.LLMatcher, tokenizer: llguidance.LLTokenizer) -> int:
    """The highest token that may come next, without the end; -1 if none may."""
    if matcher.is_stopped():
        return -1
    return matcher.compute_logit_bias().rfind(ALLOWED_BIAS, 0, tokenizer.eos_token)


def error_of(matcher: llguidance.LLMatcher) -> str:
    """The error of a matcher; "" if it has none."""
    return " ".join(matcher.get_error().partition("<state>")[0].split())


def can_begin(source: str, text: str) -> bool:
    """Whether a text of the grammar can begin with this one."""
    matcher = llguidance.LLMatcher(byte_tokenizer(), source, log_level=0)
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens)
