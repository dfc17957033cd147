"""Regexes: whether one ends where its text is followed by another."""

import functools

import llguidance

from api.structured_output.lark import TEXT

EMPTY = "NoExtensionBias"
"""llguidance's error for a grammar that no text satisfies."""


@functools.lru_cache(maxsize=256)
def can_go_on(pattern: str, first: str) -> bool:
    """Whether a text that matches can be the beginning of a longer one that matches, and goes on there with
    this character: the longest match would then take what belongs to what follows. Both are regexes of a
    Lark grammar. Raises ValueError.
    """
    source = f"start: BOTH\nONE: {pattern}\nBOTH: ONE & (ONE /{first}/ {TEXT})"
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), source, log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()
    error = matcher.get_error() if matcher.is_error() else ""
    if error and not error.startswith(EMPTY):
        raise ValueError(error.split("<state>")[0].strip())
    return not error
