"""POST /v1/completions: as in OpenAI's API, with the additions of vLLM and TGI."""

from collections.abc import Sequence
from dataclasses import replace

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.errors import invalid
from api.event_loop.pace import Pace
from api.http.openapi import OPENAI
from api.inference.lengths import with_truncate
from api.inference.limits import Limits
from api.inference.pool_registry import pool_and_body
from api.inference.validate import validate
from api.openai.echo import echoed_prompt
from api.openai.params import from_completion, read_prompts
from api.openai.request_schemas import CompletionRequest
from api.openai.respond import respond
from api.openai.response_schemas import ERROR_RESPONSES, Completion, CompletionChunk, response_or_chunks
from api.service.headers import generation_body
from api.structured_output.grammar import is_json

router = APIRouter(responses=ERROR_RESPONSES, tags=[OPENAI])
EXAMPLE = {"prompt": "The capital of France is", "max_tokens": 20}


@router.post(
    "/v1/completions",
    summary="Create a completion",
    openapi_extra=generation_body(CompletionRequest, EXAMPLE),
    responses=response_or_chunks(Completion, CompletionChunk),
)
async def completions(request: Request) -> Response:
    """Continues one prompt or several. `choices` has the `n` choices of the first prompt, then those of the
    next. With `stream`, they come as server-sent events, a chunk for each token, and end with `data: [DONE]`.
    """
    pool, completion = await pool_and_body(request, CompletionRequest)
    await pool.admission.check()
    limits, tokenizer = pool.workers.limits, pool.tokenizer
    prompts = read_prompts(completion.prompt)
    check_num_prompts(prompts, limits)
    all_params = from_completion(completion.with_defaults(tokenizer.sampling_defaults), prompts)
    requests, prefixes, pace = [], [], Pace()
    for params in (with_truncate(one, limits) for one in all_params):
        choices = await validate(params, limits, tokenizer)
        requests += choices
        prefixes.append(echoed_prompt(completion, params, choices[0], tokenizer))
        await pace.step()
    num_chars = sum(len(params.text or "") for params in all_params)
    rendering = replace(completion.rendering, is_json=is_json(completion.grammar()))
    return await respond(request, pool, completion, requests, num_chars, prefixes, rendering)


def check_num_prompts(prompts: Sequence[object], limits: Limits) -> None:
    if len(prompts) > limits.max_client_batch_size:
        raise invalid(
            f"`prompt` supports up to {limits.max_client_batch_size} prompts. Given: {len(prompts)}", "prompt"
        )
