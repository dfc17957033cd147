"""Vectors and scores, in the shapes of OpenAI, Cohere and vLLM: /v1/embeddings, /v1/rerank and /v1/score."""

import math
from array import array
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import orjson
from pydantic import ConfigDict, Field
from tokenizers import Encoding, Tokenizer

from api.answers.answer import HttpAnswer, VectorAnswer
from api.errors import invalid, openai, too_long, unavailable
from api.event_loop import Pace
from api.http.body import reject_unsupported
from api.http.openapi import OPENAI_ERRORS, POOLING, Responses, Shape, only
from api.json import to_json
from api.prompts.chat_template import Rendered
from api.protocols.openai_bodies import Prompt, read_prompts
from api.protocols.protocol import Context, Protocol, Renderer, WholeBody
from api.requests.fields import (
    CACHE_SALT,
    MODEL,
    PRIORITY,
    TEXTS_OR_IDS,
    Listed,
    Priority,
    Strict,
    Truncation,
    optional,
    with_one_error,
)
from api.requests.pool import Pool
from api.requests.validate import MAX_LOGITS_BYTES, check_ids, check_most
from api.streams.stream import Stream
from common.messages.records import pack_ids
from common.messages.request import EMBED, Generate, PoolingParams, StoppingParams
from common.pooling import PoolingConfig
from common.settings.ranges import least

UNSUPPORTED: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(
        ("messages", "mm_processor_kwargs", "chat_template", "input_type", "inputs", "prompt_name"), ()
    ),
    **dict.fromkeys(("bytes_only", "stream"), (False,)),
    **dict.fromkeys(("max_tokens_per_doc", "max_tokens_per_query"), (0,)),
    "chat_template_kwargs": ({},),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "embedding_types": (["float"],),
    "images": ([],),
    "instruction": ("",),
    "padding": ("do_not_pad",),
    "rank_fields": (["text"],),
    "task": ("embed",),
}
"""Fields of vLLM and Cohere that are not served → values that are accepted."""

OneOrMore = Annotated[str | Listed[str], with_one_error("Input should be a text or a list of texts")]
TEXT: dict[str, Any] = {"type": "string", "minLength": 1}
DOCUMENTS_SCHEMA: dict[str, Any] = {
    "minItems": 1,
    "items": {"anyOf": [TEXT, {"type": "object", "required": ["text"], "properties": {"text": TEXT}}]},
}


class PoolingFields(Strict):
    """Fields of all routes of OpenAI's and vLLM's APIs that bring vectors or scores. `user` and other labels
    are accepted and have no effect.
    """

    model_config = ConfigDict(extra="allow")

    model: str | None = MODEL
    truncate_prompt_tokens: Truncation | None = optional(
        "The most tokens of an input: longer ones are cut. -1: as many as the model takes. Default: longer "
        "ones are refused.",
    )
    truncation_side: Literal["left", "right"] | None = optional(
        "From which side tokens are cut. Default: right."
    )
    add_special_tokens: bool | None = optional(
        "Add the tokens that the model expects around a text. Default: true."
    )
    use_activation: bool | None = optional(
        "Give vectors the length 1, and put scores of a reranker between 0 and 1, where its model's files do "
        "not say otherwise. Default: true."
    )
    cache_salt: str | None = CACHE_SALT
    priority: Priority | None = PRIORITY

    def check(self) -> None:
        """Raises ApiError for unsupported fields."""
        reject_unsupported(self.model_extra or {}, UNSUPPORTED, ())


class EmbeddingRequest(PoolingFields):
    """The body of /v1/embeddings."""

    input: Prompt = Field(
        description="A text, a list of texts, a list of token ids, or a list of such lists.",
        json_schema_extra=TEXTS_OR_IDS,
    )
    encoding_format: Literal["float", "base64"] | None = optional(
        "`base64`: of the little-endian float32 values; OpenAI's clients ask for it. Default: float."
    )
    dimensions: int | None = least(
        1, "Keep only the first values of each vector, as models trained for it allow (matryoshka)."
    )
    normalize: bool | None = optional("The older name of `use_activation`.")
    user: str | None = optional("Accepted, without effect.")


