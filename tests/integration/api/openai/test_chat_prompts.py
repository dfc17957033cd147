"""Prompts of /v1/chat/completions: what the chat template makes of messages."""

import json
from typing import Any

import pytest

from common.messages.records import unpack_ids
from deploy.launcher.embedded_broker import Broker
from tests.support.answers.openai_frames import CHAT, CHAT_PATH, GENERATION_PROMPT, frames, streamed
from tests.support.fleet.gateways import answering
from tests.support.fleet.scripted_worker import Answer
from tests.support.tokenizer import TOKENIZER, ids, model_tokenizer

SYSTEM = {"role": "system", "content": "S"}


USER = {"role": "user", "content": "U"}


ASSISTANT = {"role": "assistant", "content": "A "}


PARTS = {"role": "user", "content": [{"type": "text", "text": text} for text in ("", "U", "")]}


BEGIN = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n"


CONTINUED = BEGIN + GENERATION_PROMPT + "A "
CLOSED = BEGIN + GENERATION_PROMPT + "A <|im_end|>\n" + GENERATION_PROMPT


PROMPTS: list[tuple[dict[str, Any], str]] = [
    ({"messages": [SYSTEM, USER]}, BEGIN + GENERATION_PROMPT),
    ({"messages": [SYSTEM, USER], "add_generation_prompt": False}, BEGIN),
    ({"messages": [SYSTEM, USER, ASSISTANT]}, CLOSED),
    ({"messages": [SYSTEM, USER, ASSISTANT], "continue_final_message": True}, CONTINUED),
    ({"messages": [SYSTEM, USER, ASSISTANT], "add_generation_prompt": False}, CONTINUED),
    (
        {
            "messages": [SYSTEM, USER, ASSISTANT],
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
        CONTINUED,
    ),
    (
        {
            "messages": [SYSTEM, USER, ASSISTANT],
            "continue_final_message": False,
            "add_generation_prompt": False,
        },
        CLOSED.removesuffix(GENERATION_PROMPT),
    ),
    (
        {"messages": [SYSTEM, USER, ASSISTANT], "add_generation_prompt": True},
        BEGIN + GENERATION_PROMPT + "A <|im_end|>\n" + GENERATION_PROMPT,
    ),
    (
        {"messages": [SYSTEM, USER, ASSISTANT], "continue_final_message": False},
        BEGIN + GENERATION_PROMPT + "A <|im_end|>\n" + GENERATION_PROMPT,
    ),
    ({"messages": [SYSTEM, USER], "continue_final_message": True}, BEGIN.removesuffix("<|im_end|>\n")),
    (
        {"messages": [SYSTEM | {"role": "developer"}, USER]},
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n" + GENERATION_PROMPT,
    ),
    ({"messages": [SYSTEM, PARTS]}, BEGIN + GENERATION_PROMPT),
    (
        {"messages": [SYSTEM, USER | {"name": "Ann"}], "chat_template_kwargs": {"thinking": True}},
        BEGIN + GENERATION_PROMPT,
    ),
]


async def test_messages_are_rendered_with_the_chat_template(broker: Broker) -> None:
    async with answering(broker.url, Answer(ids("x"))) as (worker, _, client):
        for body, prompt in PROMPTS:
            response = await client.post(CHAT_PATH, json=body)
            assert response.status_code == 200, response.text
            prompt_ids = unpack_ids(worker.seen[-1].prompt_ids)
            assert TOKENIZER.decode(prompt_ids, skip_special_tokens=False) == prompt
            assert model_tokenizer().encode(prompt, add_special_tokens=False) == prompt_ids


async def test_as_in_tgi_a_last_message_of_the_assistant_may_be_continued_by_default(broker: Broker) -> None:
    chat = {"messages": [SYSTEM, USER, ASSISTANT]}
    cases: list[tuple[dict[str, Any], str]] = [
        (chat, CONTINUED),
        (chat | {"add_generation_prompt": True}, CLOSED),
        (chat | {"continue_final_message": False}, CLOSED),
        ({"messages": [SYSTEM, USER]}, BEGIN + GENERATION_PROMPT),
    ]
    async with answering(broker.url, Answer(ids("x")), continue_final_message=True) as (worker, _, client):
        for body, prompt in cases:
            assert (await client.post(CHAT_PATH, json=body)).status_code == 200
            found = TOKENIZER.decode(unpack_ids(worker.seen[-1].prompt_ids), skip_special_tokens=False)
            assert found == prompt


async def test_echo_repeats_the_message_that_is_continued(broker: Broker) -> None:
    async with answering(broker.url, Answer(ids("x"))) as (_, _, client):
        body = {"messages": [USER, ASSISTANT], "echo": True, "continue_final_message": True}
        assert (await client.post(CHAT_PATH, json=body)).json()["choices"][0]["message"]["content"] == "A x"
        found = frames(await streamed(client, CHAT_PATH, body))
    assert "".join(frame["choices"][0]["delta"]["content"] for frame in found) == "A x"


async def test_a_model_without_a_template_refuses_chats(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with answering(broker.url, Answer(ids("x"))) as (_, _, client):
        monkeypatch.setattr(type(model_tokenizer()), "chat_template", None)
        response = await client.post(CHAT_PATH, json=CHAT)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("messages", "template_error") and "no chat template" in error[
        "message"
    ]


async def test_arguments_that_cannot_be_read_as_json_stay_a_text(broker: Broker) -> None:
    """Half an emoji could not be written; a model that wrote it would end its conversation."""
    async with answering(broker.url, Answer(ids("a"))) as (worker, _, client):
        for arguments in ('{"a": "\\ud83d"}', '{"a": ' + "[" * 260 + "]" * 260 + "}"):
            call = {"name": "f", "arguments": arguments}
            chat = [
                {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": call}]},
                {"role": "tool", "tool_call_id": "a", "content": "b"},
            ]
            items = [
                {"type": "function_call", "call_id": "a", **call},
                {"type": "function_call_output", "call_id": "a", "output": "b"},
            ]
            for path in (CHAT_PATH, "/invocations", "/tokenize", "/chat_tokenize", "/v1/responses"):
                body = {"input": items} if path == "/v1/responses" else {"messages": chat}
                answer = await client.post(path, json=body)
                assert answer.status_code == 200, (path, answer.text)
            assert json.dumps(arguments)[1:-1] in TOKENIZER.decode(unpack_ids(worker.seen[-1].prompt_ids))
