"""Formats of structural tags that repeat, that are grammars or tagged values, and that consist of tokens."""

from typing import Any

import llguidance
import pytest

from api.errors import ApiError
from api.structured_output.grammar import Grammar, compile_cached, compile_grammar
from api.structured_output.shapes import from_response_format
from api.structured_output.vocabulary import byte_vocabulary
from common import model_files
from tests.support.tokenizer import model_tokenizer
from tests.support.tool_calls.tag_formats import one_of, regex, sequence, tag, text

AGE = {"type": "json_schema", "json_schema": {"type": "integer", "maximum": 99}}
OBJECT = {"type": "json_schema", "json_schema": {"type": "object", "additionalProperties": False}}
ANY_TEXT = {"type": "any_text"}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "sex": {"enum": ["m", "f"]}},
    "required": ["name", "age"],
}
YES = {"type": "grammar", "grammar": 'root ::= answer "!"\nanswer ::= "yes" | "no"'}
NESTED = {"type": "grammar", "grammar": 'root ::= "(" root ")" | rule_0\nrule_0 ::= [a-z]'}


def loop(kind: str, content: Any, **fields: int) -> dict[str, Any]:
    return {"type": kind, "content": content, **fields}


def token(value: int | str) -> dict[str, Any]:
    return {"type": "token", "token": value}


def any_tokens(*excluded: int | str, **fields: int) -> dict[str, Any]:
    return {"type": "any_tokens", "exclude_tokens": list(excluded), **fields}


