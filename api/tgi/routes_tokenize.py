"""POST /tokenize and /chat_tokenize: the token ids of a text or of a chat, as in TGI, and as in vLLM."""

from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.event_loop import offload
from api.http import body
from api.http.openapi import TGI, json_body
from api.json import list_to_json, to_json
from api.openai.request_schemas import ChatRequest
from api.openai.routes_vllm import TokenizeResponse, chat_prompt, tokenize_chat, tokenize_prompt
from api.prompts.control_texts import Rendered
from api.prompts.tokenizer import ModelTokenizer, utf8_size
from api.requests.on_pool import pool_for, read_body
from api.tgi.request_schemas import TokenizeRequest
from api.tgi.response_schemas import TOKENIZE_ERRORS, ChatTokenizeResponse, SimpleToken

router = APIRouter(responses=TOKENIZE_ERRORS, tags=[TGI])
TEXT = {"inputs": "The capital of France is"}
CHAT = {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}


@router.post(
    "/tokenize",
    summary="Tokenize a text",
    openapi_extra=json_body(TokenizeRequest, TEXT),
    responses={200: {"model": list[SimpleToken] | TokenizeResponse}},
)
async def tokenize(request: Request) -> Response:
    """Returns the tokens of `inputs`, with the special tokens that the model puts around a prompt. A body
    with `prompt` or `messages` is vLLM's, and gets vLLM's answer.
    """
    pool = await pool_for(request)
    data = await body.read_json(request, pool.max_body_bytes)
    names = await body.names_in(data)
    if "inputs" not in names and "messages" in names:
        return await tokenize_chat(request, data)
    if "inputs" not in names and "prompt" in names:
        return await tokenize_prompt(request, data)
    parsed = await offload(len(data), lambda: body.parse_body(TokenizeRequest, data))
    prompt = Rendered(parsed.inputs)
    content = await pool.tokenizer.run(prompt, lambda: list_to_json(simple_tokens(pool.tokenizer, prompt)))
    return Response(content, media_type="application/json")


@router.post(
    "/chat_tokenize",
    summary="Tokenize a chat",
    openapi_extra=json_body(ChatRequest, CHAT),
    responses={200: {"model": ChatTokenizeResponse}},
)
async def chat_tokenize(request: Request) -> Response:
    """Returns the prompt that /v1/chat/completions makes of the same body, and its tokens. The prompt may be
    longer than the model's context.
    """
    chat = await read_body(request, ChatRequest)
    pool = await pool_for(request, chat.model)
    prompt = await chat_prompt(chat, pool)

    def render() -> bytes:
        tokens = list_to_json(simple_tokens(pool.tokenizer, prompt, bool(chat.add_special_tokens)))
        return b'{"tokenize_response":%b,"templated_text":%b}' % (tokens, to_json(prompt.text))

    return Response(await pool.tokenizer.run(prompt, render), media_type="application/json")


def simple_tokens(
    tokenizer: ModelTokenizer, prompt: Rendered, add_special_tokens: bool = True
) -> Iterator[dict[str, Any]]:
    """TGI's `{id, text, start, stop}` for each token. Offsets count the bytes of the UTF-8 text."""
    text, num_chars, num_bytes = prompt.text, 0, 0  # of the text before the token
    for token_id, start, end in tokenizer.spans(prompt, add_special_tokens):
        token = text[start:end]
        if token:
            num_bytes += utf8_size(text[num_chars:start])
            num_chars = start
        first = num_bytes if token else 0
        yield {"id": token_id, "text": token, "start": first, "stop": first + utf8_size(token)}
