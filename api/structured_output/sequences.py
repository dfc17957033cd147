"""Sequences of formats in a structural tag, in Lark."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from api.structured_output.behind import Behind, firsts_of, firsts_of_all
from api.structured_output.format_fields import items_of, object_of, text_of
from api.structured_output.lark import Lark, Mark, one_of
from api.structured_output.texts import Part, ending, matched, part_of
from api.structured_output.token_sets import TokenSets

Cut = tuple[Mark, Part]
"""The mark that a part begins with, "" for none, and the rest of it; its form is empty if it is all mark."""


@dataclass(frozen=True, slots=True)
class SequenceRules:
    """The rules of sequences in one grammar.

    Attributes:
        rule: (format, its field, what stands behind it) → its rule.
    """

    lark: Lark
    tokens: TokenSets
    rule: Callable[[Any, str, Behind], str]

    def rule_of(self, parts: Sequence[Part], behind: Behind) -> str:
        """The parts, each with the mark that the next one begins with."""
        cut = [self.cut_head(part) for part in parts]
        ends = [behind_at(cut, i + 1, behind) for i in range(len(cut))]
        source = [self.lark.marked(cut[0][0])]
        at = 0
        while at < len(cut):
            rest = cut[at][1]
            if rest.pattern and at + 1 < len(cut) and is_choice(*cut[at + 1]):
                at += 1
                source.append(self.branches(rest, cut[at][1], ends[at]))
            elif rest.pattern:
                source.append(matched(self.lark, rest, ends[at]))
            elif rest.form:
                source.append(self.rule(rest.form, rest.field, ends[at]))
            else:
                source.append(self.lark.any_marked(ends[at].marks))
            at += 1
        return " ".join(source)

    def branches(self, text: Part, choice: Part, end: Behind) -> str:
        """A text, and behind it one of several formats, or one or none: it ends by the mark that comes, or by
        a character with which those without a mark may begin.
        """
        options = options_of(choice)
        cut = [self.cut_head(option) for option in options]
        firsts = [*firsts_of_all([rest.form for head, rest in cut if head == ""])]
        may_miss = choice.form["type"] == "optional"
        until = text._replace(pattern=ending(text, [*firsts, *(end.firsts if may_miss else ())]))
        found = [self.rule_of([until, option], end) for option in options]
        return one_of([*found, matched(self.lark, until, end)] if may_miss else found)

    def cut_head(self, part: Part) -> Cut:
        form, field = part.form, part.field
        if part.pattern:
            return "", part
        match form["type"]:
            case "const_string":
                return text_of(form, "value", field), part._replace(form={})
            case "token":
                return self.tokens.id_of(form.get("token"), f"{field}.token"), part._replace(form={})
            case "tag":
                begin = self.tokens.mark_of(form.get("begin"), f"{field}.begin")
                return begin, part._replace(form={**form, "begin": ""})
            case _:
                return "", part


def behind_at(cut: Sequence[Cut], at: int, behind: Behind) -> Behind:
    """What stands behind the parts before one."""
    if at == len(cut):
        return behind
    head, rest = cut[at]
    if head != "":
        return Behind((head,), (), behind.ends)
    if rest.pattern or rest.form["type"] not in ("optional", "star"):
        return Behind((), firsts_of(rest.form), behind.ends)
    following = behind_at(cut, at + 1, behind)
    content = object_of(rest.form.get("content"), f"{rest.field}.content")
    return Behind((), (*firsts_of(content), *following.starts), behind.ends)


def is_choice(head: Mark, rest: Part) -> bool:
    return head == "" and not rest.pattern and rest.form["type"] in ("or", "optional")


def options_of(choice: Part) -> list[Part]:
    """The formats of which one comes, or at most one."""
    if choice.form["type"] == "optional":
        return [part_of(choice.form.get("content"), f"{choice.field}.content")]
    return [part_of(*item) for item in items_of(choice.form, "elements", choice.field)]