DISPATCH = {"type": "dispatch", "rules": [["<age>", AGE], ["<yes>", YES]]}
CALLS = {
    "type": "token_triggered_tags",
    "trigger_tokens": ["{", "["],
    "tags": [tag(text("x"), token("{"), token("}")), tag(AGE, token("["), "]")],
    "exclude_tokens": ["?"],
}
TEXTS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "optional": (sequence(loop("optional", text("so ")), AGE), ["so 1", "1"], ["so so 1", "so "]),
    "star": (loop("star", text("ab")), ["", "ab", "abab"], ["a", "aba"]),
    "plus": (tag(loop("plus", AGE | {"json_schema": {"const": 1}})), ["<t>1</t>", "<t>11</t>"], ["<t></t>"]),
    "repeat": (loop("repeat", text("x"), min=2, max=3), ["xx", "xxx"], ["x", "xxxx"]),
    "repeat without an end": (loop("repeat", text("x"), min=2, max=-1), ["xx", "xxxxx"], ["x"]),
    "never": (sequence(text("a"), loop("repeat", text("x"), min=0, max=0)), ["a"], ["ax", ""]),
    "a loop of a regex": (tag(loop("star", regex("[0-9]x"))), ["<t></t>", "<t>1x2x</t>"], ["<t>1</t>"]),
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
    "free text before what may miss": (
        sequence(ANY_TEXT, loop("optional", tag(AGE)), text(".")),
        ["a.", "a <t>1</t>.", "."],
        ["a", "a <t>1</t>", "a.."],
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
    "qwen_xml_parameter": (
        tag({"type": "qwen_xml_parameter", "json_schema": PERSON}, "<function=f>\n", "</function>"),
        [
            "<function=f>\n<parameter=name>\n<3\n</parameter>\n<parameter=age>\n3\n</parameter>\n</function>",
            "<function=f>\n<parameter=name>B</parameter><parameter=age>3</parameter><parameter=sex>m</parameter>"
            "</function>",
        ],
        [
            "<function=f>\n<parameter=name>B</parameter></function>",
            "<function=f>\n<parameter=name>B</parameter><parameter=age>x</parameter></function>",
            "<function=f>\n<parameter=name>B</parameter><parameter=age>1</parameter><parameter=sex>x</parameter>"
            "</function>",
        ],
    ),
    "glm_xml": (
        {"type": "json_schema", "style": "glm_xml", "json_schema": PERSON},
        [
            "<arg_key>name</arg_key>\n<arg_value>B</arg_value>\n<arg_key>age</arg_key><arg_value>3</arg_value>\n",
        ],
        ["<arg_key>name</arg_key><arg_value>B</arg_value>"],
    ),
    "minimax_xml of any object": (
        {"type": "json_schema", "style": "minimax_xml", "json_schema": True},
        ["", '<parameter name="a_1">x y</parameter>\n<parameter name="b">1</parameter>'],
        ['<parameter name="1">x</parameter>', '<parameter name="a">x'],
    ),
    "deepseek_xml": (
        {"type": "json_schema", "style": "deepseek_xml", "json_schema": PERSON},
        [
            '<｜DSML｜parameter name="name" string="true">B</｜DSML｜parameter>'
            '<｜DSML｜parameter name="age" string="false">1</｜DSML｜parameter>',
        ],
        ['<｜DSML｜parameter name="name">B</｜DSML｜parameter>'],
    ),
    "dispatch": (
        DISPATCH,
        ["", "a<age>1<yes>no!b", "<ag"],
        ["<age>x", "<age>", "<yes>yes"],
    ),
    "dispatch once": (
        DISPATCH | {"loop": False},
        ["a", "a<age>1", "<yes>no!"],
        ["<age>1 ", "<yes>no!<age>1"],
    ),
    "dispatch with excludes": (DISPATCH | {"excludes": ["x"]}, ["a<age>1b"], ["ax", "<age>1x"]),
    "dispatch in a tag": (tag(DISPATCH), ["<t>a<age>1</t>", "<t></t>"], ["<t><age></t>"]),
    "triggered tags with excludes": (
        {"type": "triggered_tags", "triggers": ["<t>"], "tags": [tag(AGE)], "excludes": ["x"]},
        ["a<t>1</t>b"],
        ["x", "a<t>1</t>x"],
    ),
    "token": (sequence(token("a"), token(98)), ["ab"], ["a", "b", "abb"]),
    "exclude_token": (
        {"type": "exclude_token", "exclude_tokens": ["a", 98]},
        ["c", "\n"],
        ["a", "b", "", "cc"],
    ),
    "any_tokens": (sequence(text("<"), any_tokens("x")), ["<", "<ab\x00"], ["<axb", "a"]),
    "any_tokens up to a token": (tag(any_tokens("x"), "<", token(">")), ["<>", "<a<b>"], ["<x>", "<>>", "<"]),
    "a few tokens": (tag(any_tokens(max_tokens=2), "<", token(">")), ["<>", "<ab>"], ["<abc>"]),
    "no tokens": (sequence(any_tokens(max_tokens=0), token("x")), ["x"], ["ax"]),
    "a loop of tokens": (
        tag(loop("plus", {"type": "exclude_token", "exclude_tokens": ["x"]}), token("<"), token(">")),
        ["<a>", "<a<b>"],
        ["<>", "<x>", "<a>>"],
    ),
    "text of a few tokens": (
        tag({"type": "any_text", "max_tokens": 2}, "<", token(">")),
        ["<ab>"],
        ["<abc>"],
    ),
    "free text up to a token": (tag(ANY_TEXT, "<", token(">")), ["<ab c>", "<>"], ["<a", "<>>"]),
    "tags behind tokens": (
        CALLS,
        ["", "abc", "a{x}b[7]c", "[7]"],
        ["a?", "{y}", "a{x", "[x]", "{"],
    ),
    "one tag behind a token": (CALLS | {"stop_after_first": True}, ["ab", "ab{x}"], ["{x}a", "{x}{x}"]),
    "tags behind tokens at least once": (CALLS | {"at_least_one": True}, ["{x}", "[1]a{x}"], ["", "a{x}"]),
    "exactly one tag behind a token": (
        CALLS | {"at_least_one": True, "stop_after_first": True},
        ["{x}", "[1]"],
        ["", "a{x}", "{x}a"],
    ),
    "tokens in a tag": (tag(CALLS, "<", token(">")), ["<>", "<a{x}b>"], ["<a{x}", "<a>b"]),
    "token_dispatch": (
        {"type": "token_dispatch", "rules": [["#", AGE], [64, text("x")]], "exclude_tokens": ["?"]},
        ["a#1b@x", ""],
        ["#x", "@", "a?"],
    ),
}


def grammar_of(form: Any) -> Grammar:
    grammar = from_response_format({"type": "structural_tag", "format": form}, "f")
    assert grammar is not None
    return grammar


def accepts(vocabulary: llguidance.LLTokenizer, source: str, tokens: list[int]) -> bool:
    matcher = llguidance.LLMatcher(vocabulary, source, log_level=0)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize("name", TEXTS)
def test_texts_of_a_format_and_others(name: str) -> None:
    form, right, wrong = TEXTS[name]
    source = compile_cached(grammar_of(form))
    assert [one for one in right if not accepts(byte_vocabulary(), source, list(one.encode()))] == []
    assert [one for one in wrong if accepts(byte_vocabulary(), source, list(one.encode()))] == []


