"""Tags in free text or free tokens, where their triggers come, and lists of tags, in Lark."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from api.errors import invalid, quoted
from api.structured_output.behind import ANYTHING, END, Behind, firsts_of
from api.structured_output.format_fields import (
    as_text,
    flag_of,
    items_of,
    object_of,
    text_of,
    texts_of,
    token_of,
)
from api.structured_output.lark import Lark, one_of, token
from api.structured_output.texts import Part, ending, matched, text_without
from api.structured_output.token_sets import TokenSets

Tag = tuple[str, Mapping[str, Any]]
"""(its field, its own fields)."""
SOMETHING = Behind((), (ANYTHING,))


@dataclass(frozen=True, slots=True)
class TagLists:
    """Formats of several tags, in one grammar.

    Attributes:
        tag: (fields of a tag, their place, what stands behind it, the trigger it begins with) → its rule.
    """

    lark: Lark
    tokens: TokenSets
    tag: Callable[[Mapping[str, Any], str, Behind, str], str]

    def triggered(self, form: Mapping[str, Any], field: str, behind: Behind) -> str:
        """Text, with tags in it wherever their triggers come."""
        tags = tags_of(form, field) if form["type"] == "triggered_tags" else dispatched(form, field)
        return self.in_text(form, tags, field, behind)

    def in_text(self, form: Mapping[str, Any], tags: list[Tag], field: str, behind: Behind) -> str:
        excludes = texts_of(form, "excludes", field)
        is_needed, is_single = flag_of(form, "at_least_one", field), is_one(form, field)
        behind_tag = behind if is_single else behind_each(behind)
        groups: dict[str, list[str]] = {}
        for place, tag, trigger in self.with_triggers(form, tags, field):
            groups.setdefault(trigger, []).append(self.tag(tag, place, behind_tag, trigger))
        text = ending(Part({}, field, text_without(excludes), True), behind.firsts)
        calls = [f"{self.lark.until(trigger, text)} {one_of(rest)}" for trigger, rest in groups.items()]
        found_tag = self.lark.rule(one_of(calls))
        first = [f"{self.lark.marked(trigger)} {one_of(rest)}" for trigger, rest in groups.items()]
        start = one_of(first) if is_needed else ""
        if is_single and is_needed:
            return start
        rest = matched(self.lark, Part({}, field, text), behind)
        return one_of([found_tag, rest]) if is_single else f"{start} ({found_tag})* {rest}"

    def with_triggers(
        self, form: Mapping[str, Any], tags: list[Tag], field: str
    ) -> list[tuple[str, Mapping[str, Any], str]]:
        """(its place, its fields, its trigger) of each tag. Raises ApiError for one that has none."""
        if form.get("type") == "dispatch":
            return [(place, tag, tag["begin"]) for place, tag in tags]
        triggers = [as_text(*item) for item in items_of(form, "triggers", field)]
        found = []
        for place, tag in tags:
            begin = text_of(tag, "begin", place)
            # the shortest: it comes before those that it begins
            trigger = min((one for one in triggers if begin.startswith(one)), key=len, default=None)
            if trigger is None:
                raise invalid(f"`{place}.begin` must begin with one of `triggers`", f"{place}.begin")
            found.append((place, tag, self.whole_mark(begin, trigger)))
        return found

    def whole_mark(self, begin: str, trigger: str) -> str:
        """A trigger that is a part of a special token comes with that whole token."""
        marks = [mark for mark in self.lark.special_ids if begin.startswith(mark)]
        return next((mark for mark in marks if mark.startswith(trigger)), trigger)

    def token_triggered(self, form: Mapping[str, Any], field: str, behind: Behind) -> str:
        """Any tokens, with tags among them wherever the tokens come that trigger them."""
        is_dispatch = form["type"] == "token_dispatch"
        tags = dispatched(form, field) if is_dispatch else tags_of(form, field)
        is_needed, is_single = flag_of(form, "at_least_one", field), is_one(form, field)
        excluded = self.tokens.ids_of(form, "exclude_tokens", field)
        triggers = self.tokens.ids_of(form, "trigger_tokens", field)
        behind_tag = behind if is_single else behind_each(behind)
        groups: dict[int, list[str]] = {}
        for place, tag in tags:
            begin = f"{place}.begin"
            value = tag["begin"] if is_dispatch else token_of(tag.get("begin"), begin)
            trigger = self.tokens.id_of(value, begin)
            if not is_dispatch and trigger not in triggers:
                raise invalid(f"`{begin}` must be one of `trigger_tokens`", begin)
            groups.setdefault(trigger, []).append(self.tag({**tag, "begin": ""}, place, behind_tag, ""))
        call = self.lark.rule(one_of(f"{token(trigger)} {one_of(rest)}" for trigger, rest in groups.items()))
        if is_needed and is_single:
            return call
        ends = self.tokens.ends_of(field, behind)
        free = self.tokens.without({*excluded, *triggers, *groups, *ends}, field)
        end = self.lark.any_marked(behind.marks)
        if is_single:
            return f"{free}* ({call} | {end})" if end else f"{free}* ({call})?"
        return f"{call if is_needed else ''} ({free} | {call})* {end}"

    def separated(self, form: Mapping[str, Any], field: str, behind: Behind) -> str:
        """Tags with a separator between them, and nothing else."""
        tags = tags_of(form, field)
        separator = text_of(form, "separator", field, empty=True)
        is_single = flag_of(form, "stop_after_first", field)
        following = [first for _, tag in tags for first in firsts_of({"type": "tag", **tag})]
        if separator:
            following = list(firsts_of({"type": "const_string", "value": separator}))
        inside = behind.inside(() if is_single else following)
        one = self.lark.rule(one_of(self.tag(tag, place, inside, "") for place, tag in tags))
        many = one if is_single else f"{one} ({self.lark.marked(separator)} {one})*"
        return many if flag_of(form, "at_least_one", field) else f"({many})?"


def is_one(form: Mapping[str, Any], field: str) -> bool:
    """Whether nothing may follow the first tag."""
    return flag_of(form, "stop_after_first", field) or not flag_of(form, "loop", field, default=True)


def behind_each(behind: Behind) -> Behind:
    """What stands behind each of several tags, where this stands behind them all."""
    return behind if behind == END else SOMETHING._replace(ends=behind.ends)


def tags_of(form: Mapping[str, Any], field: str) -> list[Tag]:
    found: list[Tag] = []
    for value, place in items_of(form, "tags", field):
        tag = {"type": "tag", **object_of(value, place)}
        if tag["type"] != "tag":
            raise invalid(f"`{place}.type` must be tag. Given: {quoted(tag['type'])}", f"{place}.type")
        found.append((place, tag))
    return found


def dispatched(form: Mapping[str, Any], field: str) -> list[Tag]:
    """The rules of a dispatch, pairs of a trigger and a format, as tags without an end."""
    found: list[Tag] = []
    for pair, place in items_of(form, "rules", field):
        if not isinstance(pair, list) or len(pair) != 2:
            raise invalid(f"`{place}` must be a pair of a trigger and a format", place)
        begin, content = pair
        if form["type"] == "dispatch":
            as_text(begin, f"{place}.0")
        found.append((place, {"type": "tag", "begin": begin, "content": content, "end": ""}))
    return found
