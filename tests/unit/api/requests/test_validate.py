"""What validation makes of parameters, and what it refuses; how the routes refuse is in
tests/integration/api/test_tgi_requests.py.
"""

from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis

from api.errors import ApiError
from api.pictures.prompts import PicturePrompts
from api.requests.params import Limits
from api.requests.validate import validate
from common.broker.keys import Keys
from common.broker.pool_client import PoolClient
from common.messages.records import pack_ids
from common.messages.request import Generate, StoppingParams
from common.settings.ranges import RANGES
from common.settings.settings import Settings
from tests.support.generation_params import generation_params
from tests.support.tokenizer import model_tokenizer

SIZE = model_tokenizer().size
LIMITS = Limits(99, 100, Settings(max_stop_sequences=4, max_top_n_tokens=5, max_best_of=2))


async def validated(tokenizer: Any = None, **fields: Any) -> list[Generate]:
    client = PoolClient(Redis(), Keys("default"))  # never connects
    prompts = PicturePrompts(client, LIMITS.settings, None)
    return await validate(generation_params(**fields), LIMITS, tokenizer or model_tokenizer(), prompts)


async def test_stopping_parameters_are_kept_and_max_new_tokens_has_a_default() -> None:
    stopping = {"min_new_tokens": 2, "stop": ["x"], "stop_ids": [3, 4], "ignore_eos": True}
    [default], [limited] = await validated(**stopping), await validated(**stopping, max_new_tokens=9)
    assert default.stopping == StoppingParams(99, **stopping)  # type: ignore[arg-type]
    assert limited.stopping == StoppingParams(9, **stopping)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", RANGES)
async def test_every_range_is_checked_wherever_its_parameter_stands(name: str) -> None:
    allowed = RANGES[name]
    for wrong in (allowed.least - 1, float("nan")):
        with pytest.raises(ApiError, match=f"`{name}` must be {allowed}"):
            await validated(**{name: wrong})


async def test_requests_of_one_prompt_differ_only_in_their_choice() -> None:
    found = await validated(do_sample=True, n=3, seed=9)
    assert [one.sampling and (one.sampling.seed, one.sampling.choice) for one in found] == [
        (9, 0),
        (9, 1),
        (9, 2),
    ]
    assert [one.sampling for one in await validated(n=2)] == [None, None]
    with pytest.raises(ApiError, match="`n` must be at least 1 and at most 128"):
        await validated(n=0)


async def test_errors_of_prompts_of_ids_name_the_client_s_own_fields() -> None:
    [one] = await validated(text=None, prompt_ids=[1, 2, 3], truncate=2)
    assert one.prompt_ids == pack_ids([2, 3])
    for fields, words, param in [
        ({"prompt_ids": [SIZE]}, f"`prompt` must have token ids of at least 0 and below {SIZE}", "prompt"),
        ({"prompt_ids": []}, "`prompt` has no tokens", "prompt"),
        ({"prompt_ids": [1] * 100}, "`prompt` must have at most 99 tokens. Given: 100", "prompt"),
        (
            {"prompt_ids": [1], "max_new_tokens": 100},
            "`prompt` tokens + `max_tokens` must be at most 100",
            "max_tokens",
        ),
        (
            {"prompt_ids": [1], "max_new_tokens": -1},
            "`max_tokens` must be at least 1. Given: -1",
            "max_tokens",
        ),
    ]:
        with pytest.raises(ApiError) as refused:
            await validated(  # type: ignore[arg-type]
                text=None, names={"prompt_ids": "prompt", "max_new_tokens": "max_tokens"}, **fields
            )
        assert words in str(refused.value) and refused.value.param == param


async def test_a_prompt_of_an_encoder_decoder_model_ends_with_what_starts_the_decoder() -> None:
    tokenizer = replace(model_tokenizer(), starting_ids=(0, 7))
    [one] = await validated(tokenizer, text=None, prompt_ids=[1, 2, 3], truncate=2)
    assert one.prompt_ids == pack_ids([2, 3, 0, 7]) and one.stopping.max_new_tokens == 96
    with pytest.raises(ApiError, match=r"must have at most 99 tokens\. Given: 100"):
        await validated(tokenizer, text=None, prompt_ids=[1] * 98)
    for fields in ({"prompt_logprobs": 0}, {"context_logits": True}):
        with pytest.raises(ApiError, match="is not served with an encoder-decoder model"):
            await validated(tokenizer, **fields)