async def test_tokens_of_the_model_are_named_by_their_texts_and_ids() -> None:
    """A text of two tokens names none; a set of tokens has none that ends an answer."""
    vocabulary = llguidance.LLTokenizer(str(model_files.resolve("smollm2") / "tokenizer.json"), eos_token=2)
    hello = model_tokenizer().encode("Hello", add_special_tokens=False)
    form = sequence(token("<|im_start|>"), token("Hello"), tag(any_tokens(), "", token(1)))
    source = await compile_grammar(grammar_of(form), model_tokenizer())
    assert accepts(vocabulary, source, [1, *hello, *hello, 0, 1])
    assert not accepts(vocabulary, source, [1, *hello, 2, 1]) and not accepts(vocabulary, source, [1, 1])
    with pytest.raises(ApiError, match="the text of one token"):
        await compile_grammar(grammar_of(token("Hello you")), model_tokenizer())


HAS_NO_END = "has no end: it must be the last, or a special token or one that is named must stand behind it"


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (token(256), "`f.format.token` must be at least 0 and below 256. Given: 256"),
        (token(True), "`f.format.token` must be the id or the text of a token"),
        ({"type": "token"}, "`f.format.token` must be the id or the text of a token"),
        (tag(AGE, regex("a")), "`f.format.begin.type` must be token. Given: 'regex'"),
        (tag(AGE, "a", token("ab")), "`f.format.end.token` must be the text of one token"),
        (tag(AGE, "a", ["b", 1]), "`f.format.end.1` must be a text"),
        ({"type": "exclude_token", "exclude_tokens": list(range(256))}, "`f.format` excludes all tokens"),
        (sequence(any_tokens(), text("x")), f"`f.format.elements.0` {HAS_NO_END}"),
        (tag(any_tokens()), f"`f.format.content` {HAS_NO_END}"),
        (tag(CALLS), f"`f.format.content` {HAS_NO_END}"),
        (tag({"type": "any_text", "max_tokens": 9}), f"`f.format.content` {HAS_NO_END}"),
        (
            {"type": "any_text", "max_tokens": 9, "max_chars": 9},
            "`f.format.max_chars` is not supported beside",
        ),
        ({"type": "any_text", "max_chars": -1}, "`f.format.max_chars` must be an integer of at least 0"),
        (CALLS | {"trigger_tokens": ["{"]}, "`f.format.tags.1.begin` must be one of `trigger_tokens`"),
        (CALLS | {"tags": [tag(AGE)]}, "`f.format.tags.0.begin` must be an object"),
        (DISPATCH | {"rules": [["a"]]}, "`f.format.rules.0` must be a pair of a trigger and a format"),
        (DISPATCH | {"rules": [[1, AGE]]}, "`f.format.rules.0.0` must be a text"),
        (loop("repeat", text("x"), min=3, max=2), "`f.format.max` must be at least `min`"),
        (loop("repeat", text("x"), min=3), "`f.format.max` is required"),
        (loop("star", ANY_TEXT | {"excludes": "a"}), "`f.format.content.excludes` must be a list"),
        (sequence(ANY_TEXT, any_tokens()), "`f.format.elements.0` has no end"),
        (sequence(regex("[0-9{]+"), one_of(OBJECT, text("x"))), "`f.format.elements.0` has no end"),
        ({"type": "grammar", "grammar": "root ::= a"}, "`f.format.grammar` cannot be compiled: Rule 'a' not"),
        (
            {"type": "grammar", "grammar": "root ::= " + 999 * "("},
            "`f.format.grammar` cannot be compiled: it is nested",
        ),
        ({"type": "grammar", "grammar": "root ::= ("}, "`f.format.grammar` cannot be compiled: "),
        (
            AGE | {"style": "kimi_k3_xml"},
            "`f.format.style` must be one of json, qwen_xml, minimax_xml, deepseek_xml, ",
        ),
        (AGE | {"style": {"a": 1}}, "`f.format.style` must be one of json, qwen_xml, "),
        (AGE | {"any_order": True}, "`f.format.any_order` is not supported"),
        (
            {
                "type": "qwen_xml_parameter",
                "json_schema": {"properties": {"a": {"type": "string", "pattern": "b"}}},
            },
            "`f.format.json_schema` cannot be compiled: the keyword `pattern` is not supported in",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_by_its_place(form: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError) as refusal:
        compile_cached(grammar_of(form))
    assert str(refusal.value).startswith(message)
