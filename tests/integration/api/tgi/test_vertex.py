"""POST /vertex: a prediction for each instance, a prompt or a chat."""

from typing import Any

from common.messages.records import unpack_ids
from common.messages.request import Generate
from deploy.launcher.embedded_broker import Broker
from tests.support.answers.openai_frames import CHAT
from tests.support.fleet.gateways import answering, nothing_left
from tests.support.fleet.scripted_worker import Answer
from tests.support.tokenizer import TOKENIZER, ids

PATH = "/vertex"


def repeat(request: Generate) -> Answer:
    """The end of the prompt."""
    words = str(TOKENIZER.decode(unpack_ids(request.prompt_ids))).split()
    return Answer(ids(f"about {words[-1]}"))


async def test_each_instance_has_its_prediction(broker: Broker) -> None:
    instances: list[dict[str, Any]] = [
        {"inputs": "one two"},
        CHAT | {"max_tokens": 3},
        {"inputs": "three", "parameters": {"max_new_tokens": 1, "seed": 7}},
        {"inputs": "four", "parameters": {"do_sample": False}},
    ]
    async with answering(broker.url, repeat) as (worker, gateway, client):
        answer = await client.post(PATH, json={"instances": instances})
        await nothing_left(gateway, worker)
    assert answer.status_code == 200, answer.text
    assert answer.json() == {"predictions": ["about two", "about assistant", "about", "about four"]}
    assert answer.headers["x-generated-tokens"] == str(3 + 3 + 1 + 3)
    drawn = {one.request_id[-1]: one.sampling for one in worker.seen}
    assert [drawn[i] is not None for i in "0123"] == [True, True, True, False]
    assert drawn["2"] is not None and (drawn["2"].seed, drawn["2"].temperature) == (7, 1.0)


async def test_an_error_names_its_instance(broker: Broker) -> None:
    good = {"inputs": "a"}
    wrong: list[tuple[Any, str]] = [
        ([], "1 to 2 items. Given: 0"),
        ([good] * 3, "Given: 3"),
        ([good, {"inputs": ""}], "`inputs` cannot be empty"),
        ([good, {"parameters": {}}], "instances[1].prompt.inputs"),
        ([good, {"inputs": "a", "parameters": {"best_of": 2}}], "`instances[1]`: `best_of` must be 1"),
        ([good | {"resume_s": 5}], "`instances[0]`: `resume_s` needs a stream"),
        ([CHAT | {"stream": True}], "`instances[0]`: `stream` must be false"),
        ([CHAT | {"model": "gpt-5"}], "`instances[0]`: The model `gpt-5` does not exist"),
    ]
    async with answering(broker.url, Answer([11]), max_client_batch_size=2) as (worker, _, client):
        for instances, words in wrong:
            answer = await client.post(PATH, json={"instances": instances})
            assert answer.status_code in (404, 422) and words in answer.json()["error"], answer.text
    assert not worker.seen


async def test_a_wrong_key_is_refused_and_a_failed_request_fails_the_answer(broker: Broker) -> None:
    body = {"instances": [{"inputs": "a"}, {"inputs": "b"}]}
    async with answering(broker.url, Answer([11], error="gone"), api_key="sesame") as (_, _, client):
        assert (await client.post(PATH, json=body)).status_code == 401
        client.headers["authorization"] = "Bearer sesame"
        failed = await client.post(PATH, json=body)
    assert (failed.status_code, failed.json()["error_type"]) == (424, "generation")
