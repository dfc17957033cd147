"""Which logits the requests of a prompt return, and what is refused."""

from dataclasses import replace

import pytest

from api.errors import ApiError
from api.requests.logits import accepts_bytes, with_logits
from api.requests.params import Limits
from common.messages.records import pack_ids
from common.messages.request import BeamParams, Generate, LogitsParams, StoppingParams
from common.settings.settings import Settings
from tests.support.generation_params import generation_params

LIMITS = Limits(10, 20, Settings(max_logits_bytes=200), vocab_size=10, dtype="bfloat16")
REQUEST = Generate("", "", pack_ids([1, 2, 3]), StoppingParams(2))
BOTH = {"context_logits": True, "generation_logits": True}


def test_the_first_choice_has_those_of_the_prompt() -> None:
    """In the dtype of the workers, if it is asked for."""
    params = generation_params(**BOTH, logits_dtype="model")
    found = with_logits([REQUEST] * 3, params, LIMITS)
    others = LogitsParams(False, True, "bfloat16", 10)
    assert [one.logits for one in found] == [replace(others, context=True), others, others]
    assert [one.logits_bytes for one in found] == [80, 40, 40]
    only = with_logits([REQUEST] * 2, generation_params(context_logits=True), LIMITS)
    assert [one.logits for one in only] == [LogitsParams(True, False, "float32", 10), None]
    assert [one.logits_bytes for one in only] == [120, 0]
    assert with_logits([REQUEST], generation_params(), LIMITS) == [REQUEST]


@pytest.mark.parametrize(
    ("request_", "limits", "status", "words"),
    [
        (replace(REQUEST, beams=BeamParams(2)), LIMITS, 422, "`return_context_logits` and a beam search"),
        (REQUEST, replace(LIMITS, vocab_size=0), 503, "no worker that is ready returns logits"),
        (REQUEST, replace(LIMITS, vocab_size=13), 422, "at most 200 bytes (MAX_LOGITS_BYTES). Given: 208 "),
    ],
)
def test_what_cannot_be_returned_is_refused(
    request_: Generate, limits: Limits, status: int, words: str
) -> None:
    with pytest.raises(ApiError) as error:
        with_logits([request_], generation_params(**BOTH), limits)
    assert error.value.status == status and words in error.value.text


def test_a_client_may_accept_bytes_among_others() -> None:
    accepted = ["application/octet-stream", "text/html, Application/Octet-Stream;q=0.8"]
    assert all(map(accepts_bytes, accepted))
    assert not any(map(accepts_bytes, ["", "*/*", "application/json", "application/octet-streams"]))
