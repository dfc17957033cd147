"""What clients ask of a model besides answers: GET /v1/models for clients of OpenAI's and of Anthropic's API,
who send `anthropic-version`; tokens of texts (/tokenize, /chat_tokenize, /detokenize); and GET /version.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from pydantic import Field
from starlette.responses import Response

from api.errors import invalid
from api.http import body
from api.http.openapi import (
    HEALTH,
    OPENAI,
    OPENAI_ERRORS,
    TGI,
    TGI_ERRORS,
    Responses,
    Shape,
    answer,
    json_body,
    only,
)
from api.json import json_response, list_to_json, place_of, to_json
from api.prompts.chat_template import Rendered
from api.prompts.tokenizer import ModelTokenizer, utf8_size
from api.protocols.chat import ChatRequest, read_chat
from api.protocols.tgi import TokenizeRequest
from api.requests.fields import Listed, Strict, Whole, optional
from api.requests.pool import Pool, names_own
from api.requests.service_terms import own_pool, pool_for, pools_of
from api.requests.validate import GenerationParams, check, check_ids, show_pictures
from common.adapters import PoolAdapter

MODEL = Shape(
    "Model",
    {
        "id": "SmolLM2",
        "object": "model",
        "created": 1764000000,
        "owned_by": "SmolLM2",
        "root?": "HuggingFaceTB/SmolLM2",  # MODEL_ID as given, if the pool is open; an adapter's path
        "parent?": ("SmolLM2", None),  # the model that an adapter changes
        "max_model_len?": (4096, None),  # null until a worker has been ready
        "task?": "embed",  # of a model that makes vectors or scores
    },
)
MODEL_LIST = Shape("ModelList", {"object": "list", "data": [MODEL.example], "models": [{}]})
INFO = {"type": "model", "id": "SmolLM2", "display_name": "SmolLM2", "created_at": "2025-11-24T16:00:00Z"}
ENDS = {"first_id": ("SmolLM2", None), "last_id": ("SmolLM2", None)}
MODEL_INFO_PAGE = Shape("ModelInfoPage", {"data": [INFO], **ENDS, "has_more": False})
models_router = APIRouter(tags=[OPENAI])
NO_CATALOGUE: list[Any] = []
"""The field `models`, without which Codex reads no list of models. It is a catalogue of OpenAI's own models
with their system prompts; Codex uses its defaults for a model that is not in it.
"""
STARTED_S = int(time.time())
"""Unix time at which this gateway started; it stands for the creation time of its models."""
FOR_ANTHROPIC = "With the header `anthropic-version` only: "
ModelId = Annotated[str | None, Query(description=f"{FOR_ANTHROPIC}the id of a model of the list.")]


@models_router.get("/v1/models/", include_in_schema=False)
@models_router.get(
    "/v1/models",
    summary="List models",
    responses=answer((MODEL_LIST, MODEL_INFO_PAGE)) | only(OPENAI_ERRORS, 400, 503),
    response_model=None,
)
async def list_models(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=1000, description=f"{FOR_ANTHROPIC}models on a page.")] = 20,
    after_id: ModelId = None,
    before_id: ModelId = None,
) -> dict[str, Any]:
    """Lists the model of this pool, those of other pools that have a live worker, those whose requests are
    shared out by weight, and LoRA adapters. With the header `anthropic-version` it is a page of Anthropic's
    list.
    """
    pools = pools_of(request)
    adapters: dict[str, dict[str, Any]] = {}
    for pool in pools.all():
        for one in pool.adapters.registry.ready:
            adapters.setdefault(one.name, render_adapter(one, pool.settings.model_name))
    models = []
    for name in pools.served_names():  # of pools that are not open nobody knows what their model makes
        opened = (pool for pool in pools.all() if names_own(name, pool.settings))
        if name not in adapters:
            models.append(render_model(name, next(opened, None)))
    models += adapters.values()
    if VERSION_HEADER in request.headers:
        return page(models, limit, after_id, before_id)
    return {"object": "list", "data": models, "models": NO_CATALOGUE}


@models_router.get(
    "/v1/models/{name:path}",
    summary="Retrieve a model",
    responses=answer((MODEL, Shape("ModelInfo", INFO))) | only(OPENAI_ERRORS, 404, 503),
    response_model=None,
)
async def retrieve_model(
    request: Request, name: Annotated[str, Path(description="One that `GET /v1/models` lists.")]
) -> dict[str, Any]:
    """Returns one of the models that GET /v1/models lists; 404 for others."""
    pools = pools_of(request)
    pool = await pools.find(name)
    if adapter := pool.adapters.find(name):
        found = render_adapter(adapter, pool.settings.model_name)
    else:
        found = render_model(pools.resolve(name).shown, pool)
    return render_info(found) if VERSION_HEADER in request.headers else found


def render_model(name: str, pool: Pool | None = None) -> dict[str, Any]:
    """A model as vLLM lists it, where its pool is open."""
    shown = {"id": name, "object": "model", "created": STARTED_S, "owned_by": name}
    if pool is None:
        return shown
    kind = {"task": pool.task} if pool.task else {}
    longest = pool.workers.limits.max_total_tokens or None
    return shown | {"root": pool.settings.given_model_id, "parent": None, "max_model_len": longest, **kind}


def render_adapter(adapter: PoolAdapter, parent: str) -> dict[str, Any]:
    """An adapter as vLLM lists it; `parent` is its model."""
    shown = render_model(adapter.name) | {"created": adapter.added_ms // 1000, "owned_by": parent}
    return shown | {"root": adapter.path, "parent": parent}


# --- Anthropic's list ---------------------------------------------------------------------------------------


VERSION_HEADER = "anthropic-version"
"""Clients of Anthropic's API send it with each request."""


