"""Response bodies of the routes of vectors and scores, described for /docs. `api/pooling/render.py` makes
them.
"""

from typing import Literal

from api.http.openapi import Absent, ApiObject, ErrorResponses, only
from api.openai.response_schemas import ERROR_RESPONSES as OPENAI_ERRORS

Vector = list[float] | str
"""Numbers, or with `encoding_format` base64 the base64 of their float32 values."""


class PoolingUsage(ApiObject):
    """Token counts: of all inputs, with the special tokens around them."""

    prompt_tokens: int
    total_tokens: int


class Embedding(ApiObject):
    object: Literal["embedding"]
    index: int
    """Place of its input."""
    embedding: Vector


class EmbeddingList(ApiObject):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: PoolingUsage


class Score(ApiObject):
    index: int
    object: Literal["score"]
    score: float


class ScoreResponse(ApiObject):
    id: str
    object: Literal["list"]
    created: int
    """Unix time of the request, in seconds."""
    model: str
    data: list[Score]
    usage: PoolingUsage


class RankedDocument(ApiObject):
    text: str


class RankedResult(ApiObject):
    index: int
    """Place among the documents."""
    relevance_score: float
    document: RankedDocument = Absent


class RerankResponse(ApiObject):
    """The best documents first."""

    id: str
    model: str
    usage: PoolingUsage
    results: list[RankedResult]


VLLM_ERRORS: ErrorResponses = only(OPENAI_ERRORS, 400, 401, 403, 404, 408, 413, 415, 429, 500, 503)
