"""Vectors and scores in the shapes of OpenAI, Cohere and vLLM: POST /v1/embeddings, /v1/rerank and
/v1/score.
"""

from api.errors import openai
from api.http.openapi import POOLING
from api.pooling.readers import read_embedding, read_rerank, read_score
from api.pooling.render import RENDERER
from api.pooling.request_schemas import EmbeddingRequest, RerankFields, ScoreRequest
from api.pooling.response_schemas import VLLM_ERRORS, EmbeddingList, RerankResponse, ScoreResponse
from api.protocols.protocol import Protocol, described

RERANK_EXAMPLE = {
    "query": "What is the capital of France?",
    "documents": ["Paris is the capital of France.", "Bread is made of flour."],
}
EMBEDDINGS = Protocol(
    path="/v1/embeddings",
    name="embeddings",
    operation="embeddings",
    body=EmbeddingRequest,
    read=read_embedding,
    renderer=RENDERER,
    error=openai,
    streams=False,
    counts=False,
    job="vectors",
    prompt=["input"],
    in_jobs=True,
    in_batches=True,
    docs=described(
        POOLING,
        VLLM_ERRORS,
        EmbeddingRequest,
        {"input": ["The sky is blue.", "Grass is green."]},
        "Create embeddings",
        "Returns a vector for each input, in their order.",
        EmbeddingList,
    ),
)
RERANK = EMBEDDINGS._replace(
    path="/v1/rerank",
    name="rerank",
    aliases=["/rerank", "/v2/rerank"],
    body=RerankFields,
    read=read_rerank,
    prompt=["query", "documents"],
    docs=described(
        POOLING,
        VLLM_ERRORS,
        RerankFields,
        RERANK_EXAMPLE,
        "Rank documents by a query",
        "Returns the documents, the best first, as Cohere, Jina and vLLM do. A reranker scores each "
        "pair; of an "
        "embedding model the scores are cosines.",
        RerankResponse,
    ),
)
SCORE = RERANK._replace(
    path="/v1/score",
    name="score",
    aliases=["/score"],
    body=ScoreRequest,
    read=read_score,
    prompt=["text_1", "text_2"],
    docs=described(
        POOLING,
        VLLM_ERRORS,
        ScoreRequest,
        {"text_1": "What is the capital of France?", "text_2": RERANK_EXAMPLE["documents"]},
        "Score pairs of texts",
        "Returns a score for each pair (vLLM): of `text_1` with each of `text_2`, or of two lists' pairs.",
        ScoreResponse,
    ),
)