class ScoreRequest(PoolingFields):
    """The body of vLLM's /v1/score."""

    text_1: OneOrMore = Field(
        description="One text for all of `text_2`, or as many.", json_schema_extra={"minItems": 1}
    )
    text_2: OneOrMore = Field(description="The texts that are scored.", json_schema_extra={"minItems": 1})


class Document(Strict):
    """A document of Cohere's older form."""

    text: str


class RerankFields(PoolingFields):
    """The body of /rerank (Cohere, Jina, vLLM)."""

    query: str = Field(description="What documents are compared with.")
    documents: Listed[str | Document] = Field(
        description="Texts, or objects with a `text`.", json_schema_extra=DOCUMENTS_SCHEMA
    )
    top_n: int | None = least(0, "The best documents to return; 0 and the default return all.")
    return_documents: bool | None = optional("Return the texts, too. Default: true, as in vLLM and Jina.")


# --- response schemas ---------------------------------------------------------------------------------------


POOLING_USAGE = {"prompt_tokens": 12, "total_tokens": 12}
EMBEDDING_LIST = Shape(
    "EmbeddingList",
    {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": ([0.25, -0.5], "AACAPgAAAL8=")}],
        "model": "all-MiniLM-L6-v2",
        "usage": POOLING_USAGE,
    },
)
SCORES = Shape(
    "ScoreResponse",
    {
        "id": "score-5f0f8c0e",
        "object": "list",
        "created": 1764000000,
        "model": "ms-marco-MiniLM-L6-v2",
        "data": [{"index": 0, "object": "score", "score": 0.875}],
        "usage": POOLING_USAGE,
    },
)
RANKING = Shape(
    "RerankResponse",
    {
        "id": "rerank-5f0f8c0e",
        "model": "ms-marco-MiniLM-L6-v2",
        "usage": POOLING_USAGE,
        "results": [
            {"index": 0, "relevance_score": 0.875, "document?": {"text": "Paris is the capital of France."}}
        ],
    },
)
VLLM_ERRORS: Responses = only(OPENAI_ERRORS, 400, 401, 403, 404, 408, 413, 415, 429, 500, 503)


# --- inputs -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PoolingInput:
    """One input.

    Attributes:
        where: its name in errors, by the client's own fields.
        texts: one, or the two of a pair; empty where `ids` are given.
    """

    where: str
    texts: Sequence[str] = ()
    ids: Sequence[int] = ()


def pooling_of(context: Context) -> PoolingConfig:
    """How the model of the pool that is asked pools. Raises ApiError: 422 if it generates text; 503 if ready
    workers only generate, as those of an earlier version do.
    """
    pool = context.pool
    if pool.pooling is None:
        why = f"generates text; with RUNNER=pooling it makes vectors, which {context.route} needs"
        raise invalid(f"`{pool.settings.model_name}` {why}", "model")
    kinds = {worker.pooling for worker in pool.workers.ready}
    if kinds and pool.pooling.kind not in kinds:
        raise unavailable("no worker that is ready makes vectors or scores")
    return pool.pooling


async def ask_for(
    context: Context, inputs: Sequence[PoolingInput], body: PoolingFields, name: str, shown: VectorAnswer
) -> HttpAnswer:
    """A request for each input; `name` is that of the field that has them. Raises ApiError."""
    pool, pooling, pace = context.pool, pooling_of(context), Pace()
    most, number = pool.settings.max_concurrent_requests, len(inputs)
    if context.request is not None and number > most:
        raise invalid(f"`{name}` asks for {number} vectors: MAX_CONCURRENT_REQUESTS is {most}")
    most, cut_to = pool.workers.limits.max_input_tokens, body.truncate_prompt_tokens
    check_most("truncate_prompt_tokens", cut_to or 0, most)
    requests: list[Generate] = []
    for one in inputs:
        ids, pair_start = await encode(pool, pooling, one, body, most if cut_to == -1 else cut_to)
        if not ids:
            raise invalid(f"`{one.where}` cannot be empty")
        if len(ids) > most:
            words = f"`{one.where}` must have at most {most} tokens. Given: {len(ids)}"
            raise too_long(words, one.where, most, (len(ids), most))
        params = PoolingParams(pair_start)
        request = Generate(
            request_id="",
            digest="",
            prompt_ids=pack_ids(ids),
            stopping=StoppingParams(max_new_tokens=1),
            logits=params.logits(pooling.size),
            pooling=params,
            cache_salt=body.cache_salt or "",
        )
        requests.append(request)
        await pace.step()
    need, most = sum(request.logits_bytes for request in requests), MAX_LOGITS_BYTES
    if need > most:
        raise invalid(f"`{name}` may have at most {most} bytes of vectors. Given: {need} bytes")
    num_chars = sum(map(len, (text for one in inputs for text in one.texts)))
    return context.answer(requests, [""] * len(requests), num_chars, vectors=shown)


