"""Formats of structural tags: their texts, and the fields by which others are refused."""

from typing import Any

import llguidance
import pytest

from api.errors import ApiError
from api.grammar.check import byte_tokenizer
from api.grammar.compile import Grammar, compile_checked
from api.grammar.read import read_response_format
from tests.support.tool_calls.tag_formats import one_of, regex, sequence, tag, text

AGE = {"type": "json_schema", "json_schema": {"type": "integer", "maximum": 99}}
OBJECT = {"type": "json_schema", "json_schema": {"type": "object", "additionalProperties": False}}
ANY_TEXT = {"type": "any_text"}
YES = {"type": "grammar", "grammar": 'root ::= answer "!"\nanswer ::= "yes" | "no"'}
NESTED = {"type": "grammar", "grammar": 'root ::= "(" root ")" | rule_0\nrule_0 ::= [a-z]'}
TEXTS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "a choice of regexes": (sequence(one_of(regex("a+"), regex("b+")), text("ab")), ["aab"], ["ab", "abab"]),
    "grammar": (sequence(text("<"), YES, text(">")), ["<yes!>", "<no!>"], ["<yes>", "yes!"]),
    "a dash in a grammar": ({"type": "grammar", "grammar": r"root ::= [+\-\\]+"}, ["+-", "\\"], ["", "x"]),
    "grammars with the same names": (
        one_of(sequence(YES, NESTED), NESTED),
        ["yes!((a))", "(b)", "c"],
        ["yes!", "((a)", "yes!yes!"],
    ),
    "a grammar behind free text": (sequence(ANY_TEXT, text(": "), YES), ["so: no!", ": yes!"], ["so no!"]),
    "excludes": (
        {"type": "any_text", "excludes": ["<x>", "no"]},
        ["", "<x", "on <y>"],
        ["a<x>b", "know", "no"],
    ),
    "excludes before a mark": (
        tag({"type": "any_text", "excludes": ["<x>"]}),
        ["<t>a<x</t>"],
        ["<t>a<x></t>", "<t>a"],
    ),
    "max_chars": (tag({"type": "any_text", "max_chars": 2}), ["<t>é\n</t>", "<t></t>"], ["<t>abc</t>"]),
    "many ends": (tag(ANY_TEXT, end=["</a>", "</b>"]), ["<t>x</a>", "<t>a</b>"], ["<t>x</c>", "<t></a></b>"]),
    "no end or one": (tag(text("x"), end=["", "."]), ["<t>x", "<t>x."], ["<t>x..", "<t>"]),
    "free text before an object": (
        sequence(ANY_TEXT, OBJECT),
        ["so {}", "{}", "a } {}"],
        ["so", "{}{}", "{ {}"],
    ),
    "free text before a choice": (
        sequence(ANY_TEXT, one_of(OBJECT, text("no."), tag(AGE)), text("!")),
        ["{}!", "so {}!", "oh no.!", "<<t>7</t>!"],
        ["no!", "{no.!", "{<t>7</t>!"],
    ),
    "a regex before a choice": (
        sequence(regex("[a-z]+"), one_of(OBJECT, text(":"))),
        ["ab{}", "ab:"],
        [":", "ab", "{}"],
    ),
    "white space in JSON": (
        {"type": "json_schema", "json_schema": {"type": "object"}, "max_whitespace_cnt": 1},
        ["{}", "{\t}"],
        ["{  }"],
    ),
    "triggered tags with excludes": (
        {"type": "triggered_tags", "triggers": ["<t>"], "tags": [tag(AGE)], "excludes": ["x"]},
        ["a<t>1</t>b"],
        ["x", "a<t>1</t>x"],
    ),
}


def grammar_of(form: Any) -> Grammar:
    grammar = read_response_format({"type": "structural_tag", "format": form}, "f")
    assert grammar is not None
    return grammar


def accepts(vocabulary: llguidance.LLTokenizer, source: str, tokens: list[int]) -> bool:
    matcher = llguidance.LLMatcher(vocabulary, source, log_level=0)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize("name", TEXTS)
