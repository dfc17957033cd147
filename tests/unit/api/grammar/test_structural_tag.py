"""Structural tags: texts in which structured parts stand between tags; others are refused by their field."""

import json
from typing import Any

import llguidance
import pytest

from api.errors import ApiError
from api.grammar.check import byte_tokenizer
from api.grammar.compile import compile_checked, compile_grammar
from api.grammar.read import read_response_format, read_structured_outputs
from common import model_files
from tests.support.tokenizer import model_tokenizer


def text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def regex(pattern: str) -> dict[str, Any]:
    return {"type": "regex", "pattern": pattern}


def sequence(*elements: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def one_of(*elements: Any) -> dict[str, Any]:
    return {"type": "or", "elements": list(elements)}


def tag(content: Any, begin: Any = "<t>", end: Any = "</t>") -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


# --- structural tag -----------------------------------------------------------------------------------------

AGE = {"type": "json_schema", "json_schema": {"type": "integer", "maximum": 99}}
DAY = {"begin": "<call=day>", "content": {"type": "any_text"}, "end": "</call>"}
YEAR = {"begin": "<call=year>", "content": AGE, "end": "</call>"}
CALLS = {"type": "triggered_tags", "triggers": ["<call="], "tags": [DAY, YEAR]}
OTHER = {"begin": "[age ", "content": AGE, "end": "]"}
ANY_TEXT = {"type": "any_text"}
YES = {"type": "grammar", "grammar": 'root ::= answer "!"\nanswer ::= "yes" | "no"'}
NESTED = {"type": "grammar", "grammar": 'root ::= "(" root ")" | rule_0\nrule_0 ::= [a-z]'}
ACCEPTED: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"type": "const_string", "value": 'a"b'}, ['a"b'], ["", "a", 'a"bc']),
    (ANY_TEXT | {"excludes": [], "max_chars": None, "max_tokens": None}, ["", "a"], []),
    ({"type": "regex", "pattern": r"a/\d\/+"}, ["a/7/"], ["a/", "a7/"]),
    (AGE, ["12", "99"], ["100", "x"]),
    (
        {"type": "tag", "begin": "<t>\n", "content": {"type": "any_text"}, "end": "\n</t>"},
        ["<t>\na\n</t>", "<t>\n\n</t>"],
        ["<t>\na</t>", "<t>\na\\n</t>"],
    ),
    (
        {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": '\x01\t\r\n/"'},
        ['<t>a\x01\t\r\n/"'],
        ["<t>a", "<t>a\x01t\n/"],
    ),
    (
        {**CALLS, "triggers": ["<call=year>\n"], "tags": [{**YEAR, "begin": "<call=year>\n"}]},
        ["<call=year>\n1</call>", "<call=year>"],
        ["a<call=year>\n", "<call=year>\nx"],
    ),
    (tag(regex(".*")), ["<t>abc</t>", "<t></t>"], ["<t>abc", "<t>a</t>b</t>", "<t>\n</t>"]),
    (tag(regex("a|[a-z]+"), end="z"), ["<t>az", "<t>bz"], ["<t>z", "<t>a"]),
    (sequence(tag({"type": "any_text"}, end=""), text("end")), ["<t>end", "<t>a end"], ["<t>", "<t>endx"]),
    (sequence({"type": "any_text"}, text("\n"), AGE), ["a\n1", "\n1"], ["1", "a\n\n1"]),
    ({**CALLS, "tags": [{**DAY, "end": ""}]}, ["<call=day>x", "a"], ["<call=da"]),
    (
        tag({**CALLS, "tags": [{**DAY, "end": ""}], "stop_after_first": True}),
        ["<t>a<call=day>x</t>", "<t></t>"],
        ["<t><call=day>", "<t><call=day></t></t>"],
    ),
    (
        CALLS,
        [
            "",
            "text",
            "a<call=day>now</call>b<call=year>12</call>",
            "a < b",
            "<call=year>1</call><call=day></call>",
        ],
        ["<call=", "<call=month>1</call>", "a<call=year>x</call>", "<call=year>1</call><call=year>"],
    ),
    (
        {**CALLS, "at_least_one": True},
        ["<call=year>1</call>", "<call=day></call> and <call=year>1</call>."],
        ["", "text", "a<call=year>1</call>"],
    ),
    ({**CALLS, "stop_after_first": True}, ["a<call=year>1</call>", "a"], ["<call=year>1</call>b"]),
    (
        {"type": "triggered_tags", "triggers": ["[", "<call="], "tags": [YEAR, OTHER]},
        ["a[age 3]<call=year>4</call>", "a<call=year>4</call>[age 3]"],
        ["a[<call=year>4</call>", "[age x]", "<call=year>[age 3]</call>", "[age 3] <call=year>]"],
    ),
    (
        {"type": "triggered_tags", "triggers": ["<", "<call="], "tags": [YEAR, tag(AGE, "<b>", "</b>")]},
        ["a<b>1</b><call=year>2</call>c", "<call=year>2</call><b>1</b>"],
        ["a<b", "a<c", "<call=day>"],
    ),
    (
        {"type": "tag", "begin": "{", "content": CALLS, "end": "}"},
        ["{}", "{a}", "{a<call=year>4</call>b}"],
        ["{", "{}b", "{<call=}</call>}"],
    ),
    ({"type": "grammar", "grammar": r"root ::= [+\-\\]+"}, ["+-", "\\"], ["", "x"]),
    (
        one_of(sequence(YES, NESTED), NESTED),
        ["yes!((a))", "(b)", "c"],
        ["yes!", "((a)", "yes!yes!"],
    ),
    (sequence(ANY_TEXT, text(": "), YES), ["so: no!", ": yes!"], ["so no!"]),
    (tag(ANY_TEXT, end=["</a>", "</b>"]), ["<t>x</a>", "<t>a</b>"], ["<t>x</c>", "<t></a></b>"]),
    (tag(text("x"), end=["", "."]), ["<t>x", "<t>x."], ["<t>x..", "<t>"]),
]


