"""Answers over HTTP as tests read them: frames, errors, beams, logits and the events of responses."""

import base64
import json
import re
from functools import cache
from typing import Any

import httpx
import numpy as np
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from common.messages.records import BeamSequence, pack_floats, pack_sequences, unpack_floats
from tests.support.events import unpack_sequences
from tests.support.fleet.scripted_worker import VOCAB_SIZE, Answer
from tests.support.tokenizer import IM_END, ids

FRAME = re.compile(r"(?:id: (\d+)\n)?data: ([^\n]*)")
COMMENTS = re.compile(r"^:[^\n]*\n\n?", re.MULTILINE)
"""Lines before a frame, with or without an empty line after them."""


def frames_of(content: bytes) -> list[tuple[int | None, str]]:
    """(id, data) of each whole frame of a stream, without comments."""
    frames = COMMENTS.sub("", content.decode()).split("\n\n")[:-1]
    matches = [FRAME.fullmatch(frame) for frame in frames]
    assert all(matches), frames
    return [(int(match[1]) if match[1] else None, match[2]) for match in matches if match]


def numbered(content: bytes) -> list[tuple[int, str]]:
    """As `frames_of`, of a stream in which every frame must have an id."""
    frames = frames_of(content)
    assert all(ordinal for ordinal, _ in frames), frames
    return frames  # type: ignore[return-value]


def data_of(content: bytes) -> list[str]:
    """The data of all frames of a whole stream, which must have no ids, or ids that count from 1."""
    assert content.endswith(b"\n\n"), content
    ordinals, data = zip(*frames_of(content), strict=True)
    assert ordinals in ((None,) * len(data), (*range(1, len(data) + 1),))
    return list(data)


# --- openai frames ------------------------------------------------------------------------------------------

CHAT_PATH = "/v1/chat/completions"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
GENERATION_PROMPT = "<|im_start|>assistant\n"


def logprobs(count: int) -> list[float]:
    """As the fake worker has them, in float32."""
    return unpack_floats(pack_floats([-0.1 - i / 7 for i in range(count)]))


async def post(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    """An answer that is served."""
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def streamed(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> bytes:
    """The bytes of a whole stream."""
    response = await client.post(path, json=body | {"stream": True})
    assert response.status_code == 200, response.content
    assert response.headers["content-type"] == "text/event-stream"
    return response.content


def frames(content: bytes) -> list[dict[str, Any]]:
    """Without the last one, `[DONE]`."""
    *found, done = data_of(content)
    assert done == "[DONE]"
    return [json.loads(data) for data in found]


def tgi_frames(content: bytes) -> list[dict[str, Any]]:
    return [json.loads(data) for data in data_of(content)]


# --- beams --------------------------------------------------------------------------------------------------

TEXTS = (" one two é🙂", " three", " four zzz", " five six seven")
REASONS = ("eos_token", "length", "stop_sequence", "length")


def sequence(number: int) -> BeamSequence:
    """The sequence of this rank, the best first."""
    own = ids(TEXTS[number]) + [IM_END] * (REASONS[number] == "eos_token")
    logprobs = [-0.25 * (number + 1)] * len(own)
    return BeamSequence(own, logprobs, sum(logprobs) / len(own), REASONS[number])


SEQUENCES = unpack_sequences(pack_sequences([sequence(i) for i in range(len(TEXTS))]))
ANSWER = Answer([], beams=SEQUENCES)


def scores(number: int) -> dict[str, float]:
    """What an answer shows of a sequence."""
    one = SEQUENCES[number]
    return {"cumulative_logprob": sum(one.logprobs), "beam_score": one.score}


def shown_tokens(number: int) -> list[dict[str, Any]]:
    """TGI's tokens of a sequence."""
    one = SEQUENCES[number]
    return [
        {"id": token_id, "logprob": logprob, "special": token_id == IM_END}
        for token_id, logprob in zip(one.ids, one.logprobs, strict=True)
    ]


# --- logits -------------------------------------------------------------------------------------------------


def positions(found: dict[str, Any]) -> list[float]:
    """The positions of the rows in a field; the scripted worker's logits are their position."""
    assert found["dtype"] == "float32" and found["shape"][1] == VOCAB_SIZE
    rows = np.frombuffer(base64.b64decode(found["data"]), "<f4").reshape(found["shape"])
    assert (rows == rows[:, :1]).all()
    return [float(row[0]) for row in rows]


def first_part(response: Any) -> dict[str, Any]:
    """The object with the logits: the first choice, or the response."""
    found: dict[str, Any] = response[0] if isinstance(response, list) else response
    return found["choices"][0] if "choices" in found else found


# --- api errors ---------------------------------------------------------------------------------------------


def tgi_error(response: httpx.Response) -> tuple[int, str]:
    """Return status and `error_type`."""
    answer = response.json()
    assert set(answer) == {"error", "error_type"} and answer["error"]
    return response.status_code, answer["error_type"]


def openai_error(response: httpx.Response) -> tuple[int, str, str | None]:
    """Return status, `type` and `code`."""
    answer = response.json()
    assert (
        set(answer) == {"error"}
        and set(answer["error"]) == {"message", "type", "param", "code"}
        and answer["error"]["message"]
    )
    return response.status_code, answer["error"]["type"], answer["error"]["code"]


# --- events -------------------------------------------------------------------------------------------------

PATH = "/v1/responses"
BODY: dict[str, Any] = {"input": "Hi"}


@cache
def event_type() -> TypeAdapter[Any]:
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    return adapter


def check_response(content: dict[str, Any]) -> Response:
    """The response, whose fields are those that OpenAI's package requires."""
    return Response.model_validate(content, strict=False)


def read_events(content: bytes) -> list[dict[str, Any]]:
    """The events of a stream. Each must be one of OpenAI's types, under its name, and in its place."""
    events = []
    for text in content.decode().split("\n\n")[:-1]:
        name, number, data = [line for line in text.split("\n") if line != ": "]
        event = json.loads(data.removeprefix("data: "))
        event_type().validate_python(event)
        assert name == f"event: {event['type']}"
        assert number == f"id: {event['sequence_number'] + 1}"
        events.append(event)
    return events


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(one["delta"] for one in events if one["type"] == "response.output_text.delta")
