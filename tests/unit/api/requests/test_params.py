"""Parameters: what fields become, which are refused, and what is left of them."""

import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from api.errors import ApiError
from api.http.body import parse_body
from api.http.openapi import json_schema
from api.prompts.pictures import PicturePrompts
from api.protocols.kserve import KServeParameters
from api.protocols.table import PROTOCOLS
from api.protocols.tgi import GenerateParameters
from api.requests.fields import Listed, Strict, Whole, ranges_of
from api.requests.validate import (
    DRAW_ONLY,
    GenerationParams,
    Limits,
    draws,
    load_sampling_defaults,
    sampling_params,
    validate,
)
from common.broker.keys import Keys
from common.broker.pool_client import PoolClient
from common.messages.records import pack_ids
from common.messages.request import Generate, SamplingParams, StoppingParams
from common.settings.settings import SettingError, Settings
from tests.support.tokenizer import model_tokenizer


def generation_params(**params: Any) -> GenerationParams:
    """Make parameters of the prompt `text`."""
    own, stopping, sampling = (
        {field.name: params.pop(field.name) for field in dataclasses.fields(cls) if field.name in params}
        for cls in (GenerationParams, StoppingParams, SamplingParams)
    )
    assert not params
    return GenerationParams(
        stopping=StoppingParams(**stopping),
        sampling=SamplingParams(**{"temperature": 1.0} | sampling),
        **{"text": "a"} | own,
    )


# --- params -------------------------------------------------------------------------------------------------

TOKENIZER = model_tokenizer()


def sampling(**fields: Any) -> SamplingParams | None:
    return sampling_params(generation_params(**fields), TOKENIZER)


@pytest.mark.parametrize(
    "fields",
    [
        {"do_sample": True},
        {"temperature": 0.9},
        {"top_p": 0.0},
        {"typical_p": 0.9},
    ],
)
def test_each_sampling_field_alone_turns_sampling_on(fields: dict[str, Any]) -> None:
    first, second = sampling(**fields), sampling(**fields)
    assert first is not None and second is not None
    assert first.temperature == fields.get("temperature", 1.0)
    assert 0 <= first.seed < 2**63 and first.seed != second.seed
    assert sampling(**fields | {"temperature": 0.0}) is None


@pytest.mark.parametrize(
    "fields", [{}, {"top_k": 0}, {"top_k": -1}, {"seed": 3}, {"top_p_min": 0.5}, {"top_p_reset_ids": [1]}]
)
def test_neutral_parameters_leave_decoding_greedy(fields: dict[str, Any]) -> None:
    assert not draws(generation_params(**fields))
    assert sampling(**fields, raw_logprobs=True) is None


def test_greedy_decoding_drops_sampling_parameters() -> None:
    found = sampling(temperature=0.0, top_k=5, top_p=0.5, min_p=0.1, seed=5, top_p_min=0.2, bad_words=["dog"])
    assert found is not None and found.bad_words
    assert all(getattr(found, name) == getattr(SamplingParams(), name) for name in DRAW_ONLY)


def test_top_k_is_at_most_the_vocabulary_and_biases_of_zero_are_dropped() -> None:
    found = sampling(top_k=10**9, logit_bias=[(5, 0.0), (6, -1.5)], seed=7)
    assert found == SamplingParams(temperature=1.0, top_k=TOKENIZER.size, logit_bias=[(6, -1.5)], seed=7)


# --- defaults -----------------------------------------------------------------------------------------------

QWEN = {
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "do_sample": True,
    "eos_token_id": [1, 2],
    "min_p": None,
}


def write(directory: Path, content: Any) -> Path:
    (directory / "generation_config.json").write_text(json.dumps(content))
    return directory


