"""The fields that say which functions a model may, or must, call."""

from typing import Any

import pytest

from api.errors import ApiError
from api.requests.tools import FunctionSchema, ToolChoice, ToolSchema, read_functions, read_tools

TOOLS = [ToolSchema.model_validate({"type": "function", "function": {"name": name}}) for name in "abc"]
NAMED = {"type": "function", "function": {"name": "b"}}


def names(choice: ToolChoice | None) -> list[str]:
    assert choice is not None
    return [tool.name for tool in choice.callable]


@pytest.mark.parametrize("choice", ["b", NAMED, {"type": "function", "name": "b"}])
def test_a_named_function_is_the_only_one_that_may_be_called(choice: Any) -> None:
    found = read_tools(TOOLS, choice, None)
    assert names(found) == ["b"] and found is not None
    assert found.is_forced and found.is_named and len(found.tools) == 3


def test_the_model_decides_unless_the_client_does() -> None:
    for choice in (None, "auto"):
        found = read_tools(TOOLS, choice, None)
        assert found is not None and not found.is_forced and found.parallel
        assert names(found) == ["a", "b", "c"]
    required = read_tools(TOOLS, "required", False)
    assert required is not None and required.is_forced and not required.is_named and not required.parallel
    assert (
        read_tools(TOOLS, "none", None)
        is read_tools([], "auto", None)
        is read_tools(None, None, True)
        is None
    )


@pytest.mark.parametrize("is_flat", [False, True])
def test_allowed_tools_are_those_that_may_be_called(is_flat: bool) -> None:
    allowed = {"mode": "required", "tools": [{"type": "function", "name": "c"}, NAMED]}
    choice = {"type": "allowed_tools", **(allowed if is_flat else {"allowed_tools": allowed})}
    found = read_tools(TOOLS, choice, None)
    assert names(found) == ["c", "b"] and found is not None and found.is_forced and not found.is_named


@pytest.mark.parametrize(
    ("allowed", "field"),
    [
        ({"mode": "some", "tools": [NAMED]}, "tool_choice.allowed_tools.mode"),
        ({"mode": "auto", "tools": []}, "tool_choice.allowed_tools.tools"),
        ({"mode": "auto", "tools": [{"type": "function", "name": "z"}]}, "tool_choice.allowed_tools.tools"),
        ({"mode": "auto", "tools": [3]}, "tool_choice.allowed_tools.tools[0]"),
        (3, "tool_choice.allowed_tools.mode"),
    ],
)
def test_wrong_allowed_tools_are_refused(allowed: Any, field: str) -> None:
    with pytest.raises(ApiError) as refusal:
        read_tools(TOOLS, {"type": "allowed_tools", "allowed_tools": allowed}, None)
    assert refusal.value.param == field and f"`{field}`" in refusal.value.text


def test_templates_get_parameters_by_openais_name() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "string"}}}
    function = {"name": "f", "description": "F", "strict": True, "arguments": schema}
    found = read_tools([ToolSchema.model_validate({"type": "function", "function": function})], None, None)
    shown = {"name": "f", "description": "F", "parameters": schema}
    assert found is not None and found.tools == [{"type": "function", "function": shown}]
    assert found.callable[0].parameters == schema and found.callable[0].strict


def test_functions_are_tools_of_which_one_is_called_at_a_time() -> None:
    functions = [FunctionSchema(name="a"), FunctionSchema(name="b")]
    found = read_functions(functions, {"name": "b"})
    assert names(found) == ["b"] and found is not None and found.is_named and found.is_older
    assert not found.parallel and read_functions(functions, "none") is None


@pytest.mark.parametrize("kind", ["array", "string", ["array", "null"], 3])
def test_parameters_that_are_no_object_are_refused(kind: Any) -> None:
    function = {"name": "a", "parameters": {"type": kind}}
    with pytest.raises(ApiError, match="must be the JSON schema of an object") as refusal:
        read_tools([ToolSchema.model_validate({"type": "function", "function": function})], None, None)
    assert refusal.value.param == "tools.a.parameters"
