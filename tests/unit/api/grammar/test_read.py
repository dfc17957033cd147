"""The shapes in which clients ask for structured output give the same grammars."""

from typing import Any

import pytest

from api.errors import ApiError
from api.grammar.compile import ANY_OBJECT, Grammar
from api.grammar.read import read_response_format, read_structured_outputs
from api.protocols.openai_bodies import ChatRequest

SCHEMA = {"type": "object"}
TEXT = '{"type": "object"}'


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (
            {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}},
            "json",
            TEXT,
        ),
        ({"type": "json_schema", "value": {"name": "x", "schema": SCHEMA}}, "json", TEXT),
        ({"type": "json", "value": TEXT}, "json", TEXT),
        ({"type": "json_object"}, "json", ANY_OBJECT),
        ({"type": "regex", "value": "a+"}, "regex", "a+"),
    ],
)
def test_response_formats_of_openai_and_tgi(value: dict[str, Any], kind: str, text: str) -> None:
    grammar = read_response_format(value)
    assert grammar is not None and (grammar.kind, grammar.text) == (kind, text)


@pytest.mark.parametrize(
    ("value", "closed"),
    [
        ({"type": "json_schema", "json_schema": {"strict": True, "schema": SCHEMA}}, True),
        ({"type": "json_schema", "json_schema": {"strict": False, "schema": SCHEMA}}, False),
        ({"type": "json_schema", "json_schema": {"schema": SCHEMA}}, False),
        ({"type": "json_schema", "value": {"schema": SCHEMA}}, True),
        ({"type": "json", "value": SCHEMA}, True),
    ],
)
def test_openais_strict_mode_and_tgis_shapes_close_objects(value: dict[str, Any], closed: bool) -> None:
    grammar = read_response_format(value)
    assert grammar is not None and grammar.closed == closed


@pytest.mark.parametrize(
    ("value", "text", "param"),
    [
        ({"type": "xml"}, "Given: 'xml'", "response_format.type"),
        (
            {"type": "json_schema"},
            "`response_format.value.schema` is required",
            "response_format.value.schema",
        ),
        (
            {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}},
            "`response_format.json_schema.strict` must be true or false",
            "response_format.json_schema.strict",
        ),
        ({"type": "regex"}, "`response_format.value` must be a text", "response_format.value"),
    ],
)
def test_a_response_format_of_another_shape_is_refused_by_its_field(
    value: dict[str, Any], text: str, param: str
) -> None:
    with pytest.raises(ApiError) as refusal:
        read_response_format(value)
    assert text in str(refusal.value) and refusal.value.param == param


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ({"json": TEXT, "whitespace_pattern": " ?", "regex": None}, "json"),
        ({"json_object": True, "disable_any_whitespace": True}, "json"),
        ({"choice": ["a", "b"]}, "choice"),
    ],
)
def test_vllms_structured_outputs_become_grammars(value: dict[str, Any], kind: str) -> None:
    grammar = read_structured_outputs(value)
    assert grammar is not None and grammar.kind == kind


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (
            {},
            "`structured_outputs` must have one of json, regex, choice, grammar, json_object, "
            "structural_tag. Given: 0",
        ),
        ({"json": {}, "regex": "a"}, "Given: 2"),
        ({"structural_tag": "x"}, "`structured_outputs.structural_tag` is not JSON that can be read: "),
        ({"regex": ""}, "`structured_outputs.regex` must be a text that is not empty"),
        (
            {"regex": "a", "whitespace_pattern": " "},
            "`structured_outputs.whitespace_pattern` can only be used for JSON",
        ),
    ],
)
def test_wrong_structured_outputs_are_refused_by_their_field(value: dict[str, Any], text: str) -> None:
    with (
        pytest.raises(ApiError, match="^" + text.replace("[", r"\["))
        if text[0] == "`"
        else pytest.raises(ApiError, match=text)
    ):
        read_structured_outputs(value)


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}], **fields})


def test_fields_of_older_versions_of_vllm() -> None:
    assert chat(guided_json=SCHEMA, guided_whitespace_pattern=" ").grammar() == Grammar(
        "json", TEXT, "guided_json", " "
    )
    assert chat(guided_choice=["a"], guided_decoding_backend="xgrammar").grammar() == Grammar(
        "choice", '["a"]', "guided_choice"
    )
    assert chat(response_format={"type": "text"}).grammar() is None


def test_a_pattern_for_white_space_is_that_of_every_shape_with_json_and_refused_elsewhere() -> None:
    shape = {"response_format": {"type": "json_object"}}
    assert chat(guided_whitespace_pattern=" ", **shape).grammar() == Grammar(
        "json", ANY_OBJECT, "response_format", " "
    )
    for fields in ({"guided_regex": "a"}, {"guided_choice": ["a"]}, {"guided_grammar": "start: A"}, {}):
        with pytest.raises(ApiError, match="`guided_whitespace_pattern` can only be used for JSON"):
            chat(guided_whitespace_pattern=" ", **fields).grammar()