def test_values_are_the_model_s_unless_settings_say_otherwise(tmp_path: Path) -> None:
    model, other = write(tmp_path, QWEN), tmp_path / "other"
    other.mkdir()
    of_other = {"repetition_penalty": 1.05, "max_new_tokens": 2048}
    write(other, of_other)
    mode = {"logprobs_mode": "raw_logprobs"}
    of_model = {"temperature": 0.6, "top_k": 20, "top_p": 0.95} | mode
    assert load_sampling_defaults(model, Settings()) == of_model
    assert load_sampling_defaults(model, Settings(generation_config="vllm")) == mode
    elsewhere = Settings(generation_config=str(other))
    assert load_sampling_defaults(model, elsewhere) == of_other | mode
    argv = ["--override-generation-config", '{"temperature": 0, "min_p": 0.1}']
    assert load_sampling_defaults(model, Settings.read(argv, {})) == of_model | {
        "temperature": 0,
        "min_p": 0.1,
    }
    assert load_sampling_defaults(tmp_path / "without", Settings(logprobs_mode="raw_logits")) == {
        "logprobs_mode": "raw_logits"
    }


@pytest.mark.parametrize(
    ("content", "settings", "words"),
    [
        (QWEN | {"top_p": 1.5}, {}, "GENERATION_CONFIG: top_p in .*at least 0 and at most 1. Given: 1.5"),
        (QWEN | {"top_k": "20"}, {}, "top_k in .*a whole number"),
        (QWEN, {"generation_config": "/nowhere"}, "/nowhere/generation_config.json does not exist"),
    ],
)
def test_what_cannot_be_a_default_ends_the_start(
    tmp_path: Path, content: Any, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(SettingError, match=words):
        load_sampling_defaults(write(tmp_path, content), Settings(**settings))


# --- fields -------------------------------------------------------------------------------------------------


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


# --- validate -----------------------------------------------------------------------------------------------

LIMITS = Limits(99, 100, Settings(max_stop_sequences=4, max_top_n_tokens=5, max_best_of=2))


async def validated(tokenizer: Any = None, **fields: Any) -> list[Generate]:
    client = PoolClient(Redis(), Keys("default"))  # never connects
    prompts = PicturePrompts(client, LIMITS.settings, None)
    return await validate(generation_params(**fields), LIMITS, tokenizer or model_tokenizer(), prompts)


@pytest.mark.parametrize(
    "body", [*dict.fromkeys(row.body for row in PROTOCOLS), GenerateParameters, KServeParameters]
)
def test_a_number_is_checked_by_the_range_that_the_document_shows(body: type[Strict]) -> None:
    shown = {**json_schema(body, "validation")["properties"]}
    bounded = {name for name, one in shown.items() if {"minimum", "exclusiveMinimum"} & {*one}}
    assert bounded == {name for name, _ in ranges_of(body)}
    given = {"parameters": None} | dict.fromkeys(body.model_fields)
    for name, allowed in ranges_of(body):
        assert allowed.schema.items() <= shown[name].items()
        for wrong in (allowed.least - 1, float("nan"), allowed.hole):
            if wrong is not None:
                with pytest.raises(ApiError, match=f"`{name}` must be {allowed}. Given: "):
                    body.model_construct(**given | {name: wrong}).check()


async def test_requests_of_one_prompt_differ_only_in_their_choice() -> None:
    found = await validated(do_sample=True, n=3, seed=9)
    assert [one.sampling and (one.sampling.seed, one.sampling.choice) for one in found] == [
        (9, 0),
        (9, 1),
        (9, 2),
    ]
    assert [one.sampling for one in await validated(n=2)] == [None, None]


async def test_a_prompt_of_an_encoder_decoder_model_ends_with_what_starts_the_decoder() -> None:
    tokenizer = replace(model_tokenizer(), starting_ids=(0, 7))
    [one] = await validated(tokenizer, text=None, prompt_ids=[1, 2, 3], truncate=2)
    assert one.prompt_ids == pack_ids([2, 3, 0, 7]) and one.stopping.max_new_tokens == 96
    with pytest.raises(ApiError, match=r"must have at most 99 tokens\. Given: 100"):
        await validated(tokenizer, text=None, prompt_ids=[1] * 98)
    for fields in ({"prompt_logprobs": 0}, {"context_logits": True}):
        with pytest.raises(ApiError, match="is not served with an encoder-decoder model"):
            await validated(tokenizer, **fields)
