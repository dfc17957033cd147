"""instructor: its modes, partial objects, and lists of objects."""

from typing import Any

import openai
import pytest

from tests.support.clients.questions import ABOUT_BOB, MODEL, Person, user

instructor: Any = pytest.importorskip("instructor")
pytestmark = pytest.mark.slow
BODY: dict[str, Any] = {"model": MODEL, "messages": user(ABOUT_BOB), "max_tokens": 100, "temperature": 0}


def client(url: str, mode: str) -> Any:
    own = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    return instructor.from_openai(own, mode=instructor.Mode[mode]).chat.completions


def test_a_schema_gives_an_object_whole_and_in_parts(url: str) -> None:
    """Its schemas leave objects open, and have no `strict`."""
    completions = client(url, "JSON_SCHEMA")
    whole = completions.create(response_model=Person, max_retries=0, **BODY)
    *_, last = completions.create_partial(response_model=Person, **BODY)
    assert isinstance(whole, Person) and last.model_dump() == whole.model_dump()
    _, raw = completions.create_with_completion(response_model=Person, **BODY)
    assert raw.usage.completion_tokens < 100


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT"])
def test_a_tool_gives_an_object(url: str, mode: str) -> None:
    """Its default: a function with the fields of the class, which the model must call."""
    completions = client(url, mode)
    assert isinstance(completions.create(response_model=Person, max_retries=0, **BODY), Person)
    *_, last = completions.create_partial(response_model=Person, **BODY)
    assert last.name is not None


def test_responses_with_tools_give_an_object(url: str) -> None:
    own = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    tools = instructor.from_openai(own, mode=instructor.Mode.RESPONSES_TOOLS)
    found = tools.responses.create(
        model=MODEL, input=ABOUT_BOB, response_model=Person, max_output_tokens=100, max_retries=0
    )
    assert isinstance(found, Person)
