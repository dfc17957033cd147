"""What tests of OpenAI's routes share: scripted ids, and the frames of a stream."""

import json
from typing import Any

import httpx

from common.messages.records import pack_floats, unpack_floats
from tests.support.sse import data_of

CHAT_PATH = "/v1/chat/completions"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
GENERATION_PROMPT = "<|im_start|>assistant\n"


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