# --- token ids ----------------------------------------------------------------------------------------------


async def encode(
    pool: Pool,
    pooling: PoolingConfig,
    one: PoolingInput,
    body: PoolingFields,
    cut_to: int | None,
) -> tuple[list[int], int]:
    """Token ids of an input, and where the second text of a pair begins, 0 for none. Raises ApiError."""
    if not one.texts:
        check_ids(one.where, one.ids, min(pool.tokenizer.size, pool.tokenizer.num_embedded))
        kept = len(one.ids) if cut_to is None else min(cut_to, len(one.ids))
        return [*(one.ids[:kept] if body.truncation_side != "left" else one.ids[len(one.ids) - kept :])], 0
    if one.texts == [""]:
        raise invalid(f"`{one.where}` cannot be empty")
    texts = [text.lower() for text in one.texts] if pooling.lowers else one.texts
    backend = pool.tokenizer.backend
    whole = Rendered("".join(texts))  # says only how much work it is
    ids, second = await pool.tokenizer.run(whole, lambda: encode_texts(backend, texts, body, cut_to))
    check_ids(one.where, ids, pool.tokenizer.num_embedded)
    return ids, second


def encode_texts(
    backend: Tokenizer, texts: Sequence[str], body: PoolingFields, cut_to: int | None
) -> tuple[list[int], int]:
    """Token ids of a text or a pair, with the special tokens around what is left of it when it is cut."""
    adds_special = body.add_special_tokens is not False
    encodings: list[Encoding] = backend.encode_batch(texts, add_special_tokens=False)
    if cut_to is not None:
        added = backend.num_special_tokens_to_add(len(texts) > 1) if adds_special else 0
        lengths = kept_lengths([len(one.ids) for one in encodings], max(0, cut_to - added))
        for one, length in zip(encodings, lengths, strict=True):
            one.truncate(length, direction=body.truncation_side or "right")
    first, second = encodings[0], encodings[1] if len(texts) > 1 else None
    whole = backend.post_process(first, second, add_special_tokens=adds_special)
    ids: list[int] = whole.ids
    return ids, next((place for place, kind in enumerate(whole.type_ids) if kind == 1), 0)


def kept_lengths(lengths: Sequence[int], room: int) -> list[int]:
    """Lengths to which a text, or a pair, is cut: of a pair the longer one first, as transformers cuts it."""
    if len(lengths) == 1:
        return [min(lengths[0], room)]
    short, long = min(lengths), max(lengths)
    if short + long > room:
        long = max(short, room - short)
    if short + long > room:
        short, long = room // 2, room - room // 2
    return [short, long] if lengths[0] <= lengths[1] else [long, short]


# --- pairs --------------------------------------------------------------------------------------------------


async def ask_for_pairs(
    context: Context,
    queries: Sequence[str],
    others: Sequence[str],
    names: tuple[str, str],
    body: PoolingFields,
    shown: VectorAnswer,
) -> HttpAnswer:
    """The requests for scores of pairs. An embedding model computes both sides once, and their cosines are
    the scores; a reranker computes each pair. Raises ApiError.

    Args:
        queries: one for all `others`, or as many as they are.
        names: of the fields of both.
    """
    pooling = pooling_of(context)
    context.check_number(len(others), names[1])
    if pooling.kind == EMBED:
        sides = [
            PoolingInput(f"{name}[{i}]", [text])
            for name, texts in zip(names, (queries, others), strict=True)
            for i, text in enumerate(texts)
        ]
        return await ask_for(context, sides, body, names[1], replace(shown, num_queries=len(queries)))
    firsts = [*queries] * len(others) if len(queries) == 1 else queries
    pairs = [
        PoolingInput(f"{names[1]}[{i}]", pair) for i, pair in enumerate(zip(firsts, others, strict=True))
    ]
    is_raw = pooling.is_raw or body.use_activation is False
    return await ask_for(context, pairs, body, names[1], replace(shown, raw=is_raw))


