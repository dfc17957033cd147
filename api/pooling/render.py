"""Render: vectors and scores in the shapes of OpenAI, Cohere and vLLM.

An answer is whole: it has no frames. Its bytes are a function of its `VectorAnswer` and of its vectors.
"""

from collections.abc import Callable, Sequence
from typing import Any

import orjson

from api.answers.answer import HttpAnswer, VectorAnswer
from api.json import to_json
from api.pooling.vectors import (
    Vector,
    cosine,
    shaped,
    sigmoid,
    to_base64,
    values_of,
)
from api.protocols.protocol import AnswerRenderer, WholeBody
from api.requests.respond import total_headers
from api.streams.stream import Stream

EMBEDDINGS, SCORE, RERANK = "embeddings", "score", "rerank"
RenderForm = Callable[[HttpAnswer, VectorAnswer, Sequence[Stream]], Any]


def render_whole(answer: HttpAnswer, streams: Sequence[Stream], arrived_s: float) -> WholeBody:
    assert answer.vectors is not None
    content = FORMS[answer.vectors.form](answer, answer.vectors, streams)
    return to_json(content), total_headers(answer, streams, 0, arrived_s)


# --- vectors ------------------------------------------------------------------------------------------------


def render_vector(shown: VectorAnswer, vector: Vector) -> Any:
    """A vector as JSON: the shortest numbers that give its float32 values, or base64."""
    values = shaped(vector, shown.dimensions, shown.normalized)
    return to_base64(values) if shown.base64 else [short(value) for value in values]


def short(value: float) -> Any:
    """A float32 value in as few digits as tell it from its neighbours: 9 always do."""
    return orjson.Fragment(b"%.9g" % value) if value - value == 0 else None


def render_embeddings(answer: HttpAnswer, shown: VectorAnswer, streams: Sequence[Stream]) -> dict[str, Any]:
    data = [
        {"object": "embedding", "index": i, "embedding": render_vector(shown, values_of(stream))}
        for i, stream in enumerate(streams)
    ]
    return {"object": "list", "data": data, "model": answer.model, "usage": render_usage(answer)}


# --- scores -------------------------------------------------------------------------------------------------


def scores_of(shown: VectorAnswer, streams: Sequence[Stream]) -> list[float]:
    """A score for each pair: the model's own, or the cosine of the two vectors."""
    values = [values_of(stream) for stream in streams]
    if not shown.num_queries:
        return [one[0] if shown.raw else sigmoid(one[0]) for one in values]
    queries, others = values[: shown.num_queries], values[shown.num_queries :]
    queries = queries * len(others) if len(queries) == 1 else queries
    return [cosine(*pair) for pair in zip(queries, others, strict=True)]


def ranked(scores: Sequence[float], top_n: int) -> list[tuple[int, float]]:
    """(place, score), the best first, and equal ones in their order; at most `top_n`, unless that is 0."""
    order = sorted(enumerate(scores), key=lambda item: -item[1])
    return order[:top_n] if top_n else order


def render_score(answer: HttpAnswer, shown: VectorAnswer, streams: Sequence[Stream]) -> dict[str, Any]:
    scores = scores_of(shown, streams)
    data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]
    head = {"id": f"score-{answer.request_id}", "object": "list", "created": answer.created_s}
    return head | {"model": answer.model, "data": data, "usage": render_usage(answer)}


def render_rerank(answer: HttpAnswer, shown: VectorAnswer, streams: Sequence[Stream]) -> dict[str, Any]:
    results = [
        {"index": i, "relevance_score": score}
        | ({"document": {"text": shown.texts[i]}} if shown.texts else {})
        for i, score in ranked(scores_of(shown, streams), shown.top_n)
    ]
    head = {"id": f"rerank-{answer.request_id}", "model": answer.model}
    return head | {"usage": render_usage(answer), "results": results}


def render_usage(answer: HttpAnswer) -> dict[str, int]:
    return {"prompt_tokens": answer.num_prompt_tokens, "total_tokens": answer.num_prompt_tokens}


FORMS: dict[str, RenderForm] = {
    EMBEDDINGS: render_embeddings,
    SCORE: render_score,
    RERANK: render_rerank,
}
RENDERER = AnswerRenderer(None, render_whole)