def render_info(model: Mapping[str, Any]) -> dict[str, Any]:
    """A model of OpenAI's list, as Anthropic's has it."""
    created = datetime.fromtimestamp(model["created"], UTC).isoformat().replace("+00:00", "Z")
    return {"type": "model", "id": model["id"], "display_name": model["id"], "created_at": created}


def page(
    models: Sequence[Mapping[str, Any]], limit: int, after_id: str | None, before_id: str | None
) -> dict[str, Any]:
    """Up to `limit` models after one id, or the last ones before another. Raises ApiError (422)."""
    if after_id is not None and before_id is not None:
        raise invalid("`after_id` and `before_id` exclude each other", "before_id")
    ids = [model["id"] for model in models]
    if before_id is not None:
        end = place_of(ids, before_id, "before_id")
        chosen, has_more = models[max(end - limit, 0) : end], end > limit
    else:
        begin = place_of(ids, after_id, "after_id") + 1
        chosen, has_more = models[begin : begin + limit], begin + limit < len(models)
    data = [render_info(model) for model in chosen]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"data": data, "first_id": first, "last_id": last, "has_more": has_more}


# --- tokens -------------------------------------------------------------------------------------------------


TOKENIZE_ERRORS: Responses = only(TGI_ERRORS, 400, 401, 403, 404, 413, 415, 422, 500, 503)

SIMPLE_TOKENS = [{"id": 504, "text": "The", "start": 0, "stop": 3}]
"""`start` and `stop` are offsets of bytes in the UTF-8 text."""
CHAT_TOKENS = Shape(
    "ChatTokenizeResponse", {"tokenize_response": SIMPLE_TOKENS, "templated_text": "<|im_start|>user\n…"}
)
PROMPT_TOKENS = Shape(
    "TokenizeResponse",
    {
        "count": 1,
        "max_model_len": (4096, None),  # null until a worker has been ready
        "tokens": [504],
        "token_strs": (None, ["The"]),
    },
)
TEXT_OF_TOKENS = Shape("DetokenizeResponse", {"prompt": "The capital of France is"})
VERSION = Shape("ServerVersion", {"version": "1.0.0"})
detokenize_router = APIRouter(tags=[OPENAI])
version_router = APIRouter(tags=[HEALTH])
"""Its route needs no API key."""
TOKEN_BYTES = 4
"""Bytes of text that a token stands for, about."""

# --- schemas ------------------------------------------------------------------------------------------------


class TokenizePromptRequest(Strict):
    """A body of /tokenize with `prompt`."""

    model: str | None = None
    prompt: str = Field(description="The text to tokenize.")
    add_special_tokens: bool | None = optional(
        "Add the special tokens that the model puts around a prompt. Default: true."
    )
    return_token_strs: bool | None = optional(
        "Return the tokens as the vocabulary has them, too. Default: false."
    )


class TokenizeChatRequest(ChatRequest):
    """A body of /tokenize with `messages`."""

    return_token_strs: bool | None = None


class DetokenizeRequest(Strict):
    """The body of /detokenize."""

    model: str | None = None
    tokens: Listed[Whole] = Field(description="Token ids.", json_schema_extra={"items": {"minimum": 0}})


# --- /tokenize ----------------------------------------------------------------------------------------------


async def shown_prompt(params: GenerationParams, pool: Pool) -> Rendered:
    """The prompt of a chat's parameters, with the placeholders of its pictures. Raises ApiError."""
    limits = pool.workers.limits
    with params.naming():
        check(params, limits, pool.tokenizer)
        params, _ = await show_pictures(params, limits, pool.pictures)
    assert params.prompt is not None
    return params.prompt


