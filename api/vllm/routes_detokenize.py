"""POST /detokenize: the text of token ids, as in vLLM."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.errors import invalid
from api.event_loop.offload import offload
from api.http import body
from api.http.openapi import OPENAI, json_body
from api.http.state import pools_of
from api.json import to_json
from api.openai.response_schemas import ERROR_RESPONSES
from api.vllm.schemas import DetokenizeRequest, DetokenizeResponse

router = APIRouter(tags=[OPENAI])


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
    for token_id in parsed.tokens:
        if not 0 <= token_id < tokenizer.size:
            raise invalid(
                f"`tokens` must have token ids of at least 0 and below {tokenizer.size}. Given: {token_id}",
                "tokens",
            )
    text = await offload(
        len(parsed.tokens), lambda: tokenizer.backend.decode(parsed.tokens, skip_special_tokens=False)
    )
    return Response(to_json({"prompt": text}), media_type="application/json")