def test_texts_of_a_format_and_others(name: str) -> None:
    form, right, wrong = TEXTS[name]
    source = compile_checked(grammar_of(form))
    assert [one for one in right if not accepts(byte_tokenizer(), source, list(one.encode()))] == []
    assert [one for one in wrong if accepts(byte_tokenizer(), source, list(one.encode()))] == []


FORMATS = "const_string, regex, grammar, any_text, json_schema, sequence, or, tag, triggered_tags, "


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (tag(AGE, {"type": "token", "token": "a"}), "`f.format.begin` must be a text"),
        (tag(AGE, "a", {"type": "token", "token": "a"}), "`f.format.end` must be a text, or a list of texts"),
        (tag(AGE, "a", ["b", 1]), "`f.format.end.1` must be a text"),
        (tag(AGE, "a", []), "`f.format.end` must be a list that is not empty"),
        ({"type": "any_text", "max_tokens": 9}, "`f.format.max_tokens` is not supported. Given: 9"),
        (ANY_TEXT | {"max_chars": -1}, "`f.format.max_chars` must be greater than or equal to 0"),
        (sequence(AGE, ANY_TEXT | {"max_chars": 2**31}), "`f.format.elements.1.max_chars` must be less than"),
        (ANY_TEXT | {"excludes": "a"}, "`f.format.excludes` must be a list"),
        (sequence(regex("[0-9{]+"), one_of(OBJECT, text("x"))), "`f.format.elements.0` has no end"),
        ({"type": "grammar", "grammar": "root ::= a"}, "`f.format.grammar` cannot be compiled: Rule 'a' not"),
        (
            {"type": "grammar", "grammar": "root ::= " + 999 * "("},
            "`f.format.grammar` cannot be compiled: it is nested",
        ),
        ({"type": "grammar", "grammar": "root ::= ("}, "`f.format.grammar` cannot be compiled: "),
        (AGE | {"style": "qwen_xml"}, "`f.format.style` is not supported. Given: 'qwen_xml'"),
        (AGE | {"style": {"a": 1}}, "`f.format.style` is not supported. Given: {'a': 1}"),
        (AGE | {"any_order": True}, "`f.format.any_order` is not supported"),
        (tag(sequence(AGE | {"x": 1})), "`f.format.content.elements.0.x` is not supported"),
        (
            {"type": "triggered_tags", "triggers": ["<"], "tags": [tag(AGE | {"style": "glm_xml"})]},
            "`f.format.tags.0.content.style` is not supported. Given: 'glm_xml'",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_by_its_place(form: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError) as refusal:
        compile_checked(grammar_of(form))
    assert str(refusal.value).startswith(message) and refusal.value.param == message.split("`")[1]


OTHERS = (
    *("qwen_xml_parameter", "optional", "plus", "star", "repeat", "dispatch", "token", "exclude_token"),
    *("any_tokens", "token_triggered_tags", "token_dispatch", "x" * 999),
)


@pytest.mark.parametrize("kind", OTHERS)
def test_other_types_are_refused_by_name(kind: str) -> None:
    with pytest.raises(ApiError) as refusal:
        compile_checked(grammar_of(tag(sequence({"type": kind, "content": AGE}))))
    place = "f.format.content.elements.0.type"
    assert refusal.value.param == place and str(refusal.value).startswith(
        f"`{place}` must be one of {FORMATS}"
    )
    assert f"Given: '{kind[:199]}" in str(refusal.value) and len(str(refusal.value)) < 500


def test_the_defaults_that_xgrammar_writes_are_accepted() -> None:
    """Its models are sent whole."""
    full = tag(AGE | {"style": "json", "any_order": False, "max_whitespace_cnt": None}, end="</t>")
    free: dict[str, Any] = ANY_TEXT | {"excludes": [], "max_tokens": None, "max_chars": None}
    assert compile_checked(grammar_of(sequence(free, full))) == compile_checked(
        grammar_of(sequence(ANY_TEXT, tag(AGE)))
    )
