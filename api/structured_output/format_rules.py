"""Rules of the formats that structural tags consist of, in Lark."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from api.errors import ApiError, invalid, quoted
from api.structured_output.behind import END, Behind, firsts_of
from api.structured_output.format_fields import as_text, checked, items_of, number_of, text_of
from api.structured_output.lark import NOTHING, Lark, Mark, one_of, token
from api.structured_output.sequences import SequenceRules
from api.structured_output.tagged_values import STYLES, tagged_object
from api.structured_output.texts import NEVER, matched, merged, part_of, repetition
from api.structured_output.token_sets import TokenSets
from api.structured_output.triggered_tags import TagLists


class Compiler(NamedTuple):
    """How parts of other languages are compiled. Each raises ApiError.

    Attributes:
        schema: (JSON schema, its field, white space) → the schema as it is compiled.
        grammar: (grammar, its field) → the grammar in Lark.
    """

    schema: Callable[[Any, str, str], Mapping[str, Any]]
    grammar: Callable[[str, str], str]


@dataclass(frozen=True, slots=True)
class FormatRules:
    """The rules of formats in one grammar. Each is one with the mark `behind` it."""

    lark: Lark
    tokens: TokenSets
    compiler: Compiler

    @property
    def lists(self) -> TagLists:
        return TagLists(self.lark, self.tokens, self.tag)

    def rule(self, value: Any, field: str, behind: Behind = END) -> str:
        part = part_of(value, field)
        if part.pattern:
            return matched(self.lark, part, behind)
        form = part.form
        match form["type"]:
            case "sequence":
                parts = merged(items_of(form, "elements", field))
                return SequenceRules(self.lark, self.tokens, self.rule).rule_of(parts, behind)
            case "or":
                return one_of(self.rule(*item, behind) for item in items_of(form, "elements", field))
            case "tag":
                return self.tag(form, field, behind)
            case "triggered_tags" | "dispatch":
                return self.lists.triggered(form, field, behind)
            case "token_triggered_tags" | "token_dispatch":
                return self.lists.token_triggered(form, field, behind)
            case _:
                return f"{self.alone(form, field, behind)} {self.lark.any_marked(behind.marks)}"

    def alone(self, form: Mapping[str, Any], field: str, behind: Behind) -> str:
        """The rule of a format that ends by itself, or is a row of tokens."""
        match form["type"]:
            case "const_string":
                return self.lark.marked(text_of(form, "value", field))
            case "grammar":
                text = text_of(form, "grammar", field)
                return self.lark.grammar(self.compiler.grammar(text, f"{field}.grammar"))
            case "json_schema" | "qwen_xml_parameter":
                return self.json(form, field)
            case "tags_with_separator":
                return self.lists.separated(form, field, behind)
            case "any_text":
                return self.tokens.text(form, field, behind)
            case "any_tokens":
                return self.tokens.many(form, field, behind)
            case "exclude_token":
                return self.tokens.excluding(form, field, behind)
            case "token":
                return token(self.tokens.id_of(form.get("token"), f"{field}.token"))
            case _:
                return self.loop(form, field, behind)

    def json(self, form: Mapping[str, Any], field: str) -> str:
        """JSON, or in a style of xgrammar's its values between tags."""
        place, most = f"{field}.json_schema", number_of(form, "max_whitespace_cnt", field)
        whitespace = "" if most is None else rf"[ \n\t]{{0,{most}}}"
        schema = self.compiler.schema(form.get("json_schema"), place, whitespace)
        style = form.get("style") or ("json" if form["type"] == "json_schema" else "qwen_xml")
        if style == "json":
            return self.lark.json(schema)
        if not isinstance(style, str) or style not in STYLES:
            allowed = ", ".join(["json", *STYLES])
            raise invalid(
                f"`{field}.style` must be one of {allowed}. Given: {quoted(style)}", f"{field}.style"
            )

        def refuse(keyword: str) -> ApiError:
            cause = f"the keyword `{keyword}` is not supported in the style {style}"
            return invalid(f"`{place}` cannot be compiled: {cause}", place)

        return tagged_object(self.lark, STYLES[style], schema, refuse)

    def loop(self, form: Mapping[str, Any], field: str, behind: Behind) -> str:
        """A format several times, or once or not at all."""
        place = f"{field}.content"
        content = checked(form.get("content"), place)
        if content["type"] in ("exclude_token", "any_tokens"):
            self.tokens.ends_of(field, behind)
        inside = behind.inside(() if form["type"] == "optional" else firsts_of(content))
        times = repetition(form, field)
        one = self.rule(content, place, inside)
        return NOTHING if times == NEVER else f"({one}){times}"

    def tag(self, form: Mapping[str, Any], field: str, behind: Behind, trigger: str = "") -> str:
        """A tag, behind the trigger that it begins with."""
        content, place = form.get("content"), f"{field}.content"
        begin, ends = self.tokens.mark_of(form.get("begin"), f"{field}.begin"), self.ends_of(form, field)
        head = begin.removeprefix(trigger) if isinstance(begin, str) else begin
        marks = tuple(mark for mark in ends if mark != "")
        found = []
        if marks:
            tokens = frozenset(mark for mark in marks if isinstance(mark, int))
            inner = self.rule(content, place, Behind(marks, (), tokens))
            found.append(f"{inner} {self.lark.any_marked(behind.marks)}")
        if len(marks) < len(ends):
            found.append(self.rule(content, place, behind))
        return f"{self.lark.marked(head)} {found[0] if len(found) == 1 else one_of(found)}"

    def ends_of(self, form: Mapping[str, Any], field: str) -> tuple[Mark, ...]:
        """The marks with which a tag may end; "" for none at all."""
        if not isinstance(form.get("end"), list):
            return (self.tokens.mark_of(form.get("end"), f"{field}.end"),)
        return tuple(as_text(*item, empty=True) for item in items_of(form, "end", field))
