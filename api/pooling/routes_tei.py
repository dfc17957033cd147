"""Routes of text-embeddings-inference (TEI): POST /embed, /embed_all, /rerank, /predict and /similarity.

/rerank takes Cohere's body, too: vLLM and others have that route.
"""

from functools import partial
from typing import TypeVar

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from api.errors import invalid
from api.http import body
from api.http.openapi import POOLING
from api.pooling import render
from api.pooling.inputs import PoolingInput, classifier_of, embedding_of, read_inputs
from api.pooling.pairs import read_pairs
from api.pooling.readers import Asked, checked_dimensions, listed_inputs, prompt_of, read_rerank
from api.pooling.request_schemas import (
    EmbedAllRequest,
    EmbedRequest,
    PredictInputs,
    PredictRequest,
    RerankFields,
    SimilarityParameters,
    SimilarityRequest,
    TeiRerankRequest,
)
from api.pooling.respond import respond
from api.pooling.response_schemas import TEI_ROUTE_ERRORS, Prediction, Rank, RerankResponse
from api.pooling.routes_openai import serve_on
from api.requests.on_pool import on_pool, own_pool
from api.requests.pool import Pool
from api.requests.service_terms import generation_body
from common.messages.answer import VectorAnswer

router = APIRouter(responses=TEI_ROUTE_ERRORS, tags=[POOLING])
EMBED_EXAMPLE = {"inputs": ["The sky is blue.", "Grass is green."]}
RERANK_EXAMPLE = {"query": "What is Deep Learning?", "texts": ["Deep Learning is not…", "Deep learning is…"]}
PREDICT_EXAMPLE = {"inputs": "I like you."}
SIMILARITY_EXAMPLE = {
    "inputs": {"source_sentence": "What is Deep Learning?", "sentences": ["What is Machine Learning?"]}
}
Shape = TypeVar("Shape", bound=BaseModel)


async def read(request: Request, shape: type[Shape]) -> Shape:
    return await body.read(request, shape, own_pool(request).settings.payload_limit)


@router.post(
    "/embed",
    summary="Embed texts",
    openapi_extra=generation_body(EmbedRequest, EMBED_EXAMPLE),
    responses={200: {"model": list[list[float]]}},
)
async def embed(request: Request) -> Response:
    """Returns a vector for each input, in their order."""
    parsed = await read(request, EmbedRequest)
    return await on_pool(request, None, partial(embed_on, request, parsed))


@router.post(
    "/embed_all",
    summary="Embed each token of texts",
    openapi_extra=generation_body(EmbedAllRequest, EMBED_EXAMPLE),
    responses={200: {"model": list[list[list[float]]]}},
)
async def embed_all(request: Request) -> Response:
    """Returns for each input the vectors of its tokens, before they are pooled and normalised."""
    parsed = await read(request, EmbedAllRequest)
    return await on_pool(request, None, partial(embed_on, request, parsed))


async def embed_on(request: Request, parsed: EmbedAllRequest, pool: Pool) -> Response:
    """Validate and submit the inputs, and respond. Raises ApiError."""
    await pool.admission.check()
    own, each_token = embedding_of(pool, request.url.path), not isinstance(parsed, EmbedRequest)
    if each_token and own.dense:
        raise invalid(f"`{pool.settings.model_name}` has linear layers after its pooling", "model")
    options = parsed.options(prompt_of(own, parsed.prompt_name), each_token)
    inputs = await read_inputs(pool, listed_inputs(parsed.inputs, "inputs"), options, "inputs")
    shown = VectorAnswer(render.TEI_EMBED_ALL, normalized=False)
    if isinstance(parsed, EmbedRequest):
        dimensions = checked_dimensions(own, parsed.dimensions)
        normalized = parsed.normalize is not False
        shown = VectorAnswer(render.TEI_EMBED, dimensions=dimensions, normalized=normalized)
    return await respond(request, pool, Asked(inputs, shown))