def compile_format(form: Any) -> str:
    grammar = read_response_format({"type": "structural_tag", "format": form}, "f")
    assert grammar is not None
    return compile_checked(grammar)


def accepts(vocabulary: llguidance.LLTokenizer, source: str, tokens: list[int]) -> bool:
    matcher = llguidance.LLMatcher(vocabulary, source, log_level=0)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(("form", "right", "wrong"), ACCEPTED)
def test_texts_of_a_format_and_others(form: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    source = compile_format(form)
    assert [text for text in right if not accepts(byte_tokenizer(), source, list(text.encode()))] == []
    assert [text for text in wrong if accepts(byte_tokenizer(), source, list(text.encode()))] == []


def test_the_older_form_and_vllms_structured_outputs_mean_the_same() -> None:
    structure = {"begin": "<call=year>", "schema": AGE["json_schema"], "end": "</call>"}
    older = {"type": "structural_tag", "structures": [structure], "triggers": ["<call="]}
    newer = {"type": "structural_tag", "format": {**CALLS, "tags": [YEAR]}}
    grammars = [read_response_format(older), read_response_format(newer)]
    grammars += [read_structured_outputs({"structural_tag": value}) for value in (json.dumps(older), newer)]
    assert len({compile_checked(grammar) for grammar in grammars if grammar}) == 1 and None not in grammars
    wrong = read_response_format(older | {"triggers": ["x"]})
    with pytest.raises(
        ApiError, match=r"`response_format\.structures\.0\.begin` must begin with one of"
    ) as refusal:
        assert wrong is not None and compile_checked(wrong)
    assert refusal.value.param == "response_format.structures.0.begin"


def test_white_space_in_a_tags_json_is_as_asked_for() -> None:
    form = {"format": tag({"type": "json_schema", "json_schema": {"type": "object"}})}
    grammar = read_structured_outputs({"structural_tag": form, "whitespace_pattern": r"\t*"})
    assert grammar is not None
    source = compile_checked(grammar)
    texts = ["<t>{\t\t}</t>", "<t>{ }</t>"]
    assert [accepts(byte_tokenizer(), source, list(one.encode())) for one in texts] == [True, False]


async def test_tags_may_be_special_tokens() -> None:
    """The bundled model's `<|im_start|>` stands for such a tag: its text is no text to the engine."""
    age = {"begin": "<|im_start|>x=", "content": AGE, "end": "<|im_end|>"}
    form = {"type": "triggered_tags", "triggers": ["<|im_start|>"], "tags": [age]}
    grammar = read_response_format({"type": "structural_tag", "format": form})
    assert grammar is not None
    path = str(model_files.resolve("smollm2") / "tokenizer.json")
    vocabulary = llguidance.LLTokenizer(path, eos_token=0)
    source = await compile_grammar(grammar, model_tokenizer())
    number = [*vocabulary.tokenize_str("x=1"), *vocabulary.tokenize_str("2")]
    hello = vocabulary.tokenize_str("hello")
    assert accepts(vocabulary, source, [*hello, 1, *number, 2, *hello])
    assert accepts(vocabulary, source, hello)
    assert not accepts(vocabulary, source, [*hello, 1, *number])
    assert not accepts(vocabulary, source, [*hello, 1, *hello])


FORMATS = "const_string, regex, grammar, any_text, json_schema, sequence, or, tag, triggered_tags. "


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (
            {"type": "regex", "pattern": "a", "excludes": ["a"]},
            "`f.format.excludes` is not supported",
        ),
        ({"type": "const_string"}, "`f.format.value` is required"),
        ({**CALLS, "at_least_one": 1}, "`f.format.at_least_one` must be true or false"),
        (sequence(CALLS, CALLS), "`f.format.elements.0` has no end"),
        (
            tag({**CALLS, "tags": [{**DAY, "end": ""}]}),
            "`f.format.content.tags.0.content` has no end",
        ),
        (tag(regex("a)(b")), "`f` cannot be compiled: "),
        (tag({}), "`f.format.content` must have a `type`"),
        (
            {"type": "json_schema", "json_schema": {"not": {}}},
            "`f.format.json_schema` cannot be compiled: the keyword `not` (at `#/not`) is not",
        ),
        (tag(AGE, {"type": "token", "token": "a"}), "`f.format.begin` must be a text"),
        (tag(AGE, "a", {"type": "token", "token": "a"}), "`f.format.end` must be a text, or a list of texts"),
        ({"type": "any_text", "max_tokens": 9}, "`f.format.max_tokens` is not supported. Given: 9"),
        (ANY_TEXT | {"max_chars": -1}, "`f.format.max_chars` is not supported"),
        (ANY_TEXT | {"excludes": ["a"]}, "`f.format.excludes` is not supported"),
        ({"type": "grammar", "grammar": "root ::= a"}, "`f.format.grammar` cannot be compiled: Rule 'a' not"),
        (
            {"type": "grammar", "grammar": "root ::= " + 999 * "("},
            "`f.format.grammar` cannot be compiled: it is nested",
        ),
        (AGE | {"style": "qwen_xml"}, "`f.format.style` is not supported. Given: 'qwen_xml'"),
        (AGE | {"any_order": True}, "`f.format.any_order` is not supported"),
    ],
)
def test_what_is_not_served_is_refused_by_its_place(form: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError) as refusal:
        compile_format(form)
    assert str(refusal.value).startswith(message) and refusal.value.param == message.split("`")[1]


@pytest.mark.parametrize("kind", ["tags_with_separator", "qwen_xml_parameter", "token_dispatch", "x" * 999])
def test_other_types_are_refused_by_name(kind: str) -> None:
    with pytest.raises(ApiError) as refusal:
        compile_format(tag(sequence({"type": kind, "content": AGE})))
    place = "f.format.content.elements.0.type"
    assert refusal.value.param == place and str(refusal.value).startswith(
        f"`{place}` must be one of {FORMATS}"
    )
    assert f"Given: '{kind[:199]}" in str(refusal.value) and len(str(refusal.value)) < 500
