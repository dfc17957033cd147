"""The sampling fields that bodies share become SamplingParams by their names."""

import json
from dataclasses import fields
from typing import Any

from api.inference.fields import SamplingFields
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
