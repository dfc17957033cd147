"""POST /detokenize: the text of token ids, as in vLLM.

GET /version, as in vLLM. No API key is needed.
"""

from collections.abc import Sequence
from importlib.metadata import version

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.errors import invalid, quoted
from api.http import body
from api.http.openapi import HEALTH, OPENAI, json_body
from api.json import to_json
from api.openai.response_schemas import ERROR_RESPONSES
from api.openai.vllm_tokenize import DetokenizeRequest, DetokenizeResponse, ServerVersion
from api.prompts.tokenizer import ModelTokenizer
from api.requests.pool_registry import pools_of

router = APIRouter(tags=[OPENAI])
TOKEN_BYTES = 4
"""About the bytes of text that a token stands for."""


@router.post(
    "/detokenize",
    summary="Turn token ids into text",
    openapi_extra=json_body(DetokenizeRequest, {"tokens": [504, 3575, 282, 4649, 314]}),
    responses={200: {"model": DetokenizeResponse}, **ERROR_RESPONSES},
)
async def detokenize(request: Request) -> Response:
    """Returns the text of `tokens`, special tokens included."""
    pools = pools_of(request)
    parsed = await body.read(request, DetokenizeRequest, pools.own.settings.payload_limit)
    tokenizer = (await pools.find(parsed.model)).tokenizer
    budget = tokenizer.budget
    text = await budget.run(TOKEN_BYTES * len(parsed.tokens), lambda: detokenized(parsed.tokens, tokenizer))
    return Response(to_json({"prompt": text}), media_type="application/json")


def detokenized(ids: Sequence[int], tokenizer: ModelTokenizer) -> str:
    """The text of token ids. Raises ApiError for those beyond the vocabulary."""
    for token_id in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token_id < tokenizer.size:
            words = f"must have token ids of at least 0 and below {tokenizer.size}"
            raise invalid(f"`tokens` {words}. Given: {quoted(token_id)}", "tokens")
    return str(tokenizer.backend.decode(ids, skip_special_tokens=False))


version_router = APIRouter(tags=[HEALTH])


@version_router.get("/version", summary="Version of this server", responses={200: {"model": ServerVersion}})
async def server_version() -> dict[str, str]:
    """Returns the version of this server, not of vLLM."""
    return {"version": version("tokenfleet")}
