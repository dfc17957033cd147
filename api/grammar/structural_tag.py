"""Structural tag: text with structured parts between tags, as vLLM and xgrammar describe it, in Lark."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from api.errors import cut, invalid
from api.grammar.check import can_go_on
from api.grammar.lark import TEXT, Lark, escaped, literal, one_of, regex, without
from api.grammar.tag_formats import (
    AnyTextFormat,
    ConstStringFormat,
    Format,
    GrammarFormat,
    JSONSchemaFormat,
    OrFormat,
    RegexFormat,
    SequenceFormat,
    StructuralTag,
    TagFormat,
    TagsWithSeparatorFormat,
    TriggeredTagsFormat,
    read_tag,
)

ANYTHING = r"(.|\n)"
FIRST_OF_JSON = {
    "object": r"\{",
    "array": r"\[",
    "string": '"',
    "integer": "[-0-9]",
    "number": "[-0-9]",
    "boolean": "[tf]",
    "null": "n",
}
FIRST_OF_ANY_JSON = r"[\[{\"\-0-9tfn]"


class Following(NamedTuple):
    """What follows a format; nothing does at the end of the whole.

    Attributes:
        marks: it begins with one of these texts. Free text ends where the first of them comes.
        firsts: without marks, regexes of the characters with which it may begin.
    """

    marks: tuple[str, ...] = ()
    firsts: tuple[str, ...] = ()


END = Following()


class Part(NamedTuple):
    """A format, as it stands in a grammar: a mark, and then the rest of it.

    Attributes:
        mark: the text with which it begins; "" if that is not fixed.
        form: what follows the mark; None for nothing.
        pattern: of a text that is one lexeme; "" for other formats.
        is_free: any text will do, so it may end before what it could go on with.
    """

    field: str
    mark: str = ""
    form: Format | None = None
    pattern: str = ""
    is_free: bool = False

    @property
    def is_choice(self) -> bool:
        return isinstance(self.form, OrFormat) and not self.pattern

    @property
    def start(self) -> Following:
        """What this part is to the one before it."""
        return Following((self.mark,)) if self.mark else Following((), firsts_of(self.form))


@dataclass(frozen=True, slots=True)
class TagRules:
    """The rules of formats in one grammar. The rule of a format includes the mark that follows the format:
    only the mark shows where free text ends.

    Attributes:
        schema: (JSON schema, its field, white space) → the schema as it is compiled. Raises ApiError.
        grammar: (GBNF or Lark, its field) → the grammar in Lark. Raises ApiError.
    """

    lark: Lark
    schema: Callable[[Any, str, str], Mapping[str, Any]]
    grammar: Callable[[str, str], str]

    def source(self, text: str, field: str) -> str:
        """The grammar of a structural tag, given as JSON. Raises ApiError that names the part at fault."""
        tag = read_tag(text, field)
        if isinstance(tag, StructuralTag):
            return self.lark.source(self.rule(tag.format, f"{field}.format", END))
        tags = []
        for i, structure in enumerate(tag.structures):
            schema = {} if structure.json_schema is None else structure.json_schema
            self.schema(schema, f"{field}.structures.{i}.schema", "")
            content = JSONSchemaFormat(type="json_schema", json_schema=schema)
            tags.append(TagFormat(begin=structure.begin, content=content, end=[structure.end]))
        form = TriggeredTagsFormat(type="triggered_tags", triggers=tag.triggers, tags=tags)
        return self.lark.source(self.triggered(form, field, END, "structures"))

    def rule(self, form: Format, field: str, following: Following) -> str:
        return self.sequence([part_of(form, field)], following)

    def sequence(self, parts: Sequence[Part], following: Following) -> str:
        """Parts, one after the other: the rule of each ends with the mark of the next one."""
        source = [self.lark.marked(parts[0].mark)]
        for before, part, after in zip((None, *parts), parts, (*parts[1:], None), strict=False):
            end = following if after is None else after.start
            if part.pattern and after is not None and after.is_choice:
                continue  # the choice is written together with the text before it
            if part.is_choice and before is not None and before.pattern:
                source.append(self.choice(before, part, end))
            else:
                source.append(self.rest(part, end))
        return " ".join(one for one in source if one)

    def rest(self, part: Part, following: Following) -> str:
        """What follows the mark of a part."""
        field = part.field
        if part.pattern:
            return self.text(part, following)
        match part.form:
            case SequenceFormat(elements=elements):
                return self.sequence(joined(parts_of(elements, field)), following)
            case OrFormat(elements=elements):
                return one_of(self.sequence([one], following) for one in parts_of(elements, field))
            case TagFormat() as tag:
                return self.content(tag, field, following)
            case TriggeredTagsFormat() as tags:
                return self.triggered(tags, field, following)
            case TagsWithSeparatorFormat() as tags:
                source = self.separated(tags, field, following)
            case GrammarFormat(grammar=grammar):
                source = self.lark.nest(self.grammar(grammar, f"{field}.grammar"))
            case JSONSchemaFormat(json_schema=schema, max_whitespace_cnt=most):
                whitespace = "" if most is None else rf"[ \n\t]{{0,{most}}}"
                source = self.lark.json(self.schema(schema, f"{field}.json_schema", whitespace))
            case _:
                source = ""
        return f"{source} {self.lark.any_marked(following.marks)}"

    def text(self, part: Part, following: Following) -> str:
        """A text that matches a pattern: the longest one, unless a mark says where it ends."""
        pattern = ending(part, following.firsts)
        if following.marks:
            return one_of(self.lark.until(mark, pattern) for mark in following.marks)
        return self.lark.lexeme(pattern)

    def choice(self, text: Part, choice: Part, following: Following) -> str:
        """A text, and one of several formats after it. The text ends before the next format's mark, or before
        a character with which a format without a mark may begin.
        """
        assert isinstance(choice.form, OrFormat)
        options = parts_of(choice.form.elements, choice.field)
        firsts = [first for option in options for first in option.start.firsts]
        until = text._replace(pattern=ending(text, firsts))
        return one_of(self.sequence([until, option], following) for option in options)

    def content(self, tag: TagFormat, field: str, following: Following) -> str:
        """What stands after the beginning of a tag. Without an end, it goes on up to what follows."""
        place, ends = f"{field}.content", tuple(end for end in tag.end if end)
        found = []
        if ends:
            inner = self.rule(tag.content, place, Following(ends))
            found.append(f"{inner} {self.lark.any_marked(following.marks)}")
        if "" in tag.end:
            found.append(self.rule(tag.content, place, following))
        return one_of(found) if len(found) > 1 else found[0]

    def triggered(
        self, form: TriggeredTagsFormat, field: str, following: Following, name: str = "tags"
    ) -> str:
        """Free text, with tags wherever their triggers come; `name` is the field that has the tags."""
        after_tag = following if form.stop_after_first or following == END else Following((), (ANYTHING,))
        groups: dict[str, list[str]] = {}
        for i, tag in enumerate(form.tags):
            place = f"{field}.{name}.{i}"
            trigger = self.trigger_of(tag, form.triggers, place)
            head = self.lark.marked(tag.begin.removeprefix(trigger))
            groups.setdefault(trigger, []).append(f"{head} {self.content(tag, place, after_tag)}")
        free = Part(field, "", None, text_without(form.excludes), True)
        pattern = ending(free, following.firsts)
        first = one_of(f"{self.lark.marked(trigger)} {one_of(rest)}" for trigger, rest in groups.items())
        if form.at_least_one and form.stop_after_first:
            return f"{first} {self.lark.any_marked(following.marks)}"
        found = (f"{self.lark.until(trigger, pattern)} {one_of(rest)}" for trigger, rest in groups.items())
        any_tag, text = self.lark.rule(one_of(found)), self.text(free, following)
        if form.stop_after_first:
            return one_of([any_tag, text])
        return f"{first if form.at_least_one else ''} ({any_tag})* {text}"

    def trigger_of(self, tag: TagFormat, triggers: Sequence[str], place: str) -> str:
        """The shortest trigger that a tag begins with, since it comes first; if it is a part of a special
        token, the whole token. Raises ApiError where there is none.
        """
        trigger = min((one for one in triggers if tag.begin.startswith(one)), key=len, default=None)
        if trigger is None:
            raise invalid(f"`{place}.begin` must begin with one of `triggers`", f"{place}.begin")
        marks = [mark for mark in self.lark.special_ids if tag.begin.startswith(mark)]
        return next((mark for mark in marks if mark.startswith(trigger)), trigger)

    def separated(self, form: TagsWithSeparatorFormat, field: str, following: Following) -> str:
        """Tags with a separator between them."""
        parts = parts_of(form.tags, field, "tags")
        more = [escaped(form.separator[0])] if form.separator else first_characters(form.tags)
        after = [*following.firsts, *(escaped(mark[0]) for mark in following.marks)]
        inside = Following((), (*(() if form.stop_after_first else more), *after))
        one = self.lark.rule(one_of(self.sequence([part], inside) for part in parts))
        many = one if form.stop_after_first else f"{one} ({self.lark.marked(form.separator)} {one})*"
        return many if form.at_least_one else f"({many})?"


# --- parts --------------------------------------------------------------------------------------------------


def parts_of(forms: Sequence[Format], field: str, name: str = "elements") -> list[Part]:
    return [part_of(form, f"{field}.{name}.{i}") for i, form in enumerate(forms)]


def part_of(form: Format, field: str) -> Part:
    match form:
        case ConstStringFormat(value=text):
            return Part(field, text)
        case TagFormat(begin=text):
            return Part(field, text, form)
        case _:
            return Part(field, "", form, pattern_of(form), isinstance(form, AnyTextFormat))


def joined(parts: Sequence[Part]) -> list[Part]:
    """The parts of a sequence; patterns side by side are one."""
    found: list[Part] = []
    for part in parts:
        if part.pattern and found and found[-1].pattern:
            part = Part(part.field, "", part.form, f"{found.pop().pattern} {part.pattern}")
        found.append(part)
    return found


def pattern_of(form: Format) -> str:
    """The pattern of a format whose texts are those of a regex; "" for others."""
    match form:
        case AnyTextFormat():
            return text_without(form.excludes, form.max_chars)
        case RegexFormat():
            return regex(form.pattern)
        case OrFormat():
            patterns = [pattern_of(one) for one in form.elements]
            return one_of(patterns) if all(patterns) else ""
        case _:
            return ""


def text_without(excludes: Sequence[str], most: int | None = None) -> str:
    """The pattern of any text that has none of these in it, and at most `most` characters."""
    text = TEXT if most is None else rf"/(.|\n){{0,{most}}}/"
    return without(text, map(literal, excludes)) if excludes else text


def ending(text: Part, firsts: Sequence[str]) -> str:
    """The pattern of a text that these characters may follow: free text ends there. Raises ApiError for
    another text that could go on with them.
    """
    first, field = "|".join(dict.fromkeys(firsts)), text.field
    try:
        if not first or not can_go_on(text.pattern, first):
            return text.pattern
    except ValueError as error:
        raise invalid(f"`{field}` cannot be compiled: {cut(str(error))}", field) from error
    if not text.is_free or ANYTHING in firsts:
        words = "it must be the last, or a text must follow it with which it cannot go on"
        raise invalid(f"`{field}` has no end: {words}", field)
    return without(text.pattern, [f"/{first}/"])


# --- first characters ---------------------------------------------------------------------------------------


def first_characters(forms: Sequence[Format]) -> tuple[str, ...]:
    return tuple(first for form in forms for first in firsts_of(form))


def firsts_of(form: Format | None) -> tuple[str, ...]:
    """Regexes of the characters that a format may begin with."""
    match form:
        case ConstStringFormat(value=text) | TagFormat(begin=text) if text:
            return (escaped(text[0]),)
        case TagFormat():
            return firsts_of(form.content)
        case JSONSchemaFormat():
            return (first_of_json(form.json_schema),)
        case OrFormat():
            return first_characters(form.elements)
        case SequenceFormat():
            return firsts_of(form.elements[0])
        case TriggeredTagsFormat() | TagsWithSeparatorFormat() if form.at_least_one:
            return first_characters(form.tags)
        case _:
            return (ANYTHING,)


def first_of_json(schema: Any) -> str:
    """A regex of the first character of a JSON value."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    return FIRST_OF_JSON.get(kind, FIRST_OF_ANY_JSON) if isinstance(kind, str) else FIRST_OF_ANY_JSON
