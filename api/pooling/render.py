"""Render: vectors and scores in the shapes of OpenAI, of text-embeddings-inference (TEI), of Cohere and vLLM.

An answer is whole: it has no frames. Its bytes are a function of its `VectorAnswer` and of its vectors.
"""

from collections.abc import Callable, Sequence
from typing import Any

import orjson

from api.http.sse import Feed
from api.json import to_json
from api.pooling.vectors import (
    Vector,
    cosine,
    probabilities,
    shaped,
    to_base64,
    values_of,
    vectors_of,
)
from api.requests.respond import AnswerRenderer, total_headers
from api.streams.http_response import Whole
from api.streams.stream import Stream
from common.messages.answer import HttpAnswer, VectorAnswer

EMBEDDINGS, POOLING, SCORE, RERANK, CLASSIFY = "embeddings", "pooling", "score", "rerank", "classify"
TEI_EMBED, TEI_EMBED_ALL, TEI_RERANK = "tei embed", "tei embed_all", "tei rerank"
TEI_PREDICT, TEI_SIMILARITY = "tei predict", "tei similarity"
RenderForm = Callable[[HttpAnswer, VectorAnswer, Sequence[Stream]], Any]


def render_frames(answer: HttpAnswer, streams: Sequence[Stream]) -> Feed[bytes]:
    """Never called: no route streams vectors."""
    raise NotImplementedError


def render_whole(answer: HttpAnswer, streams: Sequence[Stream], arrived_s: float) -> Whole:
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


def render_pooling(answer: HttpAnswer, shown: VectorAnswer, streams: Sequence[Stream]) -> dict[str, Any]:
    def data_of(stream: Stream) -> Any:
        if stream.request.logits and stream.request.logits.context:
            return [render_vector(shown, vector) for vector in vectors_of(stream)]
        return render_vector(shown, values_of(stream))

    data = [{"index": i, "object": "pooling", "data": data_of(stream)} for i, stream in enumerate(streams)]
    return vllm_head(answer, "pool") | {"data": data, "usage": render_usage(answer)}


def render_embed(answer: HttpAnswer, shown: VectorAnswer, streams: Sequence[Stream]) -> list[Any]:
    return [render_vector(shown, values_of(stream)) for stream in streams]


def render_embed_all(answer: HttpAnswer, shown: VectorAnswer, streams: Sequence[Stream]) -> list[Any]:
    return [[render_vector(shown, vector) for vector in vectors_of(stream)] for stream in streams]


# --- scores -------------------------------------------------------------------------------------------------


def scores_of(shown: VectorAnswer, streams: Sequence[Stream]) -> list[float]:
    """A score for each pair: the model's own, or the cosine of the two vectors."""
    values = [values_of(stream) for stream in streams]
    if not shown.num_queries:
        return [one[0] if shown.raw else probabilities(one)[0] for one in values]
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
    return vllm_head(answer, "score") | {"data": data, "usage": render_usage(answer)}


def render_rerank(answer: HttpAnswer, shown: VectorAnswer, streams: Sequence[Stream]) -> dict[str, Any]:
    results = [
        {"index": i, "relevance_score": score}
        | ({"document": {"text": shown.texts[i]}} if shown.texts else {})
        for i, score in ranked(scores_of(shown, streams), shown.top_n)
    ]
    usage = {"prompt_tokens": answer.num_prompt_tokens, "total_tokens": answer.num_prompt_tokens}
    return {"id": f"rerank-{answer.request_id}", "model": answer.model, "usage": usage, "results": results}


def render_ranks(answer: HttpAnswer, shown: VectorAnswer, streams: Sequence[Stream]) -> list[Any]:
    return [
        {"index": i, "score": score} | ({"text": shown.texts[i]} if shown.texts else {})
        for i, score in ranked(scores_of(shown, streams), shown.top_n)
    ]


def render_similarity(answer: HttpAnswer, shown: VectorAnswer, streams: Sequence[Stream]) -> list[float]:
    return scores_of(shown, streams)


def render_predictions(answer: HttpAnswer, shown: VectorAnswer, streams: Sequence[Stream]) -> list[Any]:
    found = []
    for stream in streams:
        scores = values_of(stream).tolist() if shown.raw else probabilities(values_of(stream))
        found.append([{"score": score, "label": shown.labels[i]} for i, score in ranked(scores, 0)])
    return found[0] if shown.is_single else found


def render_classes(answer: HttpAnswer, shown: VectorAnswer, streams: Sequence[Stream]) -> dict[str, Any]:
    data = []
    for i, stream in enumerate(streams):
        probs = values_of(stream).tolist() if shown.raw else probabilities(values_of(stream))
        best = ranked(probs, 1)[0][0]
        data.append({"index": i, "label": shown.labels[best], "probs": probs, "num_classes": len(probs)})
    return vllm_head(answer, "classify") | {"data": data, "usage": render_usage(answer)}


def vllm_head(answer: HttpAnswer, kind: str) -> dict[str, Any]:
    name = f"{kind}-{answer.request_id}"
    return {"id": name, "object": "list", "created": answer.created_s, "model": answer.model}


def render_usage(answer: HttpAnswer) -> dict[str, int]:
    return {"prompt_tokens": answer.num_prompt_tokens, "total_tokens": answer.num_prompt_tokens}


FORMS: dict[str, RenderForm] = {
    EMBEDDINGS: render_embeddings,
    POOLING: render_pooling,
    SCORE: render_score,
    RERANK: render_rerank,
    CLASSIFY: render_classes,
    TEI_EMBED: render_embed,
    TEI_EMBED_ALL: render_embed_all,
    TEI_RERANK: render_ranks,
    TEI_PREDICT: render_predictions,
    TEI_SIMILARITY: render_similarity,
}
RENDERER = AnswerRenderer(render_frames, render_whole)
