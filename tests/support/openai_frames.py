"""What tests of OpenAI's routes share: scripted ids, and the frames of a stream."""

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx

from api.lifecycle import Gateway
from common.messages.packing import pack_floats, unpack_floats
from common.messages.request import Generate
from tests.support.fleet.gateways import model_tokenizer, ready, serving
from tests.support.fleet.scripted_worker import Answer, FakeWorker, working
from tests.support.sse import data_of

CHAT_PATH = "/v1/chat/completions"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
GENERATION_PROMPT = "<|im_start|>assistant\n"
TOKENIZER = model_tokenizer().backend
IM_END: int = TOKENIZER.token_to_id("<|im_end|>")  # type: ignore[assignment]


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER.encode(text).ids
    return found


@contextlib.asynccontextmanager
async def answering(
    url: str, answer: Answer | Callable[[Generate], Answer], **settings: Any
) -> AsyncIterator[tuple[FakeWorker, Gateway, httpx.AsyncClient]]:
    """A worker that answers so, a gateway that is ready, and a client."""
    scripted = answer if callable(answer) else lambda _: answer
    async with working(url, TOKENIZER, scripted) as worker, serving(url, **settings) as (gateway, client):
        await ready(gateway)
        yield worker, gateway, client


def logprobs(count: int) -> list[float]:
    """As the fake worker has them, in float32."""
    return unpack_floats(pack_floats([-0.1 - i / 7 for i in range(count)]))


async def streamed(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> bytes:
    """The bytes of a whole stream."""
    async with client.stream("POST", path, json=body | {"stream": True}) as response:
        content = await response.aread()
        assert response.status_code == 200, content
        assert response.headers["content-type"] == "text/event-stream"
        return content


def frames(content: bytes) -> list[dict[str, Any]]:
    """Without the last one, `[DONE]`."""
    *found, done = data_of(content)
    assert done == "[DONE]"
    return [json.loads(data) for data in found]
