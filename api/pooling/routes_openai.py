"""Routes of vectors and scores in the shapes of OpenAI, Cohere and vLLM: POST /v1/embeddings, /v1/rerank and
/v1/score.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.http import body
from api.http.openapi import POOLING
from api.pooling.readers import Asked, read_embedding, read_rerank, read_score
from api.pooling.request_schemas import (
    EmbeddingRequest,
    PoolingFields,
    RerankFields,
    ScoreRequest,
)
from api.pooling.respond import respond
from api.pooling.response_schemas import (
    VLLM_ERRORS,
    EmbeddingList,
    RerankResponse,
    ScoreResponse,
)
from api.requests.on_pool import on_pool, own_pool
from api.requests.pool import Pool
from api.requests.service_terms import generation_body

router = APIRouter(responses=VLLM_ERRORS, tags=[POOLING])
EMBEDDING_EXAMPLE = {"input": ["The sky is blue.", "Grass is green."]}
RERANK_EXAMPLE = {
    "query": "What is the capital of France?",
    "documents": ["Paris is the capital of France.", "Bread is made of flour."],
}
SCORE_EXAMPLE = {"text_1": "What is the capital of France?", "text_2": RERANK_EXAMPLE["documents"]}
Shape = TypeVar("Shape", bound=PoolingFields)
Reader = Callable[[Pool, Shape, str], Awaitable[Asked]]
"""(pool, validated body, path of the route) → what the body asks for. Raises ApiError."""


async def serve(request: Request, shape: type[Shape], reader: Reader[Shape]) -> Response:
    """Read the body, and answer it with a pool that serves its model. Raises ApiError."""
    parsed = await body.read(request, shape, own_pool(request).settings.payload_limit)
    parsed.check()
    return await on_pool(request, parsed.model, partial(serve_on, request, parsed, reader))


async def serve_on(request: Request, parsed: Shape, reader: Reader[Shape], pool: Pool) -> Response:
    """Validate and submit the inputs, and respond. Raises ApiError."""
    await pool.admission.check()
    asked = await reader(pool, parsed, request.url.path)
    return await respond(request, pool, asked, parsed.priority)


@router.post(
    "/v1/embeddings",
    summary="Create embeddings",
    openapi_extra=generation_body(EmbeddingRequest, EMBEDDING_EXAMPLE),
    responses={200: {"model": EmbeddingList}},
)
async def embeddings(request: Request) -> Response:
    """Returns a vector for each input, in their order."""
    return await serve(request, EmbeddingRequest, read_embedding)


@router.post("/rerank", include_in_schema=False)
@router.post("/v2/rerank", include_in_schema=False)
@router.post(
    "/v1/rerank",
    summary="Rank documents by a query",
    openapi_extra=generation_body(RerankFields, RERANK_EXAMPLE),
    responses={200: {"model": RerankResponse}},
)
async def rerank(request: Request) -> Response:
    """Returns the documents, the best first, as Cohere, Jina and vLLM do. A reranker scores each pair; of an
    embedding model the scores are cosines.
    """
    return await serve(request, RerankFields, read_rerank)


@router.post("/score", include_in_schema=False)
@router.post(
    "/v1/score",
    summary="Score pairs of texts",
    openapi_extra=generation_body(ScoreRequest, SCORE_EXAMPLE),
    responses={200: {"model": ScoreResponse}},
)
async def score(request: Request) -> Response:
    """Returns a score for each pair (vLLM): of `text_1` with each of `text_2`, or of two lists' pairs."""
    return await serve(request, ScoreRequest, read_score)
