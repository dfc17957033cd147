"""Formats of tokens: one token, or any of a set, named by ids or texts, in Lark."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from api.errors import invalid, quoted
from api.structured_output.behind import Behind
from api.structured_output.format_fields import as_text, as_whole, number_of, token_of
from api.structured_output.lark import NOTHING, Lark, Mark
from api.structured_output.vocabulary import Vocabulary, ranges_without


@dataclass(frozen=True, slots=True)
class TokenSets:
    """Sets of a model's tokens, in one grammar. No set has the tokens that end an answer."""

    lark: Lark
    vocabulary: Vocabulary

    def id_of(self, value: Any, field: str) -> int:
        """The id of a token that is given by it, or by the token's text. Raises ApiError."""
        if isinstance(value, str):
            if (found := self.vocabulary.id_of(value)) is None:
                raise invalid(f"`{field}` must be the text of one token. Given: {quoted(value)}", field)
            return found
        value = as_whole(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise invalid(f"`{field}` must be the id or the text of a token", field)
        if not 0 <= value < self.vocabulary.size:
            limit = self.vocabulary.size
            raise invalid(f"`{field}` must be at least 0 and below {limit}. Given: {quoted(value)}", field)
        return value

    def mark_of(self, value: Any, field: str) -> Mark:
        """A mark that is a text, or a format of a token. Raises ApiError."""
        if isinstance(value, Mapping):
            return self.id_of(token_of(value, field), f"{field}.token")
        return as_text(value, field, empty=True)

    def ids_of(self, form: Mapping[str, Any], name: str, field: str) -> frozenset[int]:
        """The ids in a list of tokens; none where it is missing. Raises ApiError."""
        values, place = form.get(name), f"{field}.{name}"
        if not isinstance(values, list | None):
            raise invalid(f"`{place}` must be a list of tokens", place)
        return frozenset(self.id_of(value, f"{place}.{i}") for i, value in enumerate(values or []))

    def without(self, excluded: Iterable[int], field: str) -> str:
        """Any one token but these. Raises ApiError where none is left."""
        found = ranges_without(self.vocabulary.size, {*excluded, *self.vocabulary.ending_ids})
        if not found:
            raise invalid(f"`{field}` excludes all tokens", field)
        return found

    def excluding(self, form: Mapping[str, Any], field: str, behind: Behind) -> str:
        """One token, but those that the format excludes, and those that end the tag around."""
        return self.without({*self.ids_of(form, "exclude_tokens", field), *behind.ends}, field)

    def many(self, form: Mapping[str, Any], field: str, behind: Behind) -> str:
        """Any number of tokens, up to the one that stands behind them."""
        excluded = self.ids_of(form, "exclude_tokens", field) | self.ends_of(field, behind)
        return times(self.without(excluded, field), number_of(form, "max_tokens", field))

    def text(self, form: Mapping[str, Any], field: str, behind: Behind) -> str:
        """A text of at most so many tokens, up to the token that stands behind it."""
        for name in ("excludes", "max_chars"):
            if form.get(name) not in (None, []):
                raise invalid(f"`{field}.{name}` is not supported beside `max_tokens`", f"{field}.{name}")
        excluded = {*self.vocabulary.special_tokens.values(), *self.ends_of(field, behind)}
        return times(self.without(excluded, field), number_of(form, "max_tokens", field))

    def ends_of(self, field: str, behind: Behind) -> frozenset[int]:
        """The tokens by which a row of tokens ends. Raises ApiError where a text, which is tokens itself,
        stands behind it.
        """
        ends = {self.lark.token_of(mark) for mark in behind.marks}
        if None in ends or behind.firsts:
            words = "it must be the last, or a special token or one that is named must stand behind it"
            raise invalid(f"`{field}` has no end: {words}", field)
        return frozenset(end for end in ends if end is not None) | behind.ends


def times(one: str, most: int | None) -> str:
    """Any number of the same, at most so many."""
    return f"{one}*" if most is None else f"{one}{{0,{most}}}" if most else NOTHING