@router.post(
    "/rerank",
    summary="Rank texts by a query",
    openapi_extra=generation_body(TeiRerankRequest, RERANK_EXAMPLE),
    responses={200: {"model": list[Rank] | RerankResponse}},
)
async def tei_rerank(request: Request) -> Response:
    """Returns the texts' places and scores, the best first. A body with `documents` is answered as by
    `/v1/rerank`.
    """
    data = await body.read_json(request, own_pool(request).settings.payload_limit)
    if "documents" in await body.names_in(data):
        cohere = body.parse_body(RerankFields, data)
        cohere.check()
        return await on_pool(request, cohere.model, partial(serve_on, request, cohere, read_rerank))
    parsed = body.parse_body(TeiRerankRequest, data)
    return await on_pool(request, None, partial(rank_on, request, parsed))


async def rank_on(request: Request, parsed: TeiRerankRequest, pool: Pool) -> Response:
    """Validate and submit the pairs, and respond. Raises ApiError."""
    await pool.admission.check()
    names = ("query", "texts")
    inputs, num_queries = await read_pairs(
        pool, "/rerank", [parsed.query], parsed.texts, names, parsed.options()
    )
    shown = VectorAnswer(
        render.TEI_RERANK,
        num_queries=num_queries,
        raw=bool(parsed.raw_scores),
        texts=parsed.texts if parsed.return_text else [],
    )
    return await respond(request, pool, Asked(inputs, shown))


@router.post(
    "/predict",
    summary="Classify texts or pairs of texts",
    openapi_extra=generation_body(PredictRequest, PREDICT_EXAMPLE),
    responses={200: {"model": list[Prediction] | list[list[Prediction]]}},
)
async def predict(request: Request) -> Response:
    """Returns the labels and their scores, the best first: of one input, or of each input of a list."""
    parsed = await read(request, PredictRequest)
    return await on_pool(request, None, partial(predict_on, request, parsed))


async def predict_on(request: Request, parsed: PredictRequest, pool: Pool) -> Response:
    """Validate and submit the inputs, and respond. Raises ApiError."""
    await pool.admission.check()
    own, (inputs, is_single) = classifier_of(pool, "/predict"), predict_inputs(parsed.inputs)
    read_all = await read_inputs(pool, inputs, parsed.options(), "inputs")
    shown = VectorAnswer(
        render.TEI_PREDICT, raw=bool(parsed.raw_scores), labels=list(own.labels), is_single=is_single
    )
    return await respond(request, pool, Asked(read_all, shown))


def predict_inputs(given: PredictInputs) -> tuple[list[PoolingInput], bool]:
    """The inputs, and whether it is one, and no list. Raises ApiError."""
    if isinstance(given, str):
        return [PoolingInput("inputs", text=given)], True
    if given and all(isinstance(one, str) for one in given):
        if len(given) != 2:
            raise invalid(
                f"`inputs` must be a text, a pair of texts, or a list of lists. Given: {len(given)} texts",
                "inputs",
            )
        return [PoolingInput("inputs", text=str(given[0]), pair=str(given[1]))], True
    inputs = []
    for i, one in enumerate(given):
        texts, where = [one] if isinstance(one, str) else one, f"inputs[{i}]"
        if len(texts) not in (1, 2):
            raise invalid(f"`{where}` must have one or two texts. Given: {len(texts)}", where)
        inputs.append(PoolingInput(where, text=texts[0], pair=texts[1] if len(texts) == 2 else None))
    return inputs, False


@router.post(
    "/similarity",
    summary="Compare a sentence with others",
    openapi_extra=generation_body(SimilarityRequest, SIMILARITY_EXAMPLE),
    responses={200: {"model": list[float]}},
)
async def similarity(request: Request) -> Response:
    """Returns the cosine of the sentence's vector and that of each other one, in their order."""
    parsed = await read(request, SimilarityRequest)
    return await on_pool(request, None, partial(compare_on, request, parsed))


async def compare_on(request: Request, parsed: SimilarityRequest, pool: Pool) -> Response:
    """Validate and submit the sentences, and respond. Raises ApiError."""
    await pool.admission.check()
    own, parameters = embedding_of(pool, "/similarity"), parsed.parameters or SimilarityParameters()
    options = parameters.options(prompt_of(own, parameters.prompt_name))
    names = ("inputs.source_sentence", "inputs.sentences")
    sentences = parsed.inputs.sentences
    inputs, num_queries = await read_pairs(
        pool, "/similarity", [parsed.inputs.source_sentence], sentences, names, options
    )
    shown = VectorAnswer(render.TEI_SIMILARITY, num_queries=num_queries)
    return await respond(request, pool, Asked(inputs, shown))