Vector = Sequence[float]


def values_of(stream: Stream) -> "array[float]":
    """All values that a stream has, little-endian float32 on the wire."""
    values = array("f")
    values.frombytes(stream.logits or b"")
    return values


def shaped(vector: Vector, dimensions: int, normalized: bool) -> "array[float]":
    """The first `dimensions` values of a vector, 0 for all, and of length 1 if it is to be `normalized`."""
    kept = vector[:dimensions] if dimensions else vector
    length = length_of(kept) if normalized else 1.0
    return array("f", kept) if length in (0.0, 1.0) else array("f", [value / length for value in kept])


def length_of(vector: Vector) -> float:
    return math.sqrt(math.fsum(value * value for value in vector))


def cosine(one: Vector, other: Vector) -> float:
    lengths = length_of(one) * length_of(other)
    return math.fsum(a * b for a, b in zip(one, other, strict=True)) / lengths if lengths else 0.0


def sigmoid(score: float) -> float:
    return 1 / (1 + math.exp(-score)) if score >= 0 else math.exp(score) / (1 + math.exp(score))


AS_EMBEDDINGS, AS_SCORE, AS_RERANK = "embeddings", "score", "rerank"


class VectorRenderer(Renderer):
    def whole(self) -> WholeBody:
        answer, shown, num_prompt = self.answer, self.answer.vectors, self.answer.num_prompt_tokens
        assert shown is not None
        usage = {"prompt_tokens": num_prompt, "total_tokens": num_prompt}
        content: dict[str, Any] = {"model": answer.model, "usage": usage}
        if shown.form != AS_EMBEDDINGS:
            content["id"] = f"{shown.form}-{answer.request_id}"
        if shown.form == AS_RERANK:
            ranked = sorted(enumerate(scores_of(shown, self.streams)), key=lambda item: -item[1])
            content["results"] = [
                {"index": i, "relevance_score": score}
                | ({"document": {"text": shown.texts[i]}} if shown.texts else {})
                for i, score in (ranked[: shown.top_n] if shown.top_n else ranked)
            ]
        elif shown.form == AS_SCORE:
            scores = enumerate(scores_of(shown, self.streams))
            data = [{"index": i, "object": "score", "score": score} for i, score in scores]
            content |= {"object": "list", "created": answer.created_s, "data": data}
        else:
            vectors = (shown_values(shown, values_of(stream)) for stream in self.streams)
            data = [{"object": "embedding", "index": i, "embedding": one} for i, one in enumerate(vectors)]
            content |= {"object": "list", "data": data}
        return to_json(content), 0


def shown_values(shown: VectorAnswer, vector: Vector) -> Any:
    """A vector as JSON: the shortest numbers that give its float32 values, or base64."""
    values = shaped(vector, shown.dimensions, shown.normalized)
    return b64encode(values.tobytes()).decode() if shown.base64 else [short(value) for value in values]


def short(value: float) -> Any:
    """A float32 value in as few digits as tell it from its neighbours: 9 always do."""
    return orjson.Fragment(b"%.9g" % value) if value - value == 0 else None


def scores_of(shown: VectorAnswer, streams: Sequence[Stream]) -> list[float]:
    """A score for each pair: the model's own, or the cosine of the two vectors."""
    values = [values_of(stream) for stream in streams]
    if not shown.num_queries:
        return [one[0] if shown.raw else sigmoid(one[0]) for one in values]
    queries, others = values[: shown.num_queries], values[shown.num_queries :]
    queries = queries * len(others) if len(queries) == 1 else queries
    return [cosine(*pair) for pair in zip(queries, others, strict=True)]


