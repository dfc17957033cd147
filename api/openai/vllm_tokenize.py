"""Bodies of vLLM's routes, described for /docs: requests and responses.

Tokenize in vLLM's shape: the token ids of a text or of a chat, and how many the model takes.
"""

from collections.abc import Callable
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from api.event_loop import offload
from api.http.body import parse_body
from api.http.openapi import ApiObject
from api.json import to_json
from api.openai.params import read_chat
from api.openai.request_schemas import ChatRequest
from api.prompts.control_texts import Rendered
from api.requests.fields import Listed, Strict, Whole
from api.requests.pool import Pool
from api.requests.pool_registry import pools_of
from api.requests.validate import check


class TokenizePromptRequest(Strict):
    """A body of /tokenize with `prompt`."""

    model: str | None = None
    prompt: str = Field(description="The text to tokenize.")
    add_special_tokens: bool | None = Field(
        default=None, description="Add the special tokens that the model puts around a prompt. Default: true."
    )
    return_token_strs: bool | None = Field(
        default=None, description="Return the tokens as the vocabulary has them, too. Default: false."
    )


class TokenizeChatRequest(ChatRequest):
    """A body of /tokenize with `messages`."""

    return_token_strs: bool | None = None


class DetokenizeRequest(Strict):
    """The body of /detokenize."""

    model: str | None = None
    tokens: Listed[Whole] = Field(description="Token ids.", json_schema_extra={"items": {"minimum": 0}})


class TokenizeResponse(ApiObject):
    count: int
    max_model_len: int | None
    """Most tokens of prompt and generated text together; null until a worker has been ready."""
    tokens: list[int]
    token_strs: list[str] | None
    """The tokens as the vocabulary has them, if requested."""


class DetokenizeResponse(ApiObject):
    prompt: str


class ServerVersion(ApiObject):
    version: str
    """Of this server."""


async def tokenize_prompt(request: Request, data: bytes) -> Response:
    """Raises ApiError."""
    body = await offload(len(data), lambda: parse_body(TokenizePromptRequest, data))
    pool = await pools_of(request).find(body.model)
    special = body.add_special_tokens is not False
    return await respond(pool, Rendered(body.prompt), special, bool(body.return_token_strs))


async def tokenize_chat(request: Request, data: bytes) -> Response:
    """Raises ApiError."""
    chat = await offload(len(data), lambda: parse_body(TokenizeChatRequest, data))
    chat.check()
    pool = await pools_of(request).find(chat.model)
    prompt = await chat_prompt(chat, pool)
    return await respond(pool, prompt, bool(chat.add_special_tokens), bool(chat.return_token_strs))


async def chat_prompt(chat: ChatRequest, pool: Pool) -> Rendered:
    """The prompt that the chat template makes of a chat. Raises ApiError."""
    params = (await read_chat(chat, pool)).params
    check(params, pool.workers.limits, pool.tokenizer)
    return Rendered(params.text or "", params.guarded)


async def respond(pool: Pool, prompt: Rendered, add_special_tokens: bool, with_strings: bool) -> Response:
    if not pool.workers.max_total_tokens:
        await pool.workers.refresh_unless_fresh()
    longest = pool.workers.limits.max_total_tokens if pool.workers.max_total_tokens else None

    def render() -> bytes:
        ids = pool.tokenizer.encode_rendered(prompt, add_special_tokens)
        to_string: Callable[[int], Any] = pool.tokenizer.backend.id_to_token
        return to_json(
            {
                "count": len(ids),
                "max_model_len": longest,
                "tokens": ids,
                "token_strs": [to_string(token_id) for token_id in ids] if with_strings else None,
            }
        )

    return Response(await pool.tokenizer.run(prompt, render), media_type="application/json")
