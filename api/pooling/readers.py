"""Readers: what a body of OpenAI's, Cohere's or vLLM's shape asks a pool for, over HTTP and as a job: its
requests, and what the answer shows of them.
"""

from typing import Any

from api.answers.answer import VectorAnswer
from api.errors import invalid, quoted
from api.pooling import render
from api.pooling.inputs import PooledInputs, PoolingInput, embedding_of, read_inputs
from api.pooling.pairs import read_pairs
from api.pooling.request_schemas import (
    EmbeddingRequest,
    RerankFields,
    ScoreRequest,
)
from api.protocols.openai_bodies import Prompt, read_prompts
from api.protocols.protocol import Asked, Context
from api.requests.pool import Pool
from common.pooling import PoolingConfig


async def read_embedding(parsed: EmbeddingRequest, context: Context) -> Asked:
    """Raises ApiError."""
    pool = context.pool
    own = embedding_of(pool, context.route)
    options = parsed.options(prompt_of(own, parsed.prompt_name))
    inputs = await read_inputs(pool, listed_inputs(parsed.input, "input"), options, "input")
    shown = VectorAnswer(
        render.EMBEDDINGS,
        base64=parsed.encoding_format == "base64",
        dimensions=checked_dimensions(own, parsed.dimensions),
        normalized=parsed.normalize is not False,
    )
    return asked(inputs, shown)


async def read_rerank(parsed: RerankFields, context: Context) -> Asked:
    """Raises ApiError."""
    if parsed.top_n is not None and parsed.top_n < 0:
        raise invalid(f"`top_n` must be at least 0. Given: {parsed.top_n}", "top_n")
    pool, texts, names = context.pool, parsed.texts, ("query", "documents")
    inputs, num_queries = await read_pairs(
        pool, context.route, [parsed.query], texts, names, parsed.options()
    )
    shown = VectorAnswer(
        render.RERANK,
        num_queries=num_queries,
        raw=is_raw(pool),
        top_n=parsed.top_n or 0,
        texts=[] if parsed.return_documents is False else texts,
    )
    return asked(inputs, shown)


async def read_score(parsed: ScoreRequest, context: Context) -> Asked:
    """Raises ApiError."""
    pool = context.pool
    first, second = ([one] if isinstance(one, str) else list(one) for one in (parsed.text_1, parsed.text_2))
    if len(first) not in (1, len(second)):
        raise invalid(
            f"`text_1` must be one text, or as many as `text_2` ({len(second)}). Given: {len(first)}",
            "text_1",
        )
    names = ("text_1", "text_2")
    inputs, num_queries = await read_pairs(pool, context.route, first, second, names, parsed.options())
    return asked(inputs, VectorAnswer(render.SCORE, num_queries=num_queries, raw=is_raw(pool)))


def asked(inputs: PooledInputs, shown: VectorAnswer) -> Asked:
    requests = inputs.requests
    return Asked(requests, [""] * len(requests), num_chars=inputs.num_chars, parts={"vectors": shown})


def is_raw(pool: Pool) -> bool:
    """Whether the model's own files say that its scores are shown as it computes them."""
    return pool.pooling is not None and pool.pooling.is_raw


def listed_inputs(given: Prompt, name: str) -> list[PoolingInput]:
    """The inputs of a field that has a text, token ids, or a list of either. Raises ApiError."""
    if isinstance(given, str):
        return [PoolingInput(name, text=given)]
    if not given:
        return []
    is_one = isinstance(given[0], int)
    inputs = []
    for i, one in enumerate(read_prompts(given)):
        where = name if is_one else f"{name}[{i}]"
        text_or_ids: Any = one
        inputs.append(
            PoolingInput(where, text=one) if isinstance(one, str) else PoolingInput(where, ids=text_or_ids)
        )
    return inputs


def prompt_of(pooling: PoolingConfig, name: str | None) -> str:
    """The text before each input: of the prompt that is named, or the model's default one. Raises
    ApiError.
    """
    if name is None:
        return pooling.prompts.get(pooling.default_prompt, "")
    if name not in pooling.prompts:
        known = ", ".join(sorted(pooling.prompts)) or "it has none"
        words = f"must be a prompt of the model: {known}. Given: {quoted(name)}"
        raise invalid(f"`prompt_name` {words}", "prompt_name")
    return pooling.prompts[name]


def checked_dimensions(pooling: PoolingConfig, dimensions: int | None) -> int:
    """Values that are kept of a vector; 0 keeps all. Raises ApiError."""
    if dimensions is None:
        return 0
    if not 1 <= dimensions <= pooling.size:
        raise invalid(f"`dimensions` must be 1 to {pooling.size}. Given: {dimensions}", "dimensions")
    return dimensions