async def read_embedding(parsed: EmbeddingRequest, context: Context) -> HttpAnswer:
    """Raises ApiError."""
    own, name = pooling_of(context), context.pool.settings.model_name
    if own.kind != EMBED:
        raise invalid(f"`{name}` is {own.label}, and {context.route} needs an embedding model", "model")
    check_most("dimensions", dimensions := parsed.dimensions or 0, own.size)
    shown = VectorAnswer(
        AS_EMBEDDINGS,
        base64=parsed.encoding_format == "base64",
        dimensions=dimensions,
        normalized=False not in (parsed.normalize, parsed.use_activation),
    )
    inputs = listed_inputs(parsed.input, "input")
    context.check_number(len(inputs), "input")
    return await ask_for(context, inputs, parsed, "input", shown)


async def read_rerank(parsed: RerankFields, context: Context) -> HttpAnswer:
    """Raises ApiError."""
    texts = [one if isinstance(one, str) else one.text for one in parsed.documents]
    given = [] if parsed.return_documents is False else texts
    shown = VectorAnswer(AS_RERANK, top_n=parsed.top_n or 0, texts=given)
    names = ("query", "documents")
    return await ask_for_pairs(context, [parsed.query], texts, names, parsed, shown)


async def read_score(parsed: ScoreRequest, context: Context) -> HttpAnswer:
    """Raises ApiError."""
    first, second = ([one] if isinstance(one, str) else list(one) for one in (parsed.text_1, parsed.text_2))
    if len(first) not in (1, len(second)):
        raise invalid(
            f"`text_1` must be one text, or as many as `text_2` ({len(second)}). Given: {len(first)}"
        )
    names = ("text_1", "text_2")
    return await ask_for_pairs(context, first, second, names, parsed, VectorAnswer(AS_SCORE))


def listed_inputs(given: Prompt, name: str) -> list[PoolingInput]:
    """The inputs of a field that has a text, token ids, or a list of either."""
    inputs: Any = read_prompts(given)
    places = [f"{name}[{i}]" for i in range(len(inputs))] if inputs is given else [name]
    return [
        PoolingInput(place, [one]) if isinstance(one, str) else PoolingInput(place, ids=one)
        for place, one in zip(places, inputs, strict=True)
    ]


RERANK_EXAMPLE = {
    "query": "What is the capital of France?",
    "documents": ["Paris is the capital of France.", "Bread is made of flour."],
}
EMBEDDINGS = Protocol(
    path="/v1/embeddings",
    name="embeddings",
    instead_of=["/embed", "/embed_all", "/embed_sparse", "/pooling"],
    operation="embeddings",
    body=EmbeddingRequest,
    read=read_embedding,
    renderer=VectorRenderer,
    error=openai,
    streams=False,
    span="embed",
    job="vectors",
    prompt=["input"],
    in_jobs=True,
    in_batches=True,
    tag=POOLING,
    errors=VLLM_ERRORS,
    example={"input": ["The sky is blue.", "Grass is green."]},
    summary="Create embeddings",
    description="Returns a vector for each input, in their order.",
    whole=EMBEDDING_LIST,
)
RERANK = EMBEDDINGS._replace(
    path="/v1/rerank",
    name="rerank",
    aliases=["/rerank", "/v2/rerank"],
    instead_of=["/predict", "/similarity", "/classify"],
    body=RerankFields,
    read=read_rerank,
    prompt=["query", "documents"],
    example=RERANK_EXAMPLE,
    summary="Rank documents by a query",
    description=(
        "Returns the documents, the best first, as Cohere, Jina and vLLM do. A reranker scores each pair; "
        "of an embedding model the scores are cosines."
    ),
    whole=RANKING,
)
SCORE = RERANK._replace(
    path="/v1/score",
    name="score",
    aliases=["/score"],
    body=ScoreRequest,
    read=read_score,
    prompt=["text_1", "text_2"],
    example={"text_1": "What is the capital of France?", "text_2": RERANK_EXAMPLE["documents"]},
    summary="Score pairs of texts",
    description=(
        "Returns a score for each pair (vLLM): of `text_1` with each of `text_2`, or of two lists' pairs."
    ),
    whole=SCORES,
)