async def respond_with_ids(
    pool: Pool, prompt: Rendered, add_special_tokens: bool, with_strings: bool
) -> Response:
    if not pool.workers.max_total_tokens:
        await pool.workers.refresh_unless_fresh()
    max_model_len = pool.workers.limits.max_total_tokens or None

    def render() -> bytes:
        ids = pool.tokenizer.encode_rendered(prompt, add_special_tokens)
        to_string: Callable[[int], Any] = pool.tokenizer.backend.id_to_token
        return to_json(
            {
                "count": len(ids),
                "max_model_len": max_model_len,
                "tokens": ids,
                "token_strs": [to_string(token_id) for token_id in ids] if with_strings else None,
            }
        )

    return Response(await pool.tokenizer.run(prompt, render), media_type="application/json")


# --- /detokenize and /version -------------------------------------------------------------------------------


@detokenize_router.post(
    "/detokenize",
    summary="Turn token ids into text",
    openapi_extra=json_body(DetokenizeRequest, {"tokens": [504, 3575, 282, 4649, 314]}),
    responses=answer(TEXT_OF_TOKENS) | OPENAI_ERRORS,
)
async def detokenize(request: Request) -> Response:
    """Returns the text of `tokens`, special tokens included."""
    parsed = await body.read(request, DetokenizeRequest, own_pool(request).settings.payload_limit)
    tokenizer = (await pool_for(request, parsed.model)).tokenizer
    num_bytes = TOKEN_BYTES * len(parsed.tokens)
    text = await tokenizer.budget.run(num_bytes, lambda: decode(parsed.tokens, tokenizer))
    return json_response({"prompt": text})


def decode(ids: Sequence[int], tokenizer: ModelTokenizer) -> str:
    """The text of token ids. Raises ApiError for those beyond the vocabulary."""
    check_ids("tokens", ids, tokenizer.size)
    return tokenizer.text_of(ids)


@version_router.get(
    "/version", summary="Version of this server", responses=answer(VERSION), response_model=None
)
async def server_version() -> dict[str, str]:
    """Returns the version of this server, not of vLLM."""
    return {"version": version("tokenfleet")}


# --- as in TGI ----------------------------------------------------------------------------------------------


router = APIRouter(responses=TOKENIZE_ERRORS, tags=[TGI])
TEXT = {"inputs": "The capital of France is"}
CHAT = {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}


@router.post(
    "/tokenize",
    summary="Tokenize a text",
    openapi_extra=json_body(TokenizeRequest | TokenizePromptRequest | TokenizeChatRequest, TEXT),
    responses=answer((SIMPLE_TOKENS, PROMPT_TOKENS)),
)
async def tokenize(request: Request) -> Response:
    """Returns the tokens of `inputs`, with the special tokens that the model puts around a prompt. A body
    with `prompt` or `messages` is vLLM's, and gets vLLM's answer.
    """
    pool = await pool_for(request)
    data = await body.read_json(request, pools_of(request).max_body_bytes)
    names = (await body.parse(body.AnyBody, data)).model_fields_set
    if "inputs" not in names and "messages" in names:
        chat = await body.parse(TokenizeChatRequest, data)
        pool = await pool_for(request, chat.model)
        shown = await shown_prompt(await read_chat(chat, pool), pool)
        return await respond_with_ids(
            pool, shown, bool(chat.add_special_tokens), bool(chat.return_token_strs)
        )
    if "inputs" not in names and "prompt" in names:
        asked = await body.parse(TokenizePromptRequest, data)
        pool, special = await pool_for(request, asked.model), asked.add_special_tokens is not False
        return await respond_with_ids(pool, Rendered(asked.prompt), special, bool(asked.return_token_strs))
    parsed = await body.parse(TokenizeRequest, data)
    prompt = Rendered(parsed.inputs)
    content = await pool.tokenizer.run(prompt, lambda: list_to_json(simple_tokens(pool.tokenizer, prompt)))
    return Response(content, media_type="application/json")


@router.post(
    "/chat_tokenize",
    summary="Tokenize a chat",
    openapi_extra=json_body(ChatRequest, CHAT),
    responses=answer(CHAT_TOKENS),
)
async def chat_tokenize(request: Request) -> Response:
    """Returns the prompt that /v1/chat/completions makes of the same body, and its tokens. The prompt may be
    longer than the model's context.
    """
    chat = await body.read(request, ChatRequest, pools_of(request).max_body_bytes)
    pool = await pool_for(request, chat.model)
    prompt = await shown_prompt(await read_chat(chat, pool), pool)

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
