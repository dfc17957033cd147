"""The sampling fields that bodies share become SamplingParams by their names."""

import json
from dataclasses import fields
from typing import Any, get_args

import pytest

from api.errors import ApiError
from api.http.body import parse_body
from api.jobs.job import JobBody
from api.protocols.openai_bodies import ChatRequest, CompletionRequest
from api.protocols.responses import ResponsesRequest
from api.protocols.tgi import GenerateParameters
from api.protocols.tokenize import DetokenizeRequest
from api.requests.fields import Listed, SamplingFields, Strict, Whole
from common.messages.request import SamplingParams, StoppingParams

GIVEN: dict[str, Any] = {
    "temperature": 1,
    "top_k": 7,
    "top_p": 0.9,
    "top_p_decay": 0.75,
    "top_p_min": 0.25,
    "top_p_reset_ids": [6, 9],
    "min_p": 0.1,
    "typical_p": 0.8,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.25,
    "allowed_token_ids": [4, 5],
}


def read(body: dict[str, Any]) -> SamplingFields:
    return SamplingFields.model_validate_json(json.dumps(body))


def test_fields_that_are_given_become_parameters_and_the_others_keep_their_defaults() -> None:
    assert read(GIVEN).sampling_params(frequency_penalty=0.5) == SamplingParams(
        **GIVEN, frequency_penalty=0.5
    )
    assert read(dict.fromkeys(GIVEN)).sampling_params() == SamplingParams(temperature=1.0)
    assert read({"temperature": 0}).sampling_params() == SamplingParams()


def test_no_other_parameter_can_be_set_by_a_body() -> None:
    names = {field.name for field in fields(SamplingParams)} - GIVEN.keys()
    body = read({name: [1] if name == "bad_words" else 1 for name in names - {"seed", "bad_words"}})
    assert body.model_extra and body.sampling_params() == SamplingParams(temperature=1.0)
    assert read({"seed": 1, "bad_words": ["a"]}).sampling_params() == SamplingParams(temperature=1.0)


def test_fields_that_are_given_become_stopping_params() -> None:
    body = read({"stop_token_ids": [3], "ignore_eos": True})
    assert body.stopping_params(2, ["x"]) == StoppingParams(0, 2, ["x"], [3], ignore_eos=True)
    assert read({}).stopping_params(None, None) == StoppingParams()


class Numbers(Strict):
    one: Whole | None = None
    many: Listed[Whole] | None = None


def test_a_number_without_a_fraction_is_whole() -> None:
    given = Numbers.model_validate_json('{"one": 2.0, "many": [1, 2.0, -0.0, 3e2]}')
    assert given == Numbers(one=2, many=[1, 2, 0, 300])
    assert [type(number) for number in given.many or []] == [int] * 4
    assert "integer" in json.dumps(Numbers.model_json_schema()) and "number" not in json.dumps(
        Numbers.model_json_schema()
    )


@pytest.mark.parametrize("wrong", ["2.5", '"2"', "true", "1e400", "[2]"])
def test_nothing_else_is(wrong: str) -> None:
    with pytest.raises(ApiError) as refused:
        parse_body(Numbers, b'{"one": %b}' % wrong.encode())
    assert refused.value.text == "`one`: Input should be a valid integer"
    with pytest.raises(ApiError, match=r"many\[1\]`: Input should be a valid integer$"):
        parse_body(Numbers, b'{"many": [1, %b, %b]}' % (wrong.encode(), wrong.encode()))


BODIES = (
    ChatRequest,
    CompletionRequest,
    ResponsesRequest,
    GenerateParameters,
    DetokenizeRequest,
    JobBody,
)


@pytest.mark.parametrize("body", BODIES)
def test_every_whole_number_of_a_body_may_be_written_with_a_point(body: type[Strict]) -> None:
    for name, field in body.model_fields.items():
        if int in get_args(field.annotation):
            pytest.fail(f"{name} takes no 2.0")
        if "Whole" in str(field.annotation):
            value = [2.0] if "list" in str(field.annotation) else 2.0
            body.__pydantic_validator__.validate_assignment(body.model_construct(), name, value)
